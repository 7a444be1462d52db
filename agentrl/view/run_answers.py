"""A run as JSON: a line for the list, its state, its curves, what happened at which step. Knows nothing of HTTP."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, cast

from agentrl.records import StopReason
from agentrl.run.evaluation import held_out
from agentrl.run.health.examine import examine
from agentrl.run.health.run_facts import read_facts
from agentrl.run.reporting import status
from agentrl.run.steering import under_way
from agentrl.store.metrics import Metric, finite
from agentrl.store.run_values import (
    CHANGES,
    CREATED_S,
    PAUSED,
    PHASE,
    REQUESTED_SETTINGS,
    RESTARTED,
    TRAIN_ENDED_S,
    TRAIN_STARTED_S,
)
from agentrl.view.notes import notes_of
from agentrl.view.opened_runs import OpenedRun, is_live
from agentrl.view.page_steering import steered

Json = dict[str, Any]
_SPARK = 60  # points of a curve in a line of the list
_RECENT = 10  # steps in a mean
_FAULTS = 50  # marks of one kind


def line(opened: OpenedRun) -> Json:
    """One run, for the list."""
    state, rows, config = opened.state(), opened.steps(), opened.config
    values = [row.values for row in rows]
    with opened.store() as store:
        created = CREATED_S.of(store.meta)
    return {
        "id": opened.id,
        "path": str(opened.run.path),
        "name": config.name,
        "env": config.env.id,
        "model": config.model,
        "algo": config.algo.kind,
        "seed": config.seed,
        "state": state["state"],
        "live": is_live(state),
        "phase": state["phase"],
        "paused_s": state["paused_s"],
        "step": state["step"],
        "steps": state["steps"],
        "eta_s": status.eta_s(rows, config.train.steps) if is_live(state) else None,
        "reward": _mean(values[-_RECENT:], "outcome_mean"),
        "success": state["success"],
        "held_out": [list(point) for point in state["held_out"].items()],
        "spark": _thinned([_number(row.get("outcome_mean")) for row in values]),
        **notes_of(opened.run),
        "created_s": created,
        "updated_s": rows[-1].time_s if rows else created,
    }


def summary(opened: OpenedRun) -> Json:
    """All about a run but its curves."""
    state, config, rows = opened.state(), opened.config, opened.steps()
    with opened.store() as store:
        purposes, failures, roles = store.groups.purposes(), store.metrics.failures(), store.search.roles()
        facts: Json = {
            "purposes": purposes,
            "sources": [{"name": source.name, "weight": source.weight} for source in store.scores.sources()],
            "endings": {reason.value: n for reason, n in store.metrics.endings().items()},
            "flow": {
                "groups": {group.value: n for group, n in store.groups.counts().items()},
                "dropped": store.metrics.drops(),
                "members_dropped": opened.seldom("members_dropped", lambda store: store.metrics.members_dropped()),
                "late_open": store.buffer.late_open(),
            },
            "failures": {"failed": failures.failed, "ended": failures.ended, "last": failures.detail},
            "train_started_s": TRAIN_STARTED_S.of(store.meta),
            "train_ended_s": TRAIN_ENDED_S.of(store.meta),
        }
    return (
        line(opened)
        | facts
        | {
            "status": state,
            "alarms": state["alarms"],
            "names": metric_names(opened),
            "evaluations": evaluations(opened, purposes),
            "marks": _marks(opened, rows),
            "steering": steered(opened),
            "environments": sorted({config.env.id, *(table.id for table in config.tasks if table.id)}),
            "roles": roles,
            "stop_reasons": [reason.value for reason in StopReason],
            "summary": _final(opened),
            "config": config.model_dump(mode="json"),
        }
    )


def health(opened: OpenedRun) -> list[Json]:
    """The advice on a run, causes first, with what to type; none for a healthy one."""
    path = opened.run.path
    live = under_way(opened.run)
    rows = opened.steps()
    # The advice reads far more of the store than the page's other answers.
    findings = opened.seldom(
        "health", lambda store: examine(read_facts(store, opened.config, path, live=live, rows=rows))
    )
    return [advice.document(path) for advice in findings]


def metrics(opened: OpenedRun, names: Sequence[str]) -> Json:
    """The values of metrics by step, null where a step has none; how old the tokens of the last steps were."""
    rows, flat = opened.steps(), opened.values()
    return {
        "step": [row.step for row in rows],
        "time_s": [row.time_s for row in rows],
        "values": {name: [row.get(name) for row in flat] for name in names},
        "lags": _lags(rows[-_RECENT:]),
    }


def metric_names(opened: OpenedRun) -> list[str]:
    """The names that the first and the last steps measured."""
    flat = opened.values()
    # Names settle within the first steps of a run. First and last rows, since some metrics begin later and others
    # end; all of them would be gone through at every look for a name that came and went.
    return sorted({name for row in (*flat[:5], *flat[-25:]) for name in row})


def evaluations(opened: OpenedRun, purposes: Sequence[str]) -> Json:
    """Results by held-out set, each with the step after which it was measured."""
    by_set: dict[str, list[Json]] = {}
    last = opened.state()["step"]
    for purpose in purposes:
        read = held_out.read_label(purpose, now=last)
        if read is not None and (result := opened.evaluation(read.name, purpose)) is not None:
            point = {"purpose": purpose, "when": read.when, "step": read.step, **result.figures()}
            by_set.setdefault(read.name, []).append(point)
    return {name: sorted(points, key=lambda point: point["step"]) for name, points in sorted(by_set.items())}


def fingerprint(opened: OpenedRun) -> list[Any]:
    """Changes whenever a page of the run has something new to show. Reads no more than what is new."""
    steps = [row.step for row in opened.steps()[-1:]]
    with opened.store() as store:
        # Counters and small values only: this is what every open page asks for once a second.
        wishes = [value.of(store.meta) for value in (PAUSED, REQUESTED_SETTINGS, RESTARTED)]
        return [
            *store.metrics.progress(),
            store.lineage.attempt,
            sorted(store.groups.counts().items()),
            PHASE.of(store.meta),
            steps,
            *wishes,
        ]


def _marks(opened: OpenedRun, rows: Sequence[Metric]) -> Json:
    """Return the events of a run beside its steps, each with the step at which it happened."""
    with opened.store() as store:
        served, saved, settings = (
            store.versions.served_versions(),
            store.lineage.checkpoint_steps(),
            CHANGES.of(store.meta),
        )
        restarted = RESTARTED.of(store.meta)
    failed = opened.seldom("failed_tasks", lambda store: store.metrics.failed_tasks())
    events: list[Json] = []
    for before, after in itertools.pairwise(rows):
        if after.attempt != before.attempt:
            events.append({"kind": "restart", "step": after.step, "text": f"went on from step {after.step - 1}"})
    # A run with a broken environment has thousands of failures, which would hide everything else; of each kind the
    # newest are shown.
    for task in sorted(failed, key=lambda failure: -failure.last_s)[:_FAULTS]:
        text = f"{task.times} times {task.reason.value}: {task.detail}"[:300]
        events.append({"kind": "fault", "step": opened.step_at(task.last_s), "text": text, "episode": task.episode})
    for death in restarted[-_FAULTS:]:
        text = f"{death['why']}; it was started again"[:300]
        events.append({"kind": "fault", "step": opened.step_at(death["time_s"]), "text": text})
    for change in settings:
        changed = (f"{key} = {value!r} (was {change['was'].get(key)!r})" for key, value in change["settings"].items())
        events.append({"kind": "setting", "step": change["step"], "text": ", ".join(changed)[:300]})
    for row in rows:
        for alarm in cast("list[object]", row.values.get("alarms") or [])[:3]:
            events.append({"kind": "alarm", "step": row.step, "text": str(alarm)[:300]})
    events.sort(key=lambda event: event["step"])
    return {"weights": [weights.step for weights in served], "checkpoints": saved, "events": events[-4 * _FAULTS :]}


def _lags(rows: Sequence[Metric]) -> Json:
    """Count the tokens trained and the tokens too old in the last steps, by age in steps (`4_7`: four to seven)."""
    trained, stale = Counter[str](), Counter[str]()
    for row in rows:
        by_lag = cast("Mapping[str, Mapping[str, float]]", row.values.get("by_lag") or {})
        trained.update({lag: int(share.get("tokens") or 0) for lag, share in by_lag.items()})
        stale.update(cast("Mapping[str, int]", row.values.get("tokens_stale_by_lag") or {}))
    # By number: as texts, `16_31` would come before `2_3`.
    order = sorted({*trained, *stale}, key=lambda lag: int(lag.partition("_")[0]))
    return {"lag": order, "trained": [trained[lag] for lag in order], "stale": [stale[lag] for lag in order]}


def _number(value: Any) -> float | None:
    return finite(float(value)) if isinstance(value, int | float) else None  # pyright: ignore[reportReturnType]


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [float(row[key]) for row in rows if row.get(key) is not None]
    return fmean(values) if values else None


def _thinned(values: Sequence[float | None]) -> list[float | None]:
    """Return at most `_SPARK` means of neighbours."""
    if len(values) <= _SPARK:
        return list(values)
    # Means of neighbours and not every n-th value: rewards are noisy, and a sample would show the noise.
    edges = [len(values) * k // _SPARK for k in range(_SPARK + 1)]
    parts = ([value for value in values[a:b] if value is not None] for a, b in itertools.pairwise(edges))
    return [fmean(part) if part else None for part in parts]


def _final(opened: OpenedRun) -> Json | None:
    try:
        return cast("Json", json.loads(opened.run.summary.read_text()))
    except (OSError, ValueError):
        return None
