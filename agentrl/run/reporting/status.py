"""Status of a run, and how to end it: read from its folder, its lock and its store, by a process beside it.

Never knows a part of the run in memory. It changes nothing: `stop` sends a signal, or asks a run of another machine
through its store, as `scale` does.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, cast

from agentrl.errors import StoreError, UsageError
from agentrl.host.janitor import runs_here
from agentrl.host.platform_checks import is_stopped
from agentrl.host.terminal_text import printable
from agentrl.records import GroupState
from agentrl.run.cluster import scale_requests, scaling
from agentrl.run.evaluation import held_out as evaluation
from agentrl.run.reporting import notice_counts, report
from agentrl.run.reporting.reward_figures import failures as score_failures
from agentrl.run.reporting.training_curve import training_curve
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.metrics import Metric
from agentrl.store.run_values import (
    LEARNER_WAITS,
    PAUSED,
    PHASE,
    RESTARTED,
    STOP_REQUESTED,
    STOPPED_EARLY,
    TAKES_NO_SIGNALS,
)

STEPS_COME = ("train", "drain")
"""The supervisor's phases in which a step that does not come is late."""
_RECENT = 10  # steps in a mean
_PACE = 20  # steps from which the time of the next ones is estimated
_SLOW = 10  # times the median step: then a step is called late
_LATE_S = 60.0  # but never before
_POINTS = 4  # of the curve of success: more do not fit a line
_POLL_S = 0.1
_MOST_NOTICES = 5  # lines for a person; --json has all


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the run: `here` is a process of this machine with its `pid`, `frozen` such a one that a signal has
    stopped; `elsewhere` is one of another container or machine, or the janitor that still cleans up; or nobody."""

    kind: Literal["here", "frozen", "elsewhere", "nobody"]
    pid: int | None = None


def holder(run: RunDir) -> Holder:
    """Who holds the run's lock now."""
    try:
        with run.lock_path.open() as lock_file:
            with suppress(BlockingIOError):
                # The lock is the truth about whether a run lives: the kernel frees it with the process. A file with a
                # process id would name whoever has that number today. Shared, so that two who look at one time do not
                # take each other for a run.
                fcntl.flock(lock_file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return Holder("nobody")
            process_id = runs_here(lock_file.read())
    except FileNotFoundError:
        return Holder("nobody")
    if process_id is None:
        return Holder("elsewhere")
    return Holder("frozen" if is_stopped(process_id) else "here", process_id)


def status(
    run: RunDir, now: Callable[[], float] = time.time, *, rows: Sequence[Metric] | None = None
) -> dict[str, Any]:
    """Return the document that `agentrl status --json` prints. `late` is the seconds since the last step if they are
    far more than a step takes, else None. `rows`: metrics of the steps, from a caller who has read them."""
    run_holder, run_config = holder(run), run.config()
    with RunStore.read(run.store_path) as run_store:
        rows = run_store.metrics.values("step") if rows is None else rows
        group_counts, run_phase = run_store.groups.counts(), PHASE.of(run_store.meta) or ""
        early_reason, drop_counts = STOPPED_EARLY.of(run_store.meta), run_store.metrics.drops()
        curve_by_set = {
            held_out.name: list(report.measured(run_store, held_out.name)) for held_out in run_config.eval.sets
        }
        size_state = scaling.describe(run_config, run_store.meta, live=run_holder.kind != "nobody")
        pause_state, restarted = PAUSED.of(run_store.meta), RESTARTED.of(run_store.meta)
        split_line, learner_waits = scale_requests.last_decision(run_store), LEARNER_WAITS.of(run_store.meta) or ""
        failure_counts, notice_totals = run_store.metrics.failures(), notice_counts.totals(run_store.metrics)
        score_texts = [str(failure) for failure in score_failures(run_store) if failure.matters]
        checkpoint = run_store.lineage.latest_checkpoint()
        quarantined = [lost_task.reason for lost_task in run_store.deaths.quarantined()]
    recent_values = [step_row.values for step_row in rows[-_RECENT:]]
    step_gaps_s = [later_row.time_s - earlier_row.time_s for earlier_row, later_row in pairwise(rows[-_RECENT - 1 :])]
    last_step_ago_s = max(0.0, now() - rows[-1].time_s) if rows else None
    step_pace_s = median(step_gaps_s) if step_gaps_s else None
    last_step = rows[-1].step if rows else 0
    is_training = run_holder.kind != "nobody" and run_phase in STEPS_COME and not pause_state
    return {
        "run": str(run.path),
        "state": "over" if run_holder.kind == "nobody" and run.summary.exists() else _STATES[run_holder.kind],
        "pid": run_holder.pid,
        "phase": run_phase,
        "stopped_early": early_reason,
        "paused_s": max(0.0, now() - pause_state["since_s"]) if pause_state else None,
        "step": last_step,
        "steps": run_config.train.steps,
        "last_step_ago_s": last_step_ago_s,
        "step_s": step_pace_s,
        # Both bounds: ten times a step of a second is no reason to look, and ten minutes are nothing for a run whose
        # steps take an hour.
        "late_s": last_step_ago_s
        if is_training
        and last_step_ago_s
        and step_pace_s is not None
        and last_step_ago_s > max(_LATE_S, _SLOW * step_pace_s)
        else None,
        "success": fmean(_numbers(recent_values, "success_mean")) if _numbers(recent_values, "success_mean") else None,
        "curve": [asdict(point) for point in training_curve(_curve(rows), _POINTS)],
        "held_out": {
            eval_step: eval_result.success
            for first_curve in list(curve_by_set.values())[:1]
            for eval_step, eval_result in first_curve
        },
        "pass_at": {
            set_name: {"step": success_curve[-1][0], **success_curve[-1][1].pass_at}
            for set_name, success_curve in curve_by_set.items()
            if success_curve
        },
        "lag_mean": fmean(_numbers(recent_values, "lag_mean")) if _numbers(recent_values, "lag_mean") else None,
        "size": size_state,
        "split": split_line,
        "waits": learner_waits if is_training else "",
        "groups": {
            group_state.value: group_counts[group_state] for group_state in GroupState if group_counts.get(group_state)
        },
        "dropped": drop_counts,
        "failed": {"episodes": failure_counts.failed, "ended": failure_counts.ended, "last": failure_counts.detail}
        if failure_counts.failed
        else None,
        "unscored": score_texts,
        "notices": notice_totals,
        "restarted": restarted,
        "quarantined": quarantined,
        "alarms": list(cast("list[str]", recent_values[-1].get("alarms") or [])) if recent_values else [],
        "checkpoint": None if checkpoint is None else checkpoint.step,
    }


def eta_s(rows: Sequence[Metric], steps: int) -> float | None:
    """Seconds until optimizer step `steps`, by the median time of the last ones; None before there are two."""
    # The median: one step with a checkpoint, a pause or a restart would move the mean, and the estimate with it, for
    # twenty steps.
    step_gaps_s = [later_row.time_s - earlier_row.time_s for earlier_row, later_row in pairwise(rows[-_PACE:])]
    return median(step_gaps_s) * max(0, steps - rows[-1].step) if step_gaps_s else None


def duration(seconds: float) -> str:
    """A time for a person, as `3 d 04 h`, `2 h 05 min`, `3 min 20 s` or `45 s`."""
    total_s = round(seconds)
    if total_s >= 86_400:
        return f"{total_s // 86_400} d {total_s % 86_400 // 3600:02d} h"
    if total_s >= 3600:
        return f"{total_s // 3600} h {total_s % 3600 // 60:02d} min"
    return f"{total_s // 60} min {total_s % 60:02d} s" if total_s >= 60 else f"{total_s} s"


def lines(facts: dict[str, Any]) -> Iterator[str]:
    """A status for a person; the last line says what to type next."""
    run_path, run_state = facts["run"], facts["state"]
    process_text = f" (process {facts['pid']})" if facts["pid"] else ""
    phase_text = f", phase {facts['phase']}" if facts["phase"] and facts["pid"] else ""
    yield f"{run_path}: {run_state}{process_text}{phase_text}"
    if facts["last_step_ago_s"] is None:
        yield f"step      0 of {facts['steps']}"
    else:
        pace_text = "" if facts["step_s"] is None else f"; a step takes {facts['step_s']:.2g} s"
        last_step_age = duration(facts["last_step_ago_s"])
        yield f"step      {facts['step']} of {facts['steps']}, the last {last_step_age} ago{pace_text}"
    if facts["paused_s"] is not None:
        yield f"paused    for {duration(facts['paused_s'])}: agentrl resume {run_path} lets it go on"
    if facts["stopped_early"]:
        yield f"stopped   early: {facts['stopped_early']}"
    if facts["success"] is not None:
        success_texts = [f"{eval_step}: {success:.2f}" for eval_step, success in facts["held_out"].items()]
        if len(success_texts) > 4:
            success_texts[1:-2] = ["…"]
        held_out = f"; held-out at {', '.join(success_texts)}" if success_texts else ""
        yield f"success   {facts['success']:.2f} in the last steps{held_out}; lag {facts['lag_mean'] or 0:.1f} steps"
    if len(facts["curve"]) > 1:
        point_texts = [
            f"{_span(point)}: {point['success']:.2f} ({point['low']:.2f} to {point['high']:.2f})"
            for point in facts["curve"]
        ]
        yield f"curve     success at step {', '.join(point_texts)}; 95% intervals over groups"
    for entry_name, newest_rates in facts["pass_at"].items():
        pass_texts = ", ".join(
            evaluation.format_pass(sample_count, pass_rate)
            for sample_count, pass_rate in newest_rates.items()
            if sample_count != "step"
        )
        yield f"held-out  {entry_name} at {newest_rates['step']}: {pass_texts}"
    dropped_states = (GroupState.EXPIRED, GroupState.FAILED)  # shown by their reasons
    group_texts = [
        f"{group_count} {entry_name}"
        for entry_name, group_count in facts["groups"].items()
        if entry_name not in dropped_states
    ]
    group_texts += [f"{group_count} dropped ({reason_text})" for reason_text, group_count in facts["dropped"].items()]
    yield f"groups    {', '.join(group_texts) or 'none'}"
    if "present" in facts["size"]:
        yield f"size      {scaling.line(facts['size'])}"
    if facts["split"]:
        yield f"split     {facts['split']}"
    if facts["waits"]:
        yield f"waits     {facts['waits']}"
    for entry_name, reason_text in facts["size"].get("trouble", {}).items():
        yield f"trouble   {entry_name}: {reason_text}"
    if failure_facts := facts["failed"]:
        failure_text = (
            f"{failure_facts['episodes']} of {failure_facts['ended']} episodes, the last: {failure_facts['last']}"
        )
        yield f"failed    {failure_text}; agentrl tasks {run_path} --failed"
    for warning_line in facts["unscored"]:
        yield f"unscored  {warning_line}; agentrl rewards {run_path}"
    for warning_line in notice_counts.lines(facts["notices"])[:_MOST_NOTICES]:
        yield f"not used  {printable(warning_line)}"
    for last_death in facts["restarted"][-1:]:
        yield f"restarted {len(facts['restarted'])} times a process that died, the last: {last_death['why']}"
    for task_reason in facts["quarantined"][-3:]:
        yield f"a task    not played again: {task_reason}"
    for alarm_text in facts["alarms"]:
        yield f"alarm     {alarm_text}"
    yield f"next      {_next(facts)}"


def scale(run: RunDir, *, engines: int | None, workers: int | None) -> str:
    """Ask for another number of engines or workers. Returns what to tell. Raises as `scaling.ask`."""
    new_size = scaling.ask(run, engines=engines, workers=workers)
    if holder(run).kind == "nobody":
        return f"{run.path} is not under way; it will have {new_size}: {resume_command(run)}"
    return f"{run.path} shall have {new_size}; see them come with agentrl status {run.path}"


def stop(run: RunDir, deadline_s: float) -> str:
    """End the run in order, as Ctrl-C does: by a signal, or through its store if it runs on another machine. Returns
    what to tell. Raises UsageError if it has not ended after `deadline_s`."""
    run_holder = holder(run)
    if run_holder.kind == "nobody":
        return f"{run.path} is not under way; go on with {resume_command(run)}"
    if run_holder.pid is None or _takes_no_signals(run):
        with RunStore.open(run.store_path) as run_store:  # its supervisor, on whatever machine, looks there
            STOP_REQUESTED.set(run_store, run.lock_path.read_text())
        end_hint = (
            "type this on the machine on which it was started"
            if run_holder.pid is None
            else f"end process {run_holder.pid}"
        )
        return _ended(run, deadline_s, f"if it hangs, {end_hint}")
    try:
        # The end first, then the go: the other way round the run would go on for a moment with whatever it was stopped
        # for.
        os.kill(run_holder.pid, signal.SIGTERM)
        os.kill(run_holder.pid, signal.SIGCONT)  # one that a signal has stopped would never take the other
    except PermissionError:
        raise UsageError(f"process {run_holder.pid} of {run.path} is another user's: ask them to stop it") from None
    except ProcessLookupError:
        pass
    return _ended(run, deadline_s, f"wait, or end it with kill -9 {run_holder.pid}")


def _stopped_early(run: RunDir) -> bool:
    with suppress(StoreError), RunStore.read(run.store_path, away_s=0) as run_store:
        return STOPPED_EARLY.of(run_store.meta) is not None
    return False


def _takes_no_signals(run: RunDir) -> bool:
    with suppress(StoreError), RunStore.read(run.store_path, away_s=0) as run_store:
        return TAKES_NO_SIGNALS.of(run_store.meta) == run.lock_path.read_text()
    return False


def _ended(run: RunDir, deadline_s: float, hint: str) -> str:
    deadline = time.monotonic() + deadline_s
    while holder(run).kind != "nobody":
        if time.monotonic() > deadline:
            late_text = f"{run.path} has not ended within {deadline_s:g} s: look at agentrl logs {run.path}"
            raise UsageError(f"{late_text}; {hint}; it can be resumed in any case")
        time.sleep(_POLL_S)
    return f"{run.path} is stopped; go on with {resume_command(run)}"


def resume_command(run: RunDir) -> str:
    """Return the command that resumes a run which nobody holds; a run that has done all its steps gets more of them."""
    if run.is_recording:
        return f"agentrl record --out {run.path} and the same options"
    is_done = run.summary.exists() and not _stopped_early(run)
    more_steps = f" --set train.steps={2 * run.config().train.steps}" if is_done else ""
    return f"agentrl train --resume {run.path}{more_steps}"


_STATES = {
    "here": "under way",
    "frozen": "stopped by a signal",
    "elsewhere": "under way on another machine, or being cleaned up",
    "nobody": "not under way",
}


def _next(facts: dict[str, Any]) -> str:
    run_path, run_state = facts["run"], facts["state"]
    if run_state == _STATES["frozen"]:
        return f"kill -CONT {facts['pid']}"
    if facts["late_s"] is not None:
        return f"no step for {facts['late_s']:.0f} s: agentrl logs {run_path} learner; agentrl logs {run_path} worker-0"
    if run_state == "over" and facts["stopped_early"]:
        return f"agentrl train --resume {run_path} trains it on to step {facts['steps']}"
    if run_state == "over":
        return f"agentrl train --resume {run_path} --set train.steps={2 * facts['steps']} trains it for longer"
    if run_state == _STATES["nobody"]:
        return resume_command(RunDir(Path(run_path)))
    if facts["paused_s"] is not None:
        return f"agentrl resume {run_path}; agentrl stop {run_path}"
    return f"agentrl logs {run_path} --follow; agentrl stop {run_path}"


def _span(point: dict[str, Any]) -> str:
    first, last = point["first"], point["last"]
    return f"{first}" if first == last else f"{first} to {last}"


def _curve(rows: Sequence[Metric]) -> list[tuple[int, float, int]]:
    """Step, success and groups of the steps that measured success."""
    measured = [row for row in rows if isinstance(row.values.get("success_mean"), int | float)]
    return [(row.step, float(row.values["success_mean"]), int(row.values.get("group_count") or 0)) for row in measured]


def _numbers(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [float(step_row[key]) for step_row in rows if step_row.get(key) is not None]
