"""Unified diffs: parsed as models write them, applied exactly. Knows nothing of files.

Line numbers are only a hint (models miscount): a hunk goes where its old lines stand, nearest to its number. Its
cost is bounded, as a policy chooses both the patch and the files."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from agentrl.errors import ToolError

_DIGITS = 9  # of a line number
_STEPS = 3_000_000  # lines looked at for one patch: about a second
_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")
_BINARY = ("GIT binary patch", "Binary files ")
_VERSION = re.compile(r"\d+\.\d+[\w.+~() -]*\s*")  # as 2.43.0 or 2.39.5 (Apple Git-154)
_GIT = re.compile(
    r"((?:old|new|new file|deleted file) mode|(?:rename|copy) (?:from|to)|(?:dis)?similarity index|index) (.*)"
)


@dataclass(slots=True)
class Hunk:
    """`old` lines that stand at about line `at` (from 1) become `new` lines."""

    at: int
    old: list[str] = field(default_factory=list[str])
    new: list[str] = field(default_factory=list[str])
    ends_open: bool = False  # the new text has no newline at its end


@dataclass(slots=True)
class FilePatch:
    """One file's part of a patch; `old` None makes a file, `new` None removes one. `copies`: the old one stays.
    `executable`: what the new one shall be, None where the patch does not say."""

    old: str | None
    new: str | None
    hunks: list[Hunk] = field(default_factory=list[Hunk])
    copies: bool = False
    executable: bool | None = None


@dataclass(slots=True)
class Effort:
    """How many more lines may be looked at before a patch is refused."""

    left: int = _STEPS

    def spend(self, lines: int) -> None:
        """Raises ToolError if that is too many."""
        self.left -= lines
        if self.left < 0:
            raise ToolError("the patch takes too long to place: give right line numbers, or make it smaller")


def parse_patch(text: str) -> list[FilePatch]:
    """Raises ToolError that names the fault and its place. Lines end with `\\n` alone: the files' own lines may hold
    any other sign that ends one elsewhere."""
    patches: list[FilePatch] = []
    lines = text.removesuffix("\n").split("\n")
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.startswith("diff --git "):
            at = _parse_git(lines, at, patches)
        elif _names_files(lines, at):
            patches.append(FilePatch(_name(line[4:]), _name(lines[at + 1][4:])))
            at += 2
        elif line.startswith("@@"):
            at = _parse_hunk(lines, at, patches)
        elif line.startswith(_BINARY):
            raise ToolError(
                f"line {at + 1} of the patch is of a binary file, which a patch cannot change: {line[:200]}"
            )
        else:
            at += 1  # prose
    if not patches:
        raise ToolError("no hunk found: a patch has lines like '--- a/file', '+++ b/file' and '@@ -1,2 +1,2 @@'")
    for patch in patches:
        if patch.old is None and patch.new is None:
            raise ToolError("a part of the patch names /dev/null twice")
        if not patch.hunks and patch.old == patch.new and patch.executable is None:
            raise ToolError(f"no hunk found for {patch.new}: write lines like '@@ -1,2 +1,2 @@'")
    return patches


def _names_files(lines: list[str], at: int) -> bool:
    return lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ ")


def _parse_git(lines: list[str], at: int, patches: list[FilePatch]) -> int:
    """A header of git: what it says beside the names in `---` and `+++`, which may be missing."""
    began, headers = at, dict[str, str]()
    while (at := at + 1) < len(lines) and (match := _GIT.match(lines[at])) is not None:
        headers[match[1]] = match[2].strip()
    if at < len(lines) and _names_files(lines, at):
        patch = FilePatch(_name(lines[at][4:]), _name(lines[at + 1][4:]))
        at += 2
    elif at < len(lines) and lines[at].startswith(_BINARY):
        raise ToolError(
            f"line {at + 1} of the patch is of a binary file, which it cannot change: {lines[began][11:200]}"
        )
    elif not headers and not (at < len(lines) and lines[at].startswith("@@")):
        return at
    else:
        same = _same_name(lines[began][11:].rstrip("\r"))
        patch = FilePatch(
            None
            if "new file mode" in headers
            else _unquoted(headers.get("rename from", headers.get("copy from", same))),
            None
            if "deleted file mode" in headers
            else _unquoted(headers.get("rename to", headers.get("copy to", same))),
        )
        if "" in (patch.old, patch.new):
            raise ToolError(f"line {began + 1} of the patch names no file: write --- and +++ lines below it")
    patch.copies = "copy to" in headers
    mode = headers.get("new mode", headers.get("new file mode"))
    if mode is not None and not mode.startswith("100"):
        raise ToolError(
            f"line {began + 1} of the patch makes a file of mode {mode[:10]}: only 100644 and 100755 are known"
        )
    patch.executable = None if mode is None else mode == "100755"
    patches.append(patch)
    return at


def _same_name(names: str) -> str:
    """The name of a header without renaming, `a/NAME b/NAME`; empty where the two differ."""
    half = len(names) // 2
    old, new = names[:half], names[half + 1 :]
    old, new = (_name(old) or "", _name(new) or "") if names[half : half + 1] == " " else ("", "")
    return old if old == new else ""


def ends_mail(lines: Sequence[str], at: int) -> bool:
    """Whether the signature of `git format-patch` stands at a line: two dashes, and git's version below. No hunk goes
    on with a line that starts with a digit, so nothing else can be meant."""
    return lines[at].rstrip() == "--" and at + 1 < len(lines) and _VERSION.fullmatch(lines[at + 1]) is not None


def _parse_hunk(lines: list[str], at: int, patches: list[FilePatch]) -> int:
    match = _HUNK.match(lines[at])
    if match is None:
        hint = "write the lines' numbers, as in '@@ -12,3 +12,4 @@' (nearly right is enough)"
        raise ToolError(f"line {at + 1} of the patch is no header of a hunk: {lines[at][:80]!r}; {hint}")
    if not patches:
        raise ToolError(f"line {at + 1} of the patch is a hunk of no file: write --- and +++ lines before it")
    if len(match[1]) > _DIGITS:
        raise ToolError(f"line {at + 1} of the patch names a line with a number of {len(match[1])} digits")
    hunk, last = Hunk(int(match[1])), ""
    patches[-1].hunks.append(hunk)
    while (at := at + 1) < len(lines):
        line = lines[at]
        if line.startswith(("@@", "diff --git ", *_BINARY)) or _names_files(lines, at):
            break
        if ends_mail(lines, at):
            return at + 2
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
    return at


def _name(field_: str) -> str | None:
    name = _unquoted(field_.split("\t")[0].strip())
    if name == "/dev/null":
        return None
    return posixpath.normpath(name[2:] if name[:2] in ("a/", "b/") else name)


def _unquoted(name: str) -> str:
    """A name that git has written as a text of C, as it does where some sign is no ASCII."""
    if len(name) < 2 or not name[0] == name[-1] == '"':
        return name
    try:
        return name[1:-1].encode().decode("unicode_escape").encode("latin-1").decode()
    except ValueError as error:
        raise ToolError(
            f"the patch names a file {name[:200]}, which cannot be read: write it without quotes"
        ) from error


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
