"""What authors of a `ToolEnv` get wrong: each mistake is named, where it is made or at the first reset."""

import pytest
import trio
from each_case import each_case

from agentrl.env import EpisodeLimits, ToolEnv, tool
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format
from agentrl.errors import ConfigError, EnvError, UsageError
from agentrl.records import StopReason


def said(name, /, **arguments):
    return get_format("hermes").write(ToolCall(name, arguments))


class Bench(ToolEnv):
    def prompt(self, task):
        return "go"

    def on_text(self, text):
        return "words"

    def grade(self):
        return self.task.get("grade")


def test_hooks_that_return_something_else_are_named():
    class Odd(Bench):
        def prompt(self, task):
            return task["prompt"]

        def on_text(self, text):
            return 5

    env = Odd()
    for given in (None, b"go", {"role": "user", "content": "go"}, ["go"]):
        with pytest.raises(UsageError, match=r"^Odd\.prompt returned .*: give a text, or a list of messages$"):
            env.reset(options={"prompt": given})
    env.reset(options={"prompt": "go"})
    with pytest.raises(UsageError, match=r"^Odd\.on_text returned 5: give a text, or a list of messages$"):
        env.step("words")
    env.reset(options={"prompt": "go", "grade": "good"})
    with pytest.raises(
        UsageError, match=r"^Odd\.grade returned 'good': give a number, a truth value, a Grade or None$"
    ):
        trio.run(env.aend, StopReason.TURN_LIMIT)
    env.close()


def test_after_turn_may_return_nothing():
    class Silent(Bench):
        def after_turn(self, results):
            self.reward(0.25)

    env = Silent()
    env.reset()
    assert env.step("words")[1] == 0.25
    env.close()


def test_an_init_that_forgets_its_base_is_named():
    class Forgets(Bench):
        def __init__(self):
            self.mine = []

    env = Forgets()
    with pytest.raises(UsageError, match=r"^Forgets\.__init__ must call super\(\).__init__\(\)$"):
        env.reset()
    env.close()


@each_case("given", [8, {"turn": 8}, "8"])
def test_limits_that_are_none_name_what_there_is(given):
    with pytest.raises(ConfigError, match=r"give fields of EpisodeLimits \(turns, tokens, seconds, tool_seconds\)"):
        Bench(limits=given)
    with pytest.raises(ConfigError, match=r"give fields of EpisodeLimits"):
        type("Limited", (Bench,), {"limits": given})()
    assert type("Limited", (Bench,), {"limits": {"turns": 8}})().limits == EpisodeLimits(turns=8)
    with pytest.raises(ConfigError, match=r"^limits.turns = '8': give a number above 0"):
        Bench(limits={"turns": "8"})


def test_a_tool_may_not_take_the_place_of_what_an_environment_is():
    with pytest.raises(
        UsageError, match=r"^the tool Ends.finish takes the place of ToolEnv.finish: name the method oth"
    ):

        class Ends(Bench):
            @tool
            def finish(self, answer: int) -> str:
                """Answer."""
                return str(answer)

    class Renamed(Bench):
        @tool(name="finish")
        def answer(self, answer: int) -> str:
            """Answer."""
            self.finish()
            return str(answer)

    env = Renamed()
    env.reset()
    assert env.step(said("finish", answer=3))[2]
    env.close()


@pytest.mark.parametrize("blocking", [True, False])
def test_a_tool_that_exits_fails_its_episode_and_not_the_process(blocking):
    class Exits(Bench):
        @tool(parallel=True)
        def leave(self) -> str:
            """Leave."""
            raise SystemExit(3)

    env = type("Exits", (Exits,), {"blocking": blocking})()
    env.reset()
    with pytest.raises(EnvError, match=r"leave called sys.exit\(3\), which would end the process$"):
        env.step(said("leave") + said("leave"))
    env.close()
