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
    line_blocks: list[list[str]] = [[]]
    other_sign = "-" if sign == "+" else "+"
    for diff_line in diff.splitlines():
        if diff_line.startswith(sign) and not diff_line.startswith(sign * 3):
            line_blocks[-1].append(diff_line[1:])
        elif not diff_line.startswith(other_sign) and line_blocks[-1]:
            line_blocks.append([])
    return [plain_lines for line_block in line_blocks if (plain_lines := _plain(line_block))]


def stands_in(text: str, blocks: Sequence[Sequence[str]], *, in_prompt: bool = False) -> bool:
    """Whether all blocks of lines stand in a text, each as one run; indentation, blank lines and comments aside."""
    characters = sum(len(block_line) for line_block in blocks for block_line in line_block)
    line_count = sum(len(line_block) for line_block in blocks)
    if characters < (_LEAST_IN_PROMPT if in_prompt else _LEAST) or (line_count < 2 and not in_prompt):
        return False
    plain_text = "\n".join(["", *_plain(text.splitlines()), ""])
    return all("\n".join(["", *line_block, ""]) in plain_text for line_block in blocks)


def diff_stands_in(text: str, diff: str) -> bool:
    """Whether the changes of a diff stand in a text as a diff has them, with their signs."""
    changed_runs: list[list[str]] = [[]]
    for text_line in diff.splitlines():
        if text_line[:1] in ("+", "-") and text_line[:3] not in ("+++", "---"):
            changed_runs[-1].append(text_line.rstrip())
        elif changed_runs[-1]:
            changed_runs.append([])
    stripped_text = "\n".join(["", *(text_line.rstrip() for text_line in text.splitlines()), ""])
    changed_runs = [changed_run for changed_run in changed_runs if changed_run]
    characters = sum(len(text_line) for changed_run in changed_runs for text_line in changed_run)
    return characters >= _LEAST_IN_DIFF and all(
        "\n".join(["", *changed_run, ""]) in stripped_text for changed_run in changed_runs
    )


def lines_of(text: str) -> list[list[str]]:
    """A whole file as one block."""
    plain_lines = _plain(text.splitlines())
    return [plain_lines] if plain_lines else []


def new_tests(diff: str) -> list[str]:
    """The names of the tests that a diff adds: not of those that it takes away elsewhere, as it moves or edits them."""
    removed_names = {test_match[1] for test_match in _TEST.finditer("\n".join(_swapped(diff)))}
    return sorted({test_match[1] for test_match in _TEST.finditer(diff)} - removed_names)


def names_stand_in(text: str, names: Sequence[str]) -> bool:
    """Whether all these names stand in a text as words; few short names may do so by chance and do not count."""
    if sum(map(len, names)) < _LEAST_NAMES:
        return False
    return all(re.search(rf"(?<!\w){re.escape(test_name)}(?!\w)", text) for test_name in names)


def _swapped(diff: str) -> Iterator[str]:
    for diff_line in diff.splitlines():
        yield diff_line.replace("-", "+", 1) if diff_line.startswith("-") and not diff_line.startswith("---") else ""


def _plain(lines: Sequence[str]) -> list[str]:
    return [text_line.strip() for text_line in lines if text_line.strip() and not _COMMENT.match(text_line)]
