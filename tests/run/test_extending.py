"""A run that goes on under other settings: longer, or with more of the machine, never on other tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config import from_json, parse
from agentrl.errors import ConfigError, UsageError
from agentrl.records import Task
from agentrl.run import resume_overrides
from agentrl.run.run_folder import RunDir
from agentrl.run.scratch_space import ScratchSpace
from agentrl.store import RunStore


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run that ended after two of two steps, with its last evaluation of one task."""
    document = {"model": "m", "env": {"id": "e"}, "train": {"steps": 2}, "eval": {"sets": [{"name": "h", "n": 1}]}}
    run = RunDir.create(tmp_path / "run", parse(document))
    with RunStore.open(run.store_path) as store:
        for step in (0, 1, 2):
            store.versions.confirm_version(store.versions.mint_version(step))
        store.groups.add_groups([Task(index=0, env="e", seed=0)], size=1, purpose="eval:h:after")
        store.set_meta("train_started_s", "100.0")
        store.set_meta("train_ended_s", "130.0")
    return run


def test_more_steps_keep_the_last_evaluation_as_one_of_those_during(run: RunDir) -> None:
    resume_overrides.change(run, ["train.steps=5", "rollout.workers=2", "cluster.head_away_s=50"])
    config = run.config()
    assert (config.train.steps, config.rollout.workers, config.cluster.head_away_s) == (5, 2, 50.0)
    with RunStore.open(run.store_path) as store:
        assert from_json(store.meta("config") or "") == config
        assert sum(store.groups.counts("eval:h:during@2").values()) == 1
        assert not store.groups.counts("eval:h:after")
        assert not store.meta("train_ended_s")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("env.id=other", r"env\.id = 'other': a run that goes on keeps it \('e'\)"),
        ("rollout.group_size=4", r"rollout\.group_size = 4: a run that goes on keeps it \(8\)"),
        (
            "buffer.max_lag=0",
            r"buffer\.max_lag = 0: groups close with 6 scored members at buffer.max_lag = 4, and",
        ),
        ("env.kwargs.level=3", r"env\.kwargs\S* = .*: a run that goes on keeps it"),
        ("train.steps=1", r"train\.steps = 1: the run has done 2: give as many or more"),
        ("train.stepz=3", "did you mean 'steps'"),
    ],
)
def test_what_a_run_keeps_is_named_and_nothing_is_written(run: RunDir, setting: str, says: str) -> None:
    before = (run.path / "config.json").read_text()
    with pytest.raises(ConfigError, match=says):
        resume_overrides.change(run, [setting])
    assert (run.path / "config.json").read_text() == before


def test_what_messages_say_to_change_is_changed_at_a_resume(run: RunDir, tmp_path: Path) -> None:
    room = tmp_path / "room"
    room.mkdir()
    settings = [f"scratch_dir={room}", "train.progress_deadline_s=600", "train.checkpoint_every=6"]
    resume_overrides.change(run, settings)
    train = run.config().train
    assert (train.progress_deadline_s, train.checkpoint_every) == (600.0, 6)
    with run.lock() as lock, ScratchSpace(run).owned(lock):
        assert (run.scratch.parent, run.scratch.is_dir()) == (room, True)


def test_a_run_that_somebody_runs_is_left_alone(run: RunDir) -> None:
    with run.lock(), pytest.raises(UsageError, match="another process is running"):
        resume_overrides.change(run, ["train.steps=5"])
    assert run.config().train.steps == 2
