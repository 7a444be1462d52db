"""Fixes for bugs of vLLM's CPU build. Silent ones: every call answers 200 and log-probs are of other weights.

- A tied output layer keeps its packed copy of the old weights over an update (`after_update`).
- The experts of a mixture are not packed again by an update (`ready_for_update`).
- A request without an adapter is computed with the adapter in the last slot: its index -1 counts from the end
  (`install`).

Loud ones, with LoRA (`install`):

- A request for prompt log-probs beside another request kills the engine.
- A mixture does not start: vLLM takes the kernel for adapted experts, which needs Triton, also where no adapter adapts
  them (`--lora-target-modules`). With the usual one vLLM itself refuses to adapt experts.

Switched off at start by an environment variable (in `agentrl.engine.vllm.plugin`), or while running by `enabled`, so
that tests can show what a canary sees.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import os
from typing import Any

from agentrl.engine.vllm.plugin import CPU_FIXES_VARIABLE

enabled = os.environ.get(CPU_FIXES_VARIABLE, "1") != "0"


def install() -> None:
    """Have requests without an adapter be computed without one, prompts be scored beside other requests, mixtures take
    adapters of other layers, and the matrix unit be usable. Safe to call again."""
    import torch
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    # Linux lends AMX tiles only on request. Nobody requests them where threads are not bound, and the first
    # bfloat16 attention then dies of an illegal instruction. False where there is no such unit.
    torch.cpu._init_amx()
    original_shrink, add_logits = lora_ops.bgmv_shrink, punica_cpu.PunicaWrapperCPU.add_lora_logits
    # vLLM loads plugins more than once in a process; a wrapper around a wrapper would still work, and hide that it
    # does.
    if hasattr(original_shrink, "__wrapped__"):
        return

    @functools.wraps(original_shrink)
    def fixed_shrink(inputs, weights, output, indices, scaling=1.0):
        original_shrink(inputs, weights, output, indices, scaling)
        if enabled:
            # -1 is vLLM's mark for "no adapter", and an index from the end to torch: the result is that of the last
            # slot's adapter, and must add nothing.
            output[indices < 0] = 0

    @functools.wraps(add_logits)
    def fixed_add_logits(self, y, x, *args, **kwargs):
        # Prompt log-probs: the rows are those of one prompt, the adapters those of all requests that sample, and nobody
        # says which is whose. Nothing is added: our adapters leave the output layer alone.
        if not enabled or len(self.sampler_indices) == len(x):
            add_logits(self, y, x, *args, **kwargs)

    original_settle = FusedMoEConfig.__post_init__

    def fixed_settle(self):
        original_settle(self)
        self.is_lora_enabled = self.is_lora_enabled and not enabled

    FusedMoEConfig.__post_init__ = fixed_settle
    lora_ops.bgmv_shrink = punica_cpu.bgmv_shrink = fixed_shrink
    punica_cpu.PunicaWrapperCPU.add_lora_logits = fixed_add_logits


def ready_for_update(model: Any) -> None:
    """Have every mixture build its kernel anew: with one at hand it would skip packing its experts."""
    if not _needed():
        return
    for module in model.modules():
        quant_method: Any = getattr(module, "quant_method", None)
        if getattr(quant_method, "moe_kernel", None) is not None:
            # vLLM packs experts when it makes their kernel, and makes one only where there is none yet.
            quant_method.moe_kernel = None


def after_update(model: Any) -> None:
    """Pack again what shares its weight with another layer: only the layer that owns it was loaded."""
    if not _needed():
        return
    owners: dict[int, Any] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None or not hasattr(weight, "data_ptr") or weight.numel() == 0:
            continue
        # By address: tied layers are two modules over one tensor, and loading names the first of them alone.
        # `test_the_canary_sees_a_tied_output_layer_left_behind` switches this off, and the canary has to see it.
        if owners.setdefault(weight.data_ptr(), module) is not module and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _needed() -> bool:
    from vllm.platforms import current_platform

    return enabled and current_platform.is_cpu()
