"""What an evaluation says: pass@k over tasks with its interval, and which sets are measured during training."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from each_case import each_case
from store.play import START

from agentrl.algos.pass_at_k import pass_all, pass_at, wilson
from agentrl.config import parse
from agentrl.errors import ConfigError
from agentrl.records import StopReason
from agentrl.run.evaluation import held_out
from agentrl.run.reporting import report, status
from agentrl.run.run_folder import RunDir
from agentrl.store import Ending, RunStore
from agentrl.view.opened_runs import OpenedRun
from agentrl.view.run_gauges import _samples  # pyright: ignore[reportPrivateUsage]

RUN = {"model": "m", "env": {"id": "e"}, "eval": {"samples": 2, "sets": [{"name": "easy", "n": 3}, {"name": "hard"}]}}


@each_case(
    ("share", "n", "low", "high"),
    [(0.5, 10, 0.2366, 0.7634), (0.0, 10, 0.0, 0.2775), (0.9, 10, 0.5958, 0.9821), (0.2, 100, 0.1334, 0.2888)],
)
def test_wilsons_interval_is_that_of_the_tables(share: float, n: int, low: float, high: float) -> None:
    assert wilson(share, n) == pytest.approx((low, high), abs=1e-4)


def test_the_interval_holds_the_true_pass_at_k_as_often_as_it_says() -> None:
    """100 tasks of unlike difficulty, drawn anew 300 times: the probability of a task is uniform in [0, 1]. A count is
    whole: of 100 yes or no of mean 0.8 Wilson's interval holds it 94 times of 100."""
    rng = random.Random(3)
    true = {"1": 1 / 2, "2": 2 / 3, "4": 4 / 5}
    held = dict.fromkeys(true, 0)
    for _ in range(300):
        chances = [rng.random() for _ in range(100)]
        found = pass_at([(4, sum(rng.random() < chance for _ in range(4))) for chance in chances])
        assert found.keys() == true.keys()
        for k, value in true.items():
            held[k] += found[k]["low"] <= value <= found[k]["high"]
    assert all(n >= 0.92 * 300 for n in held.values()), held


def test_a_task_counts_for_k_if_so_many_episodes_of_it_were_scored() -> None:
    found = pass_at([(4, 1), (3, 3), (1, 0)])
    assert {k: one["value"] for k, one in found.items()} == pytest.approx({"1": 5 / 12, "2": 3 / 4, "4": 1.0})
    assert pass_at([]) == {} == pass_all([(1, 1)])
    every = pass_all([(4, 1), (3, 3), (1, 0), (4, 4)])
    assert {k: one["value"] for k, one in every.items()} == pytest.approx({"2": (0 + 1 + 1) / 3, "4": 1 / 2})
    assert (every["4"]["low"], every["4"]["high"]) == pytest.approx(wilson(1 / 2, 2))


def test_pass_all_is_unbiased_for_the_chance_that_all_attempts_of_a_task_succeed() -> None:
    """2000 tasks whose probability p is uniform in [0, 1]: the mean of p^2 is 1/3, that of p^4 1/5."""
    rng = random.Random(5)
    chances = [rng.random() for _ in range(2000)]
    estimates = pass_all([(6, sum(rng.random() < chance for _ in range(6))) for chance in chances])
    assert estimates["2"]["value"] == pytest.approx(1 / 3, abs=0.025)
    assert estimates["4"]["value"] == pytest.approx(1 / 5, abs=0.025)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Three tasks of two episodes: both solved, one solved, one failed by an engine and one not solved."""
    run = RunDir.create(tmp_path / "run", parse(RUN))
    config = run.config()
    with RunStore.open(run.store_path) as store:
        store.versions.confirm_version(store.versions.mint_version(0))
        held_out.schedule(store, config, config.eval.sets[0], "before", 3)
        ends = [1.0, 1.0, 1.0, 0.0, None, 0.0]
        for claim, outcome in zip(store.leases.claim("w", 9, lease_s=1e9), ends, strict=True):
            store.journal.begin(claim.episode_id, claim.fence, START)
            reason = StopReason.ENGINE_FAILED if outcome is None else StopReason.TURN_LIMIT
            success = None if outcome is None else bool(outcome)
            store.journal.finish(
                claim.episode_id, claim.fence, Ending(stop_reason=reason, outcome=outcome, success=success)
            )
    return run


def test_an_evaluation_plays_each_task_so_often_and_all_who_report_it_have_pass_at_k(run: RunDir) -> None:
    with RunStore.read(run.store_path) as store:
        assert sum(store.groups.counts("eval:easy:before").values()) == 3, "a group is a task"
        result = held_out.result(store, "easy", "eval:easy:before")
        ((step, same),) = report.measured(store, "easy")
    assert result is not None and (step, same) == (0, result)
    assert (result.success, result.n, result.failed) == (3 / 5, 5, 1)
    low, high = wilson(1 / 2, 3)
    assert result.pass_at["1"] == pytest.approx({"value": 1 / 2, "low": low, "high": high})
    assert result.pass_at["2"]["value"] == 1.0 and result.pass_at.keys() == {"1", "2"}
    assert result.pass_all["2"]["value"] == 0.5 and result.pass_all.keys() == {"2"}, "the third task has one episode"
    now = status.status(run)
    assert now["held_out"] == {0: 3 / 5} and now["pass_at"] == {"easy": {"step": 0, **result.pass_at}}
    said = f"held-out  easy at 0: pass@1 0.50 [{low:.2f}, {high:.2f}], pass@2 1.00 [0.34, 1.00]"
    assert said in list(status.lines(json.loads(json.dumps(now))))
    labels = {"set": "easy", "k": "2", "bound": "value"}
    assert ("agentrl_held_out_pass_at", labels, 1.0) in list(_samples(OpenedRun("run", run), 0.0))


def test_the_sets_during_training_are_those_that_are_named() -> None:
    config = parse(RUN)
    assert [one.name for one in config.eval.sets_during] == ["easy"]
    both = parse({**RUN, "eval": {**RUN["eval"], "during": ["hard", "easy"]}})  # type: ignore[dict-item]
    assert [one.name for one in both.eval.sets_during] == ["easy", "hard"]
    with pytest.raises(ConfigError, match=r"eval\.during = 'other': no held-out set of that name: give some of easy"):
        parse({**RUN, "eval": {**RUN["eval"], "during": ["other"]}})  # type: ignore[dict-item]
