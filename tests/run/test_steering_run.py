"""A real run that is paused amid its turns, gets other settings, and goes on.

`rollout/test_pausing` and `test_steering` hold the same without processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.offline.retrain_step import retrain
from agentrl.records import Turn
from agentrl.run import steering
from agentrl.run.run_folder import RunDir
from agentrl.store import Partial, RunStore
from agentrl.store.audit import audit
from agentrl.store.episodes.partial_turns import load_partials

from .test_run import DEADLINE_S, ENVS, run_file, started


def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def under_way(run: RunDir) -> dict[int, Partial]:
    """The tokens of turns under way, by episode, of those that are written."""
    with RunStore.read(run.store_path) as store:
        db = store._db  # pyright: ignore[reportPrivateUsage]
        with db.read():
            ids = [id for (id,) in db.rows("SELECT DISTINCT episode_id FROM partials ORDER BY 1")]
            return {id: part for id, part in zip(ids, load_partials(db, ids), strict=True) if part is not None}


def steps(run: RunDir) -> int:
    with RunStore.read(run.store_path) as store:
        return max((row.step for row in store.metrics.values("step")), default=0)


def learns(run: RunDir) -> bool:
    """Whether the learner has taken the groups of a step that it has not recorded yet."""
    with RunStore.read(run.store_path) as store:
        return bool(store.lineage.episodes_of(steps(run) + 1))


def stand_still(run: RunDir) -> dict[int, Partial]:
    """Pause the run until nothing is written any more and no step is under way; the turns that it broke off."""
    steering.pause(run, now=True)
    seen: list[object] = []

    def still() -> bool:
        seen.append((under_way(run), steps(run)))
        return len(seen) > 30 and all(one == seen[-1] for one in seen[-30:]) and not learns(run)

    until(still)
    return under_way(run)


@pytest.mark.slow
def test_laws_1_and_2_a_run_is_paused_amid_turns_gets_other_settings_and_goes_on(tmp_path: Path) -> None:
    gate, run = tmp_path / "gate", RunDir(tmp_path / "run")
    slow = {"group_size": 2, "max_running": 6, "max_tokens_per_turn": 400, "max_context": 2000, "checkpoint_tokens": 4}
    train = {"steps": 8, "lr": 1e-3, "warmup_steps": 0, "checkpoint_every": 100}
    file = run_file(
        tmp_path,
        f"{ENVS}:Held",
        rollout=slow,
        train=train,
        buffer={"groups_per_step": 8, "skip_without_signal": False},
        eval={"sets": [], "every": 0},
        **{"env.kwargs": {"gate": str(gate), "at": 48}},  # six steps
    )
    with started("train", file, "--out", run.path) as process:
        until((run.path / "config.json").exists)
        broken_off = dict[int, Partial]()
        while not broken_off:
            until(lambda: bool(under_way(run)))
            broken_off = stand_still(run)
            steering.resume(run)
        until(lambda: steps(run) >= 1)
        stand_still(run)
        before = steps(run)
        steering.change(run, ["train.lr=1e-6", "buffer.max_lag=3", "rollout.max_running=8"])
        until(lambda: run.config().train.lr == 1e-6)
        assert steps(run) == before <= 6
        steering.resume(run)
        gate.touch()
        _, err = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, err
    assert f"the run is paused; agentrl resume {run.path} lets it go on" in err
    with RunStore.read(run.store_path) as store:
        for id, part in broken_off.items():
            turn: Turn = store.reads.trajectory(id).turns[part.index]
            assert turn.token_ids[: len(part.token_ids)] == part.token_ids, "they were kept"
            assert turn.logprobs[: len(part.token_ids)] == part.logprobs
        rows = {row.step: row.values for row in store.metrics.values("step")}
        assert audit(store, run.checkpoints).violations == []
    assert len(rows) == 8
    first = next(step for step, row in rows.items() if "settings" in row)
    assert first in (before + 1, before + 2), "a step whose groups were taken before goes on as it was"
    changed = {"train.lr": 1e-6, "buffer.max_lag": 3, "rollout.max_running": 8}
    for step, row in rows.items():
        held = (row["lr"], row["max_lag"], row.get("settings"))
        assert held == ((1e-6, 3, changed) if step >= first else (1e-3, 4, None)), step
    again = retrain(run, 8)
    assert again.equal and again.compared == tuple(range(1, 9)), "each with the settings that it had"
