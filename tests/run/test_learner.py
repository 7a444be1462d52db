"""What a learner that dies, or cannot deliver, loses: no more than its settings say. No process, no engine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from each_case import each_case
from trio.testing import MockClock

from agentrl.config import EngineSettings, EnvSource, RunConfig, Train, changes
from agentrl.config.sections import BufferSettings
from agentrl.engine.weight_sync.publisher import NotDelivered
from agentrl.errors import LeaseLost, RunFailed
from agentrl.learner.learner import Diverged
from agentrl.records import WeightVersion
from agentrl.run.alarms import LagBound
from agentrl.run.learning.background import Job
from agentrl.run.learning.checkpoint_writer import CheckpointWriter
from agentrl.run.learning.take_batches import Batch, BatchTaker
from agentrl.run.learning.weight_push import leader_meta
from agentrl.run.weights.role_policies import Publishers
from agentrl.store.buffer.buffer import AtBound

from .loop_parts import InlineCalls, LoopScene


@dataclass(frozen=True)
class Report:
    step: int
    loss: float = 0.0


class Scene(LoopScene):
    """A learner whose steps take `step_s` each, at a store that calls version 6 of step 0 current."""

    def __init__(self, folder: Path) -> None:
        self.step_s, self.saved, self.recorded, self.hashed = 1.0, list[int](), list[int](), list[int]()
        self.retained = list[int]()
        self.urls: Callable[[], str] = lambda: '["http://engine"]'
        self.gate, self.began, self.room = threading.Event(), threading.Event(), True
        self.gate.set()
        learner = SimpleNamespace(
            step_index=0, trained=[], step=self._step, save=self._save, copy=self._copy, hashes=dict
        )
        store = SimpleNamespace(
            meta=lambda key: self.urls() if key == "engine_urls" else None,
            set_meta=lambda key, value: None,
            signal=None,
            versions=SimpleNamespace(
                current_version=lambda: WeightVersion(version=6, step=0), step_of=None, is_undone=None
            ),
            lineage=SimpleNamespace(
                still_leads=lambda: None,
                checkpoint=lambda step, version, folder: self.recorded.append(step),
                retain=lambda step, **_: self.retained.append(step),
            ),
            metrics=SimpleNamespace(record=lambda kind, step, values: self.hashed.append(step)),
        )
        super().__init__(folder, learner, store)

    def train(self, **train: Any) -> None:
        train = {"steps": 100, "checkpoint_every": 1000, **train}
        config = RunConfig(model="unused", env=EnvSource(id="test/none"), train=Train(**train))
        self.learner.settings = config.learner
        self.run(config)

    def _step(self, groups: object, **_: object) -> Report:
        self.learner.step_index += 1
        self.learner.trained.append(1)
        self.clock.jump(self.step_s)
        return Report(step=self.learner.step_index)

    def _save(self, folder: Path) -> Path:
        self.saved.append(self.learner.step_index)
        self.learner.trained.clear()
        return folder

    def _copy(self, folder: Path) -> Callable[[Callable[[], None]], Path] | None:
        """Its write waits for the gate."""
        if not self.room:
            return None
        step = self.learner.step_index
        self.learner.trained.clear()

        def write(progress: Callable[[], None]) -> Path:
            self.began.set()
            assert self.gate.wait(60)
            progress()
            self.saved.append(step)
            return folder

        return write


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_checkpoint_is_due_after_so_many_steps_or_so_much_time(scene: Scene) -> None:
    scene.step_s = 200.0
    scene.train(steps=20, checkpoint_every=8)
    assert scene.recorded == [3, 6, 8, 11, 14, 16, 19, 20]


def test_steps_go_on_beside_a_write_and_the_next_checkpoint_waits_for_it(scene: Scene) -> None:
    """No step counts as trained before its checkpoint is durable."""
    scene.gate.clear()
    seen: list[tuple[int, list[int]]] = []
    step, copy = scene.learner.step, scene.learner.copy

    def stepping(groups: object, **given: object) -> Report:
        assert scene.learner.step_index < 2 or scene.began.wait(60)
        seen.append((scene.learner.step_index + 1, list(scene.recorded)))
        return step(groups, **given)

    def copied(folder: Path) -> object:
        seen.append((-scene.learner.step_index, list(scene.recorded)))
        return copy(folder)

    class Gated(CheckpointWriter):
        """As long as nobody waits for the write, it does not end."""

        async def settle(self) -> None:
            scene.gate.set()
            await super().settle()
            scene.gate.clear()

    scene.learner.step, scene.learner.copy, scene.writer = stepping, copied, Gated
    scene.train(steps=5, checkpoint_every=2)
    assert seen[:6] == [(1, []), (2, []), (-2, []), (3, []), (4, []), (-4, [2])], "3 and 4 ran beside the write of 2"
    assert scene.saved == scene.recorded == [2, 4, 5]


def test_law_2_tokens_are_kept_that_a_run_which_goes_back_to_its_oldest_checkpoint_trains_again(scene: Scene) -> None:
    """The newest one may be damaged."""
    older = scene.folder / "step-00000003"
    older.mkdir()
    (older / "state.json").touch()
    scene.train(steps=6, checkpoint_every=2)
    assert scene.recorded == [2, 4, 6]
    assert scene.retained == [2, 3, 3]


def test_law_4_a_write_that_goes_on_after_the_last_step_is_a_sign_of_life(scene: Scene) -> None:
    """A learner that ends waits for its checkpoint as long as that takes. A silent one would be killed as hung."""
    scene.gate.clear()
    marked = threading.Event()

    def copied(folder: Path) -> Callable[[Callable[[], None]], Path]:
        def write(progress: Callable[[], None]) -> Path:
            scene.began.set()
            deadline = time.monotonic() + 20
            while not marked.is_set() and time.monotonic() < deadline:
                progress()
                os.sched_yield()
            return folder

        return write

    step = scene.learner.step

    def fails(groups: object, **given: object) -> Report:
        if scene.learner.step_index < 2:
            return step(groups, **given)
        assert scene.began.wait(60)
        scene.mark = marked.set
        raise RunFailed("a step that fails")

    scene.learner.copy, scene.learner.step = copied, fails
    with pytest.raises(RunFailed, match="a step that fails"):
        scene.train(steps=5, checkpoint_every=2)
    assert marked.is_set() and scene.recorded == [2]


def test_without_room_for_a_copy_the_step_waits(scene: Scene) -> None:
    scene.room = False
    scene.train(steps=3, checkpoint_every=2)
    assert scene.saved == scene.recorded == [2, 3]


def test_a_write_that_fails_ends_the_learner_and_records_nothing(scene: Scene) -> None:
    def full(folder: Path) -> object:
        def write(progress: object) -> Path:
            raise OSError(28, "No space left on device")

        return write

    scene.learner.copy = full
    with pytest.raises(OSError, match="No space left"):
        scene.train(steps=9, checkpoint_every=2)
    assert scene.recorded == [] and scene.learner.step_index < 9


@pytest.mark.parametrize(("error", "saved"), [(RunFailed("canary"), []), (NotDelivered("none took it"), [1])])
async def test_a_copy_is_written_unless_its_weights_were_found_wrong(
    scene: Scene, error: RunFailed, saved: list[int]
) -> None:
    scene.learner.step_index = 1
    proof, config = trio.Event(), RunConfig(model="unused", env=EnvSource(id="test/none"))

    async def send() -> None:
        await proof.wait()
        raise error

    async with trio.open_nursery() as nursery:
        pushes: Any = SimpleNamespace(under_way=Job(nursery, send))
        writer = CheckpointWriter(
            cast("Any", scene.learner),
            scene.folder,
            pushes,
            InlineCalls(scene.store),
            scene.torch,
            nursery,
            lambda: None,
            train=config.train,
            buffer=config.buffer,
        )
        await writer.start(WeightVersion(version=10, step=1))
        await trio.testing.wait_all_tasks_blocked()
        assert scene.saved == []
        proof.set()
        await writer.settle()
    assert scene.saved == scene.recorded == saved


def test_steps_that_take_long_do_not_wait_for_their_number(scene: Scene) -> None:
    scene.step_s = 601.0
    scene.train(steps=3)
    assert scene.recorded == [1, 2, 3]


def test_what_was_learned_is_saved_when_no_engine_takes_it(scene: Scene) -> None:
    def deliver() -> None:
        if scene.learner.step_index == 8:
            raise NotDelivered("no engine took version 8")

    scene.deliver = deliver
    with pytest.raises(NotDelivered):
        scene.train()
    assert scene.saved == [8]


def test_a_run_that_skips_too_many_updates_is_saved_and_says_how_to_go_on(scene: Scene, tmp_path: Path) -> None:
    step = scene.learner.step

    def diverge(groups: object, **given: object) -> Report:
        report = step(groups, **given)
        if scene.learner.step_index == 8:
            raise Diverged("step 8: too many")
        return report

    scene.learner.step = diverge
    with pytest.raises(RunFailed, match=r"step 8: too many; .*--resume (\S+) --set (\S+)$") as failed:
        scene.train(max_skipped=3)
    assert scene.saved == [8]
    typed = str(failed.value).split("--set ")[1]
    assert typed == "train.max_skipped=6" and any(fnmatchcase(typed.split("=")[0], one) for one in changes.IN_FLIGHT)


def test_law_4_a_push_that_no_engine_takes_ends_once_another_learner_leads(scene: Scene) -> None:
    """Else its learner waits for it at its end, for as long as engines may take to come back."""
    led = [True, True, False]

    def still_leads() -> None:
        if not led.pop(0):
            raise LeaseLost("another learner has begun")

    scene.store.lineage.still_leads = still_leads
    publishers = Publishers(EngineSettings(), "full", partial(leader_meta, scene.store), locks=Path())
    tries = list[Sequence[str]]()

    async def deliver(urls: Callable[[], Sequence[str]], *_: object) -> None:
        while True:
            tries.append(urls())

    publishers._of = {None: SimpleNamespace(deliver=deliver)}  # type: ignore[dict-item]
    with pytest.raises(LeaseLost):
        trio.run(publishers.deliver, {None: None})
    assert tries == [["http://engine"]] * 2
    publishers.end()
    with pytest.raises(RunFailed, match="the learner ends"):
        publishers.urls()


@pytest.mark.parametrize("error", [FileNotFoundError("a draft"), RunFailed("canary: ...")], ids=["file", "canary"])
def test_law_4_what_fails_once_another_learner_leads_is_no_failure(scene: Scene, error: Exception) -> None:
    """The other one removes its files, and gives the engines other weights: neither may end the run."""

    def deliver() -> None:
        raise error

    def still_leads() -> None:
        raise LeaseLost("another learner has begun")

    scene.deliver = deliver
    with pytest.raises(type(error), match=str(error)):
        scene.train()
    scene.store.lineage.still_leads = still_leads
    with pytest.raises(LeaseLost, match="another learner has begun"):
        scene.train()


def test_a_run_whose_weights_are_wrong_saves_none(scene: Scene) -> None:
    def deliver() -> None:
        raise RunFailed("canary: ...")

    scene.deliver = deliver
    with pytest.raises(RunFailed):
        scene.train()
    assert scene.saved == []


@pytest.mark.parametrize("behind", [True, False])
def test_engines_that_serve_an_undone_version_get_a_new_one_before_the_first_step(behind: bool, scene: Scene) -> None:
    """Else one that starts again with what the store calls current counts as older than they are, for ever."""
    scene.behind = behind
    scene.train(steps=1)
    assert scene.pushes.steps == ([0, 1] if behind else [1])


def test_the_hash_of_the_weights_is_recorded_at_every_step(scene: Scene) -> None:
    scene.train(steps=4)
    assert scene.hashed == [1, 2, 3, 4]


class Waiting:
    """A learner at step `step` of 9, at a store in which group 1 is ready and a member of a group before runs on until
    `late_s`; each wait for work takes a second."""

    def __init__(
        self,
        *,
        step: int,
        late_s: float,
        ready_s: float = 0.0,
        hangs_s: float = 0.0,
        wait: Any = "always",
    ) -> None:
        self.step, self.phase, self._ready_s, self.pause = step, "train", ready_s, range(0)
        self.clock = MockClock(autojump_threshold=0)
        buffer = SimpleNamespace(
            late_open=lambda: int(self.now_s < late_s),
            ready_count=lambda: int(self.now_s >= self._ready_s),
            at_bound=lambda *_, **__: AtBound(int(self.now_s < hangs_s), 0),
            take=self._take,
        )
        store = SimpleNamespace(meta=self._meta, set_meta=lambda key, value: None, buffer=buffer)
        self.edge = Edge(1.0)
        self.batches = taker(store, self.edge, buffer=BufferSettings(groups_per_step=1, wait_at_bound=wait))

    @property
    def now_s(self) -> float:
        """Seconds since the learner began to wait; each second is a whole number."""
        return round(self.clock.current_time() - self._began_s, 6)

    def take(self) -> Batch | None:
        self._began_s = self.clock.current_time()
        return trio.run(self.batches.take, self.step, clock=self.clock)

    def _meta(self, key: str) -> str | None:
        paused = '{"since_s": 1.0, "now": false}' if int(self.now_s) in self.pause else None
        return {"phase": self.phase, "paused": paused}.get(key)

    def _take(self, step: int, n: int, *, close_at_bound: int | None, **_: Any) -> list[str] | None:
        assert int(self.now_s) not in self.pause, "a step begins while the run is paused"
        self.least = close_at_bound
        return ["a group"] if self.now_s >= self._ready_s else None


def taker(store: Any, edge: Edge, *, buffer: BufferSettings, steps: int = 9) -> BatchTaker:
    """Takes the batches of a run whose groups have 40 seconds and close with six members."""
    return BatchTaker(
        cast("Any", edge),
        InlineCalls(store),
        LagBound(full=4, now=4),
        buffer=buffer,
        quorum=6,
        steps=steps,
        stall_deadline_s=Train().stall_deadline_s,
        group_deadline_s=40.0,
        order=cast("Any", None),
        returns=cast("Any", None),
    )


class Edge:
    """Nothing changes at the edge of a step; a wait takes `wait_s`. `longest_s` has the longest that each might."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s, self.longest_s = wait_s, list[float]()

    async def apply_settings(self) -> None: ...

    async def make_way(self) -> None: ...

    async def wait_a_moment(self, longest_s: float = 0.25) -> None:
        self.longest_s.append(longest_s)
        await trio.sleep(self._wait_s)


@each_case(
    ("step", "late_s", "ready_s", "waited_s"),
    [
        (8, 5.0, 0.0, 0.0),  # the next step trains it
        (9, 5.0, 0.0, 5.0),
        (9, 5.0, 7.0, 7.0),
        (9, 1e9, 7.0, 48.0),  # from when it could have begun
    ],
)
def test_the_last_step_waits_for_late_members_as_long_as_a_group_has(
    step: int, late_s: float, ready_s: float, waited_s: float
) -> None:
    scene = Waiting(step=step, late_s=late_s, ready_s=ready_s)
    batch = scene.take()
    assert batch is not None and (batch.groups, batch.idle_s) == (["a group"], waited_s)


@each_case(
    ("step", "late_s", "ready_s", "waited_s"),
    [(8, 0.0, 0.0, 0.0), (8, 0.0, 500.0, 300.0), (9, 5.0, 0.0, 3.0), (9, 1e9, 1.0, 42.0)],
)
def test_a_paused_learner_begins_no_step_and_the_time_counts_for_nothing(
    step: int, late_s: float, ready_s: float, waited_s: float
) -> None:
    """From second 3 to 203, or from the start: what it waits besides, for groups or for late members, is the same."""
    scene = Waiting(step=step, late_s=late_s, ready_s=ready_s)
    scene.pause = range(0 if not ready_s and not late_s else 3, 203)
    batch = scene.take()
    assert batch is not None and (batch.groups, batch.idle_s) == (["a group"], waited_s)
    assert scene.edge.longest_s.count(1.0) == len(scene.pause), "it looks seldom: the end of the pause wakes it"


def test_a_paused_learner_ends_with_its_run() -> None:
    scene = Waiting(step=8, late_s=0.0)
    scene.pause, scene.phase = range(10_000), "finish"
    assert scene.take() is None
    scene.phase = "stop"
    with pytest.raises(SystemExit):
        scene.take()


@each_case(
    ("ready_s", "hangs_s", "wait", "waited_s", "held_s", "least"),
    [
        (0.0, 0.0, "always", 0.0, 0.0, 6),  # a group of eight closes at the bound with its quorum
        (0.0, 20.0, "always", 20.0, 20.0, 6),
        (8.0, 20.0, "always", 20.0, 12.0, 6),  # until then there are no groups to take
        (0.0, 20.0, 0.5, 5.0, 5.0, 0),  # ten seconds of work: then groups at the bound close with what they have
        (0.0, 20.0, 0.0, 0.0, 0.0, 0),
    ],
)
def test_the_learner_waits_at_the_lag_bound_as_long_as_its_patience_lasts(
    ready_s: float,
    hangs_s: float,
    wait: Any,
    waited_s: float,
    held_s: float,
    least: int,
) -> None:
    scene = Waiting(step=5, late_s=0.0, ready_s=ready_s, hangs_s=hangs_s, wait=wait)
    scene.batches.worked(10.0)
    batch = scene.take()
    assert batch is not None
    assert (batch.groups, batch.idle_s, batch.held_s, scene.least) == (["a group"], waited_s, held_s, least)


@pytest.mark.parametrize(
    ("ready", "late", "last", "says"),
    [
        (3, 0, False, "step 7 waits for groups: 3 of 8 are scored; agentrl rewards RUN names late sources"),
        (20, 4, True, "step 7 is the last: it waits for 4 late members, which no later step trains, 40 s at most"),
        (20, 4, False, "step 7 waits, though 20 groups are scored: of these too few fit"),
        (20, 5, False, "step 7 waits for 5 running episodes that it would make too old: lower rollout.step_deadline_s"),
    ],
)
async def test_a_learner_that_waits_for_long_names_what_it_waits_for(
    ready: int, late: int, last: bool, says: str, autojump_clock: MockClock, capfd: Any
) -> None:
    told, seen = dict[str, str](), list[str]()

    def looks() -> int:
        if text := told.get("learner_waits"):
            seen.append(text)
        return round(trio.current_time() - began) // 10

    def take(*_: object, **__: object) -> list[Any] | None:
        return ["a group"] if looks() >= 6 else None

    store = SimpleNamespace(
        meta=lambda key: "train" if key == "phase" else None,
        set_meta=lambda key, value: told.update({key: value}),
        buffer=SimpleNamespace(
            ready_count=lambda: ready,
            late_open=lambda: late,
            at_bound=lambda *_, **__: AtBound(5 if late == 5 and looks() < 6 else 0, 0),
            take=take,
        ),
    )
    began = trio.current_time()
    batches = taker(store, Edge(10.0), steps=7 if last else 9, buffer=BufferSettings(groups_per_step=8))
    batch = await batches.take(7)
    assert batch is not None and (batch.groups, batch.idle_s) == (["a group"], 60.0)
    assert seen and seen[-1].startswith(says), seen
    assert told["learner_waits"] == "", "it waits no more"
    assert capfd.readouterr().err.count("agentrl learner: step 7") == 1
