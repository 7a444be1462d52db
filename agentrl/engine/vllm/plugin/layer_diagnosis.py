"""Diagnosis of the weights that layers compute with: fingerprints after every sync, and, when the canary finds a
difference, which layers compute with the weights of a file and which do not.

For the latter each layer computes a few random inputs, and its output is compared with what the file's tensors make of
them, so that a packed copy which an update did not reach shows, however right the parameter beside it looks. Without
tensor parallelism only: a shard cannot be compared with a whole tensor. Runs inside vLLM's worker, never while requests
are computed.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from typing import Any

import torch

from agentrl.engine.weight_sync import fingerprints as fingerprint

_ROWS = 4  # random inputs of each layer
# How far an output may be from the expected one, by its own size: far above rounding, and in float32 below what one
# optimizer step changes. In bfloat16 a small step looks like rounding.
_APART, _APART_FLOAT32 = 2e-2, 1e-4

_EMBEDDING = "model.embed_tokens.weight"


@torch.no_grad()
def fingerprints(model: Any, dtype: torch.dtype) -> dict[str, str]:
    """Fingerprints (see `agentrl.engine.weight_sync.fingerprints`) of the vectors and matrices that the layers compute
    with in `dtype`, by the names of the checkpoint format. Left out: experts, what is quantized, and everything where
    layers are split over GPUs."""
    from vllm.distributed import get_tensor_model_parallel_world_size

    by_source: dict[str, str] = {}
    # A shard has its own columns: nothing to compare it with is in the learner's fingerprints, and "nothing to say"
    # is the honest answer here. The probe of the canary still judges such an engine.
    if get_tensor_model_parallel_world_size() > 1:
        return by_source
    packed = getattr(model, "packed_modules_mapping", {})
    for name, module in model.named_modules():
        values = _columns(module, dtype)
        if values is None:
            continue
        names = names_of(name.replace(".base_layer", ""), packed)
        sizes = module.output_sizes if len(names) > 1 else [len(values)]
        if sum(sizes) == len(values):
            for source, part in zip(names, values.split(sizes), strict=True):
                by_source[source] = fingerprint.of(part.float().cpu().numpy())
    return by_source


def _columns(module: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """The vector, or some columns of the matrix, that a layer computes with; None if it has no such weight."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    method = getattr(module, "quant_method", None)
    if weight is None or weight.dtype != dtype:
        return None
    if method is None:
        return weight if weight.dim() == 1 else None
    if not type(method).__name__.startswith("Unquantized"):
        return None
    rows = getattr(module, "org_vocab_size", None)  # more than these pad the vocabulary
    width = module.input_size if rows is None else module.embedding_dim
    chosen = fingerprint.columns(width)
    if not hasattr(module, "cpu_linear"):
        return weight[:rows, chosen] if weight.dim() == 2 and weight.shape[1] == width else None
    # The packed copy is what computes, and its layout is oneDNN's own. One-hot inputs read its columns through the
    # kernel, exactly: a sum with one term is not rounded.
    one_hot = torch.zeros(len(chosen), width, dtype=dtype, device=weight.device)
    one_hot[range(len(chosen)), chosen] = 1
    return method.apply(module, one_hot, None).T[:rows]


@torch.no_grad()
def untaken(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """`untaken`: names of the file's weights that a layer does not compute with, and of a layer's that the file lacks;
    `unchecked`: how many could not be compared. `tensors` are the file's, by the names of its format."""
    packed = getattr(model, "packed_modules_mapping", {})
    untaken_names: set[str] = set()
    lacking: set[str] = set()
    seen: set[str] = set()
    for name, module in model.named_modules():
        name = name.replace(".base_layer", "")  # a layer with adapters around it
        if hasattr(module, "w13_weight"):
            sources = {source: tensors[source] for source in tensors if source.startswith(_experts_of(name))}
            untaken_names.update(_wrong_experts(module, _experts_of(name), sources))
            seen.update(sources)
            continue
        if "weight" not in dict(module.named_parameters(recurse=False)):
            continue
        names = names_of(name, packed)
        # A tied model's file has no output layer; vLLM builds one all the same, from the embedding.
        if names == ["lm_head.weight"] and names[0] not in tensors:
            names = [_EMBEDDING]
        if missing := [source for source in names if source not in tensors]:
            lacking.update(f"{source} (not in the file)" for source in missing)
            continue
        seen.update(names)
        if not _agrees(module, {source: tensors[source] for source in names}):
            untaken_names.update([f"{name} (tied to {_EMBEDDING})"] if _is_tied(name, names) else names)
    if seen:  # else the model has other names than the file, and nothing is known
        untaken_names |= lacking
    return {"untaken": sorted(untaken_names), "unchecked": len(tensors.keys() - seen)}


def names_of(name: str, packed: dict[str, list[str]]) -> list[str]:
    """The checkpoint's weights that the layer `name` holds, in the order in which it stacks them."""
    parent, _, last = name.rpartition(".")
    return [f"{parent}.{part}.weight".lstrip(".") for part in packed.get(last, [last])]


def _is_tied(name: str, names: list[str]) -> bool:
    return name.endswith("lm_head") and names == [_EMBEDDING]


def _experts_of(name: str) -> str:
    """`model.layers.0.mlp.experts.routed_experts` holds what the file calls `model.layers.0.mlp.experts.…`."""
    return name.partition(".experts")[0] + ".experts."


def _agrees(module: Any, sources: dict[str, torch.Tensor]) -> bool:
    weight = torch.cat([tensor.float() for tensor in sources.values()])
    method = getattr(module, "quant_method", None)
    loaded = module.weight
    if method is None or weight.dim() == 1:
        return _close(loaded, weight)
    if hasattr(module, "num_embeddings") and not hasattr(module, "bias"):
        return _close(loaded[: len(weight)], weight)
    dtype, device = _place(module)
    # Four random rows: a wrong weight cannot agree with the right one on them by chance, and four products a layer
    # are cheap enough for an error path.
    x = torch.randn(_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
    computed = method.apply(module, x.to(device, dtype), None)
    return _close(computed[:, : len(weight)], x.to(dtype).float() @ weight.T)


def _wrong_experts(module: Any, base: str, sources: dict[str, torch.Tensor]) -> list[str]:
    """The experts whose outputs are not those of the file, by name: each alone on the same inputs, against gate, up and
    down projections (SwiGLU). One that computes as another of the file's does is named with it."""
    dtype, device = _place(module)
    parts = ("gate", "up", "down")
    complete: dict[int, list[torch.Tensor]] = {}
    wrong: list[str] = []
    for expert in range(module.w13_weight.shape[0]):
        weights = [sources.get(f"{base}{expert}.{part}_proj.weight") for part in parts]
        wrong += [
            f"{base}{expert}.{part}_proj.weight (not in the file)"
            for part, weight in zip(parts, weights, strict=True)
            if weight is None
        ]
        if all(weight is not None for weight in weights):
            complete[expert] = [weight.float() for weight in weights if weight is not None]
    if not complete:
        return wrong
    hidden = next(iter(complete.values()))[0].shape[1]
    x = torch.randn(_ROWS, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    ones = torch.ones(_ROWS, 1)
    expected = {expert: _swiglu(x.float(), *weights) for expert, weights in complete.items()}
    for expert in complete:
        chosen = torch.full((_ROWS, 1), expert, dtype=torch.int32)
        computed = module.quant_method.apply(
            module, x.clone().to(device), ones.to(device), chosen.to(device), None, None
        )
        if not _close(computed, expected[expert]):
            hint = next((f" (holds {base}{other})" for other in expected if _close(computed, expected[other])), "")
            wrong.append(f"{base}{expert}{hint}")
    return wrong


def _swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _place(module: Any) -> tuple[torch.dtype, torch.device]:
    parameter = next(iter(module.parameters()))
    return parameter.dtype, parameter.device


def _close(computed: torch.Tensor, expected: torch.Tensor) -> bool:
    """`computed` is as the engine does it, `expected` in float32."""
    apart = _APART_FLOAT32 if computed.dtype == torch.float32 else _APART
    computed = computed.float().cpu()
    if computed.shape != expected.shape:
        return False
    return bool((computed - expected).norm() <= apart * expected.norm() + 1e-12)
