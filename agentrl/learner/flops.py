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
    operation_count = sum(operations(module_of(policy_pass), policy_pass) for policy_pass in passes)
    used_tflops = operation_count / max(seconds, 1e-9) / 1e12
    peak_tflops = peak_of(device, dtype)
    if device.type == "cuda":
        peak_memory_mb = torch.cuda.max_memory_allocated(device) / 2**20
        torch.cuda.reset_peak_memory_stats(device)
    else:
        peak_memory_mb = peak_memory_bytes() / 2**20
    return Use(
        tflops=used_tflops, mfu=used_tflops / peak_tflops if peak_tflops else None, peak_memory_mb=peak_memory_mb
    )


def peak_of(device: torch.device, dtype: torch.dtype) -> float | None:
    """The stated peak of a device in TFLOP/s; None where we know of none."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    device_name = torch.cuda.get_device_name(device)
    return next((peak_tflops for name_part, peak_tflops in PEAKS.items() if name_part in device_name), None)


@dataclass(frozen=True, slots=True)
class Prices:
    """Floating-point operations forward and backward of a model, for each node of a pass, each of these that predicts,
    and each pair of a query and a key that it sees."""

    node: float
    predictor: float
    pair: float

    def of(self, nodes: int, predictors: int, branches: Iterable[Branch]) -> float:
        pair_count = sum(pairs(branch.stop - branch.start, len(branch.path)) for branch in branches)
        return self.node * nodes + self.predictor * predictors + self.pair * pair_count

    def stem(self, stem: Stem) -> float:
        """Operations of a stem's nodes: they are one row, and predict nothing."""
        return self.node * len(stem) + self.pair * pairs(len(stem), len(stem))


def prices(module: Any) -> Prices:
    """Price a model's operations. Under an adapter, frozen weights have no gradient."""
    text_config = module.config.get_text_config()
    head_parameters = module.get_output_embeddings().weight.numel()
    expert_count = getattr(text_config, "num_experts", None) or getattr(text_config, "num_local_experts", None)
    active_share = text_config.num_experts_per_tok / expert_count if expert_count else 1.0
    outer_parameter_ids = {id(module.get_input_embeddings().weight), id(module.get_output_embeddings().weight)}
    body_parameters = sum(
        parameter.numel() * (active_share if EXPERTS in parameter_name else 1.0)
        for parameter_name, parameter in module.named_parameters()
        if id(parameter) not in outer_parameter_ids
    )
    attention_width = text_config.num_attention_heads * (
        getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    )
    # A multiplication and an addition each; forward, gradient of the input, and gradient of the weight, which frozen
    # weights do not need.
    operations_per_weight = 2 * (2 if lora.has_adapter(module) else 3)
    return Prices(
        operations_per_weight * body_parameters,
        operations_per_weight * head_parameters,
        3 * 4 * text_config.num_hidden_layers * attention_width,
    )


def operations(module: Any, pack: Pack) -> float:
    """Floating-point operations of a pass forward and backward, with its share of those of its stem."""
    model_prices = prices(module)
    # Distinct nodes and not tokens of rows: what is shared is computed once, and counting it for each row would
    # report a use above the peak.
    total_operations = model_prices.of(len(pack.token_ids_N), len(pack.predictors_P), pack.branches)
    if pack.stem is None:
        return total_operations
    return total_operations - model_prices.stem(pack.stem) * (1 - 1 / pack.stem.passes)


def pairs(queries: int, keys: int) -> int:
    """Number of pairs of a query and a key that it sees: the queries are the last of the keys."""
    return queries * (keys - queries) + queries * (queries + 1) // 2
