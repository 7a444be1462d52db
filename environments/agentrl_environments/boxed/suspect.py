"""Runs in a box with the policy's sources: imports them and does what the judge asks, one call at a time.

Everything in this process may be in the policy's hands, this file too. That is why it knows neither tests nor expected
values: the most it can do is answer, and an answer helps only if it is the right one.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import operator
import os
import sys
from typing import Any

from wire import Channel, Gone, ProtocolError, decode, encode, private_pipes

_BUILT_IN = {"len": len, "iter": iter, "next": next, "str": str, "repr": repr, "bool": bool, "hash": hash}


class Suspect:
    """The objects that the judge holds handles of."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._handles: dict[int, int] = {}
        self.channel = Channel(*private_pipes(), self.answer)

    def answer(self, request: Any) -> Any:
        try:
            return {"value": encode(self._do(*request), self._export)}
        except (Gone, ProtocolError):
            raise
        except BaseException as error:
            return {"raise": self._raised(error)}

    def _do(self, verb: str, *rest: Any) -> Any:
        if verb == "import":
            return importlib.import_module(rest[0])
        target_object, *arguments = (decode(encoded_value, self._resolve) for encoded_value in rest)
        if verb == "get":
            return getattr(target_object, arguments[0])
        if verb == "set":
            return setattr(target_object, *arguments)
        if verb == "call":
            return target_object(*arguments[0], **arguments[1])
        if verb in ("__enter__", "__exit__"):
            return getattr(type(target_object), verb)(target_object, *arguments)
        return (_BUILT_IN.get(verb) or getattr(operator, verb))(target_object, *arguments)

    def _export(self, value: Any) -> Any:
        if isinstance(value, type) and issubclass(value, BaseException):
            if value.__module__ == "builtins":
                return {"builtin": value.__name__}
            return {
                "class": [
                    self._handle(value),
                    value.__name__,
                    [self._export(class_base) for class_base in value.__bases__],
                ]
            }
        return {"object": self._handle(value)}

    def _handle(self, value: Any) -> int:
        """The handle of an object: one for all its uses. The object lives as long as the process."""
        if id(value) not in self._handles:
            self._handles[id(value)] = len(self._objects)
            self._objects.append(value)
        return self._handles[id(value)]

    def _resolve(self, tag: str, inside: Any) -> Any:
        if tag == "object":
            return self._objects[inside]
        if tag == "builtin":
            return getattr(builtins, inside)
        if tag == "error":
            return getattr(builtins, inside[0], RuntimeError)(*inside[1])
        if tag == "callback":
            return lambda *args, **kwargs: self._call_back(inside, args, kwargs)
        raise ProtocolError(tag)

    def _call_back(self, handle: int, args: Any, kwargs: Any) -> Any:
        call_request = [handle, encode(args, self._export), encode(kwargs, self._export)]
        judge_answer = self.channel.ask(call_request)
        if "raise" in judge_answer:
            raise decode(judge_answer["raise"], self._resolve)
        return decode(judge_answer["value"], self._resolve)

    def _raised(self, error: BaseException) -> Any:
        """Class, arguments, text and attributes of an exception."""
        try:
            error_text = str(error)
        except BaseException:
            error_text = ""
        error_attributes = {
            attribute: attribute_value
            for attribute, attribute_value in vars(error).items()
            if not attribute.startswith("_")
        }
        error_parts = (type(error), error.args, error_text, error_attributes)
        return {
            "handle": self._handle(error),
            "parts": [encode(error_part, self._export) for error_part in error_parts],
        }


if __name__ == "__main__":
    sys.path.insert(0, os.path.abspath("sources"))  # noqa: PTH100  (pathlib is slow to import)
    with contextlib.suppress(Gone):
        Suspect().channel.serve()
