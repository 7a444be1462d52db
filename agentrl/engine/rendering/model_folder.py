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
        texts = {name: _token_text(name, settings.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        self.token_texts = {name: text for name, text in texts.items() if text}
        """The texts of special tokens by their role, as templates read them."""
        self.templates = _read_templates(self.path, settings)
        """The sources of chat templates by name, `default` among them."""
        eos_ids: Any = _read_json(self.path / "generation_config.json").get("eos_token_id")
        listed_ids = cast("list[Any]", eos_ids) if isinstance(eos_ids, list) else [eos_ids]
        if eos_ids is not None and not all(type(token) is int for token in listed_ids):
            raise ModelError(
                f"{self.path / 'generation_config.json'}: eos_token_id = {eos_ids!r} holds no ids of tokens"
            )
        self.generation_ends: set[int] | None = None if eos_ids is None else set(listed_ids)
        """The tokens that end a generation by the folder's generation settings; None without such settings."""


def _read_tokenizer(folder: Path) -> Tokenizer:
    tokenizer_path = folder / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise ModelError(f"model folder {str(folder)!r} has no tokenizer.json; save it with a fast tokenizer")
    try:
        return Tokenizer.from_file(str(tokenizer_path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"cannot read {str(tokenizer_path)!r}: {error}") from error


def _read_templates(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a folder by name, `default` among them, where transformers saves and finds them."""
    templates: dict[str, str] = {}
    template = settings.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several, by name
        for template_entry in cast("list[Any]", template):
            entry_fields = cast("dict[str, Any]", template_entry) if isinstance(template_entry, dict) else {}
            template_name, source = entry_fields.get("name"), entry_fields.get("template")
            if not isinstance(template_name, str) or not isinstance(source, str):
                raise ModelError(
                    f"{folder}: a chat template of several is a name and a text, not {template_entry!r:.100}"
                )
            templates[template_name] = source
    elif isinstance(template, str):
        templates["default"] = template
    elif template is not None:
        raise ModelError(f"{folder}: chat_template = {template!r:.100} is no text")
    for template_path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[template_path.stem] = _read_text(template_path)
    # Last, so that it wins: transformers saves new templates here, and an older one may still stand in the settings.
    template_path = folder / "chat_template.jinja"
    if template_path.is_file():
        templates["default"] = _read_text(template_path)
    if "default" not in templates:
        raise ModelError(
            f"model folder {str(folder)!r} has no chat template; put one into chat_template.jinja beside its tokenizer"
        )
    return templates


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is no text in UTF-8: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path} holds no JSON object")
    return cast("dict[str, Any]", document)


def _token_text(name: str, token: object) -> str | None:
    """The text of a special token, which is written as text, or as an object with the text in `content`. Raises
    ModelError for anything else."""
    token_text = cast("dict[str, Any]", token).get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(token_text, str):
        raise ModelError(f"tokenizer_config.json: {name} = {token!r} is no text of a token")
    return cast("str | None", token_text)
