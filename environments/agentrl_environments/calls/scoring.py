"""The score of an answer: which calls of a turn are the expected ones. Knows schemas and values, no domain and no text
of a model.

Arguments are compared by the type that the function's schema gives them:

    string     equal once case, blanks and punctuation are left out; a value of an enum letter by letter
    integer    the number, written without a point
    number     the number, with or without a point
    boolean    true or false
    array      the same items in the same order
    object     its members, as the arguments of a call

An argument that the request gives must be there. One that it does not give may be left out, or be the default of the
schema. Any other argument is invented, and the call is wrong.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from agentrl.records import Json

_MOST_CALLS: Final = 16
"""An answer of more calls earns no share; no task expects more than three."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call by name, expected or made."""

    name: str
    arguments: Mapping[str, Json]


Parameters = Mapping[str, Mapping[str, Any]]
"""The `parameters` of each offered function by its name, as JSON schema."""


def is_right(parameters: Parameters, expected_calls: Sequence[Call], made_calls: Sequence[Call]) -> bool:
    """Whether the calls made are the expected ones, each once, in any order."""
    if len(made_calls) != len(expected_calls):
        return False
    remaining_calls = list(made_calls)
    for expected_call in expected_calls:
        # Any that fits will do, as no two expected calls of a task fit the same one (`tasks` sees to that).
        fits = [call_fits(parameters, expected_call, made_call) for made_call in remaining_calls]
        if True not in fits:
            return False
        del remaining_calls[fits.index(True)]
    return True


def call_fits(parameters: Parameters, expected_call: Call, made_call: Call) -> bool:
    """Whether a call is the expected one."""
    if made_call.name != expected_call.name:
        return False
    return _members_fit(parameters[expected_call.name], expected_call.arguments, made_call.arguments)


def share_of(parameters: Parameters, expected_calls: Sequence[Call], made_calls: Sequence[Call]) -> float:
    """How much of the expected calls an answer has, from 0 to 1: a call counts by the share of its name and its
    arguments that are right, among all that were expected or made."""
    if not made_calls or len(made_calls) > _MOST_CALLS:
        return 0.0
    remaining_calls, share_sum = list(made_calls), 0.0
    for expected_call in expected_calls:
        shares = [_share_of_call(parameters, expected_call, made_call) for made_call in remaining_calls]
        if shares and max(shares) > 0:
            share_sum += max(shares)
            del remaining_calls[shares.index(max(shares))]
    # Over the larger number: a call too many costs as much as one that is missing, so that guesses in several calls
    # earn no more than the best of them alone.
    return share_sum / max(len(expected_calls), len(made_calls))


def _share_of_call(parameters: Parameters, expected_call: Call, made_call: Call) -> float:
    if made_call.name != expected_call.name:
        return 0.0
    properties = parameters[expected_call.name]["properties"]
    names = {*expected_call.arguments, *made_call.arguments}
    right_names = [
        name
        for name in names
        if name in properties
        and name in made_call.arguments
        and _value_fits(
            properties[name], _right_value(properties[name], expected_call.arguments, name), made_call.arguments[name]
        )
    ]
    return (1 + len(right_names)) / (1 + len(names))


def _members_fit(schema: Mapping[str, Any], expected: Mapping[str, Json], made: Mapping[str, Json]) -> bool:
    properties = schema["properties"]
    return (
        made.keys() <= properties.keys()
        and expected.keys() <= made.keys()
        and all(
            _value_fits(properties[name], _right_value(properties[name], expected, name), made[name]) for name in made
        )
    )


def _right_value(schema: Mapping[str, Any], expected: Mapping[str, Json], name: str) -> Json:
    """The right value of an argument: the request's, else the default."""
    return expected[name] if name in expected else schema["default"]


def _value_fits(schema: Mapping[str, Any], expected: Any, made: Any) -> bool:
    match schema["type"]:
        case "string":
            if not isinstance(made, str):
                return False
            return made == expected if "enum" in schema else plain(made) == plain(expected)
        case "integer":
            return type(made) is int and made == expected
        case "number":
            return type(made) in (int, float) and made == expected
        case "boolean":
            return made is expected
        case "array":
            if not isinstance(made, list) or len(cast("list[Any]", made)) != len(expected):
                return False
            pairs = zip(expected, cast("list[Any]", made), strict=True)
            return all(_value_fits(schema["items"], expected_item, made_item) for expected_item, made_item in pairs)
        case _:
            return isinstance(made, dict) and _members_fit(schema, expected, cast("dict[str, Json]", made))


def plain(text: str) -> str:
    """A text without case and punctuation, its words one blank apart."""
    return " ".join(re.findall(r"[^\W_]+", unicodedata.normalize("NFKC", text).casefold()))
