"""A tiny vision-language model with random weights: Qwen2.5-VL's (or Qwen2-VL's) architecture, tokens of bytes, and an
image processor, made on the spot. It knows nothing; it shows that a run with images works, and its arithmetic is quick.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_SPECIAL: Final = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_PATCH, _MERGE = 4, 2
_SIDE = _PATCH * _MERGE


def make_tiny_vision(folder: Path, *, family: str = "qwen2_5_vl", seed: int = 0, positions: int = 512) -> Path:
    """Write the model to a new folder, which is returned. Each 8 x 8 pixels of an image are a token, of at most 64;
    weights are large, so that a mistake shows. `family` is "qwen2_5_vl" or "qwen2_vl"."""
    import torch
    from transformers import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
    )

    folder.mkdir(parents=True, exist_ok=True)
    ids = {token: at for at, token in enumerate((*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    text = {
        "vocab_size": len(ids),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": positions,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
    }
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": _PATCH, "spatial_merge_size": _MERGE}
    vision["initializer_range"] = 0.2
    if family == "qwen2_vl":
        config_class, model_class = Qwen2VLConfig, Qwen2VLForConditionalGeneration
        vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    else:
        config_class, model_class = Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
        vision |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
        vision |= {"window_size": 2 * _SIDE, "fullatt_block_indexes": [1]}  # windows of 2 x 2 tokens in layer 0
    names = {"image_token_id": "image_pad", "video_token_id": "video_pad"}
    names |= {f"vision_{end}_token_id": f"vision_{end}" for end in ("start", "end")}
    torch.manual_seed(seed)
    special: dict[str, Any] = {key: ids[f"<|{name}|>"] for key, name in names.items()}
    config = config_class(text_config=text, vision_config=vision, tie_word_embeddings=False, **special)
    model = cast(Any, model_class)(config)
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": _PATCH,
        "temporal_patch_size": 2,
        "merge_size": _MERGE,
        "size": {"shortest_edge": 4 * _SIDE**2, "longest_edge": 64 * _SIDE**2},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder
