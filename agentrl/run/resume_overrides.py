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
    with run.lock(), open_store.supervising(run.store_path), RunStore.open(run.store_path) as store:
        open_store.own(run.store_path)
        before = run.config()
        document = before.model_dump(mode="json")
        for override in overrides:
            configuration.apply_override(document, override)
        config = configuration.parse(document)
        differences, done = changes.changed(before, config), store.versions.current_version().step
        if config.train.steps < done:
            raise ConfigError("train.steps", config.train.steps, f"the run has done {done}: give as many or more")
        if config.train.steps > before.train.steps:
            _reopen(run, before, store)
        keys = [override.partition("=")[0].strip() for override in overrides]
        live_settings.note(store, differences, done + 1)
        live_settings.forget(store, keys)
        run.write_config(config, store)
        engines = any(key in keys for key in ("engine.replicas", "engine.urls"))
        scaling.forget(store, engines=engines, workers="rollout.workers" in keys)


def reopen_stopped(run: RunDir) -> None:
    """Let a run that was stopped before its last step train on. Raises UsageError while another process runs it."""
    with run.lock(), open_store.supervising(run.store_path), RunStore.open(run.store_path) as store:
        open_store.own(run.store_path)
        if STOPPED_EARLY.of(store.meta) is not None:
            _reopen(run, run.config(), store)


def _reopen(run: RunDir, before: RunConfig, store: RunStore) -> None:
    """Reopen training: its clock goes on from its last reading, and its last evaluation becomes one during training."""
    stopped = STOPPED_EARLY.of(store.meta)
    done = store.versions.current_version().step if stopped else before.train.steps
    started, ended = TRAIN_STARTED_S.of(store.meta), TRAIN_ENDED_S.of(store.meta)
    if started is not None and ended is not None:
        # As if training had just been interrupted: the report's time of training is then the sum of both parts, without
        # the week in between.
        TRAIN_STARTED_S.set(store, time.time() - (ended - started))
        TRAIN_ENDED_S.set(store, None)
    for held_out in before.eval.sets:
        ended = evaluation.label(held_out.name, "after")
        store.groups.rename_purpose(ended, evaluation.label(held_out.name, f"during@{done}"))
    if run.summary.exists():  # it describes the earlier end
        run.summary.replace(run.path / f"summary-{done}.json")
    if stopped:
        STOPPED_EARLY.set(store, None)  # last: a crash before it does all of this again
