"""Draws tokens and says how likely each was. Owns the sampling distribution; never knows requests or caches."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sampling settings of B rows; `temperature` 0 is greedy, `top_p` 1 and `top_k` ≤ 0 switch the cuts off."""

    temperature_B: list[float]
    top_p_B: list[float]
    top_k_B: list[int]


def sample(
    logits_BV: torch.Tensor, settings: Settings, generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row, [B], and its log-probability under the distribution it was drawn from, [B], in nats.

    A greedy row's log-probability is that of the unscaled distribution, as vLLM reports it."""
    logprobs_BV = distribution(logits_BV, settings)
    cdf_BV = logprobs_BV.exp().cumsum(-1)
    total_B = cdf_BV[:, -1:]
    drawn_B = torch.rand(total_B.shape, generator=generator) * total_B
    # Strictly below the total: the first entry above `drawn` then has a probability that is not zero.
    drawn_B = torch.minimum(drawn_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    tokens_B = torch.searchsorted(cdf_BV, drawn_B, right=True)
    greedy = [row for row, temperature in enumerate(settings.temperature_B) if temperature == 0]
    if greedy:
        tokens_B[greedy] = logits_BV[greedy].argmax(-1, keepdim=True)
    return tokens_B.squeeze(-1), logprobs_BV.gather(-1, tokens_B).squeeze(-1)


def distribution(logits_BV: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Log-probabilities, [B, V], after temperature, then top-k, then top-p; what is cut off is minus infinity."""
    scaled_BV = logits_BV
    if any(temperature not in (0, 1) for temperature in settings.temperature_B):
        divisors = [temperature or 1.0 for temperature in settings.temperature_B]
        scaled_BV = logits_BV / torch.tensor(divisors).unsqueeze(-1)
    cut = [
        row
        for row, (p, k) in enumerate(zip(settings.top_p_B, settings.top_k_B, strict=True))
        if settings.temperature_B[row] > 0 and (p < 1 or 0 < k < logits_BV.shape[-1])
    ]
    if cut:
        scaled_BV = scaled_BV.clone() if scaled_BV is logits_BV else scaled_BV
        top_p = torch.tensor([settings.top_p_B[row] for row in cut])
        top_k = torch.tensor([settings.top_k_B[row] for row in cut])
        scaled_BV[cut] = _cut(scaled_BV[cut], top_p, top_k)
    return torch.log_softmax(scaled_BV, -1)


def _cut(logits_BV: torch.Tensor, top_p_B: torch.Tensor, top_k_B: torch.Tensor) -> torch.Tensor:
    """Keep the `top_k` likeliest tokens, then the fewest of them whose probability reaches `top_p`."""
    ordered_BV, order_BV = logits_BV.sort(stable=True, dim=-1, descending=True)
    ranks_V = torch.arange(logits_BV.shape[-1])
    limit_B = torch.where(top_k_B > 0, top_k_B, logits_BV.shape[-1])
    ordered_BV = ordered_BV.masked_fill(ranks_V >= limit_B.unsqueeze(-1), float("-inf"))
    probabilities_BV = ordered_BV.softmax(-1)
    before_BV = probabilities_BV.cumsum(-1) - probabilities_BV
    ordered_BV = ordered_BV.masked_fill((before_BV >= top_p_B.unsqueeze(-1)) & (ranks_V > 0), float("-inf"))
    return torch.empty_like(logits_BV).scatter_(-1, order_BV, ordered_BV)
