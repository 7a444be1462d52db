"""The share of a step's loss that each token has.

Owns how updates, groups, algorithms and policies divide the loss of a step. Never knows an advantage.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from agentrl.algos.algorithm import Algorithm
from agentrl.algos.losses import Normalise, token_weights
from agentrl.learner.data.batch import GroupRows
from agentrl.learner.data.rows import Row


# Why a token has its share of the loss before the step is divided into passes.
#
# The usual code averages the loss over the tokens of a pass and then over the passes. The share of a token then depends
# on its neighbours: in a pass with few scored tokens each counts more than in a full one. So the budget of a pass
# (`train.tokens_per_batch`) and the order of rows change the gradient, by too little to be noticed and by enough that
# two machines do not train the same.
#
# Here the rows of the whole step are counted first and each token gets a number. A pass adds up loss times share and
# divides by nothing, so the sum is the same however passes are laid. With several updates in a step each share is
# multiplied by their number, so that an update is as large as a step of one update would be, in the mean.
#
# Which tokens are counted matters more than the formula. One that is too old, or of a turn that the environment masks,
# is not scored any more and has no share. One that the algorithm weighs with 0 has a share, and so has a row that
# cannot move the weights and is left out of the passes afterwards: no other token weighs more because of them.
#
# The price is that no pass can begin before all rows of the step are there.
#
# An episode enters the loss once (law 2), and this says with what weight. `tests/learner/test_mixed.py` divides a step
# in several ways and compares the gradients to 1e-12; `tests/learner/test_samples.py` has shares by hand.
def weigh(parts: Sequence[Sequence[GroupRows]]) -> list[list[list[Row]]]:
    """The rows of each group of each update of a step, with their tokens' shares of the loss. The losses of the updates
    average to the loss of the step, however it is divided. A group's weight multiplies the shares of its tokens.
    Observations have the same share each, whatever the algorithm's normalisation.

    Rows whose algorithms normalise alike are normalised together, whatever else is in the step; where algorithms
    differ in it, each part of the step has the share of the loss that it has of the episodes. If roles of an episode
    have different algorithms, the turns of each algorithm count as an episode. Rows of different policies share no
    loss: those of each are weighed as if there were no others."""
    step_rows = [
        scored_row for update_groups in parts for group_rows in update_groups for scored_row in group_rows.rows
    ]
    rows_by_kind: dict[tuple[str | None, Normalise], list[int]] = {}
    algorithms: list[Algorithm] = []
    episode_numbers: dict[tuple[int, int], int] = {}
    episode_of_row: list[int] = []  # by row, the number of its episode
    for row_index, scored_row in enumerate(step_rows):
        algorithm = scored_row.algo
        rows_by_kind.setdefault((scored_row.policy, algorithm.normalise), []).append(row_index)
        if algorithm not in algorithms:
            algorithms.append(algorithm)
        # Roles with different algorithms are numbered apart, though they share an episode. With one number, the
        # normalisation by sequence would divide each role's loss by the length of both, so that a talkative role
        # shrinks the other's gradient.
        episode_of_row.append(
            episode_numbers.setdefault((scored_row.episode_id, algorithms.index(algorithm)), len(episode_numbers))
        )
    episode_counts = {
        kind_key: len({episode_of_row[row_index] for row_index in row_indices})
        for kind_key, row_indices in rows_by_kind.items()
    }
    weights_by_row: list[Tensor] = [torch.zeros(0)] * len(step_rows)
    for (own_policy, normalise), row_indices in rows_by_kind.items():
        row_lengths = [len(step_rows[row_index].place_S) for row_index in row_indices]
        episode_S = torch.cat(
            [
                torch.full((row_length,), episode_of_row[row_index])
                for row_index, row_length in zip(row_indices, row_lengths, strict=True)
            ]
        )
        # Over all updates at once: within one update alone, a share would depend on which groups were shuffled into it.
        token_shares = token_weights(episode_S, normalise)
        # Policies have gradients of their own: another policy's episodes must not thin out this one's.
        policy_count = sum(
            episode_count for (other_policy, _), episode_count in episode_counts.items() if other_policy == own_policy
        )
        token_shares = token_shares * (episode_counts[own_policy, normalise] / policy_count) * len(parts)
        for row_index, row_weights in zip(row_indices, token_shares.split(row_lengths), strict=True):
            weights_by_row[row_index] = row_weights
    remaining = iter(weights_by_row)
    # Without any observed token nothing is multiplied by this number.
    observed_share = len(parts) / max(sum(len(scored_row.observed_O) for scored_row in step_rows), 1)

    def weighed(row: Row, weight: float) -> Row:
        return replace(row.having(weight=next(remaining) * weight), observed_weight=observed_share * weight)

    return [
        [[weighed(scored_row, group_rows.weight) for scored_row in group_rows.rows] for group_rows in update_groups]
        for update_groups in parts
    ]
