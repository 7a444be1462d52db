"""The messages between judge and suspect: one JSON value a line, plain data by value, all else by handle.

Runs in boxes, so it is standard library only. A value is plain by its exact type: an `int` that arrives is an `int`,
never a subclass with methods of its own.

    null true 1 1.5 "a"      themselves
    [..]                     list
    {"t": [..]}              tuple; likewise "s" set, "z" frozenset
    {"d": [[key, value]..]}  dict
    {"b": "latin-1"}         bytes
    {"q": "1/3"}             Fraction; likewise "m" Decimal
    {other: ..}              an object of one side: what its `export` wrote and the other's `resolve` reads
"""

from __future__ import annotations

import json
import os
from typing import Any, Callable  # noqa: UP035  (boxes may have an older Python)

_GROUPS: dict[type, str] = {tuple: "t", set: "s", frozenset: "z"}
_MAKERS: dict[str, Callable[[Any], Any]] = {tag: kind for kind, tag in _GROUPS.items()}
_NUMBERS = {("fractions", "Fraction"): "q", ("decimal", "Decimal"): "m"}
LONGEST_LINE = 1 << 20


class ProtocolError(BaseException):
    """The other side wrote something that is no message. No `except Exception` of a test or a source catches it."""


class Gone(BaseException):
    """The other side has ended, or was ended."""


def encode(value: Any, export: Callable[[Any], Any]) -> Any:
    """`value` as JSON; `export` writes values that are not plain."""
    value_type = type(value)
    if value is None or value_type in (bool, int, float, str):
        return value
    if value_type is list:
        return [encode(inner_value, export) for inner_value in value]
    if value_type in _GROUPS:
        return {_GROUPS[value_type]: [encode(inner_value, export) for inner_value in value]}
    if value_type is dict:
        return {
            "d": [[encode(inner_key, export), encode(inner_value, export)] for inner_key, inner_value in value.items()]
        }
    if value_type is bytes:
        return {"b": value.decode("latin-1")}
    number_tag = _NUMBERS.get((value_type.__module__, value_type.__name__))
    return {number_tag: str(value)} if number_tag else export(value)


def decode(data: Any, resolve: Callable[[str, Any], Any]) -> Any:
    """The value that `encode` wrote. Raises ProtocolError for any other text."""
    if data is None or type(data) in (bool, int, float, str):
        return data
    if type(data) is list:
        return [decode(encoded_item, resolve) for encoded_item in data]
    if type(data) is not dict or len(data) != 1:
        raise ProtocolError("neither plain nor one tag")
    ((value_tag, tagged_value),) = data.items()
    try:
        if value_tag in _MAKERS:
            return _MAKERS[value_tag](decode(encoded_item, resolve) for encoded_item in tagged_value)
        if value_tag == "d":
            return {
                decode(encoded_key, resolve): decode(encoded_item, resolve)
                for encoded_key, encoded_item in tagged_value
            }
        if value_tag == "b":
            return tagged_value.encode("latin-1")
        if value_tag == "q":
            from fractions import Fraction

            return Fraction(tagged_value)
        if value_tag == "m":
            from decimal import Decimal

            return Decimal(tagged_value)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ProtocolError(f"{value_tag}: {error}") from error
    return resolve(value_tag, tagged_value)


class Channel:
    """Two descriptors and one rule: whoever sent a request reads until the answer comes, and answers meanwhile."""

    def __init__(self, incoming: int, outgoing: int, answer: Callable[[Any], Any], *, prefix: str = "") -> None:
        self._lines = os.fdopen(incoming, "rb")
        self._outgoing, self._answer, self._prefix = outgoing, answer, prefix

    def ask(self, request: Any) -> Any:
        """The answer to `request`. Raises Gone, ProtocolError."""
        self.say({"ask": request})
        while True:
            wire_message = self.hear()
            if "answer" in wire_message:
                return wire_message["answer"]
            self.say({"answer": self._answer(wire_message["ask"])})

    def serve(self) -> None:
        """Answer until the other side ends."""
        while True:
            self.say({"answer": self._answer(self.hear()["ask"])})

    def say(self, message: Any) -> None:
        message_bytes = (self._prefix + json.dumps(message) + "\n").encode()
        while message_bytes:
            message_bytes = message_bytes[os.write(self._outgoing, message_bytes) :]

    def hear(self) -> Any:
        wire_line = self._lines.readline(LONGEST_LINE)
        if not wire_line.endswith(b"\n"):
            raise Gone("the other side has ended")
        try:
            wire_message = json.loads(wire_line)
        except (ValueError, RecursionError) as error:
            raise ProtocolError("no JSON") from error
        if type(wire_message) is not dict or not wire_message.keys() <= {"ask", "answer"} or len(wire_message) != 1:
            raise ProtocolError("neither a question nor an answer")
        return wire_message


def private_pipes() -> tuple[int, int]:
    """Copies of stdin and stdout for the protocol; whatever else the process prints goes nowhere."""
    incoming, outgoing = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    return incoming, outgoing
