"""Whether a secret of a task (its solution, its hidden tests) stands in a text that the agent can read.

A single line that occurs twice is common in honest code, so a secret counts as read only if all of it stands there:
its lines, one after the other, or a diff of it with its signs. Knows neither boxes nor formats of tasks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

_LEAST: Final = 48  # characters of a secret in plain lines; less may stand anywhere by chance
_LEAST_IN_PROMPT: Final = 24  # people rarely write code into a prompt
_LEAST_IN_DIFF: Final = 16  # a removed and an added line together are hardly chance
_LEAST_NAMES: Final = 20  # characters of all names of hidden tests together
_COMMENT: Final = re.compile(r"\s*(#|//)")
_TEST: Final = re.compile(r"^\+\s*(?:async )?(?:def|fn|func|function) (test\w*|Test\w*)", re.MULTILINE)


def blocks_of(diff: str, sign: str = "+") -> list[list[str]]:
    """The runs of lines that a diff adds (or, with the sign `-`, removes)."""
    blocks: list[list[str]] = [[]]
    other = "-" if sign == "+" else "+"
    for line in diff.splitlines():
        if line.startswith(sign) and not line.startswith(sign * 3):
            blocks[-1].append(line[1:])
        elif not line.startswith(other) and blocks[-1]:
            blocks.append([])
    return [lines for block in blocks if (lines := _plain(block))]


def stands_in(text: str, blocks: Sequence[Sequence[str]], *, in_prompt: bool = False) -> bool:
    """Whether all blocks of lines stand in a text, each as one run; indentation, blank lines and comments aside."""
    characters = sum(len(line) for block in blocks for line in block)
    lines = sum(len(block) for block in blocks)
    if characters < (_LEAST_IN_PROMPT if in_prompt else _LEAST) or (lines < 2 and not in_prompt):
        return False
    where = "\n".join(["", *_plain(text.splitlines()), ""])
    return all("\n".join(["", *block, ""]) in where for block in blocks)


def diff_stands_in(text: str, diff: str) -> bool:
    """Whether the changes of a diff stand in a text as a diff has them, with their signs."""
    runs: list[list[str]] = [[]]
    for line in diff.splitlines():
        if line[:1] in ("+", "-") and line[:3] not in ("+++", "---"):
            runs[-1].append(line.rstrip())
        elif runs[-1]:
            runs.append([])
    where = "\n".join(["", *(line.rstrip() for line in text.splitlines()), ""])
    runs = [run for run in runs if run]
    return sum(map(len, (line for run in runs for line in run))) >= _LEAST_IN_DIFF and all(
        "\n".join(["", *run, ""]) in where for run in runs
    )


def lines_of(text: str) -> list[list[str]]:
    """A whole file as one block."""
    lines = _plain(text.splitlines())
    return [lines] if lines else []


def new_tests(diff: str) -> list[str]:
    """The names of the tests that a diff adds: not of those that it takes away elsewhere, as it moves or edits them."""
    removed = {match[1] for match in _TEST.finditer("\n".join(_swapped(diff)))}
    return sorted({match[1] for match in _TEST.finditer(diff)} - removed)


def names_stand_in(text: str, names: Sequence[str]) -> bool:
    """Whether all these names stand in a text as words; few short names may do so by chance and do not count."""
    if sum(map(len, names)) < _LEAST_NAMES:
        return False
    return all(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in names)


def _swapped(diff: str) -> Iterator[str]:
    for line in diff.splitlines():
        yield line.replace("-", "+", 1) if line.startswith("-") and not line.startswith("---") else ""


def _plain(lines: Sequence[str]) -> list[str]:
    return [line.strip() for line in lines if line.strip() and not _COMMENT.match(line)]
