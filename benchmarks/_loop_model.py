"""Makes the model that both sides of the loop benchmark train: a 0.8M-parameter Qwen3 over bytes, random weights.

Owns the shape's tokens: the tokenizer has one token a byte, so a text's length is its number of bytes, and the end of
turn is a token that the model practically never samples (its row of the output head is zero while the others are
wide), so that every turn runs to its full length on either side. Knows nothing of what trains on it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END = "<|im_end|>"
TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte and the three that frame a chat."""
    special = ["<|pad|>", "<|im_start|>", END]
    vocabulary = {token: at for at, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|pad|>",
        eos_token=END,
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def model(vocabulary: int, end_id: int, pad_id: int, seed: int = 0) -> Qwen3ForCausalLM:
    """A Qwen3 of four layers and width 128 whose logits are wide and whose end of turn is out of reach."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        dtype="float32",
    )
    made = Qwen3ForCausalLM(config)
    with torch.no_grad():
        head_VD = made.lm_head.weight
        head_VD.normal_(std=0.35)
        head_VD[end_id] = 0.0
    return made


def save(folder: Path) -> int:
    """Write model and tokenizer to `folder`; the number of parameters."""
    tokens = tokenizer()
    made = model(len(tokens), tokens.eos_token_id, tokens.pad_token_id)
    made.save_pretrained(folder)
    tokens.save_pretrained(folder)
    return made.num_parameters()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(save(parser.parse_args().folder))
