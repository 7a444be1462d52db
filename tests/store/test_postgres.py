"""The store in PostgreSQL keeps what every store keeps; what is its own."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import pytest

from agentrl.store import RunStore
from agentrl.store.awaitable import AsyncStore
from agentrl.store.choice import ADDRESS

from .conformance import *  # noqa: F403  (the tests)
from .conformance import Offer
from .play import serve
from .server import Server, running

pytestmark = pytest.mark.postgres


@pytest.fixture(scope="session")
def server() -> Generator[Server]:
    with tempfile.TemporaryDirectory(prefix="agentrl-pg-") as folder, running(Path(folder)) as server:
        yield server


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ADDRESS


@pytest.fixture(params=["thread", "inline"])
async def offer(path: Path, server: Server, request: pytest.FixtureRequest) -> AsyncIterator[Offer]:
    inline = request.param == "inline"
    with (
        RunStore.create(path, "{}", url=server.url) as other,
        RunStore.open(path) as writer,
        RunStore.read(path) as reader,
    ):
        serve(other, 0)
        async with AsyncStore(writer, reader, inline=inline) as desk:
            yield Offer(rollout=desk, rewards=desk, learner=other, control=other, read=reader)
