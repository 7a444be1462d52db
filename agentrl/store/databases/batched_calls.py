"""Calls of a store that are made together, and what came of each. Knows no database."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, ClassVar, NamedTuple


class Result(NamedTuple):
    """What came of a call: a value, or the error that it raised."""

    value: Any = None
    error: Exception | None = None


class Several(ABC):
    """A call that `Database.together` makes at once with others of its kind: all that come one after the other."""

    __slots__ = ()

    first: ClassVar[bool] = False
    """Whether calls of this kind go before all others."""

    @abstractmethod
    def __call__(self) -> Any:
        """Make it alone."""

    @classmethod
    @abstractmethod
    def all(cls, calls: Sequence[Any]) -> list[Result]:
        """Make calls in their order; what came of each. An error that it raises undoes them all."""


def each(calls: Sequence[Callable[[], Any]]) -> list[Result]:
    """What came of calls. Raises the error of one that is made alone."""
    made = dict[int, Result]()
    order = sorted(range(len(calls)), key=lambda at: not (isinstance(call := calls[at], Several) and call.first))
    for kind, places in groupby(order, key=lambda at: _kind(calls[at])):
        own = list(places)
        if kind is None:
            made.update((at, Result(value=calls[at]())) for at in own)
        else:
            made.update(zip(own, kind(type(calls[own[0]]), [calls[at] for at in own]), strict=True))
    return [made[at] for at in range(len(calls))]


def _kind(call: Callable[[], Any]) -> Callable[[type, Sequence[Any]], list[Result]] | None:
    """How calls of its kind are made at once; None if they are not."""
    return call.all.__func__ if isinstance(call, Several) else None
