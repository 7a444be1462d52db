"""The embedded engine in bfloat16: products, log-probs, weights in flight, within what that dtype rounds."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case
from safetensors.torch import save_file

from agentrl.config import EngineSettings
from agentrl.engine.embedded import architecture, products
from agentrl.engine.embedded.architecture import read_architecture
from agentrl.engine.embedded.batching import Batcher
from agentrl.engine.embedded.model import EmbeddedModel, KVStore, read_weights
from agentrl.engine.embedded.products import Product
from agentrl.engine.embedded_process import embedded_argv
from agentrl.engine.weight_sync.canary import TOLERANCE, probe_tokens
from agentrl.host.cores import multiplies_bfloat16
from agentrl.models.resolve import engine_dtype

from .conftest import VOCAB, make_model
from .oracle import reference_logprobs
from .test_batching import Case, prompt, swap

main = importlib.import_module("agentrl.engine.embedded.__main__")
PROBE = list(probe_tokens(VOCAB))
NOISE = 0.04  # nats of one token; measured for these models: 0.013


@each_case("unpacked", [False, True])
@each_case("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_that_of_rounded_numbers(
    dtype: torch.dtype, unpacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any number of rows, also with sizes that no layout likes, packed where this machine can and not."""
    if unpacked:
        monkeypatch.setattr(products, "_packs", lambda dtype: False)
    torch.manual_seed(0)
    weight, bias = torch.randn(523, 517), torch.randn(523)
    product, plain = Product(weight, bias, dtype=dtype), Product(weight, dtype=dtype)
    for rows in (0, 1, 7, 70):
        x, onto = torch.randn(rows, 517), torch.randn(rows, 523)
        whole = x.to(dtype).double() @ weight.to(dtype).double().t()
        # In bfloat16 the product, of up to 140, is rounded before or after the bias is added.
        close = {"rtol": 2**-8, "atol": 2**-8 * 140} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-3}
        for found, expected in (
            (plain(x), whole),
            (product(x), whole + bias),
            (plain.onto(onto, x), whole + onto),
            (product.onto(onto, x), whole + bias + onto),
        ):
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.double(), expected, **close)


def gentle(folder: Path, seed: int, family: str = "qwen3", **given: object) -> Path:
    """A model that is as far from uniform as pretrained ones are, and no further."""
    return make_model(folder, family, seed=seed, initializer_range=0.1, **given)


def rounded(folder: Path, target: Path) -> Path:
    """The model with its matrices rounded to bfloat16."""
    shutil.copytree(folder, target)
    weights = {name: tensor.bfloat16() if tensor.dim() > 1 else tensor for name, tensor in read_weights(folder).items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def scores(folder: Path, dtype: torch.dtype, wrong: dict[str, torch.Tensor] | None = None) -> list[float]:
    architecture, weights = read_architecture(folder), read_weights(folder) | (wrong or {})
    model = EmbeddedModel(architecture, weights, length=200, dtype=dtype)
    return Batcher(model, KVStore(architecture, 1, 200, dtype), max_batch=1).score(PROBE)


@each_case(
    ("family", "given"),
    [
        ("qwen3", {"tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_the_probe_costs_what_it_costs_the_rounded_model_and_much_else_with_a_wrong_layer(
    family: str, given: dict[str, bool], tmp_path: Path
) -> None:
    folder, other = gentle(tmp_path / "a", 0, family, **given), gentle(tmp_path / "b", 1, family, **given)
    expected = reference_logprobs(rounded(folder, tmp_path / "rounded"), PROBE, 1)
    name = "model.layers.1.mlp.down_proj.weight"
    wrong = {name: read_weights(other)[name]}

    def apart(*given: Any) -> float:
        return max(abs(a - b) for a, b in zip(scores(folder, *given), expected, strict=True))

    assert 5e-4 < apart(torch.bfloat16) < NOISE < TOLERANCE["bfloat16"] < apart(torch.bfloat16, wrong)


def test_attended_lengths_repeat_in_bfloat16_and_none_is_beyond_the_cache(tmp_path: Path) -> None:
    architecture, weights = read_architecture(gentle(tmp_path, 0)), read_weights(tmp_path)
    rounded, exact = (
        EmbeddedModel(architecture, weights, length=200, dtype=d) for d in (torch.bfloat16, torch.float32)
    )
    assert [rounded.attended(n, 200) for n in (0, 1, 64, 65, 198)] == [0, 16, 64, 80, 200]
    assert [exact.attended(n, 200) for n in (0, 1, 65)] == [0, 1, 65]


def test_new_weights_in_flight_are_rounded_and_every_token_is_of_its_version(tmp_path: Path) -> None:
    folders = [gentle(tmp_path / str(seed), seed) for seed in (0, 1)]
    exact = [rounded(folder, tmp_path / f"{folder.name} rounded") for folder in folders]
    case = Case(folders[0], dtype=torch.bfloat16)
    for member in range(6):
        case.submit(str(member), prompt(member // 3, 40), max_tokens=20)
    case.run(10)
    swap(case, folders[1], 1, recompute=True)
    case.run()
    for request in case.requests.values():
        spans = request.spans(0, request.sampled)
        assert [span.version for span in spans] == [0, 1]
        for span in spans:
            expected = reference_logprobs(exact[span.version], request.tokens, request.prompt_length)
            assert request.logprobs[span.start : span.end] == pytest.approx(expected[span.start : span.end], abs=NOISE)


@each_case(
    ("flags", "large", "dtype"),
    [
        ("fma avx512_bf16", 0, "bfloat16"),
        ("amx_bf16", 0, "bfloat16"),
        ("avx2 fma", 0, "float32"),
        ("avx512_bf16", 1 << 40, "float32"),
    ],
)
def test_auto_is_bfloat16_for_a_large_model_on_a_cpu_that_multiplies_it(
    flags: str, large: int, dtype: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = tmp_path / "cpuinfo"
    cpu.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\nbogomips\t: 1\n")
    monkeypatch.setattr(architecture, "multiplies_bfloat16", lambda: multiplies_bfloat16(cpu))
    monkeypatch.setattr(architecture, "LARGE", large)
    assert engine_dtype(EngineSettings(dtype="auto"), model_dir) == dtype
    engine, _ = main.build(main.parse_arguments(["--model", str(model_dir), "--dtype", "auto", "--kv-cache-mb", "16"]))
    assert engine.batcher.model.dtype == getattr(torch, dtype)


def test_a_machine_that_does_not_tell_its_instructions_multiplies_none(tmp_path: Path) -> None:
    assert not multiplies_bfloat16(tmp_path / "absent")


def test_its_command_says_the_dtype(model_dir: Path, tmp_path: Path) -> None:
    argv = embedded_argv(model_dir, EngineSettings(dtype="bfloat16"), ready_file=tmp_path / "ready")
    assert main.parse_arguments(argv[3:]).dtype == "bfloat16"
