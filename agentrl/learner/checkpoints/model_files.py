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
    return sorted(file.relative_to(folder) for file in _walk(folder) if file.parent != folder or file.name not in _OURS)


def copy_description(source: Path, target: Path, *, but: Collection[str] = ()) -> None:
    """Copy the files that describe the model of `source`, without those at the top that are named in `but`."""
    for path in describing(source):
        if str(path) not in but:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / path, target / path)


def _walk(folder: Path) -> Iterator[Path]:
    entries = sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    yield from (entry for entry in entries if entry.is_file() and not _is_weights(entry.name))
    for entry in entries:
        # No link is followed: one to a parent would never end, and one out of the folder would copy somebody's disk.
        if entry.is_dir() and not entry.is_symlink() and not _has_weights(entry):
            yield from _walk(entry)


def _has_weights(folder: Path) -> bool:
    return any(_is_weights(name) for _, _, names in os.walk(folder) for name in names)


def _is_weights(name: str) -> bool:
    return name.lower().endswith(_WEIGHTS)
