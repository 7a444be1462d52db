"""Log-probs and entropies in chunks of tokens beside the whole [tokens, vocabulary] matrix: gradients, memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, GraniteConfig, GraniteForCausalLM

from agentrl.config import Train
from agentrl.learner.data.prefix_trees import Pack, packs
from agentrl.learner.data.ragged import normalised
from agentrl.learner.model import policy as model
from agentrl.learner.model.logprobs import OutputHead, Places, TokenQuery, statistics
from agentrl.learner.model.policy import PolicyModel

from .making import tiny_qwen3
from .test_kept import rows_with_sets
from .test_model import SIZES

MIB = 1 << 20
CAPPED = {"scale": 0.25, "cap": 3.0}


def places(rows: list[int], ids: list[int]) -> Places:
    return Places(torch.tensor(rows), torch.tensor(ids))


@each_case(
    ("head", "temperature", "rows", "block"),
    [({}, 1.0, 1, 1), ({}, 0.6, 2, 9), (CAPPED, 1.0, 9, 2), (CAPPED, 0.6, 4, 3)],
)
def test_gradients_are_those_of_finite_differences(
    head: dict[str, float], temperature: float, rows: int, block: int
) -> None:
    """Places out of order, named twice, and rows without any."""
    torch.manual_seed(0)
    made = OutputHead(nn.Linear(3, 7).double(), **head)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    asked = TokenQuery(
        own=places([4, 0, 0, 2, 4, 4], [1, 6, 6, 0, 2, 1]),
        plain=places([3, 4], [5, 5]),
        temperature=temperature,
        rows=rows,
        block=block,
    )

    def read(hidden: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        return statistics(made, hidden, parameters, asked)

    assert torch.autograd.gradcheck(read, (hidden, *made.layer.parameters()))
    own, plain, entropy = read(hidden, *made.layer.parameters())
    scaled = (made(hidden) / temperature).log_softmax(-1)
    torch.testing.assert_close(own, scaled[[4, 0, 0, 2, 4, 4], [1, 6, 6, 0, 2, 1]])
    torch.testing.assert_close(plain, made(hidden).log_softmax(-1)[[3, 4], [5, 5]])
    torch.testing.assert_close(entropy, -(scaled.exp() * scaled).sum(-1))


def mixed_pack() -> Pack:
    """Kept sets short, long and missing, tokens of two members at one node, and observed tokens."""
    rows = [replace(one, observed_O=torch.tensor([2, 4]), observed_weight=0.5) for one, _ in rows_with_sets(3)]
    (pack,) = packs([rows], 4096)
    return pack


def whole(policy: PolicyModel, pack: Pack, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropy and observed log-probs by way of the whole matrix."""
    logits_PV = policy.module(
        input_ids=pack.token_ids_N[None],
        position_ids=pack.depth_N[None],
        logits_to_keep=pack.predictors_P,
        layout=policy.layout(pack.branches),
    ).logits[0]
    logprobs_PV = (logits_PV / temperature).log_softmax(-1)
    of_M, ids_M = pack.ragged["kept"].sets()
    restricted_M, mass_K = normalised(logprobs_PV[pack.predictor_K[of_M], ids_M], of_M, len(pack.target_K))
    own_K = torch.zeros_like(mass_K).index_add(0, of_M, -restricted_M.exp() * restricted_M)
    entropy_K = -(logprobs_PV.exp() * logprobs_PV).sum(-1)[pack.predictor_K]
    observed_O = logits_PV.log_softmax(-1)[pack.observer_O, pack.observed_O]
    logprobs_K = logprobs_PV[pack.predictor_K, pack.target_K] - mass_K
    return logprobs_K, torch.where(pack.ragged["kept"].head_K == 0, entropy_K, own_K), observed_O


@each_case(
    ("tie", "adapter", "entropy_grad", "rows"),
    [
        (True, None, True, 3),
        (False, None, False, 100),
        (True, Train(lora_rank=2), False, 3),
        (False, Train(lora_rank=2), True, 100),
    ],
)
def test_a_pass_in_chunks_is_the_pass_over_the_whole_matrix(
    tie: bool, adapter: Train | None, entropy_grad: bool, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "room", lambda *_: (rows, 2))
    policy = PolicyModel(tiny_qwen3(tmp_path / "model", tie=tie), adapter=adapter)
    pack = mixed_pack()
    assert len(pack.predictors_P) > 6 and len(pack.observer_O)
    logprobs_K, entropy_K, observed_O, hidden_PH = policy.outputs(pack, temperature=0.7, entropy_grad=entropy_grad)
    expected = whole(policy, pack, 0.7)
    for ours, theirs in zip((logprobs_K, entropy_K, observed_O), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    assert entropy_K.requires_grad == entropy_grad
    factor_K = torch.linspace(-1, 1, len(logprobs_K))
    found = []
    for (logprobs, entropy, observed), trunk in (((logprobs_K, entropy_K, observed_O), hidden_PH), (expected, None)):
        spread = entropy if entropy_grad else entropy.detach()
        loss = (factor_K * logprobs).mean() + 0.3 * (factor_K * spread).mean() + 0.2 * observed.mean()
        loss.backward()
        found.append([parameter.grad.clone() for parameter in policy.parameters()])  # type: ignore[union-attr]
        for parameter in policy.parameters():
            parameter.grad = None
        assert trunk is None or trunk.shape == (len(pack.predictors_P), 32)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def capped(folder: Path) -> Path:
    """Gemma's cap of the logits, small enough that it changes them."""
    torch.manual_seed(5)
    Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=8, final_logit_softcapping=2.0)).save_pretrained(folder)
    return folder


def scaled(folder: Path) -> Path:
    torch.manual_seed(5)
    GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0, attention_multiplier=0.35)).save_pretrained(folder)
    return folder


@each_case(("make", "scale", "cap"), [(capped, 1.0, 2.0), (scaled, 0.25, None), (tiny_qwen3, 1.0, None)])
def test_logits_are_scaled_and_capped_as_the_architecture_does(
    make: Callable[[Path], Path], scale: float, cap: float | None, tmp_path: Path
) -> None:
    policy = PolicyModel(make(tmp_path / "model"))
    head = policy._head  # pyright: ignore[reportPrivateUsage]
    assert head is not None and (head.scale, head.cap) == (scale, cap)
    pack = mixed_pack()
    for ours, theirs in zip(policy.outputs(pack, temperature=0.7), whole(policy, pack, 0.7), strict=False):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


class Shifted(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).roll(1, -1)


def test_an_output_layer_that_is_not_a_plain_one_is_computed_whole_and_said(
    qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = model.load

    def shifted(*given: Any) -> Any:
        module = load(*given)
        module.lm_head.__class__ = Shifted
        return module

    monkeypatch.setattr(model, "load", shifted)
    with pytest.warns(UserWarning, match=r"logits of Qwen3ForCausalLM .* all at once: lower train\.tokens_per_batch"):
        policy = PolicyModel(qwen3_dir)
    pack = mixed_pack()
    *found, hidden_PH = policy.outputs(pack, temperature=0.7, entropy_grad=True)
    for ours, theirs in zip(found, whole(policy, pack, 0.7), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(hidden_PH, policy.hidden(pack))


# --- memory ---------------------------------------------------------------------------------------------------------


class Held(TorchDispatchMode):
    """Counts the bytes of tensors made inside; `peak` is the most that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.live = {key: one for key, one in self.live.items() if not one[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


def peak_of(step: Callable[[], Any]) -> float:
    """In MiB."""
    with Held() as held:
        step()
    return held.peak / MIB


VOCAB = 151_936
WEIGHTS = VOCAB * 32 * 4 / MIB  # of the tied embedding, and of each sum of its gradient


def long_pack() -> Pack:
    """200 scored tokens; the whole matrix of their logits is 116 MiB."""
    row = replace(rows_with_sets(3)[0][0], ragged={}, columns={})
    row = replace(row, observed_O=row.observed_O[:0], token_ids=tuple(range(201)), place_S=torch.arange(1, 201))
    (pack,) = packs([[row]], 4096)
    return pack


@pytest.mark.medium
def test_a_pass_at_a_large_vocabulary_stays_below_its_budget(tmp_path: Path) -> None:
    """Forward and backward; of the whole matrix several live at once."""
    policy, pack = PolicyModel(tiny_qwen3(tmp_path / "model", vocab=VOCAB), logits_mb=32), long_pack()

    def ours() -> None:
        logprobs_K, entropy_K, _, _ = policy.outputs(pack, temperature=0.7, entropy_grad=True)
        (logprobs_K.sum() + entropy_K.sum()).backward()

    budget = 32 + 4 * WEIGHTS + 8  # logits, gradient sums of embedding and head, and the trunk's own
    assert peak_of(ours) < budget
    for parameter in policy.parameters():
        parameter.grad = None
    policy._head = None  # pyright: ignore[reportPrivateUsage]
    assert peak_of(ours) > 2 * budget


@pytest.mark.parametrize(("logits_mb", "again"), [(150, 0), (64, 200)])
def test_logits_that_there_is_room_for_are_not_computed_again(logits_mb: int, again: int, tmp_path: Path) -> None:
    policy, pack = PolicyModel(tiny_qwen3(tmp_path / "model", vocab=VOCAB), logits_mb=logits_mb), long_pack()
    rows = list[int]()
    head = policy._head  # pyright: ignore[reportPrivateUsage]
    assert head is not None
    logprobs_K, entropy_K, _, _ = policy.outputs(pack, temperature=1.0)
    head.layer.register_forward_hook(lambda _, given, __: rows.append(len(given[0])))
    found = peak_of(lambda: logprobs_K.sum().backward())
    assert entropy_K.isfinite().all()
    assert sum(rows) == again
    assert found < logits_mb + 4 * WEIGHTS + 8
