"""The memory that a learner's step needs, by purpose, computed before anything is loaded.

The learner's own models are made from the model's configuration alone, of tensors that have shapes and no numbers
(torch's FakeTensorMode), and make one pass forward and backward and one update; meanwhile every storage is counted from
its first tensor to its last. So a new optimizer, a checkpointed layer or another output layer needs no formula here.
Never knows GPUs, engines or prices. Kernels' own scratch memory, and what an allocator loses between blocks, are not
counted.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import json
import tempfile
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from agentrl.config.roles import LearnerSettings
from agentrl.errors import ModelError
from agentrl.learner.data.prefix_trees import Branch, Pack, packs, stem
from agentrl.learner.data.rows import Row
from agentrl.learner.flops import EXPERTS, operations, prices
from agentrl.learner.model.load import load
from agentrl.learner.model.models import ModelPasses, Models
from agentrl.learner.parallel.pass_shards import pieces, spans
from agentrl.learner.parallel.ranks import ALONE

# Two layers and four: their difference is that of two layers in the middle, free of what the first and the last one
# have to themselves.
TRACED = (2, 4)  # layers; of a deeper model the rest follows from these two


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes. `frozen` are other models that learn nothing, and those that follow the policy. `optimizer` is what an
    optimizer remembers, masters too; what of that waits in host memory is in `host` instead. `activations` are what the
    forward pass leaves for the backward pass, logits too if there is room for all of them; `lent` of these is what a
    stem keeps for its passes. `temporary` is what comes and goes within a pass or an update, such as the logits of a
    chunk. `operations` are floating-point ones, of the pass forward and backward; `again` of these would be those of
    its stem, which is computed once for several passes."""

    weights: float
    frozen: float
    gradients: float
    optimizer: float
    host: float
    activations: float
    lent: float
    temporary: float
    operations: float
    again: float
    parameters: float  # of the policy, however many bytes one takes
    experts: float  # of these, those of a mixture's experts

    @property
    def total(self) -> float:
        """The most at any time."""
        return self.static + self.activations + self.temporary

    @property
    def static(self) -> float:
        """The memory that does not depend on the size of a pass."""
        return self.weights + self.frozen + self.gradients + self.optimizer


class Tracker(TorchDispatchMode):
    """Inside, counts the bytes of every storage that a tensor is made over, as long as one lives. `now` and `peak` are
    in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        # Storages and not tensors: a view, a transpose and a slice of one tensor hold the same bytes once.
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, tensors: Iterable[Tensor]) -> int:
        """Count these as well. Returns how many bytes are new."""
        before = self.now
        for tensor in _plain(tensors):
            storage = tensor.untyped_storage()
            key = storage._cdata  # pyright: ignore[reportPrivateUsage]
            if key not in self._known:
                self._count(key, storage, storage.nbytes())
        return self.now - before

    def leave(self, tensors: Iterable[Tensor]) -> int:
        """Count these no longer, however they are used: they are on another device. Returns how many bytes they had."""
        before = self.now
        for tensor in _plain(tensors):
            self.add([tensor])
            storage = tensor.untyped_storage()
            self.now -= storage.nbytes()
            self._known[storage._cdata] = weakref.ref(storage)  # pyright: ignore[reportPrivateUsage]
        return before - self.now

    def _count(self, key: int, storage: Any, size: int) -> None:
        def gone(_: object) -> None:
            self.now -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = (grouped if func is torch.ops.aten._grouped_mm.default else func)(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


def grouped(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: object, **__: object) -> Tensor:
    """Stand in for torch's grouped matrix products, for any dtype: without numbers torch refuses all but bfloat16."""
    groups = () if a.ndim != b.ndim else (len(b) if offs is None else len(offs),)
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])


def _plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that hold numbers: some stand for others (moments of 8 bits: codes and scales)."""
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            yield from _plain(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


def parameters_of(folder: Path) -> int:
    """Number of parameters of the model that a config.json describes, tied ones once. Raises ModelError."""
    with hollow():
        module: nn.Module = load(folder, ALONE, "sdpa")
    return sum(parameter.numel() for parameter in module.parameters())


def held(
    settings: LearnerSettings, folder: Path, rows: Sequence[Row], *, on_gpu: bool, passes: int = 1, context: int = 1
) -> MemoryBudget:
    """Compute the budget of a step whose largest pass computes `rows`, after the first step; of a group that has
    several `passes` where it is larger than one. `folder` needs no more than a config.json. With `on_gpu`, attention is
    one kernel that holds its inputs and its output, and optimizers work on all tensors at once, as on CUDA. The
    activations are those of one of `context` ranks that share a pass by its nodes: each has its nodes', the keys and
    values on their paths, and all that a stem lends. Raises ModelError for a model that cannot be computed without
    numbers."""
    try:
        return _held(settings, folder, rows, passes, context, on_gpu=on_gpu)
    # Tensors without numbers refuse what needs one: an `.item()`, a data-dependent shape. The model may well train;
    # only the plan cannot be made.
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"cannot plan {str(folder)!r}: a pass without numbers failed ({reason})") from error


def _held(
    settings: LearnerSettings, folder: Path, rows: Sequence[Row], passes: int, context: int, *, on_gpu: bool
) -> MemoryBudget:
    described = json.loads((folder / "config.json").read_text())
    depth = described.get("num_hidden_layers")
    if not isinstance(depth, int) or depth <= max(TRACED):
        return _traced(settings, folder, rows, passes, context, on_gpu=on_gpu)
    with tempfile.TemporaryDirectory() as scratch:
        less, more = (
            _traced(
                settings, _shallow(described, layers, Path(scratch) / str(layers)), rows, passes, context, on_gpu=on_gpu
            )
            for layers in TRACED
        )
    times = (depth - TRACED[0]) / (TRACED[1] - TRACED[0])
    sizes = {name: getattr(less, name) for name in MemoryBudget.__slots__}
    return MemoryBudget(**{name: size + (getattr(more, name) - size) * times for name, size in sizes.items()})


def _shallow(described: dict[str, Any], layers: int, folder: Path) -> Path:
    """Describe a model of only `layers` layers in `folder`, otherwise as in `described`."""
    folder.mkdir()
    kinds = {"layer_types": described["layer_types"][:layers]} if described.get("layer_types") else {}
    (folder / "config.json").write_text(json.dumps({**described, "num_hidden_layers": layers, **kinds}))
    return folder


def _traced(
    settings: LearnerSettings, folder: Path, rows: Sequence[Row], passes: int, context: int, *, on_gpu: bool
) -> MemoryBudget:
    with hollow():
        models = Models(settings, folder, "cpu", reference_dir=folder, folder_of=lambda _: folder)

    class Counted(Kernel):
        heard: ClassVar[list[int]] = []

    if on_gpu:
        for model in models.language_models():
            model.layout = Counted
    model_passes, optimizers = ModelPasses(models), list(models.optimizers.values())
    (pack,) = packs([rows], 1 << 60)
    prompt_stem = stem(rows, passes)
    if passes > 1 and len(prompt_stem) and models.prompt_once:
        pack = replace(pack, stem=prompt_stem)
    tracker = Tracker()
    with tracker:
        learning, others = models.held()
        weights, frozen = tracker.add(learning), tracker.add(others)
        # Gradients are there from the first step on, and the peak is one of a later step.
        for parameter in models.learned():
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
        gradients = tracker.now - weights - frozen
        tracker.add(models.masters())
        # An update before the pass: an optimizer makes its moments in its first step, and the pass of the second step
        # has them beside it.
        _update(optimizers, on_gpu)
        host = tracker.leave(models.away())
        static = tracker.now
        # What loading needed is over by the time of a step.
        tracker.peak = static
        activations = lent = along = 0
        with model_passes.stem():
            for _ in range(1 if pack.stem is None else 2):  # in the second the sums of the stem's gradients are there
                model_passes.others(pack)
                outputs = model_passes.forward(pack, trained=tuple(models.optimizers))
                activations, lent = tracker.now - static, model_passes.lent_bytes
                if not settings.train.gradient_checkpointing:
                    along = along or sum(Counted.heard)  # in the first the stem's are among them
                results = (outputs.logprobs_K, outputs.entropy_K, outputs.values_K)
                loss = torch.stack([part.sum() for part in results if part is not None and part.requires_grad]).sum()
                loss.backward()
                del outputs, loss, results
        _update(optimizers, on_gpu)
    return MemoryBudget(
        weights=weights,
        frozen=frozen,
        gradients=gradients,
        optimizer=static - weights - frozen - gradients,
        host=host,
        activations=(activations - lent - along) / context + lent + along * _along(pack, context),
        lent=lent,
        temporary=tracker.peak - static - activations,
        operations=operations(models.policy.module, replace(pack, stem=None)),
        again=0.0 if pack.stem is None else prices(models.policy.module).stem(pack.stem),
        parameters=sum(parameter.numel() for parameter in models.policy.module.parameters()),
        experts=sum(part.numel() for name, part in models.policy.module.named_parameters() if EXPERTS in name),
    )


@contextmanager
def hollow() -> Generator[None]:
    """Inside, modules are made of tensors without numbers. Torch's own way to convert a module cannot swap these."""

    def convert(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for part in module.modules() if recurse else (module,):
            for name, parameter in part._parameters.items():  # pyright: ignore[reportPrivateUsage]
                if parameter is not None and (converted := function(parameter.detach())).dtype != parameter.dtype:
                    setattr(part, name, nn.Parameter(converted, parameter.requires_grad))
        return module

    with FakeTensorMode(allow_non_fake_inputs=True), patch.object(nn.Module, "_apply", convert):
        yield


def _update(optimizers: Sequence[torch.optim.Optimizer], on_gpu: bool) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if on_gpu and group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = True
        with torch.compiler.set_stance("force_eager"):  # torchao compiles its own, which takes longer than all of this
            optimizer.step()


def _along(pack: Pack, context: int) -> float:
    """The most that one of `context` ranks has of a pass's keys and values: a run of nodes has a copy of its path."""
    edges = sorted({0, 0 if pack.stem is None else len(pack.stem), len(pack.token_ids_N)})
    lengths = [0] * context
    for span in pairwise(edges):
        branches = pieces(pack.branches, [span])
        for rank, share in enumerate(spans(branches, context)):
            lengths[rank] += sum(len(branch.path) for branch in pieces(branches, share))
    total = sum(len(branch.path) for span in pairwise(edges) for branch in pieces(pack.branches, [span]))
    return max(lengths) / total


class Kernel:
    """A layout whose attention is one kernel: it holds queries, keys and values along the paths, and its output."""

    heard: ClassVar[list[int]]
    """Bytes of keys and values along the paths, of each attention that a backward pass will see."""

    def __init__(self, branches: Sequence[Branch], device: torch.device | None = None) -> None:
        del device
        self.paths = torch.cat([branch.path for branch in branches])

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        del window, scale, sinks
        keys, values = key.index_select(2, self.paths), value.index_select(2, self.paths)
        if torch.is_grad_enabled():
            self.heard.append(keys.nbytes + values.nbytes)
        return _Attention.apply(query, keys, values).transpose(1, 2)  # pyright: ignore


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, sums = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
