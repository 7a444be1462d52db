"""Calls of tools against a second reader, which shares no code with ours: vLLM's own parser of each family."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentrl.engine.vllm.launch import PARSERS, find_build
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import FORMATS

UNREAD = {  # dialects whose parser there needs more than a text
    "harmony": "vLLM reads the tokens of its own library",
    "cohere": "its parser reads the tokens of Cohere's own tokenizer",
    "gigachat": "its parser needs the marks of a whole turn around the call",
    "solar": "vLLM has no parser of it",
    "functionary": "vLLM has no parser of it",
    "nemotron_nano": "vLLM has no parser of it",
    "tool_calls": "vLLM has no parser of it",
    "json": "our own",
    "react": "our own",
}
PROPERTIES = {
    "query": {"type": "string"},
    "limit": {"type": "integer"},
    "share": {"type": "number"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "exact": {"type": "boolean"},
}
TOOLS: list[dict[str, Any]] = [
    {"name": "search", "description": "", "parameters": {"type": "object", "properties": PROPERTIES}},
    {"name": "stop_it", "description": "", "parameters": {"type": "object", "properties": {"why": {"type": "string"}}}},
]
ONE = ToolCall("search", {"query": 'two "words", é', "limit": 3, "share": 0.5, "tags": ["a", "b"], "exact": True})
OTHER = ToolCall("search", {"query": "{x: [1]}\nnext line, 5 < 6", "limit": -1})
LAST = ToolCall("stop_it", {"why": "12"})  # a text that looks like a number


def test_each_dialect_is_compared_or_named() -> None:
    assert sorted([*PARSERS, *UNREAD]) == sorted(FORMATS)


@pytest.mark.vllm
@pytest.mark.slow
def test_vllms_own_parsers_read_the_same_calls_of_the_same_texts() -> None:
    """One process reads all texts, since vLLM takes half a minute to import."""
    cases = [(ours, calls) for ours in PARSERS for calls in ((ONE,), (OTHER,), (LAST,), (ONE, LAST))]
    cases = [(ours, calls) for ours, calls in cases if ours != "llama" or len(calls) == 1]  # it writes one a turn
    # vLLM takes a value of muse for JSON where it is JSON, also where the tool's schema says a string
    cases = [(ours, calls) for ours, calls in cases if ours != "muse" or LAST not in calls]
    texts = [FORMATS[ours].write(*calls) for ours, calls in cases]
    lines = [json.dumps([PARSERS[ours], text, TOOLS]) for (ours, _), text in zip(cases, texts, strict=True)]
    script = Path(__file__).parent / "vllm_tool_parsers.py"
    done = subprocess.run(
        [find_build().python, script], input="\n".join(lines), capture_output=True, text=True, timeout=300, check=True
    )
    answers = [line for line in done.stdout.splitlines() if line.startswith(("read ", "failed "))]
    different: list[str] = []
    for (ours, calls), text, answer in zip(cases, texts, answers, strict=True):
        meant = [[call.name, dict(call.arguments)] for call in calls]
        read = [[call.name, dict(call.arguments)] for call in FORMATS[ours].parse(text, TOOLS).calls]
        if read != meant or answer != f"read {json.dumps(meant)}":
            different.append(f"{ours}: {text!r}\n  meant  {meant}\n  here   {read}\n  vLLM   {answer}")
    assert not different, "\n".join(different)
