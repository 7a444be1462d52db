"""A policy that answers in the form that a grader reads, right by chance: a model that looks at one token alone."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from agentrl.models.resolve import model_dir

_SURE = 12.0  # the logit of a token that has to come, beside those of about 0
_STEM, _CHOICES, _END = " \\boxed{", "12", "}\n\nUser:"


def answering_model(folder: Path) -> Path:
    """Write it: after a colon it says `\\boxed{1}` or `\\boxed{2}` and ends its turn, with the tokenizer of the tiny
    coder. An adapter on its layers can prefer one."""
    torch.manual_seed(0)
    source = model_dir("agentrl/tiny-coder")
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(source / name, folder / name)
    size = 544
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=523,
    )
    model = Qwen3ForCausalLM(config)
    tokenizer = AutoTokenizer.from_pretrained(source)
    (colon,) = tokenizer.encode(":")
    next_of = dict[int, list[int]]()
    for choice in _CHOICES:
        for one, other in pairwise([colon, *tokenizer.encode(_STEM + choice + _END)]):
            next_of.setdefault(one, []).append(other)
    scale = size**-0.5  # the last norm makes a one of the embedding this much larger
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for part in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
            part.weight.zero_()
        head = model.lm_head.weight  # its noise is where an adapter can tell the choices apart
        head.normal_(std=0.05)
        for token, following in next_of.items():
            head[:, token] = 0.0
            for other in following:
                head[other, token] = _SURE * scale
    model.save_pretrained(folder)
    return folder
