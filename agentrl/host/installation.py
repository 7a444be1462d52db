"""How this installation of agentrl gets more of its optional parts.

The name `agentrl` on the public package index belongs to another project (AgentRL 0.0.18, of 2022), so a command that
names it alone installs a stranger's code wherever ours is not there yet. Every command that we show installs from where
this installation came: its checkout, or its wheel file (PEP 610 has pip write that down).
"""

from __future__ import annotations

import importlib.metadata
import json
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent.parent


def install_command(*extras: str) -> str:
    """Return the command that installs `extras` of this agentrl, such as `train` or `docker`."""
    return f"pip install '{_source()}[{','.join(extras)}]'"


@cache
def _source() -> str:
    """The checkout or wheel file that this agentrl was installed from, as pip takes it."""
    if (_PACKAGE.parent / "pyproject.toml").is_file():
        return f"{_PACKAGE.parent}"
    try:
        text = importlib.metadata.distribution("agentrl").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        text = None
    origin: dict[str, Any] = json.loads(text) if text else {}
    url = str(origin.get("url", ""))
    return url.removeprefix("file://") if url.startswith("file://") else "PATH/TO/agentrl.whl"


def other_project(package: Path = _PACKAGE) -> str:
    """Return the place where files of the other project named agentrl lie among ours; "" if there are none. On a file
    system without upper case its package is the same folder; elsewhere its metadata takes the place of ours, and no
    environment of ours is registered."""
    inside = package / "agents" / "deep_q_network.py"
    if inside.is_file():
        return str(inside)
    beside = sorted(package.parent.glob("AgentRL-*.dist-info")) if package.parent.name == "site-packages" else []
    return str(beside[0]) if beside else ""
