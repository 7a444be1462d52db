from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.store import RunStore

from .play import Clock, serve
from .server import Server, running


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A PostgreSQL server, for the tests marked postgres."""
    with tempfile.TemporaryDirectory(prefix="agentrl-pg-") as folder, running(Path(folder)) as server:
        yield server


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.sqlite"


@pytest.fixture
def store(path: Path, clock: Clock) -> Iterator[RunStore]:
    """A new store whose weights of step 0 are served."""
    with RunStore.create(path, '{"name": "test"}', clock=clock) as store:
        serve(store, 0)
        yield store
