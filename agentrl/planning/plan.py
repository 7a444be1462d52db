"""Plan of a run on GPUs, before anything starts: bytes, seconds, how to divide the GPUs, and cost.

Bytes of the learner are counted on its own code (`agentrl.learner.memory_budget`); those of engines are their share of
weights and the room that a run gives keys and values. Seconds are a roofline: operations over the vendor's peak times a
stated efficiency, and, for sampling, bytes read over the bandwidth times another; the experts of a mixture are chosen
evenly. Tools, rewards, evaluation and what GPUs send each other take no time here, nor does a prompt's first pass.
Loads torch.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import torch

from agentrl.config import RunConfig, from_json, machine_defaults, to_json
from agentrl.config.train import EXPERTS, HEADS, check_divides
from agentrl.errors import ConfigError, UsageError
from agentrl.host.platform_checks import free_memory_bytes
from agentrl.learner.data.rows import Row
from agentrl.learner.memory_budget import MemoryBudget, held, parameters_of
from agentrl.models.resolve import engine_dtype, model_dir

_EIGHT_BITS = "fp8"  # how the names of eight-bit dtypes begin


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """An engine over `gpus` GPUs has `copies` of its layers, each over `gpus / copies` of them: every GPU has the share
    `1 / parts` of all weights but experts, `1 / apart` of the experts, and `1 / cached` of a token's keys and values.
    `width` are bytes of a weight, `kv` those of a token's keys and values on all GPUs of a copy together; `cache` is
    room for these on each GPU."""

    gpus: int
    copies: int
    parts: int
    apart: int
    cached: int
    width: int
    kv: int
    cache: int

    @classmethod
    def of(cls, config: RunConfig, described: Mapping[str, Any], width: int) -> Self:
        """Return the plan of a run's engine, whose model's config.json has the fields `described` and whose weights
        take `width` bytes each."""
        vllm_options = config.engine.vllm
        layer_count, head_count = described["num_hidden_layers"], described["num_attention_heads"]
        head_size = described.get("head_dim") or described["hidden_size"] // head_count
        kv_heads = described.get("num_key_value_heads") or head_count
        gpu_count = gpus_of(config)
        # Copies have all layers each, and share nothing but the experts under expert parallelism: `parts` divides a
        # copy, `apart` all of them.
        copy_count = _count(vllm_options, "data-parallel-size") * _count(vllm_options, "prefill-context-parallel-size")
        stage_count = _count(vllm_options, "pipeline-parallel-size")
        tensor_width = max(1, gpu_count // (copy_count * stage_count))
        value_bytes = 1 if str(vllm_options.get("kv-cache-dtype")).startswith(_EIGHT_BITS) else 2
        return cls(
            gpus=gpu_count,
            copies=copy_count,
            parts=tensor_width * stage_count,
            apart=gpu_count if vllm_options.get("enable-expert-parallel") else tensor_width * stage_count,
            # Heads of keys and values cannot be cut further than one for each GPU: beyond that vLLM keeps copies, so
            # that more GPUs hold no more tokens.
            cached=min(tensor_width, kv_heads) * stage_count,
            width=1 if str(vllm_options.get("quantization")).startswith(_EIGHT_BITS) else width,
            kv=2 * layer_count * kv_heads * head_size * value_bytes,
            cache=config.engine.kv_cache_mb << 20,
        )

    def weights(self, parameters: float, experts: float) -> float:
        """Bytes on each GPU."""
        return self.width * ((parameters - experts) / self.parts + experts / self.apart)

    def token(self) -> float:
        """Bytes of a token's keys and values on each GPU of the copy that has it."""
        return self.kv / self.cached

    def token_s(self, tokens: int, row: int, *, parameters: float, experts: float, used: float, rates: Rates) -> float:
        """Return the seconds of a pass that samples one token for each of `tokens` rows, in every copy. A row ends with
        `row` tokens. `parameters` and `experts` count weights, the first with the second; each token is sent to the
        share `used` of the experts, evenly."""
        shared_tokens = tokens * self.apart // self.parts  # tokens of copies that share experts
        # The chance that none of so many tokens goes to an expert, if each chooses evenly and by itself. Weights that
        # nobody needs are not read, which is why a mixture is quick at small batches.
        idle_experts = experts * (1 - used) ** shared_tokens  # of experts that no token is sent to
        # Half of the last length: a row has grown from nothing to that, so it reads as much on average.
        read_bytes = self.weights(parameters - idle_experts, experts - idle_experts) + tokens * self.token() * row / 2
        operations = 2 * ((parameters - experts) * tokens / self.parts + experts * used * shared_tokens / self.apart)
        # The roofline (Williams et al. 2009): memory and arithmetic work at the same time, and the slower one
        # decides.
        return max(read_bytes / rates.bytes, operations / rates.operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes and operations per second that a GPU reaches: its vendor's figures times an efficiency."""

    bytes: float
    operations: float


def gpus_of(config: RunConfig) -> int:
    """GPUs of each engine, the most of them if they differ."""
    # The most, since the split has to have room for the largest of them.
    return max((len(engine_gpus) for engine_gpus in config.engine.gpus), default=max(1, config.cluster.engine.gpus))


def _count(settings: Mapping[str, Any], name: str) -> int:
    setting_value = settings.get(name, 1)
    return setting_value if type(setting_value) is int and setting_value > 0 else 1


# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false


GB: Final = 1e9
_RESERVED = 0.92  # of a GPU's memory that a process may fill: the rest is its context, and what its allocator loses
_OFF = 0.1  # how far from the truth a prediction of memory may be
_FUSED = 0.35  # the same where layers are compiled, which keeps less
# In the order in which they change least: computing layers again changes no number of a run, smaller chunks of logits
# neither, an adapter trains something else.
_CHANGES: Final[tuple[dict[str, Any], ...]] = (
    {"gradient_checkpointing": True},
    {"gradient_checkpointing": True, "logits_mb": 256},
    {"gradient_checkpointing": True, "lora_rank": 16},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU by its vendor's figures: memory, dense bfloat16, bandwidth of the memory, and of its bus in one
    direction."""

    memory_gb: float
    tflops: float
    gb_per_s: float
    bus_gb_per_s: float


GPUS: Final = {
    "h100": Gpu(memory_gb=80, tflops=989, gb_per_s=3350, bus_gb_per_s=64),
    "h200": Gpu(memory_gb=141, tflops=989, gb_per_s=4800, bus_gb_per_s=64),
    "a100-80gb": Gpu(memory_gb=80, tflops=312, gb_per_s=2039, bus_gb_per_s=32),
    "a100-40gb": Gpu(memory_gb=40, tflops=312, gb_per_s=1555, bus_gb_per_s=32),
    "l40s": Gpu(memory_gb=48, tflops=362, gb_per_s=864, bus_gb_per_s=32),
    "b200": Gpu(memory_gb=180, tflops=2250, gb_per_s=7700, bus_gb_per_s=64),
    "l4": Gpu(memory_gb=24, tflops=121, gb_per_s=300, bus_gb_per_s=32),
    "a10": Gpu(memory_gb=24, tflops=125, gb_per_s=600, bus_gb_per_s=32),
    "rtx-4090": Gpu(memory_gb=24, tflops=165, gb_per_s=1008, bus_gb_per_s=32),
    "mi300x": Gpu(memory_gb=192, tflops=1307, gb_per_s=5300, bus_gb_per_s=64),
}
"""By name; `gpu_of` takes others as numbers, and a program may add its own."""


def gpu_of(description: str) -> Gpu:
    """The GPU of a name, or of "name,TFLOP/s,GB,GB/s": dense bfloat16, memory, its bandwidth. Raises UsageError."""
    if description in GPUS:
        return GPUS[description]
    _, *number_texts = description.split(",")
    try:
        tflops, memory_gb, gb_per_s = map(float, number_texts)
    except ValueError:
        tflops = memory_gb = gb_per_s = math.nan
    # Written so that NaN, which compares with nothing, is refused as well.
    if not all(0 < number < math.inf for number in (tflops, memory_gb, gb_per_s)):
        hint = f"give one of {', '.join(GPUS)}, or name,TFLOP/s,GB,GB/s as mine,312,80,2039"
        raise UsageError(f"--gpu {description!r}: {hint}")
    return Gpu(memory_gb=memory_gb, tflops=tflops, gb_per_s=gb_per_s, bus_gb_per_s=32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The episodes that are planned for: `row` tokens each, of which the policy samples the share `sampled`; the others
    are a prompt that the members of a group share. `mfu` is the learner's share of the peak, `mbu` an engine's of the
    bandwidth."""

    row: int
    sampled: float
    mfu: float
    mbu: float

    @property
    def answer(self) -> int:
        """Sampled tokens of an episode."""
        return max(1, round(self.row * self.sampled))

    @property
    def prompt(self) -> int:
        return max(1, self.row - self.answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSplit:
    """Split of GPUs between engines and the learner; 0 and 0: both on the same one, side by side or by turns. `at_once`
    episodes fit the engines' cache; `cache_room` bytes of each GPU are left for that. By turns, `host_bytes` wait in
    host memory, and a step spends `swap_s` on bringing one and the other to the GPU."""

    engines: int
    learners: int
    learner_bytes: float
    engine_bytes: float
    cache_room: float
    at_once: int
    fits: bool
    learner_s: float
    engine_s: float
    episode_s: float
    host_bytes: float = 0.0
    swap_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step: on GPUs of their own the slower of learner and engines counts, on one GPU both
        do."""
        # Law 6 holds on GPUs of their own: neither side waits. On one GPU both need the same units, side by side or
        # by turns, and the seconds add up.
        summed_s = self.learner_s + self.engine_s + self.swap_s
        return max(self.learner_s, self.engine_s) if self.engines else summed_s

    @property
    def max_lag(self) -> int:
        """Steps that pass while an episode is played, and one in which its batch is trained."""
        return math.ceil(self.episode_s / self.step_s) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`held` is of a learner on one GPU; `splits` are all ways to divide the GPUs."""

    gpu: Gpu
    n: int
    held: MemoryBudget
    splits: tuple[GpuSplit, ...]
    tokens_per_step: int  # sampled ones
    max_running: int
    cache_mb: int  # engine.kv_cache_mb

    @property
    def best(self) -> GpuSplit | None:
        """The quickest one that fits."""
        return min((split for split in self.splits if split.fits), key=lambda one: one.step_s, default=None)


def plan(config: RunConfig, gpu: Gpu, n: int, work: Work) -> Plan:
    """Plan a run on `n` GPUs. Raises ModelError for a model without a configuration, UsageError for work that fits no
    row."""
    if work.row > config.rollout.max_context:
        raise UsageError(f"--row {work.row}: rollout.max_context is {config.rollout.max_context}")
    if config.engine.colocated and n > 1:
        raise UsageError(f"--n {n}: engine.colocated shares one GPU: give 1, or --set engine.colocated=false")
    divisions = _ways(config, n)
    if not divisions:
        raise _no_way(config, n)
    model_folder = model_dir(config.model)
    memory_budget = _held(config, model_folder, work)
    gpu_splits = tuple(_split(config, model_folder, memory_budget, gpu, work, *division) for division in divisions)
    sampled_tokens = config.buffer.groups_per_step * config.rollout.group_size * work.answer
    return Plan(
        gpu=gpu,
        n=n,
        held=memory_budget,
        splits=gpu_splits,
        tokens_per_step=sampled_tokens,
        max_running=config.rollout.max_running,
        cache_mb=config.engine.kv_cache_mb,
    )


def started(config: RunConfig, gpu: Gpu, n: int) -> tuple[RunConfig, dict[str, Any]]:
    """The run as `agentrl train` starts it on a machine with `n` such GPUs and vLLM, and the settings that it chooses
    there. Raises ConfigError if these contradict the run file, ModelError."""
    machine = machine_defaults.Machine(gpus=n, gpu_bytes=int(gpu.memory_gb * GB), vllm=True)
    return machine_defaults.fitted(config, machine, parameters_of(model_dir(config.model)))


def rows_of(config: RunConfig, work: Work) -> list[Row]:
    """The rows of a full pass: whole groups if they fit, else a part of one."""
    group_size, token_budget = config.rollout.group_size, config.train.tokens_per_batch
    group_count = max(1, token_budget // (work.prompt + group_size * work.answer))
    member_count = min(group_size, max(1, (token_budget - work.prompt) // work.answer))
    algorithm = next(iter(config.algorithms.values()))
    positions = torch.arange(work.prompt, work.prompt + work.answer)
    return [
        Row(
            group_id=group_id,
            episode_id=member,
            algo=algorithm,
            # Tokens differ where the tree must fork: the first one by group, the first of the answer by member. All
            # others may be alike, since only shapes are counted.
            token_ids=(group_id, *[0] * (work.prompt - 1), member, *[0] * (work.answer - 1)),
            place_S=positions,
            columns={},
        )
        for group_id in range(group_count)
        for member in range(member_count)
    ]


def _passes(config: RunConfig, work: Work) -> int:
    """Return the number of passes that a group takes: more than one if the group does not fit a pass."""
    return -(-config.rollout.group_size // sum(row.group_id == 0 for row in rows_of(config, work)))


def _split(
    config: RunConfig, folder: Path, bytes_: MemoryBudget, gpu: Gpu, work: Work, engines: int, learners: int
) -> GpuSplit:
    model_fields = _described(folder)
    layer_count, expert_share = model_fields["num_hidden_layers"], _used(model_fields)
    engine_plan = EnginePlan.of(config, model_fields, _width(config, folder))
    rank_count, copy_count = max(1, learners), max(1, engines // engine_plan.gpus) * engine_plan.copies
    learner_bytes = of_rank(bytes_, rank_count, layer_count, config.train.parallel.tensor, config.train.parallel.expert)
    usable_bytes = _RESERVED * gpu.memory_gb * GB
    weight_bytes = engine_plan.weights(bytes_.parameters, bytes_.experts)
    by_turns = config.engine.colocated
    is_staged = config.transport.form == "file" and not by_turns
    second_bytes = weight_bytes if is_staged else 0  # of new ones
    cache_room = usable_bytes - weight_bytes - second_bytes - (0 if engines or by_turns else learner_bytes)
    # By the full length of a row: an engine that fills its cache with half-grown rows has to preempt some of them,
    # and computes them again.
    at_once = min(config.rollout.max_running, copy_count * int(engine_plan.cache / (engine_plan.token() * work.row)))
    rows_per_copy = max(1, at_once // copy_count)
    token_s = engine_plan.token_s(
        rows_per_copy,
        work.row,
        parameters=bytes_.parameters,
        experts=bytes_.experts,
        used=expert_share,
        rates=Rates(bytes=gpu.gb_per_s * GB * work.mbu, operations=gpu.tflops * 1e12 * work.mbu),
    )
    group_count, group_size = config.buffer.groups_per_step, config.rollout.group_size
    members_in_pass = sum(1 for row in rows_of(config, work) if row.group_id == 0)
    # Groups that are larger than a pass take several, smaller ones share one. A fraction of a pass stays a fraction:
    # this is a mean over many steps.
    groups_in_pass = len({row.group_id for row in rows_of(config, work)})
    pass_count = group_count * max(1.0, group_size / members_in_pass) / groups_in_pass
    team_count = max(1, rank_count // (config.train.parallel.tensor * config.train.parallel.context))
    # Each team computes the stems of all groups.
    stem_passes = min(group_count * min(_passes(config, work), team_count), pass_count)
    once = (bytes_.operations - bytes_.again) * pass_count + bytes_.again * stem_passes
    # A pass is forward and twice that backward; computing layers again is one more forward, so four thirds.
    operations = once * (4 / 3 if config.train.gradient_checkpointing else 1.0) * config.train.epochs
    return GpuSplit(
        engines=engines,
        learners=learners,
        learner_bytes=learner_bytes,
        engine_bytes=weight_bytes + second_bytes + engine_plan.cache,
        cache_room=cache_room,
        at_once=at_once,
        fits=learner_bytes <= usable_bytes and engine_plan.cache <= cache_room and at_once >= group_size,
        learner_s=operations / (rank_count * gpu.tflops * 1e12 * work.mfu),
        engine_s=group_count * group_size * work.answer * token_s / (copy_count * rows_per_copy),
        episode_s=work.answer * token_s,
        host_bytes=_waiting(config, bytes_) if by_turns else 0.0,
        swap_s=_swapped(config, bytes_) / (gpu.bus_gb_per_s * GB * work.mbu) if by_turns else 0.0,
    )


def _width(config: RunConfig, folder: Path) -> int:
    """Bytes of an engine's weight. The embedded engine is on no GPU: then they are those of vLLM in bfloat16."""
    return 4 if config.engine.kind == "vllm" and engine_dtype(config.engine, folder) == "float32" else 2


def _waiting(config: RunConfig, bytes_: MemoryBudget) -> float:
    """Bytes in host memory while an engine samples whose GPU the learner shares by turns; or while the learner steps,
    with an adapter, the engine's weights."""
    learner_bytes = bytes_.weights + bytes_.frozen + bytes_.optimizer
    return bytes_.host + learner_bytes + (2 * bytes_.parameters if config.sends_adapters else 0)


def _swapped(config: RunConfig, bytes_: MemoryBudget) -> float:
    """Bytes that go over the GPU's bus for a turn of the learner: it comes and leaves, the engine gets new weights, or
    with an adapter takes its own away and back."""
    learner_bytes = bytes_.weights + bytes_.frozen + bytes_.optimizer
    return 2 * learner_bytes + 2 * bytes_.parameters * (2 if config.sends_adapters else 1)


def _used(described: dict[str, Any]) -> float:
    """The share of a mixture's experts that a token is sent to; 1 without experts."""
    expert_count = next((described[field_name] for field_name in EXPERTS if described.get(field_name)), None)
    return (described.get("num_experts_per_tok") or expert_count) / expert_count if expert_count else 1.0


def _described(folder: Path) -> dict[str, Any]:
    """The configuration of a model's text part."""
    model_fields = json.loads((folder / "config.json").read_text())
    return model_fields.get("text_config") or model_fields


def _ways(config: RunConfig, n: int) -> list[tuple[int, int]]:
    """How many of `n` GPUs may be for engines, and how many for the learner; 0 and 0: one for both."""
    team_size, gpus_each = _team(config), gpus_of(config)
    divisions = [(0, 0)] if n == 1 else [(mine, n - mine) for mine in range(1, n)]
    return [(mine, others) for mine, others in divisions if max(1, others) % team_size == max(1, mine) % gpus_each == 0]


def _no_way(config: RunConfig, n: int) -> UsageError:
    """Return the error for `n` GPUs that cannot be divided; it names numbers that can."""
    gpus_each = gpus_of(config)
    causes = [f"train.parallel.{name} = {width} GPUs learn together" for name, width in _together(config).items()]
    causes += [f"engine.replicas gives each engine {gpus_each}"] if gpus_each > 1 else []
    nearest_below = next((few for few in range(n - 1, 0, -1) if _ways(config, few)), None)
    nearest_above = next(many for many in range(n + 1, n + 2 + _team(config) * gpus_each) if _ways(config, many))
    alternatives = nearest_above if nearest_below is None else f"{nearest_below} or {nearest_above}"
    return UsageError(f"--n {n}: {', '.join(causes)}: give {alternatives}")


def _together(config: RunConfig) -> dict[str, int]:
    """The settings by which GPUs compute layers together."""
    parallel = config.train.parallel
    widths = (("tensor", parallel.tensor), ("context", parallel.context), ("expert", parallel.expert))
    return {name: width for name, width in widths if width > 1}


def _team(config: RunConfig) -> int:
    """Return what divides the number of the learner's GPUs: the GPUs that compute a pass, or keep a layer's experts,
    together."""
    parallel = config.train.parallel
    return math.lcm(parallel.tensor * parallel.context, parallel.expert)


def _held(config: RunConfig, folder: Path, work: Work) -> MemoryBudget:
    """Return the memory of a learner. If ranks compute a pass together, its activations are those of one of them: of a
    model with so much fewer heads and neurons, and of its share of the tokens; of what comes and goes all tokens are
    counted. Raises ConfigError if they cannot divide the heads."""
    pass_rows, pass_count = rows_of(config, work), _passes(config, work)
    tensor_width, context = config.train.parallel.tensor, config.train.parallel.context
    # The weights of a tensor-parallel run are shards however they are cut; only activations differ, and these are
    # measured on a narrower model below. Cutting the model itself would need the ranks.
    whole_budget = held(config.learner, folder, pass_rows, on_gpu=True, passes=pass_count, context=context)
    if tensor_width == 1:
        return whole_budget
    model_fields = _described(folder)
    check_divides("tensor", tensor_width, model_fields, HEADS)
    head_dim = model_fields.get("head_dim") or model_fields["hidden_size"] // model_fields["num_attention_heads"]
    narrow_fields = {
        name: model_fields[name] // tensor_width for name in (*HEADS, "intermediate_size") if name in model_fields
    }
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "config.json").write_text(json.dumps({**model_fields, **narrow_fields, "head_dim": head_dim}))
        narrow_budget = held(config.learner, Path(scratch), pass_rows, on_gpu=True, passes=pass_count, context=context)
    return replace(whole_budget, activations=narrow_budget.activations, temporary=narrow_budget.temporary)


def of_rank(bytes_: MemoryBudget, ranks: int, layers: int, tensor: int = 1, expert: int = 1) -> float:
    """Return the bytes on each of `ranks` ranks: its shard, two layers that are whole at a time, and a pass. Each of
    `tensor` ranks has its part of these layers, and each of `expert` ranks its experts."""
    expert_correction = bytes_.experts / bytes_.parameters * (1 / expert - 1 / tensor)
    # Two layers: FSDP gathers the next one while this one computes.
    gathered_bytes = 2 * bytes_.weights / layers * (1 / tensor + expert_correction) if ranks > 1 else 0.0
    return bytes_.static / ranks + gathered_bytes + bytes_.activations + bytes_.temporary


def changes(config: RunConfig, gpu: Gpu, n: int, work: Work) -> Iterator[str]:
    """Settings with which a run that does not fit does."""
    model_folder = model_dir(config.model)

    def lacking(changed: RunConfig) -> list[str] | None:
        """Return what else has to be set for a run to fit: nothing, or less room for keys and values; None if it
        cannot."""
        memory_budget, divisions = _held(changed, model_folder, work), _ways(changed, n)
        gpu_splits = [_split(changed, model_folder, memory_budget, gpu, work, *way) for way in divisions]
        if not gpu_splits or any(split.fits for split in gpu_splits):
            return [] if gpu_splits else None
        # The one change that costs no setting of the training: fewer rows at once, and the same numbers.
        cache_mb = max(int(split.cache_room) >> 20 for split in gpu_splits)
        if not 0 < cache_mb < changed.engine.kv_cache_mb:
            return None
        smaller_engine = changed.engine.model_copy(update={"kv_cache_mb": cache_mb})
        smaller_run = changed.model_copy(update={"engine": smaller_engine})
        does_fit = any(_split(smaller_run, model_folder, memory_budget, gpu, work, *way).fits for way in divisions)
        return [f"--set engine.kv_cache_mb={cache_mb}"] if does_fit else None

    turns_config = _by_turns(config) if n == 1 else None
    candidates: list[tuple[list[str], RunConfig]] = [([], config)]
    candidates += [] if turns_config is None else [(["--set engine.colocated=true"], turns_config)]
    for train_change in _CHANGES:
        change_settings = [f"--set train.{name}={str(value).lower()}" for name, value in train_change.items()]
        changed_train = config.train.model_copy(update=train_change)
        candidates.append((change_settings, config.model_copy(update={"train": changed_train})))
    # One change after the other, each from the run as it is: a reader can choose, where one list of all of them would
    # say more than is needed.
    for settings, candidate in candidates:
        more_settings = lacking(candidate)
        if more_settings is not None:
            yield " ".join([*settings, *more_settings])


def _by_turns(config: RunConfig) -> RunConfig | None:
    """The run with engine and learner by turns on one GPU; None if it cannot, or does so anyway."""
    if config.engine.kind == "embedded" or config.engine.colocated:
        return None
    turns_config = config.model_copy(update={"engine": config.engine.model_copy(update={"colocated": True})})
    try:
        # Through the whole validation: turns on one GPU exclude much, and `model_copy` checks nothing.
        return from_json(to_json(turns_config))
    except ConfigError:
        return None


def refusal(config: RunConfig, memory_bytes: int, host_bytes: float = math.inf) -> str | None:
    """Why a GPU of so much memory cannot hold the run's learner, or cannot be shared by turns on a machine of so much;
    None if it can, up to what a prediction may be off."""
    row_tokens = min(config.rollout.max_context, config.train.tokens_per_batch)
    # Only bytes matter here: the efficiencies are not used.
    assumed_work = Work(row=row_tokens, sampled=0.5, mfu=1.0, mbu=1.0)
    model_folder = model_dir(config.model)
    layer_count: int = _described(model_folder)["num_hidden_layers"]
    parallel, memory_budget = config.train.parallel, _held(config, model_folder, assumed_work)
    needed_bytes = of_rank(memory_budget, parallel.ranks, layer_count, parallel.tensor, parallel.expert)
    # In favour of the run: a refusal that is wrong costs somebody his run, a start that is wrong an error some
    # minutes later.
    if needed_bytes <= (1 + (_FUSED if config.train.compile else _OFF)) * memory_bytes:
        return _no_turns(config, memory_budget, memory_bytes, host_bytes) if config.engine.colocated else None
    return (
        f"a step of the learner needs {needed_bytes / GB:.1f} GB and the GPU has {memory_bytes / GB:.1f}: `agentrl "
        "plan RUN.toml` says what to change"
    )


def _no_turns(config: RunConfig, bytes_: MemoryBudget, memory_bytes: int, host_bytes: float) -> str | None:
    """Why engine and learner cannot take turns."""
    kv_mb, weight_width = config.engine.kv_cache_mb, 4 if config.engine.dtype == "float32" else 2
    engine_bytes, waiting_bytes = weight_width * bytes_.parameters + (kv_mb << 20), _waiting(config, bytes_)
    if engine_bytes > memory_bytes:
        return (
            f"the engine needs {engine_bytes / GB:.1f} GB when it is awake and the GPU has {memory_bytes / GB:.1f}: "
            f"lower engine.kv_cache_mb = {kv_mb}, or give engine.dtype = 'bfloat16'"
        )
    if waiting_bytes > host_bytes:
        return (
            f"by turns (engine.colocated) {waiting_bytes / GB:.1f} GB of host memory wait for the GPU and "
            f"{host_bytes / GB:.1f} are free: give train.lora_rank, or engine.colocated = false and a second GPU"
        )
    return None


def main() -> None:
    """Read a run's configuration from standard input, and print why its GPU cannot hold its learner, if so."""
    # A process of its own, since this loads torch and a model's configuration: the supervisor that asks has neither,
    # and must not die of an error in here (`test_a_prediction_that_fails_stops_no_run`).
    run_config = from_json(sys.stdin.read())
    if (gpus := run_config.train.gpus) and torch.cuda.is_available():
        memory_bytes = torch.cuda.get_device_properties(gpus[0]).total_memory
        print(refusal(run_config, memory_bytes, free_memory_bytes()) or "", end="")


if __name__ == "__main__":
    main()
