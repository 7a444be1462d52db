"""Spans of time in a run: episodes with their turns, optimizer steps, syncs of weights.

Owns how the run's store is read for it, some hundred episodes at a time. Knows no format of a file and no exporter:
`agentrl.offline.chrome_trace` and `agentrl.offline.otel_export` write the spans.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final, Literal

from agentrl.records import Json
from agentrl.store import RunStore
from agentrl.store.episode_search import TurnTime
from agentrl.store.reads import EpisodeRow

SpanKind = Literal["episode", "turn", "environment", "wait", "step", "sync"]
# A run has hundreds of thousands of episodes, so a page bounds memory. It bounds the time of a read, too: as long as
# a reader of SQLite holds its snapshot, the write-ahead log of a run that goes on cannot be reset.
_PAGE: Final = 200  # episodes that are read at once


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpan:
    """Span from `began_s` to `ended_s` (Unix times). `inside` is what happened within it, in order. An `environment` is
    the time from a turn's last token to the next turn, tools included; a `wait` is the learner's for groups; a `sync`
    is that of a weight version, from its making until engines serve it."""

    kind: SpanKind
    name: str
    began_s: float
    ended_s: float
    facts: dict[str, Json] = field(default_factory=dict[str, Json])
    inside: tuple[RunSpan, ...] = ()


def learner_spans(store: RunStore) -> Iterator[RunSpan]:
    """Steps, with the waits before them, and syncs, those that no rollback undid. A step ends when its weights are
    made: its row is written later, when engines have them."""
    served_versions = store.versions.served_versions()
    # The row of a step is written once engines have its weights, which may be seconds after the step. Its end is
    # therefore taken from the version, where one was made.
    made_s_by_step = {version.step: version.minted_s for version in served_versions}
    reached_s = 0.0
    for step_row in store.metrics.values("step"):
        busy_seconds, idle_seconds = (_seconds(step_row.values.get(name)) for name in ("busy_s", "idle_s"))
        step_ended_s = max(reached_s, min(step_row.time_s, made_s_by_step.get(step_row.step, step_row.time_s)))
        # Rows have an end and durations, from different clocks. Each span is clipped to where the one before ended,
        # so that a correction of the wall clock makes a span too short instead of two that overlap.
        step_began_s = max(reached_s, step_ended_s - busy_seconds)
        if (wait_began_s := max(reached_s, step_began_s - idle_seconds)) < step_began_s:
            yield RunSpan(kind="wait", name="wait for groups", began_s=wait_began_s, ended_s=step_began_s)
        fact_names = ("loss", "reward_mean", "success_mean", "tokens_computed", "lag_mean", "group_count")
        span_facts = {
            "step": step_row.step,
            **{name: step_row.values[name] for name in fact_names if step_row.values.get(name) is not None},
        }
        yield RunSpan(
            kind="step", name=f"step {step_row.step}", began_s=step_began_s, ended_s=step_ended_s, facts=span_facts
        )
        reached_s = step_ended_s
    for version in served_versions:
        span_facts: dict[str, Json] = {"version": version.version, "step": version.step}
        name = f"weights of step {version.step}"
        yield RunSpan(kind="sync", name=name, began_s=version.minted_s, ended_s=version.confirmed_s, facts=span_facts)


def episode_spans(store: RunStore, now_s: float) -> Iterator[RunSpan]:
    """Every episode that has begun, by number, with its turns; one that goes on ends at `now_s` at the latest."""
    after_id = 0
    while episode_rows := store.reads.episodes(after=after_id, limit=_PAGE):
        turn_times = store.search.turn_times(episode_rows[0].id, episode_rows[-1].id)
        # One query for the turns of a whole page, sorted by episode: one for each episode would be as many queries as
        # episodes.
        turns_by_episode = {
            episode_id: list(of_episode)
            for episode_id, of_episode in groupby(turn_times, key=lambda turn: turn.episode_id)
        }
        for episode_row in episode_rows:
            if episode_row.started_s is not None:
                yield _episode(episode_row, episode_row.started_s, turns_by_episode.get(episode_row.id, []), now_s)
        after_id = episode_rows[-1].id


def _episode(row: EpisodeRow, started_s: float, turns: Sequence[TurnTime], now_s: float) -> RunSpan:
    # An episode that its process's death cut has no end. Its last turn is the latest moment that is known.
    last_known_s = max([started_s, *(turn_time.ended_s for turn_time in turns)])
    episode_ended_s = max(last_known_s, now_s if row.ended_s is None else row.ended_s)
    episode_facts: dict[str, Json] = {
        "episode": row.id,
        "group": row.group_id,
        "env": row.task.env,
        "seed": row.task.seed,
        "purpose": row.purpose,
        "stop_reason": None if row.stop_reason is None else row.stop_reason.value,
        "outcome": row.outcome,
        "success": row.success,
        "trained_by_step": row.taken_step if row.dropped is None else None,
    }
    return RunSpan(
        kind="episode",
        name=f"episode {row.id}",
        began_s=started_s,
        ended_s=episode_ended_s,
        facts={fact_name: fact_value for fact_name, fact_value in episode_facts.items() if fact_value is not None},
        inside=tuple(_turns(turns, started_s, episode_ended_s)),
    )


def _turns(turns: Sequence[TurnTime], began_s: float, ended_s: float) -> Iterator[RunSpan]:
    """The turns and the environment's times between them, none of which begins before the last has ended, however a
    clock jumped."""
    reached_s = began_s
    for position, turn_time in enumerate(turns):
        turn_start_s = min(max(turn_time.started_s, reached_s), ended_s)
        reached_s = min(max(turn_time.ended_s, turn_start_s), ended_s)
        turn_facts: dict[str, Json] = {
            "turn": turn_time.id,
            "role": turn_time.role,
            "prompt_tokens": turn_time.prompt_tokens,
            "tokens": turn_time.tokens,
            "finish": turn_time.finish,
        }
        yield RunSpan(
            kind="turn", name=f"turn {turn_time.id}", began_s=turn_start_s, ended_s=reached_s, facts=turn_facts
        )
        following_s = turns[position + 1].started_s if position + 1 < len(turns) else ended_s
        environment_end_s = min(max(following_s, reached_s), ended_s)
        yield RunSpan(
            kind="environment",
            name="environment",
            began_s=reached_s,
            ended_s=environment_end_s,
            facts={"turn": turn_time.id},
        )
        reached_s = environment_end_s


def _seconds(value: Json) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
