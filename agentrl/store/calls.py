"""Calls of a store that are made together, and what came of each. Knows no database."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Result(NamedTuple):
    """What came of a call: a value, or the error that it raised."""

    value: Any = None
    error: Exception | None = None


class Several(ABC):
    """A call that `Database.together` makes at once with others of its kind."""

    __slots__ = ()

    @abstractmethod
    def __call__(self) -> Any:
        """Make it alone."""

    @classmethod
    @abstractmethod
    def all(cls, calls: Sequence[Any]) -> list[Result]:
        """Make calls in their order; what came of each. An error that it raises undoes them all."""


def each(calls: Sequence[Callable[[], Any]]) -> list[Result]:
    """What came of calls. Those that can be made at once are, before the others. Raises the error of any other."""
    several = [call for call in calls if isinstance(call, Several)]
    made = iter(several[0].all(several) if several else ())
    first = {id(call): next(made) for call in several}
    return [first[id(call)] if id(call) in first else Result(value=call()) for call in calls]
