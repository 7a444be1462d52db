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
    before_hidden, after_hidden = ("", "") if writes_tool else ("{% if message.role != 'tool' %}", "{% endif %}")
    return TEMPLATE.replace("HIDDEN", before_hidden).replace("SHOWN", after_hidden)


def _alphabet() -> dict[int, str]:
    """The character for each byte in a byte-level vocabulary: GPT-2's."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte_value for byte_value in range(256) if byte_value not in printable]
    return {byte_value: chr(byte_value) for byte_value in printable} | {
        byte_value: chr(256 + offset) for offset, byte_value in enumerate(unprintable)
    }


def vocabulary() -> dict[str, int]:
    """Tokens by text: the special ones, Qwen's marks, the bytes, the merged."""
    merged_tokens = [merge_pair.replace(" ", "") for merge_pair in _MERGES]
    return {
        token_text: token_id
        for token_id, token_text in enumerate([*SPECIAL, *MARKS, *sorted(_alphabet().values()), *merged_tokens])
    }


def encode(text: str) -> list[int]:
    """The tokens of a text, byte by byte save for marks: never what the tokenizer would make of it where it knows a
    merge. No text becomes a special token."""
    ids_by_text, alphabet = vocabulary(), _alphabet()
    token_ids: list[int] = []
    for text_part in re.split(f"({'|'.join(MARKS)})", text):
        token_ids += (
            [ids_by_text[text_part]]
            if text_part in MARKS
            else [ids_by_text[alphabet[byte_value]] for byte_value in text_part.encode()]
        )
    return token_ids


def decode(ids: Sequence[int]) -> str:
    """The text of tokens; special ones written out."""
    texts_by_id = {vocabulary_id: token_text for token_text, vocabulary_id in vocabulary().items()}
    bytes_of = {character: byte_value for byte_value, character in _alphabet().items()}
    text_bytes = b"".join(
        texts_by_id[token_id].encode()
        if token_id < len(SPECIAL) + len(MARKS)
        else bytes(bytes_of[character_of] for character_of in texts_by_id[token_id])
        for token_id in ids
        if token_id in texts_by_id
    )
    return text_bytes.decode(errors="replace")


def write_model(folder: Path, *, writes_tool: bool = True) -> Path:
    """Write the folder: configuration, tokenizer, chat template, weights."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary_size = -(-len(vocabulary()) // 16) * 16
    model_config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary_size,
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
    (folder / "config.json").write_text(json.dumps(model_config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": STOP, "pad_token_id": END}))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    token_flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token_id, "content": token_text, "special": token_text in SPECIAL, **token_flags}
            for token_id, token_text in enumerate([*SPECIAL, *MARKS])
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
    token_names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[STOP], "pad_token": SPECIAL[END]}
    (folder / "tokenizer_config.json").write_text(json.dumps({**token_names, "model_max_length": _CONTEXT}))
    (folder / "chat_template.jinja").write_text(template(writes_tool=writes_tool))
    _write_weights(folder / "model.safetensors", vocabulary_size)
    return folder


def _write_weights(path: Path, vocabulary_size: int) -> None:
    """Random matrices, norms of one, in the safetensors format."""
    layer_prefix, query_size = "model.layers.0", _HEADS * _HEAD_DIM
    tensor_shapes = {
        "model.embed_tokens.weight": (vocabulary_size, _HIDDEN),
        f"{layer_prefix}.self_attn.q_proj.weight": (query_size, _HIDDEN),
        f"{layer_prefix}.self_attn.k_proj.weight": (_HEAD_DIM, _HIDDEN),
        f"{layer_prefix}.self_attn.v_proj.weight": (_HEAD_DIM, _HIDDEN),
        f"{layer_prefix}.self_attn.o_proj.weight": (_HIDDEN, query_size),
        f"{layer_prefix}.self_attn.q_norm.weight": (_HEAD_DIM,),
        f"{layer_prefix}.self_attn.k_norm.weight": (_HEAD_DIM,),
        f"{layer_prefix}.mlp.gate_proj.weight": (_INTERMEDIATE, _HIDDEN),
        f"{layer_prefix}.mlp.up_proj.weight": (_INTERMEDIATE, _HIDDEN),
        f"{layer_prefix}.mlp.down_proj.weight": (_HIDDEN, _INTERMEDIATE),
        f"{layer_prefix}.input_layernorm.weight": (_HIDDEN,),
        f"{layer_prefix}.post_attention_layernorm.weight": (_HIDDEN,),
        "model.norm.weight": (_HIDDEN,),
    }
    generator = random.Random(0)
    data_by_name: dict[str, array[float]] = {}
    for tensor_name, tensor_shape in tensor_shapes.items():
        random_numbers = (generator.gauss(0, 0.1) for _ in range(math.prod(tensor_shape)))
        data_by_name[tensor_name] = array("f", [1.0] * tensor_shape[0] if len(tensor_shape) == 1 else random_numbers)
    data_ends = [0]
    for weights in data_by_name.values():
        data_ends.append(data_ends[-1] + 4 * len(weights))
    tensor_entries = {
        tensor_name: {"dtype": "F32", "shape": list(tensor_shapes[tensor_name]), "data_offsets": list(data_offsets)}
        for tensor_name, data_offsets in zip(tensor_shapes, pairwise(data_ends), strict=True)
    }
    header_bytes = json.dumps({"__metadata__": {"format": "pt"}, **tensor_entries}).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    path.write_bytes(
        struct.pack("<Q", len(header_bytes))
        + header_bytes
        + b"".join(weights.tobytes() for weights in data_by_name.values())
    )
