"""Each alarm is raised by a fault that is injected into real steps of a tiny model, and does what it is told to."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from each_case import each_case

from agentrl.algos.grpo import GRPO
from agentrl.config import RunConfig, Train
from agentrl.config.sections import Alarms
from agentrl.errors import RunFailed
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.learner import Learner
from agentrl.records import Group, WeightVersion
from agentrl.run import alarms as alarms_of_run
from agentrl.run.alarms import raised
from agentrl.run.learning.checkpoint_writer import CheckpointWriter
from tests.learner.making import episode, group_of, run_config, tiny_qwen3, turn

from .loop_parts import InlineTorch, LoopScene

TURNS = [(3, 4, 5), (6, 7), (8, 9, 10, 11), (12,)]
Sampler = Callable[[Learner], list[Group]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_qwen3(tmp_path_factory.mktemp("model"))


def sampled(learner: Learner, off: float = 0.0) -> list[Group]:
    """A group with the log-probs of the learner's weights, `off` by so many nats, as its newest version."""

    def made(logprobs: list[tuple[float, ...]]) -> Group:
        turns = [turn(0, (1, 2), tokens, logprobs=own) for tokens, own in zip(TURNS, logprobs, strict=True)]
        return group_of([episode(m, [one], float(m % 2)) for m, one in enumerate(turns)])

    group = made([(-1.0,) * len(tokens) for tokens in TURNS])
    rows = group_rows(group, GRPO(), step_of=lambda _: 0, step_now=0, max_lag=0).rows
    found: list[tuple[float, ...]] = []
    for row in rows:
        with torch.no_grad():
            (pack,) = packs([[row]], 100)
            found.append(tuple((learner.model.logprobs(pack, temperature=1.0)[0] + off).tolist()))
    return [made(found)]


class Run(LoopScene):
    """The learner's loop with a real learner, and groups of `sampler` in the place of store and engines."""

    def __init__(
        self, folder: Path, model: Path, sampler: Sampler, alarms: dict[str, Any], steps: int, lr: float = 1e-3
    ) -> None:
        config = run_config(train=Train(warmup_steps=0, lr=lr, steps=steps, checkpoint_every=1000))
        self.config: RunConfig = config.model_copy(update={"alarms": Alarms.model_validate(alarms)})
        self.bounds, self.saved = list[int](), list[int]()
        learner = Learner(self.config.learner, model)
        store = SimpleNamespace(
            meta=lambda key: '["http://engine"]' if key == "engine_urls" else None,
            lineage=SimpleNamespace(still_leads=lambda: None),
            versions=SimpleNamespace(
                current_version=lambda: WeightVersion(version=1, step=0),
                step_of=lambda _: learner.step_index,
                is_undone=lambda _: False,
            ),
            metrics=SimpleNamespace(record=lambda kind, step, values: None),
            set_meta=lambda key, value: self.bounds.append(int(value)),
        )
        saved = self.saved

        class Noted(CheckpointWriter):
            async def start(self, version: WeightVersion) -> None:
                saved.append(version.step)

        super().__init__(folder, learner, store)
        self.path, self.torch, self.groups = Path("runs/run"), InlineTorch(), lambda: sampler(learner)
        self.writer = Noted

    def train(self) -> None:
        self.run(self.config)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.pushes.rows


def names(run: Run, at: int = -1) -> set[str]:
    return {alarm.name for alarm in raised(run.rows[at], run.config.alarms)}


def test_a_healthy_step_raises_none(tmp_path: Path, model: Path) -> None:
    run = Run(tmp_path, model, sampled, {}, 3)
    run.train()
    assert [row["alarms"] for row in run.rows] == [[], [], []]
    assert run.bounds == [4, 4, 4]


def test_an_engine_whose_logprobs_are_off_by_a_half_stops_the_run_which_is_saved(tmp_path: Path, model: Path) -> None:
    run = Run(tmp_path, model, lambda learner: sampled(learner, 0.5), {"actions": {"mismatch": "stop"}}, 5)
    typed = "agentrl train --resume runs/run --set alarms.actions.mismatch=warn"
    with pytest.raises(RunFailed, match=rf"step 1: mismatch_mean = 0\.5 .*alarms\.mismatch_above = 0\.2.*{typed}"):
        run.train()
    assert run.saved == [1] and len(run.rows) == 1


def test_the_same_engine_is_warned_of_by_default(tmp_path: Path, model: Path) -> None:
    run = Run(tmp_path, model, lambda learner: sampled(learner, 0.5), {}, 2)
    run.train()
    assert len(run.rows) == 2 and "mismatch_mean = 0.5" in run.rows[0]["alarms"][0]


def test_a_push_that_did_not_happen_is_seen_as_mismatch(tmp_path: Path, model: Path) -> None:
    """The engine says that it has the newest version, and goes on with weights of before."""
    old: list[list[Group]] = []

    def stale(learner: Learner) -> list[Group]:
        if not old:
            old.append(sampled(learner))
        return old[0]

    for sampler, seen in ((sampled, set[str]()), (stale, {"mismatch"})):
        run = Run(tmp_path, model, sampler, {"mismatch_above": 0.02}, 6, lr=3e-2)
        run.train()
        assert names(run, 0) == set() and names(run) & {"mismatch"} == seen


def test_an_entropy_that_collapses_is_seen(tmp_path: Path, model: Path) -> None:
    run = Run(tmp_path, model, sampled, {"entropy_below": 0.5}, 1)
    run.train()
    assert names(run) == set()
    collapsed = Run(tmp_path, model, sampled, {"entropy_below": 0.5}, 1)
    with torch.no_grad():
        for parameter in collapsed.learner.model.parameters():
            parameter.mul_(30.0)
    collapsed.train()
    assert "entropy" in names(collapsed)


@each_case(
    ("alarm", "metric", "wrong"),
    [("ess", "ess", 0.2), ("kl", "kl_k3", 0.4), ("clip", "clip_fraction", 0.6), ("non_finite", "loss", math.nan)],
)
def test_each_measure_has_its_alarm(alarm: str, metric: str, wrong: float) -> None:
    healthy = {"ess": 0.9, "kl_k3": 0.01, "clip_fraction": 0.1, "loss": 0.5, "mismatch_mean": None}
    assert raised(healthy, Alarms()) == []
    (found,) = raised({**healthy, metric: wrong}, Alarms())
    assert (found.name, found.action) == (alarm, "warn") and found.text.startswith(f"{metric} = ")


def test_the_lag_is_lowered_down_to_0_and_comes_back_after_calm_steps(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarms_of_run, "CALM_STEPS", 2)
    wrong = [True, True, True, False, True, False, False, False]
    faults = iter(wrong)
    alarms = {"actions": {"mismatch": "lower_lag"}}
    run = Run(tmp_path, model, lambda learner: sampled(learner, 0.5 if next(faults) else 0.0), alarms, len(wrong))
    run.train()
    assert run.bounds == [2, 1, 0, 0, 0, 0, 4, 4]
    assert [row["max_lag"] for row in run.rows] == [4, 2, 1, 0, 0, 0, 0, 4]
