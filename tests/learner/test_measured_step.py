"""A step's metrics: environments, lengths, clips by side, the device."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case

from agentrl.algos.cispo import CISPO
from agentrl.algos.grpo import GRPO
from agentrl.algos.pass_at_k import pass_all_k, pass_at_k
from agentrl.algos.token_metrics import Measures
from agentrl.config import Rollout, Train
from agentrl.learner import flops
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.environment_report import EnvironmentReport
from agentrl.learner.learner import Learner
from agentrl.learner.step_report import StepReport
from agentrl.records import Group, StopReason, Task

from .making import episode, group_of, random_group, run_config, tiny_qwen3, turn

STEP_OF = {1: 0, 2: 0}.__getitem__
SHORT = Rollout(max_context=30, max_tokens_per_turn=16)


@each_case(("n", "c"), [(1, 0), (4, 1), (5, 2), (6, 6), (6, 0)])
def test_pass_at_k_and_pass_all_k_are_shares_of_drawn_sets(n: int, c: int) -> None:
    for k in range(1, n + 1):
        drawn = list(itertools.combinations([True] * c + [False] * (n - c), k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, drawn)) / len(drawn))
        assert pass_all_k(n, c, k) == pytest.approx(sum(map(all, drawn)) / len(drawn))


def two_environments() -> list[Group]:
    """Of one environment four members, of which one stale, one failed; of another two."""
    first = [
        episode(0, [turn(0, (1, 2), (3, 4)), turn(1, (5,), (6,), parent=0)], 1.0),
        episode(1, [turn(0, (1, 2), (7,))], 0.0, stop=StopReason.TURN_LIMIT),
        episode(2, [turn(0, (1, 2), (8, 9, 10, 11), version=9)], 1.0),
        episode(3, [turn(0, (1, 2), (3,))], None, stop=StopReason.ENGINE_FAILED),
    ]
    second = [episode(m, [turn(0, (4,), (5,) * (m + 1))], float(m), group=2) for m in range(2)]
    other = dataclasses.replace(group_of(second, id=2), task=Task(index=1, env="test/other", seed=0))
    return [group_of(first), other]


def test_a_step_tells_its_environments_apart(qwen3_dir: Path) -> None:
    learner = Learner(run_config(rollout=SHORT).learner, qwen3_dir)
    learner.worker.step_index = 9  # version 1 is of step 9, version 9 of step 0
    report = learner.step(two_environments(), step_of={1: 9, 9: 0}.__getitem__)
    none, other = report.environments["test/none"], report.environments["test/other"]
    assert none.pass_at == pytest.approx({"1": 2 / 3, "2": 1.0})  # of three scored members two succeeded
    assert other.pass_at == pytest.approx({"1": 0.5, "2": 1.0})
    assert (none.limited, other.limited) == (0.25, 0.0)
    lengths = [(one.episodes, one.turns, one.tokens) for one in (none.played, none.trained, none.dropped)]
    assert lengths == [(4, 1.25, 2.25), (2, 1.5, 2.0), (2, 1.0, 2.5)]
    assert other.dropped.tokens is None
    spread = ((1 / 3) ** 0.5 + 0.5**0.5) / 2  # of 1, 0, 1 and of 0, 1
    assert report.group_spread == pytest.approx(spread)


def test_a_steps_measures_are_of_all_its_tokens_by_age_and_by_turn(qwen3_dir: Path) -> None:
    learner = Learner(run_config(algo=GRPO(kl_weight=0.1), rollout=SHORT).learner, qwen3_dir)
    learner.worker.step_index = 3
    report = learner.step([random_group(id, seed=id) for id in (1, 2)], step_of={1: 3, 2: 1}.__getitem__)
    assert report.measures is not None and report.measures.tokens == report.tokens_computed
    assert (report.measures.ess, report.measures.kl_k3) == pytest.approx((report.ess, report.kl_k3))
    assert report.measures.kl_reference == pytest.approx(0, abs=1e-6)  # the reference is the policy
    assert report.by_lag.keys() == {"0", "2_3"} and report.by_turn.keys() == {"0", "1", "2_3"}
    for parts in (report.by_lag, report.by_turn):
        assert sum(part.tokens for part in parts.values()) == report.tokens_computed
        entropy = sum(part.tokens * part.entropy for part in parts.values()) / report.tokens_computed
        assert entropy == pytest.approx(report.entropy)
    assert report.ratios["token"].n == report.tokens_computed
    assert report.ratios["sequence"].n == report.episodes


def test_clips_are_told_apart_by_side(qwen3_dir: Path) -> None:
    """CISPO cuts by the ratio to the behaviour policy, also in a step with one update."""
    tokens = [
        turn(0, (1, 2), (3, 4, 5), logprobs=(-40.0, -0.001, -0.001)),
        turn(0, (1, 2), (6,), logprobs=(-40.0,)),
    ]
    group = group_of([episode(m, [one], float(m)) for m, one in enumerate(tokens)])
    algo = CISPO(clip_low=0.2, clip_high=0.2)
    report = Learner(run_config(algo=algo, rollout=SHORT).learner, qwen3_dir).step([group], step_of=STEP_OF)
    assert report.measures is not None
    assert (report.measures.clip_low, report.measures.clip_high) == (0.5, 0.5)


def test_a_clip_from_the_behaviour_policy_has_the_side_of_that_ratio(qwen3_dir: Path) -> None:
    """With one update a step the ratio to the step's start is 1, and has no side. The first member has a negative
    advantage: cut are its two tokens that fell, not the one that rose. The second one has a positive: it rose."""
    tokens = [
        turn(0, (1, 2), (3, 4, 5), logprobs=(-40.0, -0.001, -0.001)),
        turn(0, (1, 2), (6,), logprobs=(-40.0,)),
    ]
    group = group_of([episode(m, [one], float(m)) for m, one in enumerate(tokens)])
    algo = GRPO(clip_from="behaviour")
    report = Learner(run_config(algo=algo, rollout=SHORT).learner, qwen3_dir).step([group], step_of=STEP_OF)
    assert report.measures is not None and report.clip_fraction == 0.75
    assert (report.measures.clip_low, report.measures.clip_high) == (0.5, 0.25)


def test_repeated_epochs_count_a_sequence_once(qwen3_dir: Path) -> None:
    groups = [random_group(1, seed=1)]
    reports = [
        Learner(run_config(train=Train(warmup_steps=0, epochs=epochs), rollout=SHORT).learner, qwen3_dir).step(
            groups, step_of=STEP_OF
        )
        for epochs in (1, 2)
    ]
    assert reports[0].ratios["sequence"].ess == pytest.approx(reports[1].ratios["sequence"].ess, rel=1e-4)
    assert reports[0].ratios["token"].n == reports[1].ratios["token"].n


def test_operations_are_those_that_torch_counts(tmp_path: Path) -> None:
    """One row alone, forward and backward, on a model large enough for what is not counted to be small."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    from agentrl.learner.data.batch import group_rows
    from agentrl.learner.model.policy import PolicyModel

    model = PolicyModel(tiny_qwen3(tmp_path / "model", tie=False, vocab=400))
    member = episode(0, [turn(0, tuple(range(20)), tuple(range(12)))], 1.0)
    rows = group_rows(group_of([member]), GRPO(baseline="none"), step_of=STEP_OF, step_now=0, max_lag=0).rows
    (pack,) = packs([rows], 100)

    class Counter(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            count = flop_registry.get(func._overloadpacket)
            self.total += 0 if count is None else count(*args, **(kwargs or {}), out_val=out)
            return out

    with Counter() as counter:
        model.logprobs(pack, temperature=1.0)[0].sum().backward()
    # Its logits are kept, so that the backward pass computes nothing again.
    assert flops.operations(model.module, pack) == pytest.approx(counter.total, rel=0.15)


def test_the_share_of_a_peak_is_given_only_where_the_peak_is_known(
    qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [random_group(1, seed=1)]
    unknown = Learner(run_config(rollout=SHORT).learner, qwen3_dir).step(groups, step_of=STEP_OF).use
    assert unknown.mfu is None and unknown.tflops > 0 and unknown.peak_memory_mb > 50
    assert flops.peak_of(torch.device("cpu"), torch.bfloat16) is None
    monkeypatch.setattr(flops, "peak_of", lambda *_: 2.0)
    known = Learner(run_config(rollout=SHORT).learner, qwen3_dir).step(groups, step_of=STEP_OF).use
    assert known.mfu == known.tflops / 2


def test_the_page_explains_every_metric() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "metrics.md").read_text()
    kinds = (StepReport, Measures, EnvironmentReport, flops.Use)
    named = {field.name for kind in kinds for field in dataclasses.fields(kind)}
    plain = {"step", "tokens"}
    assert not [name for name in sorted(named - plain) if f"`{name}`" not in page]
