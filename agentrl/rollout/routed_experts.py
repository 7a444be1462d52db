"""The experts that a mixture of experts chose for the tokens of an episode, which the learner replays."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.records import Turn


def first_without_experts(turns: Sequence[Turn], parent: int | None) -> int:
    """The index of the first token of a context for which no earlier turn recorded its experts. The context extends the
    turn `parent`. A turn that ended with the tokens of an interrupted request recorded none."""
    while parent is not None:
        if (experts := turns[parent].experts) is not None:
            return experts.end
        parent = turns[parent].parent
    return 0
