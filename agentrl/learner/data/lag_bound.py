"""The lag bound of law 5: no token older than `max_lag` optimizer steps enters the loss.

The rule itself is `tokens.staleness.trains`, which the store asks too before it hands out a group. Here it holds for
each token, because the tokens of one episode, and of one turn, may come from several weight versions.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch

from agentrl.learner.data.rows import Row
from agentrl.tokens import staleness


# Why the lag bound drops tokens, and not episodes.
#
# An episode may go on over many weight updates, so its tokens have many ages. The simple rule takes the age of the
# oldest one and drops the episode. It would prefer short episodes: a long one has old tokens because it is long, and
# with a bound of a few steps the long ones would never be trained. The mean age is no better, because it lets tokens
# pass that are older than the bound, and then law 5 does not hold.
#
# So each token is judged by the weights that made it. The store drops a group as stale only if none of its members has
# a token young enough (`agentrl/store/buffer/buffer.py`); which tokens those are is decided here.
#
# An episode of which nothing is left still judges its siblings. Its return was earned by the policy, and a baseline
# without it would be one of the short episodes again. Its tokens are counted by their lag, so a run that loses many
# shows it.
#
# The price is a part of an episode that is trained without its beginning. The beginning stays as context, so its
# log-probabilities are right; but an importance weight over a whole sequence is a product of the tokens that are left.
#
# `tests/learner/test_samples.py` has a turn of three versions with the bound between them, and the sibling that is too
# old to be trained and still judges.
def drop_tokens_beyond_lag(row: Row, max_lag: int, stale: Counter[int]) -> Row | None:
    """Return the row with only tokens of lag <= `max_lag` scored; None if none is left. Counts the others in `stale` by
    their lag."""
    lag_S = row.columns["lag"]
    keep_S = staleness.trains(lag_S, max_lag)
    if bool(keep_S.all()):
        return row
    stale.update(lag_S[~keep_S].tolist())
    if not bool(keep_S.any()):
        return None
    # A token that is too old stays in the row: younger ones were sampled after it, and their log-probs are only those
    # of the engine with it before them. Behind the last scored token nothing is predicted, so the row ends there.
    place_S, turn_S = row.place_S[keep_S], row.columns["turn"]
    # An observation stands and falls with the turn that follows it:
    # `test_an_answer_before_a_stale_turn_is_not_predicted_also_if_a_younger_turn_follows`.
    answered_O = turn_S[torch.searchsorted(row.place_S, row.observed_O)]  # the turn that each comes before
    return replace(
        row,
        token_ids=row.token_ids[: int(place_S[-1]) + 1],
        place_S=place_S,
        observed_O=row.observed_O[torch.isin(answered_O, turn_S[keep_S])],
        columns={column_name: row_column[keep_S] for column_name, row_column in row.columns.items()},
        ragged={column_name: row_column.only(keep_S) for column_name, row_column in row.ragged.items()},
        chosen=None if row.chosen is None else row.chosen[: int(place_S[-1]) + 1],
    )
