"""Which tenant's request goes to a shared engine next: deficit round robin over tokens, with weights.

Pure: no clock, no network. Each visit gives a tenant `quantum * weight` tokens of credit, and its requests go out, in
their order, while the credit lasts (Shreedhar and Varghese, 1995). While two tenants have requests waiting, the tokens
that went out for each, over its weight, differ by no more than a quantum and one request of either. A tenant without
waiting requests saves up no credit, and a request waits for others only while all of the engine's places are taken.

The tokens of a request are an estimate when it goes out. `done` corrects it. A visit spends two quanta at most, so that
a tenant whose estimates were too high gets its credit back little by little.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Line(Generic[T]):
    """One tenant. `credit` is in tokens, and below 0 where a request took more than was estimated."""

    name: str
    share: float
    max_running: float
    waiting: deque[tuple[T, float]] = field(default_factory=deque[tuple[T, float]])
    running: int = 0
    tokens: float = 0.0
    credit: float = 0.0

    @property
    def ready(self) -> bool:
        return bool(self.waiting) and self.running < self.max_running


class FairQueue(Generic[T]):
    """The requests that wait for one engine. `quantum` is in tokens."""

    def __init__(self, quantum: float) -> None:
        self._quantum = quantum
        self._lines: dict[str, _Line[T]] = {}
        self._ring: deque[_Line[T]] = deque()  # the tenants with waiting requests; the first one is visited
        self._spent: float | None = None  # in this visit; None: it has not begun

    def join(self, tenant: str, *, weight: float = 1.0, max_running: float = inf) -> None:
        """Take requests of a tenant from now on; `max_running` of them may be out at once."""
        self._lines[tenant] = _Line(tenant, self._quantum * weight, max_running)

    def push(self, tenant: str, item: T, tokens: float, *, first: bool = False) -> None:
        """Have a request wait: behind the tenant's others, or before them."""
        line = self._lines[tenant]
        if not line.waiting:
            self._ring.append(line)
        (line.waiting.appendleft if first else line.waiting.append)((item, tokens))
        line.tokens += tokens

    def remove(self, tenant: str, item: T) -> None:
        """Forget a request that waits."""
        line = self._lines[tenant]
        place = next(at for at, (one, _) in enumerate(line.waiting) if one is item)
        line.tokens -= line.waiting[place][1]
        del line.waiting[place]
        self._close(line)

    def pop(self) -> tuple[str, T] | None:
        """The request that goes out now; None if none waits whose tenant may have another one out."""
        if not any(line.ready for line in self._ring):
            return None
        while True:
            line = self._ring[0]
            if line.ready:
                if self._spent is None:
                    self._spent = 0.0
                    line.credit += line.share
                item, tokens = line.waiting[0]
                if tokens <= line.credit and (not self._spent or self._spent + tokens <= 2 * line.share):
                    self._take(line, tokens)
                    return line.name, item
            self._leave()

    def done(self, tenant: str, correction: float = 0.0) -> None:
        """Note that a request has ended, and took `correction` tokens more than estimated (fewer, if below 0)."""
        line = self._lines[tenant]
        line.running -= 1
        line.credit -= correction
        if not line.waiting:
            line.credit = min(line.credit, 0.0)

    def waiting(self, tenant: str) -> tuple[int, float]:
        """How many requests of a tenant wait, and their tokens."""
        return len(self._lines[tenant].waiting), self._lines[tenant].tokens

    def running(self, tenant: str) -> int:
        """How many requests of a tenant are out."""
        return self._lines[tenant].running

    def _take(self, line: _Line[T], tokens: float) -> None:
        assert self._spent is not None
        line.waiting.popleft()
        line.tokens -= tokens
        line.credit -= tokens
        line.running += 1
        self._spent += tokens
        if line.running >= line.max_running:  # it may not go on, so it waits for no one: what it could not spend lapses
            line.credit = min(line.credit, 0.0)
            self._leave()
        self._close(line)

    def _leave(self) -> None:
        """End the visit of the first tenant."""
        self._ring.rotate(-1)
        self._spent = None

    def _close(self, line: _Line[T]) -> None:
        """Leave out a tenant that has no request waiting any more."""
        if line.waiting:
            return
        if self._ring[0] is line:
            self._spent = None
        self._ring.remove(line)
        line.tokens, line.credit = 0.0, min(line.credit, 0.0)
