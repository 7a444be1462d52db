"""Two updates that vLLM's CPU build takes and forgets: a tied output layer and the experts of a mixture.

Both answer 200 and both then sample from old or scrambled weights; only a canary would see them. `ready_for_update`
runs before the new weights are loaded, `after_update` once they are. Switched off by $AGENTRL_VLLM_MEND=0 at start, or
while running by `enabled`, so that tests can show that the canary does see them.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import os
from typing import Any

from agentrl.engine.vllm.plugin import MEND_VARIABLE

enabled = os.environ.get(MEND_VARIABLE, "1") != "0"


def ready_for_update(model: Any) -> None:
    """Have every mixture build its kernel anew: with one at hand it would skip packing its experts."""
    if not _needed():
        return
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def after_update(model: Any) -> None:
    """Pack again what shares its weight with another layer: only the layer that owns it was loaded."""
    if not _needed():
        return
    owners: dict[int, Any] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if weight is None or not hasattr(weight, "data_ptr") or weight.numel() == 0:
            continue
        if owners.setdefault(weight.data_ptr(), module) is not module and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _needed() -> bool:
    from vllm.platforms import current_platform

    return enabled and current_platform.is_cpu()
