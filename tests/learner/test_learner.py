"""The learner against a second implementation: one row at a time, transformers' own attention, the loss spelt out."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from each_case import each_case
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from agentrl.algos.grpo import GRPO
from agentrl.config import BufferSettings, Rollout, RunConfig, Train
from agentrl.errors import ConfigError
from agentrl.learner.learner import Diverged, Learner
from agentrl.records import Group, StopReason, VersionSpan

from .making import episode, group_of, random_group, run_config, turn

SHORT = Rollout(max_context=30, max_tokens_per_turn=16)
STEP_OF = {1: 0, 2: 0}.__getitem__


def row_by_row(folder: Path, groups: list[Group], config: RunConfig) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one update without trees, packs or any code under test."""
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    algo, temperature = config.algo, config.rollout.temperature
    terms: list[tuple[int, torch.Tensor]] = []
    for group in groups:
        members = [member for member in group.trajectories if member.scored]
        for i, member in enumerate(members):
            others = [other for j, other in enumerate(members) if j != i]
            if not others:
                continue
            ids: list[int] = []
            places: list[tuple[int, int]] = []
            for t, each in enumerate(member.turns):
                ids += each.prompt_ids
                places += [(t, len(ids) + k) for k in range(len(each.token_ids))]
                ids += each.token_ids
            logprobs = torch.log_softmax(module(torch.tensor([ids])).logits[0] / temperature, -1)
            behaviour = [value for each in member.turns for value in each.logprobs]
            for (t, place), sampled_at in zip(places, behaviour, strict=True):
                to_go = algo.process_weight * sum(member.rewards[t:])
                base = sum(algo.process_weight * sum(other.rewards[t:]) for other in others) / len(others)
                outcome = member.outcome - sum(other.outcome for other in others) / len(others)
                logprob = logprobs[place - 1, ids[place]]
                now = float(logprob.detach())
                weight = (
                    min(algo.importance_bounds[1], math.exp(now - sampled_at)) if algo.importance == "token" else 1.0
                )
                ratio = (logprob - now).exp()
                entropy = -(logprobs[place - 1].exp() * logprobs[place - 1]).sum()
                gap = now - logprob  # the reference is the initial policy
                k3 = gap.exp() - gap - 1
                term = weight * (-ratio * (outcome + to_go - base) + algo.kl_weight * k3)
                terms.append((member.episode_id, term - algo.entropy_weight * entropy))
    lengths = {id: sum(1 for owner, _ in terms if owner == id) for id, _ in terms}
    share = {
        id: 1 / len(terms) if algo.normalise == "token" else 1 / (length * len(lengths))
        for id, length in lengths.items()
    }
    loss = torch.stack([share[id] * term for id, term in terms]).sum()
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def tree_gradients(
    folder: Path, groups: list[Group], config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and unclipped gradients of the learner's own first update."""
    learner = Learner(config.learner, folder)
    gradients: dict[str, torch.Tensor] = {}

    def keep() -> None:
        for name, parameter in learner.model.module.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.clone()

    monkeypatch.setattr(learner.optimizer, "step", keep)
    report = learner.step(groups, step_of=STEP_OF)
    assert report.loss is not None
    return report.loss, gradients


@pytest.mark.medium
@each_case(
    "algo",
    [
        GRPO(),
        GRPO(normalise="sequence", importance="none", process_weight=0.0),
        GRPO(kl_weight=0.1, entropy_weight=0.05, importance_bounds=(0.0, 1.2)),
    ],
)
@each_case("budget", [30, 4096])
def test_trees_train_as_rows(qwen3_dir: Path, algo: GRPO, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [random_group(id, seed=id + 10) for id in range(1, 5)]
    config = run_config(
        algo=algo,
        train=Train(tokens_per_batch=budget, grad_clip=1e9),
        rollout=Rollout(temperature=1.3, max_context=budget, max_tokens_per_turn=16),
    )
    loss, gradients = tree_gradients(qwen3_dir, groups, config, monkeypatch)
    expected_loss, expected = row_by_row(qwen3_dir, groups, config)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-5)
    assert max(float(gradient.abs().max()) for gradient in expected.values()) > 1e-2  # the comparison can fail


@pytest.mark.slow
@pytest.mark.compiler
def test_compiled_layers_train_as_rows_of_any_length(qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = run_config(train=Train(tokens_per_batch=30, grad_clip=1e9, compile=True), rollout=SHORT)
    compiled: list[int] = []
    for groups in ([random_group(1, seed=11)], [random_group(id, seed=id + 20) for id in range(2, 5)]):
        loss, gradients = tree_gradients(qwen3_dir, groups, config, monkeypatch)
        expected_loss, expected = row_by_row(qwen3_dir, groups, config)
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-5)
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[0] > 0
    assert compiled[1] == compiled[0]  # other lengths, the same code


def test_compiling_without_a_compiler_says_what_to_install(qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"train\.compile.*'no-such-compiler': install it, or give false"):
        Learner(run_config(train=Train(compile=True)).learner, qwen3_dir)


# --- what it learns -----------------------------------------------------------------------------------------------


def sequence_logprob(learner: Learner, prompt: list[int], answer: list[int]) -> float:
    with torch.no_grad():
        learner.model.module.set_attn_implementation("eager")
        logprobs = torch.log_softmax(learner.model.module(torch.tensor([prompt + answer])).logits[0], -1)
    learner.model.module.set_attn_implementation("agentrl_tree")
    return sum(float(logprobs[len(prompt) + k - 1, token]) for k, token in enumerate(answer))


PROMPT, GOOD, BAD = [1, 2, 3], [4, 5, 6], [4, 7, 8]


def bandit(learner: Learner, *, rewards: tuple[float, float] = (1.0, 0.0)) -> Group:
    """Two arms that share their first token, with the log-probs an engine would return."""

    def logprobs(answer: list[int]) -> list[float]:
        return [sequence_logprob(learner, PROMPT + answer[:k], [token]) for k, token in enumerate(answer)]

    return group_of(
        [
            episode(0, [turn(0, PROMPT, GOOD, logprobs=logprobs(GOOD))], rewards[0]),
            episode(1, [turn(0, PROMPT, BAD, logprobs=logprobs(BAD))], rewards[1]),
        ]
    )


@pytest.mark.medium
def test_the_rewarded_sequence_becomes_likely(qwen3_dir: Path) -> None:
    learner = Learner(run_config(train=Train(lr=1e-2, warmup_steps=0)).learner, qwen3_dir)
    before = sequence_logprob(learner, PROMPT, GOOD)
    losing = sequence_logprob(learner, PROMPT, BAD)
    for _ in range(20):
        now = learner.step_index
        report = learner.step([bandit(learner)], step_of=lambda version, now=now: now)
        assert report.updated
    assert sequence_logprob(learner, PROMPT, GOOD) > before + 2
    assert sequence_logprob(learner, PROMPT, BAD) < losing - 2


def test_the_report_of_an_on_policy_step(qwen3_dir: Path) -> None:
    learner = Learner(run_config(train=Train(lr=1e-3, warmup_steps=3)).learner, qwen3_dir)
    report = learner.step([bandit(learner, rewards=(2.0, 1.0))], step_of=STEP_OF)
    assert (report.step, learner.step_index, learner.trained) == (1, 1, [(100, 101)])
    assert report.lr == pytest.approx(1e-3 / 4)
    assert report.ess == pytest.approx(1, abs=1e-5)
    assert report.mismatch_max == pytest.approx(0, abs=1e-5)
    assert report.kl_k1 == pytest.approx(0, abs=1e-5)
    assert (report.truncated, report.clip_fraction) == (0, 0)
    assert report.loss == pytest.approx(0, abs=1e-5)  # advantages 1 and -1, ratios 1
    assert (report.advantage_mean, report.advantage_std) == (0, 1)
    assert (report.outcome_mean, report.reward_mean, report.success_mean) == (1.5, 1.5, 1.0)
    assert (report.group_count, report.episodes, report.groups_without_signal) == (1, 2, 0)
    assert (report.tokens_scored, report.tokens_computed) == (6, 6)
    assert (report.tokens_row, report.tokens_distinct) == (12, 8)  # 3 + 1 shared, 2 + 2 apart
    assert (report.lag_mean, report.lag_max, report.tokens_stale, report.turns_cut) == (0, 0, 0, 0)
    assert report.entropy is not None and 0 < report.entropy < math.log(23)


def state_of(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.model.module.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_step_without_signal_leaves_the_weights_alone(qwen3_dir: Path) -> None:
    learner = Learner(run_config(train=Train(weight_decay=0.1)).learner, qwen3_dir)
    learner.step([bandit(learner)], step_of=STEP_OF)  # AdamW now has momentum that could move the weights
    before = state_of(learner)
    report = learner.step([bandit(learner, rewards=(1.0, 1.0))], step_of=STEP_OF)
    assert same(before, state_of(learner))
    assert (report.updated, report.loss, report.tokens_computed, report.tokens_scored) == (False, None, 0, 6)
    assert (report.groups_without_signal, learner.step_index) == (1, 2)
    learner.step([], step_of=STEP_OF)
    assert same(before, state_of(learner))


def test_groups_without_signal_count_in_the_normalisation(qwen3_dir: Path) -> None:
    """Leaving them out of the passes saves time; it must not change the loss."""
    config = run_config(train=Train(grad_clip=1e9))
    alone, beside = Learner(config.learner, qwen3_dir), Learner(config.learner, qwen3_dir)
    one = alone.step([bandit(alone)], step_of=STEP_OF)
    two = beside.step([bandit(beside), bandit(beside, rewards=(1.0, 1.0))], step_of=STEP_OF)
    assert one.grad_norm is not None and two.grad_norm is not None
    assert two.grad_norm == pytest.approx(one.grad_norm / 2, rel=1e-5)
    assert two.tokens_distinct == one.tokens_distinct


def test_law_3_a_failed_member_changes_nothing(qwen3_dir: Path) -> None:
    with_it, without = Learner(run_config().learner, qwen3_dir), Learner(run_config().learner, qwen3_dir)
    group = bandit(with_it)
    failed = episode(2, [turn(0, PROMPT, [9, 9])], 50.0, stop=StopReason.ENGINE_FAILED)
    report = with_it.step([group_of([*group.trajectories, failed])], step_of=STEP_OF)
    without.step([group], step_of=STEP_OF)
    assert same(state_of(with_it), state_of(without))
    assert (report.episodes, report.episodes_left_out) == (2, 1)


def test_law_5_stale_tokens_are_counted_and_not_trained(qwen3_dir: Path) -> None:
    learner = Learner(run_config(buffer=BufferSettings(max_lag=1)).learner, qwen3_dir)
    for _ in range(2):
        learner.step([], step_of=STEP_OF)
    before = state_of(learner)
    report = learner.step([bandit(learner)], step_of=STEP_OF)  # sampled at step 0, two steps ago
    assert (report.tokens_stale, report.tokens_scored, report.updated) == (6, 0, False)
    assert same(before, state_of(learner))


def test_off_policy_tokens_are_seen(qwen3_dir: Path) -> None:
    learner = Learner(run_config().learner, qwen3_dir)
    report = learner.step([random_group(1, seed=4)], step_of=STEP_OF)
    assert report.ess is not None and report.ess < 0.9
    assert report.kl_k3 is not None and report.kl_k3 > 0.01
    assert report.truncated is not None and report.truncated > 0


def test_the_mismatch_of_fresh_tokens_is_that_of_one_version_alone(qwen3_dir: Path) -> None:
    """Tokens after a swap, whose keys are older, and those of an abandoned future have lag 0 too, and numbers of
    their own."""
    learner = Learner(run_config().learner, qwen3_dir)
    good, bad = bandit(learner).trajectories
    (first,), (second,) = good.turns, bad.turns
    swapped = replace(
        first,
        spans=(VersionSpan(1, 0, 1), VersionSpan(2, 1, 3)),
        logprobs=(first.logprobs[0], *(value - 0.5 for value in first.logprobs[1:])),
    )
    abandoned = replace(second, spans=(VersionSpan(3, 0, 3),), logprobs=tuple(value - 2 for value in second.logprobs))
    group = group_of([replace(good, turns=(swapped,)), replace(bad, turns=(abandoned,))])
    report = learner.step([group], step_of=lambda _: 0, undone=lambda version: version == 3)
    assert report.lag_max == 0
    assert report.mismatch_max == pytest.approx(0, abs=1e-5)
    told = {name: (of.tokens, round(of.mean, 4)) for name, of in report.mismatch.items()}
    assert told == {"fresh": (1, 0), "mixed_kv": (2, 0.5), "undone": (3, 2)}


def test_several_updates_stay_near_the_policy_of_the_steps_start(qwen3_dir: Path) -> None:
    train = Train(lr=3e-2, warmup_steps=0, epochs=6)
    wide, narrow = (
        Learner(run_config(train=train, algo=GRPO(clip_low=clip, clip_high=clip)).learner, qwen3_dir)
        for clip in (1e6, 0.05)
    )
    moved: list[float] = []
    for learner in (wide, narrow):
        group = bandit(learner)
        before = sequence_logprob(learner, PROMPT, GOOD)
        report = learner.step([group], step_of=STEP_OF)
        moved.append(sequence_logprob(learner, PROMPT, GOOD) - before)
        assert (report.clip_fraction or 0) > 0 or learner is wide
    assert moved[0] > moved[1] > 0


def test_minibatches_update_once_each(qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(run_config(train=Train(minibatches=2)).learner, qwen3_dir)
    updates: list[int] = []
    step = learner.optimizer.step
    monkeypatch.setattr(learner.optimizer, "step", lambda: updates.append(1) or step())
    report = learner.step([random_group(id, seed=id) for id in range(1, 5)], step_of=STEP_OF)
    assert len(updates) == 2
    assert report.tokens_computed == report.tokens_scored


def test_training_is_deterministic_under_a_seed(qwen3_dir: Path) -> None:
    ends: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        learner = Learner(
            run_config(
                train=Train(minibatches=2, tokens_per_batch=64),
                seed=5,
                rollout=Rollout(max_context=64, max_tokens_per_turn=8),
            ).learner,
            qwen3_dir,
        )
        for step in range(3):
            learner.step([random_group(id, seed=10 * step + id) for id in range(4)], step_of=STEP_OF)
        ends.append(state_of(learner))
    assert same(*ends)


def poisoned(group: Group) -> Group:
    """What its engine said of a token makes loss and gradient NaN."""
    first, *others = group.trajectories
    (said,) = first.turns
    return replace(
        group, trajectories=(replace(first, turns=(replace(said, logprobs=(math.nan,) * len(said.logprobs)),)), *others)
    )


@pytest.mark.parametrize("minibatches", [1, 2])
def test_an_update_whose_gradient_is_not_finite_is_skipped_and_counted(qwen3_dir: Path, minibatches: int) -> None:
    """As if its groups had not been there; they count as trained."""
    ends = []
    for poison in (True, False):
        learner = Learner(run_config(train=Train(warmup_steps=3, minibatches=minibatches)).learner, qwen3_dir)
        group = bandit(learner)
        good, bad = [group] * (minibatches - 1), [poisoned(group)] * poison
        before = state_of(learner)
        report = learner.step([*good, *bad], step_of=STEP_OF)
        assert (report.skipped_updates, report.updated) == (int(poison), minibatches > 1)
        assert same(before, state_of(learner)) == (minibatches == 1)
        assert report.loss is None or math.isfinite(report.loss)
        assert learner.step_index == 1 and len(learner.trained) == 1
        assert sorted(set(learner.trained[0])) == sorted(
            {one.episode_id for g in (*good, *bad) for one in g.trajectories}
        )
        assert learner.step([group], step_of=STEP_OF).skipped_updates == 0
        ends.append(state_of(learner))
    assert same(*ends)


def test_updates_skipped_in_a_row_end_the_run_when_they_are_too_many(qwen3_dir: Path) -> None:
    learner = Learner(run_config(train=Train(max_skipped=2)).learner, qwen3_dir)
    group = bandit(learner)
    for bad in (True, True, False, True, True):
        learner.step([poisoned(group) if bad else group], step_of=lambda _: learner.step_index)
    before = state_of(learner)
    with pytest.raises(Diverged, match=r"step 6: .* 3 updates in a row .* train\.max_skipped = 2.* lower train\.lr"):
        learner.step([poisoned(group)], step_of=lambda _: learner.step_index)
    assert same(before, state_of(learner))
    assert learner.step_index == len(learner.trained) == 6  # to be saved: no resume takes these groups again
