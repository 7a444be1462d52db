"""Environment classes written for TRL's environment_factory, unchanged: `reset(**row)`, public methods, and a reward
from `get_reward()` or from reward functions beside the class.

Their rules: public methods are the tools; `reset` takes the row of the data set and may return text, which is appended
to the last prompt message; whatever a method raises is read by the model; a message without a tool call ends the
episode. The outcome is what `get_reward()` gives, or the weighted sum of what TRL's `reward_funcs` give, which are
called with lists of one: `completions`, `prompts`, `environments` and the columns of the row.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast, get_type_hints

from pydantic import TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

from agentrl import notices, registry
from agentrl.env import asyncio_code
from agentrl.env.core import StepResult
from agentrl.env.datasets import read_rows
from agentrl.env.limits import finite
from agentrl.env.reward_functions import NOBODY_JUDGES, Answer, RewardFunction
from agentrl.env.tool_env import Grade, ToolEnv
from agentrl.env.tools.tools import (
    CallResult,
    FunctionTool,
    ToolOptions,
    completion_messages,
    without_last_results,
)
from agentrl.errors import EnvError, InfrastructureError, Tracebacks, UsageError, place_of
from agentrl.records import Json, Message

_TRACEBACKS = Tracebacks()  # of get_reward, by kind: an instance lives for one episode


Function = str | Callable[..., Any]
"""A reward function of TRL's, or its reference."""


class TrlEnv(ToolEnv):
    """`agentrl/TRL-v0`. A class written for TRL, unchanged. `env` is the class (or a factory), or its reference
    `module:Class`; `prompt` the opening where the row has no `prompt` of its own.

    `reward_funcs` are the reward functions of TRL beside the class, or references to them, `reward_weights` what each
    is multiplied by (default: 1). A class without them and without `get_reward` gives no reward: a run with it needs a
    rewarder or reward sources.

    The tools are those of TRL: names, descriptions and parameters. Blocking methods run in a thread. Rows come from the
    reset options; without any, row `seed` modulo their number of the file `rows`. Such an environment does not promise
    replay."""

    def __init__(
        self,
        env: str | Callable[[], Any],
        *,
        prompt: str | Sequence[Message] = "",
        reward_funcs: Sequence[Function] | Function = (),
        reward_weights: Sequence[float] | None = None,
        rows: str | None = None,
        **settings: Any,
    ) -> None:
        make_env = registry.load_reference(env) if isinstance(env, str) else env
        self._env = make_env()
        class_name = type(self._env).__name__
        if not callable(getattr(self._env, "reset", None)):
            raise UsageError(f"{class_name} has no reset method: it is no environment in TRL's sense")
        for _, method in inspect.getmembers(cast("object", self._env).__class__, inspect.iscoroutinefunction):
            asyncio_code.mark(method, True)  # TRL runs them on asyncio's loop
        self._default = prompt
        self._functions = _functions_of(reward_funcs)
        self._weights = _weights_of(reward_weights, len(self._functions))
        self._rows = None if rows is None else read_rows(rows)
        self._completion: list[Message] = []
        self._action = ""
        self.graded = bool(self._functions) or callable(getattr(self._env, "get_reward", None))
        if not self.graded:
            correction = "give reward_funcs = ['file.py:function'] in env.kwargs, or the run a rewarder (env.reward)"
            self.unrewarded = f"{class_name} has no get_reward, so nothing gives its episodes a reward: {correction}"
        super().__init__(tools=_methods_of(self._env), **settings)

    def make_task(self, options: Mapping[str, Json]) -> Mapping[str, Json]:
        if options or not self._rows:
            return dict(options)
        return dict(self._rows[(self._seed or 0) % len(self._rows)])

    async def prompt(self, task: Mapping[str, Json]) -> Sequence[Message]:
        """Reset the author's environment for the task. As in TRL, the text that `reset` returns is appended to the last
        message of the prompt."""
        reset_text = cast(object, await self._hook(functools.partial(self._env.reset, **task)))
        if reset_text is not None and not isinstance(reset_text, str):
            class_name, returned_kind = type(self._env).__name__, type(reset_text).__name__
            raise UsageError(f"{class_name}.reset returned a {returned_kind}, neither None nor text")
        content: Any = task.get("prompt", self._default)
        opening = (
            [Message(role="user", content=content)] if isinstance(content, str) else [*cast("list[Message]", content)]
        )
        if reset_text is not None:
            last_message = opening.pop() if opening else Message(role="user", content="")
            opening.append(Message(role=last_message["role"], content=last_message["content"] + reset_text))
        self._completion, self._opening = [], opening
        return opening

    async def astep(self, action: str) -> StepResult:
        self._action = action
        return await super().astep(action)

    def after_turn(self, results: Sequence[CallResult]) -> None:
        """Keep the conversation for reward functions, as TRL gives it to them."""
        self._completion += completion_messages(self._format.parse(self._action, self.schemas), self._action, results)

    def on_text(self, text: str) -> None:
        """A message without a call is the model's last word."""
        self.finish()

    async def grade(self) -> Grade | None:
        """Grade by the reward functions, else by `get_reward`. If one raises, or gives no finite number, the outcome is
        0: it judges what the policy did, so the policy could have caused it."""
        if not self.graded:
            return None
        function_scores = dict[str, float]()
        try:
            if self._functions:
                whole_answer = self._answer()
                for function in self._functions:
                    function_score: float | None = await self._hook(function, whole_answer)
                    if function_score is not None:  # None abstains
                        function_scores[function.name] = function_score
                weight_by_name = dict(zip((function.name for function in self._functions), self._weights, strict=True))
                outcome = math.fsum(
                    weight_by_name[function_name] * function_score
                    for function_name, function_score in function_scores.items()
                )
                if not function_scores:
                    notices.note("rewards", NOBODY_JUDGES, by_policy=True)
            else:
                outcome = float(await self._hook(self._env.get_reward))
        # An author's mistake (a reward function with the wrong arguments) is the same in every episode: raised, it ends
        # the run at the first one instead of training on zeros.
        except UsageError:
            raise
        except EnvError as reward_error:  # no finite number
            notices.note("rewards", f"{reward_error}: the outcome is 0", by_policy=True)
            return Grade(outcome=0.0, success=False, info={"reward_error": str(reward_error)[:500]})
        except InfrastructureError:
            raise
        except Exception as reward_error:
            problem = f"{type(reward_error).__name__}: {reward_error}"
            _TRACEBACKS.log(
                reward_error,
                f"the reward of {type(self._env).__qualname__} raised {problem} ({place_of(reward_error)})",
            )
            return Grade(outcome=0.0, success=False, info={"reward_error": problem[:500]})
        if not math.isfinite(outcome):
            notices.note("rewards", f"get_reward gives {outcome}: the outcome is 0", by_policy=True)
            outcome = 0.0
        return Grade(
            outcome=outcome, success=outcome >= 1.0, info={"scores": dict(function_scores)} if function_scores else {}
        )

    def _answer(self) -> Answer:
        messages = without_last_results(self._completion)
        completion = messages[-1]["content"] if messages else ""
        row_columns = {
            column_name: cell_value for column_name, cell_value in self.task.items() if column_name != "prompt"
        }
        return Answer(
            prompt=self._opening,
            completion=completion,
            row=row_columns,
            talk=True,
            messages=messages,
            environment=self._env,
        )


def _functions_of(reward_funcs: Sequence[Function] | Function) -> list[RewardFunction]:
    functions = [reward_funcs] if isinstance(reward_funcs, str) or callable(reward_funcs) else list(reward_funcs)
    wrapped_functions = [
        RewardFunction.of(reference)
        if isinstance(reference, str)
        else RewardFunction.made(getattr(reference, "__name__", repr(reference)), reference)
        for reference in functions
    ]
    if alien_names := [function.name for function in wrapped_functions if not function.batched]:
        raise UsageError(
            f"reward_funcs: {alien_names[0]!r} takes no arguments of TRL's: write def f(environments, **kwargs)"
        )
    name_counts = Counter(function.name for function in wrapped_functions)
    if doubled_names := [name for name, count in name_counts.items() if count > 1]:
        raise UsageError(f"reward_funcs: {doubled_names[0]!r} is there twice: give each its own name")
    return wrapped_functions


def _weights_of(reward_weights: Sequence[float] | None, count: int) -> tuple[float, ...]:
    weights = (1.0,) * count if reward_weights is None else tuple(reward_weights)
    if len(weights) != count:
        raise UsageError(f"reward_weights = {reward_weights!r}: give one for each of the {count} reward_funcs")
    return tuple(finite(f"reward_weights[{weight_index}]", weight) for weight_index, weight in enumerate(weights))


def _methods_of(env: Any) -> list[FunctionTool]:
    """The public methods of the class as tools, by the name of the function, as in TRL."""
    class_members = cast("list[tuple[str, object]]", inspect.getmembers(cast(object, env).__class__))
    public_names = (
        member_name
        for member_name, member_value in class_members
        if inspect.isfunction(member_value) and not member_name.startswith("_")
    )
    bound_methods = [
        getattr(env, member_name) for member_name in public_names if member_name not in ("reset", "get_reward")
    ]
    return [_MethodTool(method) for method in {method.__name__: method for method in bound_methods}.values()]


class _MethodTool(FunctionTool):
    """A method as a tool. The model reads its schema as TRL writes it (by `transformers.utils.get_json_schema`); its
    arguments are checked by ours, which says the same more strictly."""

    def __init__(self, method: Callable[..., Any]) -> None:
        # Any exception, against our own rule for tools: classes for TRL rely on it that the model reads what a method
        # raises, and are here unchanged.
        super().__init__(method, ToolOptions(name=method.__name__, errors=(Exception,)))
        self._shown = json.dumps(_as_transformers(super().schema, method))

    @property
    def schema(self) -> Mapping[str, Json]:
        return json.loads(self._shown)


def _as_transformers(schema: Mapping[str, Any], method: Callable[..., Any]) -> dict[str, Any]:
    """A schema of ours as transformers writes it: without defaults and bounds of tuples, `nullable` for None, choices
    of the docstring as `enum`, and with what is returned."""
    parameters = {
        parameter_name: _plain(property_) for parameter_name, property_ in schema["parameters"]["properties"].items()
    }
    for parameter in parameters.values():
        if choices_match := _CHOICES.search(parameter.get("description", "")):
            parameter["description"] = parameter["description"][: choices_match.start()].strip()
            with suppress(ValueError):
                parameter["enum"] = [
                    choice_value.strip() if isinstance(choice_value, str) else choice_value
                    for choice_value in json.loads(choices_match[1])
                ]
    shown_parameters: dict[str, Any] = {
        "type": "object",
        "properties": {parameter_name: _ordered(parameter) for parameter_name, parameter in parameters.items()},
    }
    if required := schema["parameters"].get("required"):
        shown_parameters["required"] = required
    returned = _returned(method)
    return {"name": schema["name"], "description": schema["description"], "parameters": shown_parameters} | (
        {"return": returned} if returned else {}
    )


def _plain(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    plain_schema = {
        keyword: keyword_value
        for keyword, keyword_value in cast("dict[str, Any]", schema).items()
        if keyword not in _UNSAID
    }
    if plain_schema.get("items") == {}:
        del plain_schema["items"]
    if plain_schema.get("additionalProperties") in (True, {}):
        del plain_schema["additionalProperties"]
    for keyword_name in ("items", "additionalProperties"):
        if keyword_name in plain_schema:
            plain_schema[keyword_name] = _plain(plain_schema[keyword_name])
    if "prefixItems" in plain_schema:
        plain_schema["prefixItems"] = [_plain(schema) for schema in plain_schema["prefixItems"]]
    if "anyOf" in plain_schema:
        kind_schemas = [_plain(schema) for schema in plain_schema.pop("anyOf")]
        non_null = [kind_schema for kind_schema in kind_schemas if kind_schema != {"type": "null"}]
        if len(non_null) == 1:
            plain_schema |= non_null[0]
        elif all({*kind_schema} == {"type"} for kind_schema in non_null):
            plain_schema["type"] = sorted(kind_schema["type"] for kind_schema in non_null)
        else:
            plain_schema["anyOf"] = non_null
        if len(non_null) < len(kind_schemas):
            plain_schema["nullable"] = True
    return {
        keyword_name: plain_schema[keyword_name]
        for keyword_name in ("type", *plain_schema)
        if keyword_name in plain_schema
    }


def _ordered(schema: dict[str, Any]) -> dict[str, Any]:
    """Put the description last, as a template may write the schema in its own order."""
    description = schema.pop("description", None)
    return schema if description is None else {**schema, "description": description}


def _returned(method: Callable[..., Any]) -> dict[str, Any]:
    """The schema of what a method returns; nothing without a hint."""
    return_hint = get_type_hints(method).get("return", inspect.Signature.empty)
    if return_hint is inspect.Signature.empty:
        return {}
    with suppress(PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
        return_schema = _plain(TypeAdapter[Any](return_hint).json_schema())
        returns_match = _RETURNS.search(inspect.getdoc(method) or "")
        return {**return_schema, "description": returns_match[1].strip()} if returns_match else return_schema
    return {}


_UNSAID = ("default", "title", "minItems", "maxItems")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE | re.DOTALL)
_RETURNS = re.compile(r"^Returns:\n\s+(.*?)(?=\n\s*(?:Raises|Args):|\Z)", re.MULTILINE | re.DOTALL)
