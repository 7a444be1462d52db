"""Text and Messages: what they hold, and that it comes back from JSON, pickle and vector environments."""

import json
import pickle

import gymnasium
import pytest
from each_case import each_case
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate
from hypothesis import given
from hypothesis import strategies as st

from agentrl.env.spaces import Messages, Text


@given(st.text())
def test_text_holds_every_string_that_utf8_can_carry(text):
    assert text in Text()  # hypothesis's text() draws no surrogates


def test_text_refuses_surrogates_long_text_and_what_is_no_text():
    space = Text(max_length=3)
    assert "" in space and "añ😀" in space
    assert "abcd" not in space
    assert "\ud800" not in space
    assert b"abc" not in space and None not in space


@given(st.integers(0, 2**32 - 1))
def test_samples_are_contained_and_follow_the_seed(seed):
    for make in (lambda: Text(7, seed=seed), lambda: Messages(max_messages=2, max_length=5, seed=seed)):
        one, two = make(), make()
        sample = one.sample()
        assert sample in one and sample == two.sample()


def test_samples_cover_the_empty_string_and_the_upper_planes():
    space = Text(20, seed=0)
    samples = [space.sample() for _ in range(300)]
    assert "" in samples
    assert any(ord(character) > 0xFFFF for sample in samples for character in sample)


MESSAGE = {"role": "user", "content": "hi"}


@each_case(
    ("value", "reason"),
    [
        ([MESSAGE], "not a tuple"),
        (("hi",), "message 0: a str"),
        (({"role": "user"},), "content is a NoneType"),
        (({"role": "", "content": "x"},), "role = ''"),
        ((MESSAGE, {"role": "user", "content": "\udc80"}), "message 1: holds a lone surrogate"),
        (({"role": "user", "content": "x", "name": {1, 2}},), "not JSON-safe"),
        (({"role": "user", "content": "x", "score": float("nan")},), "not JSON-safe"),
        ((MESSAGE,) * 4, "at most 3"),
        (({"role": "user", "content": "x" * 11},), "at most 10"),
    ],
)
def test_messages_says_why_not(value, reason):
    space = Messages(max_messages=3, max_length=10)
    assert value not in space
    assert reason in space.why_not(value)


def test_messages_holds_nothing_and_tool_messages():
    tool = {"role": "tool", "content": "", "name": "run", "tool_call_id": "call00000"}
    calling = {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": {"arguments": "{}"}}]}
    assert () in Messages() and (calling, tool) in Messages()


def test_both_survive_json_and_pickle():
    for space in (Text(seed=1), Messages(seed=1)):
        samples = [space.sample() for _ in range(20)]
        assert space.from_jsonable(json.loads(json.dumps(space.to_jsonable(samples)))) == samples
        copy = pickle.loads(pickle.dumps(space))
        assert copy == space and copy.sample() == space.sample()


def test_both_vectorise_as_tuples():
    for space in (Text(9, seed=1), Messages(seed=1)):
        batch = batch_space(space, 3)
        items = [space.sample() for _ in range(3)]
        together = concatenate(space, items, create_empty_array(space, 3))
        assert together in batch
        assert list(iterate(batch, together)) == items


def test_masks_are_refused():
    for space in (Text(), Messages()):
        with pytest.raises(ValueError, match="no mask"):
            space.sample(mask=1)


def test_gymnasiums_own_text_would_not_do():
    """The reason for ours: it fails as soon as a model says nothing, or something outside of its alphabet."""
    assert "" not in gymnasium.spaces.Text(10) and "é" not in gymnasium.spaces.Text(10)
