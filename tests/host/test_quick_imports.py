"""What our own processes do so that they start sooner, and what they never import."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.host import quick_imports as module
from agentrl.host.quick_imports import quick_imports


def test_packages_that_nobody_asked_for_are_hidden_while_others_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unasked.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "_UNASKED", ("unasked",))
    with pytest.raises(ModuleNotFoundError, match="unasked"), quick_imports():
        assert importlib.util.find_spec("unasked") is None
        assert not gc.isenabled()
        importlib.import_module("unasked")
    assert gc.isenabled()
    found = importlib.import_module("unasked")
    with quick_imports():  # who has it already keeps it
        assert importlib.import_module("unasked") is found
    assert sys.modules.pop("unasked") is found


def test_what_collects_no_garbage_does_not_begin_to() -> None:
    gc.disable()
    try:
        with quick_imports():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


@pytest.mark.medium
def test_an_engine_of_a_text_model_loads_torch_and_no_transformers() -> None:
    absent = ("transformers", "torch._dynamo", "sympy", "torchao")
    code = (
        "import sys; from agentrl.engine.embedded.__main__ import build, parse_arguments\n"
        "from agentrl.models.resolve import model_dir\n"
        "build(parse_arguments(['--model', str(model_dir('agentrl/tiny-coder'))]))\n"
        f"print([name for name in ('torch', *{absent}) if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip() == "['torch']", done.stderr


@pytest.mark.medium
def test_a_tiny_model_is_made_without_a_word_of_other_packages(tmp_path: Path) -> None:
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").write_text("print('Failed to load a library')")
    code = (
        "import sys; from pathlib import Path; from agentrl import config\n"
        "from agentrl.offline.tiny_run import shrunk\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "run = config.parse({'model': 'agentrl/tiny-coder', 'env': {'id': 'agentrl/Calculator-v0'}})\n"
        f"shrunk(run, Path({str(tmp_path / 'model')!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (tmp_path / "model" / "model.safetensors").is_file(), done.stderr
    assert done.stdout + done.stderr == ""
