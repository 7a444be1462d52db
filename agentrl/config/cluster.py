"""The `[cluster]` table of a run file: who starts the run's processes, where, and which store they share.

How many processes there are stands in the sections of the parts (`engine.replicas`, `rollout.workers`,
`train.parallel.ranks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self, cast

from pydantic import Field, field_validator

from agentrl.config.sections import Count, Positive, Section
from agentrl.errors import ConfigError

_ADDRESS = "give postgresql://user@host/database; false, or nothing, is SQLite"


def _without_secrets(url: object) -> str:
    # Errors are printed and logged, and what stands before the @ or behind the ? may be a password.
    return str(url).rpartition("@")[2].partition("?")[0]


class EnginePlaces(Section):
    """Resources that Ray reserves for the engines."""

    gpus: Annotated[int, Field(ge=0)] = 0
    """Number of GPUs that Ray reserves for each engine; vLLM splits its layers over several. With `cluster.launcher =
    "local"` it must be 0: `engine.replicas` names the GPUs there."""

    cpus: Positive = 1.0
    """Number of CPUs that Ray reserves for each engine."""


class LearnerPlaces(Section):
    """Resources that Ray reserves for the learner, whose ranks are on one node."""

    gpus: Annotated[int, Field(ge=0)] = 0
    """Number of GPUs that Ray reserves for each rank. With `cluster.launcher = "local"` it must be 0: `train.device`
    names the GPU there."""

    cpus: Positive = 1.0
    """Number of CPUs that Ray reserves for each rank."""


class WorkerPlaces(Section):
    """Resources that Ray reserves for the workers."""

    cpus: Positive = 1.0
    """Number of CPUs that Ray reserves for each worker."""


class Split(NamedTuple):
    """How many engines the run has (of each policy that learns), and how many ranks its learner."""

    engines: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.engines} + {self.ranks}"


class ControllerSettings(Section):
    """Moves places between the engines and the learner's ranks while the run goes on, if that trains more tokens per
    second. Without this table, nothing moves."""

    engines: Annotated[tuple[int, int], Field(strict=False)]
    """Fewest and most engines, such as `[4, 7]`."""

    ranks: list[Count]
    """Possible numbers of the learner's ranks, such as `[1, 2, 4]`; `train.parallel.ranks` must be one of them."""

    gain: Positive = 0.1
    """Smallest gain in trained tokens per second that a move must promise, as a share (0.1 is 10%). A move that loses
    this share is undone at the next look, if that is worth its cost."""


class Cluster(Section):
    """Placement of a run's processes, and the store that several hosts share."""

    launcher: Literal["local", "ray"] = "local"
    """Launcher of the run's processes: on this machine (`local`), or on the nodes of a Ray cluster (`ray`)."""

    address: str = "auto"
    """Address of the Ray cluster: `HOST:PORT` of its head, or `auto` for this machine's cluster."""

    store: str | None = None
    """PostgreSQL database of the run's store, `postgresql://user@host/database`. Without it, the store is SQLite, and
    Ray places all processes on the machine where the run starts."""

    engine: EnginePlaces = EnginePlaces()
    learner: LearnerPlaces = LearnerPlaces()
    workers: WorkerPlaces = WorkerPlaces()
    controller: ControllerSettings | None = None

    place_deadline_s: Positive = 300.0
    """Seconds to wait until Ray finds a node for a process, which its autoscaler may have to start. A run also waits
    this long for Ray's head when it joins, and leaves a head that is silent for this time."""

    head_away_s: Positive = 2.0
    """Seconds for which Ray's head may refuse connections before the run leaves its cluster; with `--keep-alive` it
    joins the next one. If the head keeps its state on disk or in Redis, raise it to the time of a restart, below the 60
    seconds after which Ray gives up."""

    lease_s: Positive = 20.0
    """Seconds without contact to the run after which a process on a Ray node ends itself, and counts as dead."""

    store_deadline_s: Positive = 120.0
    """Seconds to wait for a database that does not answer before the run ends."""

    @field_validator("store", mode="before")
    @classmethod
    def _of_postgresql(cls, store: Any) -> Any:
        if isinstance(store, list):
            store_urls = [_without_secrets(store_url) for store_url in cast("list[object]", store)]
            raise ConfigError("cluster.store", store_urls, f"a run's store is one database: {_ADDRESS}")
        if isinstance(store, str) and not store.startswith(("postgresql://", "postgres://")):
            raise ConfigError("cluster.store", _without_secrets(store), _ADDRESS)
        return cast("object", store)

    @property
    def on_ray(self) -> bool:
        """Whether Ray starts the run's processes."""
        return self.launcher == "ray"


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
    """Return the splits, by ranks, from which the controller of a run that begins with `begins` may choose: each with
    as many engines as then have a place. GPUs are what moves; CPUs if the learner takes none."""
    assert cluster.controller is not None
    on_gpus = cluster.learner.gpus > 0
    units_of_engine = cluster.engine.gpus if on_gpus else cluster.engine.cpus
    units_of_rank = cluster.learner.gpus if on_gpus else cluster.learner.cpus
    all_units = begins.engines * units_of_engine + begins.ranks * units_of_rank
    fewest_engines, most_engines = cluster.controller.engines
    possible = [
        Split(int(min(most_engines, (all_units - rank_count * units_of_rank) // (units_of_engine or 1))), rank_count)
        for rank_count in sorted({*cluster.controller.ranks})
    ]
    return [possible_split for possible_split in possible if possible_split.engines >= fewest_engines]


def check(cluster: Cluster, engine: _Engine, train: _Train, *, several: bool) -> None:
    """Raises ConfigError for what Ray's processes cannot do, for GPUs that nobody reserved, or for a controller that
    has nothing to move. `several`: more than one policy learns."""
    if cluster.controller is not None:
        _check_controller(cluster, cluster.controller, engine, train, several=several)
    if not cluster.on_ray:
        for part_name, field_name in (("engine", "engine.replicas"), ("learner", "train.device")):
            if gpu_count := getattr(cluster, part_name).gpus:
                own_setting = f"{field_name} is for this machine"
                hint = f"Ray gives them away: give cluster.launcher = 'ray', or leave it out; {own_setting}"
                raise ConfigError(f"cluster.{part_name}.gpus", gpu_count, hint)
        return
    if engine.gpus:
        hint = "Ray chooses GPUs: give the number of engines, and cluster.engine = { gpus = 1 }"
        raise ConfigError("engine.replicas", engine.gpus, hint)
    if cluster.engine.gpus and (engine.kind == "embedded" or engine.urls):
        hint = "it is for replicas of vLLM that the run starts: give 0"
        raise ConfigError("cluster.engine.gpus", cluster.engine.gpus, hint)
    if train.device != "cpu" and not cluster.learner.gpus:
        hint = f"train.device = {train.device!r} needs one: give cluster.learner = {{ gpus = 1 }}"
        raise ConfigError("cluster.learner.gpus", 0, hint)


def _check_controller(
    cluster: Cluster, controller: ControllerSettings, engine: _Engine, train: _Train, *, several: bool
) -> None:
    field_name, (fewest_engines, most_engines) = "cluster.controller", controller.engines
    if not 1 <= fewest_engines <= most_engines:
        hint = "give the fewest, at least 1, and the most, as [1, 4]"
        raise ConfigError(f"{field_name}.engines", controller.engines, hint)
    if engine.urls or several:
        reason = (
            "somebody else started the engines (engine.urls)" if engine.urls else "several policies share the places"
        )
        raise ConfigError(field_name, controller.model_dump(), f"{reason}: leave it out")
    if not cluster.on_ray and (engine.gpus or train.device != "cpu"):
        hint = "a controller moves GPUs that Ray gives away: give 'ray'; a cluster of this machine alone will do"
        raise ConfigError("cluster.launcher", cluster.launcher, hint)
    # Every number is tried before the run starts: one that divides nothing would end the run at the move to it, hours
    # later.
    for rank_count in controller.ranks:
        train.over(rank_count)
    first_split = Split(len(engine.places), train.parallel.ranks)
    possible = splits(cluster, first_split)
    if first_split not in possible or len(possible) < 2:
        possible_splits = ", ".join(map(str, possible)) or "none"
        problem = f"of the places of {first_split} (engines + ranks) these come: {possible_splits}"
        hint = f"{problem}; give bounds with {first_split} and another"
        raise ConfigError(f"{field_name}.ranks", controller.ranks, hint)
