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
    visible_calls = [check.call for check in task.visible]
    right_edit = (task.fix_line, task.fix_text)
    broken_lines = _function_lines(task.source, task.fix_line)
    rival_edits = [
        rival
        for rival in mutations(task.source)
        if rival.line in broken_lines and (rival.line, rival.text) != right_edit
    ]
    original_lines = task.source.split("\n")
    is_solved = False
    standing_line = 0  # line that an earlier attempt left changed
    played_turns: list[tuple[str, tuple[Message, ...]]] = []
    was_right: list[bool] = []
    for _ in range(turns):
        if is_solved:
            played_turns.append((call("submit"), ()))
            break
        is_right = rng.random() < skill or not rival_edits
        if is_right:
            edit_line, edit_text = right_edit
        else:
            rival_site = rng.choice(sorted({rival.site for rival in rival_edits}))
            wrong_edit = rng.choice([rival for rival in rival_edits if rival.site == rival_site])
            rival_edits.remove(wrong_edit)
            edit_line, edit_text = wrong_edit.line, wrong_edit.text
        was_right.append(is_right)
        undo_calls = (
            []
            if standing_line in (0, edit_line)
            else [call("replace_line", line=standing_line, text=original_lines[standing_line - 1])]
        )
        turn_text = "".join([*undo_calls, call("replace_line", line=edit_line, text=edit_text), call("run_tests")])
        edited_source = "\n".join([*original_lines[: edit_line - 1], edit_text, *original_lines[edit_line:]])
        call_values = evaluate(edited_source, visible_calls)
        tool_answers = [*[texts.REPLACED] * (len(undo_calls) + 1), texts.report(task.visible, call_values)]
        played_turns.append(
            (turn_text, tuple({"role": "tool", "content": tool_answer} for tool_answer in tool_answers))
        )
        standing_line = edit_line
        is_solved = texts.passed(task.visible, call_values) == len(visible_calls)
    call_values = evaluate(task.source, visible_calls)
    return Demonstration(texts.opening(task.source, task.visible, call_values), tuple(played_turns), tuple(was_right))


def _function_lines(source: str, line: int) -> range:
    """The lines of the function that `line` belongs to."""
    source_lines = source.split("\n")
    function_starts = [
        line_number for line_number, line_text in enumerate(source_lines, start=1) if line_text.startswith("def ")
    ]
    function_end = min(
        (line_number for line_number in function_starts if line_number > line), default=len(source_lines) + 1
    )
    return range(max(line_number for line_number in function_starts if line_number <= line), function_end)
