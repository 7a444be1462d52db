"""Models of the Hugging Face hub: from this machine's cache, else downloaded if the network allows.

Owns the choice of files to fetch (no other framework's weights) and the advice if they cannot be fetched. The process
that asks first downloads, before a run starts anything; the others find the files in the cache.
"""

from __future__ import annotations

import re
from pathlib import Path

from agentrl.engine.weight_sync import weight_file
from agentrl.errors import ModelError

_ID = re.compile(r"(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def is_id(name: str) -> bool:
    """Whether `name` can be a hub id: `organisation/model`, or `organisation/model@revision`."""
    return _ID.fullmatch(name) is not None


def folder_of(name: str) -> Path:
    """The folder with the model `name`. Raises ModelError, which says how to get the model by hand."""
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    parts = _ID.fullmatch(name)
    assert parts is not None
    id, revision = parts["id"], parts["revision"]
    try:
        found = Path(snapshot_download(id, revision=revision, allow_patterns=_FILES, local_files_only=True))
        weight_file.parts(found)  # an interrupted download lacks some of them
        return found
    except (LocalEntryNotFoundError, ModelError):
        pass
    except HFValidationError as error:
        raise ModelError(f"model {name!r} is no id of the hub: {error}") from None
    try:
        return Path(snapshot_download(id, revision=revision, allow_patterns=_FILES))
    except RepositoryNotFoundError:
        raise ModelError(f"the hub has no model {name!r}, or asks for a login: hf auth login") from None
    except Exception as error:  # errors of httpx, the hub, the disk: the caller need not tell them apart
        said = str(error).partition("\n")[0].strip()
        folder = f"models/{id.rpartition('/')[2]}"
        raise ModelError(
            f"model {name!r} is not on this machine and cannot be downloaded ({type(error).__name__}: {said}): where "
            f"there is a network run hf download {id} --local-dir {folder}, copy the folder here, and give "
            f"model = {folder!r}"
        ) from error
