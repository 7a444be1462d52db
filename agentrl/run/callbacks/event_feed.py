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
        position_fields: dict[str, Any] = json.loads(text) if text else {}
        position = cls(**position_fields)
        position.above = set(position.above)  # JSON has a list
        return position

    def to_json(self) -> str:
        plain_fields = {
            field_name: getattr(self, field_name) for field_name in ("attempt", "step", "version", "episodes", "evals")
        }
        return json.dumps({**plain_fields, "above": sorted(self.above)})


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
        readers_by_hook = {
            "on_episode": self._episodes,
            "on_weights": self._weights,
            "on_step": self._steps,
            "on_eval": self._evals,
        }
        timed_events: list[tuple[float, Event]] = []
        for hook_name, read_events in readers_by_hook.items():
            latest_time_s = 0.0
            for new_event in read_events(store) if hook_name in self._hooks else ():
                # Times of one kind are made to rise: a clock that was set back must not let step 8 come before step 7,
                # which a callback may rely on.
                latest_time_s = max(latest_time_s, new_event.time_s)
                timed_events.append((latest_time_s, new_event))
        return [new_event for _, new_event in sorted(timed_events, key=lambda timed: timed[0])]

    def mark(self, event: Event) -> None:
        """Record that the event was delivered."""
        position = self.place
        match event:
            case StepEnded():
                position.attempt, position.step = max((position.attempt, position.step), (event.attempt, event.step))
            case WeightsServed():
                position.version = max(position.version, event.version)
            case EvalEnded():
                first_episode, _, group_count = event.id.removeprefix("eval:").partition(":")
                position.evals[first_episode] = int(group_count)
            case EpisodeEnded():
                position.above.add(event.episode)

    def _steps(self, store: RunStore) -> Iterator[Event]:
        current_attempt = store.lineage.attempt  # first: rows of an earlier attempt are all there by then
        step_rows = store.metrics.values("step", after=self._after if current_attempt == self._attempt else -1)
        for step_row in step_rows:
            if (step_row.attempt, step_row.step) > (self.place.attempt, self.place.step):
                yield StepEnded(
                    id=f"step:{step_row.attempt}:{step_row.step}",
                    step=step_row.step,
                    attempt=step_row.attempt,
                    time_s=step_row.time_s,
                    values=step_row.values,
                )
        self._after = step_rows[-1].step if step_rows else self._after if current_attempt == self._attempt else -1
        self._attempt = current_attempt

    def _weights(self, store: RunStore) -> Iterator[Event]:
        for served_version in store.versions.served_versions(self.place.version):
            yield WeightsServed(
                id=f"weights:{served_version.version}",
                version=served_version.version,
                step=served_version.step,
                time_s=served_version.confirmed_s,
            )

    def _episodes(self, store: RunStore) -> Iterator[Event]:
        position = self.place
        position.episodes = max(position.episodes, self._ended_up_to)
        # Episodes end out of order, so a single number cannot say which were delivered, and a set of all ids would grow
        # with the run. The number says "all up to here", the set has the few beyond it.
        position.above = {episode_id for episode_id in position.above if episode_id > position.episodes}
        after_id, all_ended, event_count = position.episodes, True, 0
        while event_count < MOST and (episode_rows := store.reads.episodes(after=after_id, limit=MOST)):
            for episode_row in episode_rows:
                all_ended = all_ended and episode_row.state not in ("waiting", "running")
                if all_ended:
                    self._ended_up_to = episode_row.id
                if episode_row.stop_reason is not None and episode_row.id not in position.above:
                    event_count += 1
                    yield episode_ended(episode_row, episode_row.stop_reason)
            after_id = episode_rows[-1].id

    def _evals(self, store: RunStore) -> Iterator[Event]:
        current_attempt = store.lineage.attempt
        for purpose in store.groups.purposes():
            eval_label = held_out.read_label(purpose, now=store.versions.current_version().step)
            group_count = sum(store.groups.counts(purpose).values())
            # The number of groups is part of the key: an evaluation in which every episode failed is scheduled again
            # under its old name, and its new result is another event.
            if (
                eval_label is None
                or (purpose, group_count, current_attempt) in self._seen
                or not held_out.finished(store, purpose)
            ):
                continue
            self._seen.add((purpose, group_count, current_attempt))
            episode_rows = store.reads.episodes(purpose, limit=_ALL)
            eval_result = held_out.result(store, eval_label.name, purpose)
            if eval_result is None or self.place.evals.get(str(episode_rows[0].id)) == group_count:
                continue
            yield EvalEnded(
                id=f"eval:{episode_rows[0].id}:{group_count}",
                name=eval_label.name,
                when=eval_label.when,
                step=eval_label.step,
                **eval_result.figures(),
                time_s=max(episode_row.ended_s or 0.0 for episode_row in episode_rows),
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
