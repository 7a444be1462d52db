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
    file_patches: list[FilePatch] = []
    patch_lines = text.removesuffix("\n").split("\n")
    index = 0
    while index < len(patch_lines):
        patch_line = patch_lines[index]
        if patch_line.startswith("diff --git "):
            index = _parse_git(patch_lines, index, file_patches)
        elif _names_files(patch_lines, index):
            file_patches.append(FilePatch(_name(patch_line[4:]), _name(patch_lines[index + 1][4:])))
            index += 2
        elif patch_line.startswith("@@"):
            index = _parse_hunk(patch_lines, index, file_patches)
        elif patch_line.startswith(_BINARY):
            raise ToolError(
                f"line {index + 1} of the patch is of a binary file, which a patch cannot change: {patch_line[:200]}"
            )
        else:
            index += 1  # prose
    if not file_patches:
        raise ToolError("no hunk found: a patch has lines like '--- a/file', '+++ b/file' and '@@ -1,2 +1,2 @@'")
    for file_patch in file_patches:
        if file_patch.old is None and file_patch.new is None:
            raise ToolError("a part of the patch names /dev/null twice")
        if not file_patch.hunks and file_patch.old == file_patch.new and file_patch.executable is None:
            raise ToolError(f"no hunk found for {file_patch.new}: write lines like '@@ -1,2 +1,2 @@'")
    return file_patches


def _names_files(lines: list[str], at: int) -> bool:
    return lines[at].startswith("--- ") and at + 1 < len(lines) and lines[at + 1].startswith("+++ ")


def _parse_git(lines: list[str], at: int, patches: list[FilePatch]) -> int:
    """A header of git: what it says beside the names in `---` and `+++`, which may be missing."""
    line_index, headers = at, dict[str, str]()
    while (line_index := line_index + 1) < len(lines) and (header_match := _GIT.match(lines[line_index])) is not None:
        headers[header_match[1]] = header_match[2].strip()
    if line_index < len(lines) and _names_files(lines, line_index):
        file_patch = FilePatch(_name(lines[line_index][4:]), _name(lines[line_index + 1][4:]))
        line_index += 2
    elif line_index < len(lines) and lines[line_index].startswith(_BINARY):
        raise ToolError(
            f"line {line_index + 1} of the patch is of a binary file, which it cannot change: {lines[at][11:200]}"
        )
    elif not headers and not (line_index < len(lines) and lines[line_index].startswith("@@")):
        return line_index
    else:
        same_name = _same_name(lines[at][11:].rstrip("\r"))
        file_patch = FilePatch(
            None
            if "new file mode" in headers
            else _unquoted(headers.get("rename from", headers.get("copy from", same_name))),
            None
            if "deleted file mode" in headers
            else _unquoted(headers.get("rename to", headers.get("copy to", same_name))),
        )
        if "" in (file_patch.old, file_patch.new):
            raise ToolError(f"line {at + 1} of the patch names no file: write --- and +++ lines below it")
    file_patch.copies = "copy to" in headers
    file_mode = headers.get("new mode", headers.get("new file mode"))
    if file_mode is not None and not file_mode.startswith("100"):
        raise ToolError(
            f"line {at + 1} of the patch makes a file of mode {file_mode[:10]}: only 100644 and 100755 are known"
        )
    file_patch.executable = None if file_mode is None else file_mode == "100755"
    patches.append(file_patch)
    return line_index


def _same_name(names: str) -> str:
    """The name of a header without renaming, `a/NAME b/NAME`; empty where the two differ."""
    half_length = len(names) // 2
    old_name, new_name = names[:half_length], names[half_length + 1 :]
    old_name, new_name = (
        (_name(old_name) or "", _name(new_name) or "") if names[half_length : half_length + 1] == " " else ("", "")
    )
    return old_name if old_name == new_name else ""


def ends_mail(lines: Sequence[str], at: int) -> bool:
    """Whether the signature of `git format-patch` stands at a line: two dashes, and git's version below. No hunk goes
    on with a line that starts with a digit, so nothing else can be meant."""
    return lines[at].rstrip() == "--" and at + 1 < len(lines) and _VERSION.fullmatch(lines[at + 1]) is not None


def _parse_hunk(lines: list[str], at: int, patches: list[FilePatch]) -> int:
    hunk_match = _HUNK.match(lines[at])
    if hunk_match is None:
        correction = "write the lines' numbers, as in '@@ -12,3 +12,4 @@' (nearly right is enough)"
        raise ToolError(f"line {at + 1} of the patch is no header of a hunk: {lines[at][:80]!r}; {correction}")
    if not patches:
        raise ToolError(f"line {at + 1} of the patch is a hunk of no file: write --- and +++ lines before it")
    if len(hunk_match[1]) > _DIGITS:
        raise ToolError(f"line {at + 1} of the patch names a line with a number of {len(hunk_match[1])} digits")
    hunk, last_sign = Hunk(int(hunk_match[1])), ""
    patches[-1].hunks.append(hunk)
    line_index = at
    while (line_index := line_index + 1) < len(lines):
        hunk_line = lines[line_index]
        if hunk_line.startswith(("@@", "diff --git ", *_BINARY)) or _names_files(lines, line_index):
            break
        if ends_mail(lines, line_index):
            return line_index + 2
        sign, line_text = hunk_line[:1] or " ", hunk_line[1:]
        if sign == "\\":
            hunk.ends_open = hunk.ends_open or last_sign != "-"
        elif sign in " +-":
            if sign != "+":
                hunk.old.append(line_text)
            if sign != "-":
                hunk.new.append(line_text)
        else:
            raise ToolError(f"line {line_index + 1} of the patch starts with {sign!r}: expected ' ', '+' or '-'")
        last_sign = sign
    return line_index


def _name(field_: str) -> str | None:
    file_name = _unquoted(field_.split("\t")[0].strip())
    if file_name == "/dev/null":
        return None
    return posixpath.normpath(file_name[2:] if file_name[:2] in ("a/", "b/") else file_name)


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
    is_ended = text.endswith("\n") or not text
    text_lines = text.split("\n")
    if is_ended:
        text_lines.pop()
    new_lines: list[str] = []
    line_index = 0  # lines before it are in `new_lines`, as the hunks so far left them
    for hunk_number, next_hunk in enumerate(hunks, 1):
        old_lines = next_hunk.old
        hunk_index = _find(text_lines, old_lines, next_hunk.at - 1 if old_lines else next_hunk.at, line_index, effort)
        if hunk_index is None:
            first_line = old_lines[0] if old_lines else ""
            raise ToolError(
                f"hunk {hunk_number} does not fit {name}: its lines (first {first_line!r}) do not stand there"
            )
        new_lines += text_lines[line_index:hunk_index]
        new_lines += next_hunk.new
        line_index = hunk_index + len(old_lines)
        if next_hunk.ends_open and line_index == len(text_lines):
            is_ended = False
        elif line_index == len(text_lines) and next_hunk.new:
            is_ended = True
    new_lines += text_lines[line_index:]
    return "\n".join(new_lines) + ("\n" if is_ended and new_lines else "")


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
    border_lengths = [0] * len(old)  # how much of `old` stands again at the end of its first lines
    matched = 0
    for line_index in range(1, len(old)):
        while matched and old[line_index] != old[matched]:
            matched = border_lengths[matched - 1]
        matched += old[line_index] == old[matched]
        border_lengths[line_index] = matched
    matched = 0
    for line_index in range(floor, len(lines)):
        while matched and (matched == len(old) or lines[line_index] != old[matched]):
            matched = border_lengths[matched - 1]
        matched += lines[line_index] == old[matched]
        if matched == len(old):
            yield line_index + 1 - matched
