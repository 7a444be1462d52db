"""Streams of the recorder: a client reads words while the engine writes, and they are in the store by then."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.parts.served_vllm import InThread, in_thread
from tests.parts.vllm_server import FakeVLLM
from tests.run.recordings import RENDERER, Running, engine, episodes, partial_tokens, recorder

pytestmark = pytest.mark.adapters
TEXT = "An answer of some words, é and ✓ among them, which takes several chunks of tokens."
AFTER = 20  # tokens, before which the engine hangs


@pytest.fixture
def fake() -> FakeVLLM:
    return engine(lambda prompt: TEXT, version="3", stream_tokens=2)


@pytest.fixture
def served(fake: FakeVLLM) -> Iterator[InThread]:
    with in_thread(fake) as running:
        yield running


@pytest.fixture
def running(served: InThread, tmp_path: Path) -> Iterator[Running]:
    with recorder(tmp_path / "recorded", served.url) as at_work:
        yield at_work


def openai_client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key="none")


def chat(url: str, **more: Any) -> Iterator[str]:
    asked = [{"role": "user", "content": "Say."}]
    with openai_client(url).chat.completions.create(model="m", messages=asked, stream=True, **more) as chunks:
        for chunk in chunks:
            yield chunk.choices[0].delta.content or ""
            assert chunk.choices[0].finish_reason in (None, "stop")


def responses(url: str) -> Iterator[str]:
    """The client's own state of the stream raises for an event out of order."""
    number = -1
    with openai_client(url).responses.stream(model="m", input="Say.") as events:
        for event in events:
            assert event.sequence_number > number
            number = event.sequence_number
            if event.type == "response.output_text.delta":
                yield event.delta
        assert events.get_final_response().output_text == TEXT


def anthropic(url: str) -> Iterator[str]:
    import anthropic as package

    client = package.Anthropic(base_url=url, api_key="none")
    asked: Any = [{"role": "user", "content": "Say."}]
    with client.messages.stream(model="m", max_tokens=1000, messages=asked) as stream:
        yield from stream.text_stream
        message = stream.get_final_message()
        assert [block.text for block in message.content] == [TEXT] and message.stop_reason == "end_turn"  # type: ignore[union-attr]


def completions(url: str) -> Iterator[str]:
    prompt = "<|im_start|>user\nSay.<|im_end|>\n<|im_start|>assistant\n"
    with openai_client(url).completions.create(model="m", prompt=prompt, max_tokens=500, stream=True) as chunks:
        for chunk in chunks:
            yield chunk.choices[0].text


APIS: dict[str, Callable[[str], Iterator[str]]] = {
    "chat": chat,
    "responses": responses,
    "anthropic": anthropic,
    "completions": completions,
}


def come_back(fake: FakeVLLM) -> None:
    """End the hang: its connections are cut, and the engine has its version again."""
    fake.restart()
    fake.version = "3"


def first_words(stream: Iterator[str]) -> str:
    """Some words of a stream whose engine hangs before the answer is whole."""
    return next(text for text in stream if text)


@pytest.mark.parametrize("api", APIS)
def test_a_client_reads_what_is_written_before_the_answer_is_whole(
    fake: FakeVLLM, served: InThread, running: Running, api: str
) -> None:
    served.do(lambda: fake.fail("hang", after=AFTER))
    stream = APIS[api](running.url)
    read = first_words(stream)
    tokens = partial_tokens(running.folder)
    assert TEXT.startswith(read) and read != TEXT and tokens
    assert RENDERER.decode(RENDERER.tokens(TEXT)[:tokens]).startswith(read), "no word that a crash would lose"
    served.do(lambda: come_back(fake))
    assert read + "".join(stream) == TEXT
    (trajectory,) = episodes_of(running)
    assert trajectory.turns[0].token_ids == (*RENDERER.tokens(TEXT), RENDERER.stop_token_ids[0])


def episodes_of(running: Running) -> Any:
    """The conversations of a recorder at work."""
    copy = running.folder.with_name("copy")
    copy.mkdir()
    for name in running.folder.iterdir():
        if name.is_file() and not name.name.startswith("store.sqlite"):
            (copy / name.name).write_bytes(name.read_bytes())
    with sqlite3.connect(running.folder / "store.sqlite") as source, sqlite3.connect(copy / "store.sqlite") as target:
        source.backup(target)
    return episodes(copy)


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_client_that_leaves_amid_its_stream_has_read_no_answer(
    fake: FakeVLLM, served: InThread, running: Running, comes_back: bool
) -> None:
    served.do(lambda: fake.fail("hang", after=AFTER))
    url = f"{running.url}/session/s"
    stream: Any = chat(url)
    first_words(stream)
    stream.close()
    if comes_back:  # it gets the answer that was begun
        again = chat(url)
        assert TEXT.startswith(first_words(again))
    served.do(lambda: come_back(fake))
    if comes_back:
        assert "".join(again).endswith("chunks of tokens.")  # pyright: ignore[reportPossiblyUnboundVariable]
    list(chat(url, stop=["not there"]))  # a request of its own
    first, *_ = episodes_of(running)[0].turns
    assert first.step.masked is not comes_back
    assert len(fake.requests) == 3, "the turn, the rest of it, and the next turn"


def test_a_stream_whose_recorder_ends_tells_its_client(fake: FakeVLLM, served: InThread, tmp_path: Path) -> None:
    import openai

    served.do(lambda: fake.fail("hang", after=AFTER))
    with recorder(tmp_path / "recorded", served.url) as running:
        stream = chat(running.url)
        first_words(stream)
    with pytest.raises(openai.APIError, match="the recorder ends"):
        list(stream)
