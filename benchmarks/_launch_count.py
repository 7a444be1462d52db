"""Counts what a step of the learner would launch on a GPU, on a machine without one.

Inside `Counter` every call of torch goes on as always, on the CPU. Those whose tensors would be on the learner's device
are counted: kernels, the bytes that they read and write, and the calls for which the host waits. The learner's device
is "cpu:0", the host's "cpu": `.to` tells them apart, and a tensor is the device's if it was moved there, or made from
one that is, or made in a pass.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.learner import learner as learners
from agentrl.learner import rank_worker, step_report
from agentrl.learner.data.device_copy import each_tensor
from agentrl.learner.learner import Learner
from agentrl.learner.model import attention, logprobs, policy
from agentrl.learner.model.models import Models

DEVICE = torch.device("cpu:0")
"""What a learner under the counter is given."""

_CHUNK, _BLOCKS = 65_536, 320  # of torch's foreach kernels: elements of a chunk, chunks of a launch
_TENSORS = (110, 64, 48, 36, 30)  # of a launch, by how many lists it reads and writes
_FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "lift_fresh", "set_"}
_SIZED = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}  # the host asks how large
_ASKED = {"tolist", "numpy", "cpu", "__array__", "__index__"}
_UNREAD = {"zero_", "fill_", "copy_", "zeros_like", "ones_like", "full_like", "index_select", "embedding"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}


@dataclass(slots=True)
class Count:
    kernels: int = 0
    bytes: int = 0
    syncs: int = 0
    copies: int = 0  # from host to device

    def add(self, other: Count) -> None:
        for name in Count.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Counter(TorchDispatchMode):
    """`counts` by part of the step and phase: forward or backward. `passes`: how many there were; `moves`: records that
    went to the device in one copy that nobody waits for; `where`: the syncs and copies by part and call."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: defaultdict[tuple[str, str], Count] = defaultdict(Count)
        self.where: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.calls: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self.passes = self.moves = 0
        self._parts = ["packing"]
        self._edges: list[int] = []  # of autograd's sequence numbers
        self._of: list[str] = []
        self._there: dict[int, StorageWeakRef] = {}  # storages on the device, by address
        self._in_pass = 0
        self._quiet = 0
        self._asked = _Asked(self)

    # --- which part ---------------------------------------------------------------------------------------------------

    @contextmanager
    def part(self, name: str) -> Generator[None]:
        self._parts.append(name)
        self._mark()
        try:
            yield
        finally:
            self._parts.pop()
            self._mark()

    def _mark(self) -> None:
        self._edges.append(torch.autograd._get_sequence_nr())
        self._of.append(self._parts[-1])

    def _now(self) -> tuple[str, str]:
        node = torch._C._current_autograd_node()
        if node is None:
            return self._parts[-1], "forward"
        if "AccumulateGrad" in node.name():
            return "adding up gradients", "backward"
        at = bisect_right(self._edges, node._sequence_nr()) - 1
        return self._of[at] if at >= 0 else self._parts[-1], "backward"

    # --- what is where ------------------------------------------------------------------------------------------------

    def there(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._there  # an address is not used again while a reference is left

    def put(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._there.setdefault(storage._cdata, StorageWeakRef(storage))

    # --- counting -----------------------------------------------------------------------------------------------------

    def sync(self, call: str) -> None:
        self.counts[self._now()].syncs += 1
        self.where[self._now()[0], call] += 1

    def copied(self) -> None:
        self.counts[self._now()].copies += 1
        self.where[self._now()[0], "to the device"] += 1

    def opaque(self, part: str, forward: Count, backward: Count) -> None:
        """What torch launches in another way on a GPU."""
        self.counts[part, "forward"].add(forward)
        if torch.is_grad_enabled():
            self.counts[part, "backward"].add(backward)

    @contextmanager
    def quiet(self, part: str) -> Generator[None]:
        """Inside, nothing is counted; nor in what autograd does of it."""
        self._quiet += 1
        with self.part(f"-{part}"):
            yield
        self._quiet -= 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "::" in func._schema.name.removeprefix("aten::") or func._schema.name == "aten::promote_types":
            return made
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        found = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
        part, phase = self._now()
        waits = part == "optimizer" and all(one.dim() == 0 for one in (*given, *found))  # its steps are the host's
        on_host = part == "layout of a pass"
        if waits or not ((self._in_pass and not on_host) or any(self.there(one) for one in given)):
            return made
        self.put(found)
        if self._quiet or part.startswith("-"):
            return made
        name = func._schema.name.removeprefix("aten::")
        if name == "_local_scalar_dense":
            self.sync("item")
            return made
        if name in _SIZED or (name == "repeat_interleave" and not (kwargs or {}).get("output_size")):
            self.sync(name)
        if name in _INDEXED and any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]):
            self.sync(f"{name} by a mask")
        if name in _FREE or func.is_view or name in ("detach", "alias"):
            return made
        self.calls[part, phase, name] += 1
        count = self.counts[part, phase]
        if name.startswith(("_foreach", "_fused")):
            lists = [one for one in args if isinstance(one, list | tuple) and one and isinstance(one[0], Tensor)]
            depth = len(lists) + (0 if name.endswith("_") else 1)
            count.kernels += launches([one.numel() for one in lists[0]], depth)
            count.bytes += sum(one.nbytes for one in given) + sum(one.nbytes for one in found)
            if name.endswith("_"):
                count.bytes += sum(one.nbytes for one in lists[0])
            return made
        count.kernels += 1
        written = sum(_bytes(one) for one in found)
        count.bytes += written + sum(_read(func, one, at) for at, one in enumerate(given))
        return made

    # --- a learner ----------------------------------------------------------------------------------------------------

    @contextmanager
    def over(self, learner: Learner) -> Generator[Counter]:
        """Inside, this learner's steps are counted."""
        module = learner.model.module
        parts = {"embed_tokens": "embedding", "rotary_emb": "rotary", "self_attn": "attention", "mlp": "MLP"}
        with ExitStack() as stack:
            for name, one in module.named_modules():
                last = name.rpartition(".")[2]
                found = "norms" if "norm" in last else parts.get(last)
                if found is not None:
                    forward, own = one.forward, vars(one).get("forward")
                    one.forward = self._within(found, forward)
                    stack.callback(_put_back, one, own)
            modeling = __import__(type(module).__module__, fromlist=["apply_rotary_pos_emb"])
            for owner, name, part in (
                (modeling, "apply_rotary_pos_emb", "rotary"),
                (policy, "statistics", "head and log-probs"),
                (rank_worker, "pass_result", "numbers of a pass"),
                (learners, "summarise", "report"),
                (step_report.StepTally, "on_host", "report"),
                (Models, "_clip", "gradient clip"),
                (Models, "follow", "moving models"),
                (attention.Subtrees, "__init__", "layout of a pass"),
                (attention.Subtrees, "_mask", "layout of a pass"),
                (attention.Paths, "__init__", "layout of a pass"),
                (attention.Paths, "_mask", "layout of a pass"),
                (type(learner.settings.algo), "loss", "loss"),
            ):
                stack.enter_context(patch.object(owner, name, self._within(part, getattr(owner, name))))
            for optimizer in learner.models.optimizers.values():
                stack.enter_context(patch.object(optimizer, "step", self._within("optimizer", optimizer.step)))
                for group in optimizer.param_groups:  # as it is on CUDA
                    if group.get("foreach", False) is None and not group.get("fused"):
                        group["foreach"] = True
            for name, part in (("forward_backward", "pass"), ("forward", "pass"), ("optimizer_step", "update")):
                stack.enter_context(
                    patch.object(learner.worker, name, self._device(part, getattr(learner.worker, name)))
                )
            passed = self._passed(policy.PolicyModel.outputs)
            stack.enter_context(patch.object(policy.PolicyModel, "outputs", passed))
            stack.enter_context(patch.object(attention, "_flex", lambda _: self._flex))
            stack.enter_context(patch.object(logprobs, "_BLOCK_BYTES", {}))
            foreach = "torch.utils._foreach_utils._get_foreach_kernels_supported_devices"
            stack.enter_context(patch(foreach, lambda: ["cpu", "cuda"]))
            for owner in (rank_worker, attention, step_report):
                stack.enter_context(patch.object(owner, "moved", self._moved))
            self.put([*module.parameters(), *module.buffers()])
            for optimizer in learner.models.optimizers.values():
                self.put(v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor) and v.dim())
            stack.enter_context(self._asked)
            stack.enter_context(self)
            yield self

    def _within(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def within(*args: Any, **kwargs: Any) -> Any:
            with self.part(part):
                return call(*args, **kwargs)

        return within

    def _device(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def there(*args: Any, **kwargs: Any) -> Any:
            self._in_pass += 1
            try:
                with self.part(part):
                    return call(*args, **kwargs)
            finally:
                self._in_pass -= 1

        return there

    def _passed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def passed(*args: Any, **kwargs: Any) -> Any:
            self.passes += 1
            return call(*args, **kwargs)

        return passed

    def _flex(self, query: Tensor, key: Tensor, value: Tensor, *, block_mask: Any, **options: Any) -> Any:
        """FlexAttention as one kernel, and two in the backward pass: the sums of output and gradient, and the rest."""
        with self.quiet("attention kernel"):
            node, other = (torch.arange(part.shape[2]) for part in (query, key))
            seen = block_mask.mask_mod(0, 0, node[:, None], other[None])
            grouped, scale = options["enable_gqa"], options["scale"]
            output = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=seen, scale=scale, enable_gqa=grouped
            )
        moved = sum(one.nbytes for one in (query, key, value, output))
        self.opaque("attention kernel", Count(1, moved), Count(2, 2 * moved + output.nbytes))
        return output

    def _moved(self, value: Any, device: torch.device | str) -> Any:
        """A record of tensors that goes to the device or comes from there: in one copy."""
        there = torch.device(device) == DEVICE
        seen: list[Tensor] = []
        each_tensor(value, lambda tensor: seen.append(tensor) or tensor)
        if not any(self.there(tensor) != there for tensor in seen):
            return value
        if there:
            self.moves += 1
        else:
            self.sync("moved")
        with torch.utils._python_dispatch._disable_current_modes():
            found = each_tensor(value, lambda one: one if self.there(one) == there else one.clone())
        if there:
            each_tensor(found, lambda tensor: self.put([tensor]) or tensor)
        return found


class _Asked(TorchFunctionMode):
    """Hears what the dispatcher is not told on a CPU."""

    def __init__(self, counter: Counter) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name, counter = kwargs or {}, getattr(func, "__name__", ""), self._counter
        own = args[0] if args and isinstance(args[0], Tensor) else None
        if own is not None and name in ("to", "cpu"):
            asked = [one for one in (*args[1:], *kwargs.values()) if isinstance(one, str | torch.device)]
            device = torch.device(asked[0]) if asked else None
            if (name == "cpu" or "cpu" in asked) and counter.there(own):
                counter.sync(name)
                with torch.utils._python_dispatch._disable_current_modes():
                    own = own.clone()
            elif device == DEVICE and not counter.there(own):
                counter.copied()
                with torch.utils._python_dispatch._disable_current_modes():
                    own = own.clone()
                counter.put([own])
            return func(own, *args[1:], **kwargs)
        if own is not None and name in _ASKED and counter.there(own):
            counter.sync(name)
        made = func(*args, **kwargs)
        given = kwargs.get("device")
        if isinstance(made, Tensor) and given is not None and torch.device(given) == DEVICE and not counter.there(made):
            if name in ("tensor", "as_tensor"):
                counter.copied()
            counter.put([made])
        return made


def launches(sizes: Iterable[int], lists: int) -> int:
    """Of a foreach kernel over tensors of these sizes, with so many lists of them."""
    most = _TENSORS[min(max(lists, 1), len(_TENSORS)) - 1]
    count = tensors = blocks = 0
    for size in sizes:
        left = -(-size // _CHUNK)
        tensors += 1
        while left:
            now = min(left, _BLOCKS - blocks)
            left, blocks = left - now, blocks + now
            if blocks == _BLOCKS or (tensors == most and not left):
                count, blocks, tensors = count + 1, 0, 1 if left else 0
    return count + (1 if blocks else 0)


def _bytes(tensor: Tensor) -> int:
    """Of a tensor; numbers that stand for many places are read once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else min(length, 1)
    return size


def _read(func: Any, tensor: Tensor, at: int) -> int:
    name = func._schema.name.removeprefix("aten::")
    if at == 0 and name in _UNREAD:
        return 0  # it is written, or a part of it read: as much as is made
    return _bytes(tensor)


def _put_back(module: Any, own: Any) -> None:
    if own is None:
        del module.forward
    else:
        module.forward = own
