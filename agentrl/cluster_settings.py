"""The `[cluster]` table of a run file: who starts the run's processes, where, and which store they share.

Numbers of processes may be given here or in the sections of the parts (`engine.replicas`, `rollout.workers`,
`train.parallel.ranks`), where the rest of the code reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol, cast

from pydantic import BaseModel, Field, model_validator

from agentrl.errors import ConfigError
from agentrl.settings import Count, Positive, Section

_COUNTS = (  # key of [cluster], section and key that it stands for
    ("engine.replicas", "engine.replicas"),
    ("workers.replicas", "rollout.workers"),
    ("learner.ranks", "train.parallel.ranks"),
)


class EnginePlaces(Section):
    """What Ray reserves for the engines."""

    replicas: Count | None = None  # the same as engine.replicas
    gpus: Annotated[int, Field(ge=0)] = 0  # of each; vLLM splits its layers over several
    cpus: Positive = 1.0  # of each


class LearnerPlaces(Section):
    """What Ray reserves for the learner, whose ranks are on one node."""

    ranks: Count | None = None  # the same as train.parallel.ranks
    gpus: Annotated[int, Field(ge=0)] = 0  # of each rank
    cpus: Positive = 1.0  # of each rank


class WorkerPlaces(Section):
    """What Ray reserves for the workers."""

    replicas: Count | None = None  # the same as rollout.workers
    cpus: Positive = 1.0  # of each


class Cluster(Section):
    """Where a run's processes are, and what several hosts share."""

    launcher: Literal["local", "ray"] = "local"  # who starts the processes: this machine, or Ray on its nodes
    address: str = "auto"  # of the Ray cluster: HOST:PORT of its head, or the one that this machine belongs to
    store: str | list[str] | None = None  # postgresql://user@host/database, or several; default: SQLite
    engine: EnginePlaces = EnginePlaces()
    learner: LearnerPlaces = LearnerPlaces()
    workers: WorkerPlaces = WorkerPlaces()
    place_deadline_s: Positive = 300.0  # until Ray has found a node for a process: its autoscaler may start one
    lease_s: Positive = 20.0  # cut off from the run, a process ends itself
    store_deadline_s: Positive = 120.0  # the run waits so long for a database that does not answer, then it ends

    @property
    def on_ray(self) -> bool:
        """Whether Ray starts the run's processes."""
        return self.launcher == "ray"


class WithCluster(BaseModel):
    """A run file's document with the numbers of `[cluster]` in the sections that they stand for."""

    @model_validator(mode="before")
    @classmethod
    def _of_cluster(cls, document: Any) -> Any:
        if isinstance(document, dict) and isinstance(cast("dict[str, Any]", document).get("cluster"), dict):
            return _spread(cast("dict[str, Any]", document))
        return cast(object, document)


def _spread(document: dict[str, Any]) -> dict[str, Any]:
    for key, stands_for in _COUNTS:
        value = _get(document["cluster"], key)
        if value is None:
            continue
        if (other := _get(document, stands_for)) not in (None, value):
            raise ConfigError(f"cluster.{key}", value, f"{stands_for} = {other!r} says another number: give one")
        document = _with(document, stands_for.split("."), value)
    return document


def _get(table: Any, key: str) -> Any:
    for part in key.split("."):
        table = cast("dict[str, Any]", table).get(part) if isinstance(table, dict) else getattr(table, part, None)
    return table


def _with(table: Any, keys: list[str], value: Any) -> Any:
    first, *rest = keys
    if isinstance(table, BaseModel):
        inner = _with(getattr(table, first), rest, value) if rest else value
        return table.model_copy(update={first: inner})
    found = cast("dict[str, Any]", table)
    return {**found, first: _with(found.get(first, {}), rest, value) if rest else value}


class _Engine(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def gpus(self) -> Sequence[object]: ...
    @property
    def urls(self) -> Sequence[str]: ...


def check(cluster: Cluster, engine: _Engine, *, device: str, sync: str) -> None:
    """Raises ConfigError for what Ray's processes cannot do, or for GPUs that nobody reserved."""
    if not cluster.on_ray:
        return
    if engine.gpus:
        hint = "Ray chooses them: leave it out, and give cluster.engine = { gpus = 1 }"
        raise ConfigError("engine.gpus", engine.gpus, hint)
    if cluster.engine.gpus and (engine.kind == "embedded" or engine.urls):
        hint = "it is for replicas of vLLM that the run starts: give 0"
        raise ConfigError("cluster.engine.gpus", cluster.engine.gpus, hint)
    if sync == "ipc":
        hint = "it leaves no GPU, and Ray may place engine and learner apart: give 'nccl'"
        raise ConfigError("engine.sync", sync, hint)
    if device != "cpu" and not cluster.learner.gpus:
        hint = f"train.device = {device!r} needs one: give cluster.learner = {{ gpus = 1 }}"
        raise ConfigError("cluster.learner.gpus", 0, hint)
