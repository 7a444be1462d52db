"""How this installation of agentrl gets more of its optional parts.

The name `agentrl` on the public package index belongs to another project (AgentRL 0.0.18, of 2022), so our distribution
is called `agentrl-kit`. It is not published: every command that we show installs from where this installation came, its
checkout or its wheel file (PEP 610 has pip write that down).
"""

from __future__ import annotations

import importlib.metadata
import json
from functools import cache
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent.parent
DISTRIBUTION = "agentrl-kit"
"""The name by which pip knows this package, and `importlib.metadata` its version."""


def install_command(*extras: str) -> str:
    """Return the command that installs `extras` of this agentrl, such as `train` or `docker`."""
    return f"pip install '{_source()}[{','.join(extras)}]'"


@cache
def _source() -> str:
    """The checkout or wheel file that this agentrl was installed from, as pip takes it."""
    if (_PACKAGE.parent / "pyproject.toml").is_file():
        return f"{_PACKAGE.parent}"
    try:
        origin_text = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin_text = None
    origin_fields: dict[str, Any] = json.loads(origin_text) if origin_text else {}
    origin_url = str(origin_fields.get("url", ""))
    return origin_url.removeprefix("file://") if origin_url.startswith("file://") else "PATH/TO/agentrl_kit.whl"


def other_project(package: Path = _PACKAGE) -> str:
    """Return a file of the other project named agentrl that lies among ours; "" if there is none. Its package is called
    AgentRL, which is the same folder on a file system that does not tell upper from lower case (a Mac's)."""
    foreign_file = package / "agents" / "deep_q_network.py"
    return str(foreign_file) if foreign_file.is_file() else ""
