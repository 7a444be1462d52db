"""The tasks of reasoning-gym: one question, one answer, its own verifier.

Some of its verifiers evaluate an answer as Python, and so does sympy. A model's text never reaches `eval`: an answer
passes only if it is plain arithmetic or a plain list (`is_plain`).
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from agentrl.env.adapters.random_generators import OwnGenerators, hashes_are_fixed
from agentrl.env.limits import EpisodeLimits, positive_seconds
from agentrl.env.optional_imports import require
from agentrl.env.sync_async import in_thread
from agentrl.env.tool_env import Grade, ToolEnv
from agentrl.errors import ContentParseError, UsageError
from agentrl.host.clocks import watch
from agentrl.records import Json

UNORDERED: Final = {
    "isomorphic_strings",
    "knight_swap",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
}
"""Data sets whose questions depend on the order of a set of texts (reasoning-gym 0.1.25)."""


class ReasoningGym(ToolEnv):
    """`agentrl/ReasoningGym-v0`. Questions of reasoning-gym. `task` names a data set of reasoning-gym ("leg_counting",
    "basic_arithmetic", …), `config` its settings. Every seed is a question of its own; the outcome is the data set's
    own score from 0 to 1.

    The model answers within `<answer>…</answer>`; an answer without the tags costs a turn. Some data sets evaluate
    answers as Python: there, one that is more than plain arithmetic or a plain list counts as empty. So does one that
    the data set cannot score, or not within `score_s` seconds: then the info has the data set in `scores_late`.

    A question depends on its seed alone: the global generators that some data sets draw from are seeded with it. A few
    data sets draw from a set of texts, whose order Python changes from process to process unless PYTHONHASHSEED is
    set, as it is in the workers of a run; elsewhere those are not replayable."""

    system = "Think about the question, then give the final answer as <answer>…</answer>."
    limits = EpisodeLimits(turns=2)
    blocking = False
    replayable = True

    def __init__(
        self, task: str, *, config: Mapping[str, Any] | None = None, score_s: float = 10.0, **settings: Any
    ) -> None:
        self._package = require("reasoning_gym", what="ReasoningGym", package="reasoning-gym")
        self._name, self._config, self._score_s = task, dict(config or {}), positive_seconds("score_s", score_s)
        self.replayable = hashes_are_fixed() or not UNORDERED & _names(task, self._config)
        try:
            self._question(0)
        except (ValueError, TypeError, AssertionError) as config_error:
            raise UsageError(f"reasoning-gym makes no {task!r} with {self._config}: {config_error}") from config_error
        super().__init__(**settings)

    def make_task(self, options: Mapping[str, Json]) -> Mapping[str, Json]:
        return {"seed": int(self.np_random.integers(2**31))}

    def prompt(self, task: Mapping[str, Any]) -> str:
        self._score = 0.0
        self._source, self._entry = self._question(task["seed"])
        return self._entry["question"]

    async def on_text(self, text: str) -> None:
        tagged_answer = answer_in(text)
        if tagged_answer is None:
            raise ContentParseError("no answer found: write <answer>…</answer>")
        with watch(own_s=self._score_s, policy_s=self._score_s) as watching:  # the wait for a thread does not count
            # In a thread, as sympy may compute for minutes on a short text, and a loop that it holds stops every other
            # episode.
            self._score = await in_thread(partial(self._scored, tagged_answer))
        if watching.over is not None:
            self.note(scores_late=[self._name])
        self.finish()

    def _scored(self, answer: str) -> float:
        data_sets = [self._source, *getattr(self._source, "datasets", {}).values()]  # of a composite, its parts
        evaluates_python, evaluates_sympy = map(any, zip(*map(evaluates, data_sets), strict=True))
        # The data set's own answer always passes, whatever it looks like: a task that its right answer cannot solve
        # would be noise in the reward.
        is_own_answer = answer == self._entry["answer"]
        if (evaluates_python or evaluates_sympy) and not (is_own_answer or is_plain(answer, symbolic=evaluates_sympy)):
            answer = ""
        try:
            own_score = float(self._source.score_answer(answer, self._entry))
        except Exception:  # the question is the data set's own: only the answer can be at fault
            return 0.0
        return own_score if 0.0 <= own_score <= 1.0 else 0.0

    def grade(self) -> Grade:
        return Grade(outcome=self._score, success=self._score >= 1.0)

    def _question(self, seed: int) -> tuple[Any, Any]:
        """The data set of one question, and the question."""
        return OwnGenerators(seed).run(partial(self._made, seed))

    def _made(self, seed: int) -> tuple[Any, Any]:
        data_set = self._package.create_dataset(self._name, seed=seed, size=1, **self._config)
        return data_set, data_set[0]


def _names(task: str, config: Mapping[str, Any]) -> set[str]:
    """The data set, and those that a composite one is made of."""
    part_configs: Any = config.get("datasets") or ()
    return {task, *(str(getattr(data_set, "name", None) or dict(data_set).get("name")) for data_set in part_configs)}


def answer_in(text: str) -> str | None:
    """The text within the last pair of answer tags; None if there is no pair."""
    text_before, closing_tag, _ = text.rpartition("</answer>")
    _, opening_tag, tagged_text = text_before.rpartition("<answer>")
    return tagged_text.partition("</answer>")[0].strip() if closing_tag and opening_tag else None


_LONGEST: Final = 2_000  # characters
_LARGEST: Final = 10**40
_POWER: Final = 64  # exponents within exponents multiply
_FUNCTIONS: Final = frozenset(
    {"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "Abs"}
)
_PYTHON: Final = re.compile(r"(?<![\w.])(?:eval|exec)\(")
_SYMPY: Final = re.compile(r"\b(?:parse_expr|sympify|S)\(")


def evaluates(verifier: object) -> tuple[bool, bool]:
    """Whether the modules of an object's classes call Python's `eval`, and whether they call sympy's."""
    calls_python = calls_sympy = False
    for own_class in type(verifier).__mro__[:-1]:
        class_module = sys.modules.get(own_class.__module__)
        # By the text of the module and not by a list of data sets: a list is right for one version of the package, and
        # a new data set that calls `eval` would not be on it.
        module_source = (
            inspect.getsource(class_module)
            if class_module is not None and getattr(class_module, "__file__", None)
            else ""
        )
        calls_python = calls_python or _PYTHON.search(module_source) is not None
        calls_sympy = calls_sympy or ("sympy" in module_source and _SYMPY.search(module_source) is not None)
    return calls_python, calls_sympy


def is_plain(answer: str, *, symbolic: bool) -> bool:
    """Whether evaluating an answer runs nothing and ends soon. `symbolic`: sympy reads it, who understands texts that
    are no Python, and functions."""
    if len(answer) > _LONGEST:
        return False
    try:
        expression = ast.parse(answer.strip(), mode="eval").body
        # Powers multiply: 9**9**9 has five characters, and its value fills the memory. What is bounded is the product
        # of exponents within one another.
        return _weight(expression, symbolic) <= _POWER
    except _NotPlain:
        return False
    except (SyntaxError, ValueError):  # `eval` refuses it as well
        return not symbolic
    except (RecursionError, MemoryError):
        return False


class _NotPlain(Exception):
    pass


def _weight(node: ast.expr, symbolic: bool) -> int:
    """The highest product of exponents within one another. Raises _NotPlain."""
    match node:
        case ast.Constant(value=int(number)) if abs(number) <= _LARGEST:
            return 1
        case ast.Constant(value=float()):
            return 1
        case ast.Name(id=name) if symbolic and len(name) <= 20 and "__" not in name:
            return 1
        case ast.UnaryOp(op=ast.UAdd() | ast.USub(), operand=inner):
            return _weight(inner, symbolic)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _weight(left, symbolic) * max(1, abs(_exponent(right)))
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div(), right=right):
            return max(_weight(left, symbolic), _weight(right, symbolic))
        case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if symbolic and name in _FUNCTIONS:
            return 2 * _weight(inner, symbolic)
        case ast.List(elts=parts) | ast.Tuple(elts=parts) if not symbolic:
            return max((1 if _is_text(part) else _weight(part, symbolic) for part in parts), default=1)
        case _:
            raise _NotPlain


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _exponent(node: ast.expr) -> int:
    """A whole number or a plain fraction of two, rounded up. Raises _NotPlain."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return _exponent(inner)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return max(abs(_exponent(left)), abs(_exponent(right)))
        case _:
            raise _NotPlain
