"""Reward functions of `RowsEnv`: which signatures they may have, how they are called, which numbers they may give.

    (prompt, completion, row)               one answer: prompt messages, the answer's text, the row of the data set
    (completions, prompts=…, column=…, **)  as in TRL: lists, of one answer each, and columns of the row by name
    (environments, **)                      as in TRL beside an environment class: lists of one environment each

Both may be async. Knows no environment and no process.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final, cast

from agentrl.errors import EnvError, UsageError
from agentrl.records import Json, Message
from agentrl.registry import load_reference

NOBODY_JUDGES: Final = "no reward function judges an answer (each returned None): its outcome is 0"
"""The case of a notice: the row is for none of the functions, and a plain 0 looks like a wrong answer."""

_TRL: Final = ("completions", "environments")  # a function of TRL asks for one of them
_FORMS: Final = "give (prompt, completion, row), or TRL's (completions, column=…, **kwargs)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer for a function to judge. `talk`: the row's prompt is a list of messages, which TRL answers with one,
    too. `messages` are those of an episode after its prompt, and `environment` the object that played it, if there is
    one.
    """

    prompt: Sequence[Message]
    completion: str
    row: Mapping[str, Json]
    talk: bool = False
    messages: Sequence[Message] = ()
    environment: Any = None


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function by its reference `name`. Raises UsageError for a signature that it may not have."""

    name: str
    function: Callable[..., Any]
    batched: bool
    takes: frozenset[str] | None  # names of arguments; None: any
    needs: frozenset[str]  # those without a default

    @classmethod
    def of(cls, name: str) -> RewardFunction:
        """The function that a reference names."""
        return cls.made(name, load_reference(name))

    @classmethod
    def made(cls, name: str, function: Any) -> RewardFunction:
        """A function that is at hand already."""
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError) as signature_error:
            raise UsageError(
                f"the reward function {name!r} is no function whose arguments are known: {signature_error}"
            ) from None
        parameters = signature.parameters.values()
        named_parameters = [
            parameter
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        ]
        # By the names of its arguments, which TRL calls by name: a function that takes `completions` cannot mean
        # anything else, and `**kwargs` alone is TRL's most general form.
        is_batched = any(parameter.name in _TRL for parameter in named_parameters) or (
            not named_parameters and _is_open(signature)
        )
        if not is_batched:
            try:
                signature.bind((), "", {})
            except TypeError:
                raise UsageError(f"the reward function {name!r} takes {signature}: {_FORMS}") from None
        any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        taken_names = None if any_name else frozenset(parameter.name for parameter in named_parameters)
        needed_names = frozenset(
            parameter.name for parameter in named_parameters if parameter.default is parameter.empty
        )
        return cls(name, function, is_batched, taken_names, needed_names)

    def __call__(self, answer: Answer) -> float | None:
        """The score of one answer; None as in TRL, where a function says by it that it is not for such rows. Raises
        EnvError for what is no finite number, UsageError for a column that the row does not have."""
        returned = self._batch(answer) if self.batched else self.function(answer.prompt, answer.completion, answer.row)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
        if self.batched:
            returned = self._only(returned)
        return None if returned is None and self.batched else self._number(returned)

    def _batch(self, answer: Answer) -> Any:
        columns: dict[str, Any] = {column_name: [cell_value] for column_name, cell_value in answer.row.items()}
        completion_messages: list[Any] = list(answer.messages) or [{"role": "assistant", "content": answer.completion}]
        prompt_argument: Any = list(answer.prompt) if answer.talk else answer.prompt[-1]["content"]
        arguments = {
            **columns,
            "prompts": [prompt_argument],
            "completions": [completion_messages if answer.talk else answer.completion],
        }
        if answer.environment is not None:
            arguments["environments"] = [answer.environment]
        if missing_names := sorted(self.needs - arguments.keys()):
            row_columns = ", ".join(sorted(answer.row))
            raise UsageError(
                f"the reward function {self.name!r} asks for {', '.join(missing_names)}; a row has {row_columns}"
            )
        return self.function(
            **{
                argument_name: cell_value
                for argument_name, cell_value in arguments.items()
                if self.takes is None or argument_name in self.takes
            }
        )

    def _only(self, returned: Any) -> Any:
        returned_list = returned.tolist() if hasattr(returned, "tolist") else returned
        # Exactly one number for one completion. A function that returns a list of another length has read the batch
        # wrongly, and taking its first number would hide that.
        if not isinstance(returned_list, list | tuple) or len(cast("Sequence[Any]", returned_list)) != 1:
            raise EnvError(
                f"the reward function {self.name!r} returned {returned!r:.80}: return one number per completion"
            )
        return cast("Sequence[Any]", returned_list)[0]

    def _number(self, returned: Any) -> float:
        plain_score = (
            returned.item() if getattr(returned, "shape", None) == () and hasattr(returned, "item") else returned
        )
        if not isinstance(plain_score, Real) or not math.isfinite(plain_score):
            raise EnvError(f"the reward function {self.name!r} returned {returned!r:.80}: return a finite number")
        return float(plain_score)


def _is_open(signature: inspect.Signature) -> bool:
    """Whether a function takes any arguments by name and none by place, as TRL gives them."""
    parameter_kinds = {parameter.kind for parameter in signature.parameters.values()}
    return parameter_kinds == {inspect.Parameter.VAR_KEYWORD}


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
