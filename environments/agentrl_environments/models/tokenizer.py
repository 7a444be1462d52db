"""How the tiny coder's tokenizer is made: byte-level BPE that loses nothing, with words and digits kept whole.

Owns: vocabulary, special tokens and chat template (ChatML; tool calls and results as Qwen3 writes them, tools named in
one line). Knows nothing of the model. Import needs `tokenizers` and `transformers`.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# The fixed parts of a tool call are a token each, so that an edit costs the tokens of what it says.
BOILERPLATE = (
    '\n{"name": "replace_line", "arguments": {"line": ',
    ', "text": "',
    '"}}\n',
    '\n{"name": "run_tests", "arguments": {}}\n',
    '\n{"name": "submit", "arguments": {}}\n',
)
# Only keywords carry a space and a digit stands alone: a name is the same token in code, test and edit.
_PIECES = r", got |(?:def|return|for|in|if|else|FAIL|ok) |[A-Za-z_]+|[0-9]|[^A-Za-z_0-9]+"

CHAT_TEMPLATE = """\
{%- set ns = namespace(first=true) -%}
{%- macro tool_line() -%}
tools:
{%- for tool in tools %}{% set f = tool.function if tool.function is defined else tool -%}
{{ ' ' + f.name + '(' + (f.parameters.properties.keys() | join(', ')) + ')' }}
{%- endfor -%}
{%- endmacro -%}
{%- if tools and (not messages or messages[0].role != 'system') -%}
{{ '<|im_start|>system\\n' + tool_line() + '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|im_start|>user\\n' }}{%- endif -%}
{{ '<tool_response>' + message.content + '</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|im_end|>\\n' }}{%- endif -%}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- if message.role == 'system' and loop.first and tools -%}{{ '\\n' + tool_line() }}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set f = call.function if call.function is defined else call -%}
{{ '<tool_call>\\n{"name": "' + f.name + '", "arguments": ' }}
{{- f.arguments if f.arguments is string else f.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def build_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn the merges from `texts` (which may hold special tokens and boilerplate: they are cut out first)."""
    fixed_tokens = [
        *(AddedToken(token_text, special=True, normalized=False) for token_text in SPECIAL),
        *(AddedToken(token_text, special=False, normalized=False) for token_text in (*MARKUP, *BOILERPLATE)),
    ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    bpe_trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(fixed_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=20,
        show_progress=False,
    )
    tokenizer.train_from_iterator((_without_fixed(training_text) for training_text in texts), bpe_trainer)
    tokenizer.add_tokens(fixed_tokens)
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    fast_tokenizer.chat_template = CHAT_TEMPLATE
    return fast_tokenizer


def _without_fixed(text: str) -> str:
    for fixed_token in (*SPECIAL, *MARKUP, *BOILERPLATE):
        text = text.replace(fixed_token, "\0")
    return text.replace("\0", "")
