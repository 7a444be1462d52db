"""The `[cluster]` table of a run file: who starts the run's processes, where, and which store they share.

Numbers of processes may be given here or in the sections of the parts (`engine.replicas`, `rollout.workers`,
`train.parallel.ranks`), where the rest of the code reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self, cast

from pydantic import BaseModel, Field, field_validator, model_validator

from agentrl.config.sections import Count, Positive, Section
from agentrl.errors import ConfigError

_COUNTS = (  # key of [cluster], section and key that it stands for
    ("engine.replicas", "engine.replicas"),
    ("workers.replicas", "rollout.workers"),
    ("learner.ranks", "train.parallel.ranks"),
)


_ADDRESS = "give postgresql://user@host/database; false, or nothing, is SQLite"


def _without_secrets(url: object) -> str:
    return str(url).rpartition("@")[2].partition("?")[0]


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


class Split(NamedTuple):
    """How many engines the run has (of each policy that learns), and how many ranks its learner."""

    engines: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.engines} + {self.ranks}"


class ControllerSettings(Section):
    """Moves places between engines and the learner's ranks while the run goes on, if that trains more tokens a second.
    Left out, nothing moves."""

    engines: Annotated[tuple[int, int], Field(strict=False)]  # at least, at most
    ranks: list[Count]  # numbers of ranks that the learner may have, as [1, 2, 4]
    every_s: Positive = 60.0  # between two looks
    window_steps: Annotated[int, Field(ge=4)] = 16  # steps that a look judges by; no step counts in two looks
    agree: Count = 3  # looks in a row that must see the same gain
    gain: Positive = 0.1  # share of more tokens trained a second that a move has to promise
    horizon_s: Positive = 3600.0  # within it a move pays for itself, and is not taken back unless it did harm
    margin: Positive = 2.0  # times the measured cost of a move that it has to earn


class Cluster(Section):
    """Where a run's processes are, and what several hosts share."""

    launcher: Literal["local", "ray"] = "local"  # who starts the processes: this machine, or Ray on its nodes
    address: str = "auto"  # of the Ray cluster: HOST:PORT of its head, or the one that this machine belongs to
    store: str | None = None  # postgresql://user@host/database; default: SQLite
    engine: EnginePlaces = EnginePlaces()
    learner: LearnerPlaces = LearnerPlaces()
    workers: WorkerPlaces = WorkerPlaces()
    controller: ControllerSettings | None = None
    place_deadline_s: Positive = 300.0  # until Ray has found a node for a process: its autoscaler may start one
    head_away_s: Positive = 2.0  # Ray's head refuses connections for so long: the run leaves, to join the next one
    lease_s: Positive = 20.0  # cut off from the run, a process ends itself
    store_deadline_s: Positive = 120.0  # the run waits so long for a database that does not answer, then it ends

    @field_validator("store", mode="before")
    @classmethod
    def _of_postgresql(cls, store: Any) -> Any:
        if isinstance(store, list):
            several = [_without_secrets(url) for url in cast("list[object]", store)]
            raise ConfigError("cluster.store", several, f"a run's store is one database: {_ADDRESS}")
        if isinstance(store, str) and not store.startswith(("postgresql://", "postgres://")):
            raise ConfigError("cluster.store", _without_secrets(store), _ADDRESS)
        return cast("object", store)

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
    @property
    def places(self) -> Sequence[object]: ...


class _Parallel(Protocol):
    @property
    def ranks(self) -> int: ...


class _Train(Protocol):
    @property
    def device(self) -> str: ...
    @property
    def parallel(self) -> _Parallel: ...
    def over(self, ranks: int) -> Self: ...


def splits(cluster: Cluster, begins: Split) -> list[Split]:
    """What the controller of a run that `begins` so may choose from, by ranks: each with as many engines as then have a
    place. GPUs are what moves; CPUs if the learner takes none."""
    assert cluster.controller is not None
    on_gpus = cluster.learner.gpus > 0
    engine, rank = (part.gpus if on_gpus else part.cpus for part in (cluster.engine, cluster.learner))
    places, (least, most) = begins.engines * engine + begins.ranks * rank, cluster.controller.engines
    found = [
        Split(int(min(most, (places - ranks * rank) // (engine or 1))), ranks)
        for ranks in sorted({*cluster.controller.ranks})
    ]
    return [split for split in found if split.engines >= least]


def check(cluster: Cluster, engine: _Engine, train: _Train, *, several: bool) -> None:
    """Raises ConfigError for what Ray's processes cannot do, for GPUs that nobody reserved, or for a controller that
    has nothing to move. `several`: more than one policy learns."""
    if cluster.controller is not None:
        _check_controller(cluster, cluster.controller, engine, train, several=several)
    if not cluster.on_ray:
        for name, own in (("engine", "engine.gpus"), ("learner", "train.device")):
            if gpus := getattr(cluster, name).gpus:
                hint = (
                    f"Ray gives them away: give cluster.launcher = 'ray', or leave it out ({own} names this machine's)"
                )
                raise ConfigError(f"cluster.{name}.gpus", gpus, hint)
        return
    if engine.gpus:
        hint = "Ray chooses them: leave it out, and give cluster.engine = { gpus = 1 }"
        raise ConfigError("engine.gpus", engine.gpus, hint)
    if cluster.engine.gpus and (engine.kind == "embedded" or engine.urls):
        hint = "it is for replicas of vLLM that the run starts: give 0"
        raise ConfigError("cluster.engine.gpus", cluster.engine.gpus, hint)
    if train.device != "cpu" and not cluster.learner.gpus:
        hint = f"train.device = {train.device!r} needs one: give cluster.learner = {{ gpus = 1 }}"
        raise ConfigError("cluster.learner.gpus", 0, hint)


def _check_controller(
    cluster: Cluster, controller: ControllerSettings, engine: _Engine, train: _Train, *, several: bool
) -> None:
    key, (least, most) = "cluster.controller", controller.engines
    if not 1 <= least <= most:
        raise ConfigError(f"{key}.engines", controller.engines, "give the fewest, at least 1, and the most, as [1, 4]")
    if engine.urls or several:
        why = "somebody else started the engines (engine.urls)" if engine.urls else "several policies share the places"
        raise ConfigError(key, controller.model_dump(), f"{why}: leave it out")
    if not cluster.on_ray and (engine.gpus or train.device != "cpu"):
        hint = "a controller moves GPUs that Ray gives away: give 'ray'; a cluster of this machine alone will do"
        raise ConfigError("cluster.launcher", cluster.launcher, hint)
    for ranks in controller.ranks:
        train.over(ranks)
    begins = Split(len(engine.places), train.parallel.ranks)
    found = splits(cluster, begins)
    if begins not in found or len(found) < 2:
        may = ", ".join(map(str, found)) or "none"
        hint = f"of the places of {begins} (engines + ranks) these come: {may}; give bounds with {begins} and another"
        raise ConfigError(f"{key}.ranks", controller.ranks, hint)
