"""The script of the engine, the tool and the grader in one case. Standard library only.

A group of members plays one task. What a member samples names it: g0m2t1a is group 0, member 2, turn 1, first
attempt. All but the last turn call the tool, which answers with a text; the grader looks the member's reward up by its
name. So engine, tool and grader keep no state that a trainer could lose, and whatever enters a loss names its origin.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

NAME = re.compile(r"g(\d+)m(\d+)t(\d+)([a-z])")
TOOL = "look"
SLOW_S = 4.0

FaultKind = Literal["dies", "stalls", "slow", "cuts"]
Grade = float | Literal["nan", "fails"]


@dataclass(frozen=True, slots=True)
class Member:
    """`turns` sampled turns, of which the last is the answer; `grade` is its reward, or what the grader does."""

    turns: int
    grade: Grade


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure of the engine in turn `turn` of `member` of each group, after `after` tokens. The first time only:
    `dies` (closes the connection), `slow` (sends nothing for `SLOW_S`, then all), `cuts` (ends at a token limit).
    Each time: `stalls` (sends nothing more until the case ends)."""

    kind: FaultKind
    member: int
    turn: int
    after: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`members` of each of `groups` groups. The tool answers with `tool_text`. `writes_tool` is False for a chat
    template that leaves out messages of the tool.

    With `client_patience_s` an agent program plays the task, over HTTP: its client gives a request up after so long,
    and sends it again. With `weights_stuck` the engine takes every update after the first and goes on with the weights
    that it had; no token older than `max_lag` steps may be trained. With a `delivery` the trainer sends its weights
    after each step, and the engine takes them (`whole`), or answers that it did and keeps its own (`lost`); it computes
    the log-probs of a prompt with those that it has.

    The trainer saves a checkpoint each `checkpoint_every` steps (0: none). At the end of step `kill_at_step` it is
    killed, and started again."""

    members: tuple[Member, ...]
    faults: tuple[Fault, ...] = ()
    groups: int = 1
    tool_text: str = "nothing here"
    writes_tool: bool = True
    max_lag: int = 4
    client_patience_s: float | None = None
    weights_stuck: bool = False
    delivery: Literal["none", "whole", "lost"] = "none"
    checkpoint_every: int = 0
    kill_at_step: int | None = None

    def text(self, group: int, member: int, turn: int, attempt: int) -> str:
        """The text that the engine samples in a turn, without the token that ends it."""
        turn_name = f"g{group}m{member}t{turn}{chr(ord('a') + attempt)}"
        if turn + 1 >= self.members[member].turns:
            return f"{turn_name} and so the answer is no"
        return f'{turn_name}\n<tool_call>\n{{"name": "{TOOL}", "arguments": {{"key": "{turn_name}"}}}}\n</tool_call>'

    def is_last(self, text: str) -> bool:
        """Whether this sampled text is the last turn of its member. A text that names none ends its episode."""
        name_match = NAME.search(text)
        return name_match is None or int(name_match[3]) + 1 >= self.members[int(name_match[2])].turns

    def document(self) -> dict[str, Any]:
        """All of it as JSON."""
        return asdict(self)

    @classmethod
    def read(cls, document: dict[str, Any]) -> Scenario:
        """The scenario that `document` wrote."""
        scenario_fields: dict[str, Any] = {
            **document,
            "members": tuple(Member(**member_fields) for member_fields in document["members"]),
            "faults": tuple(Fault(**fault_fields) for fault_fields in document["faults"]),
        }
        return cls(**scenario_fields)


def task_text(group: int) -> str:
    """The user's message of a group's task."""
    return f"task g{group}: look, then answer"


def group_of(text: str) -> int | None:
    """The group whose task stands in a prompt."""
    task_match = re.search(r"task g(\d+): look", text)
    return None if task_match is None else int(task_match[1])
