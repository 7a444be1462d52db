"""The row of a run's store with the requested numbers of engines, workers and ranks; it counts before the run file.
Owns the row; `agentrl.run.cluster.scaling` brings about what it says, and a learner reads its ranks as it starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from agentrl.config import RunConfig
from agentrl.config.cluster import Split
from agentrl.store import RunStore
from agentrl.store.run_values import WANTED_SIZE

Meta = Callable[[str], str | None]


def asked(meta: Meta) -> dict[str, Any]:
    """Return the requested `engines`, `workers` and `ranks`, as far as somebody requested them, and `asked_s`, the time
    of the request."""
    return WANTED_SIZE.of(meta)


def ranks(config: RunConfig, meta: Meta) -> int:
    """How many ranks the learner that starts next has."""
    return int(asked(meta).get("ranks", config.train.parallel.ranks))


def move(store: RunStore, to: Split, *, was: Split) -> None:
    """Ask for another split of the places between engines and the learner."""
    earlier = {name: value for name, value in asked(store.meta).items() if name != "refused"}
    new = {**to._asdict(), "was": was._asdict(), "asked_s": time.time()}
    WANTED_SIZE.set(store, {**earlier, **new})


def take_back(store: RunStore, why: str) -> None:
    """Ask for the split of before again: the learner finds no place for what was asked."""
    row = asked(store.meta)
    new = {**row.pop("was"), "asked_s": time.time(), "refused": why}
    WANTED_SIZE.set(store, {**row, **new})


def refused(meta: Meta) -> str | None:
    """Why the last requested split was taken back, if it was."""
    return cast("str | None", asked(meta).get("refused"))
