"""Held-out evaluation: its tasks, its label in the store, and its results.

An evaluation is a group of `eval.samples` episodes for each task, sampled as in training, claimed before any training
episode. It never enters the loss. Labels are `eval:NAME:before`, `eval:NAME:during@STEP` and `eval:NAME:after`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from agentrl.algos.pass_at_k import pass_all, pass_at
from agentrl.config import RunConfig
from agentrl.config.sections import HeldOut
from agentrl.records import GroupState, Task
from agentrl.store import RunStore

_ALL = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Means over the `n` episodes that the policy itself ended, None if there is none; `failed` counts the others,
    which infrastructure ended, and `failed_tasks` names them (see `failed_tasks.as_rows`). `tokens` is None if nobody
    counted them. `pass_at` has pass@k by k, for k = 1, 2, 4, … up to the episodes of a task: its `value`, and `low` and
    `high`, the ends of its interval (see `agentrl.algos.pass_at_k`), over the tasks with k scored episodes. `pass_all`
    has pass^k in the same form, for k = 2, 4, …"""

    name: str
    success: float | None
    outcome: float | None
    turns: float | None
    tokens: float | None
    n: int
    failed: int
    failed_tasks: Sequence[dict[str, Any]] = ()
    pass_at: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])
    pass_all: Mapping[str, Mapping[str, float]] = field(default_factory=dict[str, Mapping[str, float]])

    def figures(self) -> dict[str, Any]:
        """Its numbers by their names."""
        return {figure_name: getattr(self, figure_name) for figure_name in FIGURES}


FIGURES = ("success", "outcome", "turns", "tokens", "n", "failed", "pass_at", "pass_all")
"""The numbers of a result."""


def format_pass(k: int | str, estimate: Mapping[str, float], *, sign: str = "@") -> str:
    """pass@k for people; pass^k with the sign `^`."""
    return f"pass{sign}{k} {estimate['value']:.2f} [{estimate['low']:.2f}, {estimate['high']:.2f}]"


def label(name: str, when: str) -> str:
    """The `purpose` of one evaluation's groups in the store."""
    return f"eval:{name}:{when}"


class LabelRead(NamedTuple):
    """Which set was measured, when (`before`, `during`, `after`), and after which step."""

    name: str
    when: str
    step: int


def read_label(purpose: str, *, now: int) -> LabelRead | None:
    """The reverse of `label`; None for groups that are no evaluation's. `now` is the run's step, for a label that has
    no step of its own."""
    label_kind, _, label_rest = purpose.partition(":")
    set_name, _, when_and_step = label_rest.rpartition(":")
    when, _, step_text = when_and_step.partition("@")
    if label_kind != "eval":
        return None
    return LabelRead(set_name, when, int(step_text) if step_text.isdigit() else 0 if when == "before" else now)


def tasks_of(config: RunConfig, held_out: HeldOut, n: int) -> list[Task]:
    """The first `n` tasks of a held-out set; the training environment's arguments are defaults for the set's own."""
    is_same_env = held_out.id is None or held_out.id == config.env.id
    return [
        Task(
            index=index,
            env=held_out.id or config.env.id,
            seed=held_out.first_seed + index,
            kwargs={**(config.env.kwargs if is_same_env else {}), **held_out.kwargs},
            options={**(config.env.options if is_same_env else {}), **held_out.options},
        )
        for index in range(n)
    ]


def schedule(
    store: RunStore,
    config: RunConfig,
    held_out: HeldOut,
    when: str,
    n: int,
    *,
    again: bool = False,
    step: int | None = None,
) -> str:
    """Put an evaluation into the store unless it is there already (after a restart); `again`, also if all its episodes
    failed. `step` is that of the weights (None: those that sample now). Returns its label."""
    purpose = label(held_out.name, when)
    earlier_result = result(store, held_out.name, purpose) if again and finished(store, purpose) else None
    # The label in the store is the memory of what was scheduled: a run that is killed between scheduling and playing
    # goes on with the same groups instead of adding them a second time.
    if not store.groups.counts(purpose) or (earlier_result is not None and not earlier_result.n):
        store.groups.add_groups(tasks_of(config, held_out, n), size=config.eval.samples, purpose=purpose, step=step)
    return purpose


def finished(store: RunStore, purpose: str) -> bool:
    """Whether all its episodes were played."""
    state_counts = store.groups.counts(purpose)
    return not any(state_counts.get(group_state, 0) for group_state in (GroupState.WAITING, GroupState.RUNNING))


def result(store: RunStore, name: str, purpose: str) -> EvalResult | None:
    """The measured means; None if no episode has ended."""
    ended_rows = [
        episode_row for episode_row in store.reads.episodes(purpose, limit=_ALL) if episode_row.stop_reason is not None
    ]
    # Episodes that infrastructure ended are left out of the mean and counted beside it (law 3). Counted as failures of
    # the policy, a broken sandbox would look like a worse model.
    scored_rows = [
        episode_row
        for episode_row in ended_rows
        if episode_row.stop_reason is not None and episode_row.stop_reason.by_policy
    ]
    if not ended_rows:
        return None
    successes_by_group: defaultdict[int, list[bool]] = defaultdict(list)
    for episode_row in scored_rows:
        successes_by_group[episode_row.group_id].append(bool(episode_row.success))
    episode_counts = [(len(successes), sum(successes)) for successes in successes_by_group.values()]
    return EvalResult(
        name=name,
        success=fmean(float(bool(episode_row.success)) for episode_row in scored_rows) if scored_rows else None,
        outcome=fmean(episode_row.outcome or 0.0 for episode_row in scored_rows) if scored_rows else None,
        turns=fmean(episode_row.turns for episode_row in scored_rows) if scored_rows else None,
        tokens=fmean(episode_row.tokens for episode_row in scored_rows) if scored_rows else None,
        n=len(scored_rows),
        failed=len(ended_rows) - len(scored_rows),
        pass_at=pass_at(episode_counts),
        pass_all=pass_all(episode_counts),
    )


def unmeasured(store: RunStore, config: RunConfig, when: str) -> str:
    """One line on the held-out sets without a single measured episode under `when`; "" if each has one."""
    set_lines: list[str] = []
    for held_out in config.eval.sets:
        purpose = label(held_out.name, when)
        set_result = result(store, held_out.name, purpose)
        if set_result is not None and not set_result.n:
            causes = Counter[str]()
            for failed_task in store.metrics.failed_tasks(purpose):
                causes[failed_task.detail or failed_task.reason.value] += failed_task.times
            (cause, cause_count), *rarer_causes = causes.most_common() or [("their deadline passed", set_result.failed)]
            counts_text = f" ({cause_count} of them; {len(rarer_causes)} other causes)" if rarer_causes else ""
            set_lines.append(
                f"all {set_result.failed} episodes of the held-out set {held_out.name!r} failed: {cause}{counts_text}"
            )
    return "; ".join(set_lines)
