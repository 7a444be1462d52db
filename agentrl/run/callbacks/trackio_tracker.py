"""Writes a run to the local database of trackio, with the package `trackio`; `trackio show` is its dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError
from agentrl.run.callbacks.appending_tracker import AppendingTracker, TrackedRun
from agentrl.run.callbacks.tracker import numbers


class TrackioTracker(AppendingTracker):
    """A run of the trackio project `project`, in trackio's folder (`TRACKIO_DIR`). The run file is its configuration,
    the numbers of the summary are `summary/NAME` at the last step. Rows go to the database at once, each with an id, so
    none is there twice. Raises UsageError if trackio is not installed."""

    def __init__(self, project: str = "agentrl") -> None:
        super().__init__()
        try:
            self._storage: Any = import_module("trackio.sqlite_storage").SQLiteStorage
        except ImportError as error:
            raise UsageError(f"trackio is not installed ({error}): pip install 'agentrl[trackio]'") from None
        self._project = project
        self._to: TrackedRun | None = None

    def open(self, run: TrackedRun) -> None:
        """Nothing is written before the first row."""
        self._to = run

    def log(self, values: Mapping[str, float], step: int, time_s: float) -> None:
        """One row."""
        self._write(values, step, time_s, f"row-{self.rows}")

    def finish(self, summary: Mapping[str, Any], plot: Path, step: int) -> None:
        """The numbers of the summary; trackio has no place for texts."""
        found = dict(numbers({"summary": summary}))
        self._write(found, step, datetime.now(UTC).timestamp(), f"summary-{step}")

    def close(self, *, finished: bool) -> None:
        """All rows are written."""

    def _write(self, values: Mapping[str, float], step: int, time_s: float, id: str) -> None:
        run = self._to
        assert run is not None
        self._storage.bulk_log(
            project=self._project,
            run=run.name,
            run_id=run.id,
            metrics_list=[dict(values)],
            steps=[step],
            timestamps=[datetime.fromtimestamp(time_s, UTC).isoformat()],
            config={**run.config, "_Group": run.group},
            log_ids=[f"{run.id}-{id}"],
        )
