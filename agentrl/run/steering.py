"""How people steer a run that is under way: all through its store, where its processes look once a second.

    agentrl pause, resume ─► PAUSED ─► supervisor (deadlines), workers (turns), learner (steps)
    agentrl set ─► see `live_settings`
    agentrl requeue ─► rows of groups and episodes (see `agentrl.store.episodes.requeue`) ─► workers

It works from any machine that reaches the store, and a request outlives every process. Owns which requests a run takes,
and what their user reads; never a process.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from agentrl.errors import UsageError
from agentrl.rollout.admitter import bounds_now, bounds_of
from agentrl.run import live_settings, resume_overrides
from agentrl.run.reporting.status import holder, resume_command
from agentrl.run.run_folder import RunDir
from agentrl.store import Requeued, RunStore
from agentrl.store.run_values import MAX_LAG, PAUSED, TRAIN_ENDED_S


def pause(run: RunDir, *, now: bool) -> str:
    """Have the run stand still: no episode, turn or step begins; with `now` turns under way stop, too, and keep their
    tokens. Returns what to tell. Raises UsageError for a run that is not under way."""
    if not under_way(run):
        raise UsageError(f"{run.path} is not under way: there is nothing to pause")
    with RunStore.open(run.store_path) as run_store:
        earlier_pause = PAUSED.of(run_store.meta)
        # A second `agentrl pause` without `--now` does not weaken the first: its turns have stopped already. The time
        # since when stays, too.
        at_once = now or bool(earlier_pause.get("now"))
        PAUSED.set(run_store, {"since_s": earlier_pause.get("since_s", time.time()), "now": at_once})
    turns_text = "turns under way stop, and keep their tokens" if at_once else "turns and a step under way end first"
    return f"{run.path} is paused: {turns_text}; agentrl resume {run.path} lets it go on"


def resume(run: RunDir) -> str:
    """Let a paused run go on. Returns what to tell. Raises UsageError for a run that is not under way, with what to
    type: its pause ends here all the same."""
    is_live = under_way(run)
    with RunStore.open(run.store_path) as run_store:
        pause_state = PAUSED.of(run_store.meta)
        if pause_state:
            PAUSED.set(run_store, {})
    if not is_live:
        lifted_text = "; its pause is over" if pause_state else ""
        raise UsageError(f"{run.path} is not under way{lifted_text}: {resume_command(run)}")
    if not pause_state:
        return f"{run.path} is under way, and was not paused"
    return f"{run.path} goes on; it was paused for {max(0.0, time.time() - pause_state['since_s']):.0f} s"


def change(run: RunDir, overrides: Sequence[str]) -> str:
    """Give a run other settings (`section.key=value`): one under way from its next step on, another from the step with
    which it goes on. Returns what to tell. Raises as `live_settings.ask` and `resume_overrides.change`."""
    if not overrides:
        raise UsageError(f"say what: agentrl set {run.path} train.lr=1e-6")
    if not under_way(run):
        resume_overrides.change(run, list(overrides))
        return f"{run.path} is not under way: it has these settings when it goes on, {resume_command(run)}"
    return change_under_way(run, overrides)


def change_under_way(run: RunDir, overrides: Sequence[str]) -> str:
    """Give a run under way other settings (`section.key=value`) from its next step on, and no other run. Returns what
    to tell. Raises UsageError for a run that is not under way; else as `live_settings.ask`."""
    if not under_way(run):
        raise UsageError(f"{run.path} is not under way: change it by agentrl set {run.path} KEY=VALUE")
    with RunStore.open(run.store_path) as run_store:
        differences = live_settings.ask(run, run_store, overrides)
    if not differences:
        return f"{run.path} has these settings already"
    changes_text = ", ".join(
        f"{setting_key} = {new_value!r} (was {old_value!r})"
        for setting_key, (old_value, new_value) in differences.items()
    )
    return f"{run.path} has from its next step on: {changes_text}"


def requeue(run: RunDir, group_ids: Collection[int] | None = None, *, dry_run: bool = False) -> Requeued:
    """Play again what failed because of infrastructure, and what the run no longer retries, of these groups or of all
    (None). A run that is not under way plays it when it goes on. With `dry_run` nothing changes. Raises UsageError once
    its training is over, and for a group that there is not."""
    run_config = run.config()
    with RunStore.read(run.store_path) if dry_run else RunStore.open(run.store_path) as run_store:
        if TRAIN_ENDED_S.of(run_store.meta) is not None:
            more_steps = f"agentrl train --resume {run.path} --set train.steps={2 * run_config.train.steps}"
            raise UsageError(
                f"{run.path} has trained its last step: nothing is played any more; {more_steps} trains on"
            )
        admission_bounds = bounds_now(bounds_of(run_config), MAX_LAG.of(run_store.meta))
        return run_store.replays.requeue(group_ids, bounds=admission_bounds, dry_run=dry_run)


def requeued_lines(run: RunDir, requeued: Requeued, *, dry_run: bool = False) -> list[str]:
    """Describe the result of `requeue` in lines for people."""
    counted_items = [
        (len(requeued.members), "failed episode(s) of open groups"),
        (len(requeued.late), "failed episode(s) of closed groups, as late members"),
        (len(requeued.groups), "lost group(s), whose tasks begin anew"),
    ]
    verb_text = "would play again" if dry_run else "plays again"
    counts_text = (
        ", ".join(f"{item_count} {item_kind}" for item_count, item_kind in counted_items if item_count) or "nothing"
    )
    text_lines = [f"{run.path} {verb_text}: {counts_text}"]
    text_lines += [f"left      {item_count} {reason}" for reason, item_count in sorted(requeued.left.items())]
    if (requeued.members or requeued.late or requeued.groups) and not dry_run and not under_way(run):
        text_lines.append(f"next      it is not under way: {resume_command(run)}")
    return text_lines


def under_way(run: RunDir) -> bool:
    """Whether a supervisor, here or on another machine, holds the run."""
    return holder(run).kind != "nobody"
