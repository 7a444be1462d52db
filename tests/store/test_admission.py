"""How many groups may start: worked examples, bounds that always hold, and a run in miniature (law 5)."""

from __future__ import annotations

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from agentrl.store import AdmissionBounds, Load, Quorum, RunStore, admissible_groups

from .play import Clock, admit, play, play_all, serve, task

IDLE = Load(running_episodes=0, running_groups=0, accepted_groups=0)


def admissible(load: Load = IDLE, step: int = 0, **changes: int) -> int:
    arguments = {
        "max_lag": 1,
        "groups_per_step": 2,
        "group_size": 4,
        "max_running": 1000,
        "steps_total": 1000,
    }
    return admissible_groups(load, AdmissionBounds(**(arguments | changes)), step=step)


@pytest.mark.parametrize(
    ("load", "changes", "expected"),
    [
        (IDLE, {}, 4),  # (1 + 0 + 1) * 2
        (IDLE, {"max_lag": 0}, 2),  # synchronous: one step's batch
        (IDLE, {"max_lag": 3, "step": 5}, 18),  # (3 + 5 + 1) * 2
        (IDLE, {"max_running": 11}, 3),  # eleven places: of the third group one member waits for one
        (IDLE, {"steps_total": 1}, 2),  # the last step needs two groups, whatever the lag bound allows
        (Load(running_episodes=0, running_groups=0, accepted_groups=2, buffered_tokens=99), {"max_tokens": 100}, 2),
        (Load(running_episodes=0, running_groups=0, accepted_groups=2, buffered_tokens=100), {"max_tokens": 100}, 0),
        (Load(running_episodes=0, running_groups=0, accepted_groups=1, buffered_tokens=999), {"max_tokens": 1}, 1),
        (Load(running_episodes=0, running_groups=1, accepted_groups=1, buffered_tokens=999), {"max_tokens": 1}, 0),
    ],
)
def test_worked_examples(load: Load, changes: dict[str, int], expected: int) -> None:
    assert admissible(load, **changes) == expected


counts = st.integers(0, 200)


@given(
    st.builds(Load, running_episodes=counts, running_groups=counts, accepted_groups=counts),
    st.integers(0, 50),
    st.integers(0, 8),
    st.integers(1, 16),
    st.integers(1, 16),
    st.integers(1, 400),
    st.integers(0, 60),
)
def test_every_bound_holds_after_admission_and_one_more_would_break_one(
    load: Load, step: int, max_lag: int, groups_per_step: int, group_size: int, max_running: int, steps_total: int
) -> None:
    bounds = AdmissionBounds(
        max_lag=max_lag,
        groups_per_step=groups_per_step,
        group_size=group_size,
        max_running=max_running,
        steps_total=steps_total,
    )
    n = admissible_groups(load, bounds, step=step)

    def within(more: int) -> bool:
        admitted = load.accepted_groups + load.running_groups + more
        return (
            load.running_episodes + (more - 1) * group_size < max_running
            and admitted <= (max_lag + step + 1) * groups_per_step
            and admitted <= steps_total * groups_per_step
        )

    assert n >= 0
    assert n == 0 or within(n)
    assert not within(n + 1)


@settings(max_examples=100)
@given(st.data(), st.integers(0, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 24))
def test_law_5_an_admitted_group_that_finishes_promptly_is_never_older_than_the_bound(
    data: st.DataObject, max_lag: int, groups_per_step: int, group_size: int, max_running: int
) -> None:
    """A run in miniature: groups are admitted, finish out of order or are dropped, the learner takes the oldest first.

    Prompt means: finished before any group admitted later was trained. Its tokens are at worst of the weights that were
    served at its admission; with weights w, step w + 1 is trained."""
    step = 0  # of the weights that are served
    admitted_at: list[int] = []
    running: set[int] = set()
    finished: set[int] = set()
    trained_in: dict[int, int] = {}
    for _ in range(data.draw(st.integers(5, 60))):
        action = data.draw(st.sampled_from(["admit", "finish", "drop", "train"]))
        if action == "admit":
            load = Load(
                running_episodes=len(running) * group_size,
                running_groups=len(running),
                accepted_groups=len(finished) + len(trained_in),
            )
            bounds = AdmissionBounds(
                max_lag=max_lag,
                groups_per_step=groups_per_step,
                group_size=group_size,
                max_running=max_running,
                steps_total=10_000,
            )
            n = admissible_groups(load, bounds, step=step)
            running |= set(range(len(admitted_at), len(admitted_at) + n))
            admitted_at += [step] * n
            assert len(running) * group_size < max_running + group_size
        elif action in ("finish", "drop") and running:
            group = data.draw(st.sampled_from(sorted(running)))
            running.remove(group)
            if action == "finish":
                finished.add(group)
        elif action == "train" and len(finished) >= groups_per_step:
            for group in sorted(finished)[:groups_per_step]:
                finished.remove(group)
                overtaken = any(other > group and at <= step for other, at in trained_in.items())
                if not overtaken:
                    assert step - admitted_at[group] <= max_lag
                trained_in[group] = step + 1
            step += 1


def test_nothing_starts_before_an_engine_serves_weights(path: Path) -> None:
    with RunStore.create(path, "{}") as store:
        version = store.versions.mint_version(0)
        assert admit(store) == 0
        store.versions.confirm_version(version)
        assert admit(store) == 4


def test_synchronous_training_alternates(store: RunStore) -> None:
    """max_lag = 0: a batch is admitted, played, taken; nothing more starts until the next weights are served."""
    for step in range(3):
        assert admit(store, max_lag=0) == 2
        assert admit(store, max_lag=0) == 0
        play_all(store)
        assert admit(store, max_lag=0) == 0
        assert len(store.buffer.take(step + 1, 2, max_lag=0) or []) == 2
        assert admit(store, max_lag=0) == 0
        serve(store, step + 1)


def test_a_task_that_cannot_be_made_admits_nothing(store: RunStore) -> None:
    with pytest.raises(ZeroDivisionError):
        admit(store, lambda index: task(index // (1 - index)))
    assert store.groups.counts() == {}
    assert admit(store) == 4


# --- capacity in tokens -------------------------------------------------------------------------------------------


def test_a_buffer_full_of_tokens_stops_admission_until_a_step_has_taken_some(store: RunStore) -> None:
    """Two members of 6 tokens a group. Full at 20 tokens, so after two groups; the lag bound alone allows four."""
    assert admit(store, limit=2, max_tokens=20) == 2
    assert admit(store, limit=1, max_tokens=20) == 1, "what runs has no tokens in the buffer yet"
    play_all(store)
    assert admit(store, max_tokens=20) == 0
    assert admit(store, max_tokens=37) == 1
    play_all(store)
    assert store.buffer.take(1, 2, max_lag=1) is not None
    serve(store, 1)
    assert admit(store, max_tokens=24) == 0, "still full, and the next step has its groups"
    assert admit(store, max_tokens=25) == 2


def test_late_members_that_have_ended_fill_the_buffer_too(store: RunStore, clock: Clock) -> None:
    admit(store, limit=1, group_size=3)
    *early, late = store.leases.claim("w", 3, lease_s=1e6)
    for claim in early:
        play(store, claim)
    store.buffer.expire(clock() + 1.0, 600.0, close_policy=Quorum(2, 0.0))
    store.buffer.take(1, 1, max_lag=1)
    play(store, late)
    serve(store, 1)
    assert admit(store, max_tokens=6, group_size=3) == 3, "full: no more than the next step needs"
    assert admit(store, max_tokens=7, group_size=3) == 2


@given(st.integers(1, 60), st.integers(1, 4), st.integers(0, 4), st.integers(1, 40))
def test_a_learner_never_waits_for_groups_that_a_full_buffer_keeps_out(
    tokens: int, groups_per_step: int, max_lag: int, max_tokens: int
) -> None:
    """However small the capacity is beside a single group's tokens, a step is always reached."""
    trained = waiting = 0
    for step in range(6):
        load = Load(
            running_episodes=0,
            running_groups=0,
            accepted_groups=trained + waiting,
            buffered_tokens=waiting * tokens,
        )
        waiting += admissible(
            load, step=step, max_lag=max_lag, groups_per_step=groups_per_step, group_size=1, max_tokens=max_tokens
        )
        assert waiting >= groups_per_step
        trained, waiting = trained + groups_per_step, waiting - groups_per_step
