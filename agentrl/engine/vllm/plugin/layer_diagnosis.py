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
    packed_modules = getattr(model, "packed_modules_mapping", {})
    for layer_name, module in model.named_modules():
        layer_values = _columns(module, dtype)
        if layer_values is None:
            continue
        source_names = names_of(layer_name.replace(".base_layer", ""), packed_modules)
        part_sizes = module.output_sizes if len(source_names) > 1 else [len(layer_values)]
        if sum(part_sizes) == len(layer_values):
            for source_name, part_values in zip(source_names, layer_values.split(part_sizes), strict=True):
                by_source[source_name] = fingerprint.of(part_values.float().cpu().numpy())
    return by_source


def _columns(module: Any, dtype: torch.dtype) -> torch.Tensor | None:
    """The vector, or some columns of the matrix, that a layer computes with; None if it has no such weight."""
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    quant_method = getattr(module, "quant_method", None)
    if weight is None or weight.dtype != dtype:
        return None
    if quant_method is None:
        return weight if weight.dim() == 1 else None
    if not type(quant_method).__name__.startswith("Unquantized"):
        return None
    vocabulary = getattr(module, "org_vocab_size", None)  # more than these pad the vocabulary
    input_width = module.input_size if vocabulary is None else module.embedding_dim
    chosen_columns = fingerprint.columns(input_width)
    if not hasattr(module, "cpu_linear"):
        return weight[:vocabulary, chosen_columns] if weight.dim() == 2 and weight.shape[1] == input_width else None
    # The packed copy is what computes, and its layout is oneDNN's own. One-hot inputs read its columns through the
    # kernel, exactly: a sum with one term is not rounded.
    one_hot = torch.zeros(len(chosen_columns), input_width, dtype=dtype, device=weight.device)
    one_hot[range(len(chosen_columns)), chosen_columns] = 1
    return quant_method.apply(module, one_hot, None).T[:vocabulary]


@torch.no_grad()
def untaken(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """`untaken`: names of the file's weights that a layer does not compute with, and of a layer's that the file lacks;
    `unchecked`: how many could not be compared. `tensors` are the file's, by the names of its format."""
    packed_modules = getattr(model, "packed_modules_mapping", {})
    untaken_names: set[str] = set()
    absent_from_file: set[str] = set()
    compared_names: set[str] = set()
    for name, module in model.named_modules():
        name = name.replace(".base_layer", "")  # a layer with adapters around it
        if hasattr(module, "w13_weight"):
            sources = {source: tensors[source] for source in tensors if source.startswith(_experts_of(name))}
            untaken_names.update(_wrong_experts(module, _experts_of(name), sources))
            compared_names.update(sources)
            continue
        if "weight" not in dict(module.named_parameters(recurse=False)):
            continue
        source_names = names_of(name, packed_modules)
        # A tied model's file has no output layer; vLLM builds one all the same, from the embedding.
        if source_names == ["lm_head.weight"] and source_names[0] not in tensors:
            source_names = [_EMBEDDING]
        if missing := [source for source in source_names if source not in tensors]:
            absent_from_file.update(f"{source} (not in the file)" for source in missing)
            continue
        compared_names.update(source_names)
        if not _agrees(module, {source: tensors[source] for source in source_names}):
            untaken_names.update([f"{name} (tied to {_EMBEDDING})"] if _is_tied(name, source_names) else source_names)
    if compared_names:  # else the model has other names than the file, and nothing is known
        untaken_names |= absent_from_file
    return {"untaken": sorted(untaken_names), "unchecked": len(tensors.keys() - compared_names)}


def names_of(name: str, packed: dict[str, list[str]]) -> list[str]:
    """The checkpoint's weights that the layer `name` holds, in the order in which it stacks them."""
    parent, _, last_part = name.rpartition(".")
    return [f"{parent}.{part}.weight".lstrip(".") for part in packed.get(last_part, [last_part])]


def _is_tied(name: str, names: list[str]) -> bool:
    return name.endswith("lm_head") and names == [_EMBEDDING]


def _experts_of(name: str) -> str:
    """`model.layers.0.mlp.experts.routed_experts` holds what the file calls `model.layers.0.mlp.experts.…`."""
    return name.partition(".experts")[0] + ".experts."


def _agrees(module: Any, sources: dict[str, torch.Tensor]) -> bool:
    file_weight = torch.cat([tensor.float() for tensor in sources.values()])
    quant_method = getattr(module, "quant_method", None)
    layer_weight = module.weight
    if quant_method is None or file_weight.dim() == 1:
        return _close(layer_weight, file_weight)
    if hasattr(module, "num_embeddings") and not hasattr(module, "bias"):
        return _close(layer_weight[: len(file_weight)], file_weight)
    layer_dtype, layer_device = _place(module)
    # Four random rows: a wrong weight cannot agree with the right one on them by chance, and four products a layer
    # are cheap enough for an error path.
    random_rows = torch.randn(_ROWS, file_weight.shape[1], generator=torch.Generator().manual_seed(0))
    computed = quant_method.apply(module, random_rows.to(layer_device, layer_dtype), None)
    return _close(computed[:, : len(file_weight)], random_rows.to(layer_dtype).float() @ file_weight.T)


def _wrong_experts(module: Any, base: str, sources: dict[str, torch.Tensor]) -> list[str]:
    """The experts whose outputs are not those of the file, by name: each alone on the same inputs, against gate, up and
    down projections (SwiGLU). One that computes as another of the file's does is named with it."""
    dtype, device = _place(module)
    parts = ("gate", "up", "down")
    file_weights: dict[int, list[torch.Tensor]] = {}
    wrong_experts: list[str] = []
    for expert in range(module.w13_weight.shape[0]):
        weights = [sources.get(f"{base}{expert}.{part}_proj.weight") for part in parts]
        wrong_experts += [
            f"{base}{expert}.{part}_proj.weight (not in the file)"
            for part, weight in zip(parts, weights, strict=True)
            if weight is None
        ]
        if all(weight is not None for weight in weights):
            file_weights[expert] = [weight.float() for weight in weights if weight is not None]
    if not file_weights:
        return wrong_experts
    hidden = next(iter(file_weights.values()))[0].shape[1]
    x = torch.randn(_ROWS, hidden, generator=torch.Generator().manual_seed(0)).to(dtype)
    routing_weights = torch.ones(_ROWS, 1)
    expected = {expert: _swiglu(x.float(), *weights) for expert, weights in file_weights.items()}
    for expert in file_weights:
        expert_choice = torch.full((_ROWS, 1), expert, dtype=torch.int32)
        computed = module.quant_method.apply(
            module, x.clone().to(device), routing_weights.to(device), expert_choice.to(device), None, None
        )
        if not _close(computed, expected[expert]):
            hint = next((f" (holds {base}{other})" for other in expected if _close(computed, expected[other])), "")
            wrong_experts.append(f"{base}{expert}{hint}")
    return wrong_experts


def _swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _place(module: Any) -> tuple[torch.dtype, torch.device]:
    first_parameter = next(iter(module.parameters()))
    return first_parameter.dtype, first_parameter.device


def _close(computed: torch.Tensor, expected: torch.Tensor) -> bool:
    """`computed` is as the engine does it, `expected` in float32."""
    tolerance = _APART_FLOAT32 if computed.dtype == torch.float32 else _APART
    computed = computed.float().cpu()
    if computed.shape != expected.shape:
        return False
    return bool((computed - expected).norm() <= tolerance * expected.norm() + 1e-12)
