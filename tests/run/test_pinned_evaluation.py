"""Evaluation on engines of its own measures the version that it is pinned to, whatever training does meanwhile."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing
from each_case import each_case

from agentrl.config import parse
from agentrl.engine.weight_sync import canary
from agentrl.errors import ConfigError
from agentrl.records import GroupState, StopReason
from agentrl.rollout.worker import Worker
from agentrl.run.evaluation import pinned
from agentrl.run.evaluation.pinned import Pin, PinnedEvaluations
from agentrl.run.run_folder import RunDir
from agentrl.run.trainer import Trainer
from agentrl.store import Ending, RunStore
from agentrl.store.audit import audit
from agentrl.store.run_values import PINNED

from .envs import Vowels
from .test_run import SMALL

RUN: dict[str, Any] = {
    "model": "m",
    "env": {"id": "e"},
    "train": {"steps": 9},
    "eval": {"engines": 1, "every": 2, "n_during": 2, "during": ["b", "a"], "sets": [{"name": "a"}, {"name": "b"}]},
}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", parse(RUN))


def made(run: RunDir, store: RunStore, step: int) -> int:
    """The learner sends the weights of a step, and keeps them to be measured."""
    version = store.versions.mint_version(step)
    weights = run.path / f"{step}.safetensors"
    weights.write_text(f"weights of {step}")
    canary.beside(weights).write_text("its canary")
    pinned.keep(run, version, weights)
    weights.unlink()
    store.versions.confirm_version(version)
    return version.version


class Measuring:
    """`PinnedEvaluations` in virtual time, whose engines serve what they are told to at once."""

    def __init__(self, run: RunDir, store: RunStore) -> None:
        self.served: list[str] = []
        self.evaluations = PinnedEvaluations(run, run.config, self._writes, self._serve)
        self._store = store

    async def _writes(self, call: Any) -> bool:
        await trio.lowlevel.checkpoint()
        return call(self._store)

    async def _serve(self, pin: Pin) -> None:
        self.served.append(pin.path.read_text())
        await trio.lowlevel.checkpoint()

    async def for_a_while(self) -> None:
        with trio.move_on_after(5):
            await self.evaluations.keep_measuring()


def play(store: RunStore, most: int) -> set[str]:
    """End so many episodes of evaluations; of which."""
    ended = store.leases.claim("w", most, lease_s=1e9, evaluation=True)
    for one in ended:
        store.journal.finish(one.episode_id, one.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True))
    return {one.purpose for one in ended}


async def test_versions_are_measured_one_after_the_other_and_finished_after_a_resume(
    run: RunDir, autojump_clock: trio.testing.MockClock
) -> None:
    with RunStore.open(run.store_path) as store:
        first, second = made(run, store, 2), made(run, store, 4)
        one = Measuring(run, store)
        await one.for_a_while()
        assert one.served == ["weights of 2"] and PINNED.of(store.meta) == first
        both = {"eval:a:during@2", "eval:b:during@2"}
        assert play(store, 3) <= both and one.evaluations.pending
        store.lineage.checkpoint(2, first, run.path / "checkpoint")
        assert store.lineage.rollback(2) == 2, "a kill, and step 2 is what the run goes on from"
        again = Measuring(run, store)  # after a resume
        await again.for_a_while()
        assert again.served == ["weights of 2"]
        assert [sum(store.groups.counts(label).values()) for label in sorted(both)] == [2, 2], "nothing is played twice"
        assert play(store, 9) <= both
        await again.for_a_while()
        assert not again.evaluations.pending and set(again.served) == {"weights of 2"}, "4 is undone"
        third = made(run, store, 4)
        await again.for_a_while()
        assert again.served[-1] == "weights of 4" and PINNED.of(store.meta) == third > second
        assert store.lineage.rollback(2) == 3, "amid its evaluation"
        await again.for_a_while()
        assert not again.evaluations.pending
        assert not audit(store).violations


def test_a_claim_is_of_evaluations_or_of_training_alone(run: RunDir) -> None:
    with RunStore.open(run.store_path) as store:
        store.versions.confirm_version(store.versions.mint_version(0))
        task = parse(RUN)
        for purpose in ("train", "eval:a:during@2"):
            store.groups.add_groups(tasks(task), size=1, purpose=purpose)
        assert [one.purpose for one in store.leases.claim("w", 9, lease_s=1e9, evaluation=False)] == ["train"] * 2
        assert [one.purpose for one in store.leases.claim("w", 9, lease_s=1e9, evaluation=True)] == [
            "eval:a:during@2"
        ] * 2


def tasks(config: Any) -> Any:
    from agentrl.run.evaluation.held_out import tasks_of

    return tasks_of(config, config.eval.sets[0], 2)


async def test_episodes_of_evaluations_take_no_place_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker with two places, five episodes of each kind to play: without engines of its own, evaluation has both."""

    async def play(claim: Any, context: Any) -> None:
        await trio.sleep_forever()

    class Store:
        def __init__(self) -> None:
            self.left = {"eval:a:during@2": 5, "train": 5}
            self.ids = itertools.count()

        async def claim(self, name: str, n: int, *, evaluation: bool | None = None, **_: Any) -> list[Any]:
            found: list[Any] = []
            for purpose in self.left:
                if evaluation in (None, purpose != "train"):
                    most = min(n - len(found), self.left[purpose])
                    self.left[purpose] -= most
                    found += [SimpleNamespace(episode_id=next(self.ids), purpose=purpose) for _ in range(most)]
            return found

    monkeypatch.setattr("agentrl.rollout.worker.play", play)
    settings = parse({**RUN, "rollout": {"max_running": 2, "group_size": 2, "workers": 1}}).rollout
    for own, left in ((None, [3, 5]), (object(), [3, 3])):
        store = Store()
        context: Any = SimpleNamespace(pinned=own, gate=SimpleNamespace(paused=False), settings=settings)
        worker = Worker("w", cast("Any", store), context)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                await worker._fill(nursery)  # pyright: ignore[reportPrivateUsage]
            nursery.cancel_scope.cancel()
        assert list(store.left.values()) == left


def test_weights_are_kept_for_every_kth_step_but_the_last() -> None:
    assert [step for step in range(10) if pinned.is_due(parse(RUN), step)] == [2, 4, 6, 8]
    shared = parse({**RUN, "eval": {**RUN["eval"], "engines": 0}})
    assert not any(pinned.is_due(shared, step) for step in range(10))


@each_case(
    ("given", "says"),
    [
        ({"engine": {"urls": ["http://h:1"]}}, "the run starts no engines beside engine.urls: leave them out"),
        ({"engine": {"kind": "vllm"}}, r"name their GPUs, as \[\[1\], \[2\]\]"),
        ({"cluster": {"launcher": "ray"}}, "on Ray it shares the engines of training: give 0"),
    ],
)
def test_what_cannot_have_engines_of_evaluation_says_so(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=rf"eval\.engines = 1: {says}"):
        parse({**RUN, **given})


@pytest.mark.long
def test_a_run_measures_each_pinned_version_and_no_token_is_of_another(tmp_path: Path) -> None:
    given = {"engines": 1, "every": 2, "n_during": 2, "samples": 2, "sets": [{"name": "held_out", "n": 4}]}
    Trainer(env=Vowels, config={**SMALL, "eval": given}, out=tmp_path / "run").train()
    run = RunDir.open(tmp_path / "run")
    with RunStore.open(run.store_path) as store:
        version = store.versions.version_at(2)
        assert version is not None
        assert store.groups.counts("eval:held_out:during@2") == {GroupState.SCORED: 2}
        played = list(store.reads.trajectories("eval:held_out:during@2"))
        spans = [span.version for one in played for turn in one.turns for span in turn.spans]
        assert len(played) == 4 and set(spans) == {version.version}
        assert not audit(store).violations
    assert not pinned.pins(run)
