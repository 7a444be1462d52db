"""The garbage collector of a process with many episodes: old objects are left alone until the process has grown."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest
import trio
from trio.testing import MockClock

from agentrl.host import gc_pauses

MAKE_MANY_OBJECTS = """
import gc
from agentrl.host import gc_pauses as garbage
whole = []
if {spared}:
    garbage.spare_old_objects()
gc.callbacks.append(lambda phase, info: whole.append(info) if info["generation"] == 2 else None)
kept = [[n] for n in range(200_000)]
young = [0, 0]
for n in range(2000):
    cycle = []
    cycle.append(cycle)
gc.collect(1)
print(bool(whole), gc.collect())
"""


@pytest.mark.parametrize("spared", [False, True])
def test_live_objects_are_looked_through_only_where_nothing_spares_them(spared: bool) -> None:
    program = MAKE_MANY_OBJECTS.format(spared=spared)
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    looked, left = done.stdout.split()
    assert looked == str(not spared)
    assert int(left) < 500, "young cycles are collected either way"


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generations of the collections so far."""
    found: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


async def test_all_objects_are_looked_through_each_time_the_process_has_grown(
    collections: list[int], monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    gc.disable()
    collections.clear()  # the collector may have run by itself until now
    grown = gc_pauses.GROWTH_BYTES
    peaks = iter([7, 7, 6 + grown, 7 + grown, 8 + grown, 9 + grown, 8 + 2 * grown, 8 + 2 * grown])
    monkeypatch.setattr(gc_pauses, "peak_memory_bytes", lambda: next(peaks, 8 + 2 * grown))
    try:
        with trio.move_on_after(1000):
            await gc_pauses.collect_after_growth()
    finally:
        gc.enable()
    assert collections == [2, 2]


def test_the_peak_of_this_process_is_in_bytes() -> None:
    assert 20 << 20 < gc_pauses.peak_memory_bytes() < 64 << 30
