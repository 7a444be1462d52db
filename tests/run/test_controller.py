"""What the controller of a run sees and asks for: predictions worked out by hand, and a learner that finds no place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from each_case import each_case

from agentrl.config import RunConfig, parse
from agentrl.config.cluster import Split
from agentrl.errors import ConfigError
from agentrl.planning.simulate.measured import MeasuredRun
from agentrl.planning.simulate.service import Constant, parse_episodes
from agentrl.run import resume_overrides
from agentrl.run.children.learner import WatchedLearner
from agentrl.run.children.run_children import RunChildren
from agentrl.run.cluster import scale_requests, scaling
from agentrl.run.cluster.scaling import NoRoom, Size
from agentrl.run.cluster.split_gains import gains
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.async_calls import Aside, Looks

from .test_status import typed

TWO, ONE = Split(2, 1), Split(1, 2)


def config(**sections: Any) -> RunConfig:
    places = {"controller": {"engines": [1, 2], "ranks": [1, 2]}, **sections.pop("cluster", {})}
    document = {"model": "m", "env": {"id": "e"}, "engine": {"replicas": 2}, "cluster": places}
    return parse(document | sections)


def test_a_place_is_worth_what_the_other_side_has_to_spare() -> None:
    """32 slots of two engines, 16 episodes a step: the learner's step is what counts, or the episodes are."""
    settings = config(rollout={"max_running": 32, "group_size": 4}, buffer={"groups_per_step": 4})

    def promised(episode_s: float, step_s: float, faster: float) -> float:
        episodes = parse_episodes(f"constant:{episode_s}", deadline_s=1e6)
        measured = MeasuredRun(episodes=episodes, steps=Constant(step_s), push_s=0.0, between_s=0.0, idle=0.0)
        return gains(settings, measured, TWO, [ONE], faster=lambda ranks: faster)[ONE]

    assert promised(1, 60, 2.0) == pytest.approx(1.0, abs=0.05), "twice the learner"
    assert promised(1, 60, 1.5) == pytest.approx(0.5, abs=0.05), "as much faster as it was found to be"
    assert promised(600, 1, 2.0) == pytest.approx(-0.5, abs=0.05), "half the engines"
    # 16 slots give 16 episodes every 20 s, so the learner of two ranks waits: 20 s a step instead of 30 s
    assert promised(20, 30, 2.0) == pytest.approx(0.5, abs=0.1)


@each_case(
    ("sections", "told"),
    [
        ({"cluster": {"controller": {"engines": [1, 2], "ranks": [1]}}}, "these come: 2 \\+ 1; give bounds with"),
        ({"cluster": {"controller": {"engines": [2, 1], "ranks": [1, 2]}}}, "engines = \\(2, 1\\): give the fewest"),
        ({"cluster": {"controller": {"engines": [3, 4], "ranks": [1, 2]}}}, "these come: none"),
        ({"train": {"device": "cuda"}}, "cluster.launcher = 'local': .*give 'ray'"),
        ({"train": {"optimizer": "adamw8bit"}}, "train.optimizer = 'adamw8bit': over 2 ranks"),
        ({"engine": {"kind": "vllm", "urls": ["http://a"]}}, "somebody else started the engines"),
    ],
)
def test_what_a_controller_cannot_move_is_refused(sections: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(**sections)


def test_the_splits_of_a_cluster_count_gpus() -> None:
    """Seven GPUs: engines of two, ranks of one."""
    from agentrl.config.cluster import splits

    places = {"launcher": "ray", "engine": {"gpus": 2}, "learner": {"gpus": 1}}
    places["controller"] = {"engines": [1, 3], "ranks": [1, 2, 3, 5, 7]}
    engine = {"kind": "vllm", "sync": "nccl", "replicas": 3}
    found = config(cluster=places, engine=engine, train={"device": "cuda"})
    assert splits(found.cluster, Split(3, 1)) == [(3, 1), (2, 2), (2, 3), (1, 5)]


def made(folder: Path) -> RunDir:
    return RunDir.create(folder / "run", config())


def test_somebody_beside_a_controller_asks_for_workers_alone(tmp_path: Path) -> None:
    run = made(tmp_path)
    refused = typed("scale", run.path, "--engines", 2).exception
    assert isinstance(refused, ConfigError) and "this run has a controller" in str(refused)
    typed("scale", run.path, "--workers", 3)
    with RunStore.open(run.store_path) as store:
        scale_requests.move(store, ONE, was=TWO)
        assert (
            scaling.requested_size(run.config(), store.meta) == Size(1, 3)
            and scale_requests.ranks(run.config(), store.meta) == 2
        )
        store.versions.confirm_version(store.versions.mint_version(0))
    resume_overrides.change(run, ["engine.replicas=2"])
    with RunStore.read(run.store_path) as store:
        assert scale_requests.ranks(run.config(), store.meta) == 1, "the run file's own split"


class Full:
    """A cluster that has room for the learner's ranks of before, and for no more."""

    def __init__(self, ranks: Any) -> None:
        self.ranks, self.seats = ranks, list[int]()

    def release(self, name: str) -> None:
        self.seats.append(0)

    async def reserve(self, name: str) -> None:
        if self.ranks() > 1:
            raise NoRoom("no node has two")
        self.seats.append(self.ranks())


async def test_a_learner_that_finds_no_place_has_its_own_again_and_the_engine_comes_back(tmp_path: Path) -> None:
    run = made(tmp_path)
    with RunStore.open(run.store_path) as store:
        scale_requests.move(store, ONE, was=TWO)
        full: Any = Full(lambda: scale_requests.ranks(run.config(), store.meta))
        writes, nobody = Aside(store, inline=True), cast("Any", None)
        children = RunChildren(run, run.config(), Looks(store), writes, nobody, {}, full)
        await WatchedLearner(children.registry).renew()
        assert full.seats == [0, 1]
        assert scaling.requested_size(run.config(), store.meta).engines == 2
        assert scale_requests.refused(store.meta) == "no node has two"
        assert "was" not in scale_requests.requested(store.meta), "a split is taken back once"
        scale_requests.move(store, ONE, was=TWO)
        assert scale_requests.refused(store.meta) is None


def test_a_reader_is_told_the_last_decision(tmp_path: Path) -> None:
    run = made(tmp_path)
    with RunStore.open(run.store_path) as store:
        assert scale_requests.last_decision(store) is None
        store.metrics.record(
            "controller", 4, {"split": [2, 1], "to": [1, 2], "why": "1 + 2 promises +40% tokens a second"}
        )
        store.metrics.record("controller", 5, {"split": None, "was": [2, 1], "took_s": 3.0, "refused": None})
        told = scale_requests.last_decision(store)
    assert told == "2 + 1 (engines + ranks) moves to 1 + 2: 1 + 2 promises +40% tokens a second"
    assert json.loads(typed("status", run.path, "--json").output)["split"] == told
