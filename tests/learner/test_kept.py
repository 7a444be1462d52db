"""The learner computes log-probs over the set that a token was drawn from, as the engine did."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.algos.algorithm import Outputs
from agentrl.algos.grpo import GRPO
from agentrl.algos.kl_penalty import kl_penalty
from agentrl.engine.embedded.architecture import read_architecture
from agentrl.engine.embedded.batching import Batcher, BatchRequest, Emission, distribution
from agentrl.engine.embedded.model import EmbeddedModel, KVStore, read_weights
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.data.ragged import Ragged
from agentrl.learner.data.rows import Row
from agentrl.learner.model.policy import PolicyModel
from agentrl.records import SamplingParams
from agentrl.tokens import sampling_mask

from .making import VOCAB, episode, group_of, tiny_qwen3, turn
from .test_packing import row

STOP = 0


def rows_with_sets(seed: int) -> list[tuple[Row, list[list[int]]]]:
    """Rows that share beginnings, and a set for each of their scored tokens: short, long, or none."""
    rng = random.Random(seed)
    prompt = [rng.randrange(VOCAB) for _ in range(5)]
    made = []
    for member in range(6):
        tokens = prompt + [rng.randrange(3) for _ in range(rng.randint(2, 7))]
        sets = []
        for token in tokens[5:]:
            others = [id for id in range(VOCAB) if id != token]
            sets.append(rng.choice([[], [token], [token, *rng.sample(others, 4)], [token, *others[:-1]]]))
        plain = row(tokens, range(5, len(tokens)), episode=member)
        made.append((replace(plain, ragged={"kept": ragged(sets)}), sets))
    return made


def ragged(sets: Sequence[Sequence[int]]) -> Ragged:
    return Ragged.of([number for ids in sets for number in (sampling_mask.encode([ids]) if ids else (0,))])


def exact_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").double()


def over(logits_V: Tensor, ids: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Log-probs over a set, by the definition, and the set."""
    ids = list(ids) or list(range(VOCAB))
    return torch.log_softmax(logits_V[ids], -1), ids


@pytest.mark.parametrize("budget", [4096, 16])  # one tree, and several
def test_log_probs_entropy_and_gradients_are_those_over_the_kept_sets(budget: int, qwen3_dir: Path) -> None:
    made = sorted(rows_with_sets(3), key=lambda one: (*one[0].token_ids, math.inf))  # as they are laid and divided
    policy, oracle = PolicyModel(qwen3_dir), exact_model(qwen3_dir)
    laid = packs([[one for one, _ in made]], budget)
    outputs = [policy.logprobs(pack, temperature=0.7, entropy_grad=True) for pack in laid]
    logprobs_K, entropy_K = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    expected, spread = [], []
    for one, sets in made:
        logits_TV = oracle(torch.tensor([one.token_ids])).logits[0] / 0.7
        for place, ids in zip(one.place_S.tolist(), sets, strict=True):
            logprobs, ids = over(logits_TV[place - 1], ids)
            expected.append(logprobs[ids.index(one.token_ids[place])])
            spread.append(-(logprobs.exp() * logprobs).sum())
    torch.testing.assert_close(logprobs_K.double(), torch.stack(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_K.double(), torch.stack(spread), atol=1e-5, rtol=1e-5)
    for total in (
        logprobs_K.sum() - 0.3 * entropy_K.sum(),
        torch.stack(expected).sum() - 0.3 * torch.stack(spread).sum(),
    ):
        total.backward()
    for parameter, twin in zip(policy.parameters(), oracle.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad.double(), twin.grad, atol=1e-4, rtol=1e-4)


def test_a_token_that_is_too_old_takes_its_set_with_it() -> None:
    own = ragged([[1, 90], [], list(range(40)), [7]])
    left = own.only(torch.tensor([True, False, False, True]))
    assert left.head_K.tolist() == [2, 1] and left.numbers_M.tolist() == [1, 90, 7]
    middle = own.only(torch.tensor([False, True, True, False]))
    assert middle.head_K.tolist() == [0, -2]
    assert [t.tolist() for t in middle.sets()] == [[1] * 40, list(range(40))]


SAMPLINGS = [
    {"top_p": 0.6},
    {"top_k": 3, "temperature": 1.7},
    {"min_p": 0.2, "temperature": 0.5},
    {"top_p": 0.8, "top_k": 6, "min_p": 0.02},
    {"temperature": 1.4},
]


@each_case("settings", SAMPLINGS)
def test_the_ratio_is_1_for_tokens_that_the_same_weights_sampled(settings: dict[str, Any], qwen3_dir: Path) -> None:
    sampling = SamplingParams(max_tokens=12, **settings)
    architecture, emissions = read_architecture(qwen3_dir), list[Emission]()
    model = EmbeddedModel(architecture, read_weights(qwen3_dir), length=64)
    batcher = Batcher(model, KVStore(architecture, 4, 64), max_batch=4, seed=1)
    batcher.submit(BatchRequest(id="a", tokens=[5, 6, 7], sampling=sampling, sink=emissions.append))
    while batcher.busy:
        batcher.step()
    tokens, logprobs, sets = ([x for one in emissions for x in part(one)] for part in (_tokens, _logprobs, _sets))
    assert len(sets) == (len(tokens) if sampling.cuts else 0)
    sampled = turn(0, (5, 6, 7), tokens, logprobs=logprobs)
    sampled = replace(sampled, columns={"kept": sampling_mask.encode(sets)} if sampling.cuts else {})
    group = group_of([episode(0, [sampled], 1.0)])
    rows = group_rows(group, GRPO(baseline="none"), step_of=lambda _: 0, step_now=0, max_lag=0).rows
    (pack,) = packs([rows], 4096)
    learner, _ = PolicyModel(qwen3_dir).logprobs(pack, temperature=sampling.temperature)
    torch.testing.assert_close(learner, pack.columns["behaviour"], atol=5e-5, rtol=0)
    if sampling.cuts:  # the check sees a set that is lost
        whole, _ = PolicyModel(qwen3_dir).logprobs(replace(pack, ragged={}), temperature=sampling.temperature)
        assert float((whole - pack.columns["behaviour"]).abs().max()) > 0.01


def _tokens(one: Emission) -> list[int]:
    return one.token_ids


def _logprobs(one: Emission) -> list[float]:
    return one.logprobs


def _sets(one: Emission) -> list[list[int]]:
    return one.kept


@pytest.fixture(scope="module")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("small"), vocab=6, seed=4)


PROMPT = (3, 1)
NUCLEUS = SamplingParams(max_tokens=3, top_p=0.8, temperature=1.2)


def played(model: Any) -> list[tuple[tuple[int, ...], list[Tensor], list[list[int]]]]:
    """Every episode of the truncated policy, which may stop at any token: its tokens, their log-probs and sets."""
    found, open_ = [], [((), [], [])]
    while open_:
        tokens, logprobs, sets = open_.pop()
        logits_V = model(torch.tensor([[*PROMPT, *tokens]])).logits[0, -1]
        ids = distribution(logits_V.detach()[None].float(), [NUCLEUS])[0].isfinite().nonzero()[:, 0].tolist()
        own = torch.log_softmax(logits_V[ids] / NUCLEUS.temperature, -1)
        for at, id in enumerate(ids):
            one = ((*tokens, id), [*logprobs, own[at]], [*sets, ids])
            (found if id == STOP or len(one[0]) == NUCLEUS.max_tokens else open_).append(one)
    return found


def earned(tokens: Sequence[int]) -> float:
    return sum(token * (at + 1) for at, token in enumerate(tokens)) % 5 - 1.5


@pytest.mark.parametrize("with_sets", [True, False])
def test_the_expected_gradient_is_that_of_the_truncated_policys_return(with_sets: bool, small_dir: Path) -> None:
    """By enumeration, not by samples. Without the sets the same tokens give another gradient."""
    oracle = exact_model(small_dir)
    episodes = played(oracle)
    assert len(episodes) > 8 and float(sum(torch.stack(lp).sum().exp() for _, lp, _ in episodes)) == pytest.approx(1.0)
    sum(torch.stack(logprobs).sum().exp() * earned(tokens) for tokens, logprobs, _ in episodes).backward()  # pyright: ignore
    rows = []
    for number, (tokens, logprobs, sets) in enumerate(episodes):
        chance = float(torch.stack(logprobs).sum().exp())
        plain = row([*PROMPT, *tokens], range(2, 2 + len(tokens)), episode=number, advantage=earned(tokens))
        columns = {"behaviour": torch.stack(logprobs).detach().float(), "weight": torch.full((len(tokens),), chance)}
        rows.append(replace(plain.having(**columns), ragged={"kept": ragged(sets)} if with_sets else {}))
    policy, algorithm = PolicyModel(small_dir), GRPO(baseline="none", importance_bounds=(0.0, 100.0))
    (pack,) = packs([rows], 4096)
    logprobs_K, entropy_K = policy.logprobs(pack, temperature=NUCLEUS.temperature)
    outputs = Outputs(logprobs_K=logprobs_K, entropy_K=entropy_K)
    algorithm.loss({"proximal": logprobs_K.detach(), **pack.columns}, outputs, 0).total.backward()
    ours, exact = (
        torch.cat([sign * parameter.grad.double().flatten() for parameter in parameters])
        for sign, parameters in ((-1, policy.parameters()), (1, list(oracle.parameters())))
    )
    error = float((ours - exact).norm() / exact.norm())
    assert error < 1e-4 if with_sets else error > 0.1


def test_the_kl_to_a_reference_is_that_between_both_over_the_kept_set(qwen3_dir: Path, tmp_path: Path) -> None:
    """Expected over the set the k3 estimate is KL(policy || reference) of the two restricted distributions; with a
    reference over the whole vocabulary it would also count the mass that no token could show."""
    models = [PolicyModel(qwen3_dir), PolicyModel(tiny_qwen3(tmp_path / "other", seed=9))]
    ids = [2, 5, 11, 17]
    rows = [replace(row([4, 8, id]), ragged={"kept": ragged([ids])}) for id in ids]
    (pack,) = packs([rows], 4096)
    policy_K, reference_K = (model.logprobs(pack, temperature=1.0)[0].detach() for model in models)
    assert float(policy_K.exp().sum()) == pytest.approx(1.0) == float(reference_K.exp().sum())
    expected = (policy_K.exp() * (policy_K - reference_K)).sum()
    k3 = (policy_K.exp() * kl_penalty(policy_K, reference_K, "k3")).sum()
    assert float(k3) == pytest.approx(float(expected), rel=1e-4)
    whole_K = models[1].logprobs(replace(pack, ragged={}), temperature=1.0)[0].detach()
    assert float((policy_K.exp() * kl_penalty(policy_K, whole_K, "k3")).sum()) != pytest.approx(
        float(expected), rel=0.1
    )
