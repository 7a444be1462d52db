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
        requests = REQUESTED_SETTINGS.of(store.meta)
        before = _with(_now(store), requests)
        document = before.model_dump(mode="json")
        for override in overrides:
            configuration.apply_override(document, override)
        differences = changes.changed(before, configuration.parse(document))
        for key, (_, value) in differences.items():
            if not changes.in_flight(key):
                hint = f"agentrl stop {run.path}; agentrl train --resume {run.path} --set {key}={_typed(value)}"
                raise ConfigError(key, value, f"it changes at a resume, not while the run goes on: {hint}")
        if not differences:
            return {}
        wish = {"settings": {key: value for key, (_, value) in differences.items()}, "asked_s": time.time()}
        # If somebody else made a request in between, everything above is done again: the two may contradict each other,
        # and the second has to be checked beside the first.
        if REQUESTED_SETTINGS.swap(store, requests, [*requests, wish]):
            return differences


def take_up(run: RunDir, store: RunStore, step: int) -> RunConfig | None:
    """Apply the requested settings to the run's configuration from `step` on, and return it; None if nothing was
    requested."""
    requests = REQUESTED_SETTINGS.of(store.meta)
    if not requests:
        return None
    before = _now(store)
    after = _with(before, requests)
    # First the note, then the configuration, then the request goes. Whoever is killed in between does the same once
    # more, with the same result; in the other order a crash after the first write would leave a setting that no row of
    # changes explains.
    note(store, changes.changed(before, after), step)
    run.write_config(after, store)
    while not REQUESTED_SETTINGS.swap(store, now := REQUESTED_SETTINGS.of(store.meta), now[len(requests) :]):
        pass  # somebody made a request meanwhile
    return after


def forget(store: RunStore, keys: Sequence[str]) -> None:
    """Drop the requests for these settings: a resume sets them otherwise."""
    requests = REQUESTED_SETTINGS.of(store.meta)
    remaining = [
        {**wish, "settings": {key: value for key, value in wish["settings"].items() if key not in keys}}
        for wish in requests
    ]
    if requests:
        REQUESTED_SETTINGS.swap(store, requests, remaining)


def note(store: RunStore | RunStore, differences: Mapping[str, tuple[Any, Any]], step: int) -> None:
    """Record changes that hold from `step` on. First of all: who is killed after it changes the same once more."""
    if differences:
        was, now = ({key: pair[place] for key, pair in differences.items()} for place in (0, 1))
        row = {"step": step, "was": was, "settings": now, "time_s": time.time()}
        CHANGES.set(store, [*CHANGES.of(store.meta), row])


def of_step(store: RunStore | RunStore, config: RunConfig) -> dict[str, Any]:
    """The settings that ever changed, as `config` has them: for the row of a step. None of most runs."""
    rows = CHANGES.of(store.meta)
    current = changes.values(config) if rows else {}
    return {key: current.get(key) for row in rows for key in row["settings"]}


def held_at(store: RunStore, config: RunConfig, row: Values | None, step: int) -> RunConfig:
    """The configuration with which `step` was trained, by its metrics `row`; by the record of changes without one."""
    settings: dict[str, Any] = {}
    for change in reversed(CHANGES.of(store.meta)):  # back to what was before the first
        if row is not None or change["step"] > step:
            settings |= change["was"]
    settings |= cast("dict[str, Any]", (row or {}).get("settings") or {})
    return changes.with_values(config, settings) if settings else config


def _now(store: RunStore | RunStore) -> RunConfig:
    return configuration.from_json(CONFIG.of(store.meta) or "{}")


def _with(config: RunConfig, requests: Sequence[Mapping[str, Any]]) -> RunConfig:
    for wish in requests:
        config = changes.with_values(config, wish["settings"])
    return config


def _typed(value: Any) -> str:
    return "off" if value is None else str(value)
