"""The row of a run's store with the requested numbers of engines, workers and ranks; it counts before the run file.
Owns the row; `agentrl.run.cluster.scaling` brings about what it says, and a learner reads its ranks as it starts.
It also reads back what the autoscaler decided, so that `agentrl status` needs no simulator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from agentrl.config import RunConfig
from agentrl.config.cluster import Split
from agentrl.store import RunStore
from agentrl.store.run_values import REQUESTED_SIZE

Meta = Callable[[str], str | None]
DECISIONS = "controller"
"""Kind of the metrics in which the autoscaler writes what it decided."""


def requested(meta: Meta) -> dict[str, Any]:
    """Return the requested `engines`, `workers` and `ranks`, as far as somebody requested them, and `request`, the
    number of the request."""
    return REQUESTED_SIZE.of(meta)


def write(store: RunStore, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Make the next request: what `change` makes of the last one. Requests differ by number, not by time: a clock may
    step back."""
    is_written = False
    while not is_written:  # somebody else may make a request meanwhile
        last_request = requested(store.meta)
        # Compared and swapped, in a loop: a request of a person and a move of the controller may come together, and
        # each changes one part of the same row.
        is_written = REQUESTED_SIZE.swap(
            store, last_request, {**change(dict(last_request)), "request": last_request.get("request", 0) + 1}
        )


def ranks(config: RunConfig, meta: Meta) -> int:
    """How many ranks the learner that starts next has."""
    return int(requested(meta).get("ranks", config.train.parallel.ranks))


def move(store: RunStore, to: Split, *, was: Split) -> None:
    """Ask for another split of the places between engines and the learner."""

    def moved(last: dict[str, Any]) -> dict[str, Any]:
        last.pop("refused", None)
        return {**last, **to._asdict(), "was": was._asdict()}

    write(store, moved)


def take_back(store: RunStore, why: str) -> None:
    """Request the split of before again: the learner finds no place for the new one."""

    def taken_back(last: dict[str, Any]) -> dict[str, Any]:
        earlier_counts = last.pop("was")
        return {**last, **earlier_counts, "refused": why}

    write(store, taken_back)


def refused(meta: Meta) -> str | None:
    """Why the last requested split was taken back, if it was."""
    return cast("str | None", requested(meta).get("refused"))


def split_of(numbers: Any) -> Split:
    """The split that a row of the store has as two numbers."""
    return Split(*(int(number) for number in numbers))


def last_decision(store: RunStore) -> str | None:
    """The autoscaler's last decision, for a reader; None if it made none."""
    decisions = [row.values for row in store.metrics.values(DECISIONS) if row.values["split"]]
    if not decisions:
        return None
    last = decisions[-1]
    action = "stays" if last["to"] is None else f"moves to {split_of(last['to'])}"
    return f"{split_of(last['split'])} (engines + ranks) {action}: {last['why']}"
