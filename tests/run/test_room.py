"""Room for weight files: asked for before anything starts, by what will lie in scratch at once."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from each_case import each_case

from agentrl import config as configuration
from agentrl.errors import ConfigError
from agentrl.models.resolve import engine_dtype, model_dir
from agentrl.run.weights.room_check import check_room

FOLDER = model_dir("agentrl/tiny-coder")
BYTES = (FOLDER / "model.safetensors").stat().st_size  # of float32, and a header of some kilobytes


def config(**document: Any) -> configuration.RunConfig:
    return configuration.parse({"model": str(FOLDER), "env": {"id": "e"}, **document})


@each_case(
    ("document", "files"),
    [
        ({}, 3),
        ({"engine": {"kind": "vllm"}}, 3),
        ({"engine": {"kind": "vllm", "dtype": "bfloat16"}}, 1.5),
        ({"engine": {"kind": "vllm", "sync": "delta"}}, 4),
    ],
)
def test_all_files_that_lie_there_at_once_must_fit(
    document: dict[str, Any], files: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    free = round(1.05 * files * BYTES)
    check_room(config(**document), [FOLDER], Path("/dev/shm/agentrl-0-x"))
    free = round(0.95 * files * BYTES)
    with pytest.raises(ConfigError) as caught:
        check_room(config(**document), [FOLDER], Path("/dev/shm/agentrl-0-x"))
    text = str(caught.value)
    assert text.startswith(f"scratch_dir = None: /dev/shm has {free >> 20} MiB left") and "\n" not in text
    assert "name a folder with more room (a disk will do)" in text and "docker run --shm-size=" in text


def test_adapters_need_room_for_adapters_and_memory_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=BYTES // 2))
    check_room(config(engine={"kind": "vllm"}, train={"lora_rank": 2}), [FOLDER], Path("/dev/shm/x"))
    with pytest.raises(ConfigError):
        check_room(config(engine={"kind": "vllm"}, train={"lora_rank": 256}), [FOLDER], Path("/dev/shm/x"))
    check_room(
        config(engine={"kind": "vllm", "sync": "nccl"}, train={"device": "cuda:1"}), [FOLDER], Path("/dev/shm/x")
    )


def test_weights_travel_in_what_the_engines_compute_in(tmp_path: Path) -> None:
    def of(**engine: Any) -> str:
        return engine_dtype(config(engine=engine).engine, tmp_path)

    for kind in ("embedded", "vllm"):
        assert [of(kind=kind, dtype=dtype) for dtype in ("float32", "bfloat16")] == ["float32", "bfloat16"]
    for said, found in (("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("float16", "float16")):
        (tmp_path / "config.json").write_text(f'{{"torch_dtype": "{said}"}}')
        assert of(kind="vllm", dtype="auto") == found
