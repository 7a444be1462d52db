"""Traffic between the ranks in a pass, computed on one machine before anything is loaded.

One rank of so many runs the learner's own code: its models are made from the model's configuration alone, of tensors
that have shapes and no numbers (torch's FakeTensorMode), cut and gathered as a run file says, and make one pass forward
and backward, in a process group that sends nothing (torch's "fake" backend). Every collective is noted under its name.
Never knows bandwidths.

Of a mixture whose experts are apart, tokens go where they are chosen, which shapes alone do not say: here each rank
gets as many as any other.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.config.roles import LearnerSettings
from agentrl.config.train import ParallelPlan
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.data.rows import Row
from agentrl.learner.memory_budget import grouped, hollow
from agentrl.learner.model.models import ModelPasses, Models
from agentrl.learner.parallel import collectives, layers
from agentrl.learner.parallel.collectives import Meshes
from agentrl.learner.parallel.fsdp import shard
from agentrl.learner.parallel.ranks import RankMember

KINDS: Mapping[str, str] = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
    "alltoall_base_": "all-to-all",
}
"""By what torch calls them."""


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective that `size` ranks enter. `shape` is of the whole tensor, of which a rank has, or gets, one part of
    `size`; of an all-reduce it has all; of an all-to-all it has all, and sends each rank a part."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    size: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in a ring, which takes each part past all ranks; twice for an all-reduce."""
        return self.nbytes * (self.size - 1) / self.size * (2 if self.kind == "all-reduce" else 1)


def traffic(settings: LearnerSettings, folder: Path, rows: Sequence[Row]) -> list[Collective]:
    """List the collectives of rank 0 of `train.parallel`, in one pass of its team over `rows`. `folder` needs no more
    than a config.json. The process has no ranks of its own. Raises ConfigError for a model that cannot be cut so."""
    parallel_plan = settings.train.parallel
    with first_of(parallel_plan) as first_rank:
        with hollow():
            hollow_models = Models(
                settings, folder, "cpu", reference_dir=folder, folder_of=lambda _: folder, ranks=first_rank
            )
        (traced_pack,) = packs([rows], 1 << 60)
        recorder, model_passes = _Recorder(), ModelPasses(hollow_models)
        collectives.keep(cast(Any, recorder))  # in the place of a ledger
        with recorder:
            model_passes.others(traced_pack)
            pass_outputs = model_passes.forward(traced_pack, trained=tuple(hollow_models.optimizers))
            pass_loss = pass_outputs.logprobs_K.sum() + (
                0 if pass_outputs.values_K is None else pass_outputs.values_K.sum()
            )
            pass_loss.backward()
    return recorder.collectives


@contextmanager
def first_of(plan: ParallelPlan) -> Generator[RankMember]:
    """Inside, this process is the first of the ranks, the others of which do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    fake_store, fake_timeout = FakeStore(), timedelta(seconds=1)
    # A group that sends nothing, so that 512 ranks can be planned on a laptop; what is counted is the learner's own
    # code and no formula that could fall behind it.
    distributed.init_process_group("fake", store=fake_store, rank=0, world_size=plan.ranks)
    try:
        first_rank = RankMember(0, plan.ranks, fake_timeout, Meshes(init_device_mesh("cpu", (plan.ranks,))), fake_store)
        first_rank.arrange(plan)
        yield _First(0, plan.ranks, fake_timeout, first_rank.meshes, fake_store)
    finally:
        collectives.keep(None)
        distributed.destroy_process_group()


class _First(RankMember):
    def arrange(self, plan: ParallelPlan) -> None: ...

    def cut(self, module: nn.Module, dtype: torch.dtype = torch.float32) -> None:
        with unset_fake_temporarily(), patch.object(layers, "Experts", _Even):  # meshes are numbers
            shard(module, self.meshes, dtype)


class _Even(layers.Experts):
    """Each rank has chosen every rank's experts as often. Rank 0 gets what is left over."""

    def _rows(self, sent_WE: Tensor, taken_WE: Tensor, count: int) -> tuple[list[int], list[int]]:
        rank_count = len(sent_WE)
        sent_counts = [-(-(count - rank) // rank_count) for rank in range(rank_count)]
        return sent_counts, sent_counts[:1] * rank_count


class _Recorder(TorchDispatchMode):
    """Record the collectives within a block. It gets their names by `enter`, as a ledger does."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: list[Collective] = []
        self._name = ""

    def enter(self, name: str) -> None:
        self._name = name

    def leave(self) -> None: ...

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            arguments = tree_leaves(args)
            largest_tensor = max((argument for argument in arguments if isinstance(argument, Tensor)), key=Tensor.numel)
            (process_group,) = (
                process_group for process_group in map(_group_of, arguments) if process_group is not None
            )
            collective_kind = KINDS[func._schema.name.partition("::")[2]]
            self.collectives.append(
                Collective(
                    self._name, collective_kind, tuple(largest_tensor.shape), largest_tensor.dtype, process_group.size()
                )
            )
        return (grouped if func is torch.ops.aten._grouped_mm.default else func)(*args, **(kwargs or {}))


def _group_of(one: object) -> distributed.ProcessGroup | None:
    if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one):
        return distributed.ProcessGroup.unbox(one)
    return None
