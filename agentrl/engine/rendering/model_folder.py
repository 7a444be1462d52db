"""The files of a model folder that its prompts are made with: tokenizer, chat templates, settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from agentrl.errors import ModelError


class ModelFolder:
    """A model folder, read. Raises ModelError in one line for a folder without tokenizer or chat template."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder)
        self.tokenizer = _read_tokenizer(self.path)
        settings = _read_json(self.path / "tokenizer_config.json")
        texts = {name: _token_text(settings.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        self.token_texts = {name: text for name, text in texts.items() if text}
        """The texts of special tokens by their role, as templates read them."""
        self.templates = _read_templates(self.path, settings)
        """The sources of chat templates by name, `default` among them."""
        eos: Any = _read_json(self.path / "generation_config.json").get("eos_token_id")
        self.generation_ends: set[int] | None = (
            None if eos is None else set(cast("list[int]", eos) if isinstance(eos, list) else [eos])
        )
        """The tokens that end a generation by the folder's generation settings; None without such settings."""


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"model folder {str(folder)!r} has no tokenizer.json; save it with a fast tokenizer")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"cannot read {str(path)!r}: {error}") from error


def _read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a folder by name, `default` among them, where transformers saves and finds them."""
    templates: dict[str, str] = {}
    template = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        templates |= {str(entry["name"]): str(entry["template"]) for entry in cast("list[dict[str, Any]]", template)}
    elif isinstance(template, str):
        templates["default"] = template
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = path.read_text(encoding="utf-8")
    path = folder / "chat_template.jinja"
    if path.is_file():
        templates["default"] = path.read_text(encoding="utf-8")
    if "default" not in templates:
        raise ModelError(
            f"model folder {str(folder)!r} has no chat template; put one into chat_template.jinja beside its tokenizer"
        )
    return templates


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return cast("dict[str, Any]", json.loads(path.read_text()))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error


def _token_text(token: object) -> str | None:
    """A special token is written as text, or as an object with its text in `content`."""
    if isinstance(token, dict):
        token = cast("dict[str, Any]", token).get("content")
    return token if isinstance(token, str) else None
