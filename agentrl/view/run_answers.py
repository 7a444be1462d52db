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
    run_state, step_rows, config = opened.state(), opened.steps(), opened.config
    step_values = [row.values for row in step_rows]
    with opened.store() as run_store:
        created_s = CREATED_S.of(run_store.meta)
    return {
        "id": opened.id,
        "path": str(opened.run.path),
        "name": config.name,
        "env": config.env.id,
        "model": config.model,
        "algo": config.algo.kind,
        "seed": config.seed,
        "state": run_state["state"],
        "live": is_live(run_state),
        "phase": run_state["phase"],
        "paused_s": run_state["paused_s"],
        "step": run_state["step"],
        "steps": run_state["steps"],
        "eta_s": status.eta_s(step_rows, config.train.steps) if is_live(run_state) else None,
        "reward": _mean(step_values[-_RECENT:], "outcome_mean"),
        "success": run_state["success"],
        "held_out": [list(held_out_point) for held_out_point in run_state["held_out"].items()],
        "spark": _thinned([_number(row.get("outcome_mean")) for row in step_values]),
        **notes_of(opened.run),
        "created_s": created_s,
        "updated_s": step_rows[-1].time_s if step_rows else created_s,
    }


def summary(opened: OpenedRun) -> Json:
    """All about a run but its curves."""
    run_state, config, step_rows = opened.state(), opened.config, opened.steps()
    with opened.store() as run_store:
        purposes, failures, roles = run_store.groups.purposes(), run_store.metrics.failures(), run_store.search.roles()
        store_facts: Json = {
            "purposes": purposes,
            "sources": [{"name": source.name, "weight": source.weight} for source in run_store.scores.sources()],
            "endings": {reason.value: n for reason, n in run_store.metrics.endings().items()},
            "flow": {
                "groups": {group_state.value: n for group_state, n in run_store.groups.counts().items()},
                "dropped": run_store.metrics.drops(),
                "members_dropped": opened.seldom("members_dropped", lambda store: store.metrics.members_dropped()),
                "late_open": run_store.buffer.late_open(),
            },
            "failures": {"failed": failures.failed, "ended": failures.ended, "last": failures.detail},
            "train_started_s": TRAIN_STARTED_S.of(run_store.meta),
            "train_ended_s": TRAIN_ENDED_S.of(run_store.meta),
        }
    return (
        line(opened)
        | store_facts
        | {
            "status": run_state,
            "alarms": run_state["alarms"],
            "names": metric_names(opened),
            "evaluations": evaluations(opened, purposes),
            "marks": _marks(opened, step_rows),
            "steering": steered(opened),
            "environments": sorted({config.env.id, *(task_table.id for task_table in config.tasks if task_table.id)}),
            "roles": roles,
            "stop_reasons": [reason.value for reason in StopReason],
            "summary": _final(opened),
            "config": config.model_dump(mode="json"),
        }
    )


def health(opened: OpenedRun) -> list[Json]:
    """The advice on a run, causes first, with what to type; none for a healthy one."""
    run_path = opened.run.path
    is_under_way = under_way(opened.run)
    step_rows = opened.steps()
    # The advice reads far more of the store than the page's other answers.
    findings = opened.seldom(
        "health", lambda store: examine(read_facts(store, opened.config, run_path, live=is_under_way, rows=step_rows))
    )
    return [advice.document(run_path) for advice in findings]


def metrics(opened: OpenedRun, names: Sequence[str]) -> Json:
    """The values of metrics by step, null where a step has none; how old the tokens of the last steps were."""
    step_rows, step_values = opened.steps(), opened.values()
    return {
        "step": [row.step for row in step_rows],
        "time_s": [row.time_s for row in step_rows],
        "values": {metric_name: [row.get(metric_name) for row in step_values] for metric_name in names},
        "lags": _lags(step_rows[-_RECENT:]),
    }


def metric_names(opened: OpenedRun) -> list[str]:
    """The names that the first and the last steps measured."""
    step_values = opened.values()
    # Names settle within the first steps of a run. First and last rows, since some metrics begin later and others
    # end; all of them would be gone through at every look for a name that came and went.
    return sorted({metric_name for step_row in (*step_values[:5], *step_values[-25:]) for metric_name in step_row})


def evaluations(opened: OpenedRun, purposes: Sequence[str]) -> Json:
    """Results by held-out set, each with the step after which it was measured."""
    points_by_set: dict[str, list[Json]] = {}
    last_step = opened.state()["step"]
    for purpose in purposes:
        eval_label = held_out.read_label(purpose, now=last_step)
        if eval_label is not None and (eval_result := opened.evaluation(eval_label.name, purpose)) is not None:
            point = {"purpose": purpose, "when": eval_label.when, "step": eval_label.step, **eval_result.figures()}
            points_by_set.setdefault(eval_label.name, []).append(point)
    return {name: sorted(points, key=lambda point: point["step"]) for name, points in sorted(points_by_set.items())}


def fingerprint(opened: OpenedRun) -> list[Any]:
    """Changes whenever a page of the run has something new to show. Reads no more than what is new."""
    last_steps = [step_row.step for step_row in opened.steps()[-1:]]
    with opened.store() as run_store:
        # Counters and small values only: this is what every open page asks for once a second.
        stored_values = [stored_value.of(run_store.meta) for stored_value in (PAUSED, REQUESTED_SETTINGS, RESTARTED)]
        return [
            *run_store.metrics.progress(),
            run_store.lineage.attempt,
            sorted(run_store.groups.counts().items()),
            PHASE.of(run_store.meta),
            last_steps,
            *stored_values,
        ]


def _marks(opened: OpenedRun, rows: Sequence[Metric]) -> Json:
    """Return the events of a run beside its steps, each with the step at which it happened."""
    with opened.store() as run_store:
        served_versions, checkpoint_steps, setting_changes = (
            run_store.versions.served_versions(),
            run_store.lineage.checkpoint_steps(),
            CHANGES.of(run_store.meta),
        )
        restarts = RESTARTED.of(run_store.meta)
    failed_tasks = opened.seldom("failed_tasks", lambda store: store.metrics.failed_tasks())
    events: list[Json] = []
    for before, after in itertools.pairwise(rows):
        if after.attempt != before.attempt:
            events.append({"kind": "restart", "step": after.step, "text": f"went on from step {after.step - 1}"})
    # A run with a broken environment has thousands of failures, which would hide everything else; of each kind the
    # newest are shown.
    for task in sorted(failed_tasks, key=lambda failure: -failure.last_s)[:_FAULTS]:
        event_text = f"{task.times} times {task.reason.value}: {task.detail}"[:300]
        events.append(
            {"kind": "fault", "step": opened.step_at(task.last_s), "text": event_text, "episode": task.episode}
        )
    for death in restarts[-_FAULTS:]:
        event_text = f"{death['why']}; it was started again"[:300]
        events.append({"kind": "fault", "step": opened.step_at(death["time_s"]), "text": event_text})
    for change in setting_changes:
        changed_texts = (
            f"{key} = {value!r} (was {change['was'].get(key)!r})" for key, value in change["settings"].items()
        )
        events.append({"kind": "setting", "step": change["step"], "text": ", ".join(changed_texts)[:300]})
    for step_row in rows:
        for alarm in cast("list[object]", step_row.values.get("alarms") or [])[:3]:
            events.append({"kind": "alarm", "step": step_row.step, "text": str(alarm)[:300]})
    events.sort(key=lambda event: event["step"])
    return {
        "weights": [weights.step for weights in served_versions],
        "checkpoints": checkpoint_steps,
        "events": events[-4 * _FAULTS :],
    }


def _lags(rows: Sequence[Metric]) -> Json:
    """Count the tokens trained and the tokens too old in the last steps, by age in steps (`4_7`: four to seven)."""
    trained, stale = Counter[str](), Counter[str]()
    for step_row in rows:
        by_lag = cast("Mapping[str, Mapping[str, float]]", step_row.values.get("by_lag") or {})
        trained.update({lag: int(lag_share.get("tokens") or 0) for lag, lag_share in by_lag.items()})
        stale.update(cast("Mapping[str, int]", step_row.values.get("tokens_stale_by_lag") or {}))
    # By number: as texts, `16_31` would come before `2_3`.
    order = sorted({*trained, *stale}, key=lambda lag: int(lag.partition("_")[0]))
    return {"lag": order, "trained": [trained[lag] for lag in order], "stale": [stale[lag] for lag in order]}


def _number(value: Any) -> float | None:
    return finite(float(value)) if isinstance(value, int | float) else None  # pyright: ignore[reportReturnType]


def _mean(rows: Sequence[Mapping[str, Any]], key: str) -> float | None:
    numbers = [float(row[key]) for row in rows if row.get(key) is not None]
    return fmean(numbers) if numbers else None


def _thinned(values: Sequence[float | None]) -> list[float | None]:
    """Return at most `_SPARK` means of neighbours."""
    if len(values) <= _SPARK:
        return list(values)
    # Means of neighbours and not every n-th value: rewards are noisy, and a sample would show the noise.
    part_edges = [len(values) * k // _SPARK for k in range(_SPARK + 1)]
    parts = ([value for value in values[a:b] if value is not None] for a, b in itertools.pairwise(part_edges))
    return [fmean(part) if part else None for part in parts]


def _final(opened: OpenedRun) -> Json | None:
    try:
        return cast("Json", json.loads(opened.run.summary.read_text()))
    except (OSError, ValueError):
        return None
