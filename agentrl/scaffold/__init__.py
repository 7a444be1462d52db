"""`agentrl new`: a package to begin with, written from the templates beside this file.

A template's name is its path with `.in` behind it. In path and text `$package`, `$class` and `$id` stand for the new
package, its environment's class and its id, and `$install_train` for the command that installs what trains. It owns the
templates and nothing of what becomes of them.
"""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path
from string import Template

from agentrl.errors import UsageError
from agentrl.host.installation import install_command

_TEMPLATES = Path(__file__).parent
_TAKEN = frozenset({"agentrl", "agentrl_environments", "agentrl_tools", "tests"}) | sys.stdlib_module_names


def new_env(name: str, folder: Path) -> tuple[str, list[Path]]:
    """Write a package `name` with an environment, tools, tests and a run file into `folder`; its id and its files.

    Raises UsageError for a name that Python cannot import, or a folder that holds something already."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name) or name in _TAKEN:
        hint = "give lower-case letters, digits and _, such as my_env, and no module of Python's own"
        raise UsageError(f"{name!r} is no name for a package: {hint}")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder: give another --out")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty: give another --out")
    words = {"package": name, "class": "".join(word.capitalize() for word in name.split("_"))}
    words["install_train"] = install_command("train")
    words["id"] = f"{name}/{words['class']}-v0"
    written: list[Path] = []
    root = _TEMPLATES / "env"
    for template in sorted(root.rglob("*.in")):
        path = folder / Template(str(template.relative_to(root))).substitute(words).removesuffix(".in")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Template(template.read_text()).substitute(words))
        written.append(path)
    return words["id"], written
