"""The settings that a run may change, and when: while it goes on, at a resume, or never. Owns that table, the only one.

What a run learns from it keeps: another environment, group or algorithm would be another experiment under one name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from pydantic import BaseModel

from agentrl.config.run_config import RunConfig, parse
from agentrl.errors import ConfigError

IN_FLIGHT: Final = (
    "train.lr",
    "train.lr_min",
    "train.grad_clip",
    "train.max_skipped",
    "train.checkpoint_every",
    "buffer.max_lag",
    "rollout.max_running",
    "rollout.turn_deadline_s",
    "rollout.step_deadline_s",
    "rollout.episode_deadline_s",
    "rollout.group_deadline_s",
    "rollout.failure_budget",
    "rollout.skip_tasks",
    "alarms.*",
    "eval.every",
    "eval.during",
    "eval.n_during",
)
"""Patterns of the settings that change at the edge of a step, or at a resume."""

# A list of what may change, and not of what may not: a setting that is new tomorrow is then refused until somebody has
# thought about it.
AT_A_RESUME: Final = (
    "train.steps",
    "scratch_dir",
    "train.keep_checkpoints",
    "train.threads",
    "train.compile",
    "train.gradient_checkpointing",
    "train.logits_mb",
    "train.offload_optimizer",
    "*.*_deadline_s",
    "rollout.workers",
    "engine.urls",
    "engine.replicas",
    "engine.threads",
    "engine.canary",
    "engine.routed_experts",
    "engine.max_batch",
    "engine.kv_cache_mb",
    "buffer.keep_*",
    "cluster.address",
    "cluster.head_away_s",
    "cluster.lease_s",
    "trackers",
    "trackers.*",
)
"""Patterns of those that change at a resume alone: processes read them as they start."""


def in_flight(key: str) -> bool:
    return any(fnmatchcase(key, key_pattern) for key_pattern in IN_FLIGHT)


def at_a_resume(key: str) -> bool:
    return in_flight(key) or any(fnmatchcase(key, key_pattern) for key_pattern in AT_A_RESUME)


def changed(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The settings that differ by their dotted keys, as they were and are. Raises ConfigError for one that a run
    keeps."""
    old_values, new_values = (values(config) for config in (before, after))
    changes = {
        setting_key: (old_values.get(setting_key), new_values.get(setting_key))
        for setting_key in (*new_values, *(old_values.keys() - new_values))
        if old_values.get(setting_key) != new_values.get(setting_key)
    }
    for setting_key, (old_value, new_value) in changes.items():
        if not at_a_resume(setting_key):
            hint = f"a run that goes on keeps it ({old_value!r}): leave it out, or start another run with --out"
            raise ConfigError(setting_key, new_value, hint)
    # Not a setting but what follows from two of them: with buffer.close = "auto" a lag bound of 0 closes groups with
    # all members, and another bound with three in four. Groups of both kinds in one run would be two experiments.
    if before.quorum != after.quorum:
        lag_bounds = [values_by_key["buffer.max_lag"] for values_by_key in (old_values, new_values)]
        member_counts = [
            "all members" if run_config.quorum is None else f"{run_config.quorum} scored members"
            for run_config in (before, after)
        ]
        closing_rules = [
            f"groups close with {member_words} at buffer.max_lag = {lag_bound}"
            for member_words, lag_bound in zip(member_counts, lag_bounds, strict=True)
        ]
        hint = (
            f"{closing_rules[0]}, and {closing_rules[1]} (buffer.close): give another, or start another run with --out"
        )
        raise ConfigError("buffer.max_lag", lag_bounds[1], hint)
    return changes


def values(config: RunConfig) -> dict[str, Any]:
    """All settings by their dotted keys, as JSON has them. A table whose keys are the user's is one value."""
    return dict(_values(config, config.model_dump(mode="json")))


def with_values(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """The configuration with other settings, by their dotted keys. Raises ConfigError."""
    document = config.model_dump(mode="json")
    for setting_key, setting_value in settings.items():
        *sections, last_key = setting_key.split(".")
        inner_table = document
        for section in sections:
            inner_table = inner_table[section]
        inner_table[last_key] = setting_value
    return parse(document)


def _values(section: BaseModel, document: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for setting_name, setting_value in document.items():
        inner_section = getattr(section, setting_name, None)
        if isinstance(inner_section, BaseModel):
            yield from _values(inner_section, setting_value, f"{prefix}{setting_name}.")
        else:
            yield prefix + setting_name, setting_value
