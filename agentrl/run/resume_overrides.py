"""Settings that a resumed run may change: how long it trains and which resources it uses, never what it learns from.

Owns their list. If a finished run gets more steps, or one that was stopped early goes on, its last evaluation becomes
one of those during training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, cast

from agentrl import config as configuration
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.run.cluster import scaling
from agentrl.run.evaluation import held_out as evaluation
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.databases import open_store
from agentrl.store.interfaces import ControlStore, ReadStore
from agentrl.store.run_values import STOPPED_EARLY, TRAIN_ENDED_S, TRAIN_STARTED_S

_MAY_CHANGE = (
    "train.steps",
    "scratch_dir",
    "train.checkpoint_every",
    "train.checkpoint_every_s",
    "train.keep_checkpoints",
    "train.hash_every",
    "train.threads",
    "train.compile",
    "train.gradient_checkpointing",
    "train.logits_mb",
    "train.offload_activations",
    "train.offload_optimizer",
    "train.max_skipped",
    "train.routing_replay",
    "*.*_deadline_s",
    "train.parallel.deadline_s",
    "rollout.failure_budget",
    "rollout.skip_tasks",
    "rollout.max_running",
    "rollout.workers",
    "engine.urls",
    "engine.replicas",
    "engine.threads",
    "engine.gpus",
    "engine.canary_tolerance",
    "engine.max_batch",
    "engine.kv_cache_mb",
    "buffer.keep_*",
    "cluster.address",
    "cluster.head_away_s",
    "cluster.lease_s",
    "alarms.*",
    "trackers.*",
    "eval.every",
    "eval.n_during",
)


def may_change(key: str) -> bool:
    """Whether a run that goes on may change the setting `key`, as in `train.steps`."""
    return any(fnmatchcase(key, pattern) for pattern in _MAY_CHANGE)


def change(run: RunDir, overrides: list[str]) -> None:
    """Write `overrides` (`section.key=value`) into a run that is not running.

    Raises ConfigError for a setting that may not change, for fewer steps than the run has done, and for a bad value;
    UsageError while another process runs it."""
    with run.lock(), open_store.supervising(run.store_path), RunStore.open(run.store_path) as store:
        open_store.own(run.store_path)
        before = run.config()
        document = before.model_dump(mode="json")
        for override in overrides:
            configuration.apply_override(document, override)
        config = configuration.parse(document)
        _check(before, config, store)
        if config.train.steps > before.train.steps:
            _reopen(run, before, store)
        run.write_config(config, store)
        said = [override.partition("=")[0].strip() for override in overrides]
        engines = any(key in said for key in ("engine.replicas", "engine.gpus", "engine.urls"))
        scaling.forget(store, engines=engines, workers="rollout.workers" in said)


def _check(before: RunConfig, after: RunConfig, store: ReadStore) -> None:
    old, new = (dict(_leaves(config.model_dump(mode="json"))) for config in (before, after))
    for key in old.keys() | new.keys():
        if old.get(key) != new.get(key) and not may_change(key):
            hint = f"a run that goes on keeps it ({old.get(key)!r}): leave it out, or start another run with --out"
            raise ConfigError(key, new.get(key), hint)
    done = store.current_version().step
    if after.train.steps < done:
        raise ConfigError("train.steps", after.train.steps, f"the run has done {done}: give as many or more")


def reopen_stopped(run: RunDir) -> None:
    """Let a run that was stopped before its last step train on. A store that an older agentrl wrote is brought up to
    date. Raises UsageError while another process runs it."""
    with run.lock(), open_store.supervising(run.store_path), RunStore.open(run.store_path) as store:
        open_store.own(run.store_path)
        if STOPPED_EARLY.of(store.meta) is not None:
            _reopen(run, run.config(), store)


def _reopen(run: RunDir, before: RunConfig, store: ControlStore) -> None:
    """Reopen training: its clock goes on from its last reading, and its last evaluation becomes one during training."""
    stopped = STOPPED_EARLY.of(store.meta)
    done = store.current_version().step if stopped else before.train.steps
    started, ended = TRAIN_STARTED_S.of(store.meta), TRAIN_ENDED_S.of(store.meta)
    if started is not None and ended is not None:
        TRAIN_STARTED_S.set(store, time.time() - (ended - started))
        TRAIN_ENDED_S.set(store, None)
    for held_out in before.eval.sets:
        ended = evaluation.label(held_out.name, "after")
        store.rename_purpose(ended, evaluation.label(held_out.name, f"during@{done}"))
    if run.summary.exists():  # it tells of the earlier end
        run.summary.replace(run.path / f"summary-{done}.json")
    if stopped:
        STOPPED_EARLY.set(store, None)  # last: a crash before it does all of this again


def _leaves(document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in document.items():
        if isinstance(value, dict) and value:
            yield from _leaves(cast("dict[str, Any]", value), f"{prefix}{key}.")
        else:
            yield prefix + key, value
