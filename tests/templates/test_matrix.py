"""Every real chat template: what is rendered is what the template itself writes, and its calls are read back.

A test is one rule for the templates of one family; it names each template that breaks it.
"""

from __future__ import annotations

import contextlib
import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from each_case import each_case
from tokenizers import Tokenizer

from agentrl.engine.rendering.renderer import Renderer
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format
from agentrl.records import Message

from .catalogue import FAMILIES, WHOLE, Real, everything, missing, write_folder
from .matrix import TOOLS, messages_of, oracle
from .page import PAGE, page, row_of

pytestmark = pytest.mark.templates
REAL = [] if missing() else list(everything())
BY_NAME = {real.name: real for real in REAL}


def renderer(name: str, tmp_path: Path) -> Renderer:
    return Renderer(write_folder(tmp_path / "model", BY_NAME[name]))


def families() -> dict[str, list[Real]]:
    """The templates by the pattern of the catalogue that names their family."""
    by_family: dict[str, list[Real]] = {}
    for real in REAL:
        stem = real.name.rpartition("/")[2].lower()
        family = next(pattern for pattern, _ in FAMILIES if re.search(pattern, stem))
        by_family.setdefault(family.partition("|")[0] or "chatml", []).append(real)
    return by_family


@cache
def rendering(real: Real) -> tuple[Renderer, dict[int, str]]:
    """A renderer of the template, and the added tokens of its tokenizer."""
    with TemporaryDirectory() as name:
        folder = write_folder(Path(name) / "model", real)
        added = Tokenizer.from_file(str(folder / "tokenizer.json")).get_added_tokens_decoder()
        return Renderer(folder), {id: token.content for id, token in added.items()}


@pytest.mark.parametrize("family", families().values(), ids=families())
def test_a_family(family: list[Real]) -> None:
    each_case("rule, real", [(rule, real) for real in family for rule in RULES])(lambda rule, real: rule(real))()


def appends_what_the_template_writes(real: Real) -> None:
    row = row_of(real)
    assert not row.faults
    assert not row.sft.startswith("LOST")


def test_all_templates_are_there_and_few_are_refused() -> None:
    assert len(REAL) > 130
    assert len([real for real in REAL if row_of(real).refused]) <= 7


def reads_back_the_calls_that_the_template_writes(real: Real) -> None:
    row = row_of(real)
    if row.refused or row.dialect in ("json", "unknown"):
        return
    whole = before = ""
    for kind in ("tool", "two tools"):
        with contextlib.suppress(Exception):  # it writes no calls, or one of a message: the dialect writes them
            history = messages_of(kind, ids=real.ids)
            whole = oracle(real, history[:2], True, asks=False)
            before = next(
                text for asks in (True, False) if whole.startswith(text := oracle(real, history[:1], True, asks=asks))
            )
    made = [call["function"] for call in messages_of("two tools")[1]["tool_calls"]]
    calls = tuple(ToolCall(function["name"], function["arguments"]) for function in made)
    written = whole[len(before) :]
    if any(call.name not in written for call in calls):
        return
    said, last, closing = written.rpartition("LAST")
    end = real.family.calls or real.family.eos
    parsed = get_format(row.dialect).parse(said + last + closing.partition(end)[0], TOOLS)
    assert parsed.calls == calls
    if "kimi" in row.dialect:
        assert [call.id for call in parsed.calls if isinstance(call, ToolCall)] == list(real.ids)


def test_a_template_for_tools_is_taken_where_there_are_tools(tmp_path: Path) -> None:
    name = "llama.cpp/NousResearch-Hermes-3-Llama-3.1-8B-tool_use"
    with_two = renderer(name, tmp_path)
    asked = messages_of("user")[:1]
    assert with_two.decode(with_two.start(asked, TOOLS)) == oracle(BY_NAME[name], asked, True)  # type: ignore[arg-type]
    plain = with_two.decode(with_two.start(asked))  # type: ignore[arg-type]
    assert plain == "<|im_start|>user\nIs it green?<|im_end|>\n<|im_start|>assistant\n"
    assert with_two.tool_format == "hermes" and with_two.untold is None


@each_case("name", ["trl/qwen2_5_vl", "trl/phi3", "axolotl/gemma", "llama.cpp/HuggingFaceTB-SmolLM3-3B"])
def test_tools_that_a_template_leaves_out_are_told(name: str, tmp_path: Path) -> None:
    blind = renderer(name, tmp_path)
    text = blind.decode(blind.start(messages_of("user")[:1], TOOLS))  # type: ignore[arg-type]
    assert "Does run_tests." in text and '{"name": "TOOL", "arguments": ' in text
    assert blind.tool_format == "json" and blind.untold is not None
    assert "writes no tools (they go into the system message)" in blind.untold


@each_case("name", ["trl/glm4moe", "trl/qwen3", "trl/deepseekv3", "llama.cpp/MiniMax-M2"])
def test_arguments_as_text_are_decoded_once(name: str, tmp_path: Path) -> None:
    history = messages_of("tool", ids=BY_NAME[name].ids)
    as_text: list[Any] = json.loads(json.dumps(history))
    for call in as_text[1]["tool_calls"]:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    as_text[1]["content"] = None
    as_text[2]["content"] = [{"type": "text", "text": history[2]["content"]}]
    one = renderer(name, tmp_path)
    assert one.start(as_text, TOOLS) == one.start(history, TOOLS)  # type: ignore[arg-type]


def lets_no_answer_pass_for_control_tokens(real: Real) -> None:
    if row_of(real).refused:
        return
    one, _ = rendering(real)
    control = {
        token for token, added in one.conversations.tokenizer.get_added_tokens_decoder().items() if added.special
    }

    def answer(text: str) -> list[int]:
        message: Message = {"role": "tool", "name": "run_tests", "tool_call_id": real.ids[0], "content": text}
        return [token for token in one.extend((), [message], TOOLS) if token in control]

    assert answer("a" + "".join(one.conversations.special) + "z") == answer("az")


CHOICES = {
    "plain": {"type": "string", "enum": ["zqPLAIN", "b"]},
    "optional": {"anyOf": [{"$ref": "#/$defs/Kind"}, {"type": "null"}], "default": None},
    "named": {"$ref": "#/$defs/Kind", "description": "Which."},
    "many": {"type": "array", "items": {"enum": ["zqITEM", "b"], "type": "string"}},
}


def shows_the_choices_of_every_parameter(real: Real) -> None:
    if row_of(real).refused:
        return
    definitions = {"Kind": {"type": "string", "enum": ["zqKIND", "b"]}}
    parameters = {"type": "object", "properties": CHOICES, "required": ["named"], "$defs": definitions}
    tool = {"name": "paint", "description": "Paints.", "parameters": parameters}
    one, _ = rendering(real)
    text = one.decode(one.start([{"role": "user", "content": "a"}], [tool]))
    assert "zqPLAIN" in text and "zqITEM" in text and text.count("zqKIND") >= 2


def lets_no_answer_pass_for_the_tags_of_a_template(real: Real) -> None:
    """Also not for added tokens that are not marked special, as the tags of Qwen's families."""
    if row_of(real).refused:
        return
    one, written = rendering(real)
    control = {id for id, content in written.items() if content.startswith(("<", "["))}

    def answer(text: str) -> list[int]:
        message: Message = {"role": "tool", "name": "run_tests", "tool_call_id": real.ids[0], "content": text}
        return [token for token in one.extend((), [message], TOOLS) if token in control]

    assert control and answer("a" + "".join(written.values()) + "z") == answer("az")


RULES = (
    appends_what_the_template_writes,
    reads_back_the_calls_that_the_template_writes,
    lets_no_answer_pass_for_control_tokens,
    lets_no_answer_pass_for_the_tags_of_a_template,
    shows_the_choices_of_every_parameter,
)


@pytest.mark.smollm2
def test_the_page_says_what_is_so() -> None:
    assert PAGE.read_text() == page(), "benchmarks/chat_template_matrix.md is old: python -m tests.templates.page"


@pytest.mark.smollm2
def test_the_real_tokenizer_is_in_the_matrix() -> None:
    row = row_of(WHOLE)
    assert not row.refused
    assert {cell.next for cell in row.cells} == {"user", "tool", "two tools"}
    assert not row.faults
