"""MaxRL and discounts per turn against their exact gradients, by enumeration of all groups."""

from __future__ import annotations

import itertools

import pytest
import torch
from each_case import each_case
from torch import Tensor

from agentrl.algos.algorithm import Siblings
from agentrl.algos.grpo import GRPO
from agentrl.algos.grpo_variants import MaxRL

from .test_credit import ACTIONS, HORIZON, PATHS, logprob_grads, outcome, rewards


def parameters() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(HORIZON, ACTIONS, ACTIONS, generator=generator, dtype=torch.float64, requires_grad=True)


def siblings(outcomes: list[float], processes: list[list[float]]) -> Siblings:
    turns = [len(process) for process in processes]
    rewards_GT = torch.tensor([[*own, *[0.0] * (max(turns) - len(own))] for own in processes], dtype=torch.float64)
    scored_G = torch.ones(len(outcomes), dtype=torch.bool)
    return Siblings(
        outcomes_G=torch.tensor(outcomes, dtype=torch.float64),
        rewards_GT=rewards_GT,
        turns_G=torch.tensor(turns),
        scored_G=scored_G,
        judges_G=scored_G,
        streams_KGT=rewards_GT[None],
        weights_K=torch.ones(1, dtype=torch.float64),
    )


def expected(algo: GRPO, members: int, outcomes: list[float], processes: list[list[float]]) -> Tensor:
    """The exact expectation of a group's gradient, a mean over its members."""
    probability_P, scores = logprob_grads(parameters())
    probability = probability_P.detach().tolist()
    estimate = torch.zeros(HORIZON, ACTIONS, ACTIONS, dtype=torch.float64)
    for group in itertools.combinations_with_replacement(range(len(PATHS)), members):
        mass = float(len(set(itertools.permutations(group)))) / members
        for path in group:
            mass *= probability[path]
        found = algo.prepare(siblings([outcomes[path] for path in group], [processes[path] for path in group]))
        for advantage_T, path in zip(found["advantage"].tolist(), group, strict=True):
            for advantage, score in zip(advantage_T, scores[path], strict=False):
                estimate += mass * advantage * score
    return estimate


# --- the likelihood of success --------------------------------------------------------------------------------------

SUCCESS = [float(path[-1] == 1 and 2 not in path) for path in PATHS]
NONE = [[0.0] * len(path) for path in PATHS]


def truncated(terms: int) -> tuple[Tensor, Tensor]:
    """The gradient of the sum over k of pass@k / k up to k = `terms`, and that of log p."""
    theta = parameters()
    p = (logprob_grads(theta)[0] * torch.tensor(SUCCESS, dtype=torch.float64)).sum()
    objective = sum(((1 - (1 - p) ** k) / k for k in range(1, terms + 1)), torch.zeros((), dtype=torch.float64))
    of_sum = torch.autograd.grad(objective, theta, retain_graph=True)[0]
    return of_sum, torch.autograd.grad(p.log(), theta)[0]


@each_case(
    ("baseline", "members", "terms", "times"),
    [("group_mean", 3, 2, 1.0), ("none", 3, 3, 1.0), ("leave_one_out", 3, 2, 3 / 2), ("group_mean", 2, 1, 1.0)],
)
def test_maxrl_is_unbiased_for_the_first_terms_of_the_log_likelihood(
    baseline: str, members: int, terms: int, times: float
) -> None:
    estimate = expected(MaxRL.model_validate({"baseline": baseline}), members, SUCCESS, NONE)
    exact, _ = truncated(terms)
    torch.testing.assert_close(estimate, times * exact, atol=1e-12, rtol=1e-9)
    assert (exact - truncated(terms + 1)[0]).abs().max() > 1e-3  # another number of terms is told apart


def test_with_more_members_maxrl_comes_nearer_to_the_log_likelihood() -> None:
    _, of_log = truncated(1)
    gaps = [(expected(MaxRL(), n, SUCCESS, NONE) - of_log).norm() / of_log.norm() for n in (2, 3)]
    assert gaps[0] > gaps[1]


def test_by_hand_a_rare_success_counts_more() -> None:
    found = MaxRL().prepare(siblings([1.0, 0.0, 0.0, 0.0], [[0.0]] * 4))["advantage"]
    assert found.flatten().tolist() == [3.0, -1.0, -1.0, -1.0]
    for outcomes in ([0.0, 0.0], [-1.0, 0.5], [1.0, 1.0]):
        assert not MaxRL().prepare(siblings(outcomes, [[0.0]] * 2))["advantage"].any()


# --- discount per turn ----------------------------------------------------------------------------------------------


def discounted(path: int, t: int, discount: float) -> float:
    """The outcome and the rewards from turn t on."""
    own = rewards(PATHS[path])
    last = len(own) - 1
    later = sum(discount ** (u - t) * own[u] for u in range(t, len(own)))
    return 0.5 * later + discount ** (last - t) * outcome(PATHS[path])


@pytest.mark.parametrize("baseline", ["leave_one_out", "none"])
def test_each_turn_is_credited_without_bias_with_the_discounted_return_from_it_on(baseline: str) -> None:
    discount = 0.7
    algo = GRPO.model_validate({"baseline": baseline, "discount": discount, "process_weight": 0.5})
    estimate = expected(algo, 2, [outcome(path) for path in PATHS], [rewards(path) for path in PATHS])
    theta = parameters()
    probability_P, scores = logprob_grads(theta)
    exact = torch.zeros_like(estimate)
    for path, own in enumerate(scores):
        for t, score in enumerate(own):
            exact += float(probability_P[path].detach()) * discounted(path, t, discount) * score
    torch.testing.assert_close(estimate, exact, atol=1e-12, rtol=1e-9)
    returns_P = torch.tensor([discounted(path, 0, discount) for path in range(len(PATHS))], dtype=torch.float64)
    of_start = torch.autograd.grad((probability_P * returns_P).sum(), theta)[0]
    assert torch.nn.functional.cosine_similarity(estimate.flatten(), of_start.flatten(), dim=0) < 0.999
