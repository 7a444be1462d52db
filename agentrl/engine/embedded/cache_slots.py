"""Which cache slot holds which tokens, computed under which weights; and whose prefix can be shared.

Owns the bookkeeping beside `KVStore`. A slot is *busy* while a request runs in it. An idle slot keeps its keys and
values until the slot is needed: the next turn of the same episode goes on in it, and siblings copy a shared prefix
from it. A prefix is only ever shared between requests of one weight version: a slot whose keys and values were
computed under an older version, wholly or in part, matches nothing. Never knows requests or weights.

Decoding one token reads every key and value of the context; for the siblings of a group most of them are the same
bits, copied from slot to slot when the prompt was computed once. `share` finds them, so that attention reads them once
for all. (The split of attention into a shared and an own part is Juravsky et al. 2024, Hydragen.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.engine.embedded.model import KVStore, Shared

Ints = NDArray[np.int64]


class CacheSlots:
    """Invariants: `computed[s]` ≤ `known[s]`; `tokens[s, :known[s]]` are the slot's tokens, and the first
    `computed[s]` of them have keys and values in `kv`, none older than `version[s]`. Slots of one `family` hold the
    same bits at the positions below both their `kin` and `computed`."""

    def __init__(self, kv: KVStore) -> None:
        self.kv = kv
        slot_count, slot_length = kv.keys.shape[1], kv.keys.shape[4]
        self.tokens = np.zeros((slot_count, slot_length), dtype=np.int32)
        self.known: Ints = np.zeros(slot_count, dtype=np.int64)
        self.computed: Ints = np.zeros(slot_count, dtype=np.int64)
        self.version: Ints = np.zeros(slot_count, dtype=np.int64)
        self.used: Ints = np.zeros(slot_count, dtype=np.int64)  # time of last use, in `_clock` ticks
        self.busy = np.zeros(slot_count, dtype=np.bool_)
        self.family: Ints = np.arange(slot_count, dtype=np.int64)
        self.kin: Ints = np.full(slot_count, slot_length, dtype=np.int64)
        self._families = slot_count  # ids assigned so far
        self._clock = 0

    @property
    def length(self) -> int:
        """Positions of one slot."""
        return self.tokens.shape[1]

    def acquire(self, tokens: Sequence[int], version: int) -> int | None:
        """Make a slot busy for a request with these tokens; None if every slot is. What `tokens` share with an idle
        slot that they extend is kept; `adopt` finds the rest."""
        shared_lengths = self._shared(tokens)
        # The line that keeps old weights out of new requests.
        # `test_law_1_a_prefix_cached_under_older_weights_is_never_served` fails without its comparison.
        valid_lengths = np.where(self.version == version, np.minimum(shared_lengths, self.computed), 0)
        # Only a slot of which all is valid is gone on with: to overwrite the rest of a longer one would lose a
        # sibling's prefix that a copy can keep.
        extendable_slots = np.flatnonzero(
            ~self.busy & (valid_lengths == self.computed) & (valid_lengths > 0) & (valid_lengths == valid_lengths.max())
        )
        if extendable_slots.size:
            chosen_slot = int(extendable_slots[0])
        else:
            idle_slots = np.flatnonzero(~self.busy)
            if not idle_slots.size:
                return None
            # Slots of older weights go first: nothing in them can ever be shared again.
            outdated_slots = idle_slots[(self.computed[idle_slots] == 0) | (self.version[idle_slots] != version)]
            # The best donor is reused last: the prefix is copied from it.
            last_used = self.used[idle_slots] + (valid_lengths[idle_slots] == valid_lengths.max()) * (self._clock + 1)
            chosen_slot = int(outdated_slots[0] if outdated_slots.size else idle_slots[np.argmin(last_used)])
        # One token less than all: a prompt that is wholly cached still has to compute its last token, or there would
        # be no logits to sample from.
        self._cut(chosen_slot, min(int(valid_lengths[chosen_slot]), len(tokens) - 1))
        self.version[chosen_slot] = version
        self.tokens[chosen_slot, : len(tokens)] = tokens
        self.known[chosen_slot] = len(tokens)
        self.busy[chosen_slot] = True
        return chosen_slot

    def adopt(self, slot: int, version: int) -> int:
        """Copy into a busy slot the longest prefix that any slot shares with it; return how many positions it now
        has. At least one token is left to compute, for its logits."""
        known_length = int(self.known[slot])
        shared_lengths = np.minimum(self._shared(self.tokens[slot, :known_length]), known_length - 1)
        valid_lengths = np.where(self.version == version, np.minimum(shared_lengths, self.computed), 0)
        # Among all slots, busy ones too: the sibling that computed the prompt a pass ago still runs.
        donor_slot = int(valid_lengths.argmax())
        copy_start, valid_end = int(self.computed[slot]), int(valid_lengths[donor_slot])
        if donor_slot != slot and valid_end > copy_start:
            if self.family[slot] == self.family[donor_slot] and self.kin[slot] >= copy_start:
                self.kin[slot] = min(valid_end, int(self.kin[donor_slot]))
            # To copy only the rest is cheaper, but then the first part was computed in another pass, with another
            # blocking of the products, and differs in the last bit. `share` reads one slot's bits for all, so they
            # have to be the same.
            elif 2 * copy_start < valid_end:  # all of it rather than the rest, so that they are the same bits
                copy_start = 0
                self._join(slot, donor_slot, valid_end)
            self.kv.copy(donor_slot, slot, copy_start, valid_end)
            self.computed[slot] = valid_end
            self._touch(donor_slot)
        return int(self.computed[slot])

    def shared_with(self, slot: int, others: Sequence[int]) -> int:
        """The longest prefix that a slot's known tokens share with those of `others`, computed or not."""
        known_length = int(self.known[slot])
        rows = list(others)
        known_tokens = self.tokens[slot, :known_length]
        return int(_common(self.tokens[rows, :known_length], self.known[rows], known_tokens).max(initial=0))

    def release(self, slot: int) -> None:
        """The request is gone; its keys and values stay for whoever extends or shares them."""
        self.busy[slot] = False
        # The last sampled token has no keys and values yet, so it is forgotten with the request: the next turn brings
        # it as a token of its prompt.
        self.known[slot] = self.computed[slot]
        self._touch(slot)

    def forget(self, *, busy: bool) -> None:
        """Drop the keys and values of idle slots, with `busy` of all slots."""
        # Busy slots keep theirs unless the caller recomputes: see the essay above `Batcher`.
        for slot in range(len(self.busy)) if busy else np.flatnonzero(~self.busy):
            self._cut(int(slot), 0)

    def exchange(self, a: int, b: int) -> None:
        """Move the contents of two slots into each other's place."""
        length = int(max(self.computed[a], self.computed[b]))
        if self.computed[b] == 0:
            self.kv.copy(a, b, 0, length)
        elif self.computed[a] == 0:
            self.kv.copy(b, a, 0, length)
        else:
            self.kv.swap(a, b, length)
        for slot_array in (
            self.tokens,
            self.known,
            self.computed,
            self.version,
            self.used,
            self.busy,
            self.family,
            self.kin,
        ):
            slot_array[[a, b]] = slot_array[[b, a]]

    def _cut(self, slot: int, computed: int) -> None:
        """Keep the first `computed` positions; with few of those that its family shared, the slot leaves it."""
        family_length = min(int(self.kin[slot]), int(self.computed[slot]))
        self.computed[slot] = computed
        self.kin[slot] = min(family_length, computed)
        # Half is a compromise: a family whose common part shrinks a little is still worth sharing, but one member
        # that was cut to a few tokens would shrink it to nothing for all the others.
        if 2 * computed < family_length or computed == 0:
            self.family[slot], self.kin[slot] = self._families, self.length
            self._families += 1

    def _join(self, slot: int, donor: int, end: int) -> None:
        """`slot` has the first `end` positions of `donor`: they become one family, unless that made the family's
        common part much shorter; then the donor leaves for a new one, or `slot` stays alone."""
        in_family = self.family == self.family[donor]
        common_length = int(np.minimum(self.kin, self.computed)[in_family].min())
        # A quarter less is the price that a family pays to have one member more; beyond that two families are
        # cheaper. `test_one_short_common_beginning_does_not_spoil_a_long_one` has the case.
        if 4 * min(end, int(self.kin[donor])) < 3 * end:
            self.family[donor], self.kin[donor] = self._families, end
            self._families += 1
        elif 4 * end < 3 * common_length and np.count_nonzero(in_family) > 1:
            return
        self.family[slot], self.kin[slot] = self.family[donor], min(end, int(self.kin[donor]))

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self.used[slot] = self._clock

    def _shared(self, tokens: Sequence[int] | NDArray[np.int32]) -> Ints:
        new_tokens = np.asarray(tokens, dtype=np.int32)
        return _common(self.tokens[:, : len(new_tokens)], self.known, new_tokens)


def _common(rows: NDArray[np.int32], known: Ints, new_tokens: NDArray[np.int32]) -> Ints:
    """Length of the prefix that each row shares with the new tokens, at most its `known` ones."""
    differs = rows != new_tokens
    first_difference = np.where(differs.any(axis=1), differs.argmax(axis=1), len(new_tokens))
    return np.minimum(first_difference, known)


# An estimate, which decides how fast a pass is and never a number: `test_shared_or_not_logprobs_are_exact`.
FAMILY_COST = 300
"""What a family costs a layer, in positions of one row: two more products, against keys and values not read again."""


def share(slots: CacheSlots, of_rows: Sequence[int]) -> Shared | None:
    """How single rows of these slots best share their common prefix; None if it is not worth it."""
    kin = np.minimum(slots.kin, slots.computed)[of_rows]
    family_rows: dict[int, list[int]] = defaultdict(list)
    for row, family in enumerate(slots.family[of_rows].tolist()):
        family_rows[family].append(row)
    common_lengths = {family: int(kin[rows].min()) for family, rows in family_rows.items() if len(rows) > 1}
    best_gain, shared_length, spared_rows = 0, 0, 0
    # One length serves all families, so longer common parts come first: each step takes in one more family at the
    # price of a shorter length for those before it, and the best sum wins.
    for family in sorted(common_lengths, key=lambda family: -common_lengths[family]):
        spared_rows += len(family_rows[family]) - 1
        gain = spared_rows * common_lengths[family] - (len(of_rows) - spared_rows) * FAMILY_COST
        if gain > best_gain:
            best_gain, shared_length = gain, common_lengths[family]
    if not best_gain:
        return None
    row_order: list[int] = []
    family_spans: list[tuple[int, int, int]] = []
    for family, rows in family_rows.items():
        for joint_rows in [rows] if common_lengths.get(family, 0) >= shared_length else [[row] for row in rows]:
            family_spans.append((of_rows[joint_rows[0]], len(row_order), len(row_order) + len(joint_rows)))
            row_order += joint_rows
    return Shared(shared_length, torch.tensor(row_order), tuple(family_spans))
