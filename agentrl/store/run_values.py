"""Values that the processes of a run share: every key of the store's table `meta`, and the type of its value.

Rows are text; a `Value` reads and writes them. Its readers take the store's `meta`, so that a call may read through any
handle: `PHASE.of(store.meta)`, or `await PHASE.awaited(store.meta)` in a program with a loop. The keys at the end are
the store's own: its calls alone write them.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from copy import copy
from typing import Any, Final, Generic, Literal, Protocol, TypeVar, cast

from agentrl.store.databases.database import Database

Phase = Literal["eval", "train", "drain", "finish", "stop"]
_T = TypeVar("_T")


class _Writes(Protocol):
    def set_meta(self, key: str, value: str) -> None: ...


class _Swaps(Protocol):
    def swap_meta(self, key: str, before: str, value: str) -> bool: ...


class Value(Generic[_T]):
    """A value under one key. `unset` is what it is if nobody set it, or set it to nothing."""

    def __init__(self, key: str, unset: _T, read: Callable[[str], _T], write: Callable[[_T], str] = str) -> None:
        self.key, self.unset = key, unset
        self._read, self._write = read, write

    def of(self, meta: Callable[[str], str | None]) -> _T:
        """Return the value, by a store's `meta`."""
        return self._value(meta(self.key))

    async def awaited(self, meta: Callable[[str], Awaitable[str | None]]) -> _T:
        """Return the value, by the `meta` of a store whose calls are awaited."""
        return self._value(await meta(self.key))

    def within(self, db: Database) -> _T:
        """Return the value, inside a transaction."""
        meta_row = db.row("SELECT value FROM meta WHERE key = ?", (self.key,))
        return self._value(None if meta_row is None else meta_row[0])

    def set(self, store: _Writes, value: _T) -> None:
        """Set it for every process of the run."""
        store.set_meta(self.key, self.text(value))

    def swap(self, store: _Swaps, before: _T, value: _T) -> bool:
        """Set it if it still is `before`; returns whether it was."""
        value_texts = ("" if each_value == self.unset else self.text(each_value) for each_value in (before, value))
        return store.swap_meta(self.key, *value_texts)

    def text(self, value: _T) -> str:
        """A value as its row has it."""
        return self._write(value)

    def _value(self, text: str | None) -> _T:
        # A copy: lists and dicts are values too, and a caller that appends to one would change what is unset for
        # everybody.
        return self._read(text) if text else copy(self.unset)


def _text(key: str) -> Value[str | None]:
    return Value[str | None](key, None, str, lambda value: value or "")


def _seconds(key: str) -> Value[float | None]:
    return Value[float | None](key, None, float, lambda value: "" if value is None else str(value))


def _json(key: str, unset: _T) -> Value[_T]:
    return Value[_T](key, unset, lambda text: cast("_T", json.loads(text)), json.dumps)


# --- the run

CONFIG: Final = _text("config")
"""The run's configuration, as `agentrl.config.to_json` writes it."""
CREATED_S: Final = _seconds("created_s")
PHASE: Final = Value[Phase | None]("phase", None, lambda text: cast("Phase", text))
"""What its processes do now; None before it began."""
TRAIN_STARTED_S: Final = _seconds("train_started_s")
TRAIN_ENDED_S: Final = _seconds("train_ended_s")
STOPPED_EARLY: Final = _text("stopped_early")
"""Why training ended before its last step, though nothing failed; None if the run has gone on since."""
WENT_BACK: Final = _text("went_back")
"""What the last return to a checkpoint cost, in words."""
STOP_REQUESTED: Final = _text("stop_wanted")
"""The run's lock, as it stands there, of the supervisor that shall end."""
REQUESTED_SETTINGS: Final = _json("wanted_settings", cast("list[dict[str, Any]]", []))
"""Requests that no step has yet: `settings` by their keys, and the time `asked_s`; see `agentrl.run.live_settings`."""
CHANGES: Final = _json("changes", cast("list[dict[str, Any]]", []))
"""The settings that changed since the run began: from which `step` on, `was` and `settings` by their keys, `time_s`."""
RESTARTED: Final = _json("restarted", cast("list[dict[str, Any]]", []))
"""The last processes that died and were started again: `time_s`, which `process`, and `why` it ended."""
PAUSED: Final = _json("paused", cast("dict[str, Any]", {}))
"""Of a run that stands still: `since_s`, and whether turns stop amid their tokens (`now`). Empty if it goes on."""
TAKES_NO_SIGNALS: Final = _text("takes_no_signals")
"""The run's lock, as it stands there, of a supervisor that is a thread of somebody's process: it gets the request to
end as one of another machine does."""
ROWS_DIGESTS: Final = _json("rows_digests", cast("dict[str, str]", {}))
"""A digest of each data set as the run last began or went on."""

# --- engines and workers

ENGINE_URLS: Final = _json("engine_urls", cast("list[str]", []))
"""URLs of engines that serve; empty until all of a run's first ones do."""
ROLE_URLS: Final = _json("role_urls", cast("dict[str, list[str]]", {}))
"""The same by role, for roles with a model of their own."""
FROZEN_URLS: Final = _json("given_urls", cast("dict[str, str]", {}))
"""URLs of engines whose weights do not change, by what they serve."""
EVAL_URLS: Final = _json("eval_urls", cast("list[str]", []))
"""URLs of the engines that measure during training alone."""
PINNED: Final = Value[int | None]("pinned", None, int)
"""The weight version that they measure; None before the first."""
WORKERS: Final = _json("workers", cast("list[int] | None", None))
"""The numbers of the workers that the run has now; None: those of the run file."""
REQUESTED_SIZE: Final = _json("wanted_size", cast("dict[str, Any]", {}))
"""The requested `engines`, `workers` and `ranks`, where there are some; see `agentrl.run.cluster.scale_requests`."""
SCALING: Final = _json("scaling", cast("dict[str, Any]", {}))
"""Which parts are `coming`, `going`, and in `trouble`."""

# --- the learner

MODEL_PARAMS: Final = Value[int]("model_params", 0, int)
MAX_LAG: Final = Value[int | None]("max_lag", None, int)
"""The lag bound that holds now; None as long as it is the run file's."""
LEARNER_STARTED: Final = _json("learner_started", cast("dict[str, Any]", {}))
"""Of the learner that runs: its `ranks`, the `step` that it began from, the seconds that its start took (`start_s`)."""
LEARNER_WAITS: Final = _text("learner_waits")
"""What it has waited for, for long, in words."""
LEAGUE: Final = _text("league")
"""The members, as `agentrl.config.league.to_json` writes them."""

# --- the store's own

ATTEMPT: Final = Value[int]("attempt", 1, int)
NEXT_TASK: Final = Value[int]("next_task", 0, int)
"""The index of the next training task."""
LEARNER: Final = Value[int]("learner", 0, int)
"""The learner of the run that leads: the last one that wrote itself here."""
SUPERVISOR: Final = _text("supervisor")
"""Who supervises a run on a server, or did last, in words."""

ATTEMPT_SQL: Final = "(SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'attempt')"
"""The attempt, in SQL."""
