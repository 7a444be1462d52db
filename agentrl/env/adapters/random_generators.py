"""Python's and numpy's global random generators, private to one instance of a package that draws from them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")


class OwnGenerators:
    """States of the global generators, seeded with `seed`, that are in place only while `run` runs: instances do not
    disturb each other, and replay is exact. Not for code that runs in a thread."""

    def __init__(self, seed: int) -> None:
        self._states: tuple[Any, Any] = (random.Random(seed).getstate(), np.random.RandomState(seed).get_state())

    def run(self, body: Callable[[], T]) -> T:
        # The states are exchanged and not only seeded: episodes run side by side in one thread, and each draw of one
        # would move the others' generators on.
        global_states = (random.getstate(), np.random.get_state())
        _set(self._states)
        try:
            return body()
        finally:
            self._states = (random.getstate(), np.random.get_state())
            _set(global_states)


def hashes_are_fixed() -> bool:
    """Whether the order of a set of texts is the same in each process of the run: workers of a run have one
    PYTHONHASHSEED."""
    return os.environ.get("PYTHONHASHSEED", "random") != "random"


def _set(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
