"""What a model's name stands for: a folder, or an id that a package registered."""

from __future__ import annotations

from pathlib import Path

from agentrl import registry
from agentrl.errors import ModelError, UnknownIdError


def model_dir(name: str) -> Path:
    """The folder (Hugging Face layout) behind a path or a registered id such as `agentrl/tiny-coder`.

    Raises ModelError if there is neither, or the folder has no config.json."""
    path = Path(name)
    if not path.is_dir():
        try:
            path = Path(registry.resolve("models", name)())
        except UnknownIdError as error:
            raise ModelError(f"model {name!r} is neither a folder nor a registered id ({error})") from None
    if not (path / "config.json").is_file():
        raise ModelError(f"model folder {str(path)!r} has no config.json: save a model there with save_pretrained")
    return path
