"""Writes measured values of a process to the run store and, one JSON object per line, to metrics.jsonl.

Owns the open file of one process; knows no meaning of a kind. Lines are appended whole, so that several processes share
one file. The store's rows are authoritative: a rollback flags them there, while the file keeps the lines of undone
steps, which differ by `attempt`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from agentrl.errors import DiskFull, StoreError
from agentrl.host.with_block import Closing
from agentrl.records import Json
from agentrl.store import RunStore
from agentrl.store.metrics import finite


class Telemetry(Closing):
    """Writes values of one process of a run. `process` names it in each line, `clock` gives seconds since the epoch."""

    def __init__(
        self, store: RunStore, jsonl_path: str | Path, process: str, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._store, self._path, self._process, self._clock = store, Path(jsonl_path), process, clock
        self._attempt, self._torn = store.lineage.attempt, False  # whether a disk took a part of the last line
        try:
            # O_APPEND and one `write` for each line: the kernel puts each whole line at the end, whoever else writes. A
            # buffered file would cut lines where its buffer ends.
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be written: {error.strerror}") from error

    def record(self, kind: str, step: int, values: Mapping[str, Json]) -> None:
        """Write values to the store, then to the file. Numbers that are not finite become null.

        Raises StoreError for values that are not JSON-safe, DiskFull if there is no space left."""
        self._store.metrics.record(kind, step, values)
        self.append(kind, step, values)

    def append(self, kind: str, step: int, values: Mapping[str, Json]) -> None:
        """Write values that the store has to the file. Raises DiskFull if there is no space left."""
        line_fields: dict[str, Json] = {
            "kind": kind,
            "step": step,
            "time": self._clock(),
            "process": self._process,
            "attempt": self._attempt,
        }
        line_fields |= {
            value_name: finite(measured_value)
            for value_name, measured_value in values.items()
            if value_name not in line_fields
        }
        line_bytes = json.dumps(line_fields).encode() + b"\n"
        try:
            # A disk that fills up takes a part of the line. The next line begins with a line break then, so that one
            # record is lost and not two.
            self._torn = os.write(self._fd, b"\n" * self._torn + line_bytes) < len(line_bytes)
            if self._torn:
                raise DiskFull(f"{self._path}: no space left for a whole line: free some")
        except OSError as error:
            raise DiskFull(f"{self._path}: cannot be written: {error.strerror}") from error

    def close(self) -> None:
        """Close the file; the store stays open."""
        os.close(self._fd)
