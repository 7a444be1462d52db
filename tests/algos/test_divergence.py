"""Penalties on leaving a reference or a teacher, against exact gradients where the policy decides when to stop.

The problem is that of `test_ppo`: a path is an episode, a turn is one token. Estimates are those of whole objects:
`prepare`, `advantages` and `loss`, of a step that is one path (no baseline), or two.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from each_case import each_case
from pydantic import ValidationError
from torch import Tensor

from agentrl.algos.algorithm import Algorithm, Outputs, Siblings
from agentrl.algos.grpo import GRPO
from agentrl.algos.grpo_variants import Distil
from agentrl.algos.kl_penalty import kl_penalty
from agentrl.config import algorithm
from agentrl.registry import ids

from .test_credit import HORIZON, PATHS
from .test_ppo import ALIVE_PT, LENGTH_P, OUTCOME_P, RETURN_P, REWARDS_PT, any_values, logprobs_of, tables

THETA = tables(0)[0]
OTHER = torch.randn(THETA.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
LOGPROB_PT, OTHER_PT = logprobs_of(THETA), logprobs_of(OTHER)
MASS_P = LOGPROB_PT.sum(1).exp().detach()
EXACT_RETURN = torch.autograd.grad((LOGPROB_PT.sum(1).exp() * RETURN_P).sum(), THETA, retain_graph=True)[0]


def exact_of_episodes() -> Tensor:
    """The gradient of KL(episodes of the policy || episodes of the other)."""
    total_P = LOGPROB_PT.sum(1)
    return torch.autograd.grad((total_P.exp() * (total_P - OTHER_PT.sum(1))).sum(), THETA, retain_graph=True)[0]


def exact_of_states() -> Tensor:
    """The gradient of the sum over states of d(s) KL(pi(.|s) || other(.|s)), d held fixed: by prefixes of paths."""
    policy, other = torch.log_softmax(THETA, -1), torch.log_softmax(OTHER, -1)
    total = torch.zeros((), dtype=torch.float64)
    for t in range(HORIZON):
        for prefix in {path[:t] for path in PATHS if len(path) > t}:
            visits = sum(MASS_P[at] for at, path in enumerate(PATHS) if path[:t] == prefix and len(path) > t)
            state = (t, prefix[-1] if t else 0)
            total = total + visits * (policy[state].exp() * (policy[state] - other[state])).sum()
    return torch.autograd.grad(total, THETA)[0]


def scored(algo: Algorithm, places: list[int], name: str) -> Tensor:
    """What the loss multiplies each action's score with, in a step of these paths: [P, T], other paths 0. The other
    model's log-probs are in the column `name`."""
    alive_PT = torch.zeros_like(ALIVE_PT)
    alive_PT[places] = ALIVE_PT[places]
    judged_P = torch.zeros(len(PATHS), dtype=torch.bool)
    judged_P[places] = True
    prepared = algo.prepare(
        Siblings(
            outcomes_G=OUTCOME_P,
            rewards_GT=REWARDS_PT,
            turns_G=LENGTH_P,
            scored_G=judged_P,
            judges_G=judged_P,
            streams_KGT=REWARDS_PT[None],
            weights_K=torch.ones(1),
            states_GT=torch.full(REWARDS_PT.shape, -1),
        )
    )
    tokens: dict[str, Any] = {
        "episode": torch.arange(len(PATHS))[:, None].expand(-1, HORIZON)[alive_PT],
        "role": torch.zeros(int(alive_PT.sum()), dtype=torch.long),
        "turn": torch.arange(HORIZON).expand(len(PATHS), -1)[alive_PT],
        "lag": torch.zeros(int(alive_PT.sum()), dtype=torch.long),
        "values": any_values()[alive_PT],
        "proximal": LOGPROB_PT.detach()[alive_PT],
        "behaviour": LOGPROB_PT.detach()[alive_PT],
        "weight": torch.ones(int(alive_PT.sum()), dtype=torch.float64),
        name: OTHER_PT[alive_PT],
        **{column: of_PT.expand(-1, HORIZON)[alive_PT] for column, of_PT in prepared.items()},
    }
    tokens |= algo.advantages(tokens)
    now_K = tokens["proximal"].clone().requires_grad_()
    loss = algo.loss(tokens, Outputs(logprobs_K=now_K, entropy_K=now_K, values_K=tokens["values"]), step=99)
    found_PT = torch.zeros(len(PATHS), HORIZON, dtype=torch.float64)
    found_PT[alive_PT] = -torch.autograd.grad(loss.total, now_K)[0]
    return found_PT


def expected(algo: Algorithm, name: str) -> Tensor:
    """The expected gradient of a step of one episode."""
    weight_PT = torch.stack([scored(algo, [at], name)[at] for at in range(len(PATHS))])
    return torch.autograd.grad((MASS_P[:, None] * weight_PT * LOGPROB_PT).sum(), THETA, retain_graph=True)[0]


def made(kind: str, **settings: Any) -> Algorithm:
    of = algorithm(kind)
    return of.model_validate({"baseline": "none", **settings} if "baseline" in of.model_fields else settings)


REFERENCE = {"kl_weight": 0.7, "kl_form": "reward"}
TEACHER = {"distil_weight": 0.7, "distil_level": "episode", "teacher": "t"}


@each_case("kind", ["grpo", "ppo", "gspo", "cispo", "distil"])
@each_case(("name", "settings"), [("reference", REFERENCE), ("teacher", TEACHER)])
def test_a_charged_episode_follows_the_exact_gradient_of_reward_less_divergence(
    kind: str, name: str, settings: dict[str, Any]
) -> None:
    rewarded = 0.0 if kind == "distil" else 1.0
    if kind == "distil" and name == "reference":
        settings = {**settings, "distil_weight": 0.0}
    found = expected(made(kind, **settings), name)
    exact = rewarded * EXACT_RETURN - 0.7 * exact_of_episodes()
    torch.testing.assert_close(found, exact, atol=1e-9, rtol=1e-9)
    assert exact_of_episodes().norm() > 0.3


@each_case("kind", ["grpo", "ppo", "gspo", "cispo", "distil"])
def test_a_charged_token_follows_the_divergence_at_each_state(kind: str) -> None:
    found = expected(made(kind, distil_weight=0.7, teacher="t"), "teacher")
    exact = (0.0 if kind == "distil" else 1.0) * EXACT_RETURN - 0.7 * exact_of_states()
    torch.testing.assert_close(found, exact, atol=1e-9, rtol=1e-9)


def cosine(level: str) -> float:
    """Between the expected gradient of distillation at a level and the exact one of the episodes' divergence."""
    found = expected(made("distil", distil_level=level, teacher="t"), "teacher")
    return float(torch.nn.functional.cosine_similarity(-found.flatten(), exact_of_episodes().flatten(), dim=0))


def spread(level: str) -> float:
    """The summed variance of the gradient of one sampled episode at a level."""
    algo = made("distil", distil_level=level, teacher="t")
    each = []
    for at in range(len(PATHS)):
        weight_T = scored(algo, [at], "teacher")[at]
        each.append(torch.autograd.grad((weight_T * LOGPROB_PT[at]).sum(), THETA, retain_graph=True)[0])
    each_P = torch.stack(each)
    mean = (MASS_P[:, None, None, None] * each_P).sum(0)
    return float((MASS_P[:, None, None, None] * (each_P - mean).square()).sum())


def test_the_two_levels_differ_as_their_docstring_says() -> None:
    assert cosine("episode") == pytest.approx(1)
    assert 0.5 < cosine("token") < 0.99
    assert spread("token") < 0.7 * spread("episode")


def test_the_baseline_of_an_episodes_charge_leaves_its_gradient_exact() -> None:
    """By enumeration of all steps of two episodes; of two equal ones each is the other's baseline."""
    algo = made("distil", distil_level="episode", teacher="t")
    weight_PT = torch.zeros(len(PATHS), HORIZON, dtype=torch.float64)
    for i, j in itertools.combinations(range(len(PATHS)), 2):
        weight_PT += MASS_P[i] * MASS_P[j] * scored(algo, [i, j], "teacher")
    estimate = torch.autograd.grad((weight_PT * LOGPROB_PT).sum(), THETA, retain_graph=True)[0]
    torch.testing.assert_close(estimate, -exact_of_episodes(), atol=1e-9, rtol=1e-9)
    alone = torch.stack([scored(algo, [at], "teacher")[at] for at in range(len(PATHS))])
    assert (scored(algo, [0, 12], "teacher") - alone)[[0, 12]].abs().max() > 0.1  # there is one


@each_case("kind", ids("algorithms"))
@each_case(("name", "settings"), [("reference", REFERENCE), ("teacher", TEACHER)])
def test_every_kind_charges(kind: str, name: str, settings: dict[str, Any]) -> None:
    """With half of the weight, half of the difference that the whole makes."""
    nothing: dict[str, Any] = {"reward_weight": 1.0, "distil_weight": 0.0}
    half = {**settings, next(iter(settings)): 0.35}
    places = [3, 5, 7]
    none, some, whole = (
        scored(algorithm(kind).model_validate({**nothing, **given}), places, name) for given in ({}, half, settings)
    )
    torch.testing.assert_close(whole - none, 2 * (some - none), atol=1e-9, rtol=1e-7)
    assert (whole - none).abs().max() > 0.05


def test_a_token_that_the_teacher_told_nothing_of_costs_nothing() -> None:
    algo = Distil(distil_level="episode", teacher="t", reward_weight=0.0)
    tokens = {
        "episode": torch.tensor([1, 1, 1]),
        "role": torch.zeros(3, dtype=torch.long),
        "turn": torch.zeros(3, dtype=torch.long),
        "proximal": torch.tensor([-1.0, -1.0, -1.0]),
        "behaviour": torch.tensor([-1.0, -1.0, -1.0]),
        "teacher": torch.tensor([-2.0, 1.0, -1.5]),
        "weight": torch.full((3,), 1 / 3),
        "advantage": torch.ones(3),
    }
    assert algo.advantages(tokens)["charge"].tolist() == pytest.approx([1.5, 0.5, 0.5])
    now = tokens["proximal"].clone().requires_grad_()
    loss = Distil(teacher="t").loss(tokens, Outputs(logprobs_K=now, entropy_K=now), step=0)
    assert torch.autograd.grad(loss.total, now)[0].tolist() == pytest.approx([1 / 3, 0.0, 0.5 / 3])
    assert float(loss.gauges["kl_teacher"]) == pytest.approx(0.5)
    assert float(loss.gauges["untaught"]) == pytest.approx(1 / 3)


def test_k1_keeps_the_gradient_of_the_divergence_after_the_policy_left_the_proximal_one() -> None:
    proximal = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    reference = torch.tensor([0.2, 0.5, 0.05, 0.25], dtype=torch.float64)
    logits = (proximal.log() + torch.tensor([0.4, -0.3, 0.2, 0.5], dtype=torch.float64)).requires_grad_()
    logprobs = torch.log_softmax(logits, -1)
    divergence = (logprobs.exp() * (logprobs - reference.log())).sum()
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)

    def found(gradient: Any) -> Tensor:
        """Its mean over tokens of the proximal policy."""
        penalty = kl_penalty(logprobs, reference.log(), gradient, proximal.log())
        return torch.autograd.grad((proximal * penalty).sum(), logits, retain_graph=True)[0]

    torch.testing.assert_close(found("k1"), exact, atol=1e-12, rtol=1e-12)
    assert (found("k2") - exact).abs().max() > 0.02
    values = [kl_penalty(logprobs, reference.log(), kind, proximal.log()).detach() for kind in ("k1", "k2", "k3")]
    torch.testing.assert_close(values[0], values[2])
    torch.testing.assert_close(values[1], values[2])


@each_case(
    ("settings", "wrong"),
    [
        ({"reference": 5}, "give kl_weight"),
        ({"teacher": "t"}, "give distil_weight"),
        ({"teacher": 2}, "give distil_weight"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(settings: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValidationError, match=wrong):
        GRPO.model_validate(settings)
