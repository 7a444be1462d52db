"""Settings that change while a run goes on: requested by anybody beside it, taken up by its learner between two steps.

    agentrl set ─► row of the store ─► learner, at a step's edge ─► config.json, CONFIG, CHANGES ─► supervisor, workers

Wishes stand in a list, so that none of two people's is lost; of two for one setting the later holds. Each wish was
checked beside all before it. A step's row says which of the changed settings it was trained with (`settings`), so that
a step trained again, also after a return to a checkpoint, has those of then. Owns these rows; `agentrl.config.changes`
says what may change.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agentrl import config as configuration
from agentrl.config import RunConfig, changes
from agentrl.errors import ConfigError, UsageError
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.run_values import CHANGES, CONFIG, REQUESTED_SETTINGS, TRAIN_ENDED_S

Values = Mapping[str, Any]
"""Settings by their dotted keys."""


def ask(run: RunDir, store: RunStore, overrides: Sequence[str]) -> dict[str, tuple[Any, Any]]:
    """Request settings (`section.key=value`) from the next step on. Returns those that are new, as they are and shall
    be; an earlier request that no step has yet counts as set. Raises ConfigError for a bad value and for a setting that
    does not change while the run goes on; UsageError once its training is over."""
    if TRAIN_ENDED_S.of(store.meta) is not None:
        raise UsageError(f"{run.path} has trained its last step: no setting changes any more")
    while True:
        open_requests = REQUESTED_SETTINGS.of(store.meta)
        earlier_config = _with(_now(store), open_requests)
        document = earlier_config.model_dump(mode="json")
        for override in overrides:
            configuration.apply_override(document, override)
        differences = changes.changed(earlier_config, configuration.parse(document))
        for setting_key, (_, new_value) in differences.items():
            if not changes.in_flight(setting_key):
                resume = f"agentrl train --resume {run.path} --set {setting_key}={_typed(new_value)}"
                correction = f"agentrl stop {run.path}; {resume}"
                raise ConfigError(
                    setting_key, new_value, f"it changes at a resume, not while the run goes on: {correction}"
                )
        if not differences:
            return {}
        new_request = {
            "settings": {setting_key: new_value for setting_key, (_, new_value) in differences.items()},
            "asked_s": time.time(),
        }
        # If somebody else made a request in between, everything above is done again: the two may contradict each other,
        # and the second has to be checked beside the first.
        if REQUESTED_SETTINGS.swap(store, open_requests, [*open_requests, new_request]):
            return differences


def take_up(run: RunDir, store: RunStore, step: int) -> RunConfig | None:
    """Apply the requested settings to the run's configuration from `step` on, and return it; None if nothing was
    requested."""
    open_requests = REQUESTED_SETTINGS.of(store.meta)
    if not open_requests:
        return None
    earlier_config = _now(store)
    new_config = _with(earlier_config, open_requests)
    # First the note, then the configuration, then the request goes. Whoever is killed in between does the same once
    # more, with the same result; in the other order a crash after the first write would leave a setting that no row of
    # changes explains.
    note(store, changes.changed(earlier_config, new_config), step)
    run.write_config(new_config, store)
    while not REQUESTED_SETTINGS.swap(
        store, present_requests := REQUESTED_SETTINGS.of(store.meta), present_requests[len(open_requests) :]
    ):
        pass  # somebody made a request meanwhile
    return new_config


def forget(store: RunStore, keys: Sequence[str]) -> None:
    """Drop the requests for these settings: a resume sets them otherwise."""
    open_requests = REQUESTED_SETTINGS.of(store.meta)
    remaining = [
        {
            **open_request,
            "settings": {
                setting_key: setting_value
                for setting_key, setting_value in open_request["settings"].items()
                if setting_key not in keys
            },
        }
        for open_request in open_requests
    ]
    if open_requests:
        REQUESTED_SETTINGS.swap(store, open_requests, remaining)


def note(store: RunStore | RunStore, differences: Mapping[str, tuple[Any, Any]], step: int) -> None:
    """Record changes that hold from `step` on. First of all: who is killed after it changes the same once more."""
    if differences:
        old_values, new_values = (
            {setting_key: value_pair[pair_index] for setting_key, value_pair in differences.items()}
            for pair_index in (0, 1)
        )
        change_row = {"step": step, "was": old_values, "settings": new_values, "time_s": time.time()}
        CHANGES.set(store, [*CHANGES.of(store.meta), change_row])


def of_step(store: RunStore | RunStore, config: RunConfig) -> dict[str, Any]:
    """The settings that ever changed, as `config` has them: for the row of a step. None of most runs."""
    change_rows = CHANGES.of(store.meta)
    current_values = changes.values(config) if change_rows else {}
    return {
        setting_key: current_values.get(setting_key)
        for change_row in change_rows
        for setting_key in change_row["settings"]
    }


def held_at(store: RunStore, config: RunConfig, row: Values | None, step: int) -> RunConfig:
    """The configuration with which `step` was trained, by its metrics `row`; by the record of changes without one."""
    step_settings: dict[str, Any] = {}
    for change_row in reversed(CHANGES.of(store.meta)):  # back to what was before the first
        if row is not None or change_row["step"] > step:
            step_settings |= change_row["was"]
    step_settings |= cast("dict[str, Any]", (row or {}).get("settings") or {})
    return changes.with_values(config, step_settings) if step_settings else config


def _now(store: RunStore | RunStore) -> RunConfig:
    return configuration.from_json(CONFIG.of(store.meta) or "{}")


def _with(config: RunConfig, requests: Sequence[Mapping[str, Any]]) -> RunConfig:
    for open_request in requests:
        config = changes.with_values(config, open_request["settings"])
    return config


def _typed(value: Any) -> str:
    return "off" if value is None else str(value)
