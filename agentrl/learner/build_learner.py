"""A learner as its settings describe it: on its device, over its ranks, with the folders of its models.

One way for the process of a run, for `agentrl.blocks.Learner` and for what trains offline. Knows neither store nor
engine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from agentrl.config import Train
from agentrl.config.roles import LearnerSettings
from agentrl.errors import ConfigError
from agentrl.learner.learner import Learner
from agentrl.learner.parallel.ranks import ALONE, Leader, Ranks


def build_learner(
    settings: LearnerSettings,
    folder: Path,
    *,
    folder_of: Callable[[str], Path],
    ranks: Ranks = ALONE,
    progress: Callable[[], None] = lambda: None,
    may_save: Callable[[], None] = lambda: None,
) -> Learner:
    """The learner of `settings` before its first step, with the model in `folder`; the rest is as for `Learner`. Raises
    ConfigError for a device that is not there, ModelError."""
    return Learner(
        settings,
        folder,
        device_of(settings.train),
        folder_of=folder_of,
        progress=progress,
        may_save=may_save,
        ranks=ranks,
    )


def device_of(train: Train) -> torch.device:
    """The device for training, that of rank 0. Raises ConfigError for a GPU that this machine does not have."""
    # Counted here, before a model is loaded: the same fault inside torch would come minutes later, without the
    # setting's name.
    device_count = torch.cuda.device_count()
    if train.gpus and max(train.gpus) >= device_count:
        if train.parallel.ranks == 1 or "," in train.device:
            raise ConfigError(
                "train.device", train.device, f"torch sees {device_count} CUDA devices: give those, or 'cpu'"
            )
        correction = f"torch sees {device_count} CUDA devices, and each rank has one: lower it"
        raise ConfigError("train.parallel.ranks", train.parallel.ranks, correction)
    return torch.device("cuda", train.gpus[0]) if train.gpus else torch.device("cpu")


def ranks_of(train: Train, start_s: float, progress: Callable[[], None], *, ends: Callable[[str], None]) -> Ranks:
    """The ranks of the learner, started within `start_s`. They end with this process; `ends` ends it, from any thread,
    and takes the reason. Raises ConfigError, RankLost."""
    parallel_plan, first_device = train.parallel, device_of(train)
    if parallel_plan.ranks == 1:
        return ALONE
    other_devices = [torch.device("cuda", gpu_index) for gpu_index in train.gpus[1:]] or [first_device] * (
        parallel_plan.ranks - 1
    )
    return Leader(
        [first_device, *other_devices],
        # Before the supervisor kills a learner that makes no progress: it could not say which rank was late.
        deadline_s=train.progress_deadline_s / 2,
        start_s=start_s,
        progress=progress,
        ends=ends,
    )
