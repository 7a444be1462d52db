"""`check_env` passes what keeps the contract, and finds each promise that an environment breaks, with its line."""

import inspect
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import gymnasium
import pytest
import trio
from each_case import each_case

import agentrl
from agentrl.env import Env
from agentrl.env.checks.check_env import EnvReport
from agentrl.env.checks.checks import runs_eight_at_once
from agentrl.errors import EnvCheckFailed, UsageError
from agentrl.registration import register

GO = {"role": "user", "content": "go"}


class Good(Env):
    """Keeps every promise, snapshots included. What follows breaks one each."""

    blocking = False
    replayable = True

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = int(self.np_random.integers(100))
        return (dict(GO, content=str(self.count)),), {}

    def step(self, action):
        self.count += len(action) + 1
        return (dict(GO, content=str(self.count)),), 0.0, self.count % 7 == 0, False, {"count": self.count}

    async def snapshot(self):
        return str(self.count).encode()

    async def restore(self, snapshot):
        self.count = int(snapshot)


def report(cls, **kwargs) -> EnvReport:
    return agentrl.check_env(cls, raises=False, **{"deadline_s": 20, **kwargs})


def test_what_keeps_the_contract_passes_and_says_what_was_checked():
    result = agentrl.check_env(Good)
    assert result and not result.findings and not result.skipped
    assert len(result.checks) == 12 and str(result) == "Good: 12 checks, 0 findings"


@each_case("what", ["agentrl/Calculator-v0", "instance", "made", "wrapped"])
def test_ids_instances_and_wrapped_environments_are_taken(what):
    if what == "instance":
        what = Good()
    elif what in ("made", "wrapped"):
        register("test_checker/Good-v0", Good)
        what = agentrl.make("test_checker/Good-v0")
    assert report(what)


def test_what_is_no_environment_is_refused():
    class Needs(Good):
        def __init__(self, size):
            self.size = size

    with pytest.raises(UsageError, match="a function that makes a Needs"):
        agentrl.check_env(Needs(3))
    assert report(lambda: Needs(3))
    with pytest.raises(UsageError, match="not 3"):
        agentrl.check_env(3)


# --- one broken promise each


class CannotReset(Good):
    def reset(self, *, seed=None, options=None):
        raise FileNotFoundError("no map")


class NoSeed(Good):
    def reset(self, *, seed=None, options=None):
        self.count = 1
        return (dict(GO),), {}


class SharesItsObservation(Good):
    def step(self, action):
        return (GO,), 0.0, False, False, {}


class BadTool(Good):
    def tool_schemas(self):
        return [{"name": "not good", "parameters": {"type": "odd"}}, {"name": "not good", "description": "x"}]


class ForgetsToClear(Good):
    def reset(self, *, seed=None, options=None):
        Env.reset(self, seed=seed)
        self.count = getattr(self, "count", 3)
        return (dict(GO, content=str(self.count)),), {}


_clock = itertools.count()


class ReadsAClock(Good):
    def step(self, action):
        return (dict(GO, content=str(next(_clock))),), 0.0, False, False, {}


class NotPlain(Good):
    def step(self, action):
        info = {"outcome": "high", "success": 1, "stop_reason": "tired", "history": "none", "pair": (1, 2)}
        info |= {"masked": 1, "rewards": {"ann": "1"}, "role": 2, "unsettled": None}
        return [dict(GO)], float("nan"), 1, False, info


class InfoHoldsAnObject(Good):
    def step(self, action):
        return (dict(GO),), 0.0, False, False, {"env": {1, 2}}


class ClosesOnce(Good):
    def close(self):
        if getattr(self, "closed", False):
            raise OSError("already closed")
        self.closed = True


class HangsWhenCancelled(Env):
    async def areset(self, *, seed=None, options=None):
        await super().areset(seed=seed)
        return (dict(GO),), {}

    async def astep(self, action):
        try:
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await trio.sleep_forever()
        return (dict(GO),), 0.0, False, False, {}


class SharesState(Good):
    count_of_all = 0

    def reset(self, *, seed=None, options=None):
        SharesState.count_of_all = 0
        return super().reset(seed=seed)

    def step(self, action):
        SharesState.count_of_all += 1
        return (dict(GO, content=str(SharesState.count_of_all)),), 0.0, False, False, {}


class TrustsItsReader(Good):
    def step(self, action):
        int(action.count("[") and "x")
        return super().step(action)


class LeavesAFile(Good):
    def reset(self, *, seed=None, options=None):
        self.file = tempfile.NamedTemporaryFile(delete=False)  # noqa: SIM115
        return super().reset(seed=seed)


class LeavesAProcess(Good):
    started = []  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        self.started.append(subprocess.Popen(["sleep", "300"]))
        return super().reset(seed=seed)


class LeavesADaemon(Good):
    """Its parent has ended, so it is nobody's child."""

    started = []  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        forks = "sleep 300 </dev/null >/dev/null 2>&1 & echo $!"
        reply = subprocess.run(["setsid", "sh", "-c", forks], stdout=subprocess.PIPE, check=True)
        self.started.append(int(reply.stdout))
        return super().reset(seed=seed)


class LeavesAThread(Good):
    found = threading.Event()

    def reset(self, *, seed=None, options=None):
        threading.Thread(target=self.found.wait, args=(300,), daemon=True, name="mine").start()
        return super().reset(seed=seed)


class LeavesADescriptor(Good):
    kept = []  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        self.kept.extend(os.pipe())
        return super().reset(seed=seed)


class HalfASnapshot(Good):
    async def restore(self, snapshot):
        self.count = 5


BROKEN = [
    (CannotReset, "can_start", "reset raised FileNotFoundError: no map", "raise FileNotFoundError"),
    (NoSeed, "follows_gymnasium", "super().reset(seed=seed)", "def reset"),
    (SharesItsObservation, "follows_gymnasium", "share an object", "def step"),
    (BadTool, "offers_valid_tools", "tool name 'not good'", "class BadTool"),
    (BadTool, "offers_valid_tools", "has no description", "class BadTool"),
    (BadTool, "offers_valid_tools", "'odd' is not valid", "class BadTool"),
    (BadTool, "offers_valid_tools", "tools share a name", "def tool_schemas"),
    (ForgetsToClear, "replays_equally", "an instance that has played before", "def reset"),
    (ReadsAClock, "replays_equally", "turn 0 on a fresh instance was answered differently", "def step"),
    (NotPlain, "gives_plain_records", "observation: a list, not a tuple", "def step"),
    (NotPlain, "gives_plain_records", "reward = nan", "def step"),
    (NotPlain, "gives_plain_records", "terminated = 1", "def step"),
    (NotPlain, "gives_plain_records", "info['outcome'] = 'high'", "def step"),
    (NotPlain, "gives_plain_records", "info['success'] = 1", "def step"),
    (NotPlain, "gives_plain_records", "info['stop_reason'] = 'tired'", "def step"),
    (NotPlain, "gives_plain_records", "info['history'] = 'none'", "def step"),
    (NotPlain, "gives_plain_records", "info['masked'] = 1", "def step"),
    (NotPlain, "gives_plain_records", "info['rewards'] = {'ann': '1'}", "def step"),
    (NotPlain, "gives_plain_records", "info['role'] = 2", "def step"),
    (NotPlain, "gives_plain_records", "info['unsettled'] = None", "def step"),
    (NotPlain, "gives_plain_records", "info changes on its way through JSON", "def step"),
    (InfoHoldsAnObject, "gives_plain_records", "info is not JSON-safe", "def step"),
    (ClosesOnce, "closes_again", "close raised OSError: already closed", "raise OSError"),
    (HangsWhenCancelled, "survives_cancellation", "no answer within 3 s", "def astep"),
    (SharesState, "runs_eight_at_once", "beside seven others", "def step"),
    (TrustsItsReader, "answers_any_text", "the action '[' raised ValueError", "int(action"),
    (LeavesAFile, "leaves_nothing", "file /", "class LeavesAFile"),
    (LeavesAProcess, "leaves_nothing", "process ", "class LeavesAProcess"),
    (LeavesADaemon, "leaves_nothing", "(sleep)", "class LeavesADaemon"),
    (LeavesAThread, "leaves_nothing", "thread mine", "class LeavesAThread"),
    (LeavesADescriptor, "leaves_nothing", "descriptor pipe", "class LeavesADescriptor"),
    (HalfASnapshot, "restores_snapshots", "after the restore was answered differently", "async def snapshot"),
]
_reports: dict[type, EnvReport] = {}


@pytest.mark.medium
@each_case(("cls", "check", "problem", "line"), BROKEN)
def test_a_broken_promise_is_found_and_placed(cls, check, problem, line, monkeypatch):
    if check != "answers_any_text":
        monkeypatch.setattr("agentrl.env.checks.checks.FUZZ_EXAMPLES", 1)
    else:
        monkeypatch.setattr("agentrl.env.checks.checks.FUZZ_EXAMPLES", 200)
    monkeypatch.setattr("agentrl.env.checks.checks.LEAK_PATIENCE_S", 0.3)
    if cls not in _reports:
        _reports[cls] = report(cls, deadline_s=3 if cls is HangsWhenCancelled else 120)
    while LeavesAProcess.started:
        with LeavesAProcess.started.pop() as process:
            process.kill()
    while LeavesADaemon.started:
        os.kill(LeavesADaemon.started.pop(), signal.SIGKILL)
    if cls is LeavesAThread:
        cls.found.set()
    result = _reports[cls]
    found = [finding for finding in result.findings if finding.check == check and problem in finding.problem]
    assert found, str(result)
    path, _, number = found[0].where.rpartition(":")
    assert path == inspect.getsourcefile(cls)
    assert line in inspect.getsource(sys.modules[__name__]).splitlines()[int(number) - 1]
    assert found[0].hint in str(result)


class Ungraded(agentrl.ToolEnv):
    replayable = True
    blocking = False

    def prompt(self, task):
        return "go"


class GradesNothing(Ungraded):
    def grade(self):
        self.right = True


def run_the_tests() -> str:
    """Run the tests."""
    return f"Ran 3 tests in {next(_clock) / 1000:.3f}s\nOK"


class PrintsATime(GradesNothing):
    @agentrl.tool
    def run_tests(self) -> str:
        """Run the tests."""
        return run_the_tests()

    def grade(self):
        return True


class LendsATool(PrintsATime):
    run_tests = None

    def __init__(self):
        super().__init__(tools=[run_the_tests])


class NeverStarts(Env):
    async def areset(self, *, seed=None, options=None):
        await trio.sleep_forever()

    async def astep(self, action):
        return (dict(GO),), 0.0, False, False, {}


class FewParts(Good):
    def step(self, action):
        return (), 0.0, True, {}


class GradesBadly(agentrl.ToolEnv):
    """Sixteen turns, more than are played: its grade is asked for only where a limit of the run ends the episode."""

    def prompt(self, task):
        return "go"

    def grade(self):
        return "good"


class NoDocstring(GradesBadly):
    @agentrl.tool
    def look(self, at: int): ...


@pytest.mark.medium
@each_case(
    ("cls", "check", "problem", "line"),
    [
        (FewParts, "can_start", "step returned 4 values: return (messages, reward, term", "def step"),
        (
            GradesBadly,
            "gives_plain_records",
            "aend raised UsageError: GradesBadly.grade returned 'good'",
            "def grade",
        ),
        (Ungraded, "grades_each_end", "an episode ended without an outcome: grade is not written", "class Ungraded"),
        (GradesNothing, "grades_each_end", "an episode ended without an outcome: grade returned None", "def grade"),
        (PrintsATime, "replays_equally", "differs only in a time that was printed", "def run_tests"),
        (LendsATool, "replays_equally", "differs only in a time that was printed", "def run_the_tests"),
        (NeverStarts, "can_start", "reset raised TimeoutError: no answer within 1 s", "def areset"),
        (NoDocstring, "can_start", "tool 'NoDocstring.look' needs a docstring", "class NoDocstring"),
    ],
)
def test_what_a_beginner_writes_is_found_and_placed_in_the_beginners_file(cls, check, problem, line):
    result = report(cls, deadline_s=1 if cls is NeverStarts else 20)
    found = next(each for each in result.findings if each.check == check)
    path, _, number = found.where.rpartition(":")
    assert problem in found.problem and path == __file__
    lines = inspect.getsource(sys.modules[__name__]).splitlines()[int(number) - 1 :]
    assert line in lines[lines[0].strip().startswith("@")]  # a function begins with its decorator


def test_an_outcome_may_be_left_to_the_run():
    class Left(Ungraded):
        graded = False

    assert report(Left)


@pytest.mark.medium
def test_many_plays_of_a_slow_environment_have_the_time_of_many(monkeypatch):
    class Slow(Good):
        def reset(self, *, seed=None, options=None):
            time.sleep(0.15)
            return super().reset(seed=seed)

    monkeypatch.setattr("agentrl.env.checks.check_env.CHECKS", (runs_eight_at_once,))
    assert report(Slow, deadline_s=1)


def test_findings_raise_with_the_whole_report():
    with pytest.raises(EnvCheckFailed, match=r"CannotReset: 1 checks, 1 findings\n  can_start: .*no map") as caught:
        agentrl.check_env(CannotReset)
    assert caught.value.exit_code == 2


def test_an_unpromised_replay_is_said_not_found():
    class Unpromised(ReadsAClock):
        replayable = False

    result = report(Unpromised)
    assert not any(finding.check == "replays_equally" for finding in result.findings)
    assert any("replayable is False" in reason for reason in result.skipped)


def test_actions_of_the_author_are_played():
    played = []

    class Listens(Good):
        def step(self, action):
            played.append(action)
            return super().step(action)

    assert report(Listens, actions=["one", "two"])
    assert "one" in played and "two" in played


def test_the_private_temporary_folder_is_given_back():
    before = (tempfile.gettempdir(), os.environ.get("TMPDIR"))
    report(CannotReset)
    assert (tempfile.gettempdir(), os.environ.get("TMPDIR")) == before


class OtherPeoples(gymnasium.Env):
    action_space = gymnasium.spaces.Text(100)
    observation_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return str(self.np_random.integers(100)), {}

    def step(self, action):
        return "x", 0.0, False, False, {}


def test_a_plain_gymnasium_env_is_checked_as_it_is_driven():
    result = report(OtherPeoples)
    assert result, str(result)
