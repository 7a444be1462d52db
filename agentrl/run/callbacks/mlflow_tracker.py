"""Sends a run to MLflow: to a server, or to a database in a file, with the package `mlflow-skinny` or `mlflow`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from agentrl.errors import UsageError
from agentrl.host.installation import install_command
from agentrl.run.callbacks.appending_tracker import AppendingTracker, TrackedRun

_MOST = 100  # parameters that a server takes at once
_LONGEST = 500  # characters of a parameter


class MLflowTracker(AppendingTracker):
    """A run of the experiment `experiment` at the tracking server `uri` (`http://host:5000`, `sqlite:////a/file.db`;
    default: the database `mlflow/mlflow.db` in the run's folder). Each scalar of the run file is a parameter.

    Raises UsageError if MLflow is not installed."""

    def __init__(self, experiment: str = "agentrl", uri: str | None = None) -> None:
        super().__init__()
        try:
            self._mlflow: Any = import_module("mlflow.tracking")
            self._entities: Any = import_module("mlflow.entities")
            if uri is None or not uri.startswith("http"):
                # `mlflow-skinny` leaves these out, and a database without them fails at the first step of the run, long
                # after its start.
                import_module("sqlalchemy")
                import_module("alembic")
        except ImportError as error:
            raise UsageError(f"MLflow is not installed ({error}): {install_command('mlflow')}") from None
        self._experiment, self._uri = experiment, uri
        self._client: Any = None
        self._id = ""

    def open(self, run: TrackedRun) -> None:
        """Begin MLflow's run, or go on in it: it is known by its tag `agentrl.id`."""
        mlflow_folder = run.folder.resolve() / "mlflow"
        if self._uri is None:
            mlflow_folder.mkdir(parents=True, exist_ok=True)
        self._client = self._mlflow.MlflowClient(tracking_uri=self._uri or f"sqlite:///{mlflow_folder / 'mlflow.db'}")
        existing = self._client.get_experiment_by_name(self._experiment)
        artifact_url = None if self._uri else (mlflow_folder / "artifacts").as_uri()
        experiment = (
            existing.experiment_id if existing else self._client.create_experiment(self._experiment, artifact_url)
        )
        # Looked up by our own tag: MLflow makes the id of a run itself, and a process that was killed right after
        # making one has not written it down anywhere. The tag is set with the run, in one call.
        matching_runs = self._client.search_runs([experiment], f"tags.`agentrl.id` = '{run.id}'", max_results=1)
        if matching_runs:
            self._id = matching_runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        run_tags = {"agentrl.id": run.id, "agentrl.group": run.group}
        self._id = self._client.create_run(experiment, tags=run_tags, run_name=run.name).info.run_id
        parameters = [
            self._entities.Param(_name(setting_key), str(setting_value)[:_LONGEST])
            for setting_key, setting_value in _scalars(run.config)
            if setting_value != ""
        ]
        for first_position in range(0, len(parameters), _MOST):
            self._client.log_batch(self._id, params=parameters[first_position : first_position + _MOST])
        self._client.log_dict(self._id, json.loads(json.dumps(run.config)), "config.json")

    def log(self, values: Mapping[str, float], step: int, time_s: float) -> None:
        """All numbers at once, at the time of the step."""
        step_time_ms = round(time_s * 1000)
        mlflow_metrics = [
            self._entities.Metric(_name(metric_name), metric_value, step_time_ms, step)
            for metric_name, metric_value in values.items()
        ]
        self._client.log_batch(self._id, metrics=mlflow_metrics)

    def finish(self, summary: Mapping[str, Any], plot: Path, step: int) -> None:
        """Two artifacts: `summary.json` and the curves."""
        self._client.log_dict(self._id, json.loads(json.dumps(summary)), "summary.json")
        self._client.log_artifact(self._id, str(plot))

    def close(self, *, finished: bool) -> None:
        """The run's state in MLflow."""
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


def _name(name: str) -> str:
    """A name that MLflow takes: letters, digits and `_-. /:`, and no path that means another one."""
    path_parts = [path_part for path_part in re.sub(r"[^\w\-. /:]", "_", name).split("/") if path_part.strip(".")]
    return "/".join(path_parts) or "_"


def _scalars(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, object]]:
    """Every scalar of a nested table, as `table.key`; lists are JSON."""
    for setting_key, setting_value in values.items():
        if isinstance(setting_value, Mapping):
            yield from _scalars(cast("Mapping[str, Any]", setting_value), f"{above}{setting_key}.")
        elif isinstance(setting_value, list):
            yield above + setting_key, json.dumps(setting_value)
        elif setting_value is not None:
            yield above + setting_key, setting_value
