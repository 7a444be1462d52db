"""What a learner that dies, or cannot deliver, loses: no more than its settings say. No process, no engine."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config import EnvSource, Rollout, RunConfig, Train
from agentrl.errors import RunFailed
from agentrl.records import WeightVersion
from agentrl.runtime import extending
from agentrl.runtime import learner as module
from agentrl.runtime.alarms import LagBound
from agentrl.runtime.heartbeat import Heartbeat
from agentrl.runtime.publisher import NotDelivered
from agentrl.settings import Buffer
from agentrl.train.learner import Diverged


@dataclass(frozen=True)
class Report:
    loss: float = 0.0


class Scene:
    """A learner whose steps take `step_s` each, at a store that calls version 6 of step 0 current."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.step_s, self.behind = 0.0, 1.0, False
        self.saved, self.recorded, self.published, self.hashed = list[int](), list[int](), list[int](), list[int]()
        self.deliver: Callable[[], None] = lambda: None
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s, perf_counter=lambda: 0.0))
        self.learner = SimpleNamespace(step_index=0, trained=[], step=self._step, save=self._save, hashes=dict)
        self.learning: Any = object.__new__(module._Learning)
        self.learning.__dict__.update(
            _run=SimpleNamespace(checkpoints=folder, path=folder),
            _learner=self.learner,
            _heartbeat=Heartbeat(),
            _saved_at=0.0,
            _publisher=SimpleNamespace(behind=self._behind),
            _bound=LagBound(full=4, calm_steps=2, now=4),
            _store=SimpleNamespace(
                set_meta=lambda key, value: None,
                current_version=lambda: WeightVersion(version=6, step=0),
                step_of=None,
                is_undone=None,
                checkpoint=lambda step, version, folder: self.recorded.append(step),
                record=lambda kind, step, values: self.hashed.append(step),
                retain=lambda *_, **__: None,
            ),
            _take=lambda: ([], 0.0),
            _publish=self._publish,
            _settle=self._settle,
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
    assert typed == "train.max_skipped=6" and any(
        fnmatchcase(typed.split("=")[0], one) for one in extending._MAY_CHANGE
    )


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


@pytest.mark.parametrize(("every", "steps"), [(1, [1, 2, 3, 4]), (2, [2, 4]), (0, [])])
def test_the_hash_of_the_weights_is_recorded_every_so_many_steps(every: int, steps: list[int], scene: Scene) -> None:
    scene.run(steps=4, hash_every=every)
    assert scene.hashed == steps


class Waiting:
    """A learner at step `step` of 9, at a store in which group 1 is ready and a member of a group before runs on until
    `late_s`; each wait for work takes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, step: int, late_s: float, ready_s: float = 0.0) -> None:
        self.now_s, self.phase = 0.0, "train"
        clock = SimpleNamespace(monotonic=lambda: self.now_s, perf_counter=lambda: self.now_s)
        monkeypatch.setattr(module, "time", clock)
        self.learning: Any = object.__new__(module._Learning)
        self.learning.__dict__.update(
            _config=RunConfig(
                model="unused",
                env=EnvSource(id="test/none"),
                buffer=Buffer(groups_per_step=1),
                rollout=Rollout(group_deadline_s=40.0),
                train=Train(steps=9),
            ),
            _learner=SimpleNamespace(step_index=step - 1),
            _heartbeat=Heartbeat(),
            _order=None,
            _returns=None,
            _push=None,
            _watch_at=math.inf,
            _bound=LagBound(full=4, calm_steps=2, now=4),
            _store=SimpleNamespace(
                meta=lambda key: self.phase,
                late_open=lambda: int(self.now_s < late_s),
                ready_count=lambda: int(self.now_s >= ready_s),
                take=lambda step, n, **_: ["a group"] if self.now_s >= ready_s else None,
                wait_for_work=lambda role, timeout_s: setattr(self, "now_s", self.now_s + 1.0),
            ),
        )


@pytest.mark.parametrize(
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
