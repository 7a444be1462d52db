"""A second copy of the model's weights in the form that its layers compute with, made while the first one generates.

    build: twins of all layers ─► vLLM loads the file into them, packs them ─► swap: live layers take what they hold

A twin is the live layer's object with dictionaries of its own, so that vLLM's reloading does for it all that it does
for the live layer (fused shards, padding, packing) and touches nothing that generates. `swap` belongs between two
passes: it moves pointers where nothing remembers addresses, else it copies on the device. Owns neither files nor
versions. Runs inside vLLM's worker, `build` on a thread of its own.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch

from agentrl.engine.vllm.plugin import cpu_fixes, layer_diagnosis
from agentrl.engine.weight_sync import fingerprints
from agentrl.errors import WeightSyncError

_OWN = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_CGROUP = Path("/sys/fs/cgroup")
_SPARE = 1.1  # of the second copy: vLLM loads one layer after the other into room of its own, then copies
_SHOWN = 6  # layers named in a message


def size(model: Any) -> int:
    """Bytes of the model's weights, as they are before layers pack them; tied ones count once."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    counted_ids: set[int] = set()
    total_bytes = 0
    for layer in model.modules():
        for parameter_name, meta_tensor in get_layerwise_info(layer).restore_metadata[0].items():
            tensor_id = id(layer._parameters.get(parameter_name, meta_tensor))
            total_bytes += 0 if tensor_id in counted_ids else meta_tensor.numel() * meta_tensor.element_size()
            counted_ids.add(tensor_id)
    return total_bytes


def room(device: Any) -> int:
    """Bytes that are free where the weights are: of the GPU, or of this machine and its container."""
    if device.type != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    free_bytes = psutil.virtual_memory().available
    try:
        # A container sees the whole machine's memory in /proc: its own limit is what kills it.
        limit_bytes, used_bytes = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        free_bytes = min(free_bytes, limit_bytes - used_bytes)
    except (OSError, ValueError):  # no limit, or none that can be read
        pass
    return free_bytes


def obstacle(model: Any, device: Any) -> str | None:
    """Why no second copy of the weights can be made, as a line."""
    if device.type != "cpu" and any(hasattr(layer, "w13_weight") for layer in model.modules()):
        return "the model is a mixture, whose packed experts were not swapped on a GPU in any test"
    # Refused in advance: to run out of memory in the midst of it would kill the engine, and generation with it.
    needed_bytes, free_bytes = int(size(model) * _SPARE), room(device)
    if needed_bytes > free_bytes:
        return f"a second copy of the weights takes {needed_bytes >> 20} MiB, and {free_bytes >> 20} MiB are free"
    return None


# Why twins, and not a second model. To build a model anew would take a configuration, a distributed state and CUDA
# graphs that vLLM makes once in a process, and a tensor-by-tensor copy of the file would miss what layers make of it:
# fused shards, padding, packing, kernels. vLLM has code that reloads a layer in place (its `reload` package) and
# knows all of that. It works on any object with the layer's attributes, so it is given objects that share everything
# with the live layer except the dictionaries of tensors.
#
# The law that this serves is 6: the engine generates while the file is read, checked and packed, and stands still for
# the swap alone. `tests/engine/test_staging.py` has the rest: that a dropped copy leaves the model as it was, that a
# swapped one leaves nothing in memory, and that the pass in flight keeps its version.
class Second:
    """The twins of a model's layers, filled by `build`. After `swap` they are of no use."""

    def __init__(self, model: Any) -> None:
        self._pairs: dict[int, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {}
        self._tensors: dict[int, tuple[Any, Any]] = {}
        self._methods: dict[int, Any] = {}
        self.model = self._twin(model)

    def _twin(self, live: Any) -> Any:
        if id(live) in self._pairs:
            return self._pairs[id(live)][1]
        twin = object.__new__(type(live))
        twin.__dict__.update(live.__dict__)
        for attribute in _OWN:
            twin.__dict__[attribute] = copy.copy(live.__dict__[attribute])
        quant_method = live.__dict__.get("quant_method")
        if quant_method is not None:  # a layer and the adapters around it may share it
            twin.__dict__["quant_method"] = self._methods.setdefault(id(quant_method), copy.copy(quant_method))
        # What the twin had before loading: `swap` moves what has changed since, whichever attributes these are. A
        # list of their names would have to be kept for every kind of layer of every version of vLLM.
        attributes_before = dict(twin.__dict__), dict(getattr(quant_method, "__dict__", {}))
        self._pairs[id(live)] = (live, twin, *attributes_before)
        for attribute_name, parameter in live._parameters.items():
            twin._parameters[attribute_name] = self._tensor(parameter, live, twin)
        for attribute_name, buffer in live._buffers.items():
            if attribute_name not in live._non_persistent_buffers_set:  # those are computed, not loaded
                twin._buffers[attribute_name] = self._tensor(buffer, live, twin)
        for attribute_name, child_layer in live._modules.items():
            twin._modules[attribute_name] = None if child_layer is None else self._twin(child_layer)
        return twin

    def _tensor(self, live: Any, layer: Any, twin: Any) -> Any:
        """A copy with the values of `live`; one for all layers that share it."""
        if live is None:
            return None
        if id(live) not in self._tensors:
            twin_tensor = live.data.clone()
            # vLLM's parameters are classes of their own, with loaders as attributes: a plain copy would be a tensor
            # that nobody can load.
            twin_tensor.__class__ = live.__class__
            twin_tensor.__dict__ = _rebound(live.__dict__, layer, twin)
            self._tensors[id(live)] = (live, twin_tensor)
        return self._tensors[id(live)][1]

    def ready_for_load(self) -> None:
        """Tell vLLM how a file's tensors become those of the twins, as it was recorded for the live layers."""
        from vllm.model_executor.model_loader.reload import layerwise
        from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
        from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

        for live_layer, twin_layer, *_ in self._pairs.values():
            reloading_info = layerwise.get_layerwise_info(live_layer)
            meta_tensors = []
            for recorded_tensors in reloading_info.restore_metadata:
                meta_tensors.append({name: to_meta_tensor(tensor) for name, tensor in recorded_tensors.items()})
                for tensor in meta_tensors[-1].values():
                    tensor.__dict__ = _rebound(tensor.__dict__, live_layer, twin_layer)
            layerwise.LAYERWISE_INFO[twin_layer] = LayerReloadingInfo(
                restore_metadata=(meta_tensors[0], meta_tensors[1]), restore_device=reloading_info.restore_device
            )

    def loaded(self) -> None:
        """Let go of what only loading needs: it names the twins from outside and from their own tensors, and would keep
        a copy of the weights in memory for each update."""
        from vllm.model_executor.model_loader.reload import layerwise

        for _, twin_layer, *_ in self._pairs.values():
            layerwise.LAYERWISE_INFO.pop(twin_layer, None)
        for _, twin_tensor in self._tensors.values():
            twin_tensor.__dict__.clear()

    def swap(self, *, by_pointer: bool) -> list[Any]:
        """Have the live layers compute with what the twins hold. Returns what they held, for whoever frees it later:
        that takes longer than the swap."""
        replaced: list[Any] = [self]
        for live, other in self._tensors.values():
            if by_pointer and live.shape == other.shape:
                old_values = live.data
                live.data = other.data
                replaced.append(old_values)
            else:
                # A captured graph has the address, so the values have to move: one pass over the memory of the
                # weights.
                live.data.copy_(other.data)
        for live, twin, before, method_before in self._pairs.values():
            _take(live.__dict__, twin.__dict__, before, replaced, by_pointer)
            if (method := live.__dict__.get("quant_method")) is not None:
                _take(method.__dict__, twin.__dict__["quant_method"].__dict__, method_before, replaced, by_pointer)
        return replaced


def _take(
    live: dict[str, Any], twin: dict[str, Any], before: dict[str, Any], held: list[Any], by_pointer: bool
) -> None:
    """Give `live` the attributes that loading has changed in `twin` (packed weights, kernels), and nothing else: other
    attributes of the live layer may have changed meanwhile."""
    for name, value in twin.items():
        if name in _OWN or name == "quant_method" or value is before.get(name, before):
            continue
        old_value: Any = live.get(name)
        are_tensors = isinstance(old_value, torch.Tensor) and isinstance(value, torch.Tensor)
        if are_tensors and not by_pointer and (old_value.shape, old_value.dtype) == (value.shape, value.dtype):
            old_value.copy_(value)  # a captured graph remembers its address
            continue
        held.append(old_value)
        live[name] = value


def _rebound(attributes: dict[str, Any], live: Any, twin: Any) -> dict[str, Any]:
    """A tensor's attributes with the twin's methods in place of the live layer's, and no wrapper of an earlier load."""
    from vllm.model_executor.model_loader.reload.sanitize import layer_ref_sentinel

    rebound: dict[str, Any] = {}
    for name, value in attributes.items():
        # vLLM wraps a loader at each reload. Kept, the wrappers of all updates so far would be called one inside the
        # other.
        while getattr(value, "__name__", "") == "online_process_loader":
            value = value.__wrapped__
        if isinstance(value, MethodType) and value.__self__ in (live, layer_ref_sentinel):
            value = MethodType(value.__func__, twin)
        rebound[name] = value
    return rebound


@torch.no_grad()
def build(
    model: Any,
    model_config: Any,
    device: Any,
    load: Callable[[Any], None],
    settle: Callable[[Any], None],
    expected: dict[str, str],
) -> Second:
    """A second copy of the weights. `load` loads a file into a model, `settle` finishes the model after it. Raises
    WeightSyncError if the copy has other fingerprints than the `expected` ones of the file."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    with _stream_of(device):
        second_copy = Second(model)
        second_copy.ready_for_load()
        cpu_fixes.ready_for_update(second_copy.model)  # its experts are packed anew, and their kernel is made anew
        initialize_layerwise_reload(second_copy.model)
        try:
            with _marks(second_copy.model, model_config.dtype) as layer_marks:
                load(second_copy.model)
                finalize_layerwise_reload(second_copy.model, model_config)
            settle(second_copy.model)
        finally:
            second_copy.loaded()
    missing_tensors = sorted(f"{name} (not in the file)" for name in layer_marks.keys() - expected.keys())
    differences = fingerprints.differences(expected, layer_marks) + (
        missing_tensors if layer_marks.keys() & expected.keys() else []
    )
    if differences:
        raise WeightSyncError(f"the staged weights are not those of the file: {', '.join(differences[:_SHOWN])}")
    return second_copy


@contextmanager
def _marks(model: Any, dtype: Any) -> Iterator[dict[str, str]]:
    """Fingerprints of linear layers, taken as each is loaded, before it is packed: of what was packed they could only
    be had by computing with it, and oneDNN's kernels in vLLM compute on one thread at a time."""
    from vllm.distributed import get_tensor_model_parallel_world_size

    fingerprints: dict[str, str] = {}
    packed_modules = getattr(model, "packed_modules_mapping", {})
    marked_methods: list[Any] = []
    for layer_name, layer in model.named_modules():
        quant_method: Any = vars(layer).get("quant_method")
        if hasattr(layer, "base_layer") or get_tensor_model_parallel_world_size() > 1:
            continue
        if type(quant_method).__name__ == "UnquantizedLinearMethod":
            source_names = layer_diagnosis.names_of(layer_name.replace(".base_layer", ""), packed_modules)
            quant_method.process_weights_after_loading = _marking(
                quant_method.process_weights_after_loading, source_names, dtype, fingerprints
            )
            marked_methods.append(quant_method)
    try:
        yield fingerprints
    finally:
        for quant_method in marked_methods:
            del quant_method.process_weights_after_loading


def _marking(
    process: Callable[[Any], None], names: list[str], dtype: Any, marks: dict[str, str]
) -> Callable[[Any], None]:
    def marked(layer: Any) -> None:
        weight = layer.weight
        part_sizes = layer.output_sizes if len(names) > 1 else [len(weight)]
        if weight.dim() == 2 and weight.dtype == dtype and sum(part_sizes) == len(weight):
            columns = weight[:, fingerprints.columns(weight.shape[1])]
            for name, part_columns in zip(names, columns.split(part_sizes), strict=True):
                marks[name] = fingerprints.of(part_columns.float().cpu().numpy())
        process(layer)

    return marked


def by_pointer(vllm_config: Any, model: Any) -> bool:
    """Whether nothing remembers the addresses of the model's weights: no captured graph, no compiled code, no view."""
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or vllm_config.compilation_config.mode != CompilationMode.NONE:
        return False
    tensors = {id(tensor): tensor for tensor in _tensors(model)}
    # Two tensors at one address are views of one storage: a pointer that moves in one of them would tear them apart.
    addresses = [tensor.data_ptr() for tensor in tensors.values() if tensor.numel()]
    return len(addresses) == len(set(addresses))


def _tensors(model: Any) -> Iterator[Any]:
    for layer in model.modules():
        yield from (tensor for tensor in layer._parameters.values() if tensor is not None)
        yield from (tensor for tensor in layer._buffers.values() if tensor is not None)


@contextmanager
def _stream_of(device: Any) -> Iterator[None]:
    """Work on a stream of its own where there is a GPU; at the end it has been done."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    copy_stream = torch.cuda.Stream(device)
    copy_stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(copy_stream):
        yield
    copy_stream.synchronize()
