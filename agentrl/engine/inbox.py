"""Folders of files that come to an engine over HTTP: the adapters of a learner that shares no disk with it.

    {"folder": ID, "file": NAME, "start": BYTE, "data": BASE64}  …  {"folder": ID, "files": {NAME: SHA-256}} ─► its path

A folder appears by one rename once all of its files have the SHA-256 that they should, or not at all. Standard library
only: it runs in the embedded engine, and in each of vLLM's workers, of which those of one host make the same folder.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

METHOD = "agentrl_receive"
"""What the call is named at an engine (`POST /collective_rpc`)."""

_NAME = re.compile(r"\w[\w.-]{0,200}")
_PIECE = 8 << 20
_MOST = 16 << 30  # bytes of a file


def root() -> Path:
    """Where an engine keeps what came. A server that a run starts has a temporary folder of its own."""
    return Path(tempfile.gettempdir()) / f"agentrl-inbox-{os.getuid()}"


def messages(folder: Path, name: str) -> Generator[str]:
    """What to send, one after the other, so that the engine has the files of `folder` in one of that name."""
    digests: dict[str, str] = {}
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        digest = hashlib.sha256()
        with path.open("rb") as file:
            start = 0
            while (data := file.read(_PIECE)) or start == 0:
                digest.update(data)
                piece = {"file": path.name, "start": start, "data": base64.b64encode(data).decode()}
                yield json.dumps({"folder": name, **piece})
                start += max(1, len(data))
        digests[path.name] = digest.hexdigest()
    yield json.dumps({"folder": name, "files": digests})


def forgetting(path: str) -> str | None:
    """The message that removes the folder at `path`; None if that lies in no inbox."""
    place = Path(path)
    return json.dumps({"folder": place.name, "drop": True}) if place.parent.name == root().name else None


def receive(text: str) -> dict[str, Any]:
    """Take one message. Returns the folder's `path` once it is whole, or the line of an `error`."""
    try:
        return _taken(json.loads(text))
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _taken(message: dict[str, Any]) -> dict[str, Any]:
    folder = root() / _checked(message["folder"])
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    if message.get("drop"):
        for place in (folder, draft):
            shutil.rmtree(place, ignore_errors=True)
        return {}
    if "file" in message:
        name = _checked(message["file"])
        start, data = int(message["start"]), base64.b64decode(message["data"], validate=True)
        if not 0 <= start <= _MOST:
            raise ValueError(f"a file ends at {_MOST} bytes")
        draft.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (draft / name).open("r+b" if start else "wb") as file:
            file.seek(start)
            file.write(data)
        return {}
    for name, digest in message["files"].items():
        with (draft / _checked(name)).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                raise ValueError(f"{name} has another SHA-256 than it was sent with")
    if folder.exists():  # a worker beside this one was first, or it was sent twice
        shutil.rmtree(draft)
    else:
        draft.rename(folder)
    return {"path": str(folder)}


def _checked(name: Any) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a file")
    return name
