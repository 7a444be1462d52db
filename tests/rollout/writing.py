"""What a worker writes, failing where a test says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from agentrl.store import RunStore

_ENTRIES = {
    "journal_turn": "turn_entry",
    "journal_step": "step_entry",
    "journal_partial": "part_entry",
    "finish": "end_entry",
}
"""Writes that a store makes together with others of their kind: it is asked for an entry, which is the write."""


def written(store: RunStore, write: str) -> Callable[..., Any]:
    """A write as the store makes it now, whatever `instead` puts in its place afterwards."""
    if write not in _ENTRIES:
        return getattr(store.journal, write)
    entry = getattr(store.journal, _ENTRIES[write])
    return lambda *arguments: entry(*arguments)()


def instead(patch: pytest.MonkeyPatch, store: RunStore, write: str, call: Callable[..., Any]) -> None:
    """Have `call` made in the place of a worker's write."""
    if write in _ENTRIES:
        patch.setattr(store.journal, _ENTRIES[write], lambda *arguments: partial(call, *arguments))
    else:
        patch.setattr(store.journal, write, call)
