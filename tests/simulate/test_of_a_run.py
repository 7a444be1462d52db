"""A run in virtual time, by the parts that a run has: its simulation gives the same idle share and drops as much."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from rollout.conftest import ScriptedEnv, write_tokenizer
from trio.testing import MockClock

from agentrl.config import RunConfig, parse
from agentrl.engine.rendering.renderer import Renderer
from agentrl.env.tasks import Seeds
from agentrl.planning.simulate.measured import MeasuredRun, measure, start_up_steps
from agentrl.planning.simulate.simulation import SimulationResult
from agentrl.planning.simulate.sweep import Wishes, plan
from agentrl.records import Group, Task, Trajectory
from agentrl.rollout import turn_sampler
from agentrl.rollout.admitter import Admitter, bounds_of
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.worker import Worker
from agentrl.run.take_orders import returns_of
from agentrl.store import Patience, RunStore, close_policy
from agentrl.store.async_calls import Aside, Waiting
from agentrl.store.journal_writer import JournalWriter
from agentrl.store.run_values import PHASE
from agentrl.tokens.staleness import lag_in_step, trains
from tests.parts.fake_engine import FakeEngine

TICK_S = 0.25  # the supervisor's
BUSY_S, PUSH_S, CHUNK_S = 1.0, 0.25, 0.1
LATE_S = 60.0


def config(steps: int = 30, **buffer: Any) -> RunConfig:
    return parse(
        {
            "model": "m",
            "env": {"id": "test/Env"},
            "rollout": {"group_size": 4, "max_running": 24, "group_deadline_s": LATE_S},
            "buffer": {"groups_per_step": 4, "max_lag": 1, "quorum_after_s": 0.5, **buffer},
            "train": {"steps": steps},
        }
    )


class Waits(ScriptedEnv):
    """Each of two actions waits; the outcome is 1 in one episode of four, whatever was written."""

    def __init__(self, chance: Random) -> None:
        super().__init__([])
        self._chance = chance

    async def astep(self, action: str) -> Any:
        self.actions.append(action)
        await trio.sleep(self._chance.lognormvariate(-0.125, 0.5))
        if len(self.actions) < 2:
            return ({"role": "tool", "content": "on"},), 0.0, False, False, {}
        return (), 0.0, True, False, {"outcome": float(self._chance.randrange(4) == 0)}


@dataclass
class Played:
    """A run from its start to its last step."""

    config: RunConfig
    store: RunStore
    engine: FakeEngine
    tokens: int = 0  # of the members that left the buffer in a measured step, unless their group was skipped
    fresh: int = 0  # of these, the trained ones
    sampled_meanwhile: list[int] = field(default_factory=list)  # turns that began while the learner was in each step
    pushed: trio.Event = field(default_factory=trio.Event)

    async def learn(self) -> None:
        """As the learner's process does."""
        waiting, buffer, freed = Waiting(self.store), self.config.buffer, trio.current_time()
        patience = Patience(buffer.patience)
        self.pushed.set()
        async with trio.open_nursery() as nursery:
            for step in range(1, self.config.train.steps + 1):
                while (groups := self.take(step, patience, trio.current_time() - freed)) is None:
                    await waiting("learner", TICK_S)
                idle_s = trio.current_time() - freed
                turns = len(self.engine.requests)
                await trio.sleep(BUSY_S)
                self.sampled_meanwhile.append(len(self.engine.requests) - turns)
                ended = trio.current_time()
                await self.pushed.wait()
                patience.worked(BUSY_S)
                self.count(step, groups)
                row = {"idle_s": idle_s + trio.current_time() - ended, "busy_s": BUSY_S, "tokens_scored": 1}
                row |= {"group_count": buffer.groups_per_step, "groups_skipped": sum(one.skipped for one in groups)}
                freed, self.pushed = trio.current_time(), trio.Event()
                nursery.start_soon(self.push, step, row)

    def take(self, step: int, patience: Patience, waited_s: float) -> list[Group] | None:
        store, buffer, quorum = self.store, self.config.buffer, self.config.quorum
        if step == self.config.train.steps and store.buffer.late_open() and waited_s < LATE_S:
            return None
        found = store.buffer.at_bound(step, max_lag=buffer.max_lag, quorum=quorum)
        ready = store.buffer.ready_count() + found.closable >= buffer.groups_per_step
        waits = found.episodes > 0 and ready
        if patience.holds(waits, trio.current_time()):
            return None
        return store.buffer.take(
            step,
            buffer.groups_per_step,
            max_lag=buffer.max_lag,
            returns=returns_of(self.config),
            skip_at_most=buffer.skips,
            close_at_bound=0 if waits else quorum,
        )

    def count(self, step: int, groups: list[Group]) -> None:
        lag = self.config.buffer.max_lag
        if start_up_steps(self.config.buffer) < step <= self.config.train.steps - lag:
            for group in (one for one in groups if not one.skipped):
                self.fresh += sum(self.tokens_of(one, step) for one in group.trajectories)
                self.tokens += sum(self.tokens_of(one) for one in (*group.trajectories, *group.left_out))

    def tokens_of(self, one: Trajectory, step: int | None = None) -> int:
        """Those that `step` may train; without it all."""
        lag, made_at = self.config.buffer.max_lag, self.store.versions.step_of
        return sum(
            span.end - span.start
            for turn in one.turns
            for span in turn.spans
            if step is None or trains(lag_in_step(step, made_at(span.version)), lag)
        )

    async def push(self, step: int, row: dict[str, Any]) -> None:
        pushed, version = self.pushed, self.store.versions.mint_version(step)
        await trio.sleep(PUSH_S)
        self.engine.version = version.version
        self.store.versions.confirm_version(version)
        self.store.metrics.record("step", step, row)
        pushed.set()

    async def supervise(self) -> None:
        policy = close_policy(self.config.quorum, after_s=self.config.buffer.quorum_after_s)
        while True:
            self.store.buffer.expire(trio.current_time(), LATE_S, close_policy=policy)
            await trio.sleep(TICK_S)


async def play(folder: Path, run: RunConfig) -> Played:
    store, engine = RunStore.create(folder / "store.sqlite", "{}", clock=trio.current_time), FakeEngine(chunk_s=CHUNK_S)
    version = store.versions.mint_version(0)
    store.versions.confirm_version(version)
    engine.version, chance = version.version, Random(5)

    def env(task: Task) -> Any:
        return Waits(chance)

    written = JournalWriter(store, inline=True, disk_wait_s=60.0)
    place = RolloutContext(
        engine=engine,
        renderer=Renderer(write_tokenizer(folder)),
        store=written,
        settings=run.rollout,
        make_env=env,
    )
    PHASE.set(store, "train")
    played = Played(run, store, engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Admitter(store, Seeds("test/Env"), bounds_of(run)).run, Aside(store, inline=True))
        nursery.start_soon(Worker("w.1", written, place, run.buffer.groups_ahead, now=trio.current_time).run)
        nursery.start_soon(played.supervise)
        await played.learn()
        nursery.cancel_scope.cancel()
    return played


def simulated(run: RunConfig, measured: MeasuredRun) -> SimulationResult:
    [own] = [case for case in plan(run, Wishes(), measured) if case.present]
    return own.run()


@pytest.mark.medium
@pytest.mark.parametrize("buffer", [{}, {"skip_without_signal": False}])
async def test_a_simulation_gives_the_idle_share_and_the_dropped_tokens_of_its_run(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, buffer: dict[str, Any]
) -> None:
    """With one success in four, (3^4 + 1) / 4^4 = 32% of the groups have four equal outcomes. The learner waits for
    those that take their place, if they are skipped; and for the last episodes, which no simulation has."""
    monkeypatch.setattr(turn_sampler, "time", SimpleNamespace(time=trio.current_time))
    run = config(**buffer)
    played = await play(tmp_path, run)
    with played.store as store:
        measured = measure(store, run.buffer, end=run.train.steps, returns=returns_of(run))
    found = simulated(run, measured)
    assert found.idle == pytest.approx(measured.idle, abs=0.05)
    assert found.tokens_discarded == pytest.approx(1 - played.fresh / played.tokens, abs=0.05)


@pytest.mark.medium
async def test_law_6_turns_begin_while_the_learner_is_in_a_step(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the lag bound, episodes go on during the eight steps. At a `max_lag` of 0, all groups of a step have ended
    before it starts, and the next ones wait for its weights."""
    monkeypatch.setattr(turn_sampler, "time", SimpleNamespace(time=trio.current_time))
    overlapping = await play(tmp_path, config(steps=8))
    overlapping.store.close()
    assert sum(overlapping.sampled_meanwhile) > 8
    (tmp_path / "alternating").mkdir()
    alternating = await play(tmp_path / "alternating", config(steps=3, max_lag=0))
    alternating.store.close()
    assert alternating.sampled_meanwhile == [0, 0, 0]
