"""The learning-rate schedule: a linear warm-up, then constant, linear or cosine decay to `train.lr_min`."""

from __future__ import annotations

import math

from agentrl.config.train import Train


def lr_share(train: Train, step: int) -> float:
    """The share of `train.lr` that step number `step` (from 1) has, above 0 and at most 1."""
    if step <= train.warmup_steps:
        # Never 0, and not yet 1: the first step would train nothing, and the last of the warm-up would be the first
        # at the full rate.
        return step / (train.warmup_steps + 1)
    # A decay to 0 reaches it in the step after the last: a step at a rate of 0 would train nothing.
    decay_steps = train.steps - train.warmup_steps - (1 if train.lr_min else 0)
    decayed_share = min(step - train.warmup_steps - 1, train.steps - train.warmup_steps - 1) / max(1, decay_steps)
    decay_by_schedule = {
        "constant": 1.0,
        "linear": 1.0 - decayed_share,
        "cosine": (1.0 + math.cos(math.pi * decayed_share)) / 2,
    }
    least_share = train.lr_min / train.lr
    return least_share + (1.0 - least_share) * decay_by_schedule[train.lr_schedule]
