"""Awaited writes: committed together, in order, each with its own error; nobody's lock stops the loop."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.lowlevel
import trio.testing

from agentrl.errors import DiskFull, StoreBusy, StoreError
from agentrl.records import StopReason
from agentrl.store import Claim, Ending, LeaseLost, RunStore
from agentrl.store import journal_writer as awaitable
from agentrl.store.audit import audit
from agentrl.store.journal_writer import JournalWriter

from .fuse import Fuse, Killed
from .play import START, admit, answer, part, turn

DONE = Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
LIMIT = Ending(stop_reason=StopReason.TURN_LIMIT, outcome=1.0, success=True)


@pytest.fixture
async def desk(store: RunStore) -> AsyncIterator[JournalWriter]:
    with RunStore.read(store.path) as reader:
        async with JournalWriter(store, reader) as desk:
            yield desk


@pytest.fixture
def claims(store: RunStore) -> list[Claim]:
    admit(store)
    return store.leases.claim("w", 8, lease_s=1e6)


@contextmanager
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    """Somebody else holds the write lock: a backup, or a shell."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def statements(store: RunStore, first: str = "") -> Iterator[list[str]]:
    """The statements that are run meanwhile and begin with `first`. One that waits for the lock is run once, however
    long the lock is held."""
    found: list[str] = []
    connection = store._db.driver.connection  # pyright: ignore[reportPrivateUsage]
    (moment_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
    connection.execute("PRAGMA busy_timeout = 60000")
    connection.set_trace_callback(lambda sql: found.append(sql) if sql.startswith(first) else None)
    try:
        yield found
    finally:
        connection.set_trace_callback(None)
        connection.execute(f"PRAGMA busy_timeout = {moment_ms}")


transactions = partial(statements, first="BEGIN IMMEDIATE")


async def play(desk: JournalWriter, claim: Claim) -> None:
    id, fence = claim.episode_id, claim.fence
    await desk.begin(id, fence, START)
    desk.post_partial(id, fence, part(turn(0, 1), 0, 2))
    await desk.journal_turn(id, fence, turn(0, 1))
    await desk.journal_step(id, fence, 0, answer(0, last=True))
    await desk.finish(id, fence, DONE)


NO_THREAD = pytest.mark.xfail(strict=True, reason="the loop stands still")


@pytest.mark.parametrize("inline", [False, pytest.param(True, marks=NO_THREAD)])
async def test_law_4_deadlines_hold_while_somebody_holds_the_write_lock(
    store: RunStore, claims: list[Claim], monkeypatch: pytest.MonkeyPatch, inline: bool
) -> None:
    """Without the thread the loop stands still, so this test does notice."""
    monkeypatch.setattr(awaitable, "_LAST_WORD_S", 0.0)
    busy_s = 0.5 if inline else 60.0
    store.hurry(busy_s)
    with locked(store.path), RunStore.read(store.path) as reader:
        desk = JournalWriter(store, reader, inline=inline)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(play_until_busy, desk, claims[0])
            started = trio.current_time()
            with trio.move_on_after(0.05) as tool_call:
                await trio.sleep(60)
            assert tool_call.cancelled_caught
            assert await desk.meta("attempt") == "1", "nor does reading wait"
            waited_s = trio.current_time() - started
            nursery.cancel_scope.cancel()
        assert waited_s < 0.8 * busy_s
        store.close() if inline else await desk.aclose()


async def play_until_busy(desk: JournalWriter, claim: Claim) -> None:
    try:
        await play(desk, claim)
    except StoreBusy:
        await trio.sleep_forever()


async def test_what_is_asked_for_at_once_is_committed_at_once(
    store: RunStore, desk: JournalWriter, claims: list[Claim]
) -> None:
    with transactions(store) as began:
        async with trio.open_nursery() as nursery:
            with locked(store.path):
                for claim in claims:
                    nursery.start_soon(play, desk, claim)
                await trio.testing.wait_all_tasks_blocked(0.01)
    assert len(claims) == 8
    assert 4 <= len(began) <= 20, "eight episodes of five writes share transactions"
    assert store.buffer.ready_count() == 4
    assert audit(store).violations == []


async def test_writes_committed_at_once_do_not_hold_the_loop_up_at_once(desk: JournalWriter, store: RunStore) -> None:
    passes, went_on = 0, list[int]()

    async def write(number: int) -> None:
        await desk.record("fleet", number, {})
        went_on.append(passes)

    async with trio.open_nursery() as nursery:
        with locked(store.path):
            for number in range(200):
                nursery.start_soon(write, number)
            await trio.testing.wait_all_tasks_blocked(0.01)
        while len(went_on) < 200:
            passes += 1
            await trio.lowlevel.checkpoint()
    most = 64  # those of two passes, as a pass has no order
    assert max(Counter(went_on).values()) <= most, "other tasks of the loop run in between"


async def test_an_error_is_that_of_the_call_that_made_it(
    store: RunStore, desk: JournalWriter, claims: list[Claim]
) -> None:
    lost, errors = claims[1], list[Exception]()

    async def begin(claim: Claim, fence: int) -> None:
        try:
            await desk.begin(claim.episode_id, fence, START)
        except StoreError as error:
            errors.append(error)

    with transactions(store) as began:
        async with trio.open_nursery() as nursery:
            with locked(store.path):
                nursery.start_soon(begin, claims[0], claims[0].fence)
                with trio.fail_after(60):
                    while not began:  # noqa: ASYNC110 - the thread takes its time
                        await trio.sleep(0.001)
                nursery.start_soon(begin, lost, lost.fence - 1)
                nursery.start_soon(begin, claims[2], claims[2].fence)
                await trio.testing.wait_all_tasks_blocked(0.01)
    (error,) = errors
    assert isinstance(error, LeaseLost)
    assert len(began) <= 3, "the first alone, the others together: once as if none failed, and once each by itself"
    assert [store.reads.trajectory(claim.episode_id).start == START for claim in claims[:3]] == [True, False, True]


def test_however_many_turns_are_written_at_once_the_store_is_asked_twice(store: RunStore, claims: list[Claim]) -> None:
    """For their episodes, and for numbers of rows; the rest are the rows themselves, three of a turn and its answer."""
    held, plain = [(claim.episode_id, claim.fence) for claim in claims[:4]], replace(turn(0, 1), experts=None)
    store.versions.step_of(1)  # a version's step is read once
    for id, fence in held:
        store.journal.begin(id, fence, START)
    with statements(store) as found:
        turns = [store.journal.turn_entry(id, fence, plain) for id, fence in held]
        steps = [store.journal.step_entry(id, fence, 0, answer(0)) for id, fence in held]
        results = store.together([*turns, *steps])
    assert [result.error for result in results] == [None] * 8
    assert len(found) == 2 + 2 + 3 * len(held), "\n".join(found)


def test_a_call_that_lets_the_error_of_its_write_pass_leaves_nothing_of_that_write(
    store: RunStore, claims: list[Claim]
) -> None:
    """Calls are made without savepoints first, as most never fail."""
    claim = claims[0]
    store.journal.begin(claim.episode_id, claim.fence, START)
    broken = turn(0, 1)
    object.__setattr__(broken, "experts", object())  # found when the turn's row is written already

    def forgiving() -> str:
        with suppress(AttributeError):
            store.journal.journal_turn(claim.episode_id, claim.fence, broken)
        return "passed"

    results = store.together([forgiving, partial(store.journal.begin, claims[1].episode_id, claims[1].fence, START)])
    assert [result.value for result in results] == ["passed", None]
    assert not store.reads.trajectory(claim.episode_id).turns
    assert store.reads.trajectory(claims[1].episode_id).start == START


async def test_half_a_call_is_undone_though_its_transaction_goes_on(
    store: RunStore, desk: JournalWriter, claims: list[Claim]
) -> None:
    """The turn's row is written before its experts fail."""
    claim = claims[0]
    await desk.begin(claim.episode_id, claim.fence, START)
    broken = turn(0, 1)
    object.__setattr__(broken, "experts", object())
    results = store.together(
        [
            lambda: store.journal.begin(claims[1].episode_id, claims[1].fence, START),
            lambda: store.journal.journal_turn(claim.episode_id, claim.fence, broken),
            lambda: store.journal.begin(claims[2].episode_id, claims[2].fence, START),
        ]
    )
    assert [result.error is None for result in results] == [True, False, True]
    assert store.reads.trajectory(claim.episode_id).turns == ()
    assert store.reads.trajectory(claims[2].episode_id).start == START


async def test_a_write_whose_caller_is_cancelled_is_made_before_any_later_one(
    store: RunStore, desk: JournalWriter, claims: list[Claim]
) -> None:
    id, fence = claims[0].episode_id, claims[0].fence
    await desk.begin(id, fence, START)
    with locked(store.path):
        with trio.move_on_after(0.02) as scope:
            await desk.journal_turn(id, fence, turn(0, 1))
        assert scope.cancelled_caught
    await desk.journal_step(id, fence, 0, answer(0, last=True))
    assert store.reads.trajectory(id).turns[0].step == answer(0, last=True)


async def test_a_cancelled_write_of_an_episode_that_was_lost_changes_nothing(
    store: RunStore, desk: JournalWriter, claims: list[Claim]
) -> None:
    id, fence = claims[0].episode_id, claims[0].fence
    await desk.begin(id, fence, START)
    with locked(store.path) as other:
        with trio.move_on_after(0.02):
            await desk.journal_turn(id, fence, turn(0, 1))
        other.execute("UPDATE episodes SET fence = fence + 1 WHERE id = ?", (id,))  # another worker claims it
        other.execute("COMMIT")
    with pytest.raises(LeaseLost):
        await desk.finish(id, fence, DONE)
    assert store.reads.trajectory(id).turns == ()


async def test_a_full_disk_reaches_everybody_who_waits_and_undoes_all_of_it(
    store: RunStore, desk: JournalWriter, claims: list[Claim]
) -> None:
    connection = store._db.driver.connection  # pyright: ignore[reportPrivateUsage]
    for claim in claims[:2]:
        await desk.begin(claim.episode_id, claim.fence, START)
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    large, failed = turn(0, 1, 200_000), list[int]()
    object.__setattr__(large, "logprobs", tuple(-1.0 / (k + 1) for k in range(200_000)))

    async def journal(claim: Claim, index: int) -> None:
        try:
            await desk.journal_turn(claim.episode_id, claim.fence, large if index else turn(0, 1))
        except DiskFull:
            failed.append(index)

    async with trio.open_nursery() as nursery:
        with locked(store.path):
            nursery.start_soon(journal, claims[0], 0)
            await trio.testing.wait_all_tasks_blocked(0.01)
            nursery.start_soon(journal, claims[1], 1)
            await trio.testing.wait_all_tasks_blocked(0.01)
    assert 1 in failed
    connection.execute("PRAGMA max_page_count = 1000000")
    for index in failed:
        await journal(claims[index], index)
    assert [len(store.reads.trajectory(claim.episode_id).turns) for claim in claims[:2]] == [1, 1]
    assert audit(store).violations == []


@pytest.mark.parametrize("undone_by", [sqlite3.OperationalError("disk I/O error"), MemoryError()])
def test_law_2_no_write_is_called_done_whose_transaction_a_later_call_lost(
    store: RunStore, claims: list[Claim], undone_by: Exception
) -> None:
    """SQLite undoes a whole transaction on an I/O error or for want of memory, whichever statement met it."""

    def read() -> None:
        with store._db.read():  # pyright: ignore[reportPrivateUsage]
            store._db.execute("ROLLBACK")  # pyright: ignore[reportPrivateUsage]
            raise undone_by

    def begin(claim: Claim) -> None:
        store.journal.begin(claim.episode_id, claim.fence, START)

    results = store.together([partial(begin, claims[0]), read, partial(begin, claims[1])])
    done = [result.error is None for result in results]
    assert (
        done
        == [store.leases.reload(claim).start == START for claim in (claims[0], claims[0], claims[1])]
        == [False] * 3
    )
    assert all(result.error is None for result in store.together([partial(begin, claims[0])]))


async def test_law_4_whatever_goes_wrong_in_the_thread_everybody_who_waits_hears_of_it(
    store: RunStore, desk: JournalWriter, claims: list[Claim], monkeypatch: pytest.MonkeyPatch
) -> None:
    def together(calls: Any, **_: Any) -> Any:
        raise Killed("the thread's own failure")

    monkeypatch.setattr(store, "together", together)
    with trio.fail_after(60), pytest.raises(StoreError, match="the thread's own failure"):
        await desk.begin(claims[0].episode_id, claims[0].fence, START)
    monkeypatch.undo()
    with trio.fail_after(60):
        await desk.begin(claims[0].episode_id, claims[0].fence, START)


async def test_a_lock_that_is_held_for_too_long_is_named_to_everybody_who_waits(
    store: RunStore, desk: JournalWriter, claims: list[Claim]
) -> None:
    store.hurry(0.1)
    said: list[str] = []

    async def begin(claim: Claim) -> None:
        with pytest.raises(StoreBusy) as busy:
            await desk.begin(claim.episode_id, claim.fence, START)
        said.append(str(busy.value))

    with locked(store.path):
        async with trio.open_nursery() as nursery:
            for claim in claims:
                nursery.start_soon(begin, claim)
    assert len(said) == 8
    assert all("has held the write lock for over 0.1 s" in one for one in said)


async def test_closing_makes_the_writes_that_are_queued(store: RunStore, claims: list[Claim]) -> None:
    id, fence = claims[0].episode_id, claims[0].fence
    async with JournalWriter(store) as desk:
        await desk.begin(id, fence, START)
        desk.post_partial(id, fence, part(turn(0, 1), 0, 2))
    begun = store.leases.reload(claims[0]).partial
    assert begun is not None
    assert begun.token_ids == turn(0, 1).token_ids[:2]


async def test_law_4_closing_waits_for_the_lock_no_longer_than_the_end_of_its_process_may(
    store: RunStore, claims: list[Claim], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the thread waits for it already, with two minutes to go."""
    monkeypatch.setattr(awaitable, "_LAST_WORD_S", 0.0)
    id, fence = claims[0].episode_id, claims[0].fence
    with locked(store.path), RunStore.read(store.path) as reader:
        desk = JournalWriter(store, reader)
        begun = desk.post_partial(id, fence, part(turn(0, 1), 0, 2))
        while not store.waits:  # noqa: ASYNC110
            await trio.sleep(0.001)
        with trio.fail_after(60):
            await desk.aclose()
        await trio.lowlevel.checkpoint()
    assert begun.result is not None
    assert isinstance(begun.result.error, StoreBusy)


async def test_an_idle_claim_takes_no_write_lock(store: RunStore, desk: JournalWriter) -> None:
    with transactions(store) as began:
        assert await desk.claim("w", 8, lease_s=30.0) == []
    assert began == []


@pytest.mark.medium
@pytest.mark.parametrize("after", [False, True])
def test_law_2_a_process_killed_at_any_statement_leaves_all_or_nothing_of_a_transaction(
    tmp_path: Path, after: bool
) -> None:
    whole: list[int] = []
    for statement in range(200):
        path = tmp_path / f"{statement}.sqlite"
        with RunStore.create(path, "{}") as store:
            store.versions.confirm_version(store.versions.mint_version(0))
            admit(store, limit=1)
            one, two = store.leases.claim("w", 2, lease_s=1e6)
            database = store._db  # pyright: ignore[reportPrivateUsage]
            connection = database.driver.connection  # pyright: ignore[reportPrivateUsage]
            database.driver.connection = Fuse(connection, statement, after=after)  # type: ignore[assignment]
            calls = [
                partial(store.journal.begin, one.episode_id, one.fence, START),
                partial(store.journal.journal_turn, two.episode_id, two.fence, turn(0, 1)),
                partial(store.journal.journal_turn, one.episode_id, one.fence, turn(0, 1)),
                partial(store.journal.finish, two.episode_id, two.fence, LIMIT),
            ]
            try:
                store.together(calls)
                died = False
            except Killed:
                died = True
            finally:
                database.driver.connection = connection  # pyright: ignore[reportPrivateUsage]
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
            assert audit(store).violations == []
            written = [len(store.reads.trajectory(id).turns) for id in (one.episode_id, two.episode_id)]
            assert written in ([0, 0], [1, 1])
            assert (store.reads.trajectory(two.episode_id).stop_reason is None) == (written == [0, 0])
            whole += written
            if not died:
                break
    else:
        raise AssertionError("never came to its end")
    assert {0, 1} == set(whole)


def test_a_write_that_waits_for_the_disk_is_not_put_among_others(store: RunStore) -> None:
    (result,) = store.together([lambda: store.versions.mint_version(1)])
    assert "has a transaction of its own" in str(result.error)
    assert store.versions.mint_version(1).version == 2
