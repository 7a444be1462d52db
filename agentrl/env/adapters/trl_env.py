"""Environment classes written for TRL's `environment_factory`, unchanged: `reset(**row)`, public methods, `get_reward`.

Their rules: public methods are the tools; `reset` takes the row of the data set and may return text, which is appended
to the last prompt message; whatever a method raises is read by the model; a message without a tool call ends the
episode; `get_reward()` is the outcome.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast, get_type_hints

from pydantic import TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError

from agentrl import registry
from agentrl.env.tool_env import Grade, ToolEnv
from agentrl.env.tools.tools import FunctionTool, ToolOptions
from agentrl.errors import InfrastructureError, Tracebacks, UsageError, place_of
from agentrl.records import Json, Message

_TRACEBACKS = Tracebacks()  # of get_reward, by kind: an instance lives for one episode


class TrlEnv(ToolEnv):
    """`agentrl/TRL-v0`. A class written for TRL, unchanged. `env` is the class (or a factory), or its reference
    `module:Class`; `prompt` the opening where the row has no `prompt` of its own.

    The tools are those of TRL: names, descriptions and parameters. Blocking methods run in a thread. Rows come from the
    reset options. Such an environment does not promise replay."""

    def __init__(self, env: str | Callable[[], Any], *, prompt: str | Sequence[Message] = "", **settings: Any) -> None:
        make = registry.load_reference(env) if isinstance(env, str) else env
        self._env = make()
        if not callable(getattr(self._env, "reset", None)):
            raise UsageError(f"{type(self._env).__name__} has no reset method: it is no environment in TRL's sense")
        self._default = prompt
        self.graded = hasattr(self._env, "get_reward")
        super().__init__(tools=_methods_of(self._env), **settings)

    async def prompt(self, task: Mapping[str, Json]) -> Sequence[Message]:
        seen = cast(object, await self._hook(functools.partial(self._env.reset, **task)))
        if seen is not None and not isinstance(seen, str):
            name, kind = type(self._env).__name__, type(seen).__name__
            raise UsageError(f"{name}.reset returned a {kind}, neither None nor text")
        given: Any = task.get("prompt", self._default)
        opening = [Message(role="user", content=given)] if isinstance(given, str) else [*cast("list[Message]", given)]
        if seen is not None:
            last = opening.pop() if opening else Message(role="user", content="")
            opening.append(Message(role=last["role"], content=last["content"] + seen))
        return opening

    def on_text(self, text: str) -> None:
        """A message without a call is the model's last word."""
        self.finish()

    async def grade(self) -> Grade | None:
        """What `get_reward` gives. If it raises, or gives no finite number, the outcome is 0: it judges what the policy
        did, so the policy could have caused it."""
        get_reward = getattr(self._env, "get_reward", None)
        if get_reward is None:
            return None
        try:
            outcome = float(await self._hook(get_reward))
        except InfrastructureError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            _TRACEBACKS.log(error, f"get_reward of {type(self._env).__qualname__} raised {said} ({place_of(error)})")
            return Grade(outcome=0.0, success=False, info={"reward_error": said[:500]})
        outcome = outcome if math.isfinite(outcome) else 0.0
        return Grade(outcome=outcome, success=outcome >= 1.0)


def _methods_of(env: Any) -> list[FunctionTool]:
    """The public methods of the class as tools, by the name of the function, as in TRL."""
    members = cast("list[tuple[str, object]]", inspect.getmembers(cast(object, env).__class__))
    public = (name for name, value in members if inspect.isfunction(value) and not name.startswith("_"))
    methods = [getattr(env, name) for name in public if name not in ("reset", "get_reward")]
    return [_MethodTool(method) for method in {method.__name__: method for method in methods}.values()]


class _MethodTool(FunctionTool):
    """A method as a tool. The model reads its schema as TRL writes it (by `transformers.utils.get_json_schema`); its
    arguments are checked by ours, which says the same more strictly."""

    def __init__(self, method: Callable[..., Any]) -> None:
        super().__init__(method, ToolOptions(name=method.__name__, errors=(Exception,)))
        self._shown = json.dumps(_as_transformers(super().schema, method))

    @property
    def schema(self) -> Mapping[str, Json]:
        return json.loads(self._shown)


def _as_transformers(schema: Mapping[str, Any], method: Callable[..., Any]) -> dict[str, Any]:
    """A schema of ours as transformers writes it: without defaults and bounds of tuples, `nullable` for None, choices
    of the docstring as `enum`, and with what is returned."""
    parameters = {name: _plain(property_) for name, property_ in schema["parameters"]["properties"].items()}
    for parameter in parameters.values():
        if found := _CHOICES.search(parameter.get("description", "")):
            parameter["description"] = parameter["description"][: found.start()].strip()
            with suppress(ValueError):
                parameter["enum"] = [each.strip() if isinstance(each, str) else each for each in json.loads(found[1])]
    shown: dict[str, Any] = {
        "type": "object",
        "properties": {name: _ordered(parameter) for name, parameter in parameters.items()},
    }
    if required := schema["parameters"].get("required"):
        shown["required"] = required
    returned = _returned(method)
    return {"name": schema["name"], "description": schema["description"], "parameters": shown} | (
        {"return": returned} if returned else {}
    )


def _plain(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    left = {key: value for key, value in cast("dict[str, Any]", schema).items() if key not in _UNSAID}
    if left.get("items") == {}:
        del left["items"]
    if left.get("additionalProperties") in (True, {}):
        del left["additionalProperties"]
    for name in ("items", "additionalProperties"):
        if name in left:
            left[name] = _plain(left[name])
    if "prefixItems" in left:
        left["prefixItems"] = [_plain(schema) for schema in left["prefixItems"]]
    if "anyOf" in left:
        kinds = [_plain(schema) for schema in left.pop("anyOf")]
        given = [kind for kind in kinds if kind != {"type": "null"}]
        if len(given) == 1:
            left |= given[0]
        elif all({*kind} == {"type"} for kind in given):
            left["type"] = sorted(kind["type"] for kind in given)
        else:
            left["anyOf"] = given
        if len(given) < len(kinds):
            left["nullable"] = True
    return {name: left[name] for name in ("type", *left) if name in left}


def _ordered(schema: dict[str, Any]) -> dict[str, Any]:
    """With the description last, as a template may write the schema in its own order."""
    said = schema.pop("description", None)
    return schema if said is None else {**schema, "description": said}


def _returned(method: Callable[..., Any]) -> dict[str, Any]:
    """The schema of what a method returns; nothing without a hint."""
    hint = get_type_hints(method).get("return", inspect.Signature.empty)
    if hint is inspect.Signature.empty:
        return {}
    with suppress(PydanticSchemaGenerationError, PydanticInvalidForJsonSchema):
        shown = _plain(TypeAdapter[Any](hint).json_schema())
        said = _RETURNS.search(inspect.getdoc(method) or "")
        return {**shown, "description": said[1].strip()} if said else shown
    return {}


_UNSAID = ("default", "title", "minItems", "maxItems")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE | re.DOTALL)
_RETURNS = re.compile(r"^Returns:\n\s+(.*?)(?=\n\s*(?:Raises|Args):|\Z)", re.MULTILINE | re.DOTALL)
