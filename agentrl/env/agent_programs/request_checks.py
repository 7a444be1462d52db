"""Checks of requests that agent programs send, before any part of them becomes an observation.

Owns the closed vocabulary of request keys: each is honoured, refused with one line, named as the run's business, or
named as unknown. Owns the bounds of messages and tools, too, and checks the schemas of tools. What a policy makes a
program send ends here at the latest (law 3): no later part of the rollout may stumble over it. Runs in threads.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

import jsonschema
import jsonschema.validators

from agentrl import notices
from agentrl.env.tools.calls import dump

Fields = Mapping[str, Any]

MOST_MESSAGES: Final = 10_000
MOST_TOOLS: Final = 1_000
MOST_TOOL_PARTS: Final = 10_000
"""Values in the schemas of all tools of a request: jsonschema takes up to 0.4 ms for each."""

BOUNDARY: Final = "requests of agent programs"
_MOST_SHOWN: Final = 80
_MOST_CHECKED: Final = 512
_MOST_NAME: Final = 256


class UnservedRequest(Exception):
    """The request asks for something that is not served; the text names it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A key that is refused if `asks` holds for its value, with a `hint`."""

    asks: Callable[[Any], bool]
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKeys:
    """The keys of a request, by what becomes of them. A key that is null asks for nothing."""

    honoured: frozenset[str]
    sampling: frozenset[str]
    """Keys about how an answer is sampled. In a run its file decides that: they are named, and have no effect."""
    bookkeeping: frozenset[str]
    """Keys that a server may ignore without any effect on the answer."""
    refused: Mapping[str, Refused] = field(default_factory=dict[str, Refused])

    def check(self, body: Fields, sampled: frozenset[str], otherwise: str) -> None:
        """Refuse or name the keys of `body` that are not honoured. Of the keys about sampling, those in `sampled` are;
        `otherwise` is why the others are not. Raises UnservedRequest."""
        for key, refused_key in self.refused.items():
            if body.get(key) is not None and refused_key.asks(body[key]):
                raise UnservedRequest(f"{key} = {shown(body[key])}: {refused_key.hint}")
        for key, value in body.items():
            if value is None or key in self.honoured or key in self.bookkeeping or key in self.refused:
                continue
            if key in self.sampling:
                if key not in sampled:
                    note(f"{key} has no effect: {otherwise}")
            else:
                # The key goes to `place` and not into the text: notices are counted by their text, and a policy can
                # make a program send a new key with each request.
                note("a key that is not known has no effect", place=key)


def note(what: str, place: str = "") -> None:
    """Name what a program sent and what is not honoured. `what` is of a closed set: a policy may write the rest."""
    notices.note(BOUNDARY, what, place=place, by_policy=True)


def shown(value: Any) -> str:
    """A value in one short line."""
    value_text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return value_text if len(value_text) <= _MOST_SHOWN else f"{value_text[:_MOST_SHOWN]}…"


def always(value: Any) -> bool:
    """Whether a value asks for anything: empty lists, objects and texts, zero and false do not."""
    return bool(value)


def not_in(*values: Any) -> Callable[[Any], bool]:
    """Whether a value is none of `values`."""
    return lambda value: value not in values


def kind_not_in(*kinds: str) -> Callable[[Any], bool]:
    """Whether a value is no object whose `type` is one of `kinds`."""
    return lambda value: not isinstance(value, dict) or cast("Fields", value).get("type") not in kinds


def objects(value: Any, what: str, most: int) -> list[Fields]:
    """A list of at most `most` objects. Raises UnservedRequest."""
    if not isinstance(value, list):
        raise UnservedRequest(f"{what} must be a list of objects")
    list_items = cast("list[Any]", value)
    if len(list_items) > most:
        raise UnservedRequest(f"{what} has {len(list_items)} entries: at most {most} are served")
    for item_index, list_item in enumerate(list_items):
        if not isinstance(list_item, dict):
            raise UnservedRequest(f"{what}[{item_index}] = {shown(list_item)}: give an object")
    return cast("list[Fields]", list_items)


def text_at(fields: Fields, key: str, what: str) -> str:
    """The text under a key that has to be there. Raises UnservedRequest."""
    field_value = fields.get(key)
    if not isinstance(field_value, str) or not field_value:
        raise UnservedRequest(f"{what}.{key} = {shown(field_value)}: give a text")
    return field_value


def check_tools(tools: Iterable[Fields]) -> None:
    """Check function schemas in OpenAI's envelope: names, descriptions and parameters. Raises UnservedRequest."""
    part_count = 0
    for tool_index, tool_schema in enumerate(tools):
        function: Any = tool_schema.get("function")
        field_path = f"tools[{tool_index}]"
        if not isinstance(function, dict):
            raise UnservedRequest(f"{field_path}.function = {shown(function)}: give an object")
        function_fields = cast("dict[str, Any]", function)
        tool_name = text_at(function_fields, "name", field_path)
        if len(tool_name) > _MOST_NAME:
            raise UnservedRequest(f"{field_path}.name has {len(tool_name)} characters: at most {_MOST_NAME} are served")
        description = function_fields.get("description")
        if description is not None and not isinstance(description, str):
            raise UnservedRequest(f"{field_path}.description = {shown(description)}: give a text")
        parameters: Any = function_fields.get("parameters")
        if parameters is None:
            continue
        # Counted before the check, whose time grows with it: a thousand tools of a thousand parts each would hold a
        # reader's thread for minutes, and there are two of them.
        part_count += _parts(parameters)
        if part_count > MOST_TOOL_PARTS:
            raise UnservedRequest(f"the schemas of tools have more than {MOST_TOOL_PARTS} parts: offer fewer tools")
        if schema_fault := _CHECKED.why_no_schema(parameters):
            raise UnservedRequest(
                f"{field_path}.parameters of {tool_name[:_MOST_SHOWN]!r} are no JSON schema: {schema_fault}"
            )


def _parts(value: Any) -> int:
    """The number of values within a JSON value, itself included."""
    inner_values: Iterable[Any] = ()
    if isinstance(value, dict):
        inner_values = cast("dict[str, Any]", value).values()
    elif isinstance(value, list):
        inner_values = cast("list[Any]", value)
    return 1 + sum(map(_parts, inner_values))


class _CheckedSchemas:
    """The last schemas that were checked, by digest: programs send the same tools with each request. Safe to use from
    several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: OrderedDict[bytes, str] = OrderedDict()

    def why_no_schema(self, parameters: Any) -> str:
        """Why `parameters` are no JSON schema of an object, in one line; empty if they are."""
        schema_digest = hashlib.sha256(dump(parameters).encode()).digest()
        with self._lock:
            schema_fault = self._reasons.get(schema_digest)
        # Checked outside of the lock, at the price that two threads may check the same schema: a large one takes long,
        # and other episodes must not wait for it.
        if schema_fault is None:
            schema_fault = _why_no_schema(parameters)
            with self._lock:
                self._reasons[schema_digest] = schema_fault
                if len(self._reasons) > _MOST_CHECKED:
                    self._reasons.popitem(last=False)
        return schema_fault


def _why_no_schema(parameters: Any) -> str:
    if not isinstance(parameters, dict):
        return f"{shown(parameters)} is no object"
    schema_fields = cast("dict[str, Any]", parameters)
    draft_validator: Any = jsonschema.Draft202012Validator
    try:
        # Servers name the draft that they write in, and keywords have changed their meaning since: `items` as a list is
        # right in draft 7 and wrong in 2020-12.
        if isinstance(schema_fields.get("$schema"), str):
            draft_validator = jsonschema.validators.validator_for(schema_fields, default=draft_validator)
        draft_validator.check_schema(schema_fields)
    except jsonschema.SchemaError as error:
        return f"{error.json_path}: {error.message[:200]}"
    except (ValueError, TypeError, RecursionError) as error:  # of a $schema that is no address
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


_CHECKED: Final = _CheckedSchemas()
