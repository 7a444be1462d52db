"""How a vLLM of ours reads the calls of tools in chats: the parser that fits the model's chat template."""

from __future__ import annotations

import json
from pathlib import Path

_PARSERS = {"hermes": "hermes", "xml": "qwen3_xml", "llama": "llama3_json", "mistral": "mistral", "harmony": "openai"}
_MARKS = (
    ("xml", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("harmony", ("<|channel|>", "to=functions")),
    ("llama", ("<|start_header_id|>", '"parameters"')),
)
"""Texts that the template of a model with such calls has, all of them; the first that fits."""


def template_of(model: Path) -> str:
    """The chat template of a model's folder; empty if it has none."""
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        try:
            text = (model / name).read_text()
        except OSError:
            continue
        if name.endswith(".jinja"):
            return text
        found = json.loads(text).get("chat_template")
        return found if isinstance(found, str) else json.dumps(found or "")
    return ""


def dialect_of(template: str) -> str | None:
    """In which dialect a template writes calls; None if it has no tools, or those of no family that is known."""
    if "tools" not in template:
        return None
    return next((name for name, marks in _MARKS if all(mark in template for mark in marks)), None)


def parser_of(model: Path) -> str | None:
    """vLLM's name for the parser of a model's calls, None if none is known: then it takes no tools in chats."""
    return _PARSERS.get(dialect_of(template_of(model)) or "")
