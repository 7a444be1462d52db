"""Distributions of a simulation, measured in a finished run's store. Reads only."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from agentrl.config.sections import BufferSettings
from agentrl.errors import UsageError
from agentrl.planning.simulate.service import Measured, MeasuredSteps, Play
from agentrl.store import EpisodeTimes, Returns, RunStore

# A buffer that fills is waited for: the first steps of every run are idle, and say nothing of the hundredth.
START_UP = 4  # steps beyond max_lag that are not measured: until the buffer has filled
_GROUPS = 4096  # the newest, at most
_FEWEST = 4  # groups, and steps: fewer say nothing
_WAITS_FOR_LATE = 1  # the last step, which waits for the late members of all before it
_RETURNS = Returns()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """Measurements of a run. `idle` is its learner's idle share between start-up and end, `skipped` the share of its
    groups then that left without signal."""

    episodes: Measured
    steps: MeasuredSteps
    push_s: float
    between_s: float
    idle: float
    skipped: float = 0.0


def start_up_steps(buffer: BufferSettings) -> int:
    """How many first steps of a run are not measured."""
    return buffer.max_lag + START_UP


def measure(
    store: RunStore,
    buffer: BufferSettings,
    *,
    end: int,
    start_up: int | None = None,
    returns: Returns = _RETURNS,
    newest: int = _GROUPS,
) -> MeasuredRun:
    """Measure a run to step `end`: its steps after the first `start_up` (default: `start_up_steps`), and the `newest`
    groups. Left out are steps before which fewer groups were admitted than `buffer.max_lag` allows, since none follow:
    their learner waits for the last episodes on slots that empty. `returns` tell which groups give no signal. Raises
    UsageError if the run is too short."""
    start_up = start_up_steps(buffer) if start_up is None else start_up
    last_step = end - max(buffer.max_lag, _WAITS_FOR_LATE)
    rows = [row for row in store.metrics.values("step") if start_up < row.step <= last_step]
    group_plays = _groups(store.metrics.episode_times(newest), store.metrics.silent_groups(newest, returns))
    if len(rows) < _FEWEST or len(group_plays) < _FEWEST:
        steps_text = f"{len(rows)} steps between the first {start_up} and the last {end - last_step}"
        counts_text = f"{len(group_plays)} finished groups and {steps_text}"
        run_folder, more = store.path.parent, 2 * _FEWEST + end - last_step + (rows[-1].step if rows else start_up)
        command = f"agentrl train --resume {run_folder} --set train.steps={more}"
        raise UsageError(f"{run_folder}: {counts_text}; a simulation needs {_FEWEST} of each: go on with {command}")
    idle = [float(row.values["idle_s"] or 0.0) for row in rows]  # pyright: ignore[reportArgumentType]
    busy = [float(row.values["busy_s"] or 0.0) for row in rows]  # pyright: ignore[reportArgumentType]
    token_counts = [int(row.values["tokens_scored"] or 0) for row in rows]  # pyright: ignore[reportArgumentType]
    taken, skipped = (sum(int(row.values.get(name) or 0) for row in rows) for name in ("group_count", "groups_skipped"))  # pyright: ignore[reportArgumentType]
    gaps = [later.time_s - row.time_s for row, later in pairwise(rows) if later.step == row.step + 1]
    step_seconds = [idle_s + busy_s for idle_s, busy_s in zip(idle[1:], busy[1:], strict=True)]
    # The median: a checkpoint, an evaluation or a paused machine between two steps is rare and long, and would move a
    # mean.
    between = statistics.median(gap - step_s for gap, step_s in zip(gaps, step_seconds, strict=False)) if gaps else 0.0
    return MeasuredRun(
        episodes=Measured(group_plays),
        steps=MeasuredSteps.fit(list(zip(token_counts, busy, strict=True))),
        push_s=statistics.median(store.metrics.push_times() or [0.0]),
        between_s=max(0.0, between),
        idle=sum(idle) / (sum(idle) + sum(busy)) if any(idle) or any(busy) else 0.0,
        skipped=skipped / (taken + skipped) if skipped else 0.0,
    )


def _groups(episodes: Sequence[EpisodeTimes], silent: Collection[int]) -> list[list[Play]]:
    """Return the plays of each group; `silent` groups give no signal. Groups that started within the longest episode's
    time before the end are left out: of these only the short episodes may have ended."""
    if not episodes:
        return []
    last_start = max(episode.ended_s for episode in episodes) - max(
        episode.ended_s - episode.started_s for episode in episodes
    )
    groups: defaultdict[int, list[EpisodeTimes]] = defaultdict(list)
    for episode in episodes:
        groups[episode.group_id].append(episode)
    # Censoring: at the end of a run the episodes that have ended are the short ones of those that began. With them a
    # simulation would play a faster environment
    # (`test_groups_of_the_last_moments_are_left_out_because_only_their_short_episodes_have_ended`).
    begun_in_time = [group for group in groups.values() if min(episode.started_s for episode in group) <= last_start]
    return [
        [_play(episode, episode.group_id in silent) for episode in group] for group in begun_in_time if len(group) > 1
    ]


def _play(episode: EpisodeTimes, silent: bool) -> Play:
    """An episode with times from its start. Another worker's clock may put a turn before the start or after the end:
    the turn is cut to what lies inside."""
    duration_s = max(episode.ended_s - episode.started_s, 1e-6)

    def inside(time_s: float) -> float:
        return min(max(time_s - episode.started_s, 0.0), duration_s)

    play_turns = tuple((inside(start), inside(end), n) for start, end, n in episode.turns)
    return Play(duration_s, play_turns, sum(n for *_, n in play_turns), episode.scored and bool(play_turns), silent)
