"""Siblings read their common beginning once: who is a family, where contexts are split, and that nothing changes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from each_case import each_case
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.embedded import cache_slots
from agentrl.engine.embedded.architecture import Architecture, read_architecture
from agentrl.engine.embedded.cache_slots import CacheSlots, share
from agentrl.engine.embedded.model import KVStore

from .test_batching import Case, groups, prompt

LENGTH = 40


@pytest.fixture(scope="module")
def architecture(model_dir: Path) -> Architecture:
    return read_architecture(model_dir)


def compute(slots: CacheSlots, slot: int, end: int) -> None:
    """Fill the positions up to `end` with bits that nobody else has."""
    start = int(slots.computed[slot])
    if end > start:
        slots.kv.keys[:, slot, :, :, start:end] = torch.rand_like(slots.kv.keys[:, slot, :, :, start:end])
        slots.kv.values[:, slot, :, start:end] = torch.rand_like(slots.kv.values[:, slot, :, start:end])
        slots.computed[slot] = end


def admit(slots: CacheSlots, tokens: list[int], version: int = 0) -> int:
    slot = slots.acquire(tokens, version)
    assert slot is not None
    slots.adopt(slot, version)
    compute(slots, slot, len(tokens) - 1)
    return slot


def test_siblings_are_split_where_their_prompt_ends(
    architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_slots, "FAMILY_COST", 1)
    slots = CacheSlots(KVStore(architecture, 8, LENGTH))
    rows = [admit(slots, [*range(20), 50 + n]) for n in range(3)]
    rows += [admit(slots, [*range(30, 48), 60 + n]) for n in range(2)]
    rows += [admit(slots, list(range(70, 100)))]
    shared = share(slots, rows)
    assert shared is not None
    # 2 rows spared at 20 positions are worth more than 3 at 18, each family and each row alone costing 1
    assert 2 * 20 - 4 < 3 * 18 - 3 and shared.length == 18
    assert shared.order_N.tolist() == [0, 1, 2, 3, 4, 5]
    assert shared.families == ((rows[0], 0, 3), (rows[3], 3, 5), (rows[5], 5, 6))


def test_what_costs_more_than_it_spares_is_not_shared(architecture: Architecture) -> None:
    slots = CacheSlots(KVStore(architecture, 8, LENGTH))
    rows = [admit(slots, [*range(20), 50 + n]) for n in range(3)]
    assert cache_slots.FAMILY_COST > 2 * 20 and share(slots, rows) is None


def test_one_short_common_beginning_does_not_spoil_a_long_one(
    architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts begin alike, as with a system message; the members of a group share much more."""
    monkeypatch.setattr(cache_slots, "FAMILY_COST", 1)
    slots = CacheSlots(KVStore(architecture, 8, LENGTH))
    rows = [admit(slots, [1, 2, 3, 4, *range(10 * group, 10 * group + 20), 90 + n]) for group in (1, 4) for n in (1, 2)]
    shared = share(slots, rows)
    assert shared is not None and shared.length == 24 and len(shared.families) == 2


@given(st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_family_has_the_same_bits(architecture: Architecture, seed: int) -> None:
    rng = random.Random(seed)
    slots, version, busy = CacheSlots(KVStore(architecture, 6, LENGTH)), 0, set[int]()
    for _ in range(120):
        often = ["admit", "admit", "grow", "grow", "release", "exchange"]
        action = rng.choice(often * 5 + ["version", "forget"])
        if action == "admit":
            first, second = rng.randrange(2), rng.randrange(2)  # of four texts, all of which begin alike, a part
            slot = slots.acquire([5] * 4 + [first] * 12 + [second] * rng.randrange(1, 20), version)
            if slot is not None:
                busy.add(slot)
        elif action == "grow" and busy:
            slot = rng.choice(sorted(busy))
            slots.adopt(slot, version)
            compute(slots, slot, rng.randint(int(slots.computed[slot]), int(slots.known[slot])))
        elif action == "release" and busy:
            slot = rng.choice(sorted(busy))
            busy.remove(slot)
            slots.release(slot)
        elif action == "exchange":
            a, b = rng.sample(range(6), 2)
            slots.exchange(a, b)
            busy = {{a: b, b: a}.get(slot, slot) for slot in busy}
        elif action in ("version", "forget"):
            version += action == "version"
            slots.forget(busy=action == "forget")
        for a in range(6):
            for b in range(a):
                if slots.family[a] == slots.family[b]:
                    end = int(min(slots.kin[a], slots.kin[b], slots.computed[a], slots.computed[b]))
                    assert torch.equal(slots.kv.keys[:, a, :, :, :end], slots.kv.keys[:, b, :, :, :end])
                    assert torch.equal(slots.kv.values[:, a, :, :end], slots.kv.values[:, b, :, :end])


@each_case("settings", [{}, {"pass_tokens": 7}, {"max_batch": 5}, {"slots": 6, "max_batch": 6}])
def test_shared_or_not_logprobs_are_exact(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, int]
) -> None:
    monkeypatch.setattr(cache_slots, "FAMILY_COST", 0)
    case = Case(model_dir, **settings)
    groups(case, turns=2, rng=random.Random(0))
    for id in case.requests:
        case.check_logprobs(id)
        case.check_emissions(id)


def test_a_row_that_is_shorter_than_what_others_share(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_slots, "FAMILY_COST", 0)
    case = Case(model_dir)
    for member in range(4):
        case.submit(f"long {member}", prompt(1, 90))
    case.submit("short", prompt(2, 10))
    case.run()
    for id in case.requests:
        case.check_logprobs(id)


def test_a_prompt_that_is_computed_in_pieces_is_shared_whole(architecture: Architecture) -> None:
    """A sibling copies what the leader has so far, and the rest when it is there."""
    slots = CacheSlots(KVStore(architecture, 4, LENGTH))
    leader, sibling = (slots.acquire([*range(30), 50 + n], 0) for n in range(2))
    assert leader is not None and sibling is not None
    for end in (20, 30):
        compute(slots, leader, end)
        assert slots.adopt(sibling, 0) == end
        assert slots.family[leader] == slots.family[sibling] and slots.kin[sibling] == end
