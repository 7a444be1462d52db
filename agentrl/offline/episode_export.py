"""The best episodes of a run as demonstrations, for `agentrl sft`.

They are chosen by rejection sampling: the choice needs one line for each episode, then one episode after the other is
read and written. The same store and the same choice give the same file.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from agentrl.errors import UsageError
from agentrl.offline.conversations import conversation, has_broken_call
from agentrl.records import POLICY, Message, Trajectory, Turn
from agentrl.store import TEXT, TRAIN, EpisodeRow
from agentrl.store.codec import pack_identity
from agentrl.store.reads import Readers

Format = Literal["messages", "tokens"]
_PAGE = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Choice among the scored episodes of each task: those of training, and conversations that were recorded as text.
    The first `best_of` (None: all) compete; those with an outcome of at least `min_outcome` stay, the best `per_task`
    of them, of two as good the earlier. With `best_of` alone, one."""

    best_of: int | None = None
    min_outcome: float | None = None
    per_task: int | None = None

    def of(self, reads: Readers) -> list[int]:
        """Ids of the chosen episodes, in order."""
        members_by_task: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for episode_row in _rows(reads):
            # An episode that a failing sandbox ended, or that no reward source scored, shows nothing of the policy.
            if (
                episode_row.stop_reason is not None
                and episode_row.stop_reason.by_policy
                and episode_row.outcome is not None
            ):
                members_by_task[pack_identity(episode_row.task)].append((-episode_row.outcome, episode_row.id))
        task_limit = self.per_task or (1 if self.best_of is not None else None)
        chosen_ids: list[int] = []
        # Ids are numbers in the order of creation, so the first `best_of` are the first attempts: the choice does not
        # depend on how many more a later step added. Sorting by the negated outcome, then the id, breaks ties the
        # same way in every run of this command.
        for scored_members in members_by_task.values():
            good_enough = [
                member
                for member in scored_members[: self.best_of]
                if self.min_outcome is None or -member[0] >= self.min_outcome
            ]
            chosen_ids += [episode_id for _, episode_id in sorted(good_enough)[:task_limit]]
        return sorted(chosen_ids)


@dataclass(slots=True)
class Selected:
    """How many episodes are in the file, and how many were left out: their tokens are gone, nobody ever knew them
    (`texts`), they are no single conversation, or no turn of theirs is to be learned (`untaught`). Of the turns in the
    file, `branches` begin a branch, by its kind, `broken_calls` hold a call that is not well-formed, and stand as text;
    `cut` ended by their length, and stand as context."""

    written: int = 0
    texts: int = 0
    dropped: int = 0
    rewritten: int = 0
    untaught: int = 0
    broken_calls: int = 0
    cut: int = 0
    branches: Counter[str] = field(default_factory=Counter[str])


def select(reads: Readers, choice: Choice, form: Format, out: Path, *, splits_thoughts: bool = False) -> Selected:
    """Write the chosen episodes to a new file. With `splits_thoughts`, for models whose template writes thoughts, a
    turn's reasoning is `reasoning_content` in messages. Raises UsageError if the file cannot be written."""
    selected = Selected()
    try:
        # One episode at a time: the choice needs a number and an outcome for each, and only what is written needs its
        # tokens in memory, for a moment.
        with out.open("w", encoding="utf-8") as export_file:
            text_episodes = {episode_row.id for episode_row in _rows(reads, (TEXT,))}
            for episode_id in choice.of(reads):
                if episode_id in text_episodes and form == "tokens":
                    selected.texts += 1
                    continue
                trajectory = reads.trajectory(episode_id)
                if form == "messages":
                    export_line = _message_line(trajectory, selected, splits_thoughts=splits_thoughts)
                else:
                    export_line = _token_line(trajectory, selected)
                if export_line is not None:
                    text_mark = {"text_only": True} if episode_id in text_episodes else {}
                    export_file.write(json.dumps({**export_line, **_origin(trajectory), **text_mark}) + "\n")
                    selected.written += 1
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from error
    return selected


def _rows(reads: Readers, purposes: Sequence[str] = (TRAIN, TEXT)) -> Iterator[EpisodeRow]:
    for purpose in purposes:
        after_id = 0
        while episode_page := reads.episodes(purpose, after=after_id, limit=_PAGE):
            yield from episode_page
            after_id = episode_page[-1].id


def _message_line(trajectory: Trajectory, selected: Selected, *, splits_thoughts: bool) -> dict[str, Any] | None:
    """A conversation in its order, with the tools that it offered and its calls as calls: only so does another model's
    template, or the same one, write the prompt that was played. One with several roles, or whose history was rewritten,
    is no conversation, nor one in which the policy went on with words of the prompt, or with a text without messages.

    Not every message of the assistant is the policy's to learn: those of the prompt and masked turns have weight 0, and
    so has a turn that its length cut, which a demonstration would teach to end there."""
    played_turns, start_messages = trajectory.turns, trajectory.start
    # A prompt that ends with the assistant's words has the policy finish a message. In messages it would become two,
    # or one of which an unknown part is to be learned.
    is_begun = (
        bool(start_messages) and start_messages[-1]["role"] == "assistant" and not start_messages[-1].get("tool_calls")
    )
    # A raw prompt has its client's own template in it, which a model's template would write around once more.
    is_raw = any(message.get("raw") for message in start_messages)
    if (
        is_begun
        or is_raw
        or any(
            played_turn.role != POLICY or played_turn.parent != (played_turn.index - 1 if played_turn.index else None)
            for played_turn in played_turns
        )
    ):
        selected.rewritten += 1
        return None
    # A turn that its length cut has no end of its own. As a message it would get one from the template, and the model
    # would learn to stop in the middle of a sentence. It stays as context: later turns were sampled behind it.
    # `tests/run/test_sft.py::test_turns_that_are_not_to_be_learned_are_context_in_an_export`.
    is_learned = [
        played_turn.learns and not _is_masked(played_turn) and played_turn.finish != "length"
        for played_turn in played_turns
    ]
    if not any(is_learned):
        selected.untaught += 1
        return None
    selected.cut += sum(played_turn.finish == "length" for played_turn in played_turns)
    messages = list(conversation(trajectory, splits_thoughts=splits_thoughts))
    spoken_positions = [position for position, message in enumerate(messages) if message["role"] == "assistant"]
    # The assistant's messages in the prompt come first, and nobody knows whether they are good: they are examples
    # that the environment chose, not what earned the outcome.
    for position, learns in zip(
        spoken_positions, [*[False] * (len(spoken_positions) - len(played_turns)), *is_learned], strict=True
    ):
        if not learns:
            messages[position] = cast("Message", {**messages[position], "weight": 0})
    # What the environment answered to the last turn is not context of anything that is trained.
    last_spoken = max(
        (position for position, message in enumerate(messages) if message["role"] == "assistant"), default=-1
    )
    selected.broken_calls += sum(has_broken_call(played_turn.text, trajectory.tools) for played_turn in played_turns)
    tool_field = {"tools": list(trajectory.tools.schemas)} if trajectory.tools.schemas else {}
    return {"messages": list(messages[: last_spoken + 1]), **tool_field}


def _is_masked(turn: Turn) -> bool:
    return turn.step is not None and turn.step.masked


def _token_line(trajectory: Trajectory, selected: Selected) -> dict[str, Any] | None:
    """The tokens as they were sampled; masked turns, and those of policies that do not learn, are context."""
    # Text without tokens: retention has dropped them. They are not made again from the text, since a tokenizer's
    # answer for a text need not be the tokens that were sampled (law 1).
    if any(not played_turn.token_ids and played_turn.text for played_turn in trajectory.turns):
        selected.dropped += 1
        return None
    return {
        "turns": [
            {
                "parent": played_turn.parent,
                "prompt_ids": list(played_turn.prompt_ids),
                "token_ids": list(played_turn.token_ids),
                "learns": played_turn.learns and not _is_masked(played_turn),
                **_branch(trajectory, played_turn.index, selected),
            }
            for played_turn in trajectory.turns
        ]
    }


def _branch(trajectory: Trajectory, index: int, selected: Selected) -> dict[str, Any]:
    """Where a branch comes from that begins with a turn, as its environment reported it."""
    previous_step = trajectory.turns[index - 1].step if index else None
    edge = None if previous_step is None else previous_step.info.get("branch")
    if not isinstance(edge, dict):
        return {}
    selected.branches[str(cast("dict[str, Any]", edge).get("kind"))] += 1
    return {"branch": edge}


def _origin(trajectory: Trajectory) -> dict[str, Any]:
    played_task = trajectory.task
    return {
        "episode": trajectory.episode_id,
        "env": played_task.env,
        "seed": played_task.seed,
        "outcome": trajectory.outcome,
    }
