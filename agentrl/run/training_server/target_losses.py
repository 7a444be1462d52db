"""The losses that a training client names, as the Tinker API defines them: sums over tokens, never means.

Each is a function of the log-probs of a row's targets and of its columns, see `TargetRow`. The ratios are
those of the policy that is trained over the one that sampled (column `logprobs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from agentrl.errors import ConfigError
from agentrl.learner.adapter_learner import RowLoss

_POLICY = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def _cross_entropy(logprobs_TC: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    return -(logprobs_TC * columns["weights"]).sum()


def _importance_sampling(logprobs_TC: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    return -(_ratio(logprobs_TC, columns) * columns["advantages"]).sum()


def _ppo(
    logprobs_TC: Tensor, columns: Mapping[str, Tensor], *, clip_low_threshold: float, clip_high_threshold: float
) -> Tensor:
    ratio_TC = _ratio(logprobs_TC, columns)
    clipped_TC = ratio_TC.clamp(clip_low_threshold, clip_high_threshold)
    return -torch.minimum(ratio_TC * columns["advantages"], clipped_TC * columns["advantages"]).sum()


def _cispo(
    logprobs_TC: Tensor, columns: Mapping[str, Tensor], *, clip_low_threshold: float, clip_high_threshold: float
) -> Tensor:
    # The clipped ratio is a weight without a gradient (CISPO, MiniMax-M1 2025, arXiv:2506.13585): a clipped token still
    # pulls on the policy. In PPO, above, it does not.
    clipped_TC = _ratio(logprobs_TC, columns).clamp(clip_low_threshold, clip_high_threshold).detach()
    return -(clipped_TC * logprobs_TC * columns["advantages"]).sum()


def _ratio(logprobs_TC: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    return torch.exp(logprobs_TC - columns["logprobs"])


@dataclass(frozen=True, slots=True)
class TargetLoss:
    """A loss that reads these columns; a missing column is all ones if there is a `default`."""

    compute: RowLoss
    columns: tuple[str, ...]
    default: bool = False


_LOSSES: dict[str, tuple[Callable[..., Tensor], tuple[str, ...], dict[str, float]]] = {
    "cross_entropy": (_cross_entropy, ("weights",), {}),
    "importance_sampling": (_importance_sampling, _POLICY, {}),
    "ppo": (_ppo, _POLICY, _CLIP),
    "cispo": (_cispo, _POLICY, _CLIP),
}


def target_loss(name: str, settings: Mapping[str, float | str]) -> TargetLoss:
    """The loss of this name with these settings. Raises ConfigError for one that is not known."""
    if name not in _LOSSES:
        correction = (
            f"this server has {', '.join(_LOSSES)}; give any other as forward_backward_custom(data, your_function)"
        )
        raise ConfigError("loss_fn", name, correction)
    compute_loss, column_names, defaults = _LOSSES[name]
    for setting_key, setting_value in settings.items():
        if setting_key not in defaults:
            correction = f"{name} has {', '.join(defaults) or 'no settings'}"
            raise ConfigError(f"loss_fn_config.{setting_key}", setting_value, correction)
        if isinstance(setting_value, str) or not math.isfinite(setting_value) or setting_value < 0:
            raise ConfigError(f"loss_fn_config.{setting_key}", setting_value, "give a ratio of 0 or more")
    loss_settings = {**defaults, **settings}
    return TargetLoss(partial(compute_loss, **loss_settings), column_names, default=name == "cross_entropy")
