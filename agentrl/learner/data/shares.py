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
    rows = [row for part in parts for group in part for row in group.rows]
    alike: dict[tuple[str | None, Normalise], list[int]] = {}
    algos: list[Algorithm] = []
    numbers: dict[tuple[int, int], int] = {}
    episodes: list[int] = []  # by row, the number of its episode
    for index, row in enumerate(rows):
        algo = row.algo
        alike.setdefault((row.policy, algo.normalise), []).append(index)
        if algo not in algos:
            algos.append(algo)
        # Roles with different algorithms are numbered apart, though they share an episode. With one number, the
        # normalisation by sequence would divide each role's loss by the length of both, so that a talkative role
        # shrinks the other's gradient.
        episodes.append(numbers.setdefault((row.episode_id, algos.index(algo)), len(numbers)))
    episode_counts = {key: len({episodes[index] for index in places}) for key, places in alike.items()}
    weights: list[Tensor] = [torch.zeros(0)] * len(rows)
    for (policy, normalise), places in alike.items():
        lengths = [len(rows[index].place_S) for index in places]
        episode_S = torch.cat(
            [torch.full((length,), episodes[index]) for index, length in zip(places, lengths, strict=True)]
        )
        # Over all updates at once: within one update alone, a share would depend on which groups were shuffled into it.
        shares = token_weights(episode_S, normalise)
        # Policies have gradients of their own: another policy's episodes must not thin out this one's.
        policy_count = sum(count for (other, _), count in episode_counts.items() if other == policy)
        shares = shares * (episode_counts[policy, normalise] / policy_count) * len(parts)
        for index, weight in zip(places, shares.split(lengths), strict=True):
            weights[index] = weight
    remaining = iter(weights)
    # Without any observed token nothing is multiplied by this number.
    observed_share = len(parts) / max(sum(len(row.observed_O) for row in rows), 1)

    def weighed(row: Row, weight: float) -> Row:
        return replace(row.having(weight=next(remaining) * weight), observed_weight=observed_share * weight)

    return [[[weighed(row, group.weight) for row in group.rows] for group in part] for part in parts]
