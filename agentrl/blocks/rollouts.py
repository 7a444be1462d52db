"""Episodes as an iterator: `rollout` plays tasks with an engine fleet, and gives each trajectory as it ends.

Without a buffer they are played in memory. With one, every turn is journaled in the buffer's store, as in a run: groups
start as far ahead as the buffer's lag bound allows, enter the buffer when they close, and go on after a crash.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Self, cast

import trio

from agentrl import registry
from agentrl.blocks.buffer import Buffer
from agentrl.blocks.fleet import EngineFleet
from agentrl.config import Rollout
from agentrl.config.sections import read_section
from agentrl.env import as_async
from agentrl.env.tasks import Seeds, TaskSource
from agentrl.errors import ConfigError, StoreError, UsageError, matters
from agentrl.protocols import AsyncEnv, Rewarder
from agentrl.records import Json, Task, Trajectory
from agentrl.rollout.admitter import Admitter
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.env_calls import make_env
from agentrl.rollout.episode import play
from agentrl.rollout.memory_store import MemoryStore
from agentrl.rollout.worker import Worker
from agentrl.store.async_calls import Aside
from agentrl.store.journal_writer import JournalWriter
from agentrl.store.run_values import PHASE

EnvLike = str | Callable[..., Any]
"""An environment: its id or `module:Class`, or a class or function that makes one."""

Tasks = int | TaskSource | Iterable[Task] | Iterable[int]
"""How many tasks (seeds 0, 1, …), a source of tasks, tasks, or seeds."""

_DISK_S = 600.0  # how long a turn waits for space on a full disk
_EXPIRE_S = 0.25  # between two looks at the deadlines of groups


class Rollouts:
    """The episodes of a `rollout`: an async iterator of trajectories in the order in which they end. Episodes are
    played in the background, as long as somebody takes from the iterator; the end of the fleet's block, or of
    `async with` over this, ends those that run."""

    def __init__(self, fleet: EngineFleet, produce: Callable[[trio.MemorySendChannel[Trajectory]], Any]) -> None:
        """`produce` plays the episodes and sends their trajectories: a task of the fleet, once somebody iterates."""
        self._fleet, self._produce = fleet, produce
        # Without a buffer in between: what nobody has asked for yet would be sampled from weights that the loop's next
        # step makes old.
        self._sender, self._receiver = trio.open_memory_channel[Trajectory](0)
        self._scope = trio.CancelScope()
        self._failure: Exception | None = None
        self._began, self._over = False, trio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Trajectory:
        """The next trajectory that ended. Raises what makes playing impossible, such as a bad environment id."""
        self.play()
        try:
            return await self._receiver.receive()
        except trio.EndOfChannel:
            if self._failure is not None:
                raise self._failure from None
            raise StopAsyncIteration from None

    def play(self) -> None:
        """Begin to play now, without waiting for the first to iterate. Idempotent."""
        if not self._began:
            self._began = True
            self._fleet.nursery.start_soon(self._run)

    async def groups(self) -> AsyncGenerator[tuple[Trajectory, ...]]:
        """Yield the trajectories of each group, in the order of its members, when its last member has ended.

        For a rollout without a buffer. With one, members that ended before a restart do not come here again, so their
        group would never be complete: `Buffer.take` has the groups."""
        open_groups: dict[int, list[Trajectory]] = {}
        async for trajectory in self:
            group_members = open_groups.setdefault(trajectory.group_id, [])
            group_members.append(trajectory)
            if len(group_members) == self.group_size:
                del open_groups[trajectory.group_id]
                yield tuple(sorted(group_members, key=lambda one: one.member))

    group_size: int = 1

    async def aclose(self) -> None:
        """End the episodes that run; what was journaled in a buffer stays."""
        self._scope.cancel()
        if self._began:
            with trio.CancelScope(shield=True):
                await self._over.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _run(self) -> None:
        try:
            with self._scope:
                await self._produce(self._sender)
        except Exception as error:  # whoever asks for the next trajectory gets it
            self._failure = cast("Exception", matters(error))
        finally:
            self._sender.close()
            self._over.set()


def rollout(
    env: EnvLike,
    engine: EngineFleet,
    tasks: Tasks | None = None,
    *,
    group_size: int = 1,
    kwargs: Mapping[str, Json] | None = None,
    settings: Rollout | Mapping[str, Any] | None = None,
    reward: Rewarder | None = None,
    buffer: Buffer | None = None,
) -> Rollouts:
    """Play each task `group_size` times, and give every trajectory as it ends. Without `tasks` there is no end of them:
    seeds 0, 1, …

        async for trajectory in rollout("agentrl/Calculator-v0", fleet, tasks=8):
            print(trajectory.outcome, [turn.text for turn in trajectory.turns])

    `kwargs` are the arguments of the environment's constructor, `settings` those of the run file's table `[rollout]`:
    how many episodes run at once, how turns are sampled, deadlines. `reward` gives the outcome of an episode in the
    place of its environment. With `buffer`, groups are journaled and taken from there; admission follows its lag bound.

    A failure of engine, sandbox or environment ends its episode with a reason that says so (`trajectory.scored` is
    False), and the others go on. Raises ConfigError for a bad setting, UnknownIdError for an environment that is not
    there."""
    if group_size < 1:
        raise ConfigError("group_size", group_size, "give 1 or more")
    rollout_settings = _settings(settings, engine, group_size)
    env_name, make_env = _environment(env)
    task_source = _source(tasks, env_name, dict(kwargs or {}))
    context = RolloutContext(
        engine=engine.engine,
        renderer=engine.renderer,
        store=MemoryStore(),
        settings=rollout_settings,
        make_env=make_env,
        rewarder=reward,
    )
    if buffer is None:
        rollout_stream = Rollouts(engine, partial(_in_memory, task_source, group_size, context))
    else:
        if not isinstance(task_source, TaskSource):
            task_source = _Listed(task_source)
        rollout_stream = Rollouts(engine, partial(_journaled, buffer, task_source, group_size, context, engine))
    rollout_stream.group_size = group_size
    return rollout_stream


async def _in_memory(
    tasks: Iterable[Task], group_size: int, context: RolloutContext, sender: trio.MemorySendChannel[Trajectory]
) -> None:
    memory_store = cast("MemoryStore", context.store)
    episode_slots = trio.Semaphore(context.settings.max_running)

    async def one(task: Task, group_id: int, member: int) -> None:
        try:
            claim = memory_store.claim(task, group_id=group_id, member=member, size=group_size)
            await play(claim, context)
            trajectory, _ = memory_store.take(claim.episode_id)
            await sender.send(trajectory)  # it keeps its place until then: nothing starts while nobody asks
        finally:
            episode_slots.release()

    async with trio.open_nursery() as nursery:
        for group_id, group_task in enumerate(tasks, 1):
            for member in range(group_size):
                # In this loop and not in the task: an endless source would otherwise start tasks without end, each of
                # which waits for its place.
                await episode_slots.acquire()
                nursery.start_soon(one, group_task, group_id, member)


async def _journaled(
    buffer: Buffer,
    tasks: TaskSource,
    group_size: int,
    context: RolloutContext,
    fleet: EngineFleet,
    sender: trio.MemorySendChannel[Trajectory],
) -> None:
    """Play `tasks` through the buffer's store as a run does, with an admitter and one worker, until cancelled. Sends
    each trajectory as it ends. Raises UsageError if the buffer did not mint the fleet's weight version."""
    run_store, reader = buffer.store, buffer.reader
    if not run_store.versions.knows_version(fleet.version):
        hint = "publish(learner.weights(), fleet, buffer) before"
        # Also for whoever waits in `take`, which would else say at the end of its deadline that nobody plays.
        buffer.failure = UsageError(
            f"the fleet serves weight version {fleet.version}, which the buffer did not mint: {hint}"
        )
        raise buffer.failure
    bounds = buffer.bounds(group_size, context.settings.max_running)
    journal = JournalWriter(run_store, reader, disk_wait_s=_DISK_S)
    ended_episode_ids: list[int] = []
    episode_ended = trio.Event()

    # A callback of the worker, which cannot wait: `send_ended` waits for whoever iterates in its place.
    def on_end(episode_id: int) -> None:
        ended_episode_ids.append(episode_id)
        episode_ended.set()

    async def send_ended() -> None:
        nonlocal episode_ended
        while True:
            while ended_episode_ids:
                await sender.send(reader.reads.trajectory(ended_episode_ids.pop(0)))
            episode_ended = trio.Event()
            await episode_ended.wait()

    async def close_groups(aside: Aside[Any]) -> None:
        while True:
            # A store that is busy now is not at the next look, and a deadline of a group has time for that.
            with suppress(StoreError):
                await aside(lambda one: one.buffer.expire(one.now(), context.settings.group_deadline_s))
            await trio.sleep(_EXPIRE_S)

    PHASE.set(run_store, "train")
    worker_name = f"rollout-{id(context):x}"
    rollout_worker = Worker(
        worker_name, journal, replace(context, store=journal), buffer.groups_ahead, sharing=1, on_end=on_end
    )
    store_calls = Aside[Any](run_store)
    try:
        buffer.failure = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Admitter(run_store, tasks, bounds).run, store_calls)
            nursery.start_soon(close_groups, store_calls)
            nursery.start_soon(send_ended)
            await rollout_worker.run()
            nursery.cancel_scope.cancel()
    except Exception as error:
        buffer.failure = cast("Exception", matters(error))  # whoever waits for groups gets it
        raise
    finally:
        with trio.CancelScope(shield=True):
            # Claims that are not handed back look like those of a worker that still plays: the next opening would have
            # to wait for their end.
            await journal.hand_back(worker_name)
            await journal.aclose()


class _Listed(TaskSource):
    """Tasks that are there one by one."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks, self.size = tuple(tasks), len(tasks)

    def task(self, index: int) -> Task:
        return replace(self._tasks[self._within(index)], index=index)


def _settings(settings: Rollout | Mapping[str, Any] | None, fleet: EngineFleet, group_size: int) -> Rollout:
    rollout_table = settings.model_dump(exclude_unset=True) if isinstance(settings, Rollout) else dict(settings or {})
    if fleet.max_context is not None:
        rollout_table.setdefault("max_context", fleet.max_context)
    rollout_settings = read_section(Rollout, {**rollout_table, "group_size": group_size}, "rollout")
    if fleet.max_context is not None and rollout_settings.max_context > fleet.max_context:
        hint = f"the fleet was started with max_context = {fleet.max_context}: lower it, or raise that"
        raise ConfigError("rollout.max_context", rollout_settings.max_context, hint)
    return rollout_settings


def _environment(env: EnvLike) -> tuple[str, Callable[[Task], AsyncEnv]]:
    """The name of `env` in tasks, and the function that makes the environment of a task. Raises UnknownIdError for an
    id that is not registered, before an episode can fail for it."""
    if isinstance(env, str):
        env_name, constructor = env, registry.resolve("environments", env)
    else:
        env_name, constructor = f"{env.__module__}:{getattr(env, '__qualname__', type(env).__name__)}", env

    # The tasks of a source, and those that a buffer has from an earlier rollout, may name other environments.
    def made(task: Task) -> AsyncEnv:
        return as_async(constructor(**task.kwargs)) if task.env == env_name else make_env(task)

    return env_name, made


def _source(tasks: Tasks | None, env: str, kwargs: Mapping[str, Json]) -> TaskSource | Sequence[Task]:
    """The tasks to play, in a form that can be iterated. A number, seeds and listed tasks are played in `env` with
    `kwargs`; a source keeps the environments and arguments of its own tasks. Raises ConfigError for anything else."""
    if tasks is None:
        return Seeds(env, kwargs=kwargs)
    if isinstance(tasks, TaskSource):
        if kwargs:
            raise ConfigError("kwargs", kwargs, "the tasks of a source have their own: give them there")
        return tasks
    if isinstance(tasks, int):
        if tasks < 1:
            raise ConfigError("tasks", tasks, "give 1 or more")
        return Seeds(env, kwargs=kwargs, size=tasks)
    listed_tasks: list[Task] = []
    for index, task in enumerate(tasks):
        if isinstance(task, Task):
            listed_tasks.append(replace(task, env=env, kwargs={**kwargs, **task.kwargs}))
        elif isinstance(task, int):  # pyright: ignore[reportUnnecessaryIsInstance] - a notebook gives anything
            listed_tasks.append(Task(index=index, env=env, seed=task, kwargs=kwargs))
        else:
            raise ConfigError("tasks", task, "give tasks (agentrl.records.Task), seeds, or how many")
    return listed_tasks
