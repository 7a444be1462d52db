"""The table `[train]` of a run file: the optimizer, its budgets, and how the learner's process is watched.

Owns what each setting may be by itself and beside the others of its table. Never knows the rest of a run file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from agentrl.config.sections import Count, Gpus, Positive, Section
from agentrl.errors import ConfigError

HEADS: Final = ("num_attention_heads", "num_key_value_heads")
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""What models' config.json calls the numbers of what ranks divide among them."""


def check_divides(key: str, ranks: int, model: Mapping[str, Any], counts: Sequence[str]) -> None:
    """Raises ConfigError if so many ranks, a setting of `[train.parallel]`, cannot divide a number that the config.json
    of a model has, or if it has none of them."""
    found = {name: count for name in counts if isinstance(count := model.get(name), int) and count}
    if ranks > 1 and not found:
        raise ConfigError(f"train.parallel.{key}", ranks, f"the model's config.json has no {counts[0]}: give 1")
    for name, count in found.items():
        if count % ranks:
            may = " or ".join(str(divisor) for divisor in range(1, ranks) if count % divisor == 0)
            hint = f"the model's {name} = {count} cannot be divided by it: give {may}"
            raise ConfigError(f"train.parallel.{key}", ranks, hint)


RoutingReplay = Literal["auto", "on", "off"]


def check_experts(engine: str, routed: bool, replay: RoutingReplay) -> None:
    """Raises ConfigError for an engine that has no experts to tell, and for a replay of what none tells."""
    if routed and engine != "vllm":
        why = "the embedded engine has no mixtures" if engine == "embedded" else "SGLang does not say their shape"
        raise ConfigError("engine.routed_experts", True, f"{why}: take 'vllm'")
    if replay == "on" and not routed:
        raise ConfigError("train.routing_replay", "on", "no experts are journaled: set engine.routed_experts = true")


Decay = Annotated[float, Field(ge=0, lt=1)]


class ParallelPlan(Section):
    """The learner over ranks: processes of its machine, each with a device of its own. Weights, gradients and the state
    of the optimizer are cut into a shard for each rank (FSDP2), the passes of an update are divided among them: each
    rank, or each `context` times `tensor` of them together, computes one at a time."""

    ranks: Count = 1  # processes that share the learner's work; 1: nothing is divided
    tensor: Count = 1  # ranks that compute each pass together, of each layer some heads and neurons; divides ranks
    context: Count = 1  # ranks, or groups of `tensor`, that compute each pass together, each for some of its tokens
    expert: Count = 1  # ranks that keep a mixture's experts apart and send each other tokens; divides ranks
    gpus: Gpus | None = None  # of ranks 0, 1, …; default: from that of train.device on
    deadline_s: Positive = 120.0  # of a collective or write: the learner starts again and names the rank that was late

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.gpus is not None and not len(set(self.gpus)) == len(self.gpus) == self.ranks:
            raise ConfigError("train.parallel.gpus", self.gpus, f"name {self.ranks} GPUs: train.parallel.ranks")
        for name in ("tensor", "expert"):
            if self.ranks % (width := getattr(self, name)):
                may = " or ".join(str(divisor) for divisor in range(1, self.ranks + 1) if self.ranks % divisor == 0)
                hint = f"it has to divide train.parallel.ranks = {self.ranks}: give {may}"
                raise ConfigError(f"train.parallel.{name}", width, hint)
        if self.ranks % (self.context * self.tensor):
            most = self.ranks // self.tensor
            may = " or ".join(str(divisor) for divisor in range(1, most + 1) if most % divisor == 0)
            beside = f"train.parallel.ranks = {self.ranks}"
            if self.tensor > 1:
                beside += f" by train.parallel.tensor = {self.tensor}"
            raise ConfigError("train.parallel.context", self.context, f"it has to divide {beside}: give {may}")
        return self


class Train(Section):
    """The optimizer and its budgets."""

    steps: Count = 100  # optimizer steps
    optimizer: Literal["adamw", "adamw8bit", "muon", "sgd"] = "adamw"  # muon: of matrices, AdamW of the rest
    offload_optimizer: bool = False  # moments, and masters of weights, wait in host memory; the same numbers, slower
    lr: Positive = 5e-4  # learning rate; that of AdamW suits muon too
    warmup_steps: Annotated[int, Field(ge=0)] = 5  # in which the learning rate rises from 0
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"  # how it falls after these, until the last step
    lr_min: Annotated[float, Field(ge=0, lt=1)] = 0.0  # of the last step, or 0 after it; a critic's falls in proportion
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # of matrices, not of norms and biases
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)  # of AdamW
    momentum: Annotated[float | None, Field(ge=0, lt=1)] = None  # of muon (default: 0.95) and sgd (default: 0)
    grad_clip: Positive | None = 1.0  # largest norm of the gradient
    max_skipped: Annotated[int, Field(ge=0)] = 3  # updates in a row that may be skipped since a gradient is not finite
    tokens_per_batch: Count = 4096  # packed tokens of one forward pass; gradients accumulate over passes
    prompt_once: bool = True  # compute the prompt of a group that is larger than a pass once, not in each of its passes
    logits_mb: Count = 1024  # of memory for logits: a pass whose logits do not fit computes them in parts, and twice
    threads: Count = 1  # of arithmetic in the learner
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"  # of the learner: cpu, cuda, cuda:1
    dtype: Literal["float32", "bfloat16"] = "float32"  # of a pass, and of frozen matrices
    weights: Literal["float32", "bfloat16"] = "float32"  # of trained matrices between passes; embedding: float32
    master_weights: bool = True  # of bfloat16 weights, in float32; false: each update is rounded up or down at random
    minibatches: Count = 1  # optimizer updates that share a step's groups
    epochs: Count = 1  # how often a step goes over its groups
    routing_replay: RoutingReplay = "auto"  # compute tokens with journaled experts; on: the run ends where one has none
    balance_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0  # of the loss that evens a mixture's load
    peak_tflops: Positive | None = None  # of the learner's device, for the metric mfu; default: as its vendor states it
    gradient_checkpointing: bool = False  # recompute activations in the backward pass instead of keeping them
    offload_activations: bool = False  # keep what layers began with in host memory until the backward pass
    compile: bool = False  # fuse what a layer computes: faster passes for half a minute at the start and a C++ compiler
    attention: Literal["auto", "sdpa", "varlen", "flex"] = "auto"  # over trees; auto: the fastest that works here
    lora_rank: Annotated[int, Field(ge=0)] = 0  # train a LoRA adapter of this rank over frozen weights; 0: all weights
    lora_alpha: Count | None = None  # its scale times the rank; default: twice the rank
    lora_targets: list[str] = Field(default_factory=list)  # ends of layer names; default: all but output and routers
    checkpoint_every: Count = 20  # steps, or
    checkpoint_every_s: Positive = 600.0  # seconds, whichever is over first: a learner that dies loses no more
    keep_checkpoints: Count = 2  # the newest ones; older ones are removed
    async_checkpoints: bool = True  # copy the state to host memory, where there is room, and write it beside next steps
    hash_every: Annotated[int, Field(ge=0)] = 1  # steps between records of the weights' hash, for retrain; 0: none
    liveness_deadline_s: Positive = 60.0  # a learner stopped for so long is started again; so is a kept supervisor
    progress_deadline_s: Positive = 300.0  # so is one that ends no pass, and writes no file, for so long
    stall_deadline_s: Positive = 600.0  # no turn, answer, score, episode end or step for so long: the run fails
    parallel: ParallelPlan = ParallelPlan()

    def lr_share(self, step: int) -> float:
        """What step number `step` (from 1) has of the learning rate."""
        if step <= self.warmup_steps:
            return step / (self.warmup_steps + 1)
        last = self.steps - self.warmup_steps - (1 if self.lr_min else 0)  # to 0 it falls in the step after the last
        done = min(step - self.warmup_steps - 1, self.steps - self.warmup_steps - 1) / max(1, last)
        falls = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}
        least = self.lr_min / self.lr
        return least + (1.0 - least) * falls[self.lr_schedule]

    @model_validator(mode="after")
    def _of_a_schedule(self) -> Self:
        if self.lr_min and self.lr_schedule == "constant":
            raise ConfigError(
                "train.lr_min", self.lr_min, "nothing falls to it: set train.lr_schedule, or leave it out"
            )
        if self.lr_min >= self.lr:
            raise ConfigError("train.lr_min", self.lr_min, f"must be below train.lr = {self.lr}")
        return self

    def over(self, ranks: int) -> Self:
        """The same over so many ranks. Raises ConfigError if it cannot be."""
        parallel = {**self.parallel.model_dump(), "ranks": ranks}
        return type(self).model_validate({**self.model_dump(), "parallel": parallel})

    @property
    def gpus(self) -> list[int]:
        """Those of the learner's ranks; none on a CPU."""
        if self.device == "cpu":
            return []
        first = int(self.device.removeprefix("cuda").removeprefix(":") or 0)
        return self.parallel.gpus or list(range(first, first + self.parallel.ranks))

    @model_validator(mode="after")
    def _of_ranks(self) -> Self:
        if self.parallel.gpus and self.device == "cpu":
            raise ConfigError("train.parallel.gpus", self.parallel.gpus, "the learner is on the CPU: set train.device")
        if self.parallel.gpus and self.device != "cuda":
            hint = f"train.parallel.gpus = {self.parallel.gpus} names the learner's GPUs: give 'cuda'"
            raise ConfigError("train.device", self.device, hint)
        if self.parallel.ranks > 1 and self.compile:
            hint = f"train.parallel.ranks = {self.parallel.ranks} gathers the layers that it compiles: give false"
            raise ConfigError("train.compile", True, hint)
        return self

    @model_validator(mode="after")
    def _of_an_optimizer(self) -> Self:
        if self.momentum is not None and self.optimizer not in ("muon", "sgd"):
            raise ConfigError("train.momentum", self.momentum, f"{self.optimizer} has none: leave it out")
        if self.optimizer == "adamw8bit" and self.offload_optimizer:
            hint = "its moments of 8 bits stay beside the weights: give false, or train.optimizer = 'adamw'"
            raise ConfigError("train.offload_optimizer", True, hint)
        over = f"over {self.parallel.ranks} ranks (train.parallel.ranks)"
        if self.parallel.ranks > 1 and self.optimizer == "adamw8bit":
            hint = f"{over} its blocks cannot be cut anew: give 'adamw' with train.offload_optimizer = true, or 'muon'"
            raise ConfigError("train.optimizer", self.optimizer, hint)
        if self.parallel.ranks > 1 and self.weights == "bfloat16":
            both = "train.weights" if self.master_weights else "train.weights and train.master_weights"
            hint = f"{over} shards are float32 masters, and layers are gathered in bfloat16 anyway: leave {both} out"
            raise ConfigError("train.weights", self.weights, hint)
        return self

    @model_validator(mode="after")
    def _of_weights(self) -> Self:
        if self.weights == "bfloat16" and self.dtype != "bfloat16":
            raise ConfigError("train.weights", "bfloat16", f"a pass computes in {self.dtype}: set train.dtype")
        if self.weights == "bfloat16" and self.lora_rank:
            hint = "an adapter is trained in float32, and what is below it follows train.dtype: leave it out"
            raise ConfigError("train.weights", "bfloat16", hint)
        if not self.master_weights and self.weights == "float32":
            hint = "weights in float32 are their own masters: set train.weights = 'bfloat16', or leave it out"
            raise ConfigError("train.master_weights", False, hint)
        return self

    @model_validator(mode="after")
    def _of_activations(self) -> Self:
        if self.offload_activations and not self.gradient_checkpointing:
            hint = "it moves what is kept of each layer, and without that weights too: set train.gradient_checkpointing"
            raise ConfigError("train.offload_activations", True, hint)
        return self

    @model_validator(mode="after")
    def _of_an_adapter(self) -> Self:
        if not self.lora_rank:
            for name in ("lora_alpha", "lora_targets"):
                if getattr(self, name):
                    raise ConfigError(f"train.{name}", getattr(self, name), "it is for an adapter: set train.lora_rank")
        if outer := [name for name in self.lora_targets if name.endswith(("lm_head", "embed_tokens"))]:
            raise ConfigError("train.lora_targets", outer, "an adapter leaves embedding and output layer as they are")
        return self
