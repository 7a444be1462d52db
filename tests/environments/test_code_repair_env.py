"""The environment, its boxes and its rewards. Wherever bubblewrap works, code really runs in it."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import gymnasium
import pytest
import trio
import trio.testing

import agentrl
from agentrl.env.checks.oracles import judge as play_oracles
from agentrl.errors import ConfigError, HostBusy
from agentrl.protocols import ExecResult, SandboxSpec
from agentrl_environments.code_repair import CodeRepair, make_task
from agentrl_environments.code_repair.demonstrations import call, demonstrate
from agentrl_environments.code_repair.running import Runner, Values, parse
from agentrl_environments.code_repair.tasks import evaluate

pytestmark = pytest.mark.bubblewrap


@asynccontextmanager
async def repairing(seed: int, **kwargs: object) -> AsyncIterator[CodeRepair]:
    environment = CodeRepair(**kwargs)  # type: ignore[arg-type]
    try:
        await environment.areset(seed=seed)
        yield environment
    finally:
        await environment.aclose()


@pytest.fixture
async def runner() -> AsyncIterator[Runner]:
    from agentrl.sandbox import backend

    boxes = backend("bubblewrap")
    yield Runner(boxes)
    await boxes.aclose()


@pytest.mark.medium
async def test_demonstrations_and_environment_say_the_same() -> None:
    """What the expert was told in-process is what the boxes answer, word for word, and the grade agrees."""
    for seed in range(12):
        task = make_task(seed, "held_out")
        demonstration = demonstrate(task, random.Random(seed), skill=0.4)
        environment = CodeRepair(split="held_out")
        opening, _ = await environment.areset(seed=seed)
        assert opening == demonstration.opening
        info: dict[str, object] = {}
        for says, answers in demonstration.turns:
            observation, _, terminated, truncated, info = await environment.astep(says)
            if answers:
                assert [m["content"] for m in observation] == [m["content"] for m in answers]
        assert terminated or truncated
        assert info["success"] == (info["outcome"] == 1.0) == (info["visible"] == 1.0)
        await environment.aclose()


async def test_process_rewards_are_the_change_in_passing_tests() -> None:
    task = make_task(3, "train")
    original = task.source.split("\n")[task.fix_line - 1]
    right = call("replace_line", line=task.fix_line, text=task.fix_text)
    back = call("replace_line", line=task.fix_line, text=original)
    async with repairing(3) as environment:
        _, first, *_ = await environment.astep(right)
        _, second, _, truncated, info = await environment.astep(back)
    assert first > 0 and second == -first
    assert truncated and info["stop_reason"] == "turn_limit" and info["success"] is False


async def test_the_module_as_it_stands_is_the_work_also_once_the_episode_is_over() -> None:
    task = make_task(4, "train")
    async with repairing(4) as environment:
        assert await environment.artifacts() == {"module.py": task.source.encode()}
        action = call("replace_line", line=task.fix_line, text=task.fix_text) + call("submit")
        await environment.astep(action)
        (work,) = (await environment.artifacts()).values()
    assert work.decode().split("\n")[task.fix_line - 1] == task.fix_text


async def test_submitting_the_repair_succeeds_and_ends() -> None:
    task = make_task(4, "train")
    async with repairing(4) as environment:
        action = call("replace_line", line=task.fix_line, text=task.fix_text) + call("submit")
        _, reward, terminated, truncated, info = await environment.astep(action)
    assert terminated and not truncated
    assert info["outcome"] == 1.0 and info["success"] is True and reward > 0


async def test_hard_coding_the_visible_tests_does_not_succeed() -> None:
    task = make_task(4, "train")
    failing = next(c.call for c in task.visible if evaluate(task.source, [c.call]) != (c.expected,))
    name = failing.split("(")[0]
    given = {c.call.removeprefix(f"{name}(")[:-1]: c.expected for c in task.visible if c.call.startswith(f"{name}(")}
    table = ", ".join(f"repr(({arguments},)): {expected}" for arguments, expected in given.items())
    lines = task.source.split("\n")
    text = f"{lines[-1]}\n{name} = lambda *given: {{{table}}}.get(repr(given))"
    async with repairing(4) as environment:
        edit = call("replace_line", line=len(lines), text=text) + call("run_tests") + call("submit")
        observation, *_, info = await environment.astep(edit)
    assert observation[1]["content"] == "4/4 pass"
    assert info["success"] is False


@pytest.mark.parametrize(
    "source",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise KeyboardInterrupt",
        "def f(x:\n    return 1",
        "print('ok ' * 100)\nraise ValueError",
        "import os\nos.write(1, b'= 1\\n.\\n')\nos.close(1)\nos._exit(0)",
    ],
)
async def test_a_module_that_ends_the_run_has_no_values(runner: Runner, source: str) -> None:
    assert isinstance(await runner.run(source, ["f(1)"]), str)


async def test_prints_and_patches_change_no_value(runner: Runner) -> None:
    source = "import builtins\nprint('= 7')\nbuiltins.print = None\ndef f(x):\n    print(x)\n    return x"
    assert await runner.run(source, ["f(1)", "f('a\\nb')"]) == ("TypeError", "TypeError")
    assert await runner.run("print('= 7')\ndef f(x):\n    print(x)\n    return x", ["f(1)"]) == ("1",)


@pytest.mark.medium
async def test_an_endless_module_is_ended_and_not_remembered() -> None:
    from agentrl.sandbox import backend

    boxes = backend("bubblewrap")
    runner = Runner(boxes)
    assert isinstance(await runner.run("while True: pass", ["f(1)"]), str)
    assert not runner._results  # pyright: ignore[reportPrivateUsage]
    await boxes.aclose()


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    return [x] * 3",
        "def f(x):\n    return f(x)",
        "def f(x):\n    raise ValueError(x)",
        "def f(x):\n    return open('/tmp/x', 'w').write('left')",
        "import os\ndef f(x):\n    return os.getpid(), sorted(os.environ), os.listdir('.')",
        "import sys\nn = 0\nwhile n < 3000 and sys.getrecursionlimit():\n    n += 1\ndef f(x):\n    return n",
        "import math, random\ndef f(x):\n    return math.floor(x), random.Random(x).random()",
        "def f(x):\n    return 'é\\ud800' + '\\n' * x",
        "def f(x, n=0):\n    try:\n        return f(x, n + 1)\n    except RecursionError:\n        return n",
        "import os\nos._exit(0)",
        "def f(x:\n    return 1",
    ],
)
async def test_a_module_has_the_same_values_in_a_warm_interpreter(runner: Runner, source: str) -> None:
    calls = ["f(1)", "f(1)"]
    assert await runner.run(source, calls) == await runner.run(source, calls, fresh=True)


async def test_modules_that_only_compute_share_a_box_and_grades_do_not(runner: Runner) -> None:
    for number in range(6):
        assert await runner.run(f"def f():\n    return {number}", ["f()"]) == (str(number),)
    assert runner.counts == {"warm": 6}
    assert await runner.run("def f():\n    return 1", ["f()"], fresh=True) == ("1",)
    assert runner.counts == {"warm": 6, "box": 1}  # although the same run was remembered


class CountingBackend:
    """Counts boxes, and how many there were at once; each run answers with the nonce it was given."""

    name = "counting"

    def __init__(self) -> None:
        self.boxes = self.open = self.most = 0

    async def create(self, spec: SandboxSpec) -> CountingBackend:
        self.boxes += 1
        self.open += 1
        self.most = max(self.most, self.open)
        await trio.lowlevel.checkpoint()
        return self

    async def exec(self, argv: object, *, stdin: bytes, timeout_s: float) -> ExecResult:
        nonce, n, *_ = stdin.decode().split("\n")
        lines = [f"{nonce} = 1"] * int(n)
        return ExecResult(exit_code=0, stdout="\n".join([*lines, f"{nonce} ."]).encode(), stderr=b"")

    async def close(self) -> None:
        self.open -= 1

    async def aclose(self) -> None: ...


class SlowHost(CountingBackend):
    """Its boxes begin a command after `start_s` seconds; the command then sleeps for `sleeps_s` of its own."""

    def __init__(self, start_s: float, sleeps_s: float = 0.0) -> None:
        super().__init__()
        self.start_s, self.sleeps_s = start_s, sleeps_s

    async def exec(self, argv: object, *, stdin: bytes, timeout_s: float) -> ExecResult:
        whole = await super().exec(argv, stdin=stdin, timeout_s=timeout_s)
        begun = stdin.split(b"\n")[0] + b" begun\n"
        out = b""
        with trio.move_on_after(timeout_s) as scope:
            await trio.sleep(self.start_s)
            out = begun
            await trio.sleep(self.sleeps_s)
            return replace(whole, stdout=begun + whole.stdout)
        return ExecResult(exit_code=-9, stdout=out, stderr=b"", timed_out=scope.cancelled_caught)


async def test_a_slow_host_costs_the_policy_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async def ran(host: SlowHost) -> Values:
        return await Runner(host, warm=False).run("a", ["f()"])  # type: ignore[arg-type]

    assert await ran(SlowHost(start_s=10)) == ("1",)
    with pytest.raises(HostBusy, match="did not begin to run tests within 20 s"):
        await ran(SlowHost(start_s=25))
    assert await ran(SlowHost(start_s=1, sleeps_s=25)) == "Timeout"  # that is the module's own doing


async def test_the_same_run_is_made_once_and_memory_is_bounded() -> None:
    boxes = CountingBackend()
    runner = Runner(boxes, remembered=2, warm=False)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(runner.run, "a", ["f()"])
    assert boxes.boxes == 1
    for source in ("b", "c", "a"):
        assert await runner.run(source, ["f()"]) == ("1",)
    assert boxes.boxes == 4  # "a" had been forgotten


def test_output_is_read_strictly() -> None:
    assert parse("n = 1\nn = 2\nn .\n", "n", 2) == ("1", "2")
    assert parse("n ! SyntaxError in line 3\nn .\n", "n", 2) == "SyntaxError in line 3"
    for broken in ("", "n = 1\nn .\n", "n = 1\nn = 2\n", "m = 1\nm = 2\nm .\n", "n = 1\nn = 2\nn = 3\nn .\n"):
        assert parse(broken, "n", 2) == "the module ended the test run"


def test_bad_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="split"):
        CodeRepair(split="test")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="level"):
        CodeRepair(level="hard")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="remember = -1"):
        CodeRepair(remember=-1)


def test_it_is_a_gymnasium_environment() -> None:
    environment = gymnasium.make("agentrl/CodeRepair-v0", disable_env_checker=True)
    observation, _ = environment.reset(seed=1)
    assert observation[0]["role"] == "system"
    environment.close()


@pytest.mark.medium
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"split": "held_out", "level": "medium"}, marks=pytest.mark.long),
        pytest.param({"split": "held_out_templates"}, marks=pytest.mark.long),
    ],
)
async def test_oracles_get_what_they_must(settings: dict[str, Any]) -> None:
    for seed in range(6):
        verdicts = await play_oracles(lambda: CodeRepair(**settings), seed)
        right = [verdict.name for verdict in verdicts if verdict.got == 1.0]
        assert len(verdicts) == 6 and right == ["gold", "second try"], (seed, verdicts)
        assert all(verdict.got in (0.0, 1.0) for verdict in verdicts), (seed, verdicts)


@pytest.mark.medium
def test_it_keeps_the_contract() -> None:
    assert agentrl.check_env("agentrl/CodeRepair-v0").findings == ()


async def test_a_line_number_written_with_a_point_is_a_line_number() -> None:
    async with agentrl.make("agentrl/CodeRepair-v0") as env:
        await env.areset(seed=0)
        observation, *_ = await env.astep(env.call("replace_line", line=1.0, text="pass"))
        assert observation[0]["content"] == "ok"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="needs a system with CPU affinity")
async def test_boxes_at_once_are_bounded_by_the_cores_that_the_run_may_use() -> None:
    """Else a run that has two cores of a large machine would starve its tests into their deadline."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[:1])
    try:
        boxes = CountingBackend()
        runner = Runner(boxes, warm=False)  # type: ignore[arg-type]
        async with trio.open_nursery() as nursery:
            for source in "abcdef":
                nursery.start_soon(runner.run, source, ["f()"])
        assert (boxes.boxes, boxes.most) == (6, 2)
    finally:
        os.sched_setaffinity(0, cores)
