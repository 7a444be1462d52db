"""Values on their way through the store and telemetry."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.errors import DiskFull
from agentrl.records import StopReason
from agentrl.run.telemetry import Telemetry
from agentrl.store import Ending, RunStore, StoreError

from .play import START, Clock, admit, answer, play, serve, turn


def test_values_come_back_by_kind_and_step(store: RunStore, clock: Clock) -> None:
    store.metrics.record("step", 2, {"loss": 0.5, "name": "b", "tags": [1, None]})
    clock.now += 1.0
    store.metrics.record("step", 1, {"loss": 0.25})
    store.metrics.record("sync", 1, {"bytes": 7})
    first, second = store.metrics.values("step")
    assert (first.step, first.time_s, first.values, first.undone) == (1, 1001.0, {"loss": 0.25}, False)
    assert (second.kind, second.step, second.values) == ("step", 2, {"loss": 0.5, "name": "b", "tags": [1, None]})
    assert store.metrics.values("nothing") == []


def test_numbers_that_json_does_not_know_become_null(store: RunStore) -> None:
    store.metrics.record("step", 1, {"kl": math.nan, "grad": math.inf, "loss": 1.0})
    assert store.metrics.values("step")[0].values == {"kl": None, "grad": None, "loss": 1.0}


def test_episodes_wait_for_engines_or_for_their_environments(store: RunStore, clock: Clock) -> None:
    """Two of three turns and one of one turn, half a second each, in lives of 20 s; one that runs is not counted."""
    assert store.metrics.waited() == (0.0, 0.0)
    serve(store, 0)
    admit(store, limit=3)
    first, second, *_ = store.leases.claim("worker", 3, lease_s=30.0)
    clock.now += 20.0
    play(store, first, turns=3)
    play(store, second, turns=1)
    assert store.metrics.waited() == (2.0, 38.0)


def test_waits_are_not_negative_after_the_clock_was_set_back(store: RunStore, clock: Clock) -> None:
    serve(store, 0)
    admit(store, limit=1)
    first, second, *_ = store.leases.claim("worker", 2, lease_s=30.0)
    clock.now += 20.0
    play(store, first, turns=3)
    one_turn = turn(0, store.versions.current_version().version)
    set_back = replace(one_turn, ended_s=one_turn.started_s - 1000.0)
    store.journal.begin(second.episode_id, second.fence, START)
    store.journal.journal_turn(second.episode_id, second.fence, set_back)
    store.journal.journal_step(second.episode_id, second.fence, 0, answer(0, last=True))
    clock.now -= 1000.0
    ending = Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
    store.journal.finish(second.episode_id, second.fence, ending)
    assert store.metrics.waited() == (1.5, 18.5)


def test_values_that_are_not_json_are_refused_by_kind(store: RunStore) -> None:
    with pytest.raises(StoreError, match="metrics 'step' is not JSON-safe"):
        store.metrics.record("step", 1, {"loss": object()})


def test_telemetry_writes_to_the_store_and_a_line_of_json(store: RunStore, clock: Clock, tmp_path: Path) -> None:
    target = tmp_path / "metrics.jsonl"
    with (
        Telemetry(store, target, "learner", clock=clock) as learner,
        Telemetry(store, target, "worker-0", clock=clock) as worker,
    ):
        learner.record("step", 1, {"loss": 0.5, "kl": math.nan})
        clock.now += 2.0
        worker.record("turns", 1, {"turn_s_mean": 0.1, "kind": "overwrites nothing"})
    assert [json.loads(line) for line in target.read_text().splitlines()] == [
        {"kind": "step", "step": 1, "time": 1000.0, "process": "learner", "attempt": 1, "loss": 0.5, "kl": None},
        {"kind": "turns", "step": 1, "time": 1002.0, "process": "worker-0", "attempt": 1, "turn_s_mean": 0.1},
    ]
    assert store.metrics.values("step")[0].values == {"loss": 0.5, "kl": None}


def test_telemetry_goes_on_in_the_same_file_after_a_restart(store: RunStore, tmp_path: Path) -> None:
    target = tmp_path / "metrics.jsonl"
    with Telemetry(store, target, "learner") as telemetry:
        telemetry.record("step", 1, {})
    serve(store, 1)
    store.lineage.rollback(0)
    with Telemetry(store, target, "learner") as telemetry:
        telemetry.record("step", 1, {})
    assert [json.loads(line)["attempt"] for line in target.read_text().splitlines()] == [1, 2]


def test_telemetry_names_a_file_it_cannot_write(store: RunStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no_folder/metrics\.jsonl: cannot be written"):
        Telemetry(store, tmp_path / "no_folder" / "metrics.jsonl", "learner")


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs /dev/full")
def test_a_full_disk_is_named(store: RunStore) -> None:
    with Telemetry(store, "/dev/full", "learner") as telemetry, pytest.raises(DiskFull, match="No space left"):
        telemetry.record("step", 1, {"loss": 1.0})
    assert store.metrics.values("step")[0].values == {"loss": 1.0}  # the store has it
