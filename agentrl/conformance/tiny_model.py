"""A model folder that any trainer can load: a tiny random Qwen3 with a byte tokenizer. Standard library only.

The tokenizer has merges, and the scripted engine never uses them: a trainer that tokenizes a sampled text again gets
other tokens than were sampled.
"""

from __future__ import annotations

import json
import math
import random
import re
import struct
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

SPECIAL: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
END, START, STOP = range(3)
MARKS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_MERGES: Final = ("a n", "e r", "o o", "l oo", "s w", "an sw", "answ er", "a r", "k e", "ke y")
_CONTEXT: Final = 4096
_HIDDEN, _INTERMEDIATE, _HEADS, _HEAD_DIM = 32, 64, 2, 16

_CALLS = (
    "{% for call in message.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
)
TEMPLATE: Final = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}HIDDEN<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    f"{_CALLS}<|im_end|>\n"
    "SHOWN{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def template(*, writes_tool: bool) -> str:
    """ChatML; without `writes_tool`, one that leaves out messages of the tool."""
    hidden, shown = ("", "") if writes_tool else ("{% if message.role != 'tool' %}", "{% endif %}")
    return TEMPLATE.replace("HIDDEN", hidden).replace("SHOWN", shown)


def _alphabet() -> dict[int, str]:
    """The character for each byte in a byte-level vocabulary: GPT-2's."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}


def vocabulary() -> dict[str, int]:
    """Tokens by text: the special ones, Qwen's marks, the bytes, the merged."""
    merged = [pair.replace(" ", "") for pair in _MERGES]
    return {token: place for place, token in enumerate([*SPECIAL, *MARKS, *sorted(_alphabet().values()), *merged])}


def encode(text: str) -> list[int]:
    """The tokens of a text, byte by byte save for marks: never what the tokenizer would make of it where it knows a
    merge. No text becomes a special token."""
    tokens, alphabet = vocabulary(), _alphabet()
    ids: list[int] = []
    for part in re.split(f"({'|'.join(MARKS)})", text):
        ids += [tokens[part]] if part in MARKS else [tokens[alphabet[byte]] for byte in part.encode()]
    return ids


def decode(ids: Sequence[int]) -> str:
    """The text of tokens; special ones written out."""
    texts = {place: token for token, place in vocabulary().items()}
    bytes_of = {character: byte for byte, character in _alphabet().items()}
    written = b"".join(
        texts[id].encode() if id < len(SPECIAL) + len(MARKS) else bytes(bytes_of[letter] for letter in texts[id])
        for id in ids
        if id in texts
    )
    return written.decode(errors="replace")


def write_model(folder: Path, *, writes_tool: bool = True) -> Path:
    """Write the folder: configuration, tokenizer, chat template, weights."""
    folder.mkdir(parents=True, exist_ok=True)
    size = -(-len(vocabulary()) // 16) * 16
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": size,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": 1,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": _CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": STOP,
        "pad_token_id": END,
        "torch_dtype": "float32",
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP, "pad_token_id": END}))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": place, "content": token, "special": token in SPECIAL, **flags}
            for place, token in enumerate([*SPECIAL, *MARKS])
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary(),
            "merges": list(_MERGES),
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[STOP], "pad_token": SPECIAL[END]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "model_max_length": _CONTEXT}))
    (folder / "chat_template.jinja").write_text(template(writes_tool=writes_tool))
    _write_weights(folder / "model.safetensors", size)
    return folder


def _write_weights(path: Path, vocabulary_size: int) -> None:
    """Random matrices, norms of one, in the safetensors format."""
    layer, queries = "model.layers.0", _HEADS * _HEAD_DIM
    shapes = {
        "model.embed_tokens.weight": (vocabulary_size, _HIDDEN),
        f"{layer}.self_attn.q_proj.weight": (queries, _HIDDEN),
        f"{layer}.self_attn.k_proj.weight": (_HEAD_DIM, _HIDDEN),
        f"{layer}.self_attn.v_proj.weight": (_HEAD_DIM, _HIDDEN),
        f"{layer}.self_attn.o_proj.weight": (_HIDDEN, queries),
        f"{layer}.self_attn.q_norm.weight": (_HEAD_DIM,),
        f"{layer}.self_attn.k_norm.weight": (_HEAD_DIM,),
        f"{layer}.mlp.gate_proj.weight": (_INTERMEDIATE, _HIDDEN),
        f"{layer}.mlp.up_proj.weight": (_INTERMEDIATE, _HIDDEN),
        f"{layer}.mlp.down_proj.weight": (_HIDDEN, _INTERMEDIATE),
        f"{layer}.input_layernorm.weight": (_HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (_HIDDEN,),
        "model.norm.weight": (_HIDDEN,),
    }
    source = random.Random(0)
    values: dict[str, array[float]] = {}
    for name, shape in shapes.items():
        random_numbers = (source.gauss(0, 0.1) for _ in range(math.prod(shape)))
        values[name] = array("f", [1.0] * shape[0] if len(shape) == 1 else random_numbers)
    ends = [0]
    for data in values.values():
        ends.append(ends[-1] + 4 * len(data))
    header = {
        name: {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": list(place)}
        for name, place in zip(shapes, pairwise(ends), strict=True)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data.tobytes() for data in values.values()))
