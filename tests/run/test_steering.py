"""What people ask of a run under way, and what they are told. No process but this one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.config import RunConfig, from_json, parse
from agentrl.errors import ConfigError, UsageError
from agentrl.records import StopReason, Task
from agentrl.run import live_settings
from agentrl.run.reporting import status
from agentrl.run.run_folder import RunDir
from agentrl.store import Ending, RunStore
from agentrl.store.run_values import CHANGES, CONFIG, PAUSED, TRAIN_ENDED_S


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(
        tmp_path / "run", parse({"model": "m", "env": {"id": "e"}, "train": {"steps": 80, "lr": 3e-4}})
    )


def typed(*words: object) -> str:
    """What a command says. Raises as it does."""
    done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=True)
    if done.exception is not None:
        raise done.exception
    return done.output.strip()


def paused(run: RunDir) -> dict[str, Any]:
    with RunStore.read(run.store_path) as store:
        return PAUSED.of(store.meta)


def test_a_run_under_way_is_paused_and_goes_on(run: RunDir) -> None:
    with run.lock():
        first = f"{run.path} is paused: turns and a step under way end first; agentrl resume {run.path} lets it go on"
        assert typed("pause", run.path) == first
        since_s = paused(run)["since_s"]
        assert typed("pause", run.path, "--now").startswith(f"{run.path} is paused: turns under way stop, and keep")
        assert typed("pause", run.path).startswith(f"{run.path} is paused: turns under way stop"), "who asked for more"
        assert paused(run) == {"since_s": since_s, "now": True}
        told = list(status.lines(status.status(run, lambda: since_s + 61)))
        assert f"paused    for 1 min 01 s: agentrl resume {run.path} lets it go on" in told
        assert told[-1] == f"next      agentrl resume {run.path}; agentrl stop {run.path}"
        assert typed("resume", run.path).startswith(f"{run.path} goes on; it was paused for ")
        assert paused(run) == {}
        assert typed("resume", run.path) == f"{run.path} is under way, and was not paused"


def test_a_run_that_is_not_under_way_says_what_to_type(run: RunDir) -> None:
    with pytest.raises(UsageError, match="is not under way: there is nothing to pause"):
        typed("pause", run.path)
    with pytest.raises(UsageError, match=f"is not under way: agentrl train --resume {run.path}$"):
        typed("resume", run.path)
    with RunStore.open(run.store_path) as store:
        PAUSED.set(store, {"since_s": 0.0, "now": True})
    with pytest.raises(UsageError, match=f"under way; its pause is over: agentrl train --resume {run.path}$"):
        typed("resume", run.path)
    assert paused(run) == {}


# --- settings --------------------------------------------------------------------------------------------------------


def take_up(run: RunDir, step: int) -> RunConfig | None:
    """As the learner does before `step`."""
    with RunStore.open(run.store_path) as store:
        return live_settings.take_up(run, store, step)


def test_settings_hold_from_the_next_step_on(run: RunDir) -> None:
    with run.lock():
        said = typed("set", run.path, "train.lr=1e-6", "buffer.max_lag=2", "rollout.max_running=64")
        assert said == (
            f"{run.path} has from its next step on: rollout.max_running = 64 (was 128), buffer.max_lag = 2 (was 4), "
            "train.lr = 1e-06 (was 0.0003)"
        )
        assert run.config().train.lr == 3e-4, "not before"
        assert typed("set", run.path, "train.lr=1e-6") == f"{run.path} has these settings already"
    config = take_up(run, 7)
    assert config is not None and config == run.config()
    assert (config.train.lr, config.buffer.max_lag, config.rollout.max_running) == (1e-6, 2, 64)
    with RunStore.read(run.store_path) as store:
        assert from_json(CONFIG.of(store.meta) or "") == config
        (row,) = CHANGES.of(store.meta)
    values = {"train.lr": (3e-4, 1e-6), "buffer.max_lag": (4, 2), "rollout.max_running": (128, 64)}
    assert (row["step"], row["was"]) == (7, {key: was for key, (was, _) in values.items()})
    assert row["settings"] == {key: now for key, (_, now) in values.items()}
    assert take_up(run, 8) is None, "once"


def test_two_people_who_set_at_once_both_are_heard(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second writes between the first one's look and write; of one setting the later wish holds."""
    with run.lock(), RunStore.open(run.store_path) as store:
        really, others = store.swap_meta, [["train.lr=2e-5", "train.grad_clip=0.5"]]

        def swap(key: str, before: str, value: str) -> bool:
            if others:
                with RunStore.open(run.store_path) as second:
                    live_settings.ask(run, second, others.pop())
            return really(key, before, value)

        monkeypatch.setattr(store, "swap_meta", swap)
        found = live_settings.ask(run, store, ["train.lr=1e-5", "rollout.max_running=9"])
        assert found["train.lr"] == (2e-5, 1e-5), "it is told what the other one wants"
    config = take_up(run, 1)
    assert config is not None
    assert (config.train.lr, config.train.grad_clip, config.rollout.max_running) == (1e-5, 0.5, 9)


def test_a_wish_that_comes_while_the_learner_takes_others_up_is_not_lost(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run.lock():
        typed("set", run.path, "train.lr=1e-5")
        really = RunDir.write_config

        def write(*given: Any) -> None:
            really(*given)
            typed("set", run.path, "train.lr=2e-5")

        monkeypatch.setattr(RunDir, "write_config", write)
        first = take_up(run, 3)
        monkeypatch.undo()
        assert first is not None and first.train.lr == 1e-5
        second = take_up(run, 4)
        assert second is not None and second.train.lr == 2e-5


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("train.lr=-1", r"train\.lr = -1: .*greater than 0"),
        ("train.lr=fast", r"train\.lr = 'fast'"),
        ("train.lrr=1", "did you mean 'lr'"),
        ("train.lr_min=0.1", r"train\.lr_min = 0\.1: "),
        ("train.lr", "write it as section.key=value"),
        ("env.id=other", r"env\.id = 'other': a run that goes on keeps it \('e'\)"),
        ("rollout.group_size=2", r"rollout\.group_size = 2: a run that goes on keeps it \(8\)"),
        ("buffer.max_lag=0", r"buffer\.max_lag = 0: groups close with 6 scored members at buffer.max_lag = 4, and "),
        (
            "engine.max_batch=2",
            r"engine\.max_batch = 2: it changes at a resume, not while the run goes on: agentrl stop \S+; "
            r"agentrl train --resume \S+ --set engine\.max_batch=2$",
        ),
    ],
)
def test_what_cannot_change_is_named_with_what_to_type_and_nothing_is_asked_for(
    run: RunDir, setting: str, says: str
) -> None:
    with run.lock(), pytest.raises(ConfigError, match=says):
        typed("set", run.path, "alarms.kl_above=3", setting)
    assert take_up(run, 1) is None


def test_a_wish_is_checked_beside_those_before_it(run: RunDir) -> None:
    with run.lock():
        typed("set", run.path, "train.lr=1e-6")
        with pytest.raises(ConfigError, match=r"train\.grad_clip = 0"):
            typed("set", run.path, "train.grad_clip=0")
        assert "train.lr = 1e-05 (was 1e-06)" in typed("set", run.path, "train.lr=1e-5")


def test_a_run_that_is_not_under_way_has_the_settings_when_it_goes_on(run: RunDir) -> None:
    with RunStore.open(run.store_path) as store:
        store.versions.confirm_version(store.versions.mint_version(4))
    with run.lock():
        typed("set", run.path, "train.lr=1e-5", "rollout.max_running=9")
    said = typed("set", run.path, "train.lr=1e-6", "engine.max_batch=2")
    assert said.endswith(f"under way: it has these settings when it goes on, agentrl train --resume {run.path}")
    assert (run.config().train.lr, run.config().engine.max_batch) == (1e-6, 2)
    config = take_up(run, 5)
    assert config is not None and (config.train.lr, config.rollout.max_running) == (1e-6, 9), "the last word holds"


def test_a_run_that_has_trained_its_last_step_takes_no_settings(run: RunDir) -> None:
    with RunStore.open(run.store_path) as store:
        TRAIN_ENDED_S.set(store, 5.0)
    with run.lock(), pytest.raises(UsageError, match="has trained its last step: no setting changes any more"):
        typed("set", run.path, "train.lr=1e-6")


def test_the_settings_of_a_step_are_those_of_its_row(run: RunDir) -> None:
    """Steps 1 to 3, a change, step 4; back to a checkpoint after 2, so that step 3 is trained again, with the new rate;
    a change at step 4. A step whose row is missing has what was recorded."""
    with run.lock():
        rows: dict[int, Any] = {1: {}, 2: {}, 3: {}}
        for step, rate in ((4, "1e-5"), (4, "1e-6")):
            typed("set", run.path, f"train.lr={rate}")
            config = take_up(run, step)
            assert config is not None
            with RunStore.read(run.store_path) as store:
                held = {"settings": live_settings.of_step(store, config)}
            rows[3 if rate == "1e-5" else 4] = held
    with RunStore.read(run.store_path) as store:
        rates = {
            at: live_settings.held_at(store, run.config(), row, at).train.lr for at, row in [*rows.items(), (9, None)]
        }
        assert rates == {1: 3e-4, 2: 3e-4, 3: 1e-5, 4: 1e-6, 9: 1e-6}
        assert live_settings.held_at(store, run.config(), None, 3).train.lr == 3e-4


# --- failures that are played again -----------------------------------------------------------------------------------


def failed_group(run: RunDir) -> None:
    """Group 1 is open with a failed member and one that goes on; group 2 is of an evaluation, and failed."""
    with RunStore.open(run.store_path) as store:
        store.versions.confirm_version(store.versions.mint_version(0))
        for size, purpose in ((2, "train"), (1, "eval:set:before")):
            store.groups.add_groups([Task(index=0, env="e", seed=1)], size=size, purpose=purpose)
        for claim in store.leases.claim("w", 9, lease_s=1e9):
            if claim.member == 0:
                failed = StopReason.SANDBOX_FAILED
                store.journal.finish(
                    claim.episode_id, claim.fence, Ending(stop_reason=failed, outcome=None, success=None)
                )


def test_failures_are_played_again_in_a_run_that_goes_on_or_is_not_under_way(run: RunDir) -> None:
    failed_group(run)
    left = "left      1 of an evaluation, which stays as it was measured"
    would = f"{run.path} would play again: 1 failed episode(s) of open groups\n{left}"
    assert typed("requeue", run.path, "--failed", "--dry-run") == would
    found = json.loads(typed("requeue", run.path, "--group", 1, "--dry-run", "--json"))
    assert found == {"members": [1], "late": [], "groups": [], "left": {}, "dry_run": True}
    with run.lock():
        said = f"{run.path} plays again: 1 failed episode(s) of open groups\n{left}"
        assert typed("requeue", run.path, "--failed") == said
        assert typed("requeue", run.path, "--failed") == f"{run.path} plays again: nothing\n{left}"
    with RunStore.open(run.store_path) as store:
        (claim,) = store.leases.claim("w", 9, lease_s=1e9)
        failed = StopReason.SANDBOX_FAILED
        store.journal.finish(claim.episode_id, claim.fence, Ending(stop_reason=failed, outcome=None, success=None))
    said = typed("requeue", run.path, "--group", 1)
    assert said.endswith(f"\nnext      it is not under way: agentrl train --resume {run.path}")


def test_failures_to_play_again_are_named_and_training_goes_on(run: RunDir) -> None:
    with pytest.raises(UsageError, match=f"say what: agentrl requeue {run.path} --failed, or --group ID$"):
        typed("requeue", run.path)
    with RunStore.open(run.store_path) as store:
        TRAIN_ENDED_S.set(store, 5.0)
    mend = f"agentrl train --resume {run.path} --set train.steps=160 trains on$"
    with pytest.raises(UsageError, match=f"has trained its last step: nothing is played any more; {mend}"):
        typed("requeue", run.path, "--failed")
