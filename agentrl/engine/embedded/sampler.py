"""Draws tokens and says how likely each was. Owns the sampling distribution; never knows requests or caches."""

# pyright: reportUnknownMemberType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

from collections.abc import Sequence

import torch

from agentrl.records import SamplingParams


def sample(
    logits_BV: torch.Tensor, rows: Sequence[SamplingParams], generator: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor, dict[int, list[int]]]:
    """One token a row, [B], and its log-probability under the distribution it was drawn from, [B], in nats; and by
    number of each row whose settings cut, the tokens that could be drawn, ascending.

    A greedy row's log-probability is that of the unscaled distribution, as vLLM reports it."""
    logprobs_BV = distribution(logits_BV, rows)
    cdf_BV = logprobs_BV.exp().cumsum(-1)
    total_B = cdf_BV[:, -1:]
    drawn_B = torch.rand(total_B.shape, generator=generator) * total_B
    # Strictly below the total: the first entry above `drawn` then has a probability that is not zero.
    drawn_B = torch.minimum(drawn_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    tokens_B = torch.searchsorted(cdf_BV, drawn_B, right=True)
    greedy = [row for row, sampling in enumerate(rows) if sampling.temperature == 0]
    if greedy:
        tokens_B[greedy] = logits_BV[greedy].argmax(-1, keepdim=True)
    sets: dict[int, list[int]] = {
        row: logprobs_BV[row].isfinite().nonzero()[:, 0].tolist() for row, sampling in enumerate(rows) if sampling.cuts
    }
    return tokens_B.squeeze(-1), logprobs_BV.gather(-1, tokens_B).squeeze(-1), sets


def distribution(logits_BV: torch.Tensor, rows: Sequence[SamplingParams]) -> torch.Tensor:
    """Log-probabilities, [B, V], after temperature, then min-p, top-k and top-p; what is cut off is minus infinity."""
    scaled_BV = logits_BV
    if any(row.temperature not in (0, 1) for row in rows):
        divisors = [row.temperature or 1.0 for row in rows]
        scaled_BV = logits_BV / torch.tensor(divisors).unsqueeze(-1)
    cut = [row for row, sampling in enumerate(rows) if sampling.cuts]
    if cut:
        scaled_BV = scaled_BV.clone() if scaled_BV is logits_BV else scaled_BV
        scaled_BV[cut] = _cut(scaled_BV[cut], [rows[row] for row in cut])
    return torch.log_softmax(scaled_BV, -1)


def _cut(logits_BV: torch.Tensor, rows: Sequence[SamplingParams]) -> torch.Tensor:
    """Logits with minus infinity for what is cut. Order and ties are vLLM's: tokens as likely as the last of the
    `top_k` stay, and of equal ones at the edge of `top_p` some stay."""
    vocab = logits_BV.shape[-1]
    top_p_B1, min_p_B1 = (torch.tensor([[getattr(row, name)] for row in rows]) for name in ("top_p", "min_p"))
    top_k_B1 = torch.tensor([[row.top_k if 0 < row.top_k < vocab else vocab] for row in rows])
    probabilities_BV = logits_BV.softmax(-1)
    rare_BV = probabilities_BV < min_p_B1 * probabilities_BV.amax(-1, keepdim=True)
    ascending_BV, order_BV = logits_BV.masked_fill(rare_BV, float("-inf")).sort(dim=-1)
    last_B1 = ascending_BV.gather(-1, vocab - top_k_B1)
    ascending_BV = ascending_BV.masked_fill(ascending_BV < last_B1, float("-inf"))
    beyond_BV = ascending_BV.softmax(-1).cumsum(-1) <= 1 - top_p_B1
    beyond_BV[:, -1] = False
    ascending_BV = ascending_BV.masked_fill(beyond_BV & (top_p_B1 < 1), float("-inf"))
    return torch.empty_like(logits_BV).scatter_(-1, order_BV, ascending_BV)
