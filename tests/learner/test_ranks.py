"""A learner over ranks is that of one rank: the same losses, weights, metrics and files, whoever computes what."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import core_model_loading

from agentrl.algos.grpo import GRPO
from agentrl.algos.ppo import PPO
from agentrl.config import Rollout, RunConfig, Train
from agentrl.errors import ModelError
from agentrl.learner.data.prefix_trees import Pack, packs
from agentrl.learner.data.ragged import Ragged
from agentrl.learner.learner import Learner
from agentrl.learner.parallel import fsdp
from agentrl.learner.parallel.pass_schedule import Pass
from agentrl.learner.parallel.ranks import ALONE, Leader, Ranks
from agentrl.learner.rank_orders import Forward, ForwardBackward, HashWeights, OptimizerStep, on_every_rank
from agentrl.records import Group
from tests.closeness import assert_gradients_alike, assert_moved_alike, norm_of, numbers_of

from .making import At, in_use, mixture, random_group, run_config, tiny_llama, tiny_qwen3
from .saved import moments, same
from .test_kept import rows_with_sets
from .test_packing import row
from .test_routing import after as routed_step
from .test_routing import all_groups, other_choice, told
from .test_stems import long_prompt, prompt_in_every_pass
from .updates import everywhere, updated

STEP_OF = {1: 0, 2: 0}.__getitem__
SHORT = Rollout(max_context=30, max_tokens_per_turn=16)
TRAIN = {"lr": 1e-2, "warmup_steps": 0, "tokens_per_batch": 60}
TENSOR = {"ranks": 2, "tensor": 2}
CONTEXT = {"ranks": 2, "context": 2}


def groups(n: int, seed: int = 0) -> list[Group]:
    return [random_group(10 * seed + at, 10 * seed + at) for at in range(n)]


def config(algo: Any = None, **train: Any) -> RunConfig:
    return run_config(algo=algo or GRPO(), rollout=SHORT, train=Train.model_validate({**TRAIN, **train}), seed=3)


@pytest.fixture(scope="module")
def two() -> Generator[Leader]:
    """Two ranks, which make learner after learner."""
    ranks = Leader([torch.device("cpu")] * 2, deadline_s=120, start_s=200)
    yield ranks
    ranks.close()


def after(
    config: RunConfig, folder: Path, ranks: Ranks, *, steps: int = 2
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """The reports of some steps, and all that is trained after them."""
    learner = Learner(config.learner, folder, ranks=ranks)
    reports = [learner.step(groups(3, seed), step_of=STEP_OF) for seed in range(steps)]
    return reports, load_file(learner.export(folder / "now.safetensors").path)


def assert_reports_alike(found: list[Any], expected: list[Any]) -> None:
    """Check losses and gradients: those of the first step by float32's precision, and of later ones, whose weights were
    moved by the rounding of earlier gradients, by a thousandth."""
    for at, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert other.loss == pytest.approx(one.loss, abs=1e-5 if at == 0 else 1e-3)
        assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-5 if at == 0 else 1e-3)


@pytest.mark.medium
@pytest.mark.parametrize(
    "config",
    [
        config(),
        pytest.param(config(GRPO(kl_weight=0.1, entropy_weight=0.01)), marks=pytest.mark.slow),
        config(minibatches=2, epochs=2),
        pytest.param(config(tokens_per_batch=4000), marks=pytest.mark.slow),
        config(lora_rank=2),
        config(PPO(critic="own")),
        pytest.param(config(PPO(critic="shared")), marks=pytest.mark.slow),
        pytest.param(config(GRPO(kl_weight=0.1, reference=1)), marks=pytest.mark.slow),
        pytest.param(config(gradient_checkpointing=True), marks=pytest.mark.slow),
        config(GRPO(kl_weight=0.1, reference=1), parallel=TENSOR, gradient_checkpointing=True),
        pytest.param(config(PPO(critic="own"), parallel=TENSOR), marks=pytest.mark.slow),
        pytest.param(
            config(GRPO(kl_weight=0.1, reference=1), parallel=CONTEXT, gradient_checkpointing=True),
            marks=pytest.mark.slow,
        ),
        config(PPO(critic="shared"), parallel=CONTEXT),
        pytest.param(
            config(GRPO(kl_weight=0.1, observation_weight=0.1), parallel=CONTEXT, lora_rank=2), marks=pytest.mark.slow
        ),
    ],
    ids=[
        "grpo",
        "reference",
        "several updates",
        "one pass",
        "lora",
        "own critic",
        "shared critic",
        "moving",
        "recomputed",
        "tensor, moving, recomputed",
        "tensor, own critic",
        "context, moving, recomputed",
        "context, shared critic",
        "context, lora, observed",
    ],
)
def test_two_ranks_train_as_one(config: RunConfig, two: Leader, qwen3_dir: Path) -> None:
    alone, weights = after(config, qwen3_dir, ALONE)
    shared, others = after(config, qwen3_dir, two)
    assert_reports_alike(shared, alone)
    for one, other in zip(alone, shared, strict=True):
        assert other.entropy == pytest.approx(one.entropy, rel=1e-3)
        assert other.algorithm == pytest.approx(one.algorithm, rel=1e-3, abs=1e-4)
    assert_moved_alike(others, weights, lr=TRAIN["lr"], steps=2)
    entered = two.ledger.names(0)
    assert two.ledger.names(1) == entered
    assert {"gathering model.layers.0", "adding up the gradients of model.layers.0"} < set(entered)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("algo", "train"),
    [
        (GRPO(kl_weight=0.1, reference=1), {"gradient_checkpointing": True}),
        pytest.param(PPO(critic="own"), {"parallel": TENSOR, "lora_rank": 2, "minibatches": 2}, marks=pytest.mark.slow),
        (PPO(critic="own"), {"parallel": CONTEXT, "gradient_checkpointing": True}),
        pytest.param(
            PPO(critic="shared"), {"parallel": CONTEXT, "lora_rank": 2, "minibatches": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=[
        "moving, recomputed",
        "tensor, own critic, adapter, several updates",
        "context, own critic, recomputed",
        "context, shared critic, adapter, several updates",
    ],
)
def test_ranks_compute_the_prompt_of_a_group_that_is_larger_than_a_pass_once_each(
    algo: Any, train: dict[str, Any], two: Leader, qwen3_dir: Path
) -> None:
    made = [long_prompt(1), long_prompt(2, members=7), long_prompt(3, members=3)]

    def stepped(ranks: Ranks) -> tuple[list[Any], dict[str, torch.Tensor]]:
        settings = Train.model_validate({**TRAIN, **STEEP, "tokens_per_batch": 40, **train})
        run = run_config(algo=algo, rollout=Rollout(max_context=40, max_tokens_per_turn=16), train=settings)
        learner = Learner(run.learner, qwen3_dir, ranks=ranks)
        reports = [learner.step(made, step_of=STEP_OF) for _ in range(2)]
        return reports, load_file(learner.export(qwen3_dir / "now.safetensors").path)

    with prompt_in_every_pass():
        alone, weights = stepped(ALONE)
    shared, others = stepped(two)
    assert_reports_alike(shared, alone)
    assert_gradients_alike(others, weights, norm=sum(one.grad_norm for one in alone), rel=1e-4)
    assert two.ledger.names(1) == two.ledger.names(0)
    assert shared[0].tokens_distinct < 0.9 * alone[0].tokens_distinct


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose heads two ranks can share."""
    return mixture(tmp_path_factory.mktemp("mixture"), layers=2, kv_heads=2)


@pytest.mark.medium
@pytest.mark.parametrize(("tensor", "expert", "recomputed"), [(1, 2, False), (1, 2, True), (2, 1, False), (2, 2, True)])
def test_the_gradients_of_a_mixture_are_those_of_one_rank_however_its_layers_are_cut(
    tensor: int, expert: int, recomputed: bool, two: Leader, mixture_dir: Path
) -> None:
    settings = {"optimizer": "sgd", "lr": 1.0, "grad_clip": None, "gradient_checkpointing": recomputed}
    plan = {"ranks": 2, "tensor": tensor, "expert": expert}
    (one,), weights = after(config(**settings), mixture_dir, ALONE, steps=1)
    before = two.ledger.standings()[0].count
    (other,), others = after(config(**settings, parallel=plan), mixture_dir, two, steps=1)
    assert_reports_alike([other], [one])
    assert_gradients_alike(others, weights, norm=one.grad_norm)  # a step of 1: they differ as gradients do
    sent = {"tokens for model.layers.0.mlp.experts", "answers of model.layers.1.mlp.experts, backward"}
    added = {"adding up model.layers.0.self_attn.o_proj", "adding up model.layers.1.mlp.experts, backward"}
    assert two.ledger.names(1) == two.ledger.names(0)
    entered = set(two.ledger.names(0)[before - two.ledger.standings()[0].count :])
    assert (sent <= entered, added <= entered) == (expert == 2, tensor == 2)


STEEP = {"optimizer": "sgd", "lr": 1.0, "grad_clip": None, "logits_mb": 1}  # weights differ as gradients do


def stepped(pack: Pack, folder: Path, ranks: Ranks, **train: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of a pass, and the weights after one step on it. All ranks compute it, those of one team count."""
    learner = Learner(config(GRPO(entropy_weight=0.1), **STEEP, **train).learner, folder, ranks=ranks)
    scaled = pack.having({"weight": pack.columns["weight"] / len(pack.target_K)})
    given = [[Pass(0, scaled, counts=rank < ranks.team)] for rank in range(ranks.size)]
    (columns,) = ranks.run(learner.worker, [Forward(share) for share in given])[0]
    (seen,) = ranks.run(learner.worker, [ForwardBackward(share) for share in given])[0]
    on_every_rank(learner.worker, OptimizerStep(["policy"], seen.loss))
    return columns["proximal"], load_file(learner.export(folder / "now.safetensors").path)


def way(weights: dict[str, torch.Tensor], folder: Path) -> float:
    """The norm of the way from the weights of a folder to these."""
    begun = load_file(folder / "model.safetensors")
    return norm_of({name: tensor - begun[name] for name, tensor in weights.items()})


def with_sets(tokens: int) -> Pack:
    """Rows whose tokens were drawn from kept sets, beside a long one of so many tokens that were not."""
    plain = row([at * at % 11 for at in range(tokens)], range(3, tokens, 2), episode=9)
    none = Ragged(torch.zeros(len(plain.place_S), dtype=torch.long), torch.zeros(0, dtype=torch.int32))
    (pack,) = packs([[one for one, _ in rows_with_sets(3)], [replace(plain, ragged={"kept": none})]], 1 << 20)
    return pack


@pytest.mark.parametrize("plan", [TENSOR, CONTEXT], ids=["tensor", "context"])
def test_log_probs_over_kept_sets_and_their_gradients_are_those_of_one_rank(
    plan: dict[str, int], two: Leader, qwen3_dir: Path
) -> None:
    pack = with_sets(40)
    logprobs_K, weights = stepped(pack, qwen3_dir, ALONE)
    found_K, others = stepped(pack, qwen3_dir, two, parallel=plan)
    torch.testing.assert_close(found_K, logprobs_K, atol=5e-5, rtol=0)
    assert_gradients_alike(others, weights, norm=way(weights, qwen3_dir))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("replayed", "plan", "rank"),
    [
        (True, {"expert": 2}, 0),
        (False, {"expert": 2}, 0),
        (True, {"context": 2, "expert": 2}, 0),
        (True, {"expert": 2}, 2),
        (True, {"tensor": 2, "expert": 2}, 2),
    ],
    ids=["replayed", "own choice", "context", "adapter", "adapter, tensor"],
)
def test_replay_and_balance_of_a_mixture_are_those_of_one_rank(
    replayed: bool, plan: dict[str, int], rank: int, two: Leader, mixture_dir: Path, tmp_path: Path
) -> None:
    made = all_groups(other_choice if replayed else None)
    settings: dict[str, Any] = {"balance_weight": 0.5, "gradient_checkpointing": True}
    if rank:  # its B begins at 0: two steps
        settings |= {"steps": 2, "lora_rank": rank, "lora_targets": ["experts", "gate", "q_proj"]}
    one, weights = routed_step(mixture_dir, tmp_path, made, **settings)
    other, others = routed_step(mixture_dir, tmp_path, made, two, **settings, parallel={"ranks": 2, **plan})
    assert (other.loss, numbers_of(other.routing)) == (
        pytest.approx(one.loss, abs=1e-5),
        pytest.approx(numbers_of(one.routing), rel=1e-5),
    )
    assert (other.routing.replayed > 60, other.routing.missing) == (replayed, 0 if replayed else other.routing.missing)
    assert_gradients_alike(others, weights, norm=way(weights, mixture_dir))
    expert = "model.layers.1.mlp.experts.{}.up_proj.weight"
    begun = load_file(mixture_dir / "model.safetensors")
    moved = [float((weights[name] - begun[name]).abs().max()) for name in map(expert.format, range(4))]
    assert min(moved) > 1e-5


@pytest.mark.parametrize(
    ("plan", "replayed", "train"),
    [
        ({"expert": 2}, True, {"gradient_checkpointing": True}),
        pytest.param(
            {"expert": 2}, True, {"lora_rank": 2, "lora_targets": ["experts", "gate"]}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"context": 2, "expert": 2},
            False,
            {"gradient_checkpointing": True},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["experts apart, recomputed", "experts apart, adapter", "context, own choice, recomputed"],
)
def test_ranks_compute_the_prompt_of_a_mixture_once_each(
    plan: dict[str, int], replayed: bool, train: dict[str, Any], two: Leader, mixture_dir: Path, tmp_path: Path
) -> None:
    made = [long_prompt(1), long_prompt(2, members=7)]
    made = [told(group, other_choice) for group in made] if replayed else made
    settings: dict[str, Any] = {"balance_weight": 0.5, "tokens_per_batch": 40, "steps": 2, "lr": 0.1, **train}
    settings |= {"routed": replayed}
    with prompt_in_every_pass():
        one, weights = routed_step(mixture_dir, tmp_path, made, **settings)
    other, others = routed_step(mixture_dir, tmp_path, made, two, **settings, parallel={"ranks": 2, **plan})
    assert other.loss == pytest.approx(one.loss, abs=1e-5)
    assert numbers_of(other.routing) == pytest.approx(numbers_of(one.routing), rel=1e-5)
    assert_gradients_alike(others, weights, norm=way(weights, mixture_dir))
    assert two.ledger.names(1) == two.ledger.names(0)
    assert other.tokens_distinct < 0.9 * one.tokens_distinct


@pytest.mark.medium
def test_an_adapter_over_layers_that_two_ranks_compute_together_is_that_of_one(two: Leader, tmp_path: Path) -> None:
    """Every linear layer has a bias too, which is added once."""
    folder = tiny_llama(tmp_path / "model", biases=True)
    settings = {**STEEP, "lora_rank": 2}

    def adapter(ranks: Ranks, name: str, **parallel: Any) -> tuple[Any, dict[str, torch.Tensor], dict[str, Any]]:
        learner = Learner(config(**settings, **parallel).learner, folder, ranks=ranks)
        files = [learner.export_adapter(tmp_path / f"{name} before")]
        report = [learner.step(groups(3, seed), step_of=STEP_OF) for seed in range(2)][-1]  # its B begins at 0
        files.append(learner.export_adapter(tmp_path / name))
        before, after = (load_file(file / "adapter_model.safetensors") for file in files)
        return report, before, after

    one, begun, alone = adapter(ALONE, "alone")
    other, same, shared = adapter(two, "shared", parallel=TENSOR)
    assert other.loss == pytest.approx(one.loss, abs=1e-4)  # of the second step
    assert other.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert begun.keys() == same.keys() == alone.keys() == shared.keys()
    for name, tensor in alone.items():
        assert torch.equal(begun[name], same[name])
        assert not torch.equal(begun[name], tensor)
    assert_gradients_alike(shared, alone, norm=norm_of({name: alone[name] - begun[name] for name in alone}), rel=1e-4)
    layer = "model.layers.1.self_attn.o_proj"
    names = [name.partition(",")[0] for name in two.ledger.names(0)]
    assert f"adding up {layer}" in names and not any("lora" in name or "base_layer" in name for name in names)


@pytest.mark.medium
def test_linear_layers_are_gathered_in_the_dtype_of_a_pass_and_no_bit_changes(
    two: Leader, qwen3_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, gather, probe = config(dtype="bfloat16"), fsdp.ALL_GATHER, (1, 2, 3, 4)
    moved: set[tuple[torch.dtype, int]] = set()

    def seen(output: torch.Tensor, *given: Any, **named: Any) -> Any:
        moved.add((output.dtype, output.numel()))
        return gather(output, *given, **named)

    def trained(ranks: Ranks) -> tuple[Learner, tuple[float, ...], list[float]]:
        learner = Learner(narrow.learner, qwen3_dir, ranks=ranks)
        scores = learner.score(probe)
        moved.clear()
        return learner, scores, [learner.step(groups(3, seed), step_of=STEP_OF).loss for seed in range(2)]

    monkeypatch.setattr(fsdp, "ALL_GATHER", seen)
    shared, scores, losses = trained(two)
    matrices, vectors, outside = 7680, 2 * 32 + 2 * 8, 24 * 32 + 32  # of a layer; beside layers
    assert moved == {(torch.bfloat16, matrices), (torch.float32, vectors), (torch.float32, outside)}
    hashes = shared.hashes()
    monkeypatch.setattr(fsdp, "_EXACT", ContextVar("exact", default=True))
    two.run(shared.worker, [HashWeights(), At(exact)])
    try:
        wide, _, same = trained(two)
        assert moved == {(torch.float32, size) for size in (matrices, vectors, outside)}
        assert (same, wide.hashes()) == (losses, hashes)
    finally:
        two.run(shared.worker, [HashWeights(), At(rounding)])
    _, alone, others = trained(ALONE)
    assert scores == pytest.approx(alone, abs=1e-5)
    assert losses == pytest.approx(others, abs=1e-3)


def exact() -> None:
    """From now on, this process moves float32."""
    fsdp._EXACT = ContextVar("exact", default=True)  # pyright: ignore


def rounding() -> None:
    fsdp._EXACT = ContextVar("exact", default=False)  # pyright: ignore


def narrow_model(folder: Path) -> int:
    """A model of some megabytes whose file is in bfloat16, so that it is copied as it is read; its size in float32."""
    file = tiny_qwen3(folder, vocab=20_000, layers=6, hidden=128) / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.medium
@pytest.mark.parametrize("adapter", [False, True])
def test_a_rank_holds_no_more_than_its_share_of_a_model_while_it_loads(
    adapter: bool, two: Leader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, settings = tmp_path / "model", config(lora_rank=2 if adapter else 0)
    size, seen, put = narrow_model(folder), list[int](), core_model_loading.set_param_for_module

    def looked(*given: Any) -> None:
        put(*given)
        seen.append(in_use())

    def most(ranks: Ranks) -> tuple[int, dict[str, str]]:
        """The bytes that are in use at most while a learner reads its weights, and the hashes of these."""
        seen.clear()
        gc.collect()
        before, learner = in_use(), Learner(settings.learner, folder, ranks=ranks)
        assert learner.model.obstacle is None
        return max(seen) - before, learner.hashes()

    monkeypatch.setattr(core_model_loading, "set_param_for_module", looked)
    alone, hashes = most(ALONE)
    shared, same = most(two)
    assert same == hashes
    assert alone > 0.9 * size
    assert shared < 0.6 * size


@pytest.mark.medium
@pytest.mark.parametrize(
    ("settings", "mixed"),
    [
        pytest.param(*(config(PPO(critic="own")), False), marks=pytest.mark.slow),
        pytest.param(*(config(GRPO(kl_weight=0.1, reference=2), lora_rank=2), False), marks=pytest.mark.slow),
        (config(GRPO(kl_weight=0.1, reference=2), parallel=TENSOR), False),
        pytest.param(*(config(PPO(critic="own"), parallel={**TENSOR, "expert": 2}), True), marks=pytest.mark.slow),
        pytest.param(*(config(lora_rank=2, parallel={"ranks": 2, "expert": 2}), True), marks=pytest.mark.slow),
        (config(GRPO(kl_weight=0.1), lora_rank=2, parallel=TENSOR, gradient_checkpointing=True), False),
    ],
    ids=["critic", "adapter", "tensor", "tensor and expert", "adapter and expert", "adapter and tensor"],
)
def test_a_checkpoint_of_two_ranks_is_that_of_one(
    settings: RunConfig, mixed: bool, two: Leader, qwen3_dir: Path, mixture_dir: Path, tmp_path: Path
) -> None:
    model = mixture_dir if mixed else qwen3_dir
    shared = Learner(settings.learner, model, ranks=two)
    shared.state.trained = [()]  # else nothing is to be saved
    begun = shared.save(tmp_path / "shared")  # no optimizer remembers anything yet
    shared.step(groups(3), step_of=STEP_OF)
    write = shared.copy(tmp_path / "shared")
    hashes, probe = shared.hashes(), (1, 2, 3, 4)
    scores, rounded = shared.score(probe), shared.score(probe, torch.bfloat16)
    sent = shared.snapshot(torch.bfloat16).fingerprints()
    shared.step(groups(3), step_of=STEP_OF)  # while the copy of before is yet to be written
    assert write is not None and shared.hashes() != hashes
    alone = Learner(settings.learner, model)
    alone.load(begun)
    folder = write(lambda: None)
    alone.load(folder)
    assert alone.hashes() == hashes
    assert alone.score(probe) == pytest.approx(scores, abs=1e-5)
    apart = settings.train.lora_rank and settings.train.parallel.expert > 1
    if not apart:  # alone, PEFT hides the weights below an adapter of experts, and they are not rounded
        assert alone.score(probe, torch.bfloat16) == pytest.approx(rounded, abs=1e-5)
    assert rounded != pytest.approx(scores, abs=1e-5)
    assert alone.snapshot(torch.bfloat16).fingerprints() == sent
    again = Learner(settings.learner, model, ranks=two)
    again.load(alone.save(tmp_path / "alone"))
    assert again.hashes() == hashes
    for learner in (alone, again):
        learner.state.trained = [()]
    assert same(alone, again, tmp_path)
    one, both = moments(tmp_path / "0" / folder.name), moments(folder)
    assert one.keys() == both.keys() and all(torch.equal(one[key], both[key]) for key in one)
    files = sorted(folder.glob("optimizer/*"))
    sizes = [sum(value.nbytes for value in load_file(file).values()) for file in files]
    assert len(sizes) == 2 and max(sizes) < 0.6 * sum(sizes)
    assert all("step" in name or name in torch.load(folder / "optimizer.pt")["shards"] for name in both)
    (folder / "SHA256SUMS").unlink()
    files[1].unlink()
    with pytest.raises(ModelError, match="numbers, and its parameter"):
        alone.load(folder)


@pytest.mark.parametrize(("offload", "tensor"), [(False, 1), (True, 2)])
def test_muon_over_two_ranks_makes_the_updates_of_one(offload: bool, tensor: int, two: Leader, qwen3_dir: Path) -> None:
    learner, work = Learner(config().learner, qwen3_dir, ranks=two), partial(updated, 2, tensor=tensor, offload=offload)
    before = two.ledger.standings()[0].count
    for one, other in zip(updated(1), everywhere(two, learner, work), strict=True):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=0)
    entered = two.ledger.names(0)[before - two.ledger.standings()[0].count :]
    assert two.ledger.names(1) == two.ledger.names(0)
    assert entered.count("matrices to be made orthogonal") == 4 * 4  # of seven matrices, two at a time


@pytest.mark.medium
@pytest.mark.parametrize(
    ("settings", "mixed"),
    [
        ({"optimizer": "muon"}, False),
        pytest.param({"parallel": {**TENSOR, "expert": 2}}, True, marks=pytest.mark.slow),
        pytest.param({"optimizer": "muon", "parallel": {**TENSOR, "expert": 2}}, True, marks=pytest.mark.slow),
        pytest.param({"optimizer": "muon", "lora_rank": 2, "parallel": TENSOR}, False, marks=pytest.mark.slow),
    ],
    ids=["muon", "tensor and expert", "muon, tensor and expert", "muon, adapter and tensor"],
)
def test_offloaded_optimizers_over_two_ranks_compute_the_same_bits(
    settings: dict[str, Any], mixed: bool, two: Leader, qwen3_dir: Path, mixture_dir: Path, tmp_path: Path
) -> None:
    model, away = mixture_dir if mixed else qwen3_dir, {**settings, "offload_optimizer": True}

    def after_two(name: str, **given: Any) -> tuple[Learner, Path]:
        learner = Learner(config(**given).learner, model, ranks=two)
        for seed in range(2):
            learner.step(groups(3, seed), step_of=STEP_OF)
        return learner, learner.save(tmp_path / name)

    here, folder = after_two("here", **settings)
    hashes, remembered = here.hashes(), moments(folder)
    there, offloaded = after_two("there", **away)
    assert here.models.away() == [] and there.hashes() == hashes
    found = moments(offloaded)
    assert found.keys() == remembered.keys()
    assert all(torch.equal(found[name], remembered[name]) for name in found)
    size = sum(one.nbytes for one in found.values() if one.dim())
    assert 0.4 * size < sum(one.nbytes for one in there.models.away()) < 0.6 * size
    there.step(groups(3, 2), step_of=STEP_OF)
    last = there.hashes()
    alone = Learner(config(**{**settings, "parallel": {}}).learner, model)
    alone.load(offloaded)
    assert alone.hashes() == hashes
    again = Learner(config(**away).learner, model, ranks=two)
    again.load(alone.save(tmp_path / "alone"))
    again.step(groups(3, 2), step_of=STEP_OF)
    assert again.hashes() == last
    assert two.ledger.names(1) == two.ledger.names(0)
