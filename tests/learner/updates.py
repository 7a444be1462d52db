"""Updates by muon that every rank makes with the others, of matrices that they divide in all ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from agentrl.config import Train
from agentrl.learner.learner import Learner
from agentrl.learner.optimizers.optimizers import make
from agentrl.learner.parallel.fsdp import local, whole
from agentrl.learner.parallel.layers import ParameterCut
from agentrl.learner.parallel.ranks import Leader
from agentrl.learner.rank_orders import HashWeights
from agentrl.learner.rank_worker import RankWorker

from .making import At

T = TypeVar("T")

SHAPES: Final = [(12, 8), (12, 8), (12, 8), (7, 10), (3, 16), (1, 6), (8, 4), (6, 12), (5, 5), (9,)]
"""Also rows that four ranks cannot divide, fewer rows than ranks, and a vector."""
OUTER, NEVER, OFTEN = 6, 8, (2, 3, 4)
"""Updated by AdamW; one that never has a gradient; those whose first rows have none, nor ranks that have only these."""
CUT = {0: 0, 1: 1, 7: 0}
"""Cut over the ranks of a row by this dimension, if a row has several."""
STEPS, LR, DECAY = 4, 0.05, 0.1


def everywhere(ranks: Leader, learner: Learner, work: Callable[[], T]) -> T:
    """What `work` returns on rank 0 while every other rank does it too."""

    class Here:
        def run(self, worker: RankWorker) -> T:
            result = work()
            HashWeights().run(worker)
            return result

    orders: list[Any] = [Here(), *[At(work)] * (ranks.size - 1)]
    return ranks.run(learner.worker, orders)[0]


def updated(size: int, *, tensor: int = 1, offload: bool = False) -> list[Tensor]:
    """Whole parameters after some updates over so many ranks, in rows of `tensor`."""
    row = table(size // tensor, tensor) if size > 1 else None

    def cut(at: int, numbers: Tensor) -> Tensor:
        if row is None:
            return numbers
        if tensor > 1 and at in CUT:
            return distribute_tensor(numbers, row, ParameterCut(row, CUT[at]).placements, src_data_rank=None)
        return distribute_tensor(numbers, init_device_mesh("cpu", (size,)), [Shard(0)], src_data_rank=None)

    random = torch.Generator().manual_seed(0)
    own = [nn.Parameter(cut(at, torch.randn(shape, generator=random))) for at, shape in enumerate(SHAPES)]
    train = Train(optimizer="muon", weight_decay=DECAY, offload_optimizer=offload)
    optimizer = make(train, own, LR, outer={id(own[OUTER])})
    for _ in range(STEPS):
        for at, (one, shape) in enumerate(zip(own, SHAPES, strict=True)):
            grad = torch.randn(shape, generator=random)
            if at in OFTEN:
                grad[: len(grad) // 2] = 0
            given = cut(at, grad)
            lacks = at == NEVER or (row is not None and at in OFTEN and not local(given).any())
            one.grad = None if lacks else given
        optimizer.step()
    return [whole(one.detach(), f"parameter {at}").clone() for at, one in enumerate(own)]


def table(rows: int, width: int) -> DeviceMesh:
    return init_device_mesh("cpu", (rows, width), mesh_dim_names=("data", "tensor"))
