"""Which running requests read the beginning of their context from one slot, and how much of it.

Decoding one token reads every key and value of the context; for the siblings of a group most of them are the same
bits, copied from slot to slot when the prompt was computed once. `share` finds them, so that attention reads them once
for all. It owns that choice and nothing else: no tensor of a model, no request. (The split of attention into a shared
and an own part is Juravsky et al. 2024, Hydragen.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch

from agentrl.engine.embedded.cache_slots import CacheSlots
from agentrl.engine.embedded.model import Shared

FAMILY_COST = 300
"""What a family costs a layer, in positions of one row: two more products, against keys and values not read again."""


def share(slots: CacheSlots, of_rows: Sequence[int]) -> Shared | None:
    """How single rows of these slots best share their common prefix; None if it is not worth it."""
    kin = np.minimum(slots.kin, slots.computed)[of_rows]
    members: dict[int, list[int]] = defaultdict(list)
    for row, family in enumerate(slots.family[of_rows].tolist()):
        members[family].append(row)
    common = {family: int(kin[rows].min()) for family, rows in members.items() if len(rows) > 1}
    best, length, spared = 0, 0, 0
    for family in sorted(common, key=lambda family: -common[family]):
        spared += len(members[family]) - 1
        gain = spared * common[family] - (len(of_rows) - spared) * FAMILY_COST
        if gain > best:
            best, length = gain, common[family]
    if not best:
        return None
    order: list[int] = []
    families: list[tuple[int, int, int]] = []
    for family, rows in members.items():
        for part in [rows] if common.get(family, 0) >= length else [[row] for row in rows]:
            families.append((of_rows[part[0]], len(order), len(order) + len(part)))
            order += part
    return Shared(length, torch.tensor(order), tuple(families))
