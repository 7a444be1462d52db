"""Demonstrations of a noisy expert: it knows the right edit but makes a random one most of the time.

Owns: what the expert does, turn by turn, with true feedback. The expert's knowledge comes from the task, which the
policy never sees. Knows nothing of tokens or models.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass

from agentrl.records import Message
from agentrl_environments.code_repair import texts
from agentrl_environments.code_repair.mutation import mutations
from agentrl_environments.code_repair.tasks import RepairTask, evaluate


@dataclass(frozen=True, slots=True)
class Demonstration:
    """An episode: opening messages, then pairs of what the expert wrote and the tool messages it got back (the last
    answer may be empty). `right` says per edit whether it was the right one."""

    opening: tuple[Message, ...]
    turns: tuple[tuple[str, tuple[Message, ...]], ...]
    right: tuple[bool, ...]


def call(name: str, **arguments: str | int) -> str:
    """One tool call as text."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def demonstrate(task: RepairTask, rng: random.Random, *, skill: float, turns: int = 2) -> Demonstration:
    """Play one episode of at most `turns` turns. Each attempt is the right edit with probability `skill`, else any
    other mutation of the function that fails, all nodes alike and untried; an earlier edit of another line is undone
    in the same message. Once the visible tests pass it submits."""
    calls = [check.call for check in task.visible]
    right_edit = (task.fix_line, task.fix_text)
    broken = _function_lines(task.source, task.fix_line)
    rivals = [m for m in mutations(task.source) if m.line in broken and (m.line, m.text) != right_edit]
    original = task.source.split("\n")
    solved = False
    standing = 0  # line that an earlier attempt left changed
    played: list[tuple[str, tuple[Message, ...]]] = []
    was_right: list[bool] = []
    for _ in range(turns):
        if solved:
            played.append((call("submit"), ()))
            break
        right = rng.random() < skill or not rivals
        if right:
            line, text = right_edit
        else:
            site = rng.choice(sorted({m.site for m in rivals}))
            wrong = rng.choice([m for m in rivals if m.site == site])
            rivals.remove(wrong)
            line, text = wrong.line, wrong.text
        was_right.append(right)
        undo = [] if standing in (0, line) else [call("replace_line", line=standing, text=original[standing - 1])]
        says = "".join([*undo, call("replace_line", line=line, text=text), call("run_tests")])
        source = "\n".join([*original[: line - 1], text, *original[line:]])
        values = evaluate(source, calls)
        answers = [*[texts.REPLACED] * (len(undo) + 1), texts.report(task.visible, values)]
        played.append((says, tuple({"role": "tool", "content": answer} for answer in answers)))
        standing = line
        solved = texts.passed(task.visible, values) == len(calls)
    values = evaluate(task.source, calls)
    return Demonstration(texts.opening(task.source, task.visible, values), tuple(played), tuple(was_right))


def _function_lines(source: str, line: int) -> range:
    """The lines of the function that `line` belongs to."""
    lines = source.split("\n")
    starts = [at for at, text in enumerate(lines, start=1) if text.startswith("def ")]
    end = min((at for at in starts if at > line), default=len(lines) + 1)
    return range(max(at for at in starts if at <= line), end)
