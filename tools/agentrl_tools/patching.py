"""Unified diffs: parsed as models write them, applied exactly. Knows nothing of files.

Line numbers are only a hint (models miscount): a hunk goes where its old lines stand, nearest to the number given."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from agentrl.errors import ToolError

_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


@dataclass(slots=True)
class Hunk:
    """`old` lines that stand at about line `at` (from 1) become `new` lines."""

    at: int
    old: list[str] = field(default_factory=list[str])
    new: list[str] = field(default_factory=list[str])
    ends_open: bool = False  # the new text has no newline at its end


@dataclass(slots=True)
class FilePatch:
    """One file's part of a patch; `old` None makes a file, `new` None removes one."""

    old: str | None
    new: str | None
    hunks: list[Hunk] = field(default_factory=list[Hunk])


def parse_patch(text: str) -> list[FilePatch]:
    """Raises ToolError with what is wrong and where."""
    patches: list[FilePatch] = []
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ "):
            patches.append(FilePatch(_name(line[4:]), _name(lines[at + 1][4:])))
            at += 2
        elif (found := _HUNK.match(line)) is not None:
            if not patches:
                raise ToolError(f"line {at + 1} of the patch is a hunk of no file: write --- and +++ lines before it")
            hunk = Hunk(int(found[1]))
            at = _parse_hunk(lines, at + 1, hunk)
            patches[-1].hunks.append(hunk)
        else:
            at += 1  # `diff --git`, `index`, prose
    if not patches or not any(patch.hunks for patch in patches):
        raise ToolError("no hunk found: a patch has lines like '--- a/file', '+++ b/file' and '@@ -1,2 +1,2 @@'")
    for patch in patches:
        if patch.old is None and patch.new is None:
            raise ToolError("a part of the patch names /dev/null twice")
    return patches


def _parse_hunk(lines: list[str], at: int, hunk: Hunk) -> int:
    last = ""
    while at < len(lines):
        line = lines[at]
        if line.startswith("@@") or (
            line.startswith("--- ") and lines[at + 1 : at + 2] and lines[at + 1][:4] == "+++ "
        ):
            break
        if line.startswith("diff --git "):
            break
        sign, rest = line[:1] or " ", line[1:]
        if sign == "\\":
            hunk.ends_open = hunk.ends_open or last != "-"
        elif sign in " +-":
            if sign != "+":
                hunk.old.append(rest)
            if sign != "-":
                hunk.new.append(rest)
        else:
            raise ToolError(f"line {at + 1} of the patch starts with {sign!r}: expected ' ', '+' or '-'")
        last = sign
        at += 1
    return at


def _name(field_: str) -> str | None:
    name = field_.split("\t")[0].strip()
    if name == "/dev/null":
        return None
    return name[2:] if name[:2] in ("a/", "b/") else name


def apply_hunks(text: str, hunks: list[Hunk], name: str) -> str:
    """The text after all hunks. Raises ToolError naming the first that does not fit."""
    ended = text.endswith("\n") or not text
    lines = text.split("\n")
    if ended:
        lines.pop()
    shift = floor = 0
    for number, hunk in enumerate(hunks, 1):
        old = hunk.old
        place = _find(lines, old, hunk.at - 1 + shift if old else hunk.at + shift, floor)
        if place is None:
            near = old[0] if old else ""
            raise ToolError(f"hunk {number} does not fit {name}: its lines (first {near!r}) do not stand there")
        lines[place : place + len(old)] = hunk.new
        shift += len(hunk.new) - len(old)
        floor = place + len(hunk.new)
        if hunk.ends_open and floor == len(lines):
            ended = False
        elif floor == len(lines) and hunk.new:
            ended = True
    return "\n".join(lines) + ("\n" if ended and lines else "")


def _find(lines: list[str], old: list[str], hint: int, floor: int) -> int | None:
    """Where `old` stands in `lines` from `floor` on, nearest to `hint`."""
    if not old:
        return max(floor, min(hint, len(lines)))
    places = [at for at in range(floor, len(lines) - len(old) + 1) if lines[at : at + len(old)] == old]
    return min(places, key=lambda at: abs(at - hint), default=None)
