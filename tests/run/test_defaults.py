"""What a run file leaves out follows from the machine and the model; what it says stays. Device facts are made up."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from each_case import each_case

from agentrl.config import RunConfig, load, machine_defaults, parse
from agentrl.config.machine_defaults import Machine, chosen, fitted
from agentrl.run.run_folder import RunDir
from agentrl.run.trainer import Trainer

BILLION = 1_000_000_000
H100 = Machine(gpus=1, gpu_bytes=80 << 30, vllm=True)
SMALL_GPU = Machine(gpus=1, gpu_bytes=16 << 30, vllm=True)


def run(**sections: Any) -> RunConfig:
    return parse({"model": "agentrl/tiny-coder", "env": {"id": "agentrl/Calculator-v0"}, **sections})


def test_without_a_gpu_nothing_is_chosen() -> None:
    config = run()
    assert fitted(config, Machine(vllm=True), 8 * BILLION) == (config, {})
    assert fitted(config, H100, 1_000_000) == (config, {}), "nor for a tiny model"


CPU = Machine(bfloat16=True)


def test_a_cpu_with_instructions_for_bfloat16_computes_a_real_model_in_it() -> None:
    config, found = fitted(run(), CPU, 134_000_000)
    assert found == {"train.dtype": "bfloat16", "engine.dtype": "bfloat16"}
    assert (config.train.dtype, config.engine.dtype, config.train.device) == ("bfloat16", "bfloat16", "cpu")
    assert chosen(run(), CPU, 1_000_000) == chosen(run(), Machine(), BILLION) == {}
    assert chosen(run(train={"dtype": "float32"}), CPU, BILLION) == {"engine.dtype": "bfloat16"}
    there = run(engine={"kind": "vllm", "urls": ["http://h:1"]})
    assert chosen(there, CPU, BILLION) == {"train.dtype": "bfloat16"}, "engines that run have a dtype"
    cluster = {"launcher": "ray", "store": "postgresql://u@h/d"}
    assert chosen(run(cluster=cluster), CPU, BILLION) == {}, "other machines may have another CPU"


def test_a_gpu_brings_vllm_bfloat16_and_larger_batches() -> None:
    config, found = fitted(run(), H100, 600_000_000)
    assert (config.engine.kind, config.engine.dtype, config.train.dtype) == ("vllm", "bfloat16", "bfloat16")
    assert (config.train.device, config.train.tokens_per_batch, config.rollout.max_running) == ("cuda", 16_384, 256)
    assert (config.train.lora_rank, config.train.gradient_checkpointing) == (0, False)
    assert config.engine.kv_cache_mb == 16_384
    assert found["train.dtype"] == "bfloat16" and len(found) == 9


@each_case(
    ("machine", "parameters", "rank"),
    [(H100, 2 * BILLION, 0), (H100, 3 * BILLION, 32), (SMALL_GPU, 500_000_000, 0), (SMALL_GPU, 600_000_000, 32)],
)
def test_a_model_whose_optimizer_does_not_fit_gets_an_adapter(machine: Machine, parameters: int, rank: int) -> None:
    assert chosen(run(), machine, parameters)["train.lora_rank"] == rank


@each_case(("ranks", "rank"), [(1, 32), (2, 32), (4, 0)])
def test_ranks_hold_the_optimizer_together(ranks: int, rank: int) -> None:
    """8 billion parameters of 16 bytes are 119 GiB; half of four GPUs of 80 GiB is 160, of two 80."""
    four = Machine(gpus=4, gpu_bytes=80 << 30)
    assert chosen(run(train={"parallel": {"ranks": ranks}}), four, 8 * BILLION)["train.lora_rank"] == rank


def test_a_second_gpu_is_the_learners() -> None:
    assert chosen(run(), Machine(gpus=2, gpu_bytes=80 << 30, vllm=True), BILLION)["train.device"] == "cuda:1"


def test_without_vllm_or_with_engines_that_run_the_engine_stays() -> None:
    assert "engine.kind" not in chosen(run(), Machine(gpus=1, gpu_bytes=80 << 30), BILLION)
    assert "engine.kind" not in chosen(run(engine={"kind": "vllm", "urls": ["http://h:1"]}), H100, BILLION)


def test_what_the_run_file_says_is_never_changed() -> None:
    said = {
        "train": {"dtype": "float32", "lora_rank": 0, "tokens_per_batch": 5_000, "device": "cpu"},
        "engine": {"kind": "embedded"},
        "rollout": {"max_running": 32},
    }
    config, found = fitted(run(**said), SMALL_GPU, 8 * BILLION)
    for section, keys in said.items():
        for name, value in keys.items():
            assert getattr(getattr(config, section), name) == value and f"{section}.{name}" not in found


def test_a_batch_holds_the_longest_context() -> None:
    config = run(rollout={"max_context": 32_000}, train={"tokens_per_batch": 32_000})
    assert "train.tokens_per_batch" not in chosen(config, H100, BILLION)


def test_the_size_of_a_model_is_that_of_its_weights(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(bytes(600))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(400))
    for dtype, count in (("bfloat16", 500), ("float32", 250)):
        (tmp_path / "config.json").write_text(json.dumps({"dtype": dtype}))
        assert machine_defaults.parameters_of(tmp_path) == count


@pytest.mark.medium
def test_a_run_writes_what_was_chosen_and_says_it_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Machine, "seen", lambda: Machine(gpus=1, gpu_bytes=80 << 30))
    monkeypatch.setattr(machine_defaults, "parameters_of", lambda folder: BILLION)
    written: list[RunConfig] = []

    def stop(run: RunDir, view: object, callbacks: object) -> dict[str, Any]:
        written.append(RunDir.open(run.path).config())
        return {}

    monkeypatch.setattr("agentrl.run.trainer.finish_training", stop)
    monkeypatch.setattr("agentrl.run.trainer.check_tasks", lambda config: None)  # a process, and nothing chosen there
    file = tmp_path / "run.toml"
    file.write_text('model = "agentrl/tiny-coder"\n[env]\nid = "agentrl/Calculator-v0"\n[train]\ndtype = "float32"\n')
    Trainer(config=load(file), out=tmp_path / "run").train()
    (config,) = written
    assert (config.train.device, config.train.dtype, config.train.tokens_per_batch) == ("cuda", "float32", 16_384)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("agentrl: chosen for this machine and model: train.device = 'cuda', train.tokens_per_batch")
    assert "dtype" not in line


def test_torch_is_asked_about_gpus_only_where_a_driver_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_defaults, "_DEVICES", tmp_path)
    monkeypatch.setitem(sys.modules, "torch", None)  # who imports it fails
    monkeypatch.setattr(machine_defaults.importlib.util, "find_spec", lambda name: name == "torch" or None)
    (tmp_path / "null").touch()
    for there in (True, False):
        monkeypatch.setattr(machine_defaults, "multiplies_bfloat16", lambda there=there: there)
        assert Machine.seen() == Machine(bfloat16=there)
    (tmp_path / "nvidiactl").touch()
    with pytest.raises(ImportError, match="torch"):
        Machine.seen()
    properties = SimpleNamespace(total_memory=80 << 30)
    cuda = SimpleNamespace(
        is_available=lambda: True, get_device_properties=lambda index: properties, device_count=lambda: 2
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert Machine.seen() == Machine(gpus=2, gpu_bytes=80 << 30)
