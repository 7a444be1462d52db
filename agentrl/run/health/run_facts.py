"""Facts about a run for its checks: plain data on its last steps and episodes, read from its store, which is not
changed.

The texts of at most `_TEXTS` of the last episodes are read, spread over them, of as many of the first, and of some
members of groups that did not end alike: a look costs little more in a long run than in a short one.
"""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

from agentrl.config import RunConfig
from agentrl.env.chat_messages import text_of
from agentrl.env.tools.tools import function_schema
from agentrl.errors import StoreError
from agentrl.host.disk_space import no_space_on
from agentrl.records import GroupState, StopReason, Trajectory
from agentrl.run.evaluation import held_out
from agentrl.run.reporting.reward_figures import failures as score_failures
from agentrl.run.reporting.status import STEPS_COME, holder
from agentrl.run.run_folder import RunDir
from agentrl.store import EpisodeFilter, EpisodeRow, RunStore
from agentrl.store.metrics import Metric
from agentrl.store.run_values import PHASE
from agentrl.task_ids import row_id, task_id

RECENT = 3
"""Steps that a check judges: one is chance, and what lasts for three steps does not pass by itself."""

_STEPS = 512  # whose metrics are read, about
_EPISODES = 256  # of the last steps, and as many of the first ones
_OF_TASKS = 2048  # of the last steps and before, for what became of each task
_TEXTS = 32  # episodes whose turns are read
_MIXED, _OF_A_GROUP = 8, 4  # groups that are read beside them, and members of each
_GONE = (GroupState.EXPIRED, GroupState.FAILED)
_TURNS = 4000  # the newest: whose episodes say when somebody played
_LEAST = 16  # episodes, where fewer ended in the last steps: then some of those before


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnFacts:
    """A turn of the policy that learns. `behind`: the optimizer steps that its first token's weights are older than
    those that engines served when it began, None if its weights are not known any more. `parse_failure` is "" if its
    calls could be read, `tool_errors` how many calls of each tool failed, `answer` the last message of its environment,
    `scores` the values of reward sources."""

    text: str
    tokens: int
    cut: bool
    behind: int | None
    parse_failure: str
    tool_errors: Mapping[str, int]
    answer: str
    scores: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeFacts:
    """An ended training episode; it `began_s` with its first claim, in seconds since the epoch. `lost`: why it left the
    buffer untrained; it may do neither yet. `turns` is empty if nobody read them; only then are `tools`, the names of
    those that it was offered, and `graded_s`, the seconds from its last action to its end, known."""

    id: int
    group: int
    stop_reason: StopReason
    outcome: float | None
    success: bool | None
    detail: str
    tokens: int
    began_s: float
    ended_s: float
    trained: bool = False
    lost: str = ""
    turns: Sequence[TurnFacts] = ()
    tools: Sequence[str] = ()
    graded_s: float = 0.0

    @property
    def text(self) -> str:
        """All that the policy wrote."""
        return "\n".join(policy_turn.text for policy_turn in self.turns)


@dataclass(slots=True)
class TaskFacts:
    """A task over the newest episodes, also those of earlier steps: its `groups`, and the outcomes of their members
    that may be trained."""

    groups: set[int] = field(default_factory=set[int])
    outcomes: list[float] = field(default_factory=list[float])


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalFacts:
    """An evaluation of a held-out set after optimizer step `step`: `n` episodes count, `failed` ones do not."""

    name: str
    when: str
    step: int
    success: float | None
    n: int
    failed: int
    finished: bool


@dataclass(slots=True)
class HostFacts:
    """Episodes that ended on a host in the last steps, and those of them that infrastructure failed."""

    ended: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All that a check may ask. `path` is the run's folder as a shell takes it. `steps` are the metrics of the
    optimizer steps that count, by step, `times` when each was done, in seconds since the epoch. `episodes` ended since
    the last `RECENT` steps began, `first` were the run's first, both by their end; `settled` ended in the same time, or
    in so many steps before as an episode may be old when it is trained. `playing`: from when to when each of the newest
    episodes was under way, until now if it is. `mixed` are some groups whose members got different outcomes, with a few
    read members of each; `tasks` are all tasks of the newest episodes by their id. `live`: somebody holds the run;
    `training`: and steps are to come."""

    path: str
    config: RunConfig
    now_s: float
    live: bool = False
    training: bool = False
    steps: Sequence[Mapping[str, Any]] = ()
    times: Sequence[float] = ()
    returns: int = 0  # to a checkpoint, in the last steps
    episodes: Sequence[EpisodeFacts] = ()
    first: Sequence[EpisodeFacts] = ()
    settled: Sequence[EpisodeFacts] = ()
    playing: Sequence[tuple[float, float]] = ()
    mixed: Sequence[Sequence[EpisodeFacts]] = ()
    tasks: Mapping[str, TaskFacts] = field(default_factory=dict[str, TaskFacts])
    evaluations: Sequence[EvalFacts] = ()
    hosts: Mapping[str, HostFacts] = field(default_factory=dict[str, HostFacts])
    quarantined: Sequence[str] = ()
    unscored: Sequence[str] = ()
    disk: str = ""
    load: float | None = None  # runnable processes for each core of this machine, if the run is live here

    @property
    def step(self) -> int:
        """The last step; 0 before the first."""
        return int(self.steps[-1]["step"]) if self.steps else 0

    @property
    def recent(self) -> Sequence[Mapping[str, Any]]:
        """The last steps; none while there are fewer than `RECENT`."""
        return self.steps[-RECENT:] if len(self.steps) >= RECENT else ()

    @property
    def before(self) -> Sequence[Mapping[str, Any]]:
        """The steps before these."""
        return self.steps[:-RECENT]

    def lasts(self, holds: Callable[[Mapping[str, Any]], bool]) -> bool:
        """Whether something held in each of the last steps."""
        return bool(self.recent) and all(holds(step_metrics) for step_metrics in self.recent)

    def values(self, name: str, rows: Sequence[Mapping[str, Any]] | None = None) -> list[float]:
        """Return a metric's values in the last steps, or in `rows`; a dot in `name` goes into a table. Steps without a
        number are left out."""
        step_values = [number(step_metrics, name) for step_metrics in (self.recent if rows is None else rows)]
        return [step_value for step_value in step_values if step_value is not None]

    @property
    def turns(self) -> list[TurnFacts]:
        """The turns of the last episodes that were read."""
        return [read_turn for episode in self.episodes for read_turn in episode.turns]

    @property
    def span_s(self) -> float:
        """Seconds that the last steps took; nan if nobody knows."""
        return self.times[-1] - self.times[-1 - RECENT] if len(self.times) > RECENT else math.nan

    def played(self, span: tuple[float, float]) -> float:
        """Seconds of a span of time that lie in the last steps."""
        span_begin, span_end = span
        return max(0.0, min(span_end, self.times[-1]) - max(span_begin, self.times[-1 - RECENT]))

    @property
    def pace_s(self) -> float:
        """Seconds that a step takes, as a median; nan before there are two."""
        step_gaps = [next_time - step_time for step_time, next_time in pairwise(self.times[-20:])]
        return median(step_gaps) if step_gaps else math.nan


def number(row: Mapping[str, Any], name: str) -> float | None:
    """A value of a step by its name (`ratios.token.mean`); None if it measured none."""
    nested_value: Any = row
    for name_part in name.split("."):
        nested_value = nested_value.get(name_part) if isinstance(nested_value, Mapping) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    return float(nested_value) if isinstance(nested_value, int | float) else None


def facts_of(run: RunDir) -> RunFacts:
    """The facts of a run in a folder, whoever holds it. Raises as `RunDir.config` and `RunStore.read` do."""
    with RunStore.read(run.store_path) as run_store:
        return read_facts(run_store, run.config(), run.path, live=holder(run).kind != "nobody")


def read_facts(
    store: RunStore,
    config: RunConfig,
    path: Path,
    *,
    live: bool,
    now: Callable[[], float] = time.time,
    rows: Sequence[Metric] | None = None,
) -> RunFacts:
    """The facts of a run as its store has them now. `now` gives seconds since the epoch. `rows`: those of the steps, by
    somebody who has read them."""
    by_others = rows is not None
    rows = store.metrics.sample("step", _STEPS) if rows is None else rows
    evaluations = _evaluations(store, config, rows[-1].step if rows else 0)
    if not by_others and len(rows) >= _STEPS // 2:  # some were left out
        rows = store.metrics.sample("step", _STEPS, near=_compared(evaluations), reach=RECENT)
    step_times = [step_row.time_s for step_row in rows]
    window_start = _time(step_times, RECENT)
    attempts = [step_row.attempt for step_row in rows[-1 - RECENT :]]
    newest_rows, facts_reader = _newest(store), _reader(store)
    recent_episodes, first_episodes, settled_episodes = _episodes(
        store, newest_rows, facts_reader, window_start, _time(step_times, RECENT + config.buffer.max_lag)
    )
    current_time_s = now()
    return RunFacts(
        path=quote(str(path)),
        config=config,
        now_s=current_time_s,
        live=live,
        training=live and PHASE.of(store.meta) in STEPS_COME,
        # Only where the run is on this machine: the load of the one on which somebody types `agentrl health` says
        # nothing about another.
        load=os.getloadavg()[0] / (os.cpu_count() or 1) if live and holder(RunDir(path)).pid is not None else None,
        steps=[{**step_row.values, "step": step_row.step} for step_row in rows],
        times=step_times,
        returns=store.lineage.attempt - attempts[0] if attempts else 0,
        episodes=recent_episodes,
        first=first_episodes,
        settled=settled_episodes,
        playing=[
            (began_s, current_time_s if ended_s is None else ended_s)
            for began_s, ended_s in store.metrics.activity(_TURNS).episodes
        ],
        mixed=_mixed(
            [episode_row for episode_row in newest_rows if (episode_row.ended_s or 0.0) > window_start], facts_reader
        ),
        tasks=_tasks(newest_rows),
        evaluations=evaluations,
        hosts=_hosts(store, window_start, after=rows[-1].step - RECENT - 2 if rows else -1),
        quarantined=[
            quarantined_task.reason
            for quarantined_task in store.deaths.quarantined()
            if quarantined_task.time_s > window_start
        ],
        unscored=[str(score_failure) for score_failure in score_failures(store) if score_failure.matters],
        disk=no_space_on(path),
    )


def _time(times: Sequence[float], ago: int) -> float:
    """Return the time of the step that came `ago` steps before the last; -inf if the run has fewer."""
    return times[-1 - ago] if len(times) > ago else -math.inf


Reader = Callable[[EpisodeRow, bool], EpisodeFacts]
"""Makes the facts of an episode, with its turns or without."""


def _newest(store: RunStore) -> list[EpisodeRow]:
    """The newest ended training episodes, the last one first."""
    newest_rows = store.search.find_episodes(EpisodeFilter(), by="ended", descending=True, limit=_OF_TASKS)
    return [episode_row for episode_row in newest_rows if episode_row.ended_s]


def _reader(store: RunStore) -> Reader:
    served_versions = store.versions.served_versions()
    served_times = [version.confirmed_s for version in served_versions]
    served_steps = [version.step for version in served_versions]

    def behind(trajectory: Trajectory, at: int) -> int | None:
        judged_turn = trajectory.turns[at]
        # How old a turn's weights were is judged by what was served when it began: a turn of an hour is sampled by old
        # weights at its end, and that is no fault of its engine.
        n_served = bisect_right(served_times, judged_turn.started_s)
        if not judged_turn.spans or not n_served:
            return None
        try:
            return served_steps[n_served - 1] - store.versions.step_of(judged_turn.spans[0].version)
        except StoreError:  # an engine's that somebody else started
            return None

    return lambda row, whole: _facts(row, store.reads.trajectory(row.id) if whole else None, behind)


def _episodes(
    store: RunStore, rows: Sequence[EpisodeRow], read: Reader, since: float, settled_since: float
) -> tuple[list[EpisodeFacts], list[EpisodeFacts], list[EpisodeFacts]]:
    def with_turns(rows: Sequence[EpisodeRow]) -> list[EpisodeFacts]:
        # Spread over the episodes instead of the newest: those of the last minute are the short ones, and would speak
        # for all.
        chosen_ids = (
            {rows[len(rows) * sample_index // _TEXTS].id for sample_index in range(_TEXTS)} if rows else set[int]()
        )
        return [read(episode_row, episode_row.id in chosen_ids) for episode_row in rows]

    newest_rows = rows[:_EPISODES]
    recent_rows = [episode_row for episode_row in newest_rows if (episode_row.ended_s or 0.0) > since]
    recent_rows = sorted(
        recent_rows if len(recent_rows) >= _LEAST else newest_rows[:_LEAST], key=lambda row: row.ended_s or 0.0
    )
    recent_ids = {episode_row.id for episode_row in recent_rows}
    first_rows = [
        episode_row
        for episode_row in store.search.find_episodes(EpisodeFilter(), by="ended", limit=_TEXTS)
        if episode_row.ended_s
    ]
    settled_episodes = [
        read(episode_row, False) for episode_row in newest_rows if (episode_row.ended_s or 0.0) > settled_since
    ]
    return (
        with_turns(recent_rows),
        with_turns([episode_row for episode_row in first_rows if episode_row.id not in recent_ids]),
        settled_episodes,
    )


def _mixed(rows: Sequence[EpisodeRow], read: Reader) -> list[list[EpisodeFacts]]:
    """Some of the groups whose members got different outcomes, with a few members of each: those that look alike first,
    as equal actions can only be among them."""
    rows_by_group: dict[int, list[EpisodeRow]] = {}
    for episode_row in rows:
        if (
            episode_row.outcome is not None
            and episode_row.stop_reason is not None
            and episode_row.stop_reason.by_policy
        ):
            rows_by_group.setdefault(episode_row.group_id, []).append(episode_row)
    mixed_groups = [
        members for members in rows_by_group.values() if len({episode_row.outcome for episode_row in members}) > 1
    ]
    chosen_groups: list[list[EpisodeFacts]] = []
    for members in mixed_groups[:_MIXED]:
        outcomes_by_size: dict[tuple[int, int], set[float | None]] = {}
        for episode_row in members:
            outcomes_by_size.setdefault((episode_row.turns, episode_row.tokens), set()).add(episode_row.outcome)
        alike_rows = [
            episode_row for episode_row in members if len(outcomes_by_size[episode_row.turns, episode_row.tokens]) > 1
        ]
        best_outcome = max(episode_row.outcome or 0.0 for episode_row in members)
        won_rows, lost_rows = (
            [episode_row for episode_row in members if (episode_row.outcome == best_outcome) is is_winner]
            for is_winner in (True, False)
        )
        paired_rows = [episode_row for row_pair in zip(won_rows, lost_rows, strict=False) for episode_row in row_pair]
        chosen_groups.append(
            [
                read(episode_row, True)
                for episode_row in {episode_row.id: episode_row for episode_row in [*alike_rows, *paired_rows]}.values()
            ][:_OF_A_GROUP]
        )
    return chosen_groups


def _tasks(rows: Sequence[EpisodeRow]) -> dict[str, TaskFacts]:
    facts_by_task: dict[str, TaskFacts] = {}
    for episode_row in rows:
        if (
            episode_row.outcome is not None
            and episode_row.stop_reason is not None
            and episode_row.stop_reason.by_policy
        ):
            task_facts = facts_by_task.setdefault(
                row_id(episode_row.task) if episode_row.task.options else task_id(episode_row.task), TaskFacts()
            )
            task_facts.groups.add(episode_row.group_id)
            task_facts.outcomes.append(episode_row.outcome)
    return facts_by_task


def _facts(
    row: EpisodeRow, trajectory: Trajectory | None, behind: Callable[[Trajectory, int], int | None]
) -> EpisodeFacts:
    turn_facts: list[TurnFacts] = []
    for turn_index, policy_turn in enumerate(trajectory.turns if trajectory else ()):
        if policy_turn.learns:
            step_info: Mapping[str, Any] = policy_turn.step.info if policy_turn.step else {}
            tool_errors = step_info.get("tool_errors")
            turn_facts.append(
                TurnFacts(
                    text=policy_turn.text,
                    tokens=len(policy_turn.token_ids),
                    cut=policy_turn.finish == "length",
                    behind=behind(trajectory, turn_index) if trajectory else None,
                    parse_failure=str(step_info.get("parse_failure") or ""),
                    tool_errors={str(tool_name): int(error_count) for tool_name, error_count in tool_errors.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
                    if isinstance(tool_errors, dict)
                    else {},
                    answer=text_of(policy_turn.step.observation[-1].get("content"))
                    if policy_turn.step and policy_turn.step.observation
                    else "",
                    scores=policy_turn.scores,
                )
            )
    ended_s = row.ended_s or 0.0
    return EpisodeFacts(
        id=row.id,
        group=row.group_id,
        stop_reason=row.stop_reason or StopReason.EXPIRED,
        outcome=row.outcome,
        success=row.success,
        detail=row.detail,
        tokens=row.tokens,
        began_s=ended_s if row.started_s is None else row.started_s,
        ended_s=ended_s,
        trained=row.taken_step is not None and row.dropped is None,
        lost=row.dropped or (row.group_reason or "" if row.group_state in _GONE and not row.late else ""),
        turns=turn_facts,
        tools=[str(function_schema(tool_schema).get("name")) for tool_schema in trajectory.tools.schemas]
        if trajectory
        else (),
        graded_s=max(0.0, ended_s - trajectory.turns[-1].ended_s) if trajectory and trajectory.turns else 0.0,
    )


def _evaluations(store: RunStore, config: RunConfig, step: int) -> list[EvalFacts]:
    evaluations: list[EvalFacts] = []
    for purpose in store.groups.purposes():
        if (eval_label := held_out.read_label(purpose, now=step)) is None:
            continue
        eval_result = held_out.result(store, eval_label.name, purpose)
        evaluations.append(
            EvalFacts(
                name=eval_label.name,
                when=eval_label.when,
                step=eval_label.step,
                success=eval_result.success if eval_result else None,
                n=eval_result.n if eval_result else 0,
                failed=eval_result.failed if eval_result else 0,
                finished=held_out.finished(store, purpose),
            )
        )
    return sorted(evaluations, key=lambda point: (point.name, point.step))


def _compared(evaluations: Sequence[EvalFacts]) -> set[int]:
    """The steps of each set's last evaluation and of its best one before: rewards around them are compared."""
    compared_steps = set[int]()
    for set_name in {evaluation.name for evaluation in evaluations}:
        set_evaluations = [
            evaluation for evaluation in evaluations if evaluation.name == set_name and evaluation.success is not None
        ]
        compared_steps |= {
            evaluation.step
            for evaluation in (
                *set_evaluations[-1:],
                *sorted(set_evaluations[:-1], key=lambda point: point.success or 0.0)[-1:],
            )
        }
    return compared_steps


def _hosts(store: RunStore, since: float, *, after: int) -> dict[str, HostFacts]:
    """Count, by host, what its workers' counts grew by since then, as `agentrl.run.processes.worker_process` records
    them."""
    first_reports: dict[str, Mapping[str, Any]] = {}
    last_reports: dict[str, Mapping[str, Any]] = {}
    # Undone ones too: an episode that a host has failed was failed, whether or not its step still counts.
    for worker_report in store.metrics.values("fleet", undone=True, after=max(-1, after)):
        worker_name = worker_report.values.get("worker")
        if isinstance(worker_name, str):
            last_reports[worker_name] = worker_report.values
            # Workers report counts since their start. The last report before the window is what has to be taken off.
            if worker_report.time_s <= since:
                first_reports[worker_name] = worker_report.values
    facts_by_host: dict[str, HostFacts] = {}
    for worker_name, worker_report in last_reports.items():
        host_facts, grown_counts = facts_by_host.setdefault(str(worker_report["host"]), HostFacts()), Counter[str]()
        for count_name in ("ended", "failed"):
            grown_counts[count_name] = int(worker_report[count_name]) - int(
                first_reports.get(worker_name, {}).get(count_name, 0)
            )
        host_facts.ended += grown_counts["ended"]
        host_facts.failed += grown_counts["failed"]
    return facts_by_host
