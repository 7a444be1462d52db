"""Context compaction (`[rollout.compaction]`): a conversation that outgrows its context goes on from less of it.

After an answer of the environment that fills the context up to `at`, one of three things happens:

    summary     the policy writes notes, in a turn of its own that the environment never sees and that is trained
                like any other; the conversation goes on from its first messages with these notes
    drop_tools  it goes on from the same messages, of which tool answers but the newest lost their text
    yours       it goes on from the messages that `module:function` makes of those so far

Each is a fork of the episode: one outcome, one advantage for each token, no token sampled or rendered again. The
journal says where it happened (`Step.compaction`), so that an episode which is resumed does the same again. Owns the
messages behind it; never knows the environment, the engine or the journal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

from agentrl import registry
from agentrl.config.sections import CompactionSettings
from agentrl.env import spaces
from agentrl.env.sync_async import call
from agentrl.errors import EnvError, UsageError
from agentrl.records import Message, Messages, Step, Turn

REQUESTED: Final = "asked"
"""`Step.compaction` of an answer behind which the policy writes its notes."""
SUMMARY: Final = "summary"
"""That of the turn that wrote them."""
SHORTENED: Final = "shortened"
"""That of an answer behind which the conversation was made shorter without the policy."""
NO_SHORTER: Final = "no_shorter"
"""That of an answer behind which that was tried, and the conversation would not have become shorter."""

_NOTES: Final = "Your notes on what has happened so far:"
_LEFT_OUT: Final = "(left out)"
_AROUND: Final = 64  # tokens that a template may write around a message
_MESSAGES: Final = spaces.Messages(sys.maxsize, sys.maxsize, max_images=spaces.MOST_IMAGES)


def shortener(settings: CompactionSettings) -> Callable[[list[Message]], Any]:
    """The function of a run file that makes a conversation shorter without the policy. Raises UsageError if it cannot
    be imported or called."""
    if settings.how == "drop_tools":
        return partial(drop_tools, keep=1)
    shorten_messages: Any = registry.load_reference(settings.how)
    if not callable(shorten_messages):
        raise UsageError(f"rollout.compaction.how = {settings.how!r}: it is no function of (messages) -> messages")
    return shorten_messages


def writes_notes(turns: Sequence[Turn], index: int) -> bool:
    """Whether the turn at `index` is the policy's notes, which the answer before it requested."""
    previous_answer = turns[index - 1].step if index else None
    return previous_answer is not None and previous_answer.compaction == REQUESTED


def acts(turns: Sequence[Turn]) -> int:
    """How many turns acted in the environment."""
    return sum(not writes_notes(turns, turn.index) for turn in turns)


def ask(step: Step, request: str) -> Step:
    """An answer with the request for notes behind it: a message of the user's, or the end of the one that is there."""
    return replace(step, observation=_with_text(step.observation, request, end=True), compaction=REQUESTED)


def noted(start: Messages, before: Step, notes: str) -> Step:
    """The answer to a turn of notes: the conversation goes on from its first messages with them. What the environment
    has `before` still holds."""
    noted_messages = _with_text(start, f"{_NOTES}\n{notes.strip()}", end=False)
    return Step(observation=(), history=noted_messages, unsettled=before.unsettled, compaction=SUMMARY)


def conversation(start: Messages, turns: Sequence[Turn], step: Step) -> list[Message]:
    """The messages so far, with those of `step`, the answer to the last turn."""
    messages_so_far = list(start)
    for turn in turns:
        answer = step if turn is turns[-1] else turn.step
        messages_so_far.append(Message(role="assistant", content=turn.text))
        if answer is not None:
            messages_so_far = (
                [*messages_so_far, *answer.observation] if answer.history is None else list(answer.history)
            )
    return messages_so_far


def as_before(step: Step, before: Step) -> Step:
    """A repeated answer, with the compaction behind it that there was `before`: the shorter conversation, or the
    request for notes."""
    if before.compaction == SHORTENED and step.history is None:
        return replace(step, history=before.history)
    if before.compaction != REQUESTED or not before.observation:
        return step
    *earlier_messages, last_message = before.observation
    if len(earlier_messages) < len(step.observation):  # the request is the end of the last message
        earlier_messages.append(
            {**last_message, "content": last_message["content"][: len(step.observation[-1]["content"])]}
        )
    return replace(step, observation=before.observation) if tuple(earlier_messages) == step.observation else step


def most_tokens(messages: Messages) -> int:
    """At least as many as the messages have tokens: a token stands for a byte or more, and an image for any number."""
    if any("images" in message for message in messages):
        return sys.maxsize
    # A bound that costs nothing: no tokenizer that works on bytes makes more tokens than there are bytes. To count
    # exactly is to render every answer of a long episode once more.
    return sum(len(message["content"].encode(errors="replace")) + _AROUND for message in messages)


async def shortened(settings: CompactionSettings, messages: list[Message], where: str) -> Messages:
    """The messages that the function of a run file, plain or async, makes of these. Raises EnvError, naming `where`,
    for anything else than messages."""
    short_messages: Any = await call(shortener(settings), messages)
    if isinstance(short_messages, list):
        short_messages = tuple(cast("list[Any]", short_messages))
    if why_refused := _MESSAGES.why_not(short_messages):
        raise EnvError(f"{where} returned no messages: {why_refused}")
    return cast(Messages, short_messages)


def drop_tools(messages: list[Message], *, keep: int) -> list[Message]:
    """The messages, of which tool answers but the last `keep` say only that they are left out."""
    tool_positions = [position for position, message in enumerate(messages) if message["role"] == "tool"]
    dropped_positions = set(tool_positions[: len(tool_positions) - keep] if keep else tool_positions)
    return [
        {**message, "content": _LEFT_OUT} if position in dropped_positions else message
        for position, message in enumerate(messages)
    ]


def _with_text(messages: Messages, text: str, *, end: bool) -> Messages:
    """Messages with a text of the user's: in the last message of the user's (with `end`, only if it is the last of
    all), else behind all. Many templates take no two messages of a user's in a row."""
    user_positions = [position for position, message in enumerate(messages) if message["role"] == "user"]
    if not user_positions or (end and user_positions[-1] != len(messages) - 1):
        return (*messages, Message(role="user", content=text))
    position = user_positions[-1]
    joined_message: Message = {**messages[position], "content": f"{messages[position]['content']}\n\n{text}"}
    return (*messages[:position], joined_message, *messages[position + 1 :])
