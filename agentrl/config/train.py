"""The table `[train]` of a run file: the optimizer, its budgets, and how the learner's process is watched.

Owns what each setting may be by itself and beside the others of its table. Never knows the rest of a run file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from agentrl.config.sections import Count, Positive, Section
from agentrl.errors import ConfigError

HEADS: Final = ("num_attention_heads", "num_key_value_heads")
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""What models' config.json calls the numbers of what ranks divide among them."""


def check_divides(key: str, ranks: int, model: Mapping[str, Any], counts: Sequence[str]) -> None:
    """Raises ConfigError if so many ranks, a setting of `[train.parallel]`, cannot divide a number that the config.json
    of a model has, or if it has none of them."""
    count_by_name = {
        count_name: model_count
        for count_name in counts
        if isinstance(model_count := model.get(count_name), int) and model_count
    }
    if ranks > 1 and not count_by_name:
        raise ConfigError(f"train.parallel.{key}", ranks, f"the model's config.json has no {counts[0]}: give 1")
    for count_name, model_count in count_by_name.items():
        if model_count % ranks:
            possible_ranks = " or ".join(str(divisor) for divisor in range(1, ranks) if model_count % divisor == 0)
            hint = f"the model's {count_name} = {model_count} cannot be divided by it: give {possible_ranks}"
            raise ConfigError(f"train.parallel.{key}", ranks, hint)


def check_experts(engine: str, routed: bool | Literal["required"]) -> None:
    """Raises ConfigError for an engine that cannot report experts."""
    if routed and engine != "vllm":
        reason = "the embedded engine has no mixtures" if engine == "embedded" else "SGLang does not say their shape"
        raise ConfigError("engine.routed_experts", routed, f"{reason}: take 'vllm'")


Decay = Annotated[float, Field(ge=0, lt=1)]


class ParallelPlan(Section):
    """Divides the learner over ranks: processes of its machine, each with a device of its own. Weights, gradients and
    the state of the optimizer are cut into a shard for each rank (FSDP2). The passes of an update are divided among the
    ranks: each rank, or each `context` times `tensor` of them together, computes one pass at a time."""

    ranks: Count = 1
    """Number of processes that share the learner's work, each with its own device."""

    tensor: Count = 1
    """Number of ranks that compute each pass together, each with a part of every layer's heads and neurons (tensor
    parallelism). Times `train.parallel.context` it must divide `train.parallel.ranks`."""

    context: Count = 1
    """Number of ranks, or groups of `train.parallel.tensor` ranks, that share the tokens of each pass (context
    parallelism). Times `train.parallel.tensor` it must divide `train.parallel.ranks`. Raise it if one pass or row is
    too long for a rank's memory."""

    expert: Count = 1
    """Number of ranks over which a mixture's experts are divided; tokens travel to the rank that has theirs (expert
    parallelism). It must divide `train.parallel.ranks`. With 1, each rank gathers the experts layer by layer."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for setting_name in ("tensor", "expert"):
            if self.ranks % (setting_value := getattr(self, setting_name)):
                possible_values = " or ".join(
                    str(divisor) for divisor in range(1, self.ranks + 1) if self.ranks % divisor == 0
                )
                hint = f"it has to divide train.parallel.ranks = {self.ranks}: give {possible_values}"
                raise ConfigError(f"train.parallel.{setting_name}", setting_value, hint)
        if self.ranks % (self.context * self.tensor):
            most_groups = self.ranks // self.tensor
            possible_values = " or ".join(
                str(divisor) for divisor in range(1, most_groups + 1) if most_groups % divisor == 0
            )
            divided_number = f"train.parallel.ranks = {self.ranks}"
            if self.tensor > 1:
                divided_number += f" by train.parallel.tensor = {self.tensor}"
            raise ConfigError(
                "train.parallel.context", self.context, f"it has to divide {divided_number}: give {possible_values}"
            )
        return self


class Train(Section):
    """Holds the settings of the optimizer, of its budgets of memory and time, and of the checks on the learner's
    process."""

    steps: Count = 100
    """Number of optimizer steps of the run. A finished run goes on if it is resumed with a larger number."""

    optimizer: Literal["adamw", "adamw8bit", "muon", "sgd"] = "adamw"
    """Optimizer of the trained weights. "muon" updates matrices by Muon, and by AdamW the embedding, the output layer,
    vectors and the fused experts of a mixture. "adamw8bit" stores AdamW's moments in 8 bits, and "sgd" has none, which
    saves memory."""

    offload_optimizer: bool = False
    """Keeps the optimizer's moments, and the float32 masters of bfloat16 weights, in host memory. The numbers stay the
    same; each update is slower. "adamw8bit" excludes it."""

    lr: Positive = 5e-4
    """Learning rate after the warmup. A rate that suits AdamW suits "muon" too."""

    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """Number of first steps in which the learning rate rises from 0 to `train.lr`."""

    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate from the warmup to the last step: it stays ("constant"), or falls to `train.lr_min`
    in a straight line ("linear") or along half a cosine ("cosine")."""

    lr_min: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Learning rate of the last step if it falls, below `train.lr`. With 0, the rate reaches 0 only in the step after.
    A critic's rate falls in proportion."""

    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight decay of matrices; norms and biases have none."""

    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moment, also with "adamw8bit" and where "muon" uses AdamW."""

    grad_clip: Positive | None = 1.0
    """Largest norm of a model's gradient in an update; a larger one is scaled down to it."""

    max_skipped: Annotated[int, Field(ge=0)] = 3
    """Number of updates in a row that may be skipped because the gradient or the loss is not finite. One more ends the
    run."""

    tokens_per_batch: Count = 4096
    """Largest number of tokens in one forward pass, at least `rollout.max_context`; gradients accumulate over the
    passes of an update. Lower it if the learner runs out of memory."""

    logits_mb: Count = 1024
    """Memory in MiB for the logits of a pass. Logits that do not fit are computed in parts, and a second time in the
    backward pass."""

    threads: Count = 1
    """Number of CPU threads of each rank of the learner."""

    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+(,\d+)*)?)$")] = "cpu"
    """Device of the learner: "cpu", "cuda", or GPUs by number. "cuda:1" is the first rank's GPU, and the other ranks
    take those after it; "cuda:0,2,3" names the GPU of each rank."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format in which a pass computes and frozen matrices are stored."""

    weights: Literal["float32", "bfloat16", "bfloat16_alone"] = "float32"
    """Number format of trained matrices between passes, apart from the embedding. "bfloat16" has float32 copies beside
    them for the optimizer, and saves memory only with `train.offload_optimizer`. "bfloat16_alone" has none: updates are
    rounded at random, which saves memory and adds noise. Both need `train.dtype = "bfloat16"`, a single rank and no
    adapter."""

    minibatches: Count = 1
    """Number of optimizer updates into which the groups of a step are divided."""

    epochs: Count = 1
    """Number of times that a step goes over its groups, each time with `train.minibatches` updates."""

    balance_weight: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Weight of the loss that evens the load of the experts of a mixture. 0 leaves it out."""

    gradient_checkpointing: bool | Literal["offload"] = False
    """Recomputes activations in the backward pass instead of keeping them: less memory, a third more computation.
    "offload" also keeps the layers' inputs in host memory, which is slower and saves still more."""

    compile: bool = False
    """Compiles what a layer computes, except attention, for faster passes. It takes half a minute at the start, a C++
    compiler and a single rank."""

    attention: Literal["auto", "sdpa", "varlen", "flex"] = "auto"
    """Attention kernel for prefix trees: "sdpa" works everywhere, "varlen" needs CUDA and bfloat16, "flex" is for CUDA.
    "auto" takes the fastest that works here."""

    lora_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of a LoRA adapter that is trained over frozen weights. 0 trains all weights."""

    lora_alpha: Count | None = None
    """Scale of the adapter times its rank: it multiplies what the adapter adds by `train.lora_alpha` /
    `train.lora_rank`. Without it, twice the rank."""

    lora_targets: list[str] = Field(default_factory=list)
    """Ends of the names of the layers with an adapter, such as "q_proj". An empty list takes all linear layers and
    experts, but no routers. The embedding and the output layer never have one."""

    checkpoint_every: Count = 20
    """Number of steps between checkpoints; one is also written after ten minutes. A learner that dies loses no more
    steps than this, and no more than ten minutes and one step."""

    keep_checkpoints: Count = 2
    """Number of newest checkpoints to keep. Raise it to go back further, for instance with `agentrl retrain`."""

    liveness_deadline_s: Positive = 60.0
    """Seconds for which the learner may be stopped, for instance by SIGSTOP, before it is killed and started again.
    Under `agentrl train --keep-alive` it holds for a supervisor that stands still, too."""

    progress_deadline_s: Positive = 300.0
    """Seconds in which the learner must end a pass or write a file, or it is killed and started again. Raise it if a
    pass takes longer. A rank has half of them to come to a collective or to write more of its checkpoint; the error
    names the late one."""

    stall_deadline_s: Positive = 600.0
    """Seconds without any turn, answer, score, ended episode or step after which the run fails. It must exceed every
    `rewards[].deadline_s`."""

    parallel: ParallelPlan = ParallelPlan()

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
        """Return these settings over so many ranks. Raises ConfigError if that is not possible."""
        parallel = {**self.parallel.model_dump(), "ranks": ranks}
        # Validated anew: `model_copy` would skip the checks, and the number of ranks decides on most of them.
        return type(self).model_validate({**self.model_dump(), "parallel": parallel})

    @property
    def holds_bfloat16(self) -> bool:
        """Whether trained matrices are in bfloat16 between passes, with float32 masters or without."""
        return self.weights != "float32"

    @property
    def gpus(self) -> list[int]:
        """GPUs of the learner's ranks; none on a CPU."""
        if self.device == "cpu":
            return []
        first_gpu, *other_gpus = (int(gpu_number) for gpu_number in (self.device.partition(":")[2] or "0").split(","))
        return [first_gpu, *other_gpus] if other_gpus else list(range(first_gpu, first_gpu + self.parallel.ranks))

    @model_validator(mode="after")
    def _of_ranks(self) -> Self:
        if self.device != "cpu" and not len(set(self.gpus)) == len(self.gpus) == self.parallel.ranks:
            hint = f"name one GPU, or {self.parallel.ranks}, one for each rank (train.parallel.ranks)"
            raise ConfigError("train.device", self.device, hint)
        if self.parallel.ranks > 1 and self.compile:
            hint = f"train.parallel.ranks = {self.parallel.ranks} gathers the layers that it compiles: give false"
            raise ConfigError("train.compile", True, hint)
        return self

    @model_validator(mode="after")
    def _of_an_optimizer(self) -> Self:
        if self.optimizer == "adamw8bit" and self.offload_optimizer:
            hint = "its moments of 8 bits stay beside the weights: give false, or train.optimizer = 'adamw'"
            raise ConfigError("train.offload_optimizer", True, hint)
        over_ranks = f"over {self.parallel.ranks} ranks (train.parallel.ranks)"
        if self.parallel.ranks > 1 and self.optimizer == "adamw8bit":
            problem = f"{over_ranks} its blocks cannot be cut anew"
            hint = f"{problem}: give 'adamw' with train.offload_optimizer = true, or 'muon'"
            raise ConfigError("train.optimizer", self.optimizer, hint)
        if self.parallel.ranks > 1 and self.holds_bfloat16:
            hint = f"{over_ranks} shards are float32 masters, and layers are gathered in bfloat16 anyway: leave it out"
            raise ConfigError("train.weights", self.weights, hint)
        return self

    @model_validator(mode="after")
    def _of_weights(self) -> Self:
        if self.holds_bfloat16 and self.dtype != "bfloat16":
            raise ConfigError("train.weights", self.weights, f"a pass computes in {self.dtype}: set train.dtype")
        if self.holds_bfloat16 and self.lora_rank:
            hint = "an adapter is trained in float32, and what is below it follows train.dtype: leave it out"
            raise ConfigError("train.weights", self.weights, hint)
        return self

    @model_validator(mode="after")
    def _of_an_adapter(self) -> Self:
        if not self.lora_rank:
            for setting_name in ("lora_alpha", "lora_targets"):
                if setting_value := getattr(self, setting_name):
                    hint = "it is for an adapter: set train.lora_rank"
                    raise ConfigError(f"train.{setting_name}", setting_value, hint)
        if outer_targets := [
            target_name for target_name in self.lora_targets if target_name.endswith(("lm_head", "embed_tokens"))
        ]:
            hint = "an adapter leaves embedding and output layer as they are"
            raise ConfigError("train.lora_targets", outer_targets, hint)
        return self
