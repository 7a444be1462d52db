"""What the supervisor itself decides, in virtual time: over a real store, with no process started."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from store.play import START, admit, answer, serve, turn
from trio.testing import MockClock

from agentrl.config import parse
from agentrl.engine.fleet import Fleet
from agentrl.errors import RunFailed
from agentrl.records import StopReason, WeightVersion
from agentrl.runtime.checkpoints import StartPoint
from agentrl.runtime.models import model_dir
from agentrl.runtime.pipeline import Supervisor
from agentrl.runtime.rundir import RunDir
from agentrl.runtime.worker import report
from agentrl.store import RunStore
from agentrl.telemetry import Telemetry
from agentrl.testing.engine import FakeEngine

STALL_S = 30.0


class NoChildren:
    """A crew whose processes never do anything: `learned` is set by the test."""

    def __init__(self) -> None:
        self.learned = trio.Event()

    async def start_engines(self, start: StartPoint) -> None: ...

    def start_workers(self) -> None: ...

    def start_learner(self) -> trio.Event:
        return self.learned


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Callable[..., Supervisor]]:
    opened: list[Supervisor] = []

    def make(**sections: Any) -> Supervisor:
        document = {"model": "m", "env": {"id": "e"}, "train": {"stall_deadline_s": STALL_S}, **sections}
        run = RunDir.create(tmp_path / "run", parse(document))
        store = RunStore.open(run.store_path)
        serve(store, 0)
        run.make_scratch()
        first = WeightVersion(version=1, step=0)
        start = StartPoint(model=model_dir("agentrl/tiny-coder"), checkpoint=None, version=first)
        crew: Any = NoChildren()
        telemetry = Telemetry(store, run.metrics, "supervisor")
        opened.append(Supervisor(run, run.config(), store, telemetry, crew, start, lambda _: None))
        return opened[-1]

    yield make
    for one in opened:
        one.telemetry.close()
        one.store.close()
        one.run.clear_scratch()


async def until_it_fails(supervisor: Supervisor, *others: Callable[[], Any]) -> tuple[str, float]:
    """What the run failed of, and after how many seconds; `others` go on meanwhile."""
    async with trio.open_nursery() as nursery:
        for other in others:
            nursery.start_soon(other)
        with pytest.raises(RunFailed) as failed, trio.fail_after(10 * STALL_S):
            await supervisor.train()
        nursery.cancel_scope.cancel()
    return str(failed.value), trio.current_time()


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

    why, when = await until_it_fails(one, lambda: report(fleet, one.telemetry, one.store), any_kind)
    assert why == "no turn and no step for 30 s (train.stall_deadline_s); see the logs folder"
    assert when == pytest.approx(STALL_S, abs=1.0)
    assert len(one.store.metrics("fleet")) > 3, "the workers' reports did come"


async def test_what_does_go_on_moves_the_stall_deadline(
    supervisor: Callable[..., Supervisor], autojump_clock: MockClock
) -> None:
    """A turn, an answer, an episode's end and a step of the learner, each 20 s after the last, and then nothing."""
    one = supervisor()
    store = one.store

    async def play() -> None:
        admit(store, limit=1)
        claim = store.claim("a", 1, lease_s=1e6)[0]
        id, fence = claim.episode_id, claim.fence
        store.begin(id, fence, START)
        for call in (
            lambda: store.journal_turn(id, fence, turn(0, 1)),
            lambda: store.journal_step(id, fence, 0, answer(0)),
            lambda: store.finish(id, fence, stop_reason=StopReason.DONE, outcome=1.0, success=True),
            lambda: store.mint_version(1),
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
            one.store.claim("a", 2, lease_s=1e6)
            one.store.expire(1e12, 1.0)
            await trio.sleep(5)

    _, when = await until_it_fails(one, expire)
    assert when == pytest.approx(STALL_S, abs=1.0)
