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
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [encode(item, export) for item in value]
    if kind in _GROUPS:
        return {_GROUPS[kind]: [encode(item, export) for item in value]}
    if kind is dict:
        return {"d": [[encode(key, export), encode(item, export)] for key, item in value.items()]}
    if kind is bytes:
        return {"b": value.decode("latin-1")}
    tag = _NUMBERS.get((kind.__module__, kind.__name__))
    return {tag: str(value)} if tag else export(value)


def decode(data: Any, resolve: Callable[[str, Any], Any]) -> Any:
    """The value that `encode` wrote. Raises ProtocolError for any other text."""
    if data is None or type(data) in (bool, int, float, str):
        return data
    if type(data) is list:
        return [decode(item, resolve) for item in data]
    if type(data) is not dict or len(data) != 1:
        raise ProtocolError("neither plain nor one tag")
    ((tag, inside),) = data.items()
    try:
        if tag in _MAKERS:
            return _MAKERS[tag](decode(item, resolve) for item in inside)
        if tag == "d":
            return {decode(key, resolve): decode(item, resolve) for key, item in inside}
        if tag == "b":
            return inside.encode("latin-1")
        if tag == "q":
            from fractions import Fraction

            return Fraction(inside)
        if tag == "m":
            from decimal import Decimal

            return Decimal(inside)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ProtocolError(f"{tag}: {error}") from error
    return resolve(tag, inside)


class Channel:
    """Two descriptors and one rule: whoever sent a request reads until the answer comes, and answers meanwhile."""

    def __init__(self, incoming: int, outgoing: int, answer: Callable[[Any], Any], *, prefix: str = "") -> None:
        self._lines = os.fdopen(incoming, "rb")
        self._outgoing, self._answer, self._prefix = outgoing, answer, prefix

    def ask(self, request: Any) -> Any:
        """The answer to `request`. Raises Gone, ProtocolError."""
        self.say({"ask": request})
        while True:
            message = self.hear()
            if "answer" in message:
                return message["answer"]
            self.say({"answer": self._answer(message["ask"])})

    def serve(self) -> None:
        """Answer until the other side ends."""
        while True:
            self.say({"answer": self._answer(self.hear()["ask"])})

    def say(self, message: Any) -> None:
        data = (self._prefix + json.dumps(message) + "\n").encode()
        while data:
            data = data[os.write(self._outgoing, data) :]

    def hear(self) -> Any:
        line = self._lines.readline(LONGEST_LINE)
        if not line.endswith(b"\n"):
            raise Gone("the other side has ended")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ProtocolError("no JSON") from error
        if type(message) is not dict or not message.keys() <= {"ask", "answer"} or len(message) != 1:
            raise ProtocolError("neither a question nor an answer")
        return message


def private_pipes() -> tuple[int, int]:
    """Copies of stdin and stdout for the protocol; whatever else the process prints goes nowhere."""
    incoming, outgoing = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    return incoming, outgoing
