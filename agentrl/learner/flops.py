"""Use of the learner's device by a step: floating-point operations, their share of its peak, memory.

Never knows what is computed. Operations are those of the model: twice the parameters of each token's matrix products,
and attention (Chowdhery et al. 2022, appendix B), forward and backward; what is computed again is not counted.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from agentrl.host.platform_checks import peak_memory_bytes
from agentrl.learner.data.prefix_trees import Branch, Pack, Stem
from agentrl.learner.model import lora

PEAKS: Final = {"H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Dense bfloat16 in TFLOP/s as the vendor states it, by a part of the device's name; the first that fits counts."""

EXPERTS: Final = ".experts."
"""In the names of the parameters of a mixture's experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Use of the device by the policy's updates of one step. `tflops` is per second of the whole step; passes ahead of
    the updates and of other models count as time alone. `mfu` is `tflops` over the device's peak, None where no peak is
    known. `peak_memory_mb` is on a GPU the most that the step allocated, else the most that the process ever had."""

    tflops: float
    mfu: float | None
    peak_memory_mb: float


def use(
    module_of: Callable[[Pack], Any],
    passes: Sequence[Pack],
    device: torch.device,
    *,
    seconds: float,
    dtype: torch.dtype,
) -> Use:
    """Measure a step whose updates made `passes`, each by its module, and begin to measure the memory of the next."""
    tflops = sum(operations(module_of(pass_), pass_) for pass_ in passes) / max(seconds, 1e-9) / 1e12
    peak = peak_of(device, dtype)
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(device) / 2**20
        torch.cuda.reset_peak_memory_stats(device)
    else:
        memory = peak_memory_bytes() / 2**20
    return Use(tflops=tflops, mfu=tflops / peak if peak else None, peak_memory_mb=memory)


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """The stated peak of a device in TFLOP/s; None where we know of none."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


@dataclass(frozen=True, slots=True)
class Prices:
    """Floating-point operations forward and backward of a model, for each node of a pass, each of these that predicts,
    and each pair of a query and a key that it sees."""

    node: float
    predictor: float
    pair: float

    def of(self, nodes: int, predictors: int, branches: Iterable[Branch]) -> float:
        seen = sum(pairs(branch.stop - branch.start, len(branch.path)) for branch in branches)
        return self.node * nodes + self.predictor * predictors + self.pair * seen

    def stem(self, stem: Stem) -> float:
        """Operations of a stem's nodes: they are one row, and predict nothing."""
        return self.node * len(stem) + self.pair * pairs(len(stem), len(stem))


def prices(module: Any) -> Prices:
    """Price a model's operations. Under an adapter, frozen weights have no gradient."""
    config = module.config.get_text_config()
    head = module.get_output_embeddings().weight.numel()
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    active = config.num_experts_per_tok / experts if experts else 1.0
    outer = {id(module.get_input_embeddings().weight), id(module.get_output_embeddings().weight)}
    body = sum(
        parameter.numel() * (active if EXPERTS in name else 1.0)
        for name, parameter in module.named_parameters()
        if id(parameter) not in outer
    )
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    # A multiplication and an addition each; forward, gradient of the input, and gradient of the weight, which frozen
    # weights do not need.
    product = 2 * (2 if lora.has_adapter(module) else 3)
    return Prices(product * body, product * head, 3 * 4 * config.num_hidden_layers * width)


def operations(module: Any, pack: Pack) -> float:
    """Floating-point operations of a pass forward and backward, with its share of those of its stem."""
    price = prices(module)
    # Distinct nodes and not tokens of rows: what is shared is computed once, and counting it for each row would
    # report a use above the peak.
    total = price.of(len(pack.token_ids_N), len(pack.predictors_P), pack.branches)
    return total if pack.stem is None else total - price.stem(pack.stem) * (1 - 1 / pack.stem.passes)


def pairs(queries: int, keys: int) -> int:
    """Number of pairs of a query and a key that it sees: the queries are the last of the keys."""
    return queries * (keys - queries) + queries * (queries + 1) // 2
