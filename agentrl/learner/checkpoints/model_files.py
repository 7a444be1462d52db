"""The files of a model's folder that describe it: configuration, tokenizer, chat templates, code.

What belongs to a model is what is not known to be something else. A list of names is always too short: transformers 5
keeps further chat templates in a folder of their own, other tokenizers have files of other kinds, and a model that lost
one of them gets other prompts than it was trained with. Standard library only.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from agentrl.learner.checkpoints.folders import DIGESTS, STATE

_WEIGHTS: Final = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".onnx_data",
    ".npz",
    ".distcp",
    ".index.json",
)
"""How the names of files of weights and optimizers end, and of their indexes."""

_OURS: Final = frozenset({STATE, DIGESTS})


def describing(folder: Path) -> list[Path]:
    """The files of a folder that are neither weights nor an optimizer's, by their paths in it. Hidden ones do not
    count, nor does a folder with weights: it holds another model, a part of a checkpoint or another format."""
    return sorted(
        model_file.relative_to(folder)
        for model_file in _walk(folder)
        if model_file.parent != folder or model_file.name not in _OURS
    )


def copy_description(source: Path, target: Path, *, but: Collection[str] = ()) -> None:
    """Copy the files that describe the model of `source`, without those at the top that are named in `but`."""
    for relative_path in describing(source):
        if str(relative_path) not in but:
            (target / relative_path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / relative_path, target / relative_path)


def _walk(folder: Path) -> Iterator[Path]:
    sorted_entries = sorted(folder_entry for folder_entry in folder.iterdir() if not folder_entry.name.startswith("."))
    yield from (
        folder_entry for folder_entry in sorted_entries if folder_entry.is_file() and not _is_weights(folder_entry.name)
    )
    for folder_entry in sorted_entries:
        # No link is followed: one to a parent would never end, and one out of the folder would copy somebody's disk.
        if folder_entry.is_dir() and not folder_entry.is_symlink() and not _has_weights(folder_entry):
            yield from _walk(folder_entry)


def _has_weights(folder: Path) -> bool:
    return any(_is_weights(file_name) for _, _, file_names in os.walk(folder) for file_name in file_names)


def _is_weights(name: str) -> bool:
    return name.lower().endswith(_WEIGHTS)
