"""The SQLite store keeps what every store keeps: with awaited writes by a thread, and in line."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.store import RunStore
from agentrl.store.journal_writer import JournalWriter

from .conformance import *  # noqa: F403  (the tests)
from .conformance import Again, Offer
from .play import serve


@pytest.fixture(params=["thread", "inline"])
async def offer(path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Offer]:
    inline = request.param == "inline"
    with RunStore.create(path, "{}") as other, RunStore.open(path) as writer, RunStore.read(path) as reader:
        serve(other, 0)
        async with JournalWriter(writer, reader, inline=inline) as desk:
            yield Offer(rollout=desk, rewards=desk, learner=other, control=other, read=reader)


@pytest.fixture
def store_again(path: Path) -> Again:
    return lambda: RunStore.open(path)
