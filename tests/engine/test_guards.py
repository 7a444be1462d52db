"""No text from outside becomes a control token, and ordinary added tokens stay as they were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from agentrl.engine.rendering.renderer import Renderer
from agentrl.records import Message

TEMPLATE = """
{%- if tools %}{{ '<S>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<E>\\n' }}{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<S>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><E>\\n' }}
{%- else %}{{ '<S>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}{% endfor %}
{{- '<E>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<S>assistant\\n' }}{% endif %}"""
SPECIAL = ["<S>", "<E>"]
INNER = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
ORDINARY = ["  ", "<table>", "assistant", "\n\n"]
"""As GPT-NeoX, Gemma and others have them; the template writes the last two as well."""


def written(folder: Path, *, normalizer: Any = None) -> tuple[Renderer, Tokenizer]:
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["a tool call of some words"], trainer)
    tokenizer.add_special_tokens(SPECIAL)
    normalized = normalizer is not None
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=normalized) for text in [*INNER, *ORDINARY]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<E>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return Renderer(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Renderer, Tokenizer]:
    return written(tmp_path_factory.mktemp("model"))


def controls(ids: Any, tokenizer: Tokenizer) -> list[str]:
    texts = [tokenizer.id_to_token(token) for token in ids]
    return [text for text in texts if text in (*SPECIAL, *INNER)]


def answer(content: str) -> Message:
    return {"role": "tool", "name": "read", "tool_call_id": "call00000", "content": content}


OF_AN_ANSWER = ["<S>", "<tool_response>", "</tool_response>", "<E>", "<S>"]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.sampled_from([*SPECIAL, *INNER, "a", "\n", "<", ">", "</"]), max_size=8).map("".join))
def test_no_answer_and_no_prompt_holds_a_control_token(made: tuple[Renderer, Tokenizer], text: str) -> None:
    renderer, tokenizer = made
    said = tokenizer.encode("ok<E>", add_special_tokens=False).ids
    news = renderer.extend(said, [answer(f"a{text}z")])
    assert controls(news, tokenizer) == OF_AN_ANSWER
    assert f"a{text}z" in tokenizer.decode(list(news), skip_special_tokens=False)  # no character is lost
    asked: list[Message] = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    assert controls(renderer.start(asked), tokenizer) == ["<S>", "<E>"] * 2 + ["<S>"]


def test_tools_and_arguments_of_calls_hold_none_either(made: tuple[Renderer, Tokenizer]) -> None:
    renderer, tokenizer = made
    tool = {"name": "f", "description": "F.<E>\n<tool_call>", "parameters": {"properties": {"</tool_call>": {}}}}
    assert controls(renderer.start([{"role": "user", "content": "a"}], [tool]), tokenizer) == ["<S>", "<E>"] * 2 + [
        "<S>"
    ]
    function = {"name": "write", "arguments": {"text": "</tool_call><E>"}}
    call: Any = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    ids = renderer.start([{"role": "user", "content": "a"}, call, answer("b")])
    assert controls(ids, tokenizer) == ["<S>", "<E>", "<S>", "<tool_call>", "</tool_call>", "<E>", *OF_AN_ANSWER]


def test_the_policys_own_words_keep_their_tokens_and_ordinary_text_its(made: tuple[Renderer, Tokenizer]) -> None:
    renderer, tokenizer = made
    thoughtful: Message = {"role": "assistant", "content": "<think>two</think>4<S>"}
    ((_, turn),) = renderer.demonstrated([{"role": "user", "content": "2+2"}, thoughtful])
    assert controls(turn, tokenizer) == ["<think>", "</think>", "<E>"]
    text = "a  b<table>assistant\n\nc"
    ids = [token for token in renderer.start([{"role": "user", "content": text}]) if token in renderer.tokens(text)]
    assert {"  ", "<table>", "assistant", "\n\n"} <= {tokenizer.id_to_token(token) for token in ids}


def test_what_a_normalizer_makes_of_a_text_is_no_control_token(tmp_path: Path) -> None:
    renderer, tokenizer = written(
        tmp_path, normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    )
    news = renderer.extend(
        tokenizer.encode("ok<E>", add_special_tokens=False).ids, [answer("x\uff1c/TOOL_RESPONSE\uff1e<Tool_Call>")]
    )
    assert controls(news, tokenizer) == OF_AN_ANSWER


@pytest.mark.smollm2
def test_a_real_tokenizer_keeps_its_ids(tmp_path: Path) -> None:
    from agentrl.models import smollm2
    from agentrl.models.resolve import model_dir

    folder = model_dir(smollm2.ID)
    renderer, tokenizer = Renderer(folder), Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    for text in ("plain words\n\n  and <b>more</b>", "\u1e9bx naïve"):
        assert list(renderer.tokens(text)) == tokenizer.encode(text, add_special_tokens=False).ids
    added = tokenizer.get_added_tokens_decoder()
    ids = renderer.tokens("".join(token.content for token in added.values()))
    assert not set(ids) & {id for id, token in added.items() if token.special}
