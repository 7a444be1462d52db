"""The corrections of stale tokens by enumeration: bias and noise of the gradient that a group of two gives in
expectation under the policy that sampled it, in a problem whose policy decides when to stop."""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from each_case import each_case
from torch import Tensor

from agentrl.algos.algorithm import Outputs
from agentrl.algos.grpo import GRPO

from .test_credit import HORIZON, PATHS
from .test_ppo import ALIVE_PT, RETURN_P, exact_gradient, logprobs_of, tables

PAGE = (Path(__file__).parents[2] / "benchmarks" / "staleness.md").read_text()
PAIRS = list(itertools.product(range(len(PATHS)), repeat=2))
FIRST, SECOND = torch.tensor(PAIRS).T
UNCUT = 1e9
CORRECTIONS: dict[str, dict[str, Any]] = {
    'importance = "none"': {"importance": "none"},
    'importance = "token"': {},
    'importance_mode = "mask"': {"importance_mode": "mask"},
    "importance_bounds = [0, 1e9]": {"importance_bounds": (0.0, UNCUT)},
    'importance = "sequence"': {"importance": "sequence"},
    'importance = "sequence", importance_mode = "mask"': {"importance": "sequence", "importance_mode": "mask"},
    'importance = "sequence", importance_bounds = [0, 1e9]': {
        "importance": "sequence",
        "importance_bounds": (0.0, UNCUT),
    },
    'importance = "geometric"': {"importance": "geometric"},
    'reject = "token"': {"reject": "token"},
    'reject = "sequence"': {"reject": "sequence"},
    'reject = "geometric"': {"reject": "geometric"},
}
"""By its cell on the page, each with the settings that it leaves out at their defaults."""


@cache
def scores(lag: int) -> tuple[Tensor, Tensor, Tensor]:
    """(score of each action of each path [P, T, M], exact policy gradient [M], probability of each path when it was
    sampled [P])."""
    theta, older = tables(lag)
    logprobs_PT = logprobs_of(theta)
    of_each = [torch.autograd.grad(one, theta, retain_graph=True)[0].flatten() for one in logprobs_PT.flatten()]
    scores_PTM = torch.stack(of_each).reshape(len(PATHS), HORIZON, -1)
    return scores_PTM, exact_gradient(theta).flatten(), logprobs_of(older).sum(1).exp()


def error(lag: int, **settings: Any) -> tuple[float, float]:
    """(length of the expected gradient's error, standard deviation of a group's gradient), both over the length of the
    exact policy gradient. All groups of two are one step."""
    algo = GRPO.model_validate(settings)
    theta, older = tables(lag)
    scores_PTM, exact_M, mass_P = scores(lag)
    path_E = torch.stack([FIRST, SECOND], 1).flatten()  # of each episode, two a group
    other_E = torch.stack([SECOND, FIRST], 1).flatten()
    alive_ET = ALIVE_PT[path_E]
    episode_ET = torch.arange(len(path_E))[:, None].expand(-1, HORIZON)
    tokens = {
        "episode": episode_ET[alive_ET],
        "role": torch.zeros(int(alive_ET.sum()), dtype=torch.long),
        "turn": torch.arange(HORIZON).expand(len(path_E), -1)[alive_ET],
        "advantage": (RETURN_P[path_E] - RETURN_P[other_E])[:, None].expand(-1, HORIZON)[alive_ET],
        "proximal": logprobs_of(theta).detach()[path_E][alive_ET],
        "behaviour": logprobs_of(older).detach()[path_E][alive_ET],
        "weight": torch.ones(int(alive_ET.sum()), dtype=torch.float64),
    }
    tokens |= algo.advantages(tokens)
    now_K = tokens["proximal"].clone().requires_grad_()
    loss = algo.loss(tokens, Outputs(logprobs_K=now_K, entropy_K=now_K), step=0)
    weight_ET = torch.zeros(alive_ET.shape, dtype=torch.float64)
    weight_ET[alive_ET] = -torch.autograd.grad(loss.total, now_K)[0]
    gradient_EM = (weight_ET[..., None] * scores_PTM[path_E]).sum(1)
    gradient_GM = gradient_EM.reshape(len(PAIRS), 2, -1).mean(1)
    mass_G1 = (mass_P[FIRST] * mass_P[SECOND])[:, None]
    mean_M = (mass_G1 * gradient_GM).sum(0)
    noise = (mass_G1 * (gradient_GM - mean_M).square()).sum().sqrt()
    return float((mean_M - exact_M).norm() / exact_M.norm()), float(noise / exact_M.norm())


@each_case("lag", [0, 4, 8])
def test_weighing_whole_episodes_uncut_is_exact(lag: int) -> None:
    assert error(lag, importance="sequence", importance_bounds=(0.0, UNCUT))[0] < 1e-9


def test_each_weight_is_nearer_than_none_and_bounds_trade_bias_for_noise() -> None:
    """What the page says of them; also the proof that the test above can fail."""
    found = {name: error(8, **settings) for name, settings in CORRECTIONS.items()}
    for level in ("token", "sequence", "geometric"):
        assert 0.02 < found[f'importance = "{level}"'][0] < found['importance = "none"'][0] - 0.1
    uncut = found['importance = "sequence", importance_bounds = [0, 1e9]']
    truncated, masked = found['importance = "sequence"'], found['importance = "sequence", importance_mode = "mask"']
    assert uncut[0] < truncated[0] < masked[0]
    assert uncut[1] > truncated[1] > masked[1]
    assert all(error(0, **settings)[0] < 1e-9 for settings in CORRECTIONS.values()), "fresh tokens need no correction"


def test_the_table_of_the_page_is_computed() -> None:
    for name, settings in CORRECTIONS.items():
        (row,) = re.findall(rf"^\| `{re.escape(name)}` \| (.*) \|$", PAGE, re.M)
        expected = ["{:.3f} ± {:.2f}".format(*error(lag, **settings)) for lag in (0, 4, 8)]
        assert row.split(" | ") == expected, name
