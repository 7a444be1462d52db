"""Small chat templates of our own in the formats of well-known model families, and a tokenizer for each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_CHATML_HEAD = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{% endif %}
{{- '# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_CHATML_TOOL = """
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
CHATML_KEPT = (
    _CHATML_HEAD
    + """
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\\n' }}
"""
    + _CHATML_TOOL
)
CHATML_STRIPPED = (
    _CHATML_HEAD
    + """
{%- set ns = namespace(last_user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{%- set said = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- if loop.index0 > ns.last_user %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1] if '</think>' in message.content else '' %}
{%- set said = '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + said %}
{%- endif %}
{{- '<|im_start|>assistant\\n' + said + '<|im_end|>\\n' }}
"""
    + _CHATML_TOOL
)
LLAMA3 = """
{{- bos_token }}
{%- if messages[0].role == 'system' or tools %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content | trim }}{% endif %}
{%- for tool in tools or [] %}{{- '\\n' + (tool | tojson(indent=2)) }}{% endfor %}
{{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- elif message.role != 'system' or not loop.first %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""
MISTRAL = """
{{- bos_token }}
{%- set ns = namespace(system='', tools=tools) %}
{%- for message in messages %}
{%- if message.role == 'system' %}
{%- if not loop.first %}{{- raise_exception('only the first message may be a system message') }}{% endif %}
{%- set ns.system = message.content + '\\n\\n' %}
{%- elif message.role == 'user' %}
{%- if not loop.first and messages[loop.index0 - 1].role == 'user' %}
{{- raise_exception('user and assistant must alternate') }}
{%- endif %}
{%- if ns.tools %}{{- '[AVAILABLE_TOOLS]' + (ns.tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{%- set ns.tools = none %}
{{- '[INST]' + ns.system + message.content + '[/INST]' }}{% set ns.system = '' %}
{%- elif message.role == 'assistant' %}
{{- message.content + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- endif %}
{%- endfor %}
"""
HARMONY = """
{{- '<|start|>system<|message|>You answer in channels.<|end|>' }}
{%- if tools or messages[0].role == 'system' %}
{{- '<|start|>developer<|message|>' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{% endif %}
{%- for tool in tools or [] %}
{{- '\\ntype ' + tool.function.name + ' = ' + (tool.function.parameters | tojson) }}
{%- endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary' }}
{{- '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""


@dataclass(frozen=True)
class Format:
    """A template with its special tokens. `verbatim`: it writes an assistant's text as it is, so that transformers'
    own rendering of the whole history is an oracle. `ends`: what a model may end its turn with."""

    template: str
    special: tuple[str, ...]
    eos: str
    ends: tuple[str, ...]
    closing: str
    bos: str | None = None
    plain: tuple[str, ...] = ()
    generation_eos: tuple[str, ...] | None = None
    verbatim: bool = True


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
FORMATS = {
    "chatml": Format(CHATML_KEPT, _CHATML, "<|im_end|>", ("<|im_end|>",), "<|im_end|>", plain=_TAGS),
    "chatml of a base model": Format(CHATML_KEPT, _CHATML, "<|endoftext|>", ("<|im_end|>",), "<|im_end|>", plain=_TAGS),
    "qwen3, thinking stripped": Format(
        CHATML_STRIPPED, _CHATML, "<|im_end|>", ("<|im_end|>",), "<|im_end|>", plain=_TAGS, verbatim=False
    ),
    "llama 3": Format(
        LLAMA3,
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
        ),
        "<|eot_id|>",
        ("<|eot_id|>", "<|eom_id|>"),
        "<|eot_id|>",
        bos="<|begin_of_text|>",
        generation_eos=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
    ),
    "mistral": Format(
        MISTRAL,
        (
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        "</s>",
        ("</s>",),
        "</s>",
        bos="<s>",
    ),
    "harmony": Format(
        HARMONY,
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>"),
        "<|return|>",
        ("<|return|>", "<|call|>"),
        "<|end|>",
        generation_eos=("<|return|>", "<|call|>", "<|endoftext|>"),
        verbatim=False,
    ),
}
_TEXT = "the quick brown fox jumps over the lazy dog; def add(a, b): return a + b\n" * 3


def write_folder(folder: Path, form: Format) -> Path:
    """A model folder without a model: tokenizer, its settings, chat template, generation settings."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    tokenizer.add_special_tokens(list(form.special))
    tokenizer.add_tokens(list(form.plain))
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": form.bos, "eos_token": form.eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(form.template)
    if form.generation_eos is not None:
        ids = [tokenizer.token_to_id(token) for token in form.generation_eos]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder
