"""Dockerfiles that only lay files into a work folder, which a box can do without building an image.

Everything else that a Dockerfile may say (RUN and the like) needs a builder and mostly a network: there an image must
be given. Knows nothing of tasks or boxes.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentrl.errors import ConfigError
from agentrl_environments.swe.task import text_of

_SILENT: Final = {"CMD", "LABEL", "MAINTAINER", "EXPOSE"}  # change nothing that a box has


@dataclass(frozen=True, slots=True)
class Recipe:
    """`files` of the host by their path in the work folder `workdir` of an image `base`."""

    base: str
    workdir: str
    files: dict[str, Path]


def workdir_of(file: Path) -> str:
    """The last WORKDIR, `/app` if there is none, as Harbor has it."""
    found = [rest for word, rest in _instructions(file) if word == "WORKDIR"]
    return found[-1] if found else "/app"


def recipe(file: Path) -> Recipe:
    """A Dockerfile that only copies, as data. Raises ConfigError with the first line that needs a builder."""
    base, files, workdir = "", dict[str, Path](), workdir_of(file)
    for word, rest in _instructions(file):
        if word == "FROM" and not base:
            base = rest.partition(" ")[0]
        elif word == "COPY" and "--" not in rest:
            try:
                *sources, target = shlex.split(rest)
            except ValueError:
                sources, target = [], ""
            if not sources:
                raise ConfigError(str(file), f"COPY {rest}"[:60], "write it as COPY SOURCE … TARGET")
            for source in sources:
                files.update(_copied(file, source, target, workdir))
        elif word != "WORKDIR" and word not in _SILENT:
            hint = f"{word} needs a builder: docker build -t NAME {file.parent}, then docker_image or images= with NAME"
            raise ConfigError(str(file), f"{word} {rest}"[:60], hint)
    if not base:
        raise ConfigError(str(file), "", "a Dockerfile starts with FROM")
    return Recipe(base, workdir, files)


def _instructions(file: Path) -> Iterator[tuple[str, str]]:
    text = re.sub(r"(?m)^\s*#.*\n", "", text_of(file)).replace("\\\n", " ")
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word:
            yield word.upper(), rest.strip()


def _copied(file: Path, source: str, target: str, workdir: str) -> dict[str, Path]:
    """One source of a COPY: a file, or what is in a folder."""
    goal = posixpath.relpath(posixpath.join(workdir, target), workdir)
    origin = (file.parent / source.lstrip("/")).resolve()
    if goal.startswith("..") or not origin.is_relative_to(file.parent.resolve()) or not origin.exists():
        raise ConfigError(str(file), f"COPY {source} {target}", f"copies within {workdir} only, of files beside it")
    if origin.is_file():
        into_folder = target.endswith("/") or goal == "."
        return {posixpath.normpath(posixpath.join(goal, origin.name) if into_folder else goal): origin}
    inside = [path for path in sorted(origin.rglob("*")) if path.is_file() and path != file.resolve()]
    return {posixpath.normpath(posixpath.join(goal, path.relative_to(origin).as_posix())): path for path in inside}
