"""What a container's box needs of the engine that holds it, and one command on its way there."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import trio

from agentrl.host.janitor import OwnedFolder
from agentrl.protocols import SandboxSpec
from agentrl.sandbox.docker.attached_streams import AttachedStreams


class ContainerEngine(Protocol):
    """The calls that a box makes to its host. Every method raises SandboxError; if the host does not answer,
    SandboxLost: then nothing is known of the box."""

    folder: OwnedFolder

    def next_uid(self) -> int: ...
    async def start_container(self, spec: SandboxSpec, uid: int) -> tuple[str, AttachedStreams]: ...
    async def execute(
        self, container: str, argv: Sequence[str], uid: int, env: Mapping[str, str], output_bytes: int
    ) -> tuple[str, AttachedStreams]: ...
    async def state(self, execution: str) -> tuple[bool, int | None]: ...
    async def processes(self, container: str) -> int: ...
    async def is_running(self, container: str) -> bool: ...
    async def out_of_memory(self, container: str, since: float) -> bool: ...
    async def remove(self, container: str) -> None: ...


class ContainerCommand:
    """One command in a container, on its way."""

    def __init__(self, execution: str, streams: AttachedStreams, mark: str) -> None:
        self.execution, self.streams, self.mark = execution, streams, mark
        self.started_at, self.began = time.time(), time.monotonic()
        self.stop = trio.Event()
        self.closed = trio.Event()
        self.exit_code: int | None = None
        self.oom = False
        self.duration_s = 0.0


@contextmanager
def paused(deadline: trio.CancelScope) -> Generator[None]:
    """A deadline stands still in the block: a host that does not answer takes none of the policy's time (law 3)."""
    left = deadline.deadline - trio.current_time()
    deadline.deadline = math.inf
    try:
        yield
    finally:
        deadline.deadline = trio.current_time() + left
