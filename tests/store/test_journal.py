"""The journal: what is written is read back exactly, only by whom it belongs to, only in order (laws 1 and 2)."""

from __future__ import annotations

import itertools
import math
import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from agentrl.records import GroupState, RoutedExperts, Step, StopReason, Turn, VersionSpan
from agentrl.store import Claim, Ending, LeaseLost, RunStore, StoreError
from agentrl.store.codec import pack_text, pack_tokens, unpack_text, unpack_tokens

from .play import START, admit, answer, play, play_all, serve, task, turn

TASK = task(0)


@pytest.fixture
def claim(store: RunStore) -> Claim:
    admit(store, limit=1)
    (claim, _) = store.leases.claim("worker", 2, lease_s=30.0)
    return claim


@pytest.fixture
def begun(store: RunStore, claim: Claim) -> Claim:
    store.journal.begin(claim.episode_id, claim.fence, START)
    return claim


# --- what goes in comes out ---------------------------------------------------------------------------------------

texts = st.text(st.characters(), max_size=30)  # lone surrogates and NUL among them
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
messages = st.lists(st.fixed_dictionaries({"role": texts, "content": texts}), max_size=3).map(tuple)
numbers = st.floats(allow_nan=False, allow_infinity=False)
steps = st.builds(
    Step,
    observation=messages,
    reward=numbers,
    terminated=st.booleans(),
    truncated=st.booleans(),
    outcome=st.none() | numbers,
    success=st.none() | st.booleans(),
    stop_reason=st.none() | st.sampled_from(StopReason),
    history=st.none() | messages,
    masked=st.booleans(),
    role=st.none() | texts,
    rewards=st.dictionaries(texts, numbers, max_size=2),
    outcomes=st.dictionaries(texts, numbers, max_size=2),
    unsettled=numbers,
    observation_cut=st.integers(0, 2**40),
    info=st.dictionaries(texts, json_values, max_size=3),
)


@st.composite
def experts(draw: st.DrawFn) -> RoutedExperts:
    layers, per_token, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
    size = draw(st.integers(0, 4)) * layers * per_token * width
    return RoutedExperts(
        start=draw(st.integers(0, 2**20)),
        layers=layers,
        per_token=per_token,
        width=width,
        data=draw(st.binary(min_size=size, max_size=size)),
    )


@st.composite
def turns_of(draw: st.DrawFn, versions: tuple[int, ...], index: int) -> Turn:
    n = draw(st.integers(0, 8))
    cuts = sorted(draw(st.sets(st.integers(1, max(1, n - 1)), max_size=2))) if n > 1 else []
    edges = [0, *cuts, n] if n else []
    ids = st.integers(0, 2**32 - 1)
    log_probs = st.floats(max_value=0, allow_nan=False, allow_infinity=False)
    return Turn(
        index=index,
        parent=draw(st.none() | st.integers(0, index - 1)) if index else None,
        prompt_ids=tuple(draw(st.lists(ids, max_size=6))),
        token_ids=tuple(draw(st.lists(ids, min_size=n, max_size=n))),
        logprobs=tuple(draw(st.lists(log_probs, min_size=n, max_size=n))),
        spans=tuple(
            VersionSpan(draw(st.sampled_from(versions)), start, end, draw(st.booleans()))
            for start, end in itertools.pairwise(edges)
        ),
        finish=draw(st.sampled_from(["stop", "length", "abort"])),
        text=draw(texts),
        step=draw(st.none() | steps),
        role=draw(st.text()),
        experts=draw(st.none() | experts()),
        started_s=draw(st.floats(0, 1e9)),
        ended_s=draw(st.floats(0, 1e9)),
    )


@pytest.mark.medium
@settings(max_examples=40)
@given(data=st.data())
def test_law_1_every_token_and_all_about_it_is_read_back_exactly(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with RunStore.create(tmp_path_factory.mktemp("journal") / "store.sqlite", "{}") as store:
        versions = (serve(store, 0), serve(store, 1), serve(store, 2))
        store.groups.add_groups(
            [replace(TASK, kwargs=data.draw(st.dictionaries(texts, json_values)))], size=1, purpose="x"
        )
        (claim,) = store.leases.claim("worker", 1, lease_s=30.0)
        start = data.draw(messages)
        store.journal.begin(claim.episode_id, claim.fence, start)
        played = [data.draw(turns_of(versions, index)) for index in range(data.draw(st.integers(0, 4)))]
        for one in played:
            if data.draw(st.booleans()):
                store.journal.journal_turn(claim.episode_id, claim.fence, one)
            else:
                store.journal.journal_turn(claim.episode_id, claim.fence, replace(one, step=None))
                if one.step is not None:
                    store.journal.journal_step(claim.episode_id, claim.fence, one.index, one.step)
        store.close()
        with RunStore.open(store.path) as again:
            trajectory = again.reads.trajectory(claim.episode_id)
            reloaded = again.leases.reload(claim)
    assert trajectory.turns == tuple(played)
    assert trajectory.start == start
    assert trajectory.task == claim.task
    assert reloaded.turns == trajectory.turns


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_float32_log_probs_take_four_bytes_and_are_exact(logprobs: list[float]) -> None:
    n = len(logprobs)
    one = replace(turn(0, 1, n), logprobs=tuple(logprobs), token_ids=(0,) * n)
    assert unpack_tokens(pack_tokens(one)) == (one.prompt_ids, one.token_ids, one.logprobs, {})


@given(texts)
def test_any_text_is_kept(text: str) -> None:
    assert unpack_text(pack_text(text)) == text


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
def test_law_1_a_token_without_a_log_prob_is_refused(store: RunStore, begun: Claim, logprob: float) -> None:
    bad = replace(turn(0, 1, 2), logprobs=(-0.5, logprob))
    with pytest.raises(StoreError, match="turn 0: a sampled token's log-prob is not finite"):
        store.journal.journal_turn(begun.episode_id, begun.fence, bad)


@pytest.mark.parametrize("token", [-1, 2**32, 1.5])
def test_law_1_what_is_no_token_id_is_refused(store: RunStore, begun: Claim, token: Any) -> None:
    with pytest.raises(StoreError, match="not an unsigned 32-bit integer"):
        store.journal.journal_turn(begun.episode_id, begun.fence, replace(turn(0, 1, 1), token_ids=(token,)))


def test_law_1_a_version_that_was_never_minted_is_refused(store: RunStore, begun: Claim) -> None:
    with pytest.raises(StoreError, match="weight version 9 was never minted"):
        store.journal.journal_turn(begun.episode_id, begun.fence, turn(0, 9))
    assert store.reads.trajectory(begun.episode_id).turns == ()


def test_a_name_that_is_no_text_is_refused(store: RunStore, begun: Claim) -> None:
    with pytest.raises(StoreError, match="cannot be written as UTF-8"):
        store.journal.journal_turn(begun.episode_id, begun.fence, replace(turn(0, 1), role="\ud800"))
    store.journal.journal_turn(begun.episode_id, begun.fence, turn(0, 1))


# --- order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 2])
def test_a_turn_that_is_not_the_next_is_refused(store: RunStore, begun: Claim, index: int) -> None:
    store.journal.journal_turn(begun.episode_id, begun.fence, turn(0, 1))
    with pytest.raises(StoreError, match=f"turn {index} cannot follow turn 0"):
        store.journal.journal_turn(begun.episode_id, begun.fence, turn(index, 1))


def test_a_turn_cannot_extend_a_later_one(store: RunStore, begun: Claim) -> None:
    with pytest.raises(StoreError, match="turn 0 cannot extend turn 0"):
        store.journal.journal_turn(begun.episode_id, begun.fence, replace(turn(0, 1), parent=0))


def test_a_turn_is_answered_once_and_after_it_was_taken(store: RunStore, begun: Claim) -> None:
    with pytest.raises(StoreError, match="turn 0 was never journaled"):
        store.journal.journal_step(begun.episode_id, begun.fence, 0, answer(0))
    store.journal.journal_turn(begun.episode_id, begun.fence, turn(0, 1, step=answer(0)))
    with pytest.raises(StoreError, match="turn 0 is answered already"):
        store.journal.journal_step(begun.episode_id, begun.fence, 0, answer(1))


def test_an_episode_with_turns_cannot_begin_again(store: RunStore, begun: Claim) -> None:
    store.journal.journal_turn(begun.episode_id, begun.fence, turn(0, 1))
    with pytest.raises(StoreError, match="has turns already"):
        store.journal.begin(begun.episode_id, begun.fence, START)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step(observation=(), reward=math.nan), "turn 0: reward nan is not finite"),
        (Step(observation=(), info={"box": object()}), "turn 0: info is not JSON-safe"),
        (Step(observation=(), info={"score": math.inf}), "turn 0: info is not JSON-safe"),
        (Step(observation=(), info={"outcome": 1.0}), r"turn 0: info\['outcome'\] is a field of the step: set that"),
        (Step(observation=(), outcome=math.inf), "turn 0: info is not JSON-safe"),
        (Step(observation=({"role": "tool", "content": b"raw"},)), "turn 0: observation is not JSON-safe"),  # pyright: ignore
    ],
)
def test_an_answer_that_cannot_be_kept_is_refused_by_name(
    store: RunStore, begun: Claim, step: Step, message: str
) -> None:
    store.journal.journal_turn(begun.episode_id, begun.fence, turn(0, 1))
    with pytest.raises(StoreError, match=message):
        store.journal.journal_step(begun.episode_id, begun.fence, 0, step)
    assert store.reads.trajectory(begun.episode_id).turns[0].step is None


def test_an_outcome_that_is_no_number_is_refused(store: RunStore, begun: Claim) -> None:
    with pytest.raises(StoreError, match="outcome nan is not finite"):
        play(store, begun, outcome=math.nan)


# --- the fence ----------------------------------------------------------------------------------------------------


def calls(store: RunStore, claim: Claim) -> dict[str, Any]:
    id, fence = claim.episode_id, claim.fence
    return {
        "begin": lambda: store.journal.begin(id, fence, START),
        "journal_turn": lambda: store.journal.journal_turn(id, fence, turn(1, 1)),
        "journal_step": lambda: store.journal.journal_step(id, fence, 0, answer(0)),
        "restart_episode": lambda: store.journal.restart_episode(id, fence, "cannot replay"),
        "discard_turn": lambda: store.journal.discard_turn(id, fence),
        "restart_group": lambda: store.journal.restart_group(id, fence, 9),
        "finish": lambda: store.journal.finish(
            id, fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
        ),
        "reload": lambda: store.leases.reload(claim),
    }


@pytest.mark.parametrize("how", ["released", "claimed anew", "expired", "finished", "unknown"])
def test_law_2_a_worker_that_lost_its_lease_writes_nothing(store: RunStore, begun: Claim, how: str) -> None:
    store.journal.journal_turn(begun.episode_id, begun.fence, turn(0, 1))
    if how in ("released", "claimed anew"):
        store.deaths.release_worker("worker")
    if how == "claimed anew":
        assert store.leases.claim("other", 1, lease_s=30.0)[0].episode_id == begun.episode_id
    if how == "expired":
        store.buffer.expire(1e9, 1.0)
    if how == "finished":
        store.journal.finish(
            begun.episode_id, begun.fence, Ending(stop_reason=StopReason.TURN_LIMIT, outcome=0.0, success=False)
        )
    lost = replace(begun, episode_id=999) if how == "unknown" else begun
    before = store.reads.trajectory(begun.episode_id)
    for name, call in calls(store, lost).items():
        with pytest.raises(LeaseLost):
            call()
        assert store.reads.trajectory(begun.episode_id) == before, name


# --- resuming -----------------------------------------------------------------------------------------------------


def test_an_episode_that_starts_anew_keeps_its_old_turns_apart(store: RunStore, begun: Claim) -> None:
    store.journal.journal_turn(begun.episode_id, begun.fence, turn(0, 1, n=5, step=answer(0)))
    store.journal.restart_episode(begun.episode_id, begun.fence, "replay differs at turn 0")
    reloaded = store.leases.reload(begun)
    assert (reloaded.start, reloaded.turns, reloaded.trial) == (None, (), 1)
    play(store, reloaded, turns=1)
    (restart,) = store.reads.restarts(begun.episode_id)
    assert restart.reason == "replay differs at turn 0"
    assert restart.start == START
    assert restart.turns == (turn(0, 1, n=5, step=answer(0)),)
    row = store.reads.episodes(group_id=begun.group_id)[0]
    assert (row.trial, row.turns, row.tokens) == (1, 1, 3)


# --- the end of a group -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "state", "drops"),
    [
        (["done", "time_limit", "engine_failed"], GroupState.SCORED, {}),  # two are left to compare
        (["sandbox_failed", "engine_failed", "sandbox_failed"], GroupState.FAILED, {"sandbox_failed": 1}),
    ],
)
def test_law_3_what_the_policy_did_not_do_leaves_its_group(
    store: RunStore, ends: list[str], state: GroupState, drops: dict[str, int]
) -> None:
    admit(store, limit=1, group_size=3)
    for claim, end in zip(store.leases.claim("worker", 3, lease_s=30.0), ends, strict=True):
        assert store.groups.counts() == {GroupState.RUNNING: 1}
        play(store, claim, stop=StopReason(end), outcome=0.5)  # an outcome does not make a failure the policy's
    assert store.groups.counts() == {state: 1}
    assert store.metrics.drops() == drops


def test_a_failure_says_why(store: RunStore, begun: Claim) -> None:
    store.journal.finish(
        begun.episode_id,
        begun.fence,
        Ending(
            stop_reason=StopReason.ENGINE_FAILED,
            outcome=None,
            success=None,
            detail="no answer \ud800",
        ),
    )
    assert store.metrics.failures()[:3] == (1, 1, "no answer \\ud800")
    assert store.reads.episodes(group_id=begun.group_id)[0].detail == "no answer \\ud800"


def test_failures_count_within_one_life_of_the_run(store: RunStore) -> None:
    admit(store, limit=2)
    play_all(store, stop=StopReason.ENGINE_FAILED, outcome=None)
    assert store.metrics.failures()[:2] == (4, 4)
    store.deaths.release_all()
    assert store.metrics.failures()[:2] == (0, 0)
    assert store.metrics.endings() == {StopReason.ENGINE_FAILED: 4}
    attempt = store.lineage.attempt
    store.deaths.release_all()  # nothing happened since: still the same life
    assert store.lineage.attempt == attempt


# --- cost ---------------------------------------------------------------------------------------------------------


def test_journaling_a_turn_costs_little_cpu(store: RunStore) -> None:
    """A turn of 192 tokens with its answer costs at most 14 times the CPU of two bare transactions: 0.3 ms where those
    take 0.02 ms. The best of ten batches of each in turn, as the machine is shared."""
    store.groups.add_groups([TASK] * 10, size=20, purpose="train")
    one = replace(turn(0, 1, 64), prompt_ids=tuple(range(128)), text="x" * 300)
    bare = sqlite3.connect(store.path.with_name("bare.sqlite"), isolation_level=None)
    bare.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; CREATE TABLE rows (data BLOB)")
    costs: list[float] = []
    bare_costs: list[float] = []
    for _ in range(10):
        before = time.process_time()
        for _ in range(40):
            bare.execute("BEGIN IMMEDIATE")
            bare.execute("INSERT INTO rows VALUES (?)", (bytes(1000),))
            bare.execute("COMMIT")
        bare_costs.append((time.process_time() - before) / 20)
        claims = store.leases.claim("worker", 20, lease_s=30.0)
        before = time.process_time()
        for claim in claims:
            store.journal.journal_turn(claim.episode_id, claim.fence, one)
            store.journal.journal_step(claim.episode_id, claim.fence, 0, answer(0))
        costs.append((time.process_time() - before) / len(claims))
    bare.close()
    assert min(costs) < 14 * min(bare_costs)


def test_writes_of_two_handles_take_turns(store: RunStore, path: Path) -> None:
    """A second process's open write makes the first wait, and fail with one line only after the deadline."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store._db.waiting.lock_s = 0.02  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(StoreError, match="has held the write lock"):
        store.set_meta("phase", "train")
    other.execute("ROLLBACK")
    store.set_meta("phase", "train")
    assert store.meta("phase") == "train"


def test_a_write_holds_the_lock_from_its_first_instant(store: RunStore) -> None:
    """Else what it read before it wrote could be stale by then, and SQLite would have to refuse the write."""
    with RunStore.open(store.path) as other:
        other._db.waiting.lock_s = 0.0  # pyright: ignore[reportPrivateUsage]
        with (
            store._db.write(),  # pyright: ignore[reportPrivateUsage]
            pytest.raises(StoreError, match="has held the write lock"),
        ):
            other.set_meta("phase", "train")
