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
        suggestion = "give lower-case letters, digits and _, such as my_env, and no module of Python's own"
        raise UsageError(f"{name!r} is no name for a package: {suggestion}")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is no folder: give another --out")
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty: give another --out")
    substitutions = {"package": name, "class": "".join(name_word.capitalize() for name_word in name.split("_"))}
    substitutions["install_train"] = install_command("train")
    substitutions["id"] = f"{name}/{substitutions['class']}-v0"
    written_paths: list[Path] = []
    template_root = _TEMPLATES / "env"
    for template in sorted(template_root.rglob("*.in")):
        relative_path = str(template.relative_to(template_root))
        file_path = folder / Template(relative_path).substitute(substitutions).removesuffix(".in")
        file_path.parent.mkdir(parents=True, exist_ok=True)
        file_path.write_text(Template(template.read_text()).substitute(substitutions))
        written_paths.append(file_path)
    return substitutions["id"], written_paths
