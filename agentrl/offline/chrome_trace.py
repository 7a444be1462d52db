"""Writes spans of a run as Chrome's trace events, JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Two processes: the learner with its steps and syncs, and the episodes, each in the lowest row that is free when it
begins. Of the episodes only the rows are kept in memory.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from agentrl.errors import UsageError
from agentrl.offline.run_spans import RunSpan

_LEARNER: Final = 1
_EPISODES: Final = 2
# Rows that never change places, since a viewer draws only properly nested spans in one row, and a sync of the last
# weights runs beside the next wait. Episodes overlap freely, so they are in a process of their own with as many rows
# as there are at once.
_LANES: Final = {"wait": 1, "step": 1, "sync": 2}


def write_trace(learner: Iterable[RunSpan], episodes: Iterable[RunSpan], out: Path) -> int:
    """Write a file, compressed if its name ends with `.gz`, whole or not at all; returns how many events it has.
    Raises UsageError if it cannot be written."""
    part_path = out.with_name(f"{out.name}.part")
    event_count = 0
    try:
        # The document is written by hand around its events: `json.dump` of the whole would need every event of a run
        # of days in memory, and a viewer needs the closing brackets, so a stream that breaks off leaves only the part
        # file.
        with gzip.open(part_path, "wt") if out.suffix == ".gz" else part_path.open("w", encoding="utf-8") as trace_file:
            trace_file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for trace_event in _events(learner, episodes):
                trace_file.write((",\n" if event_count else "") + json.dumps(trace_event))
                event_count += 1
            trace_file.write("\n]}\n")
        part_path.replace(out)
    except OSError as error:
        part_path.unlink(missing_ok=True)
        raise UsageError(f"{out} cannot be written ({error.strerror}): give another --out") from error
    return event_count


def _events(learner: Iterable[RunSpan], episodes: Iterable[RunSpan]) -> Iterator[dict[str, Any]]:
    yield _named("process_name", _LEARNER, 0, "learner")
    yield _named("thread_name", _LEARNER, 1, "steps")
    yield _named("thread_name", _LEARNER, 2, "weights to engines")
    yield _named("process_name", _EPISODES, 0, "episodes")
    for run_span in learner:
        yield from _complete(run_span, _LEARNER, _LANES[run_span.kind])
    taken_until_s: list[float] = []  # until when each row is taken
    for run_span in episodes:
        # First fit, by the beginning, uses no more rows than there were episodes at the same time at most, provided
        # that spans come in the order of their beginnings; the store has them by number, which is that order but for
        # moments, and a moment out of order costs one more row.
        row_index = next(
            (row_index for row_index, row_end_s in enumerate(taken_until_s) if row_end_s <= run_span.began_s),
            len(taken_until_s),
        )
        if row_index == len(taken_until_s):
            taken_until_s.append(0.0)
            yield _named("thread_name", _EPISODES, row_index + 1, f"row {row_index + 1}")
        taken_until_s[row_index] = run_span.ended_s
        yield from _complete(run_span, _EPISODES, row_index + 1)


def _complete(span: RunSpan, process: int, lane: int) -> Iterator[dict[str, Any]]:
    """A span and those inside it: times in whole microseconds, so that ends of neighbours meet."""
    # Both ends are rounded, and the duration is their difference. A rounded duration could reach a microsecond into
    # the neighbour, and a viewer would then nest the one within the other.
    began_us, ended_us = round(span.began_s * 1e6), round(span.ended_s * 1e6)
    event_fields = {"ph": "X", "name": span.name, "cat": span.kind, "pid": process, "tid": lane}
    yield {**event_fields, "ts": began_us, "dur": max(0, ended_us - began_us), "args": span.facts}
    for inner_span in span.inside:
        yield from _complete(inner_span, process, lane)


def _named(what: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": lane, "args": {"name": name}}
