"""The kept set: the tokens that top_p, top_k and min_p left to sample one token from.

Owns how the sets of some tokens travel as numbers, from the engine to the learner, in the ragged column `kept`. Never
knows who cut, nor what is computed over a set. Standard library only.

A token's part of the column is a head and its numbers: `3, 5, 9, 40` is the set {5, 9, 40}. A large set is a bitmap, as
soon as that is shorter: head -2 and two 32-bit words, the lowest bit first, say of tokens 0 to 63 which are in the set.
Head 0 stands alone: nobody cut, or the engine did not report it. So a set costs a token at most one bit for each token
of the vocabulary, whatever an engine sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

_BITS = 32  # of a word


# Why each sampled token carries the set that it was drawn from.
#
# With top_p, top_k or min_p an engine draws from a few tokens, and its log-probability is the one over these tokens
# (law 1). A learner that computes over the whole vocabulary compares two different distributions: its probability of a
# token is smaller although the weights are the same, and its gradient is that of a policy which did not sample.
#
# To cut again in the learner looks simple, since it knows the settings. But its logits are not the engine's: kernels
# round differently, and a stale token was sampled by other weights. Then the border of the set falls elsewhere, and the
# sampled token itself may lie outside, with a log-probability of minus infinity. Only the engine knows which tokens
# remained. So the set is sent with the token and written with it, also in the parts of an interrupted turn. All models
# that compute the token use it: the policy of now and of the step's start, and frozen ones such as the reference.
#
# A list of ids is short for a policy that is sure of itself. For an undecided one most of the vocabulary may remain: a
# list of it takes 32 bits for each id, and a bitmap takes one.
#
# The price is bytes in the journal, and an approximation: the current policy would have another set than the one that
# sampled, so no correction of a stale token is exact while something is cut. With an engine that does not report its
# sets the episode fails for that reason, and nothing of it is trained (law 8).
#
# `tests/learner/test_kept.py` compares the gradient with the exact one, with the sets and without them;
# `tests/rollout/test_kept.py` follows the sets through the journal and an interruption.
def encode(sets: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The column of tokens with these sets, none of them empty. Raises ValueError for one that is no set of ids."""
    column_numbers: list[int] = []
    for kept_ids in sets:
        column_numbers += _encoded(kept_ids)
    return tuple(column_numbers)


def _encoded(ids: Sequence[int]) -> list[int]:
    if set(map(type, ids)) != {int} or min(ids) < 0 or (highest_id := max(ids)) >= 1 << 31:
        raise ValueError("a kept set is not one of token ids")
    if len(set(ids)) != len(ids):
        raise ValueError("a kept set names a token twice")
    word_count = highest_id // _BITS + 1
    # A list has an entry for each id, a bitmap a word for each 32 ids up to the highest: the shorter one is sent.
    if len(ids) <= word_count:
        return [len(ids), *ids]
    bitmap_words = [0] * word_count
    for token_id in ids:
        bitmap_words[token_id // _BITS] |= 1 << token_id % _BITS
    # The column is int32, so a word whose highest bit is set is written as the negative number with the same bits.
    return [-word_count, *(bitmap_word - (bitmap_word >> 31 << 32) for bitmap_word in bitmap_words)]


def parts(values: Sequence[float]) -> Iterator[tuple[int, Sequence[float]]]:
    """Split a column into the head and the numbers of each token. The size of a head, without its sign, is how many
    numbers follow it."""
    position = 0
    while position < len(values):
        head_number = int(values[position])
        position += 1 + abs(head_number)
        yield head_number, values[position - abs(head_number) : position]


def decode(values: Sequence[float]) -> list[tuple[int, ...]]:
    """The set of each token of a column, ascending where it was a bitmap; empty for one without a reported set."""
    return [_decoded(head_number, set_numbers) for head_number, set_numbers in parts(values)]


def _decoded(head: int, numbers: Sequence[float]) -> tuple[int, ...]:
    if head >= 0:
        return tuple(map(int, numbers))
    return tuple(
        word_index * _BITS + bit_index
        for word_index, bitmap_word in enumerate(map(int, numbers))
        for bit_index in range(_BITS)
        if bitmap_word >> bit_index & 1
    )
