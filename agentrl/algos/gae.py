"""Advantages from a critic: sequences of states with values, rewards between them, and who sampled the actions.

Owns the recursion and how tokens become the states of a sequence. Never knows where values come from. Suffixes: B
sequences, U states of a sequence (its tokens or its turns), N states of all sequences, T tokens of all.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-9


def traces(
    rewards_BU: Tensor,
    values_BU: Tensor,
    length_B: Tensor,
    *,
    discount: float,
    lambda_B: Tensor,
    ratio_BU: Tensor,
    cap: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets, both [B, U]; 0 past a sequence's end, whose value is 0.

        delta_u = r_u + discount V_{u+1} - V_u,          rho_u = min(cap, ratio_u)
        target_u - V_u = rho_u (delta_u + discount lambda (target_{u+1} - V_{u+1}))
        A_u            =        delta_u + discount lambda (target_{u+1} - V_{u+1})

    `ratio_BU` is the probability of the action under the policy that is judged over that under the one that sampled.
    With ratio 1 this is GAE (Schulman et al. 2016, eq. 16) and target = V + A; with lambda = 1 it is V-trace (Espeholt
    et al. 2018, section 4.1, both of its bounds `cap`). With lambda = 1 and no cap, A_u is in expectation
    Q(s_u, a_u) - V(s_u) of the judged policy, whatever V is and whoever sampled; with lambda < 1 only if V is its value
    function. The action's own ratio is not in A_u: it belongs to the loss."""
    state_count = values_BU.shape[1]
    alive_BU = torch.arange(state_count, device=values_BU.device) < length_B[:, None]
    values_BU = torch.where(alive_BU, values_BU, 0.0)
    rho_BU = ratio_BU.clamp(max=cap)
    advantages_BU, gaps_BU = torch.zeros_like(values_BU), torch.zeros_like(values_BU)
    gap_B = value_B = torch.zeros_like(values_BU[:, 0])
    # Backwards over states, all sequences at once: each state needs what came of the next one.
    for u in reversed(range(state_count)):
        # Past a sequence's end the value is 0, also where a limit cut it off: limits are part of the task here
        # (`docs/explanation/algorithms.md`, "The critic").
        delta_B = rewards_BU[:, u] + discount * value_B - values_BU[:, u]
        advantage_B = torch.where(alive_BU[:, u], delta_B + discount * lambda_B * gap_B, 0.0)
        gap_B, value_B = rho_BU[:, u] * advantage_B, values_BU[:, u]
        advantages_BU[:, u], gaps_BU[:, u] = advantage_B, gap_B
    return advantages_BU, torch.where(alive_BU, values_BU + gaps_BU, 0.0)


def lambda_of_length(length_B: Tensor, alpha: float) -> Tensor:
    """max(0, 1 - 1 / (alpha length)): the horizon of the trace grows with the sequence (VAPO, Yue et al. 2025,
    section 4.2)."""
    return (1 - 1 / (alpha * length_B.double())).clamp(min=0)


def centred(advantage_T: Tensor, weight_T: Tensor, episode_T: Tensor, role_T: Tensor, turn_T: Tensor) -> Tensor:
    """Advantages less the mean of those that other episodes of the step have in the same role and turn, by `weight_T`:
    [T]. `turn_T` counts the turns of each role, so that it is the same whoever began. A token of a turn that no other
    episode played keeps its own.

    A critic that is wrong about a turn by a constant makes all its advantages positive, or all negative. The policy
    then goes towards, or away from, whatever it did there; with stale tokens it does so for steps before it can see it.
    The others' mean takes the constant off, and knows nothing of the episode that it judges: what is unbiased stays
    so."""
    _, turn_T = torch.unique(torch.stack([role_T, turn_T]), dim=1, return_inverse=True)
    _, own_T = torch.unique(torch.stack([episode_T, turn_T]), dim=1, return_inverse=True)

    def others(column_T: Tensor) -> Tensor:
        nothing_T = torch.zeros_like(column_T)
        return nothing_T.index_add(0, turn_T, column_T)[turn_T] - nothing_T.index_add(0, own_T, column_T)[own_T]

    weight_T = weight_T.to(advantage_T.dtype)
    share_T = others(weight_T)
    there_T = share_T > EPSILON * weight_T.sum()  # what rounding leaves of a difference is no other episode
    return advantage_T - torch.where(there_T, others(weight_T * advantage_T) / share_T, 0.0)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Tokens [T] as the states of sequences: one sequence for each role of each episode, its turns in order."""

    order_T: Tensor  # the tokens, sequence after sequence
    state_T: Tensor  # the state of each token of `order_T`
    first_N: Tensor  # where in `order_T` each state begins
    sequence_N: Tensor
    place_N: Tensor  # of a state in its sequence

    @staticmethod
    def of(episode_T: Tensor, role_T: Tensor, turn_T: Tensor, *, by_turn: bool) -> Sequences:
        """Every token is a state, or, `by_turn`, every turn is one, that of its first token."""
        order_T = torch.arange(len(episode_T), device=episode_T.device)
        # Stable sorts from the last key to the first: a token's place in its turn is the order in which it came,
        # which no column states.
        for key_T in (turn_T, role_T, episode_T):
            order_T = order_T[torch.argsort(key_T[order_T], stable=True)]
        keys_3T = torch.stack([episode_T, role_T, turn_T])[:, order_T]
        begins_3T = torch.ones_like(keys_3T, dtype=torch.bool)
        begins_3T[:, 1:] = keys_3T[:, 1:] != keys_3T[:, :-1]
        sequence_begins_T = begins_3T[:2].any(0)
        begins_T = begins_3T.any(0) if by_turn else torch.ones_like(sequence_begins_T)
        first_N = begins_T.nonzero()[:, 0]
        sequence_N = (sequence_begins_T.cumsum(0) - 1)[first_N]
        numbers_N = torch.arange(len(first_N), device=first_N.device)
        place_N = numbers_N - numbers_N[sequence_begins_T[first_N]][sequence_N]
        return Sequences(order_T, begins_T.cumsum(0) - 1, first_N, sequence_N, place_N)

    def length(self) -> Tensor:
        """States of each sequence: [B]."""
        return torch.bincount(self.sequence_N)

    def first(self, column_T: Tensor) -> Tensor:
        """The value of each state's first token: [B, U], 0 past a sequence's end."""
        return self._padded(column_T[self.order_T][self.first_N])

    def total(self, column_T: Tensor) -> Tensor:
        """The sum over each state's tokens: [B, U], 0 past a sequence's end."""
        zeros_N = torch.zeros(len(self.first_N), dtype=column_T.dtype, device=column_T.device)
        return self._padded(zeros_N.index_add(0, self.state_T, column_T[self.order_T]))

    def tokens(self, column_BU: Tensor) -> Tensor:
        """The entry of each token's state in `column_BU`: [T], in the order of the input tokens."""
        sorted_T = column_BU[self.sequence_N, self.place_N][self.state_T]
        return torch.empty_like(sorted_T).index_copy(0, self.order_T, sorted_T)

    def begins(self) -> Tensor:
        """Whether a token is the first of its state: bool [T], in the order of the input tokens."""
        begins_T = torch.zeros(len(self.order_T), dtype=torch.bool, device=self.order_T.device)
        begins_T[self.order_T[self.first_N]] = True
        return begins_T

    def _padded(self, column_N: Tensor) -> Tensor:
        padded_shape = (int(self.sequence_N[-1]) + 1, int(self.place_N.max()) + 1)
        padded_BU = torch.zeros(padded_shape, dtype=column_N.dtype, device=column_N.device)
        padded_BU[self.sequence_N, self.place_N] = column_N
        return padded_BU
