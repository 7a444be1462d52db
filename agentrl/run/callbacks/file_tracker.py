"""Writes the events of a run to a CSV or JSON Lines file, each once, whatever happened to run, file and machine.

Every start delivers all events from the first step on; what the file has already is not written again. So a line that a
crash cut off, or a file that was lost, comes back.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from agentrl.errors import UsageError
from agentrl.records import Json
from agentrl.run.callbacks.callback import (
    Callback,
    EpisodeEnded,
    EvalEnded,
    Event,
    RunStarted,
    StepEnded,
    WeightsServed,
)

EventKind = Literal["step", "eval", "episode", "weights"]
_KINDS = {StepEnded: "step", EvalEnded: "eval", EpisodeEnded: "episode", WeightsServed: "weights"}


class FileTracker(Callback):
    """One line for each event of the kinds `events`: steps with their metrics, evaluations, episodes, weights. The
    ending of `path` says how: `.jsonl`, or `.csv` with a column for each name ("" where an event has none; lists and
    tables as JSON). Lines of steps that a restart undid are taken out when these steps are trained again.

    A file that cannot be written is a warning, and no end of the run. Raises UsageError for another ending, for an
    unknown kind, and as the run starts, for a file that is something else."""

    from_start = True
    errors = "warn"

    def __init__(
        self, path: Path | str, *, events: tuple[EventKind, ...] = ("step", "eval"), name: str | None = None
    ) -> None:
        self.path = Path(path)
        if self.path.suffix not in (".csv", ".jsonl"):
            raise UsageError(f"FileTracker: {self.path}: give it the ending .csv or .jsonl")
        if not events or set(events) - set(_KINDS.values()):
            raise UsageError(f"FileTracker: events = {events!r}: give some of {', '.join(_KINDS.values())}")
        super().__init__(
            name=name or f"FileTracker({self.path})",
            on_step=self._add if "step" in events else None,
            on_eval=self._add if "eval" in events else None,
            on_episode=self._add if "episode" in events else None,
            on_weights=self._add if "weights" in events else None,
        )
        self._unwritten: list[Event] = []
        self._ids: set[str] | None = None  # of the file's rows; None: it has to be read
        self._columns: list[str] = []
        self._rows()  # a file of somebody else is refused now

    def on_start(self, run: RunStarted) -> None:
        """Read the file as it is now."""
        self._ids, self._unwritten = None, []

    def _add(self, event: Event) -> None:
        """Write an event, after those that could not be written before."""
        self._unwritten.append(event)
        try:
            while self._unwritten:
                self._write(self._unwritten[0])
                del self._unwritten[0]
        except OSError:
            self._ids = None  # a part of the line may be there
            raise

    def _write(self, event: Event) -> None:
        written_ids = self._rewrite(self._rows()) if self._ids is None else self._ids
        if event.id in written_ids:
            return
        if isinstance(event, StepEnded) and (
            undone_ids := {event_id for event_id in written_ids if _is_undone_by(event_id, event)}
        ):
            written_ids = self._rewrite([event_row for event_row in self._rows() if event_row["id"] not in undone_ids])
        event_row = _row(event)
        # A table whose header lacks a column cannot be appended to. It is written anew, wider, in one rename: readers
        # see the old table or the new one.
        if self._is_csv and not event_row.keys() <= set(self._columns):
            self._rewrite([*self._rows(), event_row])
            return
        with self.path.open("a", encoding="utf-8", newline="") as tracker_file:
            tracker_file.write(self._line(event_row))
        written_ids.add(event.id)

    @property
    def _is_csv(self) -> bool:
        return self.path.suffix == ".csv"

    def _rows(self) -> list[dict[str, Json]]:
        """Read the rows of the file; a last line that was cut off is left out. Raises UsageError if it is no file of
        this class."""
        if not self.path.exists():
            return []
        file_text = self.path.read_text(encoding="utf-8")
        # A line without its end was cut off by a crash. It is dropped here and comes back as an event, since every
        # start delivers them all.
        complete_text = file_text[: file_text.rfind("\n") + 1]
        try:
            event_rows = (
                list(csv.DictReader(io.StringIO(complete_text)))
                if self._is_csv
                else [json.loads(json_line) for json_line in _lines(complete_text)]
            )
            if not all(isinstance(event_row["id"], str) for event_row in event_rows):
                raise ValueError("a row without an id")
            if self._is_csv and complete_text and "id" not in next(csv.reader(io.StringIO(complete_text))):
                raise ValueError("a table without ids")
        except (ValueError, KeyError, TypeError, csv.Error) as error:
            raise UsageError(f"{self.path} is no file of FileTracker ({error}): give another one") from None
        return event_rows

    def _rewrite(self, rows: list[dict[str, Json]]) -> set[str]:
        """Have these rows in the file, which is whole at any instant. Returns their ids."""
        self._columns = list(dict.fromkeys(column_name for event_row in rows for column_name in event_row))
        header_lines = (
            [self._line({column_name: column_name for column_name in self._columns})]
            if self._is_csv and self._columns
            else []
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part_path = self.path.with_name(f"{self.path.name}.part")
        part_path.write_text(
            "".join([*header_lines, *(self._line(event_row) for event_row in rows)]), encoding="utf-8", newline=""
        )
        part_path.replace(self.path)
        self._ids = {str(event_row["id"]) for event_row in rows}
        return self._ids

    def _line(self, row: Mapping[str, Json]) -> str:
        if not self._is_csv:
            return json.dumps(row) + "\n"
        line_buffer = io.StringIO()
        csv.writer(line_buffer, lineterminator="\n").writerow(
            [_cell(row.get(column_name)) for column_name in self._columns]
        )
        return line_buffer.getvalue()


def _lines(text: str) -> list[str]:
    return text.split("\n")[:-1]


def _row(event: Event) -> dict[str, Json]:
    """The event, flat: a step's metrics are columns of it."""
    event_fields = asdict(event)
    step_values = event_fields.pop("values", {})
    return {
        "kind": _KINDS[type(event)],
        **event_fields,
        **{value_name: step_values[value_name] for value_name in step_values if value_name not in event_fields},
    }


def _cell(value: Json) -> str:
    """A value in one line."""
    if value is None:
        return ""
    return " ".join(value.splitlines()) if isinstance(value, str) else json.dumps(value)


def _is_undone_by(id: str, event: StepEnded) -> bool:
    """Whether `id` is of a step that was trained before a restart went back to before `event`."""
    event_kind, *id_numbers = id.split(":")
    return event_kind == "step" and int(id_numbers[0]) < event.attempt and int(id_numbers[1]) >= event.step
