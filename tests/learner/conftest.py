"""A tiny Qwen3 folder, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .making import tiny_qwen3


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("qwen3"))
