"""Which earlier answer of an episode a request goes on from, and how a new branch came about.

A program may hold several conversations at once: a sub-agent works between two requests of the main one, or a long
conversation goes on from a summary. A request that goes on from any earlier answer keeps the tokens up to there (law
1). Any other begins a branch, and the edge to where it comes from is written beside the answer. All branches are of one
episode and have its one outcome. Never knows tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, cast

from agentrl.env.agent_programs import transcripts
from agentrl.env.agent_programs.model_apis import Conversation, Reply
from agentrl.env.core import Info
from agentrl.records import Json, Message, Messages

TOOL_CALL: Final = "tool call"
"""A branch whose first request has an argument of an earlier call in it: a sub-agent's."""
COMPACTION: Final = "compaction"
"""A branch that goes on from less of an earlier conversation: a part of it, or a summary that the policy wrote."""
REWRITTEN: Final = "rewritten"
"""A branch with an earlier answer in it and other words in front of that."""
NEW: Final = "new"
"""A branch that has nothing of the earlier ones."""

AGAIN: Final = "again"
"""A branch whose first request was answered before."""

_LEAST: Final = 24  # characters of an argument, or of a line of a summary, that no two texts share by chance
_MOST_LINES: Final = 64  # of one answer that are looked for
_MOST_TEXT: Final = 1 << 18  # characters of a prompt in which they are looked for
_MOST_ENDS: Final = 16  # conversations that a branch may come from


class Branches:
    """The requests of one episode that were answered, by turn."""

    def __init__(self) -> None:
        self._replies: list[Reply] = []
        self._requests: dict[bytes, int] = {}  # turns by the place of their request, the newest
        self._places: dict[bytes, int] = {}  # and by the place behind their answer
        # Conversations that nothing went on from yet. A client sends the whole conversation with each request, so to
        # keep all of them would be the square of its length.
        self._ends: dict[int, Conversation] = {}
        self._followed: int | None = None

    @classmethod
    def of(cls, turns: Iterable[tuple[Conversation, Reply]]) -> Branches:
        """Collect the branches of an episode that was played so far."""
        branches = cls()
        for conversation, reply in turns:
            if branches._replies:
                # Not only `add`: it has to know which conversation a turn went on from, or all turns would be open
                # conversations, and the newest of them push out the older ones that a branch may come from.
                branches.following(conversation)
            branches.add(conversation, reply)
        return branches

    def add(self, conversation: Conversation, reply: Reply) -> None:
        """Note the answer of the next turn."""
        turn = len(self._replies)
        self._requests[transcripts.places(conversation)[-1]] = turn
        self._places[transcripts.answered(conversation, reply)] = turn
        self._replies.append(reply)
        if self._followed is not None:
            self._ends.pop(self._followed, None)
        self._ends[turn] = conversation
        if len(self._ends) > _MOST_ENDS:
            del self._ends[next(iter(self._ends))]

    def following(self, conversation: Conversation) -> tuple[Messages, Info]:
        """The observation by which a request follows the last turn, and the keys of the step's info about it."""
        self._followed, messages = None, conversation.messages
        if conversation.is_raw:  # where its tokens are known, an earlier text is found that it goes on from
            return (), {"history": list(_copied(messages))}
        places = transcripts.places(conversation)
        for count in range(len(messages), 0, -1):
            if (turn := self._places.get(places[count])) is not None:
                self._followed = turn
                new_messages = _copied(with_tool_names(messages[count:], self._replies[turn]))
                if turn == len(self._replies) - 1:
                    return new_messages, {}
                return new_messages, {"history": list(_copied(messages)), "continues": turn}
        return (), {"history": list(_copied(messages)), "branch": self._edge(conversation, places[-1])}

    def _edge(self, conversation: Conversation, place: bytes) -> Json:
        if (turn := self._requests.get(place)) is not None:
            return {"kind": AGAIN, "turn": turn}
        spoken = _spoken(conversation.messages)
        prompt_text = "\n".join(message["content"] for message in conversation.messages if not _is_spoken(message))
        prompt_text = prompt_text[:_MOST_TEXT]
        if not spoken and (call := self._call_in(prompt_text)) is not None:
            return {"kind": TOOL_CALL, "turn": call[0], "call": call[1]}
        is_summary, rewritten = self._is_summary(prompt_text), None
        for turn, earlier in reversed(self._ends.items()):
            earlier_messages = (*earlier.messages, self._replies[turn].message)
            is_kept = not spoken.isdisjoint(_spoken(earlier_messages))
            is_shorter = _size(conversation.messages) < _size(earlier_messages)
            if is_shorter and earlier.tools == conversation.tools and (is_kept or is_summary):
                return {"kind": COMPACTION, "turn": turn}
            rewritten = turn if is_kept and rewritten is None else rewritten
        return {"kind": NEW} if rewritten is None else {"kind": REWRITTEN, "turn": rewritten}

    def _call_in(self, prompt_text: str) -> tuple[int, str] | None:
        """Turn and id of the newest call of which an argument stands in a prompt."""
        for turn in range(len(self._replies) - 1, -1, -1):
            for call_index, call in enumerate(self._replies[turn].calls):
                for value in call.arguments.values():
                    if isinstance(value, str) and len(value.strip()) >= _LEAST and value.strip() in prompt_text:
                        return turn, self._replies[turn].call_id(call_index)
        return None

    def _is_summary(self, prompt_text: str) -> bool:
        """Whether a prompt has a line of the last answer in it: programs ask for a summary, and cut it out of the
        answer as they like."""
        lines = [line.strip() for line in self._replies[-1].text.splitlines()[:_MOST_LINES]]
        return any(len(line) >= _LEAST and line in prompt_text for line in lines)


def with_tool_names(messages: Sequence[Message], reply: Reply) -> list[Message]:
    """The messages behind a reply, the results of its calls with the names of their tools, which few programs give and
    some chat templates write."""
    tool_names = {
        str(tool_call.get("id")): str(cast("Mapping[str, Any]", tool_call["function"])["name"])
        for tool_call in reply.message.get("tool_calls", ())
    }
    return [_named(message, tool_names) for message in messages]


def _named(message: Message, names: Mapping[str, str]) -> Message:
    """A tool's result with the tool's name."""
    tool_name = names.get(message.get("tool_call_id", ""))
    return (
        message if tool_name is None or message["role"] != "tool" else cast("Message", {"name": tool_name, **message})
    )


def _spoken(messages: Sequence[Message]) -> frozenset[bytes]:
    """Digests of the assistant's messages."""
    return frozenset(transcripts.after(b"", message) for message in messages if _is_spoken(message))


def _is_spoken(message: Message) -> bool:
    return message["role"] == "assistant"


def _size(messages: Sequence[Message]) -> int:
    """The characters of messages, calls included."""
    return sum(len(message["content"]) + len(json.dumps(message.get("tool_calls", ""))) for message in messages)


def _copied(messages: Sequence[Message]) -> Messages:
    return tuple(cast(Message, json.loads(json.dumps(message))) for message in messages)
