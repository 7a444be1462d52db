"""Which GPUs engines and learner may be on, and how they may share one. Owns the rules; `agentrl.config` applies them.

Engine and learner on one GPU are *colocated*. Both may stay there (`engine.sync = "ipc"`), or take turns
(`engine.colocated`): the engine sleeps while the learner steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from agentrl.config.train import Train
from agentrl.errors import ConfigError


class _Engine(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def sync(self) -> str: ...
    @property
    def colocated(self) -> bool: ...
    @property
    def gpus(self) -> Sequence[object]: ...
    @property
    def replicas(self) -> object: ...
    @property
    def places(self) -> Sequence[Sequence[int]]: ...
    @property
    def urls(self) -> Sequence[str]: ...


def _taken(engine: _Engine) -> list[int]:
    """The GPUs of the engines that the run starts: the first one where `engine.replicas` names none."""
    return [gpu_index for engine_gpus in engine.places for gpu_index in engine_gpus or [0]]


def start_together(engine: _Engine, *, on_ray: bool) -> bool:
    """Whether all replicas of a policy may start at once: no two of them measure how much of one GPU is free."""
    engine_gpus = _taken(engine)
    # An engine takes a share of the memory that it finds free. Two that measure at once both count the same memory, and
    # the second one to take it fails.
    return _each_alone(engine, on_ray) or len(set(engine_gpus)) == len(engine_gpus)


def starts_apart(engine: _Engine, train: Train, *, on_ray: bool) -> bool:
    """Whether the learner may start while engines do: it is on no GPU whose free memory they measure."""
    return not engine.colocated and (_each_alone(engine, on_ray) or not set(train.gpus) & set(_taken(engine)))


def _each_alone(engine: _Engine, on_ray: bool) -> bool:
    """Whether no two processes of a run can be on one GPU: Ray gives each its own."""
    return on_ray or engine.kind == "embedded"


def check_memory_sync(engine: _Engine, train: Train, *, sync: str, on_ray: bool) -> None:
    """Raises ConfigError for weights that cannot go from memory to memory: NCCL joins no GPU with itself, CUDA IPC
    leaves no GPU."""
    device = train.device
    if train.lora_rank:
        hint = f"train.lora_rank = {train.lora_rank} trains an adapter: 'auto' sends it alone, 'full' merged"
        raise ConfigError("engine.sync", sync, hint)
    if device == "cpu":
        hint = f"engine.sync = {sync!r} sends what lies in a GPU's memory: give 'cuda', or engine.sync = 'auto'"
        raise ConfigError("train.device", device, hint)
    if sync == "ipc" and on_ray:
        raise ConfigError(
            "engine.sync", sync, "it leaves no GPU, and Ray may place engine and learner apart: give 'nccl'"
        )
    if engine.urls or on_ray:
        return
    engine_gpus, learner_gpus = _taken(engine), set(train.gpus)
    engine_place = f"the run's engines are on GPU {', '.join(map(str, sorted(set(engine_gpus))))}"
    if sync == "ipc" and len(learner_gpus) > 1:
        hint = f"the learner has {len(learner_gpus)} ranks and sends from one of them: give 'nccl'"
        raise ConfigError("engine.sync", sync, hint)
    if sync == "ipc" and set(engine_gpus) != learner_gpus:
        hint = f"{engine_place}, and 'ipc' shares one: have the learner and all engines on it, or give 'nccl'"
        raise ConfigError("train.device", device, hint)
    if sync == "nccl" and learner_gpus & set(engine_gpus):
        hint = f"{engine_place}: give the learner another one, as 'cuda:1', or engine.sync = 'ipc' to share one"
        raise ConfigError("train.device", device, hint)
    if sync == "nccl" and len(set(engine_gpus)) != len(engine_gpus):
        raise ConfigError("engine.replicas", engine.replicas, "NCCL joins each GPU once: give each replica its own")


def check_colocated(engine: _Engine, train: Train, *, form: str, on_ray: bool, others: Collection[str]) -> None:
    """Raises ConfigError if engine and learner cannot take turns. `others` are models besides the policy that have
    engines of their own."""
    if not engine.colocated:
        return

    def refuse(hint: str) -> ConfigError:
        return ConfigError("engine.colocated", True, hint)

    if engine.urls:
        raise refuse("only an engine that the run starts sleeps at its word: leave engine.urls out")
    if on_ray:
        raise refuse("Ray may place engine and learner apart: give cluster.launcher = 'local'")
    if train.parallel.ranks > 1:
        raise refuse(f"one GPU has room for one rank, and train.parallel.ranks = {train.parallel.ranks}: give 1")
    if form == "memory":
        raise ConfigError(
            "engine.sync", engine.sync, "a learner that has left the GPU sends no memory of it: give 'auto'"
        )
    if train.optimizer == "adamw8bit":
        raise ConfigError("train.optimizer", "adamw8bit", "engine.colocated moves plain tensors: give 'adamw'")
    if others:
        raise refuse(f"{', '.join(sorted(others))} would keep an engine on the same GPU: leave it out")
    engine_gpus, learner_gpus = set(_taken(engine)), set(train.gpus)
    if engine.kind == "embedded" and learner_gpus:
        hint = "the embedded engine is on the CPU and shares no GPU: leave it out, or give engine.kind = 'vllm'"
        raise refuse(hint)
    if engine.kind == "vllm" and engine_gpus != learner_gpus:
        engine_place = f"the engine is on GPU {', '.join(map(str, sorted(engine_gpus)))}"
        raise ConfigError("train.device", train.device, f"{engine_place}, and engine.colocated shares it: give 'cuda'")
