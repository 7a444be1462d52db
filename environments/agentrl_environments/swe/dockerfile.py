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
    for instruction, arguments in _instructions(file):
        if instruction == "FROM":
            workdir = ""  # a later stage begins at the root
        elif instruction == "WORKDIR":
            workdir = _moved(file, workdir, arguments)
    return workdir or "/app"


def _moved(file: Path, workdir: str, rest: str) -> str:
    if "$" in rest or not rest:
        raise ConfigError(str(file), f"WORKDIR {rest}"[:60], "give a path without variables")
    return posixpath.normpath(posixpath.join(workdir or "/", rest.strip("\"'")))


def recipe(file: Path) -> Recipe:
    """A Dockerfile that only copies, as data. Raises ConfigError with the first line that needs a builder."""
    base_image, copied_files, work_folder = "", dict[str, Path](), workdir_of(file)
    has_workdir = any(instruction == "WORKDIR" for instruction, _ in _instructions(file))
    workdir, ignores = "" if has_workdir else work_folder, ignored_by(file)
    for instruction, arguments in _instructions(file):
        if instruction == "FROM" and not base_image:
            base_image = arguments.partition(" ")[0]
        elif instruction == "COPY" and "--" not in arguments:
            try:
                *copy_sources, copy_target = shlex.split(arguments)
            except ValueError:
                copy_sources, copy_target = [], ""
            if not copy_sources:
                raise ConfigError(str(file), f"COPY {arguments}"[:60], "write it as COPY SOURCE … TARGET")
            for copy_source in copy_sources:
                copied_files.update(
                    _copied(file, copy_source, posixpath.join(workdir or "/", copy_target), work_folder, ignores)
                )
        elif instruction == "WORKDIR":
            workdir = _moved(file, workdir, arguments)
        elif instruction not in _SILENT:
            correction = (
                f"{instruction} needs a builder: docker build -t NAME {file.parent}, "
                "then docker_image or images= with NAME"
            )
            raise ConfigError(str(file), f"{instruction} {arguments}"[:60], correction)
    if not base_image:
        raise ConfigError(str(file), "", "a Dockerfile starts with FROM")
    return Recipe(base_image, work_folder, copied_files)


def _instructions(file: Path) -> Iterator[tuple[str, str]]:
    dockerfile_text = re.sub(r"(?m)^\s*#.*\n", "", text_of(file)).replace("\\\n", " ")
    for text_line in dockerfile_text.splitlines():
        instruction, _, arguments = text_line.strip().partition(" ")
        if instruction:
            yield instruction.upper(), arguments.strip()


def _copied(file: Path, source: str, target: str, work_folder: str, ignores: Callable[[str], bool]) -> dict[str, Path]:
    """One source of a COPY: a file, or what is in a folder, without what `.dockerignore` leaves out. `target` is an
    absolute path, which ends with a slash if it is a folder."""
    relative_goal = posixpath.relpath(target, work_folder)
    context_folder = file.parent.resolve()
    origin_path = (context_folder / source.lstrip("/")).resolve()
    if relative_goal.startswith("..") or not origin_path.is_relative_to(context_folder) or not origin_path.exists():
        correction = f"copies into {work_folder} only, which is the last WORKDIR, and of files beside it"
        raise ConfigError(str(file), f"COPY {source} {target}", correction)
    if origin_path.is_file():
        if ignores(origin_path.relative_to(context_folder).as_posix()):
            raise ConfigError(str(file), f"COPY {source} {target}", ".dockerignore leaves this file out")
        into_folder = target.endswith("/") or relative_goal == "."
        return {
            posixpath.normpath(
                posixpath.join(relative_goal, origin_path.name) if into_folder else relative_goal
            ): origin_path
        }
    inside_paths = [
        inside_path
        for inside_path in sorted(origin_path.rglob("*"))
        if inside_path.is_file() and inside_path != file.resolve()
    ]
    included = [
        inside_path for inside_path in inside_paths if not ignores(inside_path.relative_to(context_folder).as_posix())
    ]
    return {
        posixpath.normpath(posixpath.join(relative_goal, inside_path.relative_to(origin_path).as_posix())): inside_path
        for inside_path in included
    }


def ignored_by(file: Path) -> Callable[[str], bool]:
    """Whether a path of a Dockerfile's context is left out: by the last line of its `.dockerignore` that matches the
    path or a folder above it. `!` takes back; `*` and `?` stay within a folder, `**` does not."""
    own_rules = file.with_name(f"{file.name}.dockerignore")
    rules_file = own_rules if own_rules.is_file() else file.with_name(".dockerignore")
    rule_lines = text_of(rules_file).splitlines() if rules_file.is_file() else []
    patterns: list[tuple[re.Pattern[str], bool]] = []
    for rule_line in (rule_line.strip() for rule_line in rule_lines if not rule_line.startswith("#")):
        is_kept = rule_line.startswith("!")
        path_pattern = (
            posixpath.normpath(rule_line.removeprefix("!").strip()).strip("/") if rule_line.removeprefix("!") else ""
        )
        if path_pattern and path_pattern != ".":
            patterns.append((re.compile(_regex(path_pattern) + r"(?:/.*)?"), is_kept))

    def ignores(path: str) -> bool:
        matching = [keeps_path for path_regex, keeps_path in patterns if path_regex.fullmatch(path)]
        return bool(matching) and not matching[-1]

    return ignores


def _regex(pattern: str) -> str:
    """A pattern of `.dockerignore` as a regular expression."""
    regex_parts: list[str] = []
    position = 0
    while position < len(pattern):
        if pattern.startswith("**/", position):
            regex_parts.append("(?:.*/)?")
            position += 3
        elif pattern.startswith("**", position):
            regex_parts.append(".*")
            position += 2
        elif pattern[position] in "*?":
            regex_parts.append("[^/]*" if pattern[position] == "*" else "[^/]")
            position += 1
        elif (class_match := re.compile(r"\[\^?[^\]]+\]").match(pattern, position)) is not None:
            regex_parts.append(class_match[0])
            position = class_match.end()
        else:
            position += 1 if pattern[position] == "\\" and position + 1 < len(pattern) else 0
            regex_parts.append(re.escape(pattern[position]))
            position += 1
    return "".join(regex_parts)
