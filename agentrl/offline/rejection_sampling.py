"""The best episodes of a run as demonstrations: rejection sampling, for `agentrl sft`.

The choice needs one line for each episode; then one episode after the other is read and written. The same store and
the same choice give the same file. Owns the choice and the lines; `agentrl.offline.demonstrations` reads them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import UsageError
from agentrl.records import POLICY, Trajectory
from agentrl.rewards.transcripts import messages_of
from agentrl.store import TRAIN, EpisodeRow
from agentrl.store.codec import pack_identity
from agentrl.store.interfaces import ReadStore

Format = Literal["messages", "tokens"]
_PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Of the scored training episodes of a task, the first `best_of` (None: all) compete; those with an outcome of at
    least `min_outcome` stay, the best `per_task` of them, of two as good the earlier. With `best_of` alone, one."""

    best_of: int | None = None
    min_outcome: float | None = None
    per_task: int | None = None

    def of(self, store: ReadStore) -> list[int]:
        """Ids of the chosen episodes, in order."""
        by_task: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for row in _rows(store):
            if row.stop_reason is not None and row.stop_reason.by_policy and row.outcome is not None:
                by_task[pack_identity(row.task)].append((-row.outcome, row.id))
        at_most = self.per_task or (1 if self.best_of is not None else None)
        chosen: list[int] = []
        for scored in by_task.values():
            kept = [one for one in scored[: self.best_of] if self.min_outcome is None or -one[0] >= self.min_outcome]
            chosen += [id for _, id in sorted(kept)[:at_most]]
        return sorted(chosen)


@dataclass(slots=True)
class Selected:
    """How many episodes are in the file, and how many were left out: their tokens are gone, or they are no single
    conversation."""

    written: int = 0
    dropped: int = 0
    rewritten: int = 0


def select(store: ReadStore, choice: Choice, form: Format, out: Path) -> Selected:
    """Write the chosen episodes to a new file. Raises UsageError if it cannot be written."""
    told = Selected()
    try:
        with out.open("w", encoding="utf-8") as file:
            for id in choice.of(store):
                trajectory = store.trajectory(id)
                line = _messages(trajectory, told) if form == "messages" else _tokens(trajectory, told)
                if line is not None:
                    file.write(json.dumps({**line, **_said(trajectory)}) + "\n")
                    told.written += 1
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from error
    return told


def _rows(store: ReadStore) -> Iterator[EpisodeRow]:
    after = 0
    while page := store.episodes(TRAIN, after=after, limit=_PAGE):
        yield from page
        after = page[-1].id


def _messages(trajectory: Trajectory, told: Selected) -> dict[str, Any] | None:
    """A conversation in its order. One with several roles, or whose history was rewritten, is none."""
    turns = trajectory.turns
    if any(turn.role != POLICY or turn.parent != (turn.index - 1 if turn.index else None) for turn in turns):
        told.rewritten += 1
        return None
    messages = messages_of(trajectory)
    last = max((at for at, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    return {"messages": list(messages[: last + 1])}


def _tokens(trajectory: Trajectory, told: Selected) -> dict[str, Any] | None:
    """The tokens as they were sampled; masked turns, and those of policies that do not learn, are context."""
    if any(not turn.token_ids and turn.text for turn in trajectory.turns):
        told.dropped += 1
        return None
    return {
        "turns": [
            {
                "parent": turn.parent,
                "prompt_ids": list(turn.prompt_ids),
                "token_ids": list(turn.token_ids),
                "learns": turn.learns and not (turn.step is not None and turn.step.masked),
            }
            for turn in trajectory.turns
        ]
    }


def _said(trajectory: Trajectory) -> dict[str, Any]:
    task = trajectory.task
    return {"episode": trajectory.episode_id, "env": task.env, "seed": task.seed, "outcome": trajectory.outcome}
