"""What the supervisor itself decides, in virtual time: over a real store, with no process started."""

from __future__ import annotations

import gc
import itertools
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from rich.console import Console
from store.play import START, Tasks, admit, answer, play_all, serve, turn
from store.test_outside import held
from trio.testing import MockClock

from agentrl.config import parse
from agentrl.engine.router.router import Fleet
from agentrl.errors import DiskFull, RunFailed, matters
from agentrl.models.resolve import model_dir
from agentrl.records import GroupState, StopReason, Task, WeightVersion
from agentrl.rollout.admitter import Admitter, bounds_of
from agentrl.run import supervisor as pipeline
from agentrl.run.processes.worker_process import report
from agentrl.run.reporting import live_view
from agentrl.run.reporting.report import show, summarise
from agentrl.run.run_folder import RunDir
from agentrl.run.scratch_space import ScratchSpace
from agentrl.run.start_point import StartPoint
from agentrl.run.supervisor import Supervisor
from agentrl.run.telemetry import Telemetry
from agentrl.store import Ending, RunStore
from agentrl.store.async_calls import Aside
from agentrl.store.journal_writer import JournalWriter
from agentrl.store.run_values import PAUSED, TRAIN_STARTED_S
from tests.parts.fake_engine import FakeEngine

STALL_S = 30.0


class NoChildren:
    """Children whose processes never do anything: `learned` is set by the test."""

    engines_are_restarting, troubles = False, ()

    def __init__(self) -> None:
        self.learned = trio.Event()

    async def start_engines(self, start: StartPoint) -> None: ...

    async def start_workers(self) -> None: ...

    def follow_size(self) -> None: ...

    def start_learner(self) -> trio.Event:
        return self.learned


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    opened: list[Supervisor] = []

    def make(clock: Callable[[], float] = time.time, *, virtual: bool = True, **sections: Any) -> Supervisor:
        document = {"model": "m", "env": {"id": "e"}, "train": {"stall_deadline_s": STALL_S}, **sections}
        run = RunDir.create(tmp_path / "run", parse(document))
        store = RunStore.open(run.store_path, clock=clock)
        serve(store, 0)
        ScratchSpace(run).make()
        first = WeightVersion(version=1, step=0)
        start = StartPoint(model=model_dir("agentrl/tiny-coder"), checkpoint=None, version=first)
        children: Any = NoChildren()
        telemetry = Telemetry(store, run.metrics, "supervisor")
        writes = Aside(store, inline=virtual)
        opened.append(Supervisor(run, run.config(), store, writes, telemetry, children, start, lambda _: None))
        return opened[-1]

    yield make
    for one in opened:
        one.telemetry.close()
        one.store.close()
        ScratchSpace(one.run).clear()


async def until_it_fails(
    supervisor: Supervisor, *others: Callable[[], Any], within_s: float = 10 * STALL_S
) -> tuple[str, float]:
    """What the run failed of, and after how many seconds; `others` go on meanwhile."""
    async with trio.open_nursery() as nursery:
        for other in others:
            nursery.start_soon(other)
        with pytest.raises(BaseExceptionGroup) as failed, trio.fail_after(within_s):
            await supervisor.train()
        nursery.cancel_scope.cancel()
    why = matters(failed.value)
    assert isinstance(why, RunFailed)
    return str(why), trio.current_time()


async def test_law_4_a_run_in_which_only_metrics_are_written_fails_by_its_stall_deadline(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock
) -> None:
    """Workers report every five seconds, whether anything goes on or not; so might any other kind of row some day."""
    one = supervisor()
    fleet = Fleet([FakeEngine(version=1)])

    async def any_kind() -> None:
        for number in range(10_000):
            one.telemetry.record(f"kind-{number}", 0, {"n": number})
            await trio.sleep(0.7)

    desk = JournalWriter(one.store, inline=True)
    why, when = await until_it_fails(one, lambda: report(fleet, one.telemetry, desk), any_kind)
    assert why == "no turn, score or step for 30 s (train.stall_deadline_s); see the logs folder"
    assert when == pytest.approx(STALL_S, abs=1.0)
    assert len(one.store.metrics.values("fleet")) > 3, "the workers' reports did come"


async def test_on_a_full_disk_the_run_waits_says_so_once_and_goes_on(
    supervisor: Callable[..., Supervisor],
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = supervisor()

    def full(part: object, name: str) -> None:
        really, tries = getattr(part, name), itertools.count()

        def write(*given: Any, **named: Any) -> Any:
            if next(tries) < 20:
                raise DiskFull("no space left: free some")
            return really(*given, **named)

        monkeypatch.setattr(part, name, write)

    full(one.store, "set_meta")
    full(one.store.buffer, "expire")
    why, when = await until_it_fails(one)
    assert why.startswith("no turn, score or step"), "not of its disk"
    assert when > 20 + STALL_S
    assert capsys.readouterr().err == "agentrl: no space left: free some; the run waits for it\n" * 2


async def test_law_4_a_run_is_interrupted_at_once_although_somebody_holds_the_lock(
    supervisor: Callable[..., Supervisor],
) -> None:
    one = supervisor(virtual=False)
    store: Any = one.store
    with held(store.path):
        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.train)
                while not store.waits:  # noqa: ASYNC110
                    await trio.sleep(0.001)
                nursery.cancel_scope.cancel()  # as Ctrl-C does
        store.hurry(0.0)
        assert store.meta("phase") is None


async def test_what_does_go_on_moves_the_stall_deadline(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock
) -> None:
    """A turn, an answer, an episode's end and a step of the learner, each 20 s after the last, and then nothing."""
    one = supervisor()
    store = one.store

    async def play() -> None:
        admit(store, limit=1)
        claim = store.leases.claim("a", 1, lease_s=1e6)[0]
        id, fence = claim.episode_id, claim.fence
        store.journal.begin(id, fence, START)
        for call in (
            lambda: store.journal.journal_turn(id, fence, turn(0, 1)),
            lambda: store.journal.journal_step(id, fence, 0, answer(0)),
            lambda: store.journal.finish(id, fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)),
            lambda: store.versions.mint_version(1),
        ):
            await trio.sleep(20)
            call()

    _, when = await until_it_fails(one, play)
    assert when == pytest.approx(80 + STALL_S, abs=1.0)


async def test_groups_that_expire_one_after_the_other_are_no_progress(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock
) -> None:
    """Where every environment hangs, groups still end, each at its deadline."""
    one = supervisor()

    async def expire() -> None:
        while True:
            admit(one.store, limit=1, max_lag=99)
            one.store.leases.claim("a", 2, lease_s=1e6)
            one.store.buffer.expire(1e12, 1.0)
            await trio.sleep(5)

    _, when = await until_it_fails(one, expire)
    assert when == pytest.approx(STALL_S, abs=1.0)


async def test_a_wall_clock_that_jumps_by_an_hour_costs_no_group(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = 0.0

    def wall() -> float:
        return 1e9 + ahead + trio.current_time()

    one = supervisor(clock=wall, rollout={"group_deadline_s": 12.0})
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(time=wall))  # threads know no `trio.current_time`

    async def play() -> None:
        nonlocal ahead
        admit(one.store, limit=1)
        one.store.leases.claim("a", 2, lease_s=1e6)
        await trio.sleep(5)
        ahead = 3600.0
        await trio.sleep(5)
        assert one.store.groups.counts()[GroupState.RUNNING] == 1
        ahead = 0.0
        await trio.sleep(5)
        assert one.store.groups.counts()[GroupState.RUNNING] == 1

    await until_it_fails(one, play)
    assert one.store.groups.counts()[GroupState.EXPIRED] == 1, "its deadline holds all the same"


async def test_law_3_a_store_that_answers_late_moves_no_deadline(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor waits for it: that is no jump of a clock."""
    one = supervisor(clock=lambda: 1e9 + trio.current_time())
    moved: list[float] = []
    monkeypatch.setattr(one.store.deaths, "shift_deadlines", moved.append)
    progress = one.store.metrics.progress

    def late() -> tuple[int, ...]:
        if 5 < trio.current_time() < 10:
            autojump_clock.jump(8.0)
        return progress()

    monkeypatch.setattr(one.store.metrics, "progress", late)
    await until_it_fails(one)
    assert moved == []


# --- failures: an outage is one, and a run that cannot work ends -----------------------------------------------------

QUIET = {"rollout": {"group_deadline_s": 1e12}, "train": {"stall_deadline_s": 1e9}}
Life = Callable[[int], tuple[float, StopReason]]


async def play_for_ever(store: RunStore, slots: int, life: Life, place: str = "") -> None:
    """`slots` episodes at once; number k of all takes `life(k)[0]` seconds and ends as `life(k)[1]`. With a `place` it
    was an exception."""
    numbers = itertools.count()

    async def slot() -> None:
        while True:
            claims = store.leases.claim("a", 1, lease_s=1e12)
            if not claims:
                admit(store, limit=1, max_lag=10**6, max_running=10**6, steps_total=10**6)
                continue
            seconds, reason = life(next(numbers))
            await trio.sleep(seconds)
            outcome = 1.0 if reason.by_policy else None
            id, fence = claims[0].episode_id, claims[0].fence
            detail = f"cause of {id}{place}"
            store.journal.finish(id, fence, Ending(stop_reason=reason, outcome=outcome, success=None, detail=detail))

    async with trio.open_nursery() as nursery:
        for _ in range(slots):
            nursery.start_soon(slot)


async def goes_on(supervisor: Supervisor, seconds: float, slots: int, life: Life) -> None:
    """The run is not ended for so many seconds."""
    with trio.move_on_after(seconds):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(play_for_ever, supervisor.store, slots, life)
            await supervisor.train()


@pytest.mark.medium
async def test_an_engine_that_stands_still_for_a_minute_is_one_failure(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock
) -> None:
    """At 100 s: what runs fails when its turn's deadline of 60 s is over; what comes after it plays well again."""
    one = supervisor(clock=trio.current_time, **QUIET)

    def life(number: int) -> tuple[float, StopReason]:
        now = trio.current_time()
        return (
            (60.0 + number % 10, StopReason.ENGINE_FAILED) if 90 <= now < 102 else (10.0 + number % 3, StopReason.DONE)
        )

    await goes_on(one, 200, 64, life)
    failures = one.store.metrics.failures()
    assert failures.failed >= 60
    assert failures.outages == 1


async def test_a_machine_that_stands_still_before_anything_ended_is_one_failure(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock
) -> None:
    one = supervisor(clock=trio.current_time, **QUIET)

    def life(number: int) -> tuple[float, StopReason]:
        return (65.0, StopReason.ENV_FAILED) if number < 64 else (5.0, StopReason.DONE)

    await goes_on(one, 120, 64, life)
    assert (one.store.metrics.failures().failed, one.store.metrics.failures().outages) == (64, 1)


@pytest.mark.medium
@pytest.mark.parametrize("slots", [8, 16])
async def test_one_member_in_eight_that_hangs_ends_no_run(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock, slots: int
) -> None:
    one = supervisor(clock=trio.current_time, **QUIET)

    def life(number: int) -> tuple[float, StopReason]:
        return (60.0, StopReason.ENV_FAILED) if number % 8 == 3 else (10.0, StopReason.DONE)

    await goes_on(one, 600, slots, life)
    assert one.store.metrics.failures().failed > 8


async def test_a_run_that_never_worked_ends_at_once_with_its_cause(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock
) -> None:
    one = supervisor(clock=trio.current_time, **QUIET)
    why, when = await until_it_fails(one, lambda: play_for_ever(one.store, 16, lambda _: (0.1, StopReason.ENV_FAILED)))
    assert when < 5
    assert "failed through no doing of the policy" in why
    assert "the last: cause of " in why
    assert "\n" not in why


@pytest.mark.medium
@pytest.mark.parametrize("seconds", [3.0, 60.0])
async def test_a_total_failure_that_lasts_ends_the_run_within_minutes_however_long_it_had_worked(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock, seconds: float
) -> None:
    """Whether it is refused at once or hangs to its deadline."""
    one = supervisor(clock=trio.current_time, **QUIET)

    def life(number: int) -> tuple[float, StopReason]:
        return (5.0, StopReason.DONE) if trio.current_time() < 100 else (seconds, StopReason.SANDBOX_FAILED)

    why, when = await until_it_fails(one, lambda: play_for_ever(one.store, 4, life), within_s=1000)
    assert 100 + 60 < when < 100 + 660, "longer than a minute's outage, and soon"
    assert "none ended well; the last: cause of " in why


@pytest.mark.medium
async def test_failures_beyond_the_budget_end_the_run_though_most_episodes_end_well(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock
) -> None:
    """Each at a time of its own: no outage, but infrastructure that is not good enough."""
    rollout = {**QUIET["rollout"], "failure_budget": 0.3}
    one = supervisor(clock=trio.current_time, **{**QUIET, "rollout": rollout})

    def life(number: int) -> tuple[float, StopReason]:
        return (40.0, StopReason.ENGINE_FAILED if number % 2 else StopReason.DONE)

    why, _ = await until_it_fails(one, lambda: play_for_ever(one.store, 1, life), within_s=3000)
    assert "at 9 different times (rollout.failure_budget = 0.3)" in why


RAISED = " (/home/me/env.py:12)"


async def test_exceptions_beyond_the_budget_end_the_run_though_they_come_at_one_time(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock
) -> None:
    """Two of five episodes raise, one after the other: 40% of them, and the budget is 20%."""
    one = supervisor(clock=trio.current_time, **QUIET)

    def life(number: int) -> tuple[float, StopReason]:
        return (1.0, StopReason.ENV_FAILED if number % 5 < 2 else StopReason.DONE)

    why, when = await until_it_fails(one, lambda: play_for_ever(one.store, 4, life, RAISED))
    assert when < 60
    assert "by an exception (rollout.failure_budget = 0.2); the last: cause of " in why
    assert f"agentrl tasks {one.run.path} --failed" in why


@pytest.mark.medium
@pytest.mark.parametrize("seconds", [5.0, 100.0])
async def test_tasks_that_raise_at_once_within_the_budget_end_no_run_however_long_the_others_take(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock, seconds: float
) -> None:
    """One of eight raises: 12.5%, and the budget is 20%. Before the first of the others has ended, all that ended has
    failed: which says nothing."""
    one = supervisor(clock=trio.current_time, **QUIET)

    def life(number: int) -> tuple[float, StopReason]:
        return (0.1, StopReason.ENV_FAILED) if number % 8 == 3 else (seconds, StopReason.DONE)

    with trio.move_on_after(10 + 5 * seconds):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(play_for_ever, one.store, 64, life, RAISED)
            await one.train()
    assert one.store.metrics.failures().raised > 8


async def test_an_environment_that_always_raises_ends_the_run_once_as_many_failed_as_run(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock
) -> None:
    one = supervisor(clock=trio.current_time, **QUIET)
    why, when = await until_it_fails(
        one, lambda: play_for_ever(one.store, 64, lambda _: (0.5, StopReason.ENV_FAILED), RAISED)
    )
    assert when < 5
    assert "of them by an exception" in why


async def test_a_finite_source_is_not_played_while_a_lost_task_waits_to_be_and_the_summary_counts_it(
    supervisor: Callable[..., Supervisor], capsys: pytest.CaptureFixture[str]
) -> None:
    one = supervisor(rollout={"max_replays": 1})

    def lose() -> None:
        admit(one.store, limit=9, tasks_total=1, max_replays=1)
        play_all(one.store, stop=StopReason.ENGINE_FAILED, outcome=None)

    lose()
    assert not one._played(1, one.store)  # pyright: ignore[reportPrivateUsage]
    lose()
    assert one._played(1, one.store)  # pyright: ignore[reportPrivateUsage]
    summary = summarise(one.run, one.config, one.store, restarts={})
    assert summary["replays"] == {"played": 1, "waiting": 0, "given_up": 1}
    show(Console(width=200), one.run.path, summary)
    said = "tasks that infrastructure lost: 1 played, 0 waiting, 1 given up (rollout.max_replays)"
    assert said in capsys.readouterr().out


async def test_the_last_step_is_shown_although_nothing_is_evaluated(supervisor: Callable[..., Supervisor]) -> None:
    """The learner records its last step and ends between two ticks."""
    run = supervisor(eval={"sets": []})
    children = cast("Any", run.children)
    shown = list[int]()
    run.on_tick = lambda seen: shown.extend(row.step for row in seen.store.metrics.values("step"))

    async def end_with_a_step() -> None:
        run.store.metrics.record("step", 1, {})
        children.learned.set()

    children.start_engines = lambda start: end_with_a_step()
    await run.train()
    assert shown[-1:] == [1]


# --- a pause ---------------------------------------------------------------------------------------------------------


@pytest.mark.medium
async def test_paused_time_counts_against_no_deadline(
    supervisor: Callable[..., Supervisor],
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A group has 12 s to begin with, and 12 s for its late members; of its 5 s before and 5 s after a pause of 200 s
    nothing is over. Nor is the run's own deadline of 30 s without a turn, until 30 s after the last."""

    def wall() -> float:
        return 1e9 + trio.current_time()

    one = supervisor(clock=wall, rollout={"group_deadline_s": 12.0})
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(time=wall))
    seen: list[tuple[float, GroupState]] = []
    ticks_s: list[float] = []
    one.on_tick = lambda _: ticks_s.append(trio.current_time())

    async def play() -> None:
        admit(one.store, limit=1)
        one.store.leases.claim("a", 2, lease_s=1e6)
        await trio.sleep(5)
        PAUSED.set(one.writes._store, {"since_s": wall(), "now": False})  # pyright: ignore[reportPrivateUsage]
        await trio.sleep(200)
        PAUSED.set(one.writes._store, {})  # pyright: ignore[reportPrivateUsage]
        while not seen or seen[-1][1] is GroupState.RUNNING:
            await trio.sleep(1)
            seen.append((trio.current_time(), next(iter(one.store.groups.counts()))))

    _, when = await until_it_fails(one, play, within_s=400)
    ((expired_s, state),) = [row for row in seen if row[1] is not GroupState.RUNNING]
    assert (expired_s, state) == (pytest.approx(200 + 24, abs=1.6), GroupState.EXPIRED)
    assert when == pytest.approx(200 + STALL_S, abs=6.0)
    assert TRAIN_STARTED_S.of(one.store.meta) == pytest.approx(1e9 + 200, abs=1.0), "nor is it time of training"
    said = [line for line in capsys.readouterr().err.splitlines() if "paused" in line or "goes on" in line]
    resume = f"agentrl: the run is paused; agentrl resume {one.run.path} lets it go on"
    assert said == [resume, "agentrl: the run goes on"]
    assert sum(5 < tick_s < 205 for tick_s in ticks_s) <= 205, "one look a second while nothing is due"


async def test_a_quorum_waits_for_the_others_as_long_after_a_pause_as_without_one(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its two scored members close a group of three after 10 s; a pause of 200 s begins after 5 s."""

    def wall() -> float:
        return 1e9 + trio.current_time()

    quick = {"close": 2, "quorum_after_s": 10.0}
    one = supervisor(clock=wall, rollout={"group_size": 3, "group_deadline_s": 1e6}, buffer=quick)
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(time=wall))
    closed: list[float] = []

    async def play() -> None:
        one.store.groups.add_groups([Task(index=0, env="test/Env", seed=0)], size=3, purpose="train")
        claims = one.store.leases.claim("a", 3, lease_s=1e6)
        for claim in claims[:2]:
            one.store.journal.finish(
                claim.episode_id, claim.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
            )
        await trio.sleep(5)
        PAUSED.set(one.writes._store, {"since_s": wall(), "now": False})  # pyright: ignore[reportPrivateUsage]
        await trio.sleep(200)
        PAUSED.set(one.writes._store, {})  # pyright: ignore[reportPrivateUsage]
        while not one.store.groups.counts().get(GroupState.SCORED):  # noqa: ASYNC110
            await trio.sleep(1)
        closed.append(trio.current_time())

    await until_it_fails(one, play, within_s=400)
    assert closed == [pytest.approx(205 + 10, abs=1.6)]


STEP_ROW: dict[str, Any] = {
    **{f"gauge_{number}": 0.5 for number in range(60)},
    **dict.fromkeys(("outcome_mean", "success_mean", "lag_mean", "busy_s", "idle_s", "grad_norm"), 0.5),
    "episodes": 4,
    "group_count": 2,
    "lag_max": 1,
    "tokens_trained": 10,
    "tokens_scored": 10,
    "updated": True,
    "alarms": [],
}


@pytest.mark.medium
@pytest.mark.parametrize("learns", [True, False])
async def test_law_4_a_supervisor_holds_no_more_after_many_steps(
    supervisor: Callable[..., Supervisor],
    autojump_clock: MockClock,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    learns: bool,
) -> None:
    """Ten kilobytes for each step would be a gigabyte after a hundred thousand."""
    monkeypatch.setattr(live_view, "_STANDING", 20)  # rows that are kept of steps that change no weight
    one = supervisor(buffer={"groups_per_step": 2}, rollout={"group_size": 2}, train={"steps": 10_000})
    store, progress, steps = one.store, pipeline._Progress(STALL_S), itertools.count(1)
    admitter = Admitter(store, Tasks(lambda index: Task(index=index, env="e", seed=index)), bounds_of(one.config))

    async def train(count: int) -> int:
        """The bytes that are there after so many steps more."""
        for step in itertools.islice(steps, count):
            admitter.admit(2)
            play_all(store)
            assert store.buffer.take(step, 2, max_lag=4)
            version = store.versions.mint_version(step)
            store.versions.confirm_version(version)
            store.metrics.record("step", step, {**STEP_ROW, "step": step, "updated": learns})
            if step % 10 == 0:
                store.lineage.checkpoint(step, version, tmp_path / str(step))
                store.lineage.retain(step, keep_steps=5, keep_sample=0.0)
            await one._tick(progress)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    with (tmp_path / "lines").open("w") as lines:
        one.on_tick = live_view.LiveView(console=Console(file=lines, width=100)).tick
        tracemalloc.start()
        try:
            held_bytes = [await train(30), *[await train(20) for _ in range(3)]]  # first imports, caches, statements
        finally:
            tracemalloc.stop()
    # The least of three windows: what a supervisor keeps of each step is in all of them. A cache that the whole process
    # shares grows in one: rich remembers the widths of 4096 lines, in a dictionary that once takes 147 kB more.
    assert min(after - before for before, after in itertools.pairwise(held_bytes)) / 20 < 500
