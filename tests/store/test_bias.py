"""What was trained beside what was played: hand-made runs in which dropping does, and does not, favour a length."""

from __future__ import annotations

import math

import pytest

from agentrl.records import StopReason
from agentrl.store import Freshest, Quorum, Returns, RunStore

from .play import Clock, admit, play, serve

RETURNS = Returns()


def play_long_and_short(store: RunStore, clock: Clock) -> None:
    """Four groups of two. In each, member 0 takes 1 turn, 3 tokens and a second and fails; member 1 takes 3 turns, 9
    tokens and 3 seconds and succeeds (and has earned 0.25 + 0.5 on the way: its returns are 1.75, 1.75 and 1.5)."""
    admit(store, limit=4, max_lag=9)
    began = clock.now
    for claim in store.leases.claim("w", 8, lease_s=1e6):
        turns = 3 if claim.member else 1
        clock.now = began + turns
        play(store, claim, turns=turns, outcome=float(claim.member))


def test_if_every_episode_is_trained_both_sides_are_the_same(store: RunStore, clock: Clock) -> None:
    play_long_and_short(store, clock)
    store.buffer.take(1, 4, max_lag=9)
    bias = store.metrics.training_bias(RETURNS)
    assert bias.admitted == bias.trained
    assert bias.trained.episodes == 8
    assert bias.trained.turns == {"mean": 2.0, "p25": 1.0, "p50": 1.0, "p75": 3.0, "p95": 3.0}
    assert bias.trained.tokens == {"mean": 6.0, "p25": 3.0, "p50": 3.0, "p75": 9.0, "p95": 9.0}
    assert bias.trained.seconds == {"mean": 2.0, "p25": 1.0, "p50": 1.0, "p75": 3.0, "p95": 3.0}
    short, long = -1.75, (1.75 + 1.75 + 1.5) / 3  # against the sibling, which stopped after its first turn
    assert bias.trained.advantage_by_quartile[0] == pytest.approx(short)
    assert bias.trained.advantage_by_quartile[2] == pytest.approx(long)
    assert math.isnan(bias.trained.advantage_by_quartile[1])
    expected = (3 * abs(short) + 9 * long) / (abs(short) + long)
    assert bias.trained.weighted_tokens == pytest.approx(expected)


def test_what_waits_is_on_neither_side(store: RunStore, clock: Clock) -> None:
    play_long_and_short(store, clock)
    store.buffer.take(1, 1, max_lag=9)
    bias = store.metrics.training_bias(RETURNS)
    assert (bias.admitted.episodes, bias.trained.episodes) == (2, 2)


def test_an_order_that_lets_long_groups_grow_stale_shows(store: RunStore, clock: Clock) -> None:
    """Groups 1 and 2 are long, 3 and 4 short and fresher; one step trains two, then the others are too old."""
    admit(store, limit=4, max_lag=9)
    one = serve(store, 1)
    for claim in store.leases.claim("w", 8, lease_s=1e6):
        long = claim.group_id <= 2
        play(store, claim, turns=4 if long else 1, version=1 if long else one, outcome=float(claim.member))
    taken = store.buffer.take(2, 2, max_lag=1, order=Freshest()) or []
    assert {group.id for group in taken} == {3, 4}
    serve(store, 2)
    store.buffer.take(3, 1, max_lag=1)
    bias = store.metrics.training_bias(RETURNS)
    assert store.metrics.drops() == {"stale": 2}
    assert (bias.admitted.episodes, bias.trained.episodes) == (8, 4)
    assert (bias.admitted.turns["mean"], bias.trained.turns["mean"]) == (2.5, 1.0)
    assert (bias.admitted.turns["p95"], bias.trained.turns["p95"]) == (4.0, 1.0)
    assert bias.admitted.weighted_tokens > bias.trained.weighted_tokens == 3.0


def test_a_late_member_is_judged_by_what_its_group_recorded(store: RunStore, clock: Clock) -> None:
    admit(store, limit=1, group_size=3)
    *early, late = store.leases.claim("w", 3, lease_s=1e6)
    for claim in early:
        play(store, claim, turns=1, outcome=0.0)
    store.buffer.expire(clock() + 1.0, 600.0, close_policy=Quorum(2, 0.0))
    store.buffer.take(1, 1, max_lag=9)
    play(store, late, turns=1, version=1, outcome=1.0)
    assert store.metrics.training_bias(RETURNS).admitted.episodes == 2, "it may still be trained"
    store.buffer.take(2, 0, max_lag=9)
    bias = store.metrics.training_bias(RETURNS)
    assert bias.trained.episodes == 3
    assert bias.trained.advantage_by_quartile[0] == pytest.approx((0 + 0 + 1) / 3)


def test_groups_skipped_without_signal_are_on_neither_side(store: RunStore, clock: Clock) -> None:
    admit(store, limit=2)
    for claim in store.leases.claim("w", 4, lease_s=1e6):
        play(store, claim, turns=5 if claim.group_id == 1 else 1, outcome=float(claim.group_id == 1 or claim.member))
    store.buffer.take(1, 1, max_lag=9, skip_at_most=4)
    bias = store.metrics.training_bias(RETURNS)
    assert store.metrics.drops() == {"no_signal": 1}
    assert bias.admitted == bias.trained
    assert bias.trained.turns["mean"] == 1.0


def test_a_failed_member_counts_with_its_length_and_has_no_advantage(store: RunStore) -> None:
    admit(store, limit=1, group_size=3)
    failed, *others = store.leases.claim("w", 3, lease_s=1e6)
    play(store, failed, turns=7, stop=StopReason.ENGINE_FAILED, outcome=None)
    for claim in others:
        play(store, claim, turns=1, outcome=float(claim.member == 1))
    store.buffer.take(1, 1, max_lag=9)
    bias = store.metrics.training_bias(RETURNS)
    assert (bias.admitted.episodes, bias.trained.episodes) == (3, 2)
    assert (bias.admitted.turns["p95"], bias.trained.turns["p95"]) == (7.0, 1.0)
    assert bias.admitted.weighted_tokens == bias.trained.weighted_tokens == 3.0


def test_a_run_without_episodes_has_no_numbers(store: RunStore) -> None:
    bias = store.metrics.training_bias(RETURNS)
    assert bias.trained.episodes == 0
    assert math.isnan(bias.trained.tokens["p50"])
