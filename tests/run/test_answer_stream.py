"""The text that may be read early is the beginning of the answer, whatever comes behind it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.env.agent_programs.model_apis import AnthropicMessages, Conversation, Reply, Responses, reply_of
from agentrl.env.agent_programs.open_requests import Pending
from agentrl.env.agent_programs.streamed_answer import StreamedAnswer
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import FORMATS, get_format
from agentrl.records import Message
from agentrl.run.recording.answer_stream import AnswerStream
from agentrl.store import Partial

TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
STOPS = ("Observation:", "ob")
WORDS = st.text(st.sampled_from("abn O:<[{`\n é✓"), max_size=12)


def decode(ids: Any) -> str:
    """Tokens are bytes, so that a character may be in several."""
    return bytes(ids).decode(errors="replace")


def streamed(stream: AnswerStream, text: str, conversation: Conversation, size: int) -> list[str]:
    """All that a client may have read so far, after each part."""
    ids, read = tuple(text.encode()), list[str]()
    for at in range(0, len(ids), size):
        token_ids = ids[at : at + size]
        part = Partial(
            index=3,
            parent=None,
            role="policy",
            prompt_ids=(),
            started_s=0.0,
            at=at,
            token_ids=token_ids,
            logprobs=(0.0,) * len(token_ids),
        )
        stream.add(part)
        read.append(stream.text(conversation, 3))
    return read


@pytest.mark.parametrize("name", sorted(FORMATS))
@settings(max_examples=40, deadline=None)
@given(
    pieces=st.lists(WORDS | st.just(None), max_size=4),
    with_tools=st.booleans(),
    stops=st.sampled_from([(), STOPS]),
    size=st.integers(1, 5),
    raw=st.booleans(),
)
def test_law_1_nobody_reads_a_word_that_the_answer_does_not_begin_with(
    name: str, pieces: list[str | None], with_tools: bool, stops: tuple[str, ...], size: int, raw: bool
) -> None:
    form = get_format(name)
    call = form.write(ToolCall("look", {"a": "b"}))
    action = "".join(call if piece is None else piece for piece in pieces)
    asked = Message(role="user", content="q", raw=True) if raw else Message(role="user", content="q")
    conversation = Conversation((asked,), (TOOL,) if with_tools and not raw else (), stops)
    reply = reply_of(form, action, conversation, id="1", is_cut=False)
    read = ""
    for text in streamed(AnswerStream(decode, form, thinks=False), action, conversation, size):
        assert text.startswith(read) or not text, "what was read stays"
        read = text or read
        assert reply.text.startswith(text)


def test_words_come_before_a_call_and_a_call_does_not() -> None:
    form = get_format("hermes")
    action = "I look, and then: " + form.write(ToolCall("look", {}))
    conversation = Conversation((Message(role="user", content="q"),), (TOOL,))
    read = streamed(AnswerStream(decode, form, thinks=False), action, conversation, 4)
    assert read[0] == "I lo" and read[-1] == "I look, and then:"
    assert set(streamed(AnswerStream(decode, form, thinks=True), action, conversation, 4)) == {""}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_thoughts_of_which_the_chat_template_knows_nothing_are_not_words(name: str) -> None:
    form = get_format(name)
    conversation = Conversation((Message(role="user", content="Think in tags."),))
    for opening, closing in form.thoughts:
        action = f"\n{opening}Hm.{closing}\nYes."
        reply = reply_of(form, action, conversation, id="1", is_cut=False)
        stream = AnswerStream(decode, form, thinks=False)
        assert all(reply.text.startswith(text) for text in streamed(stream, action, conversation, 3))
    assert streamed(AnswerStream(decode, form, thinks=False), "1 of 2", conversation, 3) == ["1 o", "1 of 2"]


def test_a_turn_whose_first_tokens_are_not_known_is_not_streamed() -> None:
    stream = AnswerStream(decode, get_format("hermes"), thinks=False)
    part = Partial(
        index=0, parent=None, role="policy", prompt_ids=(), started_s=0.0, at=2, token_ids=(65,), logprobs=(0.0,)
    )
    stream.add(part)
    assert stream.text(Conversation((Message(role="user", content="q"),)), 0) == ""


@pytest.mark.parametrize("api", [AnthropicMessages(), Responses()])
async def test_a_stream_whose_words_turn_out_to_be_thoughts_ends_with_an_error(
    api: AnthropicMessages | Responses,
) -> None:
    """A model that closes thoughts which it never opened."""
    pending = Pending(api.path, Conversation((Message(role="user", content="q"),)), 0.0, 0, clients=1)
    ends: list[bool] = []
    body = {"stream": True, "thinking": {"type": "enabled"}}
    stream = StreamedAnswer(api, pending, body, on_end=ends.append, refusal=str, remember=lambda _: None)
    pending.begin(Reply("1", "The"))
    assert b"The" in await stream.__anext__()
    pending.answer(Reply("1", "The end.", thoughts="The start."))
    rest = b"".join([part async for part in stream])
    assert b"ask again" in rest and b"end." not in rest and ends == [False]
