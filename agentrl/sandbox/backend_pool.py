"""Boxes made ahead of need. Owns boxes until they are handed out, never after; knows nothing of episodes.

    async with Pool(backend, ready=8) as pool:
        box = await pool.take(spec, setup)      # a warm one if there is one, else a new one
        ...
        await box.close()                       # the taker's; a used box never comes back

The pool learns from its takers: after the first `take` of a kind it keeps `ready` boxes of it, and
the kinds taken longest ago give way when all together would exceed `most`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, runtime_checkable

import trio

from agentrl.errors import AgentRLError, SandboxError, SandboxPathError, boundary
from agentrl.host.clocks import unwatched
from agentrl.protocols import ExecResult, NetworkPolicy, Sandbox, SandboxBackend, SandboxSpec
from agentrl.sandbox.network_policy import opened

_ALIVE_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0  # after a box that could not be made


@runtime_checkable
class Checkable(Protocol):
    """A box that knows a cheaper question than a command: whether it can still be used."""

    async def alive(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Work in a box before it is handed out: files are laid, then commands run; each must succeed. With `network` the
    commands may reach what it allows, and nothing afterwards may."""

    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    commands: Sequence[Sequence[str]] = ()
    timeout_s: float = 120.0  # of each command
    network: NetworkPolicy | None = None


def kind_of(spec: SandboxSpec, setup: Setup) -> str:
    """A hash of spec and setup; boxes of one kind are interchangeable."""
    kind_digest = hashlib.sha256()
    kind_facts: list[object] = [spec.image, spec.limits, spec.network, spec.covered, sorted(spec.env.items())]
    kind_facts += [
        sorted(spec.files.items()),
        sorted(setup.files.items()),
        [list(setup_command) for setup_command in setup.commands],
    ]
    kind_facts.append(setup.network)
    # Whatever a command of the box could notice must be in here, or an episode gets a box that was set up for another
    # one. A forgotten field costs nothing until two environments differ in it alone.
    kind_digest.update(repr(kind_facts).encode("utf-8", "surrogatepass"))
    return kind_digest.hexdigest()


@dataclass(slots=True, kw_only=True)
class Shelf:
    """The ready boxes of one kind, and the task that refills them."""

    spec: SandboxSpec
    setup: Setup
    boxes: deque[Sandbox] = field(default_factory=deque["Sandbox"])
    refill: trio.Event = field(default_factory=trio.Event)
    filled: trio.Event = field(default_factory=trio.Event)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


@dataclass(slots=True)
class Counts:
    """Counts of boxes so far."""

    made: int = 0
    warm: int = 0  # handed out ready
    cold: int = 0  # made while the taker waited
    dead: int = 0  # were dead at hand-out
    failed: int = 0  # could not be made


class Pool:
    """See the module. Satisfies `SandboxBackend`, so that it can stand wherever a backend is expected."""

    def __init__(
        self,
        backend: SandboxBackend,
        *,
        ready: int = 4,
        most: int = 64,
        creating: int = 2,
        per_second: float = 50.0,
    ) -> None:
        """`ready` boxes are kept of each kind, `most` in all; at most `creating` are made at once and `per_second`
        begun in a second. The pool closes the backend at its end."""
        self.name = backend.name
        self.counts = Counts()
        self._backend, self._ready, self._most = backend, ready, most
        self._creating = trio.CapacityLimiter(creating)
        self._interval_s = 1.0 / per_second
        self._next_start = 0.0
        self._shelves: OrderedDict[str, Shelf] = OrderedDict()
        self._exit = AsyncExitStack()
        self._nursery: trio.Nursery | None = None

    async def __aenter__(self) -> Self:
        self._nursery = await self._exit.enter_async_context(trio.open_nursery())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End refilling, close the boxes that nobody took, then the backend. Idempotent."""
        if self._nursery is not None:
            self._nursery.cancel_scope.cancel()
            self._nursery = None
            await self._exit.aclose()
        with trio.CancelScope(shield=True):
            while self._shelves:
                _, last_shelf = self._shelves.popitem()
                await _close_all(last_shelf.boxes)
            await self._backend.aclose()

    async def create(self, spec: SandboxSpec) -> Sandbox:
        """A box with its files, as any backend gives it. Boxes that differ in their files alone are of one kind."""
        taken_box = await self.take(replace(spec, files={}))
        try:
            await _lay(taken_box, spec.files)
        except BaseException:
            await _close_all([taken_box])
            raise
        return taken_box

    async def take(self, spec: SandboxSpec, setup: Setup | None = None) -> Sandbox:
        """A live box of this kind; it is the caller's to close. Raises SandboxError if none can be made."""
        kind_shelf = self._shelf(spec, setup or Setup())
        while kind_shelf.boxes:
            taken_box = kind_shelf.boxes.popleft()
            # Before the box is tried: the next one is then made while this one answers.
            kind_shelf.refill.set()
            try:
                is_alive = await _is_alive(taken_box)
            except BaseException:
                await _close_all([taken_box])
                raise
            # Boxes may lie for long, and meanwhile the kernel's memory killer, an engine's restart or an operator may
            # have ended one. Found out here it costs one question; found out by the episode it would be a failure of
            # its first command.
            if is_alive:
                self.counts.warm += 1
                return taken_box
            self.counts.dead += 1
            await _close_all([taken_box])
        # Made by the taker itself, not awaited from the refilling task: a backend that fails tells it to someone who
        # can raise it.
        taken_box = await self._make(kind_shelf)
        self.counts.cold += 1
        return taken_box

    async def fill(self, spec: SandboxSpec, setup: Setup | None = None) -> None:
        """Wait until `ready` boxes of this kind lie there."""
        kind_shelf = self._shelf(spec, setup or Setup())
        while len(kind_shelf.boxes) < self._ready:
            await kind_shelf.filled.wait()

    def _shelf(self, spec: SandboxSpec, setup: Setup) -> Shelf:
        """The shelf of a kind, now the one used last; others give way to it."""
        if self._nursery is None:
            raise SandboxError("the pool is not open: use `async with Pool(...)`")
        box_kind = kind_of(spec, setup)
        if box_kind not in self._shelves:
            new_shelf = self._shelves[box_kind] = Shelf(spec=spec, setup=setup)
            # The task outlives the step that happened to start it, so its waits must not count for that step's
            # deadline.
            with unwatched():
                self._nursery.start_soon(self._refill, new_shelf)
        self._shelves.move_to_end(box_kind)
        while len(self._shelves) > max(1, self._most // max(1, self._ready)):
            _, oldest_shelf = self._shelves.popitem(last=False)
            # The task that refills a shelf closes its boxes when it ends. Closed from here, a box that is being made at
            # this moment would come to a shelf that nobody looks at any more.
            oldest_shelf.scope.cancel()
        return self._shelves[box_kind]

    async def _refill(self, shelf: Shelf) -> None:
        """Keep one shelf full until it gives way; close what is left on it."""
        pause_s = _FIRST_PAUSE_S
        try:
            with shelf.scope:
                while True:
                    while len(shelf.boxes) < self._ready:
                        try:
                            shelf.boxes.append(await self._make(shelf))
                            pause_s = _FIRST_PAUSE_S
                        except AgentRLError:  # whoever takes next makes one and sees why it fails
                            await trio.sleep(pause_s)
                            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                    shelf.filled.set()
                    shelf.filled = trio.Event()
                    shelf.refill = trio.Event()
                    await shelf.refill.wait()
        finally:
            with trio.CancelScope(shield=True):
                await _close_all(shelf.boxes)

    async def _make(self, shelf: Shelf) -> Sandbox:
        """A new box, set up; bounded in number and rate. Raises SandboxError."""
        async with self._creating:
            start_time = max(self._next_start, trio.current_time())
            # The next start is booked before this one is awaited: two tasks that wait for the same instant would
            # otherwise both begin at it.
            self._next_start = start_time + self._interval_s
            await trio.sleep_until(start_time)
            try:
                # A backend may be a package of somebody else's and raise anything. In a task of our nursery an unknown
                # exception would end the pool, and with it the boxes of all episodes.
                with boundary(SandboxError, f"the backend {self.name!r}:", place=True):
                    new_box = await self._backend.create(shelf.spec)
                    try:
                        await set_up(new_box, shelf.setup)
                    except BaseException:
                        await _close_all([new_box])
                        raise
            except SandboxError:
                self.counts.failed += 1
                raise
            self.counts.made += 1
            return new_box


async def set_up(box: Sandbox, setup: Setup) -> None:
    """Do the work of a setup in a box. Raises SandboxError if a command fails, with what the network refused."""
    await _lay(box, setup.files)
    if setup.network is None:
        for command in setup.commands:
            _must_succeed(command, await box.exec(command, timeout_s=setup.timeout_s))
    elif setup.commands:
        async with opened(box, setup.network) as open_network:
            for command in setup.commands:
                command_result = await open_network.exec(box, command, timeout_s=setup.timeout_s)
                refused_requests = [
                    f"{network_request.host}:{network_request.port} ({network_request.refused})"
                    for network_request in open_network.requests
                    if network_request.refused
                ]
                _must_succeed(
                    command, command_result, f"; refused: {', '.join(refused_requests[:3])}" if refused_requests else ""
                )


def _must_succeed(command: Sequence[str], result: ExecResult, also: str = "") -> None:
    if result.exit_code != 0 or result.timed_out:
        error_text = result.stderr.decode(errors="replace").strip()[-300:]
        end_description = "had no time left" if result.timed_out else f"ended with {result.exit_code}"
        raise SandboxError(f"setup command {list(command)!r} {end_description}: {error_text}{also}")


async def _lay(box: Sandbox, files: Mapping[str, bytes]) -> None:
    """Write our own files, before any policy is there to be blamed. Raises SandboxError."""
    for file_path, file_bytes in files.items():
        try:
            await box.write(file_path, file_bytes)
        except SandboxPathError as path_error:
            raise SandboxError(f"{file_path!r} cannot be laid into a new box: {path_error}") from path_error


async def _is_alive(box: Sandbox) -> bool:
    with trio.move_on_after(_ALIVE_S):
        try:
            with boundary(SandboxError, "a box:"):
                # A command as the question costs a start of a process in the box for each one that is handed out, so a
                # backend that knows better is asked first.
                if isinstance(box, Checkable):
                    return await box.alive()
                return (await box.exec(["true"], timeout_s=_ALIVE_S)).exit_code == 0
        except SandboxError:
            return False
    return False


async def _close_all(boxes: deque[Sandbox] | list[Sandbox]) -> None:
    with trio.CancelScope(shield=True):
        while boxes:
            try:
                with boundary(SandboxError, "a box:"):
                    await boxes.pop().close()
            except SandboxError:  # the host lost it; its reaper clears what is left
                continue
