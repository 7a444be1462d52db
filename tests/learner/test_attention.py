"""Attention over trees, by each backend, against plain causal attention over single rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case
from torch import Tensor
from torch.nn import functional

from agentrl.errors import ConfigError
from agentrl.learner.data.prefix_trees import Branch, Pack, packs
from agentrl.learner.data.shared_prompt import Roots
from agentrl.learner.memory_budget import Tracker
from agentrl.learner.model import attention
from agentrl.learner.model.attention import LAYOUTS, AttentionShape, Layout, Paths, Subtrees, choose
from agentrl.learner.model.policy import PolicyModel
from agentrl.learner.parallel.pass_shards import Portion, pieces, spans

from .test_packing import row

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 4, 2, 8


def forked_rows(seed: int) -> list[list[Any]]:
    """Two groups whose members leave each other at any token, some of them at several."""
    rng = random.Random(seed)
    groups = []
    for g in range(2):
        known = [[rng.randrange(50) for _ in range(rng.randint(20, 90))]]
        for _ in range(rng.randint(2, 6)):
            whole = rng.choice(known)
            known.append(whole[: rng.randint(1, len(whole))] + [rng.randrange(50) for _ in range(rng.randint(1, 60))])
        groups.append([row(tokens, episode=10 * g + m) for m, tokens in enumerate(known)])
    return groups


def parts_of(pack: Pack) -> list[Tensor]:
    n = len(pack.token_ids_N)
    return [torch.randn(1, heads, n, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def row_by_row(
    branches: Sequence[Branch],
    parts: Sequence[Tensor],
    window: int | None,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Each node's output [1, N, H, D] from the row that ends with its branch, computed alone."""
    outputs = []
    for branch in branches:
        query, key, value = (part[0, :, branch.path].repeat_interleave(HEADS // part.shape[1], 0) for part in parts)
        number = torch.arange(len(branch.path))
        seen = number[None, :] <= number[:, None]
        if window is not None:
            seen &= number[None, :] > number[:, None] - window
        scores = (query @ key.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))
        nothing = torch.zeros(HEADS) if sinks is None else sinks.exp()
        chances = scores.exp() / (scores.exp().sum(-1, keepdim=True) + nothing[:, None, None])
        outputs.append((chances @ value)[:, branch.start - branch.stop :])
    return torch.cat(outputs, 1).transpose(0, 1)[None]


def flash_of_old(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """`varlen_attn` by its definition: [T, H, D], each sequence alone, masks aligned at the bottom right, a window of
    so many keys left and right of a query's own, -1 for all."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    outputs = []
    for i in range(len(cu_seq_q) - 1):
        q = query[int(cu_seq_q[i]) : int(cu_seq_q[i + 1])].transpose(0, 1)
        k = key[int(cu_seq_k[i]) : int(cu_seq_k[i + 1])].transpose(0, 1)
        v = value[int(cu_seq_k[i]) : int(cu_seq_k[i + 1])].transpose(0, 1)
        assert q.shape[1] <= max_q
        assert k.shape[1] <= max_k
        own = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        at = torch.arange(k.shape[1])[None, :]
        left, right = window_size
        seen = (at >= own - left) | (left < 0)
        seen &= (at <= own + right) | (right < 0)
        outputs.append(functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True))
    return torch.cat(outputs, 1).transpose(0, 1)


def flash_of_new(*args: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
    """As that of newer versions of torch, which must be told of grouped heads."""
    assert enable_gqa == (args[0].shape[1] != args[1].shape[1])
    return flash_of_old(*args, **options)


@pytest.fixture
def flex_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has FlexAttention's gradients on a CPU, and refuses them there."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@pytest.fixture(params=["sdpa", "sdpa of few queries", "varlen of torch 2.11", "varlen", "flex"])
def layout(request: pytest.FixtureRequest, flex_backward: None, monkeypatch: pytest.MonkeyPatch) -> type[Layout]:
    flash = flash_of_old if request.param.endswith("2.11") else flash_of_new
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", flash)  # its kernel runs on CUDA only
    if request.param.endswith("few queries"):
        monkeypatch.setattr(attention, "_QUERIES", 5)
    return LAYOUTS[request.param.split()[0]]


@pytest.mark.medium
@each_case("window", [None, 7])
def test_a_node_gets_what_its_row_alone_would_give_it_and_so_do_the_gradients(
    window: int | None, layout: type[Layout]
) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        (pack,) = packs(forked_rows(seed), 4096)
        parts = parts_of(pack)
        found = layout(pack.branches).attend(*parts, window, 0.3)
        expected = row_by_row(pack.branches, parts, window, 0.3)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        weights = torch.randn_like(found)
        gradients = torch.autograd.grad((found * weights).sum(), parts)
        wanted = torch.autograd.grad((expected * weights).sum(), parts)
        torch.testing.assert_close(gradients, wanted, atol=1e-5, rtol=1e-5)


@each_case("ranks", [2, 3])
def test_a_rank_that_has_some_of_the_nodes_computes_what_one_of_all_does(ranks: int, layout: type[Layout]) -> None:
    torch.manual_seed(0)
    (pack,) = packs(forked_rows(3), 4096)
    parts = parts_of(pack)
    weights = torch.randn(1, len(pack.token_ids_N), HEADS, DIM)
    for window in (None, 7):
        expected = layout(pack.branches).attend(*parts, window, 0.3)
        found = torch.zeros_like(expected)
        for share in spans(pack.branches, ranks):
            own_n = torch.cat([torch.arange(*span) for span in share])
            output = layout(pieces(pack.branches, share)).attend(parts[0][:, :, own_n], *parts[1:], window, 0.3)
            found = found.index_add(1, own_n, output)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        gradients, wanted = (torch.autograd.grad((one * weights).sum(), parts) for one in (found, expected))
        torch.testing.assert_close(gradients, wanted, atol=1e-5, rtol=1e-5)


def test_after_a_stem_that_was_computed_apart_nodes_get_what_they_get_in_a_whole_pass(layout: type[Layout]) -> None:
    torch.manual_seed(0)
    (pack,) = packs(forked_rows(5)[:1], 4096)
    n = len(pack.token_ids_N)
    stem = next(at for at in range(n) if any(at not in branch.path for branch in pack.branches))  # all begin with it
    parts, weights = parts_of(pack), torch.randn(1, n - stem, HEADS, DIM)
    whole = layout(pack.branches).attend(*parts, 45, 0.3)[:, stem:]  # a window that ends in the stem
    wanted = torch.autograd.grad((whole * weights).sum(), parts)
    roots = Roots()
    roots.keep(*(part[:, :, :stem] for part in parts[1:]), "layer")
    both = roots.before(*(part[:, :, stem:] for part in parts[1:]), "layer")
    own = Portion.whole(pack, (stem, n)).branches
    found = layout(own).attend(parts[0][:, :, stem:], *both, 45, 0.3)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)
    (found * weights).sum().backward()
    roots.backward()
    torch.testing.assert_close([part.grad for part in parts], list(wanted), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["sdpa", "sdpa of few queries", "flex"], indirect=True)
@each_case("window", [None, 7])
def test_a_sink_takes_its_share_of_every_nodes_attention(window: int | None, layout: type[Layout]) -> None:
    torch.manual_seed(0)
    (pack,) = packs(forked_rows(3), 4096)
    parts = [*parts_of(pack), torch.randn(HEADS, requires_grad=True)]
    found = layout(pack.branches).attend(*parts[:3], window, 0.3, parts[3])
    expected = row_by_row(pack.branches, parts[:3], window, 0.3, parts[3])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    weights = torch.randn_like(found)
    gradients = torch.autograd.grad((found * weights).sum(), parts)
    wanted = torch.autograd.grad((expected * weights).sum(), parts)
    torch.testing.assert_close(gradients, wanted, atol=1e-5, rtol=1e-5)


def test_long_branches_take_memory_in_proportion_to_their_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows that fork in their middle: a mask for every query of a branch would grow with the square."""
    monkeypatch.setattr(attention, "_QUERIES", 128)
    peaks = []
    for n in (1024, 2048):
        tokens = [7 * at % 50 for at in range(n)]
        (pack,) = packs([[row(tokens + [1] * n, episode=0), row(tokens + [2] * n, episode=1)]], 1 << 20)
        parts = [part[:, :1, :, :2].detach().requires_grad_() for part in parts_of(pack)]
        with Tracker() as tracker:
            Paths(pack.branches).attend(*parts).sum().backward()
        peaks.append(tracker.peak)
    assert peaks[1] == pytest.approx(2 * peaks[0], rel=0.1)
    assert peaks[1] < 2048 * 4096 * 4  # such a mask


@each_case("cut", [False, True])
@each_case("window", [None, 100, 200])
def test_flex_visits_the_blocks_that_hold_a_visible_pair_and_trusts_only_full_ones(
    window: int | None, cut: bool
) -> None:
    rng = random.Random(0)
    shared = [rng.randrange(50) for _ in range(500)]
    rows = [row(shared + [m] * rng.randint(100, 400)) for m in range(5)] + [row([1, 2] * 150)]
    (pack,) = packs([rows], 10_000)
    layout = Subtrees(pieces(pack.branches, spans(pack.branches, 2)[1]) if cut else pack.branches)
    blocks = layout._mask(window)  # pyright: ignore[reportPrivateUsage]
    n, keys = len(layout.node_n), len(layout.end_N)
    seen = blocks.mask_mod(0, 0, torch.arange(n)[:, None], torch.arange(keys)[None, :])
    visible = seen.view(n // 128, 128, keys // 128, 128).sum((1, 3))

    def chosen(counts: Tensor, indices: Tensor) -> Tensor:
        table = torch.zeros(n // 128, keys // 128, dtype=torch.bool)
        for at, count in enumerate(counts[0, 0].tolist()):
            table[at, indices[0, 0, at, :count]] = True
        return table

    partial = chosen(blocks.kv_num_blocks, blocks.kv_indices)
    full = chosen(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    assert torch.equal(full, visible == 128 * 128)
    assert not (partial & full).any()
    assert ((partial | full) | (visible == 0)).all()
    if window is None:
        assert torch.equal(partial | full, visible > 0)
    else:
        assert (partial | full).sum() < 0.8 * (layout.end_N.view(-1, 128).amax(1)[None] > 0).expand(n // 128, -1).sum()


def test_flex_refuses_nodes_that_are_not_in_preorder() -> None:
    branches = [
        Branch(0, 3, torch.tensor([0, 1, 2])),
        Branch(3, 4, torch.tensor([0, 3])),
        Branch(4, 5, torch.tensor([0, 1, 4])),
    ]
    with pytest.raises(ValueError, match="not in preorder"):
        Subtrees(branches)


def test_a_policy_gives_the_same_log_probs_and_gradients_by_flex_as_by_sdpa(
    qwen3_dir: Path, flex_backward: None
) -> None:
    one, other = PolicyModel(qwen3_dir, attention="flex"), PolicyModel(qwen3_dir, attention="sdpa")
    rows = [row([3, 5, 7, 9, *tail], range(4, 4 + len(tail))) for tail in ([1, 2], [1, 2, 8, 4], [6], [1, 11, 12])]
    (pack,) = packs([rows], 100)
    found = [policy.logprobs(pack, temperature=1.0)[0] for policy in (one, other)]
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)
    for logprobs in found:
        logprobs.sum().backward()
    for (name, parameter), twin in zip(one.module.named_parameters(), other.module.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, twin.grad, atol=1e-4, rtol=1e-4, msg=name)


def test_varlen_is_refused_on_a_cpu_in_one_line_that_says_what_to_give(qwen3_dir: Path) -> None:
    with pytest.raises(ConfigError) as error:
        PolicyModel(qwen3_dir, attention="varlen")
    assert str(error.value).splitlines() == [
        "train.attention = 'varlen': its kernel wants train.device cuda and train.dtype bfloat16, not cpu and float32: "
        "give auto or sdpa"
    ]


def test_flex_is_refused_on_a_cpu_for_it_has_no_gradients_there() -> None:
    with pytest.raises(
        ConfigError, match=r"train.attention = 'flex': it fails on cpu in float32 \(.*: give auto or sdpa"
    ):
        choose("flex", CPU, torch.float32, AttentionShape())


def test_a_backend_whose_numbers_are_off_is_refused_by_name_and_passed_over_by_auto(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Off(attention.Paths):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None) -> Tensor:
            return super().attend(query, key, value, window and window + 1, scale)

    monkeypatch.setattr(attention, "LAYOUTS", {**LAYOUTS, "flex": Off})
    with pytest.raises(ConfigError, match=r"train.attention = 'flex': it is 0\.\d+ off on cpu in float32"):
        choose("flex", CPU, torch.float32, AttentionShape())
    monkeypatch.setattr(attention, "LAYOUTS", {**LAYOUTS, "flex": attention.Paths})
    assert choose("flex", CPU, torch.float32, AttentionShape()) is attention.Paths


def test_auto_is_sdpa_on_a_cpu() -> None:
    assert choose("auto", CPU, torch.bfloat16, AttentionShape()) is LAYOUTS["sdpa"]
