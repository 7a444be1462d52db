"""Calls of the run store from a trio program: in a thread of their own, or in the loop where they cannot wait long.

A call of a store that is a file is short, but a write may wait for another process's write lock; a store on a server
answers late or never. So writes, and calls of a server, are made in threads. What an episode writes goes through
`agentrl.store.journal_writer` instead, which commits many writes at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import trio

from agentrl.errors import StoreAway
from agentrl.store.databases.change_signal import Role, Signal

LOOK_S = 10.0
"""How long a read in a loop waits for a server, in seconds; its caller looks again later."""

_BESIDE_S = 0.02
_S = TypeVar("_S")
_T = TypeVar("_T")


class Aside(Generic[_S]):
    """Calls get `store`, one at a time and in order. A call whose caller is cancelled is still made, before any later
    one. `inline` makes each in the caller's task, without a thread: for virtual time."""

    def __init__(self, store: _S, *, inline: bool = False) -> None:
        self._store, self._inline = store, inline
        self._one = trio.CapacityLimiter(1)

    async def __call__(self, call: Callable[[_S], _T]) -> _T:
        if self._inline:
            return call(self._store)
        # The thread of an abandoned call keeps the limiter's only token until it has ended. So a cancelled caller
        # leaves at once, and still no later call overtakes the one that it left behind.
        return await trio.to_thread.run_sync(call, self._store, abandon_on_cancel=True, limiter=self._one)


class Readable(Protocol):
    """A store's handle."""

    @property
    def remote(self) -> bool:
        """Whether it is on a server."""
        ...


_R = TypeVar("_R", bound=Readable, covariant=True)


class Looks(Generic[_R]):
    """Calls get `store`, those in a thread one at a time. A caller that is cancelled goes on at once; the thread goes
    on alone until the server has answered, or the store's own deadline. `inline` has no thread: for virtual time."""

    def __init__(self, store: _R, *, deadline_s: float = LOOK_S, inline: bool = False) -> None:
        self._store, self._deadline_s, self._inline = store, deadline_s, inline
        self._apart = Aside(store)

    async def __call__(self, call: Callable[[_R], _T]) -> _T:
        """Make the call. Raises its errors, and StoreAway if the server does not answer in time."""
        # A read of a file waits for no writer (SQLite's log keeps the old pages) and takes microseconds. A thread would
        # take longer than the read, and every idle worker makes such reads all the time.
        if self._inline or not self._store.remote:
            return call(self._store)
        with trio.move_on_after(self._deadline_s):
            return await self._apart(call)
        raise StoreAway(f"the database did not answer within {self._deadline_s:g} s: start it")


class Newest(Generic[_T]):
    """One read for all who call meanwhile: what they get was read after their call. If the server does not answer, they
    get what was read last, which is `first` to begin with."""

    def __init__(self, read: Callable[[], Awaitable[_T]], first: _T) -> None:
        self._read, self._last, self._turn = read, first, trio.Lock()
        self._begun = self._done = 0  # numbers of reads

    async def __call__(self) -> _T:
        # A caller that comes while a read is under way does not take its result: the read may have begun before the
        # change that the caller has just heard of. It waits for the next read, and so does everybody else who came
        # meanwhile; so many callers cost two reads, not one each. `tests/store/test_looks.py` holds both halves.
        reads_before = self._begun
        async with self._turn:
            if self._done <= reads_before:
                self._begun = read_number = self._begun + 1
                with suppress(StoreAway):
                    self._last = await self._read()
                self._done = read_number
        return self._last


class Signalling(Protocol):
    """A store that signals changes."""

    def signal(self, role: Role) -> Signal: ...


class Waiting:
    """`await waiting(role, timeout_s)` returns as soon as there may be work for `role` that was not there when this
    last returned; or at the timeout. One for a loop."""

    def __init__(self, store: Signalling) -> None:
        self._store = store
        self._looks: dict[Role, _Looking] = {}

    async def __call__(self, role: Role, timeout_s: float) -> None:
        work_signal = self._store.signal(role)
        looking = self._looks.setdefault(role, _Looking(work_signal))
        with trio.move_on_after(timeout_s):
            # Two counters, and not one flag: several tasks of a process may wait for the same role, and a flag would be
            # consumed by the first of them while the others sleep on.
            changes_seen = looking.reported
            while await looking() <= changes_seen:  # other processes write, and no event of ours shows it
                with trio.move_on_after(work_signal.pause_s):
                    await _woken(work_signal.wakes)
            looking.reported = looking.changes


class _Looking:
    """Looks at a signal, one look at a time; at that of a server in a thread.

    `changes` counts the changes seen, `reported` those of them that some caller has returned with. All callers that
    wait return with a change; one that a cancelled caller saw is reported to the next."""

    def __init__(self, signal: Signal) -> None:
        self._look = Aside(signal.changed, inline=not signal.remote)
        self.changes = self.reported = 0

    async def __call__(self) -> int:
        await self._look(self._note)
        return self.changes

    def _note(self, changed: Callable[[], bool]) -> None:
        self.changes += changed()


async def _woken(wakes: int | None) -> None:
    if wakes is None:
        await trio.sleep_forever()
    else:
        try:
            await trio.lowlevel.wait_readable(wakes)
        # trio lets one task wait for a descriptor. The others of the role look again soon instead; they share the look
        # itself, so this costs a wake-up and no query.
        except (trio.BusyResourceError, OSError):  # another task of this role waits there, or a look has closed it
            await trio.sleep(_BESIDE_S)
