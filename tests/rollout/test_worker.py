"""A worker over the real store: claims, leases, phases, full disks."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import trio
from trio.testing import MockClock

import agentrl
from agentrl.config import RunConfig, parse
from agentrl.env import sync_async
from agentrl.env.tasks import Curriculum, Seeds, TaskSource
from agentrl.errors import DiskFull, WornOut
from agentrl.records import GroupState, StopReason, Task
from agentrl.rollout.admitter import Admitter, bounds_of
from agentrl.rollout.worker import Worker
from agentrl.store import Ending, RunStore
from agentrl.store.async_calls import Aside

from .conftest import ScriptedEnv, done, going, said
from .writing import instead, written


def config(**sections: Any) -> RunConfig:
    return parse({"model": "m", "env": {"id": "test/Env"}, **sections})


@dataclass(slots=True)
class OfRun(Worker):
    """A worker, with the run file that its run's admitter reads."""

    run_file: RunConfig = field(kw_only=True)


@pytest.fixture
def worker(store: RunStore, context: Any) -> Callable[..., OfRun]:
    def make(env: Callable[[Task], ScriptedEnv], **sections: Any) -> OfRun:
        chosen = config(**sections)
        place = context(ScriptedEnv([]), **chosen.rollout.model_dump())
        object.__setattr__(place, "make_env", env)
        return OfRun("w.1", place.store, place, chosen.buffer.groups_ahead, now=trio.current_time, run_file=chosen)

    return make


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(1e4):
        while not condition():  # noqa: ASYNC110  (the store has no event to wait for; the clock is virtual)
            await trio.sleep(1)


async def run(worker: OfRun, condition: Callable[[], bool], tasks: TaskSource | None = None) -> None:
    """Run the worker, and the admitter of its run if `tasks` are there to play."""
    store: RunStore = worker.store.store  # type: ignore[attr-defined]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(worker.run)
        if tasks is not None:
            nursery.start_soon(Admitter(store, tasks, bounds_of(worker.run_file)).run, Aside(store, inline=True))
        await until(condition)
        store.set_meta("phase", "stop")
        nursery.cancel_scope.cancel()


async def test_a_worker_plays_what_is_admitted_and_stops_with_its_phase(
    store: RunStore, worker: Callable[..., OfRun], autojump_clock: MockClock
) -> None:
    one = worker(
        lambda task: ScriptedEnv([going(), done()]),
        rollout={"group_size": 2, "max_running": 4},
        buffer={"groups_per_step": 3, "max_lag": 0},
        train={"steps": 1},
    )
    store.set_meta("phase", "train")
    await run(one, lambda: store.groups.counts().get(GroupState.SCORED, 0) == 3, Seeds("test/Env"))
    assert store.groups.counts() == {GroupState.SCORED: 3}, "one step needs three groups: no fourth is admitted"


async def test_many_free_places_are_filled_a_few_at_a_time(
    store: RunStore, worker: Callable[..., OfRun], autojump_clock: MockClock
) -> None:
    """Other tasks of the loop run between claims: the episodes that run are not kept waiting. (Trio runs the tasks of a
    round in any order, so a task may see the claims of two rounds.)"""
    store.groups.add_groups([Task(index=k, env="test/Env", seed=k) for k in range(40)], size=2, purpose="train")
    one = worker(lambda task: ScriptedEnv([trio.sleep_forever]), rollout={"max_running": 80})
    running: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(one.run)
        while not running or running[-1] < 80:
            assert len(running) < 1000
            await trio.lowlevel.checkpoint()
            running.append(len(one._running))  # pyright: ignore[reportPrivateUsage]
        nursery.cancel_scope.cancel()
    assert max(after - before for before, after in itertools.pairwise([0, *running])) <= 32


TRAINING: dict[str, Any] = {
    "rollout": {"group_size": 2, "max_running": 4},
    "buffer": {"groups_per_step": 4, "max_lag": 0},
    "train": {"steps": 1},
}


async def test_no_task_is_admitted_past_the_end_of_its_source(
    store: RunStore, worker: Callable[..., OfRun], autojump_clock: MockClock
) -> None:
    one = worker(lambda task: ScriptedEnv([done()]), **TRAINING)
    store.set_meta("phase", "train")
    tasks = Seeds("test/Env", first_seed=5, size=3)
    await run(one, lambda: store.groups.counts().get(GroupState.SCORED, 0) == 3, tasks)
    assert store.groups.tasks_started() == 3, "the step has room for a fourth"
    assert [store.reads.group(id).task.seed for id in (1, 2, 3)] == [5, 6, 7]


async def test_a_curriculum_sees_what_is_in_the_store_also_after_a_restart(
    store: RunStore, worker: Callable[..., OfRun], autojump_clock: MockClock
) -> None:
    """Two tasks; that of seed 0 is always solved, and pauses then: only the other one comes, which half solve."""
    made = itertools.count()

    def env(task: Task) -> ScriptedEnv:
        return ScriptedEnv([done(1.0 if task.seed == 0 else next(made) % 2)])

    def curriculum() -> Curriculum:
        return Curriculum(Seeds("test/Env", size=2), min_plays=2, pause=100)

    training = {**TRAINING, "rollout": {"group_size": 2, "max_running": 2}, "buffer": {"groups_per_step": 3}}
    store.set_meta("phase", "train")
    await run(worker(env, **training), lambda: store.groups.counts().get(GroupState.SCORED, 0) == 3, curriculum())
    assert [store.reads.group(id).task.seed for id in (1, 2, 3)] == [0, 1, 1]
    store.set_meta("phase", "train")
    more = {**training, "train": {"steps": 2}, "buffer": {"groups_per_step": 3, "max_lag": 1}}
    await run(worker(env, **more), lambda: store.groups.counts().get(GroupState.SCORED, 0) == 6, curriculum())
    assert [store.reads.group(id).task.seed for id in (4, 5, 6)] == [1, 1, 1]
    assert [(one.id, one.plays, one.success) for one in store.reads.results(after=4)] == [(5, 2, 0.5), (6, 2, 0.5)]


def test_results_stop_at_the_first_open_group(store: RunStore) -> None:
    tasks = [Task(index=index, env="test/Env", seed=index) for index in range(3)]
    store.groups.add_groups(tasks, size=1, purpose="train")
    claims = store.leases.claim("w", 3, lease_s=10)
    for at, claim in enumerate((claims[0], claims[2])):
        store.journal.finish(
            claim.episode_id, claim.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=bool(at))
        )
    assert [(result.id, result.success) for result in store.reads.results()] == [(1, 0.0)]
    store.journal.finish(
        claims[1].episode_id, claims[1].fence, Ending(stop_reason=StopReason.ENV_FAILED, outcome=None, success=None)
    )
    assert [(result.id, result.plays) for result in store.reads.results(after=1)] == [(2, 0), (3, 1)]


async def test_no_training_episode_starts_while_the_phase_is_evaluation(
    store: RunStore, worker: Callable[..., OfRun], autojump_clock: MockClock
) -> None:
    store.set_meta("phase", "eval")
    store.groups.add_groups([Task(index=0, env="test/Env", seed=1)], size=1, purpose="eval:a:now")
    await run(
        worker(lambda task: ScriptedEnv([done()])),
        lambda: store.groups.counts("eval:a:now").get(GroupState.SCORED, 0) == 1,
    )
    assert not store.groups.counts()


async def test_law_4_an_expired_group_cancels_its_episodes(
    store: RunStore, worker: Callable[..., OfRun], autojump_clock: MockClock
) -> None:
    async def hang() -> Any:
        await trio.sleep(5000)

    env = ScriptedEnv([hang])
    one = worker(lambda task: env, rollout={"lease_s": 9, "step_deadline_s": 9000, "episode_deadline_s": 9000})
    store.set_meta("phase", "eval")
    store.groups.add_groups([Task(index=0, env="test/Env", seed=1)], size=1, purpose="train")

    async def expire() -> None:
        await until(lambda: bool(env.actions))
        store.buffer.expire(1e12, 1.0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(expire)
        await run(one, lambda: env.closed == 1)
    assert trio.current_time() < 5000


async def test_an_episode_that_was_taken_back_and_comes_again_is_played_once(
    store: RunStore, worker: Callable[..., OfRun], autojump_clock: MockClock
) -> None:
    """As a rollback of the learner may do it; the worker hears of it by getting the episode anew."""

    async def hang() -> Any:
        await trio.sleep(5000)

    made = [ScriptedEnv([hang]), ScriptedEnv([done()])]
    envs = list(made)
    one = worker(
        lambda task: envs.pop(0), rollout={"lease_s": 900, "step_deadline_s": 9000, "episode_deadline_s": 9000}
    )
    store.set_meta("phase", "eval")
    store.groups.add_groups([Task(index=0, env="test/Env", seed=1)], size=1, purpose="train")

    async def take_back() -> None:
        await until(lambda: bool(made[0].actions))
        store.lineage.rollback(0, ahead=0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_back)
        await run(one, lambda: [each.closed for each in made] == [1, 1])
    assert trio.current_time() < 5000
    assert store.reads.trajectory(1).stop_reason is StopReason.DONE
    assert not one._running  # pyright: ignore[reportPrivateUsage]


async def test_a_full_disk_pauses_an_episode_and_loses_nothing(
    store: RunStore, worker: Callable[..., OfRun], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, journal = [DiskFull("no space left")] * 5, written(store, "journal_turn")

    def journal_turn(*args: Any) -> None:
        if full:
            raise full.pop()
        journal(*args)

    instead(monkeypatch, store, "journal_turn", journal_turn)
    store.set_meta("phase", "eval")
    store.groups.add_groups([Task(index=0, env="test/Env", seed=1)], size=1, purpose="eval:a:now")
    await run(
        worker(lambda task: ScriptedEnv([going(), done()])),
        lambda: store.groups.counts("eval:a:now").get(GroupState.SCORED, 0) == 1,
    )
    assert not full


@pytest.mark.parametrize("write", ["begin", "journal_turn", "journal_step", "finish"])
async def test_law_1_on_a_full_disk_no_turn_is_sampled_and_no_action_taken_twice(
    store: RunStore,
    worker: Callable[..., OfRun],
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    write: str,
) -> None:
    """What cannot be written yet stays in memory."""
    full, really, envs = [DiskFull("no space left")] * 5, written(store, write), list[ScriptedEnv]()

    def writes(*args: Any, **named: Any) -> Any:
        if full:
            raise full.pop()
        return really(*args, **named)

    def make(task: Task) -> ScriptedEnv:
        envs.append(ScriptedEnv([going(), done()]))
        return envs[-1]

    instead(monkeypatch, store, write, writes)
    store.set_meta("phase", "eval")
    store.groups.add_groups([Task(index=0, env="test/Env", seed=1)], size=1, purpose="eval:a:now")
    one = worker(make)
    engine: Any = one.context.engine
    await run(one, lambda: store.groups.counts("eval:a:now").get(GroupState.SCORED, 0) == 1)
    assert not full
    assert [request.sampled for request in engine.requests] == [0, 0], "a request for each turn"
    assert [len(env.actions) for env in envs] == [2]
    assert [row.stop_reason for row in store.reads.episodes("eval:a:now")] == [StopReason.DONE]


async def test_a_long_episode_waits_for_space_as_long_as_a_short_one(
    store: RunStore, worker: Callable[..., OfRun], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, journal = [DiskFull("no space left")] * 5, written(store, "journal_turn")

    def journal_turn(*args: Any) -> None:
        if trio.current_time() > began + 70 and full:
            raise full.pop()
        journal(*args)

    class Slow(ScriptedEnv):
        async def astep(self, action: str) -> Any:
            await trio.sleep(20)
            return await super().astep(action)

    began = trio.current_time()
    instead(monkeypatch, store, "journal_turn", journal_turn)
    store.set_meta("phase", "eval")
    store.groups.add_groups([Task(index=0, env="test/Env", seed=1)], size=1, purpose="eval:a:now")
    await run(
        worker(lambda task: Slow([*[going() for _ in range(5)], done()])),
        lambda: store.groups.counts("eval:a:now").get(GroupState.SCORED, 0) == 1,
    )
    assert not full
    assert [row.stop_reason for row in store.reads.episodes("eval:a:now")] == [StopReason.DONE]


async def test_on_a_full_disk_leases_are_renewed_as_soon_as_there_is_space(
    store: RunStore, worker: Callable[..., OfRun], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every 10 s, a third of the lease; on a full disk each second, and no episode counts as lost."""
    full, really, began = [DiskFull("no space left")] * 3, store.leases.renew, trio.current_time()
    at_s, envs = list[int](), list[ScriptedEnv]()

    def renew(*args: Any, **named: Any) -> Any:
        at_s.append(round(trio.current_time() - began))
        if full:
            raise full.pop()
        return really(*args, **named)

    class Slow(ScriptedEnv):
        async def astep(self, action: str) -> Any:
            await trio.sleep(40)
            return await super().astep(action)

    def make(task: Task) -> ScriptedEnv:
        envs.append(Slow([done()]))
        return envs[-1]

    monkeypatch.setattr(store.leases, "renew", renew)
    store.set_meta("phase", "eval")
    store.groups.add_groups([Task(index=0, env="test/Env", seed=1)], size=1, purpose="eval:a:now")
    await run(
        worker(make, rollout={"lease_s": 30.0}),
        lambda: store.groups.counts("eval:a:now").get(GroupState.SCORED, 0) == 1,
    )
    assert at_s[:6] == [10, 11, 12, 13, 23, 33]
    assert [row.stop_reason for row in store.reads.episodes("eval:a:now")] == [StopReason.DONE] and len(envs) == 1


async def test_a_disk_that_stays_full_ends_the_worker_with_one_line(
    store: RunStore, worker: Callable[..., OfRun], autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def journal_turn(*args: Any) -> None:
        raise DiskFull("no space left")

    instead(monkeypatch, store, "journal_turn", journal_turn)
    store.set_meta("phase", "eval")
    store.groups.add_groups([Task(index=0, env="test/Env", seed=1)], size=1, purpose="eval:a:now")
    with pytest.RaisesGroup(pytest.RaisesExc(DiskFull, match="no space left"), allow_unwrapped=False):
        await worker(lambda task: ScriptedEnv([going()])).run()


class Stuck(agentrl.Env):
    """A step that never ends where its seed is odd, as a call without a deadline does."""

    replayable = True
    hanging, released = threading.Semaphore(0), threading.Event()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._hangs, self._steps = bool((seed or 0) % 2), 0
        return said("go"), {}

    def step(self, action: str) -> Any:
        self._steps += 1
        if self._hangs:
            self.hanging.release()
            self.released.wait(300)
        return (said("on"), 0.0, False, False, {}) if self._steps < 3 else done()


@pytest.mark.medium
async def test_a_worker_whose_threads_hang_hands_its_episodes_back_and_asks_to_be_started_anew(
    store: RunStore, worker: Callable[..., OfRun], mock_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock jumps past the deadline of four steps once they hang, while another episode samples its first turn."""
    mock_clock.rate = 1.0
    monkeypatch.setattr(sync_async, "MAX_THREADS", 8)
    monkeypatch.setattr(Stuck, "hanging", threading.Semaphore(0))
    monkeypatch.setattr(Stuck, "released", threading.Event())
    store.set_meta("phase", "eval")
    tasks = [Task(index=at, env="test/Env", seed=seed) for at, seed in enumerate([1, 3, 5, 7, 2, 4])]
    store.groups.add_groups(tasks, size=1, purpose="eval:a:now")
    one = worker(lambda task: Stuck(), rollout={"step_deadline_s": 20, "max_running": 5, "group_size": 2})
    engine: Any = one.context.engine
    sessions, samples, sampled = list[str](), trio.Event(), trio.Event()

    async def generate(request: Any) -> Any:
        if request.session not in sessions:
            sessions.append(request.session)
        if request.session in sessions[5:]:
            samples.set()
            await sampled.wait()
        return await type(engine).generate(engine, request)

    async def hang() -> None:
        for _ in range(4):
            assert await trio.to_thread.run_sync(Stuck.hanging.acquire, True, 200)
        await samples.wait()
        mock_clock.jump(20)
        while not one.context.gate.leaving:  # noqa: ASYNC110
            await trio.sleep(0.01)
        sampled.set()

    monkeypatch.setattr(engine, "generate", generate)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hang)
            with pytest.raises(WornOut, match="go on elsewhere"):
                await one.run()
    finally:
        Stuck.released.set()
    trajectories = [store.reads.trajectory(id) for id in range(1, 7)]
    assert [each.stop_reason for each in trajectories[:4]] == [StopReason.ENV_FAILED] * 4, "each hangs once, and here"
    assert trajectories[5].stop_reason is None
    assert len(trajectories[5].turns) == 1, "the turn under way was ended and journaled"
    # The clock keeps its rate: a step has twenty seconds for what takes it a moment.
    await until(lambda: not sync_async.worn_out())
    # another process has threads of its own
    await run(worker(lambda task: Stuck()), lambda: store.groups.counts("eval:a:now").get(GroupState.SCORED, 0) == 6)
    assert [store.reads.trajectory(id).outcome for id in (5, 6)] == [1.0, 1.0]
    assert store.reads.restarts(6) == [], "it went on from its journal"


async def test_a_task_that_infrastructure_lost_is_played_again_by_the_next_admission(
    store: RunStore, worker: Callable[..., OfRun], autojump_clock: MockClock
) -> None:
    made: list[int] = []

    def env(task: Task) -> ScriptedEnv:
        made.append(task.index)
        if len(made) <= 2:
            raise KeyError("no host")
        return ScriptedEnv([going(), done()])

    one = worker(
        env,
        rollout={"group_size": 2, "max_running": 2},
        buffer={"groups_per_step": 2, "max_lag": 0},
        train={"steps": 1},
    )
    store.set_meta("phase", "train")
    await run(one, lambda: store.groups.counts().get(GroupState.SCORED, 0) == 2, Seeds("test/Env"))
    assert store.groups.counts() == {GroupState.FAILED: 1, GroupState.SCORED: 2}
    assert made == [0, 0, 0, 0, 1, 1]
    assert store.replays.counts(2).played == 1
