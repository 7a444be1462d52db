"""Ragged columns as tensors: for each of K tokens a head and its numbers, see `agentrl.tokens.columns`.

Owns how they are cut and joined, and how kept sets (`agentrl.tokens.sampling_mask`) become indices. Never knows rows or
models.
"""

from __future__ import annotations

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.tokens import sampling_mask


@dataclass(frozen=True, slots=True)
class Ragged:
    """`head_K` are the heads; `numbers_M` are the numbers of all tokens, `abs(head)` of each, one after the other."""

    head_K: Tensor
    numbers_M: Tensor

    @classmethod
    def of(cls, values: Sequence[float]) -> Ragged:
        """Read a whole column: for each token its head, then its numbers."""
        token_heads: list[int] = []
        all_numbers: list[float] = []
        for token_head, token_numbers in sampling_mask.parts(values):
            token_heads.append(token_head)
            all_numbers += token_numbers
        return cls(torch.tensor(token_heads, dtype=torch.long), torch.tensor(all_numbers, dtype=torch.int32))

    @classmethod
    def joined(cls, parts: Sequence[Ragged]) -> Ragged:
        """Join columns one after the other."""
        return cls(
            torch.cat([ragged_part.head_K for ragged_part in parts]),
            torch.cat([ragged_part.numbers_M for ragged_part in parts]),
        )

    def only(self, keep_K: Tensor) -> Ragged:
        """Select the tokens for which `keep_K` is true."""
        return Ragged(self.head_K[keep_K], self.numbers_M[keep_K.repeat_interleave(self.head_K.abs())])

    def to(self, device: torch.device | str) -> Ragged:
        return Ragged(self.head_K.to(device), self.numbers_M.to(device))

    def sets(self) -> tuple[Tensor, Tensor]:
        """The kept sets: for each of their M ids the number of its token, and the id, both [M] and in the order of the
        tokens. A token whose head is 0 has none."""
        if not len(self.numbers_M):  # known without a look at a number
            return self.head_K[:0], self.numbers_M.long()
        token_M = torch.arange(len(self.head_K), device=self.head_K.device).repeat_interleave(self.head_K.abs())
        listed_M = self.head_K[token_M] > 0
        if bool(listed_M.all()):
            return token_M, self.numbers_M.long()
        first_K = self.head_K.abs().cumsum(0) - self.head_K.abs()
        # A negative head says that its numbers are words of a bitmap over the vocabulary
        # (`agentrl.tokens.sampling_mask`): the number of the word, times 32, and the bit give the id.
        word_M = torch.arange(len(token_M), device=token_M.device) - first_K[token_M]
        shift_32 = torch.arange(32, device=token_M.device)
        bitmap_bits = (self.numbers_M[~listed_M, None] >> shift_32 & 1).bool()
        bitmap_ids = (word_M[~listed_M, None] * 32 + shift_32)[bitmap_bits]
        bitmap_tokens = token_M[~listed_M, None].expand_as(bitmap_bits)[bitmap_bits]
        set_tokens = torch.cat([token_M[listed_M], bitmap_tokens])
        token_order = set_tokens.argsort(stable=True)
        return set_tokens[token_order], torch.cat([self.numbers_M[listed_M].long(), bitmap_ids])[token_order]


def normalised(logprobs_M: Tensor, of_M: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probs of the members of `count` sets made to sum to 1 in each, [M], and the log of each set's mass before,
    [count]; 0 for a set without members."""
    top_K = logprobs_M.new_full((count,), float("-inf")).scatter_reduce(0, of_M, logprobs_M.detach(), "amax")
    # A set without members has no maximum; minus infinity would make a NaN of the subtraction below.
    top_K = torch.where(top_K.isfinite(), top_K, 0.0)
    total_K = torch.zeros_like(top_K).index_add(0, of_M, (logprobs_M - top_K[of_M]).exp())
    empty_K = torch.ones_like(total_K, dtype=torch.bool).index_fill(0, of_M, False)
    mass_K = torch.where(empty_K, 0.0, top_K + total_K.masked_fill(empty_K, 1.0).log())
    return logprobs_M - mass_K[of_M], mass_K
