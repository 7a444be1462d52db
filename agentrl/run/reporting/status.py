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
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any, Literal, cast

from agentrl.env.gymnasium_wrappers import printable
from agentrl.errors import StoreError, UsageError
from agentrl.host.janitor import runs_here
from agentrl.host.platform_checks import is_stopped
from agentrl.records import GroupState
from agentrl.run.cluster import autoscaler, scaling
from agentrl.run.evaluation import held_out as evaluation
from agentrl.run.reporting import notice_counts, report
from agentrl.run.reward_services import failures as score_failures
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
        with run.lock_path.open() as lock:
            with suppress(BlockingIOError):
                # The lock is the truth about whether a run lives: the kernel frees it with the process. A file with a
                # process id would name whoever has that number today. Shared, so that two who look at one time do not
                # take each other for a run.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return Holder("nobody")
            pid = runs_here(lock.read())
    except FileNotFoundError:
        return Holder("nobody")
    if pid is None:
        return Holder("elsewhere")
    return Holder("frozen" if is_stopped(pid) else "here", pid)


def status(
    run: RunDir, now: Callable[[], float] = time.time, *, rows: Sequence[Metric] | None = None
) -> dict[str, Any]:
    """Return the document that `agentrl status --json` prints. `late` is the seconds since the last step if they are
    far more than a step takes, else None. `rows`: metrics of the steps, from a caller who has read them."""
    process, config = holder(run), run.config()
    with RunStore.read(run.store_path) as store:
        rows = store.metrics.values("step") if rows is None else rows
        counts, phase, early = store.groups.counts(), PHASE.of(store.meta) or "", STOPPED_EARLY.of(store.meta)
        sets, drops = (
            {held_out.name: list(report.measured(store, held_out.name)) for held_out in config.eval.sets},
            store.metrics.drops(),
        )
        size = scaling.describe(config, store.meta, live=process.kind != "nobody")
        paused, restarted = PAUSED.of(store.meta), RESTARTED.of(store.meta)
        split, waits = autoscaler.line(store), LEARNER_WAITS.of(store.meta) or ""
        failures, unscored = (
            store.metrics.failures(),
            [str(failure) for failure in score_failures(store) if failure.matters],
        )
        noticed = notice_counts.totals(store.metrics)
        checkpoint, quarantined = (
            store.lineage.latest_checkpoint(),
            [task.reason for task in store.deaths.quarantined()],
        )
    recent = [row.values for row in rows[-_RECENT:]]
    gaps = [after.time_s - before.time_s for before, after in pairwise(rows[-_RECENT - 1 :])]
    ago, pace = (max(0.0, now() - rows[-1].time_s) if rows else None), median(gaps) if gaps else None
    done = rows[-1].step if rows else 0
    training = process.kind != "nobody" and phase in STEPS_COME and not paused
    return {
        "run": str(run.path),
        "state": "over" if process.kind == "nobody" and run.summary.exists() else _STATES[process.kind],
        "pid": process.pid,
        "phase": phase,
        "stopped_early": early,
        "paused_s": max(0.0, now() - paused["since_s"]) if paused else None,
        "step": done,
        "steps": config.train.steps,
        "last_step_ago_s": ago,
        "step_s": pace,
        # Both bounds: ten times a step of a second is no reason to look, and ten minutes are nothing for a run whose
        # steps take an hour.
        "late_s": ago if training and ago and pace is not None and ago > max(_LATE_S, _SLOW * pace) else None,
        "success": fmean(_numbers(recent, "success_mean")) if _numbers(recent, "success_mean") else None,
        "held_out": {step: result.success for results in list(sets.values())[:1] for step, result in results},
        "pass_at": {name: {"step": curve[-1][0], **curve[-1][1].pass_at} for name, curve in sets.items() if curve},
        "lag_mean": fmean(_numbers(recent, "lag_mean")) if _numbers(recent, "lag_mean") else None,
        "size": size,
        "split": split,
        "waits": waits if training else "",
        "groups": {state.value: counts[state] for state in GroupState if counts.get(state)},
        "dropped": drops,
        "failed": {"episodes": failures.failed, "ended": failures.ended, "last": failures.detail}
        if failures.failed
        else None,
        "unscored": unscored,
        "notices": noticed,
        "restarted": restarted,
        "quarantined": quarantined,
        "alarms": list(cast("list[str]", recent[-1].get("alarms") or [])) if recent else [],
        "checkpoint": None if checkpoint is None else checkpoint.step,
    }


def eta_s(rows: Sequence[Metric], steps: int) -> float | None:
    """Seconds until optimizer step `steps`, by the median time of the last ones; None before there are two."""
    # The median: one step with a checkpoint, a pause or a restart would move the mean, and the estimate with it, for
    # twenty steps.
    gaps = [after.time_s - before.time_s for before, after in pairwise(rows[-_PACE:])]
    return median(gaps) * max(0, steps - rows[-1].step) if gaps else None


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
    path, state = facts["run"], facts["state"]
    process = f" (process {facts['pid']})" if facts["pid"] else ""
    phase = f", phase {facts['phase']}" if facts["phase"] and facts["pid"] else ""
    yield f"{path}: {state}{process}{phase}"
    if facts["last_step_ago_s"] is None:
        yield f"step      0 of {facts['steps']}"
    else:
        pace = "" if facts["step_s"] is None else f"; a step takes {facts['step_s']:.2g} s"
        yield f"step      {facts['step']} of {facts['steps']}, the last {duration(facts['last_step_ago_s'])} ago{pace}"
    if facts["paused_s"] is not None:
        yield f"paused    for {duration(facts['paused_s'])}: agentrl resume {path} lets it go on"
    if facts["stopped_early"]:
        yield f"stopped   early: {facts['stopped_early']}"
    if facts["success"] is not None:
        measured = [f"{step}: {value:.2f}" for step, value in facts["held_out"].items()]
        if len(measured) > 4:
            measured[1:-2] = ["…"]
        held_out = f"; held-out at {', '.join(measured)}" if measured else ""
        yield f"success   {facts['success']:.2f} in the last steps{held_out}; lag {facts['lag_mean'] or 0:.1f} steps"
    for name, newest in facts["pass_at"].items():
        passes = ", ".join(evaluation.format_pass(k, rate) for k, rate in newest.items() if k != "step")
        yield f"held-out  {name} at {newest['step']}: {passes}"
    dropped = (GroupState.EXPIRED, GroupState.FAILED)  # shown by their reasons
    groups = [f"{count} {name}" for name, count in facts["groups"].items() if name not in dropped]
    groups += [f"{count} dropped ({why})" for why, count in facts["dropped"].items()]
    yield f"groups    {', '.join(groups) or 'none'}"
    if "present" in facts["size"]:
        yield f"size      {scaling.line(facts['size'])}"
    if facts["split"]:
        yield f"split     {facts['split']}"
    if facts["waits"]:
        yield f"waits     {facts['waits']}"
    for name, why in facts["size"].get("trouble", {}).items():
        yield f"trouble   {name}: {why}"
    if failed := facts["failed"]:
        counts = f"{failed['episodes']} of {failed['ended']} episodes, the last: {failed['last']}"
        yield f"failed    {counts}; agentrl tasks {path} --failed"
    for line in facts["unscored"]:
        yield f"unscored  {line}; agentrl rewards {path}"
    for line in notice_counts.lines(facts["notices"])[:_MOST_NOTICES]:
        yield f"not used  {printable(line)}"
    for death in facts["restarted"][-1:]:
        yield f"restarted {len(facts['restarted'])} times a process that died, the last: {death['why']}"
    for reason in facts["quarantined"][-3:]:
        yield f"a task    not played again: {reason}"
    for alarm in facts["alarms"]:
        yield f"alarm     {alarm}"
    yield f"next      {_next(facts)}"


def scale(run: RunDir, *, engines: int | None, workers: int | None) -> str:
    """Ask for another number of engines or workers. Returns what to tell. Raises as `scaling.ask`."""
    size = scaling.ask(run, engines=engines, workers=workers)
    if holder(run).kind == "nobody":
        return f"{run.path} is not under way; it will have {size}: {resume_command(run)}"
    return f"{run.path} shall have {size}; see them come with agentrl status {run.path}"


def stop(run: RunDir, deadline_s: float) -> str:
    """End the run in order, as Ctrl-C does: by a signal, or through its store if it runs on another machine. Returns
    what to tell. Raises UsageError if it has not ended after `deadline_s`."""
    process = holder(run)
    if process.kind == "nobody":
        return f"{run.path} is not under way; go on with {resume_command(run)}"
    if process.pid is None or _takes_no_signals(run):
        with RunStore.open(run.store_path) as store:  # its supervisor, on whatever machine, looks there
            STOP_REQUESTED.set(store, run.lock_path.read_text())
        hint = (
            "type this on the machine on which it was started" if process.pid is None else f"end process {process.pid}"
        )
        return _ended(run, deadline_s, f"if it hangs, {hint}")
    try:
        # The end first, then the go: the other way round the run would go on for a moment with whatever it was stopped
        # for.
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGCONT)  # one that a signal has stopped would never take the other
    except PermissionError:
        raise UsageError(f"process {process.pid} of {run.path} is another user's: ask them to stop it") from None
    except ProcessLookupError:
        pass
    return _ended(run, deadline_s, f"wait, or end it with kill -9 {process.pid}")


def _stopped_early(run: RunDir) -> bool:
    with suppress(StoreError), RunStore.read(run.store_path, away_s=0) as store:
        return STOPPED_EARLY.of(store.meta) is not None
    return False


def _takes_no_signals(run: RunDir) -> bool:
    with suppress(StoreError), RunStore.read(run.store_path, away_s=0) as store:
        return TAKES_NO_SIGNALS.of(store.meta) == run.lock_path.read_text()
    return False


def _ended(run: RunDir, deadline_s: float, hint: str) -> str:
    deadline = time.monotonic() + deadline_s
    while holder(run).kind != "nobody":
        if time.monotonic() > deadline:
            late = f"{run.path} has not ended within {deadline_s:g} s: look at agentrl logs {run.path}"
            raise UsageError(f"{late}; {hint}; it can be resumed in any case")
        time.sleep(_POLL_S)
    return f"{run.path} is stopped; go on with {resume_command(run)}"


def resume_command(run: RunDir) -> str:
    """Return the command that resumes a run which nobody holds; a run that has done all its steps gets more of them."""
    done = run.summary.exists() and not _stopped_early(run)
    more = f" --set train.steps={2 * run.config().train.steps}" if done else ""
    return f"agentrl train --resume {run.path}{more}"


_STATES = {
    "here": "under way",
    "frozen": "stopped by a signal",
    "elsewhere": "under way on another machine, or being cleaned up",
    "nobody": "not under way",
}


def _next(facts: dict[str, Any]) -> str:
    path, state = facts["run"], facts["state"]
    if state == _STATES["frozen"]:
        return f"kill -CONT {facts['pid']}"
    if facts["late_s"] is not None:
        return f"no step for {facts['late_s']:.0f} s: agentrl logs {path} learner; agentrl logs {path} worker-0"
    if state == "over" and facts["stopped_early"]:
        return f"agentrl train --resume {path} trains it on to step {facts['steps']}"
    if state == "over":
        return f"agentrl train --resume {path} --set train.steps={2 * facts['steps']} trains it for longer"
    if state == _STATES["nobody"]:
        return f"agentrl train --resume {path}"
    if facts["paused_s"] is not None:
        return f"agentrl resume {path}; agentrl stop {path}"
    return f"agentrl logs {path} --follow; agentrl stop {path}"


def _numbers(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [float(row[key]) for row in rows if row.get(key) is not None]
