"""Dockerfiles that only lay files into a work folder, which a box can do without building an image.

Everything else that a Dockerfile may say (RUN and the like) needs a builder and mostly a network: there the image
has to exist already. Knows nothing of tasks or boxes.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Iterator
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
    """Where the last WORKDIR leads, `/app` if there is none, as Harbor has it. A relative one goes on from the one
    before. Raises ConfigError for a variable, whose value a builder would know."""
    workdir = ""
    for word, rest in _instructions(file):
        if word == "FROM":
            workdir = ""  # a later stage begins at the root
        elif word == "WORKDIR":
            workdir = _moved(file, workdir, rest)
    return workdir or "/app"


def _moved(file: Path, workdir: str, rest: str) -> str:
    if "$" in rest or not rest:
        raise ConfigError(str(file), f"WORKDIR {rest}"[:60], "give a path without variables")
    return posixpath.normpath(posixpath.join(workdir or "/", rest.strip("\"'")))


def recipe(file: Path) -> Recipe:
    """A Dockerfile that only copies, as data. Raises ConfigError with the first line that needs a builder."""
    base, files, work_folder = "", dict[str, Path](), workdir_of(file)
    has_workdir = any(word == "WORKDIR" for word, _ in _instructions(file))
    workdir, ignores = "" if has_workdir else work_folder, ignored_by(file)
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
                files.update(_copied(file, source, posixpath.join(workdir or "/", target), work_folder, ignores))
        elif word == "WORKDIR":
            workdir = _moved(file, workdir, rest)
        elif word not in _SILENT:
            hint = f"{word} needs a builder: docker build -t NAME {file.parent}, then docker_image or images= with NAME"
            raise ConfigError(str(file), f"{word} {rest}"[:60], hint)
    if not base:
        raise ConfigError(str(file), "", "a Dockerfile starts with FROM")
    return Recipe(base, work_folder, files)


def _instructions(file: Path) -> Iterator[tuple[str, str]]:
    text = re.sub(r"(?m)^\s*#.*\n", "", text_of(file)).replace("\\\n", " ")
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word:
            yield word.upper(), rest.strip()


def _copied(file: Path, source: str, target: str, work_folder: str, ignores: Callable[[str], bool]) -> dict[str, Path]:
    """One source of a COPY: a file, or what is in a folder, without what `.dockerignore` leaves out. `target` is an
    absolute path, which ends with a slash if it is a folder."""
    goal = posixpath.relpath(target, work_folder)
    context = file.parent.resolve()
    origin = (context / source.lstrip("/")).resolve()
    if goal.startswith("..") or not origin.is_relative_to(context) or not origin.exists():
        hint = f"copies into {work_folder} only, which is the last WORKDIR, and of files beside it"
        raise ConfigError(str(file), f"COPY {source} {target}", hint)
    if origin.is_file():
        if ignores(origin.relative_to(context).as_posix()):
            raise ConfigError(str(file), f"COPY {source} {target}", ".dockerignore leaves this file out")
        into_folder = target.endswith("/") or goal == "."
        return {posixpath.normpath(posixpath.join(goal, origin.name) if into_folder else goal): origin}
    inside = [path for path in sorted(origin.rglob("*")) if path.is_file() and path != file.resolve()]
    included = [path for path in inside if not ignores(path.relative_to(context).as_posix())]
    return {posixpath.normpath(posixpath.join(goal, path.relative_to(origin).as_posix())): path for path in included}


def ignored_by(file: Path) -> Callable[[str], bool]:
    """Whether a path of a Dockerfile's context is left out: by the last line of its `.dockerignore` that matches the
    path or a folder above it. `!` takes back; `*` and `?` stay within a folder, `**` does not."""
    own_rules = file.with_name(f"{file.name}.dockerignore")
    rules = own_rules if own_rules.is_file() else file.with_name(".dockerignore")
    lines = text_of(rules).splitlines() if rules.is_file() else []
    patterns: list[tuple[re.Pattern[str], bool]] = []
    for line in (line.strip() for line in lines if not line.startswith("#")):
        is_kept = line.startswith("!")
        pattern = posixpath.normpath(line.removeprefix("!").strip()).strip("/") if line.removeprefix("!") else ""
        if pattern and pattern != ".":
            patterns.append((re.compile(_regex(pattern) + r"(?:/.*)?"), is_kept))

    def ignores(path: str) -> bool:
        matching = [is_kept for pattern, is_kept in patterns if pattern.fullmatch(path)]
        return bool(matching) and not matching[-1]

    return ignores


def _regex(pattern: str) -> str:
    """A pattern of `.dockerignore` as a regular expression."""
    parts: list[str] = []
    position = 0
    while position < len(pattern):
        if pattern.startswith("**/", position):
            parts.append("(?:.*/)?")
            position += 3
        elif pattern.startswith("**", position):
            parts.append(".*")
            position += 2
        elif pattern[position] in "*?":
            parts.append("[^/]*" if pattern[position] == "*" else "[^/]")
            position += 1
        elif (match := re.compile(r"\[\^?[^\]]+\]").match(pattern, position)) is not None:
            parts.append(match[0])
            position = match.end()
        else:
            position += 1 if pattern[position] == "\\" and position + 1 < len(pattern) else 0
            parts.append(re.escape(pattern[position]))
            position += 1
    return "".join(parts)
