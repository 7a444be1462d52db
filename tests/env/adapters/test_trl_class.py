"""A class as TRL's documentation asks for, with nothing of ours in it, played through the adapter."""

import functools
import inspect
import json
from typing import Any, Literal

import pytest

import agentrl
from agentrl.env.adapters.trl_env import TrlEnv
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format
from agentrl.errors import UsageError

HERMES = get_format("hermes")


class Wordle:
    """The documented shape: reset with the row, tools by docstring, the reward by itself."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, secret="crane", **row) -> str | None:
        self.secret, self.reward, self.left = secret, 0.0, 3
        return f"\nThe word has {len(secret)} letters."

    def guess(self, word: str) -> str:
        """
        Make a guess in the game.

        Args:
            word: The guessed word.

        Returns:
            The feedback message.
        """
        if self.left == 0:
            raise ValueError("Game over.")
        self.left -= 1
        self.reward = 1.0 if word == self.secret else 0.0
        return self._feedback(word)

    async def give_up(self) -> str:
        """Give up."""
        self.left = 0
        return self.secret

    def get_reward(self) -> float:
        return self.reward

    def _feedback(self, word):
        return "".join(a if a == b else "-" for a, b in zip(word, self.secret, strict=False))


def said(name, /, **arguments):
    return HERMES.write(ToolCall(name, arguments))


ROW = {"secret": "slate", "prompt": [{"role": "system", "content": "Play."}, {"role": "user", "content": "Wordle!"}]}


async def test_an_episode_of_a_class_written_for_trl():
    async with TrlEnv(Wordle, prompt="Guess.") as env:
        assert sorted(schema["function"]["name"] for schema in env.tool_schemas()) == ["give_up", "guess"]
        opening, _ = await env.areset(seed=0, options=ROW)
        assert opening == (
            {"role": "system", "content": "Play."},
            {"role": "user", "content": "Wordle!\nThe word has 5 letters."},
        )
        assert ROW["prompt"][1]["content"] == "Wordle!", "the row is left as it was"
        assert (await env.astep(said("guess", word="crate")))[0][0]["content"] == "--ate"
        observation, *_ = await env.astep(said("guess", word="slate"))
        assert observation[0]["content"] == "slate"
        observation, _, terminated, _, info = await env.astep("I found it: slate.")
        assert observation == () and terminated
        assert info == {"stop_reason": "done", "outcome": 1.0, "success": True}


async def test_what_a_method_raises_is_read_by_the_model():
    async with TrlEnv(Wordle) as env:
        opening, _ = await env.areset(seed=0)
        assert opening[0]["content"] == "\nThe word has 5 letters."
        assert (await env.astep(said("give_up")))[0][0]["content"] == "crane"
        assert (await env.astep(said("guess", word="x")))[0][0]["content"] == "error: ValueError: Game over."
        assert (await env.astep("bye"))[4]["outcome"] == 0.0


class Silent:
    def reset(self):
        pass

    def look(self) -> str:
        """Look."""
        return "dark"


async def test_reset_may_say_nothing_and_the_reward_be_another_ones():
    async with TrlEnv(Silent, prompt="Look around.") as env:
        opening, _ = await env.areset(seed=0)
        assert opening == ({"role": "user", "content": "Look around."},)
        assert (await env.astep("done"))[4] == {"stop_reason": "done"}


def test_passes_the_checker():
    assert agentrl.check_env(lambda: TrlEnv(Wordle, prompt="Guess.")).findings == ()


def test_what_is_no_such_class_is_refused():
    with pytest.raises(UsageError, match="dict has no reset method"):
        TrlEnv(dict)

    class Undocumented(Silent):
        def jump(self):
            return ""

    with pytest.raises(UsageError, match=r"jump.*needs a docstring"):
        TrlEnv(Undocumented)


async def test_a_reset_that_returns_something_else_is_named():
    class Odd(Silent):
        def reset(self):
            return 3

    with pytest.raises(UsageError, match=r"Odd\.reset returned a int"):
        await TrlEnv(Odd).areset(seed=0)


def counted(method):
    @functools.wraps(method)
    def inner(*args, **kwargs):
        return method(*args, **kwargs)

    return inner


class Many(Wordle):
    """Tools of every form that TRL takes."""

    def lists(
        self,
        xs: list[int],
        opt: str | None = None,
        lit: Literal["a", "b"] = "a",
        either: int | str = 1,
        table: dict[str, float] | None = None,
        pair: tuple[int, str] = (1, "a"),
        anything: Any = None,
        rows: list[dict[str, int]] | str = "",
        bare: list = (),  # type: ignore[type-arg]
        other: dict = {},  # type: ignore[type-arg]  # noqa: B006
    ) -> dict[str, int]:
        """
        Every kind of argument.

        Of two paragraphs.

        Args:
            xs: Numbers.
            opt: May be left out,
                on two lines.
            lit: One of two.
            either: One or the other.
            table: A table.
            pair: A pair.
            anything: Anything.
            rows: Rows or a text.
            bare: A list.
            other: A table.

        Returns:
            What it found,
            or nothing.
        """
        return {}

    async def go(self, direction: str, steps: "int" = 1) -> str:
        """Go.

        Args:
            direction: Where to (choices: ["up", "down"])
            steps: How far
        """
        return direction

    @staticmethod
    def square(x: float, exact: bool = False) -> float:
        """Square a number.

        Args:
            x: The number (choices: [1.0, 2.0])
            exact: Whether to be exact.
        """
        return x * x

    @counted
    def wait(self) -> None:
        """Wait."""

    @classmethod
    def about(cls) -> str:
        """No tool: TRL lists functions of the class alone."""
        return ""

    @property
    def broken(self) -> str:
        raise RuntimeError("a property is not evaluated")

    rest = wait


def test_the_tools_are_those_that_trl_shows_its_model():
    pytest.importorskip("transformers")
    from transformers.utils import get_json_schema

    instance = Many()
    names = [name for name, _ in inspect.getmembers(Many, inspect.isfunction) if not name.startswith("_")]
    methods = [getattr(instance, name) for name in names if name not in ("reset", "get_reward")]
    theirs = {method.__name__: get_json_schema(method) for method in methods}
    ours = {schema["function"]["name"]: schema for schema in TrlEnv(Many).tool_schemas()}
    assert {name: json.dumps(schema) for name, schema in ours.items()} == {
        name: json.dumps(schema) for name, schema in theirs.items()
    }
    assert sorted(ours) == ["give_up", "go", "guess", "lists", "square", "wait"]


class Safe:
    """As TRL's own documentation writes an environment: the reward is an attribute, which a function reads."""

    def __init__(self):
        self.reward = 0.0

    def reset(self, code="1234", **row):
        self.code, self.reward = code, 0.0

    def open(self, code: str) -> str:
        """
        Try a code.

        Args:
            code: The code.
        """
        self.reward = 1.0 if code == self.code else 0.25
        return "click"


def of_environment(environments, **kwargs):
    return [environment.reward for environment in environments]


def of_all(completions, prompts, code, environments, **kwargs):
    """Checks what TRL gives a function: lists of one, conversations, and the columns of the row."""
    (conversation,), (asked,), (environment,) = completions, prompts, environments
    assert code == [environment.code] and asked[-1]["content"] == "Open it."
    assert [message["role"] for message in conversation] == ["assistant", "tool", "assistant"]
    function = conversation[0]["tool_calls"][0]["function"]
    assert function == {"name": "open", "arguments": {"code": "99"}} and conversation[1]["content"] == "click"
    return [len(conversation[-1]["content"])]


def not_for_such_rows(completions, **kwargs):
    return [None]


def raises(environments, **kwargs):
    raise KeyError("x")


async def outcome_of(**settings):
    async with TrlEnv(Safe, **settings) as env:
        await env.areset(seed=0, options={"code": "99", "prompt": "Open it."})
        await env.astep(said("open", code="99"))
        return (await env.astep("done"))[4]


async def test_reward_functions_of_trl_judge_beside_the_class():
    here = __name__
    weighted = await outcome_of(reward_funcs=[f"{here}:of_environment", of_all], reward_weights=[2.0, 0.5])
    assert weighted["outcome"] == 2.0 * 1.0 + 0.5 * len("done")
    assert weighted["scores"] == {f"{here}:of_environment": 1.0, "of_all": 4.0}
    assert (await outcome_of(reward_funcs=of_environment))["outcome"] == 1.0
    assert (await outcome_of(reward_funcs=lambda environments, **k: [3]))["outcome"] == 3.0
    assert (await outcome_of(reward_funcs=[of_environment, not_for_such_rows]))["outcome"] == 1.0
    failed = await outcome_of(reward_funcs=raises)
    assert (failed["outcome"], failed["reward_error"]) == (0.0, "KeyError: 'x'")
    with pytest.raises(UsageError, match="write def f"):
        TrlEnv(Safe, reward_funcs=lambda prompt, completion, row: 1.0)
    with pytest.raises(UsageError, match="one for each of the 1"):
        TrlEnv(Safe, reward_funcs=of_environment, reward_weights=[1.0, 2.0])


@pytest.mark.medium
def test_a_class_without_a_reward_is_refused_unless_the_run_has_a_rewarder(tmp_path):
    from agentrl import config as configuration
    from agentrl.run.preflight import check_tasks

    env: dict[str, Any] = {"id": "agentrl/TRL-v0", "kwargs": {"env": f"{__file__}:Safe", "prompt": "Open it."}}
    document: dict[str, Any] = {"model": "agentrl/tiny-coder", "env": env}
    with pytest.raises(UsageError, match="Safe has no get_reward, so nothing gives its episodes a reward"):
        check_tasks(configuration.parse(document))
    env["kwargs"]["reward_funcs"] = [f"{__file__}:of_environment"]
    check_tasks(configuration.parse(document))


def test_a_trainer_takes_rows_functions_and_a_class_together(tmp_path):
    rows = [{"code": "12", "prompt": "Open it."}, {"code": "34", "prompt": "Open it."}]
    trainer = agentrl.Trainer(
        "agentrl/tiny-coder", Safe, dataset=rows, reward_funcs=of_environment, eval_dataset=rows, out=tmp_path / "run"
    )
    env, (held_out,) = trainer.config.env, trainer.config.eval.sets
    assert env.id == "agentrl/TRL-v0" and env.kwargs["env"].endswith(":Safe")
    assert [reference.rpartition(":")[2] for reference in env.kwargs["reward_funcs"]] == ["of_environment"]
    made = agentrl.make(env.id, **{**env.kwargs, **held_out.kwargs})
    opening, _ = made.reset(seed=1)
    assert opening[-1]["content"] == "Open it."
    made.step(said("open", code="34"))
    assert made.step("done")[4]["outcome"] == 1.0
    with pytest.raises(UsageError, match="all of them go with agentrl/TRL-v0"):
        agentrl.Trainer(env="agentrl/Calculator-v0", dataset=rows, reward_funcs=of_environment, out=tmp_path / "b")
