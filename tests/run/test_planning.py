"""`agentrl plan`: against figures worked out by hand, and what they tell a user to type."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.config import RunConfig, apply_override
from agentrl.config import load as load_config
from agentrl.errors import ConfigError, UsageError
from agentrl.learner.data.batch import Row
from agentrl.learner.memory_budget import MemoryBudget
from agentrl.learner.model.models import Models
from agentrl.planning import plan
from agentrl.planning.plan import Gpu, Work
from agentrl.run import trainer

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
# embedding, and of a layer: q and o, k and v, the MLP, four norms; the last norm
PARAMETERS = 1024 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64 + 2 * 16) + 64
RUN = """
model = "{model}"
[env]
id = "agentrl/Nim-v0"
[rollout]
max_context = 256
max_running = 64
[engine]
kv_cache_mb = 4
[train]
tokens_per_batch = 512
"""
WORK = Work(row=200, sampled=0.2, mfu=0.5, mbu=0.5)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE))
    path = folder / "run.toml"
    path.write_text(RUN.format(model=folder / "model"))
    return path


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    """A learner that several tests plan is traced once: that takes seconds."""
    trace, known = plan.held, dict[object, MemoryBudget]()

    def held(settings: object, folder: Path, rows: Sequence[Row], **named: Any) -> MemoryBudget:
        lengths = tuple((row.group_id, len(row.token_ids), len(row.place_S)) for row in rows)
        key = (
            Models.prompt_once,
            repr(settings),
            (folder / "config.json").read_text(),
            lengths,
            *sorted(named.items()),
        )
        if key not in known:
            known[key] = trace(settings, folder, rows, **named)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "held", held)
        yield


@pytest.fixture(scope="module")
def config(file: Path) -> RunConfig:
    return load_config(file)


def run(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, [*map(str, words)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def test_bytes_and_seconds_are_those_of_a_hand_computation(config: RunConfig) -> None:
    gpu = Gpu(memory_gb=1, tflops=1e-3, gb_per_s=1, bus_gb_per_s=1)
    found = plan.plan(config, gpu, 3, WORK)
    assert found.held.weights == pytest.approx(4 * PARAMETERS, rel=1e-3)  # and rotary's few frequencies
    assert found.held.gradients == 4 * PARAMETERS and found.held.optimizer == pytest.approx(8 * PARAMETERS, rel=1e-3)
    one, two = found.splits
    assert (one.engines, one.learners, two.engines, two.learners) == (1, 2, 2, 1)
    assert two.learner_s == pytest.approx(2 * one.learner_s)  # the same operations on half of the GPUs
    assert two.learner_bytes - one.learner_bytes == pytest.approx(found.held.static / 2 - found.held.weights)
    kv = 2 * 2 * 2 * 16 * 2  # K and V, layers, heads, width, bytes of bfloat16
    assert one.at_once == two.at_once == 64
    token_s = max((2 * PARAMETERS + 64 * kv * 100) / 0.5e9, 2 * PARAMETERS * 64 / 0.5e9)
    assert one.episode_s == pytest.approx(40 * token_s)  # it samples 40 of its 200 tokens
    episodes = config.buffer.groups_per_step * config.rollout.group_size
    assert one.engine_s == pytest.approx(episodes / 64 * one.episode_s)
    assert found.best == min((one, two), key=lambda split: max(split.learner_s, split.engine_s))


def test_a_pass_is_planned_full_but_not_over_its_budget(config: RunConfig) -> None:
    rows = plan.rows_of(config, WORK)
    assert len(rows) == 8 and {row.group_id for row in rows} == {0}  # 160 + 8 x 40 = 480 of 512
    assert len(plan.rows_of(config, replace(WORK, sampled=0.5))) == 4  # 100 + 4 x 100 = 500


@pytest.mark.medium
@pytest.mark.parametrize("mixed", [False, True])
def test_the_prompt_of_a_group_larger_than_a_pass_is_planned_once_for_each_rank(
    mixed: bool, config: RunConfig, tmp_path: Path
) -> None:
    """Each member of eight has a pass of 100 + 100 tokens; the last token of the prompt predicts and is in all."""
    gpu, work = Gpu(memory_gb=1, tflops=1, gb_per_s=1, bus_gb_per_s=1), replace(WORK, sampled=0.5)
    tight = setting(mixture_of(config, tmp_path) if mixed else config, "train.tokens_per_batch=256")
    once = plan.plan(tight, gpu, 10, work).splits
    with patch.object(Models, "prompt_once", False):
        again = plan.plan(tight, gpu, 10, work).splits
    groups, body = config.buffer.groups_per_step, PARAMETERS - 1024 * 64
    if mixed:  # a token uses two of eight experts
        body += 2 * (2 * 3 * 64 * 32 + 64 * 8 - 3 * 64 * 128)
    stem = 6 * body * 99 + 12 * 2 * 64 * (99 * 100 // 2)  # 2 layers, 4 heads of 16
    for one, other in zip(once, again, strict=True):
        ranks = one.learners
        saved = groups * (8 - min(8, ranks)) * stem / (ranks * 0.5e12)
        assert other.learner_s - one.learner_s == pytest.approx(saved, rel=1e-6, abs=1e-15)
        assert one.learner_bytes == pytest.approx(other.learner_bytes, rel=0.1)
    assert once[-1].learners == 1 and once[-1].learner_s < 0.75 * again[-1].learner_s


@pytest.mark.medium
def test_the_settings_that_it_names_make_a_run_fit(config: RunConfig) -> None:
    whole = plan.plan(config, plan.GPUS["h100"], 1, WORK)
    (one,) = whole.splits
    memory = 0.8 * whole.held.total + one.engine_bytes
    small = Gpu(memory_gb=memory / 1e9, tflops=1, gb_per_s=1, bus_gb_per_s=1)
    assert plan.plan(config, small, 1, WORK).best is None
    first, *_ = plan.changes(config, small, 1, WORK)
    assert first.startswith("--set train.gradient_checkpointing=true")
    assert plan.plan(setting(config, first), small, 1, WORK).best is not None


def setting(config: RunConfig, said: str) -> RunConfig:
    """The run with what `plan` says to type."""
    document = config.model_dump(mode="json")
    for one in said.removeprefix("--set ").split(" --set "):
        apply_override(document, one)
    return RunConfig.model_validate(document)


@pytest.fixture
def quick(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> MemoryBudget:
    """Every learner holds what that of the run does."""
    found = plan.plan(config, plan.GPUS["h100"], 1, WORK).held
    monkeypatch.setattr(plan, "held", lambda *_, **__: found)
    return found


def test_a_cache_that_does_not_fit_is_told_how_large_it_may_be(config: RunConfig, quick: MemoryBudget) -> None:
    gpu = Gpu(memory_gb=(1.2 * quick.total + 4 * PARAMETERS + (4 << 20)) / 1e9, tflops=1, gb_per_s=1, bus_gb_per_s=1)
    large = setting(config, "engine.kv_cache_mb=64")
    assert plan.plan(config, gpu, 1, WORK).best is not None and plan.plan(large, gpu, 1, WORK).best is None
    first, *_ = plan.changes(large, gpu, 1, WORK)
    assert first.startswith("--set engine.kv_cache_mb=")
    assert plan.plan(setting(large, first), gpu, 1, WORK).best is not None


def test_an_engine_over_several_gpus_is_planned_with_its_share_of_weights_and_cache(
    config: RunConfig, quick: MemoryBudget
) -> None:
    def planned(**vllm: object) -> plan.GpuSplit:
        document = config.model_dump(mode="json")
        document["engine"] |= {"kind": "vllm", "dtype": "bfloat16", "replicas": [[0, 1], [2, 3]], "vllm": vllm}
        gpu = Gpu(memory_gb=1, tflops=1e-3, gb_per_s=1, bus_gb_per_s=1)
        found = plan.plan(RunConfig.model_validate(document), gpu, 5, replace(WORK, row=256))
        assert [(one.engines, one.learners) for one in found.splits] == [(2, 3), (4, 1)]
        return found.splits[1]

    cache, kv = 4 << 20, 2 * 2 * 2 * 16 * 2  # bytes of a token: K and V, layers, heads, width, bfloat16
    assert cache // (kv * 256) == 64  # rows
    divided, copied, small = planned(), planned(**{"data-parallel-size": 2}), planned(quantization="fp8")
    assert divided.at_once == copied.at_once == 64  # rollout.max_running
    assert divided.engine_bytes == 2 * PARAMETERS / 2 * 2 + cache  # a half, and a second copy of it
    assert copied.engine_bytes == 2 * PARAMETERS * 2 + cache
    assert small.engine_bytes == 1 * PARAMETERS / 2 * 2 + cache
    token_s = max((PARAMETERS + 32 * kv / 2 * 128) / 0.5e9, PARAMETERS * 32 / 0.5e9)  # of 32 rows in each engine
    assert divided.episode_s == pytest.approx(51 * token_s)  # a fifth of 256 tokens is sampled
    token_s = max((2 * PARAMETERS + 16 * kv * 128) / 0.5e9, 2 * PARAMETERS * 16 / 0.5e9)
    assert copied.episode_s == pytest.approx(51 * token_s)


def test_gpus_that_cannot_be_divided_are_told_which_numbers_can(config: RunConfig) -> None:
    document = config.model_dump(mode="json")
    document["engine"] |= {"kind": "vllm", "replicas": [[0, 1, 2]]}
    document["train"] |= {"parallel": {"ranks": 4, "tensor": 2, "context": 2}}
    run = RunConfig.model_validate(document)
    why = r"train\.parallel\.context = 2 GPUs learn together, engine\.replicas gives each engine 3: give 7 or 10"
    with pytest.raises(UsageError, match=rf"--n 8: .*{why}"):
        plan.plan(run, plan.GPUS["h100"], 8, WORK)


@pytest.mark.slow
def test_the_run_that_is_planned_is_the_one_that_train_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "vocab_size": 1_000_000}))  # 64 million parameters
    file = tmp_path / "run.toml"
    file.write_text(f'model = "{tmp_path}"\n[env]\nid = "agentrl/Nim-v0"\n[train]\ntokens_per_batch = 1024\n')
    code, text = run("plan", file, "--n", 2, "--set", "engine.kv_cache_mb=4")
    assert code == 0 and "train.dtype = 'bfloat16'" in text and "engine.dtype = 'bfloat16'" in text
    assert "train.tokens_per_batch =" not in text, "the run file says it"
    (room,) = re.findall(r"of 16 episodes .* rollout\.max_running = 256, .* there is room for --set (\S+)", text)
    code, text = run("plan", file, "--n", 2, "--set", room)
    assert code == 0 and "there is room" not in text and re.search(r"1 \+ 1 +│ yes .*│ 256 ", text)


@pytest.mark.medium
def test_the_command_says_the_split_and_a_cost_only_for_a_given_price(file: Path) -> None:
    code, text = run("plan", file, "--n", 2, "--row", 200)
    assert code == 0 and "Best: 1 for engines, 1 for the learner" in text and "an hour" not in text
    (hours,) = re.findall(r"take (\S+) GPU hours\.", text)
    _, priced = run("plan", file, "--n", 2, "--row", 200, "--price", 1000)
    (cost,) = re.findall(r"GPU hours, (\S+) at 1000 an hour", priced)
    assert float(cost) == pytest.approx(1000 * float(hours), rel=0.01)


@pytest.mark.medium
def test_what_cannot_fit_ends_with_exit_code_1(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plan.GPUS, "h100", Gpu(memory_gb=1e-6, tflops=1, gb_per_s=1, bus_gb_per_s=1))
    monkeypatch.setattr(plan, "changes", lambda *_: iter(()))  # each is traced, and none helps
    code, text = run("plan", file)
    assert code == 1 and "It does not fit." in text


@pytest.mark.medium
def test_training_on_a_gpu_that_cannot_hold_the_learner_is_refused(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan.refusal(config, 80 << 30) is None
    reason = plan.refusal(config, 1 << 20)
    assert reason is not None and "the GPU has 0.0" in reason

    def answer(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess([], 0, stdout=reason)

    monkeypatch.setattr(trainer.subprocess, "run", answer)
    with pytest.raises(ConfigError, match=r"train\.device.*a step of the learner needs .*agentrl plan"):
        trainer._check_memory(config)


def test_a_prediction_that_fails_stops_no_run(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("plan", 120)

    monkeypatch.setattr(trainer.subprocess, "run", hang)
    trainer._check_memory(config)
    assert "is not known" in capsys.readouterr().err


def test_a_learner_too_large_for_one_gpu_may_start_on_four(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    bytes_ = plan.plan(config, plan.GPUS["h100"], 1, WORK).held
    monkeypatch.setattr(plan, "held", lambda *_, **__: replace(bytes_, activations=0.0, temporary=0.0))
    parallel = config.train.parallel.model_copy(update={"ranks": 4})
    shared = config.model_copy(update={"train": config.train.model_copy(update={"parallel": parallel})})
    needs = int(bytes_.static / 4 + bytes_.weights)  # its shard, and two layers of two that are whole at a time
    assert plan.refusal(config, needs) is not None
    assert plan.refusal(shared, needs) is None
    assert plan.refusal(shared, needs // 2) is not None


@pytest.mark.medium
def test_ranks_that_compute_a_pass_together_are_planned_with_their_part_of_it(config: RunConfig) -> None:
    def of(tensor: int) -> RunConfig:
        parallel = config.train.parallel.model_copy(update={"ranks": tensor, "tensor": tensor})
        return config.model_copy(update={"train": config.train.model_copy(update={"parallel": parallel})})

    gpu, whole = plan.GPUS["h100"], plan.plan(config, plan.GPUS["h100"], 1, WORK).held
    found = plan.plan(of(2), gpu, 4, WORK)
    assert [(one.engines, one.learners) for one in found.splits] == [(2, 2)]
    (split,) = found.splits
    nodes, layers = 480, 2  # of a full pass
    divided = (
        whole.activations - found.held.activations
    )  # of each layer: half of q, k, v, what attention gives, the MLP
    assert divided >= 4 * nodes * layers * (64 + 2 * 32 + 64 + 3 * 128) / 2
    assert found.held.activations > whole.activations / 2  # what is between layers is on both
    weights = found.held.static / 2 + found.held.weights / 2  # a shard, and half of two layers of two
    assert split.learner_bytes == pytest.approx(weights + found.held.activations + found.held.temporary)
    with pytest.raises(UsageError, match=r"--n 1: train\.parallel\.tensor = 2 GPUs learn together: give 3"):
        plan.plan(of(2), gpu, 1, WORK)
    with pytest.raises(ConfigError, match=r"train\.parallel\.tensor = 4: the model.s num_key_value_heads = 2"):
        plan.plan(of(4), gpu, 8, WORK)


def mixture_of(config: RunConfig, folder: Path) -> RunConfig:
    """The run with a mixture in the place of its model."""
    mixture = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    shape = {**SHAPE, **mixture, "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(shape))
    return config.model_copy(update={"model": str(folder)})


def test_a_mixture_is_planned_with_the_experts_that_a_token_uses(config: RunConfig, tmp_path: Path) -> None:
    parallel = config.train.parallel.model_copy(update={"ranks": 2, "expert": 2})
    train = config.train.model_copy(update={"parallel": parallel})
    apart = mixture_of(config.model_copy(update={"train": train}), tmp_path)
    gpu = Gpu(memory_gb=1, tflops=1e-3, gb_per_s=1, bus_gb_per_s=1)
    found = plan.plan(apart, gpu, 3, WORK)
    of_experts, others = 2 * 8 * 3 * 64 * 32, PARAMETERS - 2 * 3 * 64 * 128 + 2 * 64 * 8  # experts, and with routers
    assert (found.held.experts, found.held.parameters) == (of_experts, of_experts + others)
    ((engines, learners),) = ((one.engines, one.learners) for one in found.splits)
    assert (engines, learners) == (1, 2), "two ranks keep experts apart: the learner has two GPUs"
    (split,) = found.splits
    layer = 4 * (others + of_experts / 2)  # two of two layers, of which a rank has half of the experts
    needs = found.held.static / 2 + layer + found.held.activations + found.held.temporary
    assert split.learner_bytes == pytest.approx(needs, rel=1e-3)  # rotary's few frequencies again
    kv = 2 * 2 * 2 * 16 * 2
    read = 2 * others + 2 * of_experts * (1 - 0.75**64)  # of 64 tokens that each use two of eight experts
    token_s = max((read + 64 * kv * 100) / 0.5e9, 2 * (others + of_experts / 4) * 64 / 0.5e9)
    assert split.at_once == 64 and split.episode_s == pytest.approx(40 * token_s)
    with pytest.raises(UsageError, match=r"--n 2: train\.parallel\.expert = 2 GPUs learn together: give 3"):
        plan.plan(apart, gpu, 2, WORK)


def along(of_rank: MemoryBudget, whole: MemoryBudget, nodes: int) -> float:
    """The share that one of four ranks has of the keys and values along paths of so many nodes."""
    each = 2 * 2 * 16 * 4 * 2  # K and V, heads, width, bytes, layers
    found = of_rank.activations - of_rank.lent - (whole.activations - whole.lent - each * nodes) / 4
    assert found % each == 0, "whole nodes"
    return found / (each * nodes)


@pytest.mark.medium
def test_ranks_that_share_the_tokens_of_a_pass_are_planned_with_their_share(config: RunConfig) -> None:
    parallel = config.train.parallel.model_copy(update={"ranks": 4, "context": 4})
    shared = config.model_copy(update={"train": config.train.model_copy(update={"parallel": parallel})})
    gpu, whole = plan.GPUS["h100"], plan.plan(config, plan.GPUS["h100"], 1, WORK).held
    found = plan.plan(shared, gpu, 6, WORK)
    assert [(one.engines, one.learners) for one in found.splits] == [(2, 4)]
    assert found.held.temporary == whole.temporary
    assert 0.25 < along(found.held, whole, 8 * 200) < 1
    tight, work = "train.tokens_per_batch=256", replace(WORK, sampled=0.5)  # a pass for each member
    whole, part = (plan.plan(setting(one, tight), gpu, 6, work).held for one in (config, shared))
    kv = 99 * 2 * 2 * 16 * 2  # of the prompt: tokens, K and V, heads, width, layers: every rank has them, and sums
    assert part.lent == whole.lent == 2 * 4 * kv
    assert 1 < along(part, whole, 99 + 200) < 3  # several runs of a rank have a copy of their path each
    with pytest.raises(UsageError, match=r"--n 3: train\.parallel\.context = 4 GPUs learn together: give 5"):
        plan.plan(shared, gpu, 3, WORK)


def test_what_an_optimizer_remembers_is_planned_for_each_rank(config: RunConfig) -> None:
    """Of float32 weights and gradients a rank has half, and two layers of two whole."""
    matrices = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    for given, remembered, host in (
        ({"offload_optimizer": True}, 0, 8 * PARAMETERS),
        ({"optimizer": "muon"}, 8 * PARAMETERS - 4 * matrices, 0),
    ):
        document = config.model_dump(mode="json")
        document["train"] |= {"parallel": {"ranks": 2}, **given}
        found = plan.plan(RunConfig.model_validate(document), plan.GPUS["h100"], 3, WORK)
        (split,) = (one for one in found.splits if one.learners == 2)
        of_a_pass = found.held.activations + found.held.temporary
        assert split.learner_bytes - of_a_pass == pytest.approx(8 * PARAMETERS + remembered / 2, rel=1e-3)
        assert found.held.host == pytest.approx(host, rel=1e-3)


def by_turns(config: RunConfig, **train: object) -> RunConfig:
    """On the GPU, with vLLM; what cannot be is refused."""
    document = config.model_dump(mode="json")
    document["engine"] |= {"kind": "vllm", "colocated": True, "dtype": "bfloat16"}
    document["train"] |= {"device": "cuda", **train}
    return RunConfig.model_validate(document)


@pytest.mark.medium
def test_by_turns_phases_have_the_gpu_in_turn_and_their_seconds_add_up(config: RunConfig) -> None:
    gpu = Gpu(memory_gb=1, tflops=1e-3, gb_per_s=1, bus_gb_per_s=0.1)
    turns = by_turns(config)
    beside = turns.model_copy(update={"engine": turns.engine.model_copy(update={"colocated": False})})
    found, (shared,) = plan.plan(turns, gpu, 1, WORK), plan.plan(beside, gpu, 1, WORK).splits
    (one,) = found.splits
    state = 12 * PARAMETERS  # weights and two moments, in float32; gradients end with the step
    assert one.host_bytes == pytest.approx(state, rel=1e-3)
    assert one.swap_s == pytest.approx((2 * state + 2 * PARAMETERS) / (0.1e9 * 0.5), rel=1e-3)
    assert one.step_s == pytest.approx(one.learner_s + one.engine_s + one.swap_s)
    assert shared.step_s == pytest.approx(shared.learner_s + shared.engine_s) and shared.host_bytes == 0
    assert one.engine_bytes == 2 * PARAMETERS + (4 << 20)  # and no second copy of the weights
    adapter = plan.plan(by_turns(config, lora_rank=4), gpu, 1, WORK)
    (split,) = adapter.splits
    assert split.host_bytes == adapter.held.weights + adapter.held.optimizer + 2 * adapter.held.parameters
    with pytest.raises(UsageError, match=r"--n 2: engine\.colocated shares one GPU: give 1, or --set engine\.coloc"):
        plan.plan(turns, gpu, 2, WORK)


@pytest.mark.medium
def test_what_fits_one_gpu_only_by_turns_is_told_so_and_fits(config: RunConfig, file: Path) -> None:
    turns = by_turns(config)
    document = turns.model_dump(mode="json")
    document["engine"]["colocated"] = False
    beside = RunConfig.model_validate(document)
    held = plan.plan(turns, plan.GPUS["h100"], 1, WORK).held
    needs = max(held.total, 2 * PARAMETERS + (4 << 20))
    gpu = Gpu(memory_gb=1.1 * needs / 1e9, tflops=1, gb_per_s=1, bus_gb_per_s=1)
    assert plan.plan(beside, gpu, 1, WORK).best is None
    first, *_ = plan.changes(beside, gpu, 1, WORK)
    assert first == "--set engine.colocated=true"
    assert plan.plan(turns, gpu, 1, WORK).best is not None
    assert "--set engine.colocated=true" not in plan.changes(config, gpu, 1, WORK), "its engine is on the CPU"
    settings = ["engine.kind=vllm", "engine.dtype=bfloat16", "train.device=cuda", "engine.colocated=true"]
    code, text = run("plan", file, "--row", 200, *(f"--set={setting}" for setting in settings))
    assert code == 0 and "By turns: " in text and "wait in host memory" in text and "1, by turns" in text


@pytest.mark.medium
def test_turns_that_memory_cannot_hold_are_refused(config: RunConfig) -> None:
    turns = by_turns(config)
    assert plan.refusal(turns, 80 << 30, 64 << 30) is None
    small = plan.refusal(turns, 80 << 30, 1 << 20)
    assert small is not None and re.search(
        r"\(engine\.colocated\) .* wait for the GPU .*: give train\.lora_rank", small
    )
    small = plan.refusal(setting(turns, "engine.kv_cache_mb=512"), 500 << 20, 64 << 30)
    assert small is not None and "lower engine.kv_cache_mb = 512" in small


def test_a_gpu_is_a_name_or_numbers() -> None:
    assert plan.gpu_of("h100") is plan.GPUS["h100"]
    mine = plan.gpu_of("mine,312,80,2039")
    assert (mine.tflops, mine.memory_gb, mine.gb_per_s) == (312, 80, 2039)
    for said in ("h1000", "mine,312,80", "mine,312,80,fast", "mine,-1,80,2039", "mine,312,80,inf"):
        with pytest.raises(UsageError, match="or name,TFLOP/s,GB,GB/s as mine,312,80,2039"):
            plan.gpu_of(said)
