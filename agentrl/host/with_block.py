"""Base class that makes a class with `close` a context manager."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """Gives a class that has `close` the `with` statement."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> None:
        """Let go of what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
