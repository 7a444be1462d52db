"""The events of a run that one callback has not received yet, read from the run's store.

Owns the place up to which it has received them, as JSON: the store keeps it under `place_key`. Episodes do not end in
the order of their numbers, so their place is a number up to which all have ended, and those above it that were
delivered. Never calls anybody.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from agentrl.records import StopReason
from agentrl.run.callbacks.callback import EpisodeEnded, EvalEnded, Event, StepEnded, WeightsServed
from agentrl.run.evaluation import held_out
from agentrl.store import EpisodeRow, RunStore

MOST = 500
"""At most so many episodes are read at once: the events that are not delivered yet may be those of a whole run."""
_ALL = 1 << 30


def place_key(name: str) -> str:
    """The store's key for the place of the callback of this name."""
    return f"callback_place:{name}"


@dataclass(slots=True)
class FeedPosition:
    """Events that a callback has received: steps by their attempt and number, versions by their number, episodes up to
    `episodes` and the ones in `above`, evaluations by their first episode, with how many groups they had."""

    attempt: int = 0
    step: int = -1
    version: int = 0
    episodes: int = 0
    above: set[int] = field(default_factory=set[int])
    evals: dict[str, int] = field(default_factory=dict[str, int])

    @classmethod
    def parse(cls, text: str | None) -> FeedPosition:
        fields: dict[str, Any] = json.loads(text) if text else {}
        place = cls(**fields)
        place.above = set(place.above)  # JSON has a list
        return place

    def to_json(self) -> str:
        rest = {name: getattr(self, name) for name in ("attempt", "step", "version", "episodes", "evals")}
        return json.dumps({**rest, "above": sorted(self.above)})


class EventFeed:
    """Reads events for hooks of the names `hooks`, from `place` on. Whoever delivers an event calls `mark`, and has
    delivered all that `read` returned before the next `read`."""

    def __init__(self, hooks: Collection[str], place: FeedPosition) -> None:
        self._hooks, self.place = hooks, place
        self._attempt, self._after = 0, -1  # of the newest read: steps up to `_after` were in it
        self._ended_up_to = place.episodes
        self._seen = set[tuple[str, int, int]]()  # evaluations that were looked at: purpose, groups, attempt

    def read(self, store: RunStore) -> list[Event]:
        """Return the new events by time; events of one kind stay in their own order, which a clock that jumps does not
        change. There may be more if it returns `MOST` events or more."""
        kinds = {
            "on_episode": self._episodes,
            "on_weights": self._weights,
            "on_step": self._steps,
            "on_eval": self._evals,
        }
        timed_events: list[tuple[float, Event]] = []
        for hook, read in kinds.items():
            latest_s = 0.0
            for event in read(store) if hook in self._hooks else ():
                # Times of one kind are made to rise: a clock that was set back must not let step 8 come before step 7,
                # which a callback may rely on.
                latest_s = max(latest_s, event.time_s)
                timed_events.append((latest_s, event))
        return [event for _, event in sorted(timed_events, key=lambda timed: timed[0])]

    def mark(self, event: Event) -> None:
        """Record that the event was delivered."""
        place = self.place
        match event:
            case StepEnded():
                place.attempt, place.step = max((place.attempt, place.step), (event.attempt, event.step))
            case WeightsServed():
                place.version = max(place.version, event.version)
            case EvalEnded():
                first, _, groups = event.id.removeprefix("eval:").partition(":")
                place.evals[first] = int(groups)
            case EpisodeEnded():
                place.above.add(event.episode)

    def _steps(self, store: RunStore) -> Iterator[Event]:
        attempt = store.lineage.attempt  # first: rows of an earlier attempt are all there by then
        rows = store.metrics.values("step", after=self._after if attempt == self._attempt else -1)
        for row in rows:
            if (row.attempt, row.step) > (self.place.attempt, self.place.step):
                yield StepEnded(
                    id=f"step:{row.attempt}:{row.step}",
                    step=row.step,
                    attempt=row.attempt,
                    time_s=row.time_s,
                    values=row.values,
                )
        self._after = rows[-1].step if rows else self._after if attempt == self._attempt else -1
        self._attempt = attempt

    def _weights(self, store: RunStore) -> Iterator[Event]:
        for served in store.versions.served_versions(self.place.version):
            yield WeightsServed(
                id=f"weights:{served.version}",
                version=served.version,
                step=served.step,
                time_s=served.confirmed_s,
            )

    def _episodes(self, store: RunStore) -> Iterator[Event]:
        place = self.place
        place.episodes = max(place.episodes, self._ended_up_to)
        # Episodes end out of order, so a single number cannot say which were delivered, and a set of all ids would grow
        # with the run. The number says "all up to here", the set has the few beyond it.
        place.above = {id for id in place.above if id > place.episodes}
        after, all_ended, count = place.episodes, True, 0
        while count < MOST and (rows := store.reads.episodes(after=after, limit=MOST)):
            for row in rows:
                all_ended = all_ended and row.state not in ("waiting", "running")
                if all_ended:
                    self._ended_up_to = row.id
                if row.stop_reason is not None and row.id not in place.above:
                    count += 1
                    yield episode_ended(row, row.stop_reason)
            after = rows[-1].id

    def _evals(self, store: RunStore) -> Iterator[Event]:
        attempt = store.lineage.attempt
        for purpose in store.groups.purposes():
            read = held_out.read_label(purpose, now=store.versions.current_version().step)
            groups = sum(store.groups.counts(purpose).values())
            # The number of groups is part of the key: an evaluation in which every episode failed is scheduled again
            # under its old name, and its new result is another event.
            if read is None or (purpose, groups, attempt) in self._seen or not held_out.finished(store, purpose):
                continue
            self._seen.add((purpose, groups, attempt))
            rows = store.reads.episodes(purpose, limit=_ALL)
            result = held_out.result(store, read.name, purpose)
            if result is None or self.place.evals.get(str(rows[0].id)) == groups:
                continue
            yield EvalEnded(
                id=f"eval:{rows[0].id}:{groups}",
                name=read.name,
                when=read.when,
                step=read.step,
                **result.figures(),
                time_s=max(row.ended_s or 0.0 for row in rows),
            )


def episode_ended(row: EpisodeRow, reason: StopReason) -> EpisodeEnded:
    """The event of an episode that ended for `reason`."""
    return EpisodeEnded(
        id=f"episode:{row.id}",
        episode=row.id,
        group=row.group_id,
        purpose=row.purpose,
        env=row.task.env,
        seed=row.task.seed,
        stop_reason=reason,
        outcome=row.outcome,
        success=row.success,
        detail=row.detail,
        turns=row.turns,
        tokens=row.tokens,
        started_s=row.started_s,
        time_s=row.ended_s or 0.0,
    )
