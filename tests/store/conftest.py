from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.store import RunStore

from .play import Clock, serve


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
