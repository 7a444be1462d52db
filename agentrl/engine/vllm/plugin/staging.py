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

    counted: set[int] = set()
    total = 0
    for layer in model.modules():
        for name, meta in get_layerwise_info(layer).restore_metadata[0].items():
            tensor_id = id(layer._parameters.get(name, meta))
            total += 0 if tensor_id in counted else meta.numel() * meta.element_size()
            counted.add(tensor_id)
    return total


def room(device: Any) -> int:
    """Bytes that are free where the weights are: of the GPU, or of this machine and its container."""
    if device.type != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    free = psutil.virtual_memory().available
    try:
        # A container sees the whole machine's memory in /proc: its own limit is what kills it.
        most, now = (int((_CGROUP / f"memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, most - now)
    except (OSError, ValueError):  # no limit, or none that can be read
        pass
    return free


def obstacle(model: Any, device: Any) -> str | None:
    """Why no second copy of the weights can be made, as a line."""
    if device.type != "cpu" and any(hasattr(layer, "w13_weight") for layer in model.modules()):
        return "the model is a mixture, whose packed experts were not swapped on a GPU in any test"
    # Refused in advance: to run out of memory in the midst of it would kill the engine, and generation with it.
    need, free = int(size(model) * _SPARE), room(device)
    if need > free:
        return f"a second copy of the weights takes {need >> 20} MiB, and {free >> 20} MiB are free"
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
        method = live.__dict__.get("quant_method")
        if method is not None:  # a layer and the adapters around it may share it
            twin.__dict__["quant_method"] = self._methods.setdefault(id(method), copy.copy(method))
        # What the twin had before loading: `swap` moves what has changed since, whichever attributes these are. A
        # list of their names would have to be kept for every kind of layer of every version of vLLM.
        before = dict(twin.__dict__), dict(getattr(method, "__dict__", {}))
        self._pairs[id(live)] = (live, twin, *before)
        for name, parameter in live._parameters.items():
            twin._parameters[name] = self._tensor(parameter, live, twin)
        for name, buffer in live._buffers.items():
            if name not in live._non_persistent_buffers_set:  # those are computed, not loaded
                twin._buffers[name] = self._tensor(buffer, live, twin)
        for name, child in live._modules.items():
            twin._modules[name] = None if child is None else self._twin(child)
        return twin

    def _tensor(self, live: Any, layer: Any, twin: Any) -> Any:
        """A copy with the values of `live`; one for all layers that share it."""
        if live is None:
            return None
        if id(live) not in self._tensors:
            other = live.data.clone()
            # vLLM's parameters are classes of their own, with loaders as attributes: a plain copy would be a tensor
            # that nobody can load.
            other.__class__ = live.__class__
            other.__dict__ = _rebound(live.__dict__, layer, twin)
            self._tensors[id(live)] = (live, other)
        return self._tensors[id(live)][1]

    def ready_for_load(self) -> None:
        """Tell vLLM how a file's tensors become those of the twins, as it was recorded for the live layers."""
        from vllm.model_executor.model_loader.reload import layerwise
        from vllm.model_executor.model_loader.reload.meta import to_meta_tensor
        from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo

        for live, twin, *_ in self._pairs.values():
            recorded = layerwise.get_layerwise_info(live)
            kinds = []
            for tensors in recorded.restore_metadata:
                kinds.append({name: to_meta_tensor(tensor) for name, tensor in tensors.items()})
                for tensor in kinds[-1].values():
                    tensor.__dict__ = _rebound(tensor.__dict__, live, twin)
            layerwise.LAYERWISE_INFO[twin] = LayerReloadingInfo(
                restore_metadata=(kinds[0], kinds[1]), restore_device=recorded.restore_device
            )

    def loaded(self) -> None:
        """Let go of what only loading needs: it names the twins from outside and from their own tensors, and would keep
        a copy of the weights in memory for each update."""
        from vllm.model_executor.model_loader.reload import layerwise

        for _, twin, *_ in self._pairs.values():
            layerwise.LAYERWISE_INFO.pop(twin, None)
        for _, other in self._tensors.values():
            other.__dict__.clear()

    def swap(self, *, by_pointer: bool) -> list[Any]:
        """Have the live layers compute with what the twins hold. Returns what they held, for whoever frees it later:
        that takes longer than the swap."""
        replaced: list[Any] = [self]
        for live, other in self._tensors.values():
            if by_pointer and live.shape == other.shape:
                old = live.data
                live.data = other.data
                replaced.append(old)
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
        old: Any = live.get(name)
        tensors = isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor)
        if tensors and not by_pointer and (old.shape, old.dtype) == (value.shape, value.dtype):
            old.copy_(value)  # a captured graph remembers its address
            continue
        held.append(old)
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
        second = Second(model)
        second.ready_for_load()
        cpu_fixes.ready_for_update(second.model)  # its experts are packed anew, and their kernel is made anew
        initialize_layerwise_reload(second.model)
        try:
            with _marks(second.model, model_config.dtype) as marks:
                load(second.model)
                finalize_layerwise_reload(second.model, model_config)
            settle(second.model)
        finally:
            second.loaded()
    lacking = sorted(f"{name} (not in the file)" for name in marks.keys() - expected.keys())
    wrong = fingerprints.differences(expected, marks) + (lacking if marks.keys() & expected.keys() else [])
    if wrong:
        raise WeightSyncError(f"the staged weights are not those of the file: {', '.join(wrong[:_SHOWN])}")
    return second


@contextmanager
def _marks(model: Any, dtype: Any) -> Iterator[dict[str, str]]:
    """Fingerprints of linear layers, taken as each is loaded, before it is packed: of what was packed they could only
    be had by computing with it, and oneDNN's kernels in vLLM compute on one thread at a time."""
    from vllm.distributed import get_tensor_model_parallel_world_size

    fingerprints: dict[str, str] = {}
    packed = getattr(model, "packed_modules_mapping", {})
    marked: list[Any] = []
    for name, layer in model.named_modules():
        method: Any = vars(layer).get("quant_method")
        if hasattr(layer, "base_layer") or get_tensor_model_parallel_world_size() > 1:
            continue
        if type(method).__name__ == "UnquantizedLinearMethod":
            names = layer_diagnosis.names_of(name.replace(".base_layer", ""), packed)
            method.process_weights_after_loading = _marking(
                method.process_weights_after_loading, names, dtype, fingerprints
            )
            marked.append(method)
    try:
        yield fingerprints
    finally:
        for method in marked:
            del method.process_weights_after_loading


def _marking(
    process: Callable[[Any], None], names: list[str], dtype: Any, marks: dict[str, str]
) -> Callable[[Any], None]:
    def marked(layer: Any) -> None:
        weight = layer.weight
        sizes = layer.output_sizes if len(names) > 1 else [len(weight)]
        if weight.dim() == 2 and weight.dtype == dtype and sum(sizes) == len(weight):
            columns = weight[:, fingerprints.columns(weight.shape[1])]
            for name, part in zip(names, columns.split(sizes), strict=True):
                marks[name] = fingerprints.of(part.float().cpu().numpy())
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
    places = [tensor.data_ptr() for tensor in tensors.values() if tensor.numel()]
    return len(places) == len(set(places))


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
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
