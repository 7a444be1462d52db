"""Staleness (law 5): how the age of a token is counted, and until which age it is trained. The one place that says so.

The lag of a token is counted in optimizer steps: ``max(0, weights_step - made_at)``. `made_at` is the step whose
weights sampled the token, `weights_step` that of the weights which the learner holds *before* the update that it is
about to make. Optimizer step k starts from the weights of step k - 1, so in step k the tokens that those weights
sampled have lag 0. The 0 in `max` is for tokens of steps that a rollback undid: they are off-policy but not old, and
get the same importance correction as any others. A token of lag <= max_lag is trained, an older one is not.

Worked example, max_lag = 1: tokens of the weights of step 4 are trained in step 5 (lag 0) and step 6 (lag 1), which is
their `last_step`. Admission, the learner's take and its filter of tokens call this module; the audit of a store counts
by itself, so that it does not repeat a mistake made here. Standard library only.
"""

from __future__ import annotations

from typing import Any


def lag(weights_step: int, made_at: int | None) -> int:
    """Lag of a token that weights of step `made_at` sampled, for a learner with the weights of `weights_step`. A token
    that no weights of the run sampled (None) has none."""
    return 0 if made_at is None else max(0, weights_step - made_at)


def lag_in_step(step: int, made_at: int | None) -> int:
    """Lag of the same token when it is trained in optimizer step `step`."""
    return lag(step - 1, made_at)


def trains(lag: Any, max_lag: int) -> Any:
    """Whether a token of this lag may enter the loss; of a tensor of lags, for each."""
    return lag <= max_lag


def last_step(made_at: int, max_lag: int) -> int:
    """The last optimizer step that may train tokens which weights of step `made_at` sample."""
    return made_at + max_lag + 1


def edge(step: int, max_lag: int) -> int:
    """The newest weights whose tokens optimizer step `step` is the last to train: `last_step` of these is `step`."""
    return step - max_lag - 1


def bound_now(lowered: int | None, max_lag: int) -> int:
    """The bound that holds now: that of the run file, or what alarms `lowered` it to."""
    return max_lag if lowered is None else min(max_lag, lowered)
