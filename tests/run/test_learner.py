"""What a learner that dies, or cannot deliver, loses: no more than its settings say. No process, no engine."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from each_case import each_case

from agentrl.config import EngineSettings, EnvSource, Rollout, RunConfig, Train, changes
from agentrl.config.sections import BufferSettings
from agentrl.engine.weight_sync.publisher import NotDelivered
from agentrl.errors import LeaseLost, RunFailed
from agentrl.learner.learner import Diverged
from agentrl.records import WeightVersion
from agentrl.run.alarms import LagBound
from agentrl.run.processes import learner_process as module
from agentrl.run.processes.heartbeat import Heartbeat
from agentrl.run.weights.role_policies import Publishers
from agentrl.store import Patience
from agentrl.store.buffer.buffer import AtBound


@dataclass(frozen=True)
class Report:
    loss: float = 0.0


class Scene:
    """A learner whose steps take `step_s` each, at a store that calls version 6 of step 0 current."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.step_s, self.behind = 0.0, 1.0, False
        self.saved, self.recorded, self.published, self.hashed = list[int](), list[int](), list[int](), list[int]()
        self.deliver: Callable[[], None] = lambda: None
        self.urls: Callable[[], str] = lambda: '["http://engine"]'
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s, perf_counter=lambda: 0.0))
        self.gate, self.began, self.room = threading.Event(), threading.Event(), True
        self.gate.set()
        self.learner = SimpleNamespace(
            step_index=0, trained=[], step=self._step, save=self._save, copy=self._copy, hashes=dict
        )
        self.learning: Any = object.__new__(module._Learning)
        self.learning.__dict__.update(
            _run=SimpleNamespace(checkpoints=folder, path=folder),
            _learner=self.learner,
            _heartbeat=Heartbeat(),
            _saved_at=0.0,
            _publisher=SimpleNamespace(behind=self._behind),
            _bound=LagBound(full=4, now=4),
            _held=Patience(math.inf),
            _store=SimpleNamespace(
                meta=lambda key: self.urls() if key == "engine_urls" else None,
                set_meta=lambda key, value: None,
                versions=SimpleNamespace(
                    current_version=lambda: WeightVersion(version=6, step=0), step_of=None, is_undone=None
                ),
                lineage=SimpleNamespace(
                    still_leads=lambda: None,
                    checkpoint=lambda step, version, folder: self.recorded.append(step),
                    retain=lambda *_, **__: None,
                ),
                metrics=SimpleNamespace(record=lambda kind, step, values: self.hashed.append(step)),
            ),
            _take=lambda: ([], 0.0),
            _publish=self._publish,
            _settle=self._settle,
            _push=None,
            _writes=ThreadPoolExecutor(1),
            _progress=threading.Event(),
        )

    def run(self, **train: Any) -> None:
        train = {"steps": 100, "checkpoint_every": 1000, **train}
        self.learning._config = RunConfig(model="unused", env=EnvSource(id="test/none"), train=Train(**train))
        self.learning.run()

    def _step(self, groups: object, **_: object) -> Report:
        self.learner.step_index += 1
        self.learner.trained.append(1)
        self.now_s += self.step_s
        return Report()

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

    def _publish(self, row: object) -> WeightVersion:
        self.published.append(self.learner.step_index)
        return WeightVersion(version=10, step=self.learner.step_index)

    def _settle(self) -> float:
        self.deliver()
        return 0.0

    async def _behind(self, version: int) -> bool:
        assert version == 6
        return self.behind


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(tmp_path, monkeypatch)


def test_a_checkpoint_is_due_after_so_many_steps_or_so_much_time(scene: Scene) -> None:
    scene.step_s = 100.0
    scene.run(steps=20, checkpoint_every=8, checkpoint_every_s=300)
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

    def opened() -> None:  # as long as nobody waits for the write, it does not end
        scene.gate.set()
        module._Learning._written(scene.learning)
        scene.gate.clear()

    scene.learner.step, scene.learner.copy, scene.learning._written = stepping, copied, opened
    scene.run(steps=5, checkpoint_every=2)
    assert seen[:6] == [(1, []), (2, []), (-2, []), (3, []), (4, []), (-4, [2])], "3 and 4 ran beside the write of 2"
    assert scene.saved == scene.recorded == [2, 4, 5]


def test_without_room_for_a_copy_the_step_waits(scene: Scene) -> None:
    scene.room = False
    scene.run(steps=3, checkpoint_every=2)
    assert scene.saved == scene.recorded == [2, 3]


def test_a_write_that_fails_ends_the_learner_and_records_nothing(scene: Scene) -> None:
    def full(folder: Path) -> object:
        def write(progress: object) -> Path:
            raise OSError(28, "No space left on device")

        return write

    scene.learner.copy = full
    with pytest.raises(OSError, match="No space left"):
        scene.run(steps=9, checkpoint_every=2)
    assert scene.recorded == [] and scene.learner.step_index < 9


@pytest.mark.parametrize(("error", "saved"), [(RunFailed("canary"), []), (NotDelivered("none took it"), [1])])
def test_a_copy_is_written_unless_its_weights_were_found_wrong(
    scene: Scene, error: RunFailed, saved: list[int]
) -> None:
    push = Future[None]()
    scene.learning._push = push
    scene.learner.step_index = 1
    scene.learning._config = RunConfig(model="unused", env=EnvSource(id="test/none"))
    scene.learning._checkpoint(WeightVersion(version=10, step=1))
    assert scene.saved == []
    push.set_exception(error)
    scene.learning._written()
    assert scene.saved == scene.recorded == saved


def test_steps_that_take_long_do_not_wait_for_their_number(scene: Scene) -> None:
    scene.step_s = 601.0
    scene.run(steps=3)
    assert scene.recorded == [1, 2, 3]


def test_what_was_learned_is_saved_when_no_engine_takes_it(scene: Scene) -> None:
    def deliver() -> None:
        if scene.learner.step_index == 8:
            raise NotDelivered("no engine took version 8")

    scene.deliver = deliver
    with pytest.raises(NotDelivered):
        scene.run()
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
        scene.run(max_skipped=3)
    assert scene.saved == [8]
    typed = str(failed.value).split("--set ")[1]
    assert typed == "train.max_skipped=6" and any(fnmatchcase(typed.split("=")[0], one) for one in changes.IN_FLIGHT)


def test_law_4_a_push_that_no_engine_takes_ends_once_another_learner_leads(scene: Scene) -> None:
    """Else its learner waits for it at its end, for as long as engines may take to come back."""
    led = [True, True, False]

    def still_leads() -> None:
        if not led.pop(0):
            raise LeaseLost("another learner has begun")

    scene.learning._store.lineage.still_leads = still_leads
    publishers = Publishers(EngineSettings(), "full", scene.learning._as_leader, locks=Path())
    tries = list[Sequence[str]]()

    async def deliver(urls: Callable[[], Sequence[str]], *_: object) -> None:
        while True:
            tries.append(urls())

    publishers._of = {None: SimpleNamespace(deliver=deliver)}  # type: ignore[dict-item]
    with pytest.raises(LeaseLost):
        trio.run(publishers.deliver, {None: None})
    assert tries == [["http://engine"]] * 2


@pytest.mark.parametrize("error", [FileNotFoundError("a draft"), RunFailed("canary: ...")], ids=["file", "canary"])
def test_law_4_what_fails_once_another_learner_leads_is_no_failure(scene: Scene, error: Exception) -> None:
    """The other one removes its files, and gives the engines other weights: neither may end the run."""

    def deliver() -> None:
        raise error

    def still_leads() -> None:
        raise LeaseLost("another learner has begun")

    scene.deliver = deliver
    with pytest.raises(type(error), match=str(error)):
        scene.run()
    scene.learning._store.lineage.still_leads = still_leads
    with pytest.raises(LeaseLost, match="another learner has begun"):
        scene.run()


def test_a_run_whose_weights_are_wrong_saves_none(scene: Scene) -> None:
    def deliver() -> None:
        raise RunFailed("canary: ...")

    scene.deliver = deliver
    with pytest.raises(RunFailed):
        scene.run()
    assert scene.saved == []


@pytest.mark.parametrize("behind", [True, False])
def test_engines_that_serve_an_undone_version_get_a_new_one_before_the_first_step(behind: bool, scene: Scene) -> None:
    """Else one that starts again with what the store calls current counts as older than they are, for ever."""
    scene.behind = behind
    scene.run(steps=1)
    assert scene.published == ([0, 1] if behind else [1])


def test_the_hash_of_the_weights_is_recorded_at_every_step(scene: Scene) -> None:
    scene.run(steps=4)
    assert scene.hashed == [1, 2, 3, 4]


class Waiting:
    """A learner at step `step` of 9, at a store in which group 1 is ready and a member of a group before runs on until
    `late_s`; each wait for work takes a second."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        step: int,
        late_s: float,
        ready_s: float = 0.0,
        hangs_s: float = 0.0,
        wait: float = math.inf,
    ) -> None:
        self.now_s, self.phase, self._ready_s = 0.0, "train", ready_s
        self.pause = range(0)
        clock = SimpleNamespace(monotonic=lambda: self.now_s, perf_counter=lambda: self.now_s)
        monkeypatch.setattr(module, "time", clock)
        self.learning: Any = object.__new__(module._Learning)
        self.learning.__dict__.update(
            _config=RunConfig(
                model="unused",
                env=EnvSource(id="test/none"),
                buffer=BufferSettings(groups_per_step=1),
                rollout=Rollout(group_deadline_s=40.0),
                train=Train(steps=9),
            ),
            _run=None,
            _learner=SimpleNamespace(step_index=step - 1),
            _heartbeat=Heartbeat(),
            _order=None,
            _returns=None,
            _push=None,
            _watch_at=math.inf,
            _bound=LagBound(full=4, now=4),
            _held=Patience(wait),
            _store=SimpleNamespace(
                meta=self._meta,
                set_meta=lambda key, value: None,
                buffer=SimpleNamespace(
                    late_open=lambda: int(self.now_s < late_s),
                    ready_count=lambda: int(self.now_s >= self._ready_s),
                    at_bound=lambda *_, **__: AtBound(int(self.now_s < hangs_s), 0),
                    take=self._take,
                ),
                wait_for_work=lambda role, timeout_s: setattr(self, "now_s", self.now_s + 1.0),
            ),
        )

    def _meta(self, key: str) -> str | None:
        paused = '{"since_s": 1.0, "now": false}' if int(self.now_s) in self.pause else None
        return {"phase": self.phase, "paused": paused}.get(key)

    def _take(self, step: int, n: int, *, close_at_bound: int | None, **_: Any) -> list[str] | None:
        assert int(self.now_s) not in self.pause, "a step begins while the run is paused"
        self.least = close_at_bound
        return ["a group"] if self.now_s >= self._ready_s else None


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
    monkeypatch: pytest.MonkeyPatch, step: int, late_s: float, ready_s: float, waited_s: float
) -> None:
    scene = Waiting(monkeypatch, step=step, late_s=late_s, ready_s=ready_s)
    assert scene.learning._take() == (["a group"], waited_s)


@each_case(
    ("step", "late_s", "ready_s", "waited_s"),
    [(8, 0.0, 0.0, 0.0), (8, 0.0, 500.0, 300.0), (9, 5.0, 0.0, 3.0), (9, 1e9, 1.0, 42.0)],
)
def test_a_paused_learner_begins_no_step_and_the_time_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch, step: int, late_s: float, ready_s: float, waited_s: float
) -> None:
    """From second 3 to 203, or from the start: what it waits besides, for groups or for late members, is the same."""
    scene = Waiting(monkeypatch, step=step, late_s=late_s, ready_s=ready_s)
    scene.pause = range(0 if not ready_s and not late_s else 3, 203)
    assert scene.learning._take() == (["a group"], waited_s)


def test_a_paused_learner_ends_with_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Waiting(monkeypatch, step=8, late_s=0.0)
    scene.pause, scene.phase = range(10_000), "finish"
    assert scene.learning._take() is None
    scene.phase = "stop"
    with pytest.raises(SystemExit):
        scene.learning._take()


@each_case(
    ("ready_s", "hangs_s", "wait", "waited_s", "held_s", "least"),
    [
        (0.0, 0.0, math.inf, 0.0, 0.0, 6),  # a group of eight closes at the bound with its quorum
        (0.0, 20.0, math.inf, 20.0, 20.0, 6),
        (8.0, 20.0, math.inf, 20.0, 12.0, 6),  # until then there are no groups to take
        (0.0, 20.0, 0.5, 5.0, 5.0, 0),  # ten seconds of work: then groups at the bound close with what they have
        (0.0, 20.0, 0.0, 0.0, 0.0, 0),
    ],
)
def test_the_learner_waits_at_the_lag_bound_as_long_as_its_patience_lasts(
    monkeypatch: pytest.MonkeyPatch,
    ready_s: float,
    hangs_s: float,
    wait: float,
    waited_s: float,
    held_s: float,
    least: int,
) -> None:
    scene = Waiting(monkeypatch, step=5, late_s=0.0, ready_s=ready_s, hangs_s=hangs_s, wait=wait)
    scene.learning._held.worked(10.0)
    assert scene.learning._take() == (["a group"], waited_s)
    assert (scene.learning._held.held_s, scene.least) == (held_s, least)


@pytest.mark.parametrize(
    ("ready", "late", "last", "says"),
    [
        (3, 0, False, "step 7 waits for groups: 3 of 8 are scored; agentrl rewards RUN names late sources"),
        (20, 4, True, "step 7 is the last: it waits for 4 late members, which no later step trains, 40 s at most"),
        (20, 4, False, "step 7 waits, though 20 groups are scored: of these too few fit"),
        (20, 5, False, "step 7 waits for 5 running episodes that it would make too old: lower rollout.step_deadline_s"),
    ],
)
def test_a_learner_that_waits_for_long_names_what_it_waits_for(
    ready: int, late: int, last: bool, says: str, scene: Scene, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    now, told, looks = 0.0, dict[str, str](), 0

    def wait(*_: object) -> None:
        nonlocal now, looks
        now, looks = now + 10.0, looks + 1

    def take(*_: object, **__: object) -> list[Any] | None:
        return ["a group"] if looks >= 6 and not (last and looks < 5) else None

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now))
    scene.learning.__dict__.update(
        _config=RunConfig(
            model="m",
            env=EnvSource(id="e"),
            rollout=Rollout(group_deadline_s=40.0),
            train=Train(steps=7 if last else 9),
            buffer=BufferSettings(groups_per_step=8),
        ),
        _push=None,
        _watch_at=math.inf,
        _order=None,
        _returns=None,
        _bound=LagBound(full=4, now=4),
        _held=Patience(math.inf),
        _store=SimpleNamespace(
            meta=lambda key: "train" if key == "phase" else None,
            set_meta=lambda key, value: told.update({key: value}),
            buffer=SimpleNamespace(
                ready_count=lambda: ready,
                late_open=lambda: late,
                at_bound=lambda *_, **__: AtBound(5 if late == 5 and looks < 6 else 0, 0),
                take=take,
            ),
            wait_for_work=lambda *_: (wait(), told.get("learner_waits") and seen.append(told["learner_waits"])),
        ),
    )
    seen: list[str] = []
    scene.learner.step_index = 6
    found = module._Learning._take(scene.learning)
    assert found == (["a group"], 60.0)
    assert seen and seen[-1].startswith(says), seen
    assert told["learner_waits"] == "", "it waits no more"
    assert capfd.readouterr().err.count("agentrl learner: step 7") == 1
