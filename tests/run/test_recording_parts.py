"""The parts of the recorder by themselves: places of conversations, sampling as a client wants it."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from each_case import each_case

from agentrl.env.agent_programs import transcripts
from agentrl.env.agent_programs.model_apis import Conversation
from agentrl.env.agent_programs.request_checks import UnservedRequest
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import Generation, Message, SamplingParams
from agentrl.run.recording.client_sampling import ClientSampling, check_sampling, sampling_of

TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


def call(id: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "look", "arguments": arguments}}


def assistant(content: str = "", **fields: Any) -> Message:
    return Message(role="assistant", content=content, **fields)


def place(*messages: Message, tools: tuple[Any, ...] = ()) -> bytes:
    return transcripts.places(Conversation(messages, tools))[-1]


@each_case(
    ("message", "other", "same"),
    [
        (assistant(" Yes.\n"), assistant("Yes."), True),
        (assistant("Yes.", reasoning_content="Hm."), assistant("Yes."), True),
        (
            assistant(tool_calls=[call("a", '{"x": 1, "y": 2}')]),
            assistant(tool_calls=[call("b", '{"y":2,"x":1}')]),
            True,
        ),
        (assistant(tool_calls=[call("a", {"x": 1})]), assistant(tool_calls=[call("a", '{"x": 1}')]), True),
        (
            assistant(tool_calls=[call("a", '{"x": [1.0, 2.5]}')]),
            assistant(tool_calls=[call("a", '{"x":[1,2.5]}')]),
            True,
        ),
        (assistant(tool_calls=[call("a", {"x": 1.0})]), assistant(tool_calls=[call("a", '{"x": 1}')]), True),
        (assistant(tool_calls=[call("a", '{"x": 1}')]), assistant(tool_calls=[call("a", '{"x": true}')]), False),
        (assistant(tool_calls=[call("a", "{}")]), assistant(tool_calls=[call("a", '{"x": 1}')]), False),
        (assistant("Yes."), assistant("No."), False),
        (Message(role="user", content="a "), Message(role="user", content="a"), False),
        (Message(role="user", content="a"), Message(role="system", content="a"), False),
        (Message(role="tool", content="a", name="look"), Message(role="tool", content="a"), True),
        (Message(role="tool", content="a", tool_call_id="1"), Message(role="tool", content="a"), False),
    ],
)
def test_a_place_is_what_a_client_sees_of_a_conversation(message: Message, other: Message, same: bool) -> None:
    assert (place(message) == place(other)) is same


def test_tools_and_the_border_between_messages_belong_to_a_place() -> None:
    user = Message(role="user", content="a")
    assert place(user) != place(user, tools=(TOOL,))
    assert place(user, user) != place(user)
    assert transcripts.places(Conversation((user, user)))[1] == place(user)


def test_the_earlier_places_of_a_text_are_those_of_its_beginnings() -> None:
    def raw(text: str) -> Conversation:
        return Conversation((Message(role="user", content=text, raw=True),))

    beginnings = [transcripts.places(raw(text))[-1] for text in ("é✓ and more", "é✓", "é")]
    others = [transcripts.places(raw(text))[-1] for text in ("other", "a longer text than this one")]
    earlier = transcripts.earlier(raw("é✓ and more"), [*others, *reversed(beginnings), place()])
    assert [known for known in earlier if known in beginnings] == beginnings, "the longest first"
    assert len(earlier) == 4 and not set(others) & set(earlier)


def test_a_long_text_is_digested_once_however_many_texts_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    digested = 0

    class CountingDigest:
        def __init__(self, data: bytes = b"", *, digest_size: int) -> None:
            self._digest = hashlib.blake2b(digest_size=digest_size)
            self.update(data)

        def update(self, data: bytes) -> None:
            nonlocal digested
            digested += len(data)
            self._digest.update(data)

        def digest(self) -> bytes:
            return self._digest.digest()

    known = [
        transcripts.places(Conversation((Message(role="user", content="a" * n, raw=True),)))[-1] for n in range(99)
    ]
    monkeypatch.setattr(transcripts, "blake2b", CountingDigest)
    transcripts.earlier(Conversation((Message(role="user", content="b" * 1000, raw=True),)), known)
    assert digested <= 1000


def test_a_client_may_lower_limits_and_not_raise_them() -> None:
    default = SamplingParams(max_tokens=10)
    for key in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        assert sampling_of(Conversation((), sampling={key: 4}), default).max_tokens == 4
        assert sampling_of(Conversation((), sampling={key: 40}), default).max_tokens == 10
    chosen = sampling_of(Conversation((), stops=("end", ""), sampling={"temperature": 0, "top_k": 5.0}), default)
    assert (chosen.temperature, chosen.top_k, chosen.stop) == (0, 5, ("end",))


@each_case("sampling", [{"top_p": 0}, {"top_p": 1.5}, {"top_k": 2.5}, {"temperature": "hot"}, {"max_tokens": 0}])
def test_sampling_that_no_engine_can_do_is_refused(sampling: dict[str, Any]) -> None:
    with pytest.raises(UnservedRequest, match=next(iter(sampling))):
        check_sampling(Conversation((), sampling=sampling))


class Counting:
    """An engine that counts its requests and samples one token."""

    def __init__(self) -> None:
        self.requests = list[GenerateRequest]()

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        return Generation(token_ids=(9,), logprobs=(-1.0,), spans=(), finish="stop")


@each_case(
    ("done", "room"),
    [((1, 2), 3), ((1, 2, 3, 4), 1), ((1, 2, 3, 4, 5), None), ((1, 7), None)],
)
async def test_a_turn_that_goes_on_has_the_rest_of_its_clients_limit(done: tuple[int, ...], room: int | None) -> None:
    """The client's limit is 5 tokens and its stop text is written by token 7."""
    engine, prompt = Counting(), (50, 51)

    async def waiting() -> Conversation:
        return Conversation((), stops=("stop",), sampling={"max_tokens": 5})

    prompts = list[int]()
    sampled = ClientSampling(engine, waiting, lambda ids: "stop" if 7 in ids else "", prompts.append)  # type: ignore[arg-type]
    request = GenerateRequest(
        request_id="r",
        session="s",
        token_ids=prompt + done,
        sampling=SamplingParams(max_tokens=100 - len(done)),
        deadline_s=1.0,
        sampled=len(done),
    )
    generation = await sampled.generate(request)
    assert prompts == [2]
    assert [each.sampling.max_tokens for each in engine.requests] == ([] if room is None else [room])
    assert len(generation.token_ids) == (0 if room is None else 1)


def test_a_generation_as_one_chunk_keeps_all_that_the_engine_said_of_its_tokens() -> None:
    generation = Generation(token_ids=(9,), logprobs=(-1.0,), spans=(), finish="stop", columns={"teacher": (-2.0,)})
    chunk = Chunk.whole(generation)
    assert {
        name: getattr(chunk, name) for name in ("token_ids", "logprobs", "spans", "finish", "experts", "columns")
    } == {
        name: getattr(generation, name) for name in ("token_ids", "logprobs", "spans", "finish", "experts", "columns")
    }
