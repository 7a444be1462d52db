"""`ToolEnv`: what the model reads, what is run when, what a fault costs, how an episode ends."""

import json

import pytest
import trio
from each_case import each_case
from gymnasium.error import ResetNeeded

from agentrl.env import EpisodeLimits, Grade, ParsePolicy, ToolEnv, tool
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format
from agentrl.errors import (
    ConfigError,
    SandboxError,
    StructuralParseError,
    ToolError,
    UnknownIdError,
    UsageError,
)
from agentrl.protocols import ToolResult
from agentrl.records import StopReason

HERMES = get_format("hermes")


def said(name, /, **arguments):
    return HERMES.write(ToolCall(name, arguments))


def contents(observation):
    return [message["content"] for message in observation]


class Bench(ToolEnv):
    """Tools that do what a test wants to see; everything happens in place and is logged."""

    blocking = False

    def __init__(self, **kwargs):
        self.log = []
        super().__init__(**kwargs)

    def setup(self, task):
        self.log.append("setup")

    def prompt(self, task):
        if task.get("broken"):
            raise SandboxError("no box")
        return "go"

    def teardown(self):
        self.log.append("teardown")

    def grade(self):
        self.log.append("grade")
        return self.task.get("grade")

    @tool
    async def sleep(self, seconds: float, name: str = "") -> str:
        """Sleep alone."""
        self.log.append(f"begin {name}")
        await trio.sleep(seconds)
        self.log.append(f"end {name}")
        return f"slept {name}"

    @tool(parallel=True)
    async def nap(self, seconds: float, name: str = "") -> str:
        """Sleep beside others."""
        return await self.sleep(seconds, name)

    @tool
    def say(self, text: str) -> str:
        """Echo."""
        return text

    @tool
    def bits(self) -> bytes:
        """Bytes that are not UTF-8."""
        return b"\xff\xfeok"

    @tool
    def refuse(self) -> str:
        """Fail because of what was asked."""
        raise ToolError("not today")

    @tool(parallel=True)
    async def crash(self, after: float = 0) -> str:
        """Fail because of the host."""
        await trio.sleep(after)
        raise SandboxError("host is gone")

    @tool
    def done(self) -> str:
        """End the episode."""
        self.reward(0.25)
        self.note(steps=3)
        self.finish()
        return "bye"


async def started(cls=Bench, options=None, **kwargs):
    env = cls(**kwargs)
    await env.areset(seed=0, options=options)
    return env


async def test_results_come_as_tool_messages_in_the_order_of_the_calls():
    env = await started()
    observation, reward, terminated, truncated, info = await env.astep(
        "I will.\n" + said("say", text="one") + said("bits") + said("refuse") + said("nothing") + said("say")
    )
    assert observation == (
        {"role": "tool", "content": "one", "name": "say", "tool_call_id": "call00000"},
        {"role": "tool", "content": "\\xff\\xfeok", "name": "bits", "tool_call_id": "call00001"},
        {"role": "tool", "content": "error: not today", "name": "refuse", "tool_call_id": "call00002"},
        {
            "role": "tool",
            "content": "invalid call: no tool named 'nothing'; known: sleep, nap, say, bits, refuse, crash, done",
            "name": "nothing",
            "tool_call_id": "call00003",
        },
        {
            "role": "tool",
            "content": "wrong arguments: say: 'text' is a required property",
            "name": "say",
            "tool_call_id": "call00004",
        },
    )
    faults = {"parse_failure": "content", "tool_errors": {"refuse": 1}}
    assert (reward, terminated, truncated, info) == (0.0, False, False, faults)
    observation, *_ = await env.astep(said("say", text="two"))
    assert observation[0]["tool_call_id"] == "call00005"


async def test_a_malformed_sibling_gets_its_own_message_and_the_others_run():
    env = await started()
    broken = '<tool_call>\n{"name": "say", "arguments": {"text": "x"}\n</tool_call>'
    observation, *_, info = await env.astep(said("say", text="a") + broken + said("say", text="b"))
    first, second, third = contents(observation)
    assert (first, third) == ("a", "b")
    assert second.startswith("malformed call: the tool call is not valid JSON")
    assert info == {"parse_failure": "structural"}


async def test_parallel_neighbours_run_together_and_others_alone(autojump_clock):
    env = await started()
    start = trio.current_time()
    observation, *_ = await env.astep(
        said("nap", seconds=3, name="a")
        + said("nap", seconds=5, name="b")
        + said("sleep", seconds=2, name="c")
        + said("nap", seconds=1, name="d")
    )
    assert contents(observation) == ["slept a", "slept b", "slept c", "slept d"]
    assert trio.current_time() - start == pytest.approx(5 + 2 + 1)
    log = env.log[1:]
    assert sorted(log[:2]) == ["begin a", "begin b"]
    assert log[2:] == ["end a", "end b", "begin c", "end c", "begin d", "end d"]


async def test_a_tool_past_its_deadline_is_ended_and_the_model_told(autojump_clock):
    env = await started()
    env.tool_timeout_s = 4
    observation, *_ = await env.astep(said("sleep", seconds=60, name="x"))
    assert contents(observation) == ["timeout: sleep was ended after 4 s"]
    assert "end x" not in env.log


async def test_what_the_policy_could_not_cause_is_raised_bare(autojump_clock):
    env = await started()
    with pytest.raises(SandboxError, match="host is gone"):
        await env.astep(said("crash", after=1) + said("nap", seconds=50, name="x"))
    assert trio.current_time() < 10 and "end x" not in env.log
    with pytest.raises(ResetNeeded):
        await env.astep(said("say", text="a"))
    await env.areset(seed=0)
    assert contents((await env.astep(said("say", text="a")))[0]) == ["a"]


async def test_long_output_is_cut_and_flagged():
    class Short(Bench):
        tool_output_bytes = 40

        def after_turn(self, results):
            self.flags = [result.result.truncated for result in results]
            return 0.0

    env = await started(Short)
    observation, *_ = await env.astep(said("say", text="é" * 100) + said("say", text="short"))
    assert contents(observation) == ["é" * 10 + "\n[output cut: 40 of 200 bytes shown]\n" + "é" * 10, "short"]
    assert env.flags == [True, False]


async def test_calls_beyond_the_most_are_named_not_dropped():
    env = await started()
    env.max_calls = 2
    observation, *_ = await env.astep("".join(said("say", text=str(i)) for i in range(5)))
    assert contents(observation) == ["0", "1", "invalid call: 3 more calls were not run: make at most 2 at once"]


async def test_finish_ends_the_turn_and_later_calls_are_not_run():
    env = await started(options={"grade": 0.5})
    observation, reward, terminated, truncated, info = await env.astep(said("done") + said("say", text="late"))
    assert contents(observation) == ["bye", "not run: the episode is over"]
    assert (reward, terminated, truncated) == (0.25, True, False)
    assert info == {"steps": 3, "stop_reason": "done", "outcome": 0.5, "success": False}
    with pytest.raises(ResetNeeded):
        await env.astep(said("say", text="a"))


@each_case(
    ("grade", "expected"),
    [
        (None, {}),
        (True, {"outcome": 1.0, "success": True}),
        (False, {"outcome": 0.0, "success": False}),
        (2, {"outcome": 2.0, "success": True}),
        (0.99, {"outcome": 0.99, "success": False}),
        (Grade(outcome=-1.0, success=True, info={"n": 1}), {"outcome": -1.0, "success": True, "n": 1}),
    ],
)
async def test_grades(grade, expected):
    env = await started(options={"grade": grade})
    info = (await env.astep(said("done")))[4]
    assert info == {"steps": 3, "stop_reason": "done", **expected}


async def test_text_without_a_call_is_answered_and_counts_as_structural():
    env = await started()
    observation, *_, info = await env.astep("I think the answer is 4.")
    assert observation == (
        {
            "role": "user",
            "content": "malformed call: no tool call found; call one of: sleep, nap, say, bits, refuse, crash, done",
        },
    )
    assert info == {"parse_failure": "structural"}


async def test_on_text_may_answer_itself():
    class Talks(Bench):
        async def on_text(self, text):
            if text == "":
                raise StructuralParseError("say something")
            return {"bye": None, "two": [{"role": "user", "content": "1"}, {"role": "user", "content": "2"}]}.get(
                text, f"you said {text}"
            )

    env = await started(Talks)
    assert contents((await env.astep("hi"))[0]) == ["you said hi"]
    assert contents((await env.astep("two"))[0]) == ["1", "2"]
    assert (await env.astep("bye"))[0] == ()
    assert contents((await env.astep(""))[0]) == ["malformed call: say something"]


async def test_without_tools_every_text_goes_to_on_text():
    class Game(ToolEnv):
        def prompt(self, task):
            return [{"role": "user", "content": "say"}]

        def on_text(self, text):
            self.finish()
            return text

    env = await started(Game)
    observation, _, terminated, _, info = await env.astep(said("x"))
    assert contents(observation) == [said("x")] and terminated and info == {"stop_reason": "done"}


# --- parse policy


BROKEN, UNKNOWN, FINE = "<tool_call>{</tool_call>", said("nothing"), said("say", text="x")


async def faults(policy, actions):
    env = await started(parse_policy=policy)
    return [(await env.astep(action))[1:] for action in actions]


async def test_retries_are_counted_in_a_row_and_by_kind():
    steps = await faults({"structural_retries": 1, "content_retries": 0}, [BROKEN, FINE, BROKEN, BROKEN])
    assert [(terminated, truncated) for _, terminated, truncated, _ in steps] == [(False, False)] * 3 + [(True, False)]
    assert steps[-1][3] == {"parse_failure": "structural", "stop_reason": "parse_failure"}
    (step,) = await faults(ParsePolicy(content_retries=0), [UNKNOWN])
    assert step[1] and step[3]["stop_reason"] == StopReason.PARSE_FAILURE


async def test_penalty_and_mask_fall_on_the_turn():
    policy = ParsePolicy(structural_penalty=0.5, content_penalty=0.25, mask_content=True)
    steps = await faults(policy, [BROKEN + BROKEN, UNKNOWN, BROKEN + UNKNOWN, FINE])
    assert [reward for reward, *_ in steps] == [-0.5, -0.25, -0.75, 0.0]
    assert [info.get("masked", False) for *_, info in steps] == [False, True, True, False]


# --- limits


async def ends(limits, action, clock_s=0.0):
    env = await started(limits=limits, options={"grade": True})
    for turn in range(1, 20):
        env.charge_tokens(10)
        *_, terminated, truncated, info = await env.astep(action)
        if terminated or truncated:
            assert not terminated and info["success"] is True, "a limit truncates, and what is there is graded"
            return turn, info["stop_reason"]
    raise AssertionError("no limit held")


async def test_limits_truncate_with_their_reason(autojump_clock):
    nap = said("nap", seconds=1) + said("nap", seconds=1)
    assert await ends({"turns": 3}, nap) == (3, "turn_limit")
    assert await ends({"tokens": 35}, nap) == (4, "token_limit")
    assert await ends({"seconds": 2.5}, nap) == (3, "time_limit")
    assert await ends({"tool_seconds": 5}, nap) == (3, "tool_time_limit")
    assert await ends(EpisodeLimits(turns=2, tokens=10), nap) == (1, "token_limit")


async def test_a_tool_gets_no_more_time_than_the_episode_has(autojump_clock):
    env = await started(limits={"seconds": 3})
    observation, _, _, truncated, _ = await env.astep(said("sleep", seconds=20))
    assert contents(observation) == ["timeout: sleep was ended after 3 s"] and truncated


def test_a_limit_of_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"limits\.turns = 0"):
        Bench(limits={"turns": 0})


# --- life


async def test_setup_and_teardown_pair_up():
    env = Bench()
    await env.aclose()
    assert env.log == []
    await env.areset(seed=0)
    await env.areset(seed=0)
    with pytest.raises(SandboxError):
        await env.areset(seed=0, options={"broken": True})
    await env.aclose()
    await env.aclose()
    assert env.log == ["setup", "teardown"] * 3


async def test_a_cancelled_step_leaves_nothing_and_needs_a_reset(autojump_clock):
    env = await started()
    with trio.move_on_after(1) as scope:
        await env.astep(said("sleep", seconds=60))
    assert scope.cancelled_caught
    with pytest.raises(ResetNeeded):
        await env.astep(FINE)
    with trio.CancelScope() as scope:
        scope.cancel()
        await env.aclose()
    assert env.log[-1] == "teardown"


async def test_the_driver_may_end_an_episode_which_is_graded_once():
    env = await started(options={"grade": 0.5})
    info = await env.aend(StopReason.CONTEXT_LIMIT)
    assert info == {"stop_reason": "context_limit", "outcome": 0.5, "success": False}
    assert await env.aend(StopReason.CONTEXT_LIMIT) == {}
    assert env.log.count("grade") == 1
    with pytest.raises(ResetNeeded):
        await env.astep(FINE)


async def test_hooks_may_be_async_or_block():
    class Blocks(Bench):
        blocking = True

        async def setup(self, task):
            await trio.lowlevel.checkpoint()
            self.log.append("async setup")

        def after_turn(self, results):
            return 0.125

        async def grade(self):
            return True

    env = await started(Blocks)
    _, reward, _, _, info = await env.astep(said("done"))
    assert reward == 0.375 and info["success"] and env.log == ["async setup"]


async def test_step_needs_a_reset_and_a_text():
    with pytest.raises(ResetNeeded):
        await Bench().astep("x")
    env = await started()
    with pytest.raises(UsageError, match="action is a int, not text"):
        await env.astep(3)


async def test_messages_are_copies():
    kept = {"role": "user", "content": "mine"}

    class Keeps(Bench):
        system = "be brief"

        def prompt(self, task):
            return [kept]

    env = Keeps()
    first, _ = await env.areset(seed=0)
    assert contents(first) == ["be brief", "mine"]
    first[1]["content"] = "changed"
    assert kept["content"] == "mine"


class Foreign:
    """A tool that is no method: only the protocol."""

    name, parallel = "foreign", True
    schema = {  # noqa: RUF012
        "type": "function",
        "function": {
            "name": "foreign",
            "description": "Count.",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0}}},
        },
    }

    async def call(self, arguments):
        return ToolResult(content=json.dumps(arguments), truncated=True)


async def test_tools_of_others_are_offered_and_checked():
    env = await started(tools=[Foreign()])
    assert env.tool_schemas()[-1] == Foreign.schema
    observation, *_ = await env.astep(said("foreign", n=1) + said("foreign", n=-1))
    assert contents(observation) == [
        '{"n": 1}\n[output cut]',
        "wrong arguments: foreign: argument 'n': -1 is less than the minimum of 0",
    ]


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(UsageError, match="two tools named 'foreign'"):
        Bench(tools=[Foreign(), Foreign()])


def test_an_unknown_tool_format_is_refused():
    with pytest.raises(UnknownIdError, match="hermes"):
        Bench(tool_format="klingon")


async def test_a_dialect_without_a_template_is_taught_and_answered_in_plain_roles():
    env = Bench(tool_format="react")
    opening, _ = await env.areset(seed=0)
    assert [message["role"] for message in opening] == ["system", "user"]
    assert "Action: TOOL" in opening[0]["content"] and '"name": "say"' in opening[0]["content"]
    assert env.tool_schemas() == [] and len(env.schemas) == 7
    observation, *_ = await env.astep('Action: say\nAction Input: {"text": "a"}\nAction: nothing\nAction Input: {}')
    assert [message["role"] for message in observation] == ["user"]
    assert observation[0]["content"].startswith("Observation: a\nObservation: invalid call: no tool named 'nothing'")


async def test_an_env_without_a_prompt_says_so():
    with pytest.raises(NotImplementedError, match="ToolEnv must write prompt"):
        await ToolEnv().areset(seed=0)
