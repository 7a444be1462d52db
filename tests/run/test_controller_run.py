"""A whole run whose controller moves a place from its engines to its learner."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from agentrl.run.reporting import status
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.audit import audit
from tests.parts.outside_audit import OutsideAuditor

from .test_ray import cluster as cluster
from .test_ray import ray_here as ray_here
from .test_run import DEADLINE_S, ENVS, assert_nothing_remains, run_file, started, wait_for_step, wait_until
from .test_scaling_run import assert_nothing_was_lost

SLOW_LEARNER: dict[str, Any] = {
    "rollout": {"max_running": 32, "max_turns": 3, "max_tokens_per_turn": 4},
    "train": {"steps": 5000, "checkpoint_every": 1000, "epochs": 24},
    "engine": {"replicas": 2},
    "eval": {"sets": [], "every": 0},
}
"""Each token is computed two dozen times, so that the learner has by far the most to do on any machine."""
CONTROLLER: dict[str, Any] = {"engines": [1, 2], "ranks": [1, 2], "gain": 0.02}


@pytest.mark.long
def test_law_2_a_place_moves_to_a_learner_that_is_busy_and_each_episode_is_trained_once(tmp_path: Path) -> None:
    _moves(tmp_path, {})


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.ray
def test_law_2_a_place_moves_to_a_learner_on_ray_and_each_episode_is_trained_once(tmp_path: Path, cluster: Any) -> None:
    _moves(tmp_path, {"launcher": "ray", "address": cluster.address})


def _moves(tmp_path: Path, where: dict[str, Any]) -> None:
    run = RunDir(tmp_path / "run")
    file = run_file(tmp_path, f"{ENVS}:Vowels", cluster={"controller": CONTROLLER, **where}, **SLOW_LEARNER)
    outside = OutsideAuditor(run.store_path)

    def rows() -> list[dict[str, Any]]:
        with RunStore.read(run.store_path) as store:
            return [row.values for row in store.metrics.values("controller")]

    with started("train", file, "--out", run.path) as process:
        wait_for_step(run.path, 1, process)
        wait_until(lambda: any("took_s" in row for row in rows()), process)
        assert outside.look() == []
        moved = next(row for row in rows() if row.get("to"))
        assert (moved["split"], moved["to"]) == ([2, 1], [1, 2]), moved
        assert moved["gains"]["1 + 2"] >= 0.02 and "promises" in moved["why"]
        arrived = next(row for row in rows() if "took_s" in row)
        assert arrived["refused"] is None and arrived["took_s"] > 0
        with RunStore.read(run.store_path) as store:
            learner = json.loads(store.meta("learner_started") or "")
            assert learner["ranks"] == 2 and learner["start_s"] > 0
            last = store.metrics.values("step")[-1].step
            assert len(json.loads(store.meta("engine_urls") or "")) == 1
            assert store.metrics.values("step", after=learner["step"])[0].step == learner["step"] + 1 <= last, (
                "none is lost"
            )
        told = "\n".join(status.lines(status.status(run)))
        assert "split     " in told and "1 engine" in told
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 130, errors + output
    with RunStore.read(run.store_path) as store:
        undone = [
            row.step for row in store.metrics.values("step", undone=True) if row.undone and row.step <= learner["step"]
        ]
        assert undone == [], "the learner saved its last step before it made way"
        assert audit(store, run.checkpoints).violations == []
    assert outside.look(ended=True) == []
    assert_nothing_was_lost(run)
    assert_nothing_remains(run)
