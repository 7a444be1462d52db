"""`Env` from both sides, and the wrapping of other people's environments."""

import functools
import gc
import threading

import gymnasium
import numpy as np
import pytest
import trio
from each_case import each_case

import agentrl
from agentrl.env import Env, ToolEnv, as_async, spaces
from agentrl.env.checks.oracles import judge
from agentrl.env.sync_async import MAX_THREADS, call, in_thread
from agentrl.errors import EnvError, UsageError
from agentrl.protocols import AsyncEnv
from agentrl.records import StopReason

USER = {"role": "user", "content": "go"}


class SyncCounter(Env):
    """Counts to three; a seeded start. Written on the blocking side."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = int(self.np_random.integers(0, 1000))
        self.thread = threading.current_thread()
        return ({"role": "user", "content": str(self.count)},), {}

    def step(self, action):
        if action == "raise":
            raise KeyError("boom")
        self.count += 1
        return ({"role": "user", "content": str(self.count)},), 0.5, action == "end", False, {}

    def close(self):
        self.closed = getattr(self, "closed", 0) + 1
        super().close()


class InPlaceCounter(SyncCounter):
    blocking = False


class AsyncCounter(Env):
    """The same on trio's side. The event loop of `areset` must live on in `astep`: it holds a memory channel."""

    async def areset(self, *, seed=None, options=None):
        await super().areset(seed=seed)
        self.count = int(self.np_random.integers(0, 1000))
        self.send, self.receive = trio.open_memory_channel(1)
        return ({"role": "user", "content": str(self.count)},), {}

    async def astep(self, action):
        await self.send.send(action)
        action = await self.receive.receive()
        if action == "raise":
            raise KeyError("boom")
        self.count += 1
        return ({"role": "user", "content": str(self.count)},), 0.5, action == "end", False, {}

    async def aclose(self):
        self.closed = getattr(self, "closed", 0) + 1


CLASSES = [SyncCounter, InPlaceCounter, AsyncCounter]


@each_case("cls", CLASSES)
async def test_every_env_has_an_async_side(cls):
    expected = int(np.random.Generator(np.random.PCG64(np.random.SeedSequence(5))).integers(0, 1000))
    env = cls()
    assert isinstance(env, AsyncEnv) and as_async(env) is env
    observation, info = await env.areset(seed=5)
    assert observation == ({"role": "user", "content": str(expected)},) and info == {}
    assert (await env.astep("x"))[:4] == (({"role": "user", "content": str(expected + 1)},), 0.5, False, False)
    assert (await env.astep("end"))[2] is True
    with pytest.raises(KeyError, match="boom"):
        await env.astep("raise")
    await env.areset()  # an exception of its own code leaves an environment usable
    await env.aclose()
    assert env.closed == 1


@each_case("cls", CLASSES)
def test_every_env_has_a_blocking_side(cls):
    threads = set(threading.enumerate())
    with cls() as env:
        first, _ = env.reset(seed=5)
        assert env.reset(seed=5)[0] == first != env.reset()[0]
        assert env.step("end")[2] is True
        with pytest.raises(KeyError, match="boom"):
            env.step("raise")
        assert env.reset(seed=5)[0] == first
    assert env.closed == 1
    # <=, not ==: an idle thread that trio kept from another test may end meanwhile
    assert set(threading.enumerate()) <= threads, "close ends the private loop"
    env.close()
    assert set(threading.enumerate()) <= threads


async def test_blocking_bodies_leave_the_event_loop_and_others_do_not():
    here = threading.current_thread()
    for cls, elsewhere in [(SyncCounter, True), (InPlaceCounter, False)]:
        async with cls() as env:
            await env.areset(seed=0)
            assert (env.thread is not here) is elsewhere


def test_a_forgotten_env_ends_its_loop():
    threads = set(threading.enumerate())
    env = AsyncCounter()
    env.reset(seed=1)
    loop = set(threading.enumerate()) - threads
    assert len(loop) == 1
    del env
    gc.collect()
    for thread in loop:
        thread.join(60)
        assert not thread.is_alive()


class Stuck(Env):
    """A blocking step that lasts until the test says otherwise."""

    def __init__(self):
        self.entered, self.leave, self.closed_after_step = threading.Event(), threading.Event(), False

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return (USER,), {}

    def step(self, action):
        self.entered.set()
        assert self.leave.wait(60)
        self.left = True
        return (), 0.0, False, False, {}

    def close(self):
        self.closed_after_step = getattr(self, "left", False)


async def test_a_cancelled_blocking_step_is_left_behind_and_closed_after():
    env = Stuck()
    await env.areset(seed=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(env.astep, "x")
        await trio.to_thread.run_sync(env.entered.wait)
        nursery.cancel_scope.cancel()
    with pytest.raises(EnvError, match=r"Stuck\.step: an earlier call was cancelled"):
        await env.astep("y")
    with pytest.raises(EnvError, match=r"Stuck\.reset"):
        await env.areset(seed=0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(env.aclose)
        await trio.testing.wait_all_tasks_blocked()
        env.leave.set()
    assert env.closed_after_step


async def test_the_blocking_side_refuses_to_block_a_trio_loop():
    env = AsyncCounter()
    with pytest.raises(UsageError, match="from trio code await areset"):
        env.reset(seed=0)
    await env.areset(seed=0)


async def test_aclose_works_in_a_cancelled_scope():
    env = SyncCounter()
    await env.areset(seed=0)
    with trio.CancelScope() as scope:
        scope.cancel()
        await env.aclose()
    assert env.closed == 1


async def test_an_env_without_a_step_says_so():
    class Nothing(Env):
        pass

    assert await Nothing().areset(seed=1) == ((), {})
    with pytest.raises(NotImplementedError, match="Nothing must write step or astep"):
        await Nothing().astep("x")
    with pytest.raises(NotImplementedError, match="Nothing must write step or astep"):
        Nothing().step("x")


async def test_snapshots_are_an_offer():
    class Saved(SyncCounter):
        async def snapshot(self):
            return str(self.count).encode()

        async def restore(self, snapshot):
            self.count = int(snapshot)

    assert Saved().has_snapshots and not SyncCounter().has_snapshots
    with pytest.raises(NotImplementedError):
        await SyncCounter().snapshot()


# --- as_async


class PlainEcho(gymnasium.Env):
    """Somebody else's environment: gymnasium's Text in and out."""

    action_space = gymnasium.spaces.Text(100)
    observation_space = gymnasium.spaces.Text(100)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"say {self.np_random.integers(10)} {sorted(options or {})}", {}

    def step(self, action):
        return action.upper(), np.float64(1), np.bool_(True), False, {"n": 1}


async def test_a_plain_text_env_is_wrapped():
    env = as_async(PlainEcho())
    observation, _ = await env.areset(seed=1, options={"level": 2})
    assert observation == ({"role": "user", "content": "say 4 ['level']"},)
    step = await env.astep("hello")
    assert step == (({"role": "user", "content": "HELLO"},), 1.0, True, False, {"n": 1})
    assert type(step[1]) is float and type(step[2]) is bool
    assert list(env.tool_schemas()) == []
    await env.aclose()


async def test_gymnasiums_wrappers_apply():
    env = as_async(gymnasium.wrappers.TimeLimit(SyncCounter(), 2))
    await env.areset(seed=1)
    assert (await env.astep("x"))[3] is False
    assert (await env.astep("x"))[3] is True
    await env.aclose()


class Half(ToolEnv):
    """Half of it is done at once."""

    graded = 0

    def prompt(self, task):
        return "go"

    def on_text(self, text):
        return "on"

    def grade(self):
        self.graded += 1
        return 0.5


async def test_what_a_wrapper_or_the_driver_ends_is_graded_once():
    env = as_async(gymnasium.wrappers.TimeLimit(Half(), 2))
    await env.areset(seed=1)
    assert (await env.astep("x"))[3:] == (False, {})
    assert (await env.astep("x"))[3:] == (True, {"stop_reason": "truncated", "outcome": 0.5, "success": False})
    assert await env.aend(StopReason.TURN_LIMIT) == {}
    await env.areset(seed=1)
    env.charge_tokens(3)
    assert (await env.aend(StopReason.CONTEXT_LIMIT))["outcome"] == 0.5
    await env.aclose()
    inner = Half(limits={"turns": 1})
    env = as_async(gymnasium.wrappers.TimeLimit(inner, 1))
    await env.areset(seed=1)
    assert (await env.astep("x"))[4]["stop_reason"] == "turn_limit" and inner.graded == 1
    await env.aclose()


async def test_oracles_of_a_wrapped_environment_are_played():
    verdicts = await judge(lambda: as_async(gymnasium.wrappers.TimeLimit(agentrl.make("agentrl/Calculator-v0"), 9)), 0)
    assert len(verdicts) == 3 and all(verdict.holds for verdict in verdicts)
    assert await judge(lambda: as_async(PlainEcho()), 0) == []


def test_other_spaces_are_refused_with_a_mend():
    with pytest.raises(UsageError, match="TextGym"):
        as_async(gymnasium.make("FrozenLake-v1"))
    with pytest.raises(UsageError, match="no environment"):
        as_async("FrozenLake-v1")


async def test_an_observation_that_is_no_text_is_refused():
    class Wrong(PlainEcho):
        def step(self, action):
            return 3, 0.0, False, False, {}

    env = as_async(Wrong())
    await env.areset(seed=1)
    with pytest.raises(UsageError, match="observation is a int"):
        await env.astep("x")


def test_spaces_are_the_contract():
    assert Env.action_space == spaces.Text() and Env.observation_space == spaces.Messages()


async def test_call_takes_functions_coroutines_and_callables_that_return_one():
    async def coroutine(x):
        return x + 1

    assert await call(coroutine, 1) == 2
    assert await call(lambda x: coroutine(x), 1) == 2
    assert await call(lambda x: x + 1, 1, blocking=False) == 2


async def test_threads_are_bounded():
    running, leave = threading.Semaphore(0), threading.Event()

    def work():
        running.release()
        assert leave.wait(60)

    async with trio.open_nursery() as nursery:
        for _ in range(MAX_THREADS + 1):
            nursery.start_soon(call, work)
        for _ in range(MAX_THREADS):
            assert await trio.to_thread.run_sync(running.acquire, True, 60)
        assert not running.acquire(blocking=False), "one more waits for a free thread"
        leave.set()
    assert running.acquire(blocking=False)


async def test_calls_that_were_abandoned_and_never_end_are_not_charged_to_who_comes_next():
    leave, ended = threading.Event(), []
    for _ in range(MAX_THREADS):
        began = threading.Event()
        async with trio.open_nursery() as nursery:
            body = lambda began=began: (began.set(), leave.wait(60))  # noqa: E731
            nursery.start_soon(functools.partial(in_thread, body, left=ended.append))
            assert await trio.to_thread.run_sync(began.wait, 60)
            nursery.cancel_scope.cancel()
    with pytest.raises(EnvError, match="64 blocking calls ran past their deadlines and still run"):
        await call(lambda: 1)
    leave.set()
    for event in ended:
        await event.wait()
    assert len(ended) == MAX_THREADS and await call(lambda: 1) == 1


@each_case("name", ["reset", "step", "close"])
def test_an_async_method_under_a_blocking_name_is_refused(name):
    async def method(self, *args, **kwargs): ...

    with pytest.raises(UsageError, match=f"^Mixed.{name} is async: write async def a{name}, or a plain def {name}$"):
        type("Mixed", (SyncCounter,), {name: method})


def test_a_step_that_exits_is_the_environments_failure():
    class Exits(SyncCounter):
        def step(self, action):
            raise SystemExit(3)

    async def play():
        async with Exits() as env:
            await env.areset(seed=1)
            await env.astep("x")

    with pytest.raises(EnvError, match=r"Exits.step called sys.exit\(3\), which would end the process$"):
        trio.run(play)
