"""Which earlier answer a request goes on from, and where a branch comes from, as programs send them."""

from __future__ import annotations

from typing import Any, cast

from each_case import each_case

from agentrl.env.agent_programs.branches import Branches
from agentrl.env.agent_programs.model_apis import Conversation, Reply
from agentrl.env.tools.calls import ToolCall
from agentrl.records import Message

SYSTEM = Message(role="system", content="You are careful.")
TASK = Message(role="user", content="Count the files of the project.")
ASSIGNMENT = "List every file below src, and count them."
DELEGATES = Reply("0001", "I delegate.", (ToolCall("task", {"prompt": ASSIGNMENT}),))
SUMMARY = "The folder src has 12 files, and docs has not been read."
TOOL: Any = {"type": "function", "function": {"name": "task"}}


def user(text: str) -> Message:
    return Message(role="user", content=text)


def asked(*messages: Message, tools: bool = False) -> Conversation:
    return Conversation(messages, (TOOL,) if tools else ())


def branches(*turns: tuple[Conversation, Reply]) -> Branches:
    """Those of an episode whose turns followed each other."""
    return Branches.of(turns)


MAIN = asked(SYSTEM, TASK)
SUB = asked(Message(role="system", content="You list files."), user(f"Do this: {ASSIGNMENT}"))
BACK = asked(*MAIN.messages, DELEGATES.message, Message(role="tool", content="12", tool_call_id="c00010000"))
SUMMARIZE = asked(*BACK.messages, Reply("0003", "So 12.").message, user("Write a summary of all this. " * 5))


def test_a_sub_agent_is_a_branch_of_the_call_and_the_main_conversation_goes_on_behind_it() -> None:
    turns = branches((MAIN, DELEGATES))
    assert turns.following(SUB)[1]["branch"] == {"kind": "tool call", "turn": 0, "call": "c00010000"}
    turns.add(SUB, Reply("0002", "12"))
    news, info = turns.following(BACK)
    assert info == {"history": list(BACK.messages), "continues": 0}
    assert news == (cast("Message", {"name": "task", **BACK.messages[-1]}),), "the result of the call, and nothing else"


def test_a_conversation_of_two_that_take_turns_goes_on_from_its_own_answer() -> None:
    first, second = asked(user("a")), asked(user("b"))
    turns = branches((first, Reply("1", "A")), (second, Reply("2", "B")))
    news, info = turns.following(asked(user("a"), Reply("1", "A").message, user("more")))
    assert [message["content"] for message in news] == ["more"] and info["continues"] == 0
    news, info = turns.following(asked(user("b"), Reply("2", "B").message, user("more")))
    assert [message["content"] for message in news] == ["more"] and info == {}


@each_case(
    ("now", "kind"),
    [
        # What is left are the newest messages.
        (asked(SYSTEM, user("Earlier steps are left out."), *BACK.messages[-2:], user("Go on.")), "compaction"),
        # The summary that the policy wrote stands for all of it, within other words.
        (asked(SYSTEM, user(f"Summary so far:\n{SUMMARY}\nGo on.")), "compaction"),
        # An answer is there, and more words in front of it than before.
        (asked(SYSTEM, user("Other words. " * 40), DELEGATES.message, user("x")), "rewritten"),
        (asked(SYSTEM, user("A title for this?")), "new"),
        (asked(SYSTEM, user(f"Summary so far:\n{SUMMARY}"), tools=True), "new"),
        (MAIN, "again"),
    ],
)
def test_where_a_branch_comes_from(now: Conversation, kind: str) -> None:
    summary = Reply("0004", f"<summary>\n{SUMMARY}\n</summary>")
    turns = branches((MAIN, DELEGATES), (BACK, Reply("0003", "So 12.")), (SUMMARIZE, summary))
    edge: Any = turns.following(now)[1]["branch"]
    assert edge["kind"] == kind
    assert edge.get("turn") == {"compaction": 2, "rewritten": 2, "again": 0}.get(kind)


def test_a_short_argument_is_in_a_prompt_by_chance() -> None:
    turns = branches((MAIN, Reply("1", "", (ToolCall("task", {"prompt": "files"}),))))
    assert turns.following(asked(user("Which files?")))[1]["branch"] == {"kind": "new"}


def test_a_long_sub_agent_does_not_hide_what_a_branch_of_the_main_conversation_comes_from() -> None:
    turns, conversation = [(MAIN, DELEGATES)], SUB
    for number in range(20):
        reply = Reply(f"{number:04}", f"Step {number}.")
        turns.append((conversation, reply))
        conversation = asked(*conversation.messages, reply.message, user("Go on."))
    compacted = asked(SYSTEM, user("Less."), DELEGATES.message)
    assert branches(*turns).following(compacted)[1]["branch"] == {"kind": "compaction", "turn": 0}
