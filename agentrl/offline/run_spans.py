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
    served = store.versions.served_versions()
    # The row of a step is written once engines have its weights, which may be seconds after the step. Its end is
    # therefore taken from the version, where one was made.
    made_s = {version.step: version.minted_s for version in served}
    reached_s = 0.0
    for row in store.metrics.values("step"):
        busy, idle = (_seconds(row.values.get(name)) for name in ("busy_s", "idle_s"))
        ended_s = max(reached_s, min(row.time_s, made_s.get(row.step, row.time_s)))
        # Rows have an end and durations, from different clocks. Each span is clipped to where the one before ended,
        # so that a correction of the wall clock makes a span too short instead of two that overlap.
        began_s = max(reached_s, ended_s - busy)
        if (waited_s := max(reached_s, began_s - idle)) < began_s:
            yield RunSpan(kind="wait", name="wait for groups", began_s=waited_s, ended_s=began_s)
        names = ("loss", "reward_mean", "success_mean", "tokens_computed", "lag_mean", "group_count")
        facts = {"step": row.step, **{name: row.values[name] for name in names if row.values.get(name) is not None}}
        yield RunSpan(kind="step", name=f"step {row.step}", began_s=began_s, ended_s=ended_s, facts=facts)
        reached_s = ended_s
    for version in served:
        facts: dict[str, Json] = {"version": version.version, "step": version.step}
        name = f"weights of step {version.step}"
        yield RunSpan(kind="sync", name=name, began_s=version.minted_s, ended_s=version.confirmed_s, facts=facts)


def episode_spans(store: RunStore, now_s: float) -> Iterator[RunSpan]:
    """Every episode that has begun, by number, with its turns; one that goes on ends at `now_s` at the latest."""
    after = 0
    while rows := store.reads.episodes(after=after, limit=_PAGE):
        turns = store.search.turn_times(rows[0].id, rows[-1].id)
        # One query for the turns of a whole page, sorted by episode: one for each episode would be as many queries as
        # episodes.
        of = {id: list(of_episode) for id, of_episode in groupby(turns, key=lambda turn: turn.episode_id)}
        for row in rows:
            if row.started_s is not None:
                yield _episode(row, row.started_s, of.get(row.id, []), now_s)
        after = rows[-1].id


def _episode(row: EpisodeRow, started_s: float, turns: Sequence[TurnTime], now_s: float) -> RunSpan:
    # An episode that its process's death cut has no end. Its last turn is the latest moment that is known.
    last_s = max([started_s, *(turn.ended_s for turn in turns)])
    ended_s = max(last_s, now_s if row.ended_s is None else row.ended_s)
    facts: dict[str, Json] = {
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
        ended_s=ended_s,
        facts={name: value for name, value in facts.items() if value is not None},
        inside=tuple(_turns(turns, started_s, ended_s)),
    )


def _turns(turns: Sequence[TurnTime], began_s: float, ended_s: float) -> Iterator[RunSpan]:
    """The turns and the environment's times between them, none of which begins before the last has ended, however a
    clock jumped."""
    reached_s = began_s
    for place, turn in enumerate(turns):
        start_s = min(max(turn.started_s, reached_s), ended_s)
        reached_s = min(max(turn.ended_s, start_s), ended_s)
        facts: dict[str, Json] = {
            "turn": turn.id,
            "role": turn.role,
            "prompt_tokens": turn.prompt_tokens,
            "tokens": turn.tokens,
            "finish": turn.finish,
        }
        yield RunSpan(kind="turn", name=f"turn {turn.id}", began_s=start_s, ended_s=reached_s, facts=facts)
        following_s = turns[place + 1].started_s if place + 1 < len(turns) else ended_s
        until_s = min(max(following_s, reached_s), ended_s)
        yield RunSpan(
            kind="environment", name="environment", began_s=reached_s, ended_s=until_s, facts={"turn": turn.id}
        )
        reached_s = until_s


def _seconds(value: Json) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
