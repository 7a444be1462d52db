"""Which layers compute with the weights of a file and which do not: asked when the canary finds a difference.

Each layer is given a few random inputs and its output compared with what the file's tensors make of them, so that a
packed copy which an update did not reach shows, however right the parameter beside it looks. Without tensor parallelism
only: a shard cannot be compared with a whole tensor. Runs inside vLLM's worker, never while requests are computed.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch

_ROWS = 4  # random inputs a layer is given
# How far an output may be from the expected one, by its own size: far above rounding, and in float32 below what one
# optimizer step changes. In bfloat16 a small step is not to be told from rounding.
_APART, _APART_FLOAT32 = 2e-2, 1e-4

_EMBEDDING = "model.embed_tokens.weight"


@torch.no_grad()
def untaken(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """`untaken`: names of the file's weights that a layer does not compute with; `unchecked`: how many could not be
    compared. `tensors` are the file's, by the names of its format."""
    packed = getattr(model, "packed_modules_mapping", {})
    found: set[str] = set()
    seen: set[str] = set()
    for name, module in model.named_modules():
        name = name.replace(".base_layer", "")  # a layer with adapters around it
        names = _sources(name, module, packed, tensors)
        if not names:
            continue
        seen.update(names)
        sources = {source: tensors[source] for source in names}
        if hasattr(module, "w13_weight"):
            if not _experts_agree(module, sources):
                found.add(_experts_of(name).rstrip("."))
        elif not _agrees(module, sources):
            found.update([f"{name} (tied to {_EMBEDDING})"] if _is_tied(name, names) else names)
    return {"untaken": sorted(found), "unchecked": len(tensors.keys() - seen)}


def _sources(name: str, module: Any, packed: dict[str, list[str]], tensors: dict[str, torch.Tensor]) -> list[str]:
    """The file's weights that `module` holds, in the order in which it stacks them."""
    if not list(module.named_parameters(recurse=False)):
        return []
    if hasattr(module, "w13_weight"):
        return sorted(source for source in tensors if source.startswith(_experts_of(name)) and "weight" in source)
    parent, _, last = name.rpartition(".")
    parts = packed.get(last, [last])
    names = [f"{parent}.{part}.weight".lstrip(".") for part in parts]
    if all(source in tensors for source in names):
        return names
    return [_EMBEDDING] if last == "lm_head" and _EMBEDDING in tensors else []


def _is_tied(name: str, names: list[str]) -> bool:
    return name.endswith("lm_head") and names == [_EMBEDDING]


def _experts_of(name: str) -> str:
    """`model.layers.0.mlp.experts.routed_experts` holds what the file calls `model.layers.0.mlp.experts.…`."""
    return name.partition(".experts")[0] + ".experts."


def _agrees(module: Any, sources: dict[str, torch.Tensor]) -> bool:
    weight = torch.cat([tensor.float() for tensor in sources.values()])
    method = getattr(module, "quant_method", None)
    held = module.weight
    if method is None or weight.dim() == 1:
        return _close(held, weight)
    if hasattr(module, "num_embeddings") and not hasattr(module, "bias"):
        return _close(held[: len(weight)], weight)
    dtype, device = _place(module)
    x = torch.randn(_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    found = method.apply(module, x.to(device, dtype), None)
    return _close(found[:, : len(weight)], x.to(dtype).float() @ weight.T)


def _experts_agree(module: Any, sources: dict[str, torch.Tensor]) -> bool:
    """Every expert alone on the same inputs, against gate, up and down projections of the file (SwiGLU)."""
    base = next(iter(sources)).partition(".experts.")[0] + ".experts"
    dtype, device = _place(module)
    hidden = sources[f"{base}.0.gate_proj.weight"].shape[1]
    x = torch.randn(_ROWS, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    ones = torch.ones(_ROWS, 1)
    for expert in range(len({source.split(".experts.")[1].split(".")[0] for source in sources})):
        gate, up, down = (sources[f"{base}.{expert}.{part}_proj.weight"].float() for part in ("gate", "up", "down"))
        expected = (torch.nn.functional.silu(x.float() @ gate.T) * (x.float() @ up.T)) @ down.T
        chosen = torch.full((_ROWS, 1), expert, dtype=torch.int32)
        found = module.quant_method.apply(module, x.clone().to(device), ones.to(device), chosen.to(device), None, None)
        if not _close(found, expected):
            return False
    return True


def _place(module: Any) -> tuple[torch.dtype, torch.device]:
    parameter = next(iter(module.parameters()))
    return parameter.dtype, parameter.device


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """`found` is as the engine computes it, `expected` in float32."""
    apart = _APART_FLOAT32 if found.dtype == torch.float32 else _APART
    found = found.float().cpu()
    if found.shape != expected.shape:
        return False
    return bool((found - expected).norm() <= apart * expected.norm() + 1e-12)
