"""Unified diffs: parsed as models write them, applied exactly. Knows nothing of files.

Line numbers are only a hint (models miscount): a hunk goes where its old lines stand, nearest to the number given. Its
cost is bounded, as a policy chooses both the patch and the files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from agentrl.errors import ToolError

_DIGITS = 9  # of a line number
_STEPS = 3_000_000  # lines looked at for one patch: about a second
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


@dataclass(slots=True)
class Effort:
    """How many more lines may be looked at before a patch is given up."""

    left: int = _STEPS

    def spend(self, lines: int) -> None:
        """Raises ToolError if that is too many."""
        self.left -= lines
        if self.left < 0:
            raise ToolError("the patch takes too long to place: give right line numbers, or make it smaller")


def parse_patch(text: str) -> list[FilePatch]:
    """Raises ToolError that names the fault and its place."""
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
            if len(found[1]) > _DIGITS:
                raise ToolError(f"line {at + 1} of the patch names a line with a number of {len(found[1])} digits")
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


def apply_hunks(text: str, hunks: list[Hunk], name: str, effort: Effort | None = None) -> str:
    """The text after all hunks. Raises ToolError naming the first that does not fit."""
    effort = effort or Effort()
    ended = text.endswith("\n") or not text
    lines = text.split("\n")
    if ended:
        lines.pop()
    done: list[str] = []
    at = 0  # lines before it are in `done`, as the hunks so far left them
    for number, hunk in enumerate(hunks, 1):
        old = hunk.old
        place = _find(lines, old, hunk.at - 1 if old else hunk.at, at, effort)
        if place is None:
            near = old[0] if old else ""
            raise ToolError(f"hunk {number} does not fit {name}: its lines (first {near!r}) do not stand there")
        done += lines[at:place]
        done += hunk.new
        at = place + len(old)
        if hunk.ends_open and at == len(lines):
            ended = False
        elif at == len(lines) and hunk.new:
            ended = True
    done += lines[at:]
    return "\n".join(done) + ("\n" if ended and done else "")


def _find(lines: list[str], old: list[str], hint: int, floor: int, effort: Effort) -> int | None:
    """Where `old` stands in `lines` from `floor` on, nearest to `hint`."""
    if not old:
        return max(floor, min(hint, len(lines)))
    if lines[max(hint, floor) : max(hint, floor) + len(old)] == old:
        return max(hint, floor)
    effort.spend(len(lines) - floor + len(old))
    return min(_places(lines, old, floor), key=lambda at: abs(at - hint), default=None)


def _places(lines: list[str], old: list[str], floor: int) -> Iterator[int]:
    """Where `old` stands from `floor` on, in one pass (Knuth, Morris and Pratt)."""
    back = [0] * len(old)  # how much of `old` stands again at the end of its first lines
    length = 0
    for at in range(1, len(old)):
        while length and old[at] != old[length]:
            length = back[length - 1]
        length += old[at] == old[length]
        back[at] = length
    length = 0
    for at in range(floor, len(lines)):
        while length and (length == len(old) or lines[at] != old[length]):
            length = back[length - 1]
        length += lines[at] == old[length]
        if length == len(old):
            yield at + 1 - length
