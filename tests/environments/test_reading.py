"""The book: each fact stands on its page, only the right digit counts, and the last pages go on without notes."""

import pytest
from each_case import each_case

import agentrl
from agentrl.errors import UsageError
from agentrl_environments.reading import OPENING, book, fact, last_pages


async def read(answer, **kwargs):
    """What was read in a book of six pages, three with a fact, and the last info."""
    env = agentrl.make("agentrl/Reading-v0", pages=6, facts=3, **kwargs)
    observation, _ = await env.areset(seed=0, options={"digits": [4, 0, 9], "asked": 2})
    read = [observation[-1]["content"]]
    for text in (*["next"] * 7, answer):
        observation, _, terminated, _, info = await env.astep(text)
        read += [message["content"] for message in observation]
    assert terminated
    return read, info


async def test_each_page_says_its_fact_and_the_last_digit_is_right():
    told, info = await read(" 9 ")
    assert told[0] == OPENING and told[-1] == "what is C"
    assert [text in told[2 * at + 1] for at, text in enumerate(("A4", "B0", "C9"))] == [True] * 3
    assert [len(text.split()) for text in told[1:-1]] == [9, 8] * 3
    assert (info["outcome"], info["success"]) == (1.0, True)


@each_case("answer", ["4", "", "9 9", "C9"])
async def test_any_other_answer_is_wrong(answer):
    _, info = await read(answer)
    assert (info["outcome"], info["success"]) == (0.0, False)


async def test_what_cannot_be_is_refused_by_name():
    for settings, words in (
        ({"facts": 27}, "facts = 27: give 1 to 26"),
        ({"pages": 7}, "pages = 7: give 8 or more"),
        ({"words": -1}, "words = -1: give 0 or more"),
    ):
        with pytest.raises(UsageError, match=words):
            agentrl.make("agentrl/Reading-v0", **settings)
    for options, words in ({"digits": [1]}, "digits has 1 entries: give 3"), ({"asked": 3}, "asked = 3: give 0 to 2"):
        with pytest.raises(UsageError, match=words):
            await agentrl.make("agentrl/Reading-v0", facts=3).areset(seed=0, options=options)


def test_it_passes_the_checker():
    assert agentrl.check_env("agentrl/Reading-v0", actions=["1", "x", ""]).findings == ()


def test_the_last_pages_follow_the_opening():
    pages = book(range(9), 9, 2, 7)
    messages = [{"role": "user", "content": OPENING}]
    for text in pages:
        messages += [{"role": "assistant", "content": "next"}, {"role": "user", "content": text}]
    found = last_pages(messages, keep=2)
    assert [message["role"] for message in found] == ["user", "assistant", "user"]
    assert found[0]["content"] == f"{OPENING}\n{pages[7]}" and fact(8, 8) in found[-1]["content"]
    assert last_pages(messages[:3]) == messages[:3]
