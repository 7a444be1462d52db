"""Law 6: neither rollouts nor learner wait for each other, except at the bound of law 5 or for an empty buffer."""

from __future__ import annotations

from agentrl.store import RunStore

from .play import admit, play, play_all, serve

MAX_LAG, BATCH, SIZE = 2, 2, 2


def groups_ahead(store: RunStore) -> int:
    return admit(store, max_lag=MAX_LAG, groups_per_step=BATCH)


def test_law_6_rollouts_go_on_while_the_learner_steps_up_to_the_bound_of_lag_and_no_further(store: RunStore) -> None:
    assert groups_ahead(store) == (MAX_LAG + 1) * BATCH, "what a learner at step 0 may still train of its weights"
    play_all(store)
    assert store.buffer.take(1, BATCH, max_lag=MAX_LAG) is not None
    assert groups_ahead(store) == 0, "the bound: without new weights one group more would be too old"
    serve(store, 1)  # the learner has stepped
    assert groups_ahead(store) == BATCH


def test_law_6_a_learner_with_a_batch_waits_for_no_episode_that_runs(store: RunStore) -> None:
    groups_ahead(store)
    claims = store.leases.claim("a", 1000, lease_s=1e6)
    for claim in claims[: BATCH * SIZE]:
        play(store, claim)
    batch = store.buffer.take(1, BATCH, max_lag=MAX_LAG)
    assert batch is not None and [group.id for group in batch] == [1, 2]
    assert store.buffer.take(2, BATCH, max_lag=MAX_LAG) is None, "an empty buffer is all that it waits for"
    last = claims[-2:]
    for claim in (*last, *claims[BATCH * SIZE : BATCH * SIZE + SIZE]):  # whichever groups end first
        play(store, claim)
    assert store.buffer.take(2, BATCH, max_lag=MAX_LAG) is not None


def test_law_6_episodes_that_run_go_on_over_the_learners_steps(store: RunStore) -> None:
    groups_ahead(store)
    *quick, slow, sibling = store.leases.claim("a", 1000, lease_s=1e6)
    for claim in quick:
        play(store, claim)
    for step in (1, 2):
        assert store.buffer.take(step, BATCH, max_lag=MAX_LAG) is not None
        serve(store, step)
    for claim in (slow, sibling):
        play(store, claim, version=1)  # of the weights it began with: within the bound, so it is trained
    batch = store.buffer.take(3, 1, max_lag=MAX_LAG)
    assert batch is not None and [one.scored for one in batch[0].trajectories] == [True, True]
