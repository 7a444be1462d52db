"""A run that is not under way gets other settings, and more steps.

`agentrl.config.changes` says which may change. If a finished run gets more steps, or one that was stopped early goes
on, its last evaluation becomes one of those during training.
"""

from __future__ import annotations

import time

from agentrl import config as configuration
from agentrl.config import RunConfig, changes
from agentrl.errors import ConfigError
from agentrl.run import live_settings
from agentrl.run.cluster import scaling
from agentrl.run.evaluation import held_out as evaluation
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.databases import open_store
from agentrl.store.run_values import STOPPED_EARLY, TRAIN_ENDED_S, TRAIN_STARTED_S


def change(run: RunDir, overrides: list[str]) -> None:
    """Write `overrides` (`section.key=value`) into a run that is not running.

    Raises ConfigError for a setting that may not change, for fewer steps than the run has done, and for a bad value;
    UsageError while another process runs it."""
    # Both locks of a supervisor: the one in the folder keeps out this machine, the one in the database every other that
    # has the store by another path.
    with run.lock(), open_store.supervising(run.store_path), RunStore.open(run.store_path) as run_store:
        open_store.own(run.store_path)
        earlier_config = run.config()
        document = earlier_config.model_dump(mode="json")
        for override in overrides:
            configuration.apply_override(document, override)
        new_config = configuration.parse(document)
        differences, trained_steps = (
            changes.changed(earlier_config, new_config),
            run_store.versions.current_version().step,
        )
        if new_config.train.steps < trained_steps:
            raise ConfigError(
                "train.steps", new_config.train.steps, f"the run has done {trained_steps}: give as many or more"
            )
        if new_config.train.steps > earlier_config.train.steps:
            _reopen(run, earlier_config, run_store)
        setting_keys = [override.partition("=")[0].strip() for override in overrides]
        live_settings.note(run_store, differences, trained_steps + 1)
        live_settings.forget(run_store, setting_keys)
        run.write_config(new_config, run_store)
        changes_engines = any(setting_key in setting_keys for setting_key in ("engine.replicas", "engine.urls"))
        scaling.forget(run_store, engines=changes_engines, workers="rollout.workers" in setting_keys)


def reopen_stopped(run: RunDir) -> None:
    """Let a run that was stopped before its last step train on. Raises UsageError while another process runs it."""
    with run.lock(), open_store.supervising(run.store_path), RunStore.open(run.store_path) as run_store:
        open_store.own(run.store_path)
        if STOPPED_EARLY.of(run_store.meta) is not None:
            _reopen(run, run.config(), run_store)


def _reopen(run: RunDir, before: RunConfig, store: RunStore) -> None:
    """Reopen training: its clock goes on from its last reading, and its last evaluation becomes one during training."""
    early_reason = STOPPED_EARLY.of(store.meta)
    trained_steps = store.versions.current_version().step if early_reason else before.train.steps
    train_began_s, ended = TRAIN_STARTED_S.of(store.meta), TRAIN_ENDED_S.of(store.meta)
    if train_began_s is not None and ended is not None:
        # As if training had just been interrupted: the report's time of training is then the sum of both parts, without
        # the week in between.
        TRAIN_STARTED_S.set(store, time.time() - (ended - train_began_s))
        TRAIN_ENDED_S.set(store, None)
    for held_out in before.eval.sets:
        ended = evaluation.label(held_out.name, "after")
        store.groups.rename_purpose(ended, evaluation.label(held_out.name, f"during@{trained_steps}"))
    if run.summary.exists():  # it describes the earlier end
        run.summary.replace(run.path / f"summary-{trained_steps}.json")
    if early_reason:
        STOPPED_EARLY.set(store, None)  # last: a crash before it does all of this again
