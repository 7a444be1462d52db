"""A group larger than a pass computes its prompt once: the same numbers as row by row, and fewer tokens computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from agentrl.algos.grpo import GRPO
from agentrl.algos.ppo import PPO
from agentrl.config import Rollout, Train
from agentrl.learner.data import shared_prompt
from agentrl.learner.data.prefix_trees import Pack, Stem, packs
from agentrl.learner.data.rows import Row
from agentrl.learner.learner import Learner
from agentrl.learner.model.models import Models
from agentrl.learner.model.policy import PolicyModel
from agentrl.learner.parallel.pass_schedule import divided, laid
from agentrl.learner.step_report import StepReport
from agentrl.records import Group
from tests.closeness import assert_gradients_alike

from .making import VOCAB, episode, group_of, run_config, tiny_qwen3, turn
from .test_model import mixed_gemma, recurrent_qwen, sliding_mistral
from .test_packing import row

BUDGET = 40
SHORT = Rollout(max_context=BUDGET, max_tokens_per_turn=16)
TRAIN = {"warmup_steps": 0, "grad_clip": None, "tokens_per_batch": BUDGET}
STEP_OF = {1: 0}.__getitem__


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


@contextmanager
def prompt_in_every_pass() -> Generator[None]:
    """Inside, no pass has a stem: each computes its prompt, as a learner of one rank without stems would."""
    with patch.object(Models, "prompt_once", False):
        yield


def long_prompt(id: int, members: int = 5) -> Group:
    """Its members share a prompt of more than half of the budget; some of them act twice, some fork."""
    rng = random.Random(id)
    prompt = ids(rng, 24)

    def said(index: int, asked: list[int], parent: int | None) -> Any:
        tokens = ids(rng, rng.randint(2, 5))
        logprobs = [-rng.uniform(2, 4) for _ in tokens]
        return turn(index, asked, tokens, parent=parent, logprobs=logprobs)

    made = [[said(0, prompt, None)] for _ in range(members)]
    made[1].append(said(1, ids(rng, 2), 0))
    made[2].append(said(1, [*prompt, *made[2][0].token_ids[:1], *ids(rng, 2)], None))  # a fork in its own words
    return group_of([episode(at, turns, rng.random(), group=id) for at, turns in enumerate(made)], id=id)


def forked(seed: int) -> list[Row]:
    """Rows that leave each other after a long prompt, some of them at several places, also in what is scored."""
    rng = random.Random(seed)
    prompt = ids(rng, rng.randint(20, 24))
    known = [prompt + ids(rng, rng.randint(3, 12))]
    for _ in range(rng.randint(3, 6)):
        beginning = rng.choice(known)
        known.append(beginning[: rng.randint(len(prompt) + 1, len(beginning))] + ids(rng, rng.randint(1, 4)))
    rows = [tokens[:BUDGET] for tokens in known]
    return [row(tokens, range(len(prompt), len(tokens)), episode=at) for at, tokens in enumerate(rows)]


# --- which nodes ------------------------------------------------------------------------------------------------------


def test_the_worked_example_of_the_module() -> None:
    p, q, r, s, a, b, c, d, e, f = range(10)
    rows = [row([p, q, r, s, *end], [4, 5]) for end in ([a, b], [c, d], [e, f])]
    made = packs([rows], 6, stems=True)
    assert [len(pack.token_ids_N) for pack in made] == [6, 6, 6]
    assert {pack.stem for pack in made} == {Stem((p, q, r), 3)}
    assert sum(pack.distinct for pack in made) == pytest.approx(12)
    assert [pack.stem for pack in packs([rows], 6)] == [None] * 3
    assert [pack.stem for pack in packs([rows], 10, stems=True)] == [None]  # it fits one pass


def test_no_node_of_a_stem_predicts_and_every_pass_begins_with_it() -> None:
    found = 0
    for seed in range(60):
        rows = forked(seed)
        made = packs([rows], 30, stems=True)
        for pack in made:
            if pack.stem is not None:
                size = len(pack.stem)
                assert pack.stem.passes == len(made) > 1
                assert tuple(pack.token_ids_N[:size].tolist()) == pack.stem.token_ids
                assert int(pack.predictors_P.min()) >= size
                found += 1
        assert sum(pack.row_tokens for pack in made) == sum(len(one.token_ids) for one in rows)
    assert found > 60


def test_a_stem_is_kept_only_where_it_saves_a_twentieth() -> None:
    def kept(prompt: int, ranks: int, members: int = 8, said: int = 8) -> bool:
        rows = [row([1] * prompt + [2 + m] * said, range(prompt, prompt + said)) for m in range(members)]
        made = laid([rows], prompt + said, ranks, "cpu", cost=lambda tree: 1.0, stems=True)
        assert len({pack.stem for pack in made}) == 1
        return made[0].stem is not None

    assert not kept(1, 1)  # what predicts the first token is in every pass
    assert not kept(2, 1, members=3, said=30)  # 2 nodes of 96
    assert kept(4, 1, members=3)  # 6 of 36
    assert kept(8, 2) and kept(8, 4)  # 7 + 4 x 9 for 4 x 16 on each of two, 7 + 2 x 9 for 2 x 16 on each of four
    assert not kept(8, 8)  # one pass for each rank: each computes all of it anyway
    assert not kept(8, 2, members=3)  # one of them would have the longer half


def test_ranks_compute_the_passes_of_a_stem_at_the_same_time() -> None:
    groups = [[row([g] * 30 + [9, m], [30, 31]) for m in range(5)] for g in (1, 2)]
    made = laid([*groups, [row([3, 4, 5])]], 32, 2, "cpu", cost=lambda tree: len(tree.token_ids_N), stems=True)
    shares = divided(made, 2, lambda pack: pack.distinct)
    of = [[one.pack.stem for one in share] for share in shares]
    assert of[0] == of[1] and len(of[0]) == 3 + 3 + 1
    assert sorted(one.at for share in shares for one in share if one.counts) == list(range(11))


# --- the same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "checkpointing"),
    [
        (tiny_qwen3, False),
        (tiny_qwen3, True),
        pytest.param(sliding_mistral, False, marks=pytest.mark.slow),
        pytest.param(mixed_gemma, True, marks=pytest.mark.slow),
    ],
)
def test_logprobs_and_gradients_are_those_of_single_rows(
    make: Callable[[Path], Path], checkpointing: bool, tmp_path: Path
) -> None:
    folder = make(tmp_path / "model")
    policy = PolicyModel(folder, checkpointing=checkpointing)
    oracle = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    rows = next(rows for seed in range(9) if len(packs([rows := forked(seed)], 30)) > 2)
    made = packs([rows], 30, stems=True)
    assert policy.has_stems and all(pack.stem for pack in made)
    weights = [torch.rand(len(pack.target_K), generator=torch.Generator().manual_seed(1)) for pack in made]
    roots = policy.roots(made[0])
    total = torch.zeros(())
    for pack, weight_K in zip(made, weights, strict=True):
        logprobs_K, _ = policy.logprobs(pack, temperature=0.7, roots=roots)
        expected_K = of_rows(oracle, pack, 0.7)
        torch.testing.assert_close(logprobs_K, expected_K, atol=5e-5, rtol=1e-5)
        total = total + (weight_K * expected_K).sum()
        (weight_K * logprobs_K).sum().backward()
    roots.backward()
    total.backward()
    names = [name for name, _ in policy.module.named_parameters()]
    found, expected = (
        dict(zip(names, (one.grad for one in own.parameters()), strict=True)) for own in (policy.module, oracle)
    )
    assert_gradients_alike(found, expected)


def of_rows(oracle: Any, pack: Pack, temperature: float) -> torch.Tensor:
    """Log-probs of the scored tokens of a pass, each computed in a row of its own."""
    found: list[torch.Tensor] = []
    for predictor, target in zip(pack.predictors_P[pack.predictor_K].tolist(), pack.target_K.tolist(), strict=True):
        branch = next(one for one in pack.branches if one.start <= predictor < one.stop)
        path = branch.path[: len(branch.path) - (branch.stop - 1 - predictor)]
        logits_V = oracle(pack.token_ids_N[path][None]).logits[0, -1]
        found.append(torch.log_softmax(logits_V / temperature, -1)[target])
    return torch.stack(found)


class Stepped:
    """A learner's step over two groups that are larger than a pass, and one that is not."""

    def __init__(self, folder: Path, algo: Any = None, **train: Any) -> None:
        torch.manual_seed(0)
        settings = Train.model_validate({**TRAIN, **train})
        self.learner = Learner(run_config(algo=algo or GRPO(), train=settings, rollout=SHORT).learner, folder)
        self.computed = 0  # tokens that went through the policy's layers
        self.learner.model.module.get_input_embeddings().register_forward_hook(self._count)
        self.grads: list[torch.Tensor] = []
        for name, optimizer in self.learner.models.optimizers.items():
            optimizer.step = self._kept(name)  # type: ignore[method-assign]
        groups = [long_prompt(1), long_prompt(2), long_prompt(3, members=3)]
        self.report: StepReport = self.learner.step(groups, step_of=STEP_OF)

    def _count(self, _: object, given: Any, __: object) -> None:
        self.computed += given[0].numel()

    def _kept(self, name: str) -> Callable[[], None]:
        def keep() -> None:
            own = self.learner.models._own[name]  # pyright: ignore[reportPrivateUsage]
            self.grads.append(torch.cat([p.grad.flatten() for p in own if p.grad is not None]))

        return keep


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "grpo": (None, {}),
    "adapter": (GRPO(kl_weight=0.1), {"lora_rank": 2}),
    "several updates": (GRPO(kl_weight=0.1, entropy_weight=0.01), {"minibatches": 2, "epochs": 2}),
    "moving, recomputed": (
        GRPO(kl_weight=0.1, reference=1, observation_weight=0.1),
        {"gradient_checkpointing": "offload"},
    ),
    "own critic": (PPO(critic="own", critic_warmup_steps=0), {}),
    "shared critic": (PPO(critic="shared", critic_warmup_steps=0), {"gradient_checkpointing": True}),
    "critic alone": (PPO(critic="shared", critic_warmup_steps=5), {}),
}


@pytest.mark.parametrize(
    "name",
    [name if name in ("grpo", "moving, recomputed") else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_a_step_is_that_of_passes_without_stems(name: str, qwen3_dir: Path) -> None:
    algo, train = CASES[name]
    once = Stepped(qwen3_dir, algo, **train)
    with prompt_in_every_pass():
        again = Stepped(qwen3_dir, algo, **train)
    assert once.report.loss == pytest.approx(again.report.loss, abs=1e-5)
    assert once.report.algorithm == pytest.approx(again.report.algorithm, rel=1e-4, abs=1e-5)
    assert len(once.grads) == len(again.grads) > 0
    found, expected = (dict(enumerate(stepped.grads)) for stepped in (once, again))
    assert_gradients_alike(found, expected)
    assert max(float(one.abs().max()) for one in once.grads) > 1e-3
    assert once.computed < 0.75 * again.computed
    assert once.report.tokens_distinct < 0.75 * again.report.tokens_distinct
    assert once.report.tokens_row == again.report.tokens_row
    if name == "grpo":
        assert (once.computed, again.computed) == (once.report.tokens_distinct, again.report.tokens_distinct)


def test_gradients_of_what_was_lent_add_up_in_float32() -> None:
    """3 x 0.001 beside 1 are nothing in bfloat16 one by one."""
    made = torch.ones(1, 1, 1, 1, requires_grad=True)
    key, value, roots = made.bfloat16(), 2 * made.bfloat16(), shared_prompt.Roots()
    roots.keep(key, value, "layer")
    for scale in (1.0, 0.003, 0.003, 0.003):
        both_key, _ = roots.before(key.detach(), value.detach(), "layer")
        (scale * both_key[:, :, :1].float()).sum().backward()
    roots.backward()
    assert made.grad is not None and float(made.grad) == pytest.approx(1.0078125)  # the next one after 1


# --- who has none -----------------------------------------------------------------------------------------------------


def stretched_llama(folder: Path) -> Path:
    """Its positions depend on the longest row of a pass."""
    torch.manual_seed(1)
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = LlamaConfig(vocab_size=VOCAB, **sizes, rope_parameters=rope, max_position_embeddings=64)
    LlamaForCausalLM(made).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore:.*is computed row by row")
@pytest.mark.parametrize("make", [stretched_llama, pytest.param(recurrent_qwen, marks=pytest.mark.slow)])
def test_a_model_that_cannot_compute_a_stem_by_itself_computes_it_in_every_pass(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = make(tmp_path / "model")
    assert not PolicyModel(folder).has_stems
    found = Stepped(folder)
    assert found.computed == found.report.tokens_distinct and max(map(torch.norm, found.grads)) > 1e-3


def test_layers_that_have_the_same_name_are_not_told_apart(qwen3_dir: Path) -> None:
    module = PolicyModel(qwen3_dir).module
    layers = [f"keys and values of layer {at}" for at in range(2)]
    assert shared_prompt.can_be_lent(module, layers)
    assert not shared_prompt.can_be_lent(module, [*layers, layers[0]])
