"""Reads in a trio program: a store on a server may fall silent for a minute, and the loop goes on meanwhile.

A file answers at once, so its reads stay in the loop. Reads of a server are made in a thread, by a connection of their
own, and never wait for a write. Never knows what is read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import trio

from agentrl.errors import StoreAway
from agentrl.store.asynchronous.threads import Aside

LOOK_S = 10.0
"""How long a read in a loop waits for a server, in seconds; its caller looks again later."""


class Readable(Protocol):
    """A store's handle."""

    @property
    def remote(self) -> bool:
        """Whether it is on a server."""
        ...


_S = TypeVar("_S", bound=Readable, covariant=True)
_T = TypeVar("_T")


class Looks(Generic[_S]):
    """Calls get `store`, those in a thread one at a time. A caller that is cancelled goes on at once; the thread goes
    on alone until the server has answered, or the store's own deadline. `inline` has no thread: for virtual time."""

    def __init__(self, store: _S, *, deadline_s: float = LOOK_S, inline: bool = False) -> None:
        self._store, self._deadline_s, self._inline = store, deadline_s, inline
        self._apart = Aside(store)

    async def __call__(self, call: Callable[[_S], _T]) -> _T:
        """What the call returns, or raises. Raises StoreAway if the server does not answer in time."""
        if self._inline or not self._store.remote:
            return call(self._store)
        with trio.move_on_after(self._deadline_s):
            return await self._apart(call)
        raise StoreAway(f"the database did not answer within {self._deadline_s:g} s: start it")


class Newest(Generic[_T]):
    """One read for all who ask meanwhile: what they get was read after they asked. If the server does not answer, they
    get what was read last, which is `first` to begin with."""

    def __init__(self, read: Callable[[], Awaitable[_T]], first: _T) -> None:
        self._read, self._last, self._turn = read, first, trio.Lock()
        self._begun = self._done = 0  # numbers of reads

    async def __call__(self) -> _T:
        asked = self._begun
        async with self._turn:
            if self._done <= asked:
                self._begun = number = self._begun + 1
                with suppress(StoreAway):
                    self._last = await self._read()
                self._done = number
        return self._last
