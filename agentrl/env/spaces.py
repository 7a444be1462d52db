"""Gymnasium spaces for language: `Text` (any unicode) and `Messages` (a tuple of chat messages).

They sample, contain, serialise and vectorise. gymnasium's own `Text` knows a fixed alphabet only and refuses what a
model may say. These have no array form: in the shared memory that gymnasium's `AsyncVectorEnv` asks for by default,
messages lie as JSON, in a slot of bounded size for each environment.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterable, Iterator
from ctypes import Array, c_char
from typing import Any, Final, cast

import numpy as np
from gymnasium.spaces import Space
from gymnasium.vector.utils import (
    create_shared_memory,  # pyright: ignore[reportUnknownVariableType]
    read_from_shared_memory,
    write_to_shared_memory,
)

from agentrl import records
from agentrl.env.image_parts import with_images
from agentrl.errors import UsageError
from agentrl.tokens import images

_SAMPLE_CHARS: Final = 64
"""Samples stay short: they probe an environment, they do not fill it."""

# Scripts that break what was written for ASCII: line ends within a text, combining marks, two directions, characters of
# two units in UTF-16.
_ALPHABETS: Final = (
    (0x20, 0x7E),  # ASCII
    (0x09, 0x0D),  # tabs and line ends
    (0xA0, 0x17F),  # Latin letters with accents
    (0x590, 0x6FF),  # right-to-left scripts
    (0x300, 0x36F),  # combining marks
    (0x4E00, 0x9FFF),  # Chinese characters
    (0x1F300, 0x1FAFF),  # beyond the basic plane
)

_SLOT_BYTES: Final = 1 << 20
_SIZE_BYTES: Final = 4  # in front of each slot: how much of it is used

_JSON: Final = json.JSONEncoder(allow_nan=False, ensure_ascii=False)

MOST_IMAGES: Final = 64
"""In the messages of one answer."""

ROLES: Final = ("system", "user", "assistant", "tool")


def is_unicode(text: str) -> bool:
    """Whether `text` can be written as UTF-8, that is, holds no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Text(Space[str]):
    """Every string of at most `max_length` characters that UTF-8 can carry, the empty one included."""

    def __init__(self, max_length: int = 1_000_000, *, seed: int | np.random.Generator | None = None) -> None:
        if max_length < 0:
            raise ValueError(f"max_length = {max_length}: give 0 or more characters")
        self.max_length = max_length
        super().__init__(dtype=str, seed=seed)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        """A short random string over several scripts; masks mean nothing here and are refused."""
        if mask is not None or probability is not None:
            raise ValueError("Text samples freely: it takes no mask and no probability")
        return _sample_text(self.np_random, self.max_length)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length and is_unicode(x)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __repr__(self) -> str:
        return f"Text({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and other.max_length == self.max_length

    __hash__ = None  # type: ignore[assignment]  # mutable, like every gymnasium space


class Messages(Space[records.Messages]):
    """Tuples of at most `max_messages` chat messages; each is a JSON-safe dict with a `role` and a `content` text.

    Example: `({"role": "user", "content": "2 + 2?"},)`. The empty tuple belongs to it: an environment may end an
    episode without a word. With `max_images`, so many images may be in the messages of a tuple: the content is then a
    list of OpenAI's parts, text and `image_url`, of which only `data:` URLs of PNG, JPEG and WebP files belong here."""

    def __init__(
        self,
        max_messages: int = 1_000,
        max_length: int = 1_000_000,
        *,
        max_images: int = 0,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        if min(max_messages, max_length, max_images) < 0:
            limits_text = f"max_messages = {max_messages}, max_length = {max_length}, max_images = {max_images}"
            raise ValueError(f"{limits_text}: give 0 or more")
        self.max_messages, self.max_length, self.max_images = max_messages, max_length, max_images
        super().__init__(dtype=object, seed=seed)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> records.Messages:
        """Up to three random messages; masks mean nothing here and are refused."""
        if mask is not None or probability is not None:
            raise ValueError("Messages samples freely: it takes no mask and no probability")
        message_count = int(self.np_random.integers(0, min(3, self.max_messages) + 1))
        return tuple(
            records.Message(
                role=ROLES[int(self.np_random.integers(0, len(ROLES)))],
                content=_sample_text(self.np_random, self.max_length),
            )
            for _ in range(message_count)
        )

    def contains(self, x: Any) -> bool:
        return self.why_not(x) is None

    def why_not(self, x: Any) -> str | None:
        """Why `x` is outside of this space, in one line; None if it is inside."""
        if not isinstance(x, tuple):
            return f"a {type(x).__name__}, not a tuple of messages"
        messages = cast("tuple[Any, ...]", x)
        if len(messages) > self.max_messages:
            return f"{len(messages)} messages, at most {self.max_messages} allowed"
        image_count = 0
        for message_index, message in enumerate(messages):
            if reason := self._why_not_message(message):
                return f"message {message_index}: {reason}"
            image_count += len(with_images(message).get("images", ()))
        if image_count > self.max_images:
            correction = f"declare observation_space = Messages(max_images={image_count}), or show fewer"
            return f"{image_count} images, at most {self.max_images} allowed: {correction}"
        return None

    def _why_not_message(self, message: Any) -> str | None:
        if not isinstance(message, dict):
            return f"a {type(message).__name__}, not a dict"
        message_fields = cast("dict[str, Any]", message)
        try:
            message_fields = with_images(message_fields)
            for shown_image in message_fields.get("images", ()):
                images.from_url(shown_image["url"])
                # Sliced for its errors: a content that is no text, and a place that is no number, raise here as they
                # would in the renderer.
                message_fields["content"][: shown_image["at"]]
        except ValueError as content_error:
            return str(content_error)
        except (TypeError, LookupError, AttributeError):
            return f"images = {message_fields.get('images')!r:.60}: leave it out, and give a list of parts as content"
        message_role, content = message_fields.get("role"), message_fields.get("content")
        if not isinstance(message_role, str) or not message_role:
            return f"role = {message_role!r}, not a name"
        if not isinstance(content, str):
            return f"content is a {type(content).__name__}, not text"
        if len(content) > self.max_length:
            return f"content of {len(content)} characters, at most {self.max_length} allowed"
        try:
            json_text = _JSON.encode(message_fields)
        except (TypeError, ValueError, RecursionError) as content_error:
            return f"not JSON-safe: {content_error}"
        return None if is_unicode(json_text) else "holds a lone surrogate, which UTF-8 cannot carry"

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def to_jsonable(self, sample_n: Iterable[records.Messages]) -> list[list[dict[str, Any]]]:
        return [[dict(message) for message in messages] for messages in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[records.Messages]:
        return [tuple(cast("list[records.Message]", messages)) for messages in sample_n]

    def __repr__(self) -> str:
        image_part = f", max_images={self.max_images}" if self.max_images else ""
        return f"Messages({self.max_messages}, {self.max_length}{image_part})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Messages) and (self.max_messages, self.max_length, self.max_images) == (
            other.max_messages,
            other.max_length,
            other.max_images,
        )

    __hash__ = None  # type: ignore[assignment]  # mutable, like every gymnasium space


def _sample_text(rng: np.random.Generator, max_length: int) -> str:
    characters: list[str] = []
    for _ in range(int(rng.integers(0, min(max_length, _SAMPLE_CHARS) + 1))):
        first_code, last_code = _ALPHABETS[int(rng.integers(0, len(_ALPHABETS)))]
        characters.append(chr(int(rng.integers(first_code, last_code + 1))))
    return "".join(characters)


class _Slots:
    """Messages that lie in the shared memory of a vector environment; a deep copy of them is plain messages."""

    def __init__(self, memory: Array[c_char], count: int) -> None:
        self._memory, self._count = memory, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[records.Messages]:
        return (self[slot_index] for slot_index in range(self._count))

    def __getitem__(self, index: int) -> records.Messages:
        # By way of a range, which knows negative indices and refuses others.
        slot_start = range(self._count)[index] * (_SIZE_BYTES + _SLOT_BYTES)
        body_start = slot_start + _SIZE_BYTES
        body_size = int.from_bytes(bytes(self._memory[slot_start:body_start]))
        return tuple(json.loads(bytes(self._memory[body_start : body_start + body_size]))) if body_size else ()

    def __deepcopy__(self, memo: object) -> tuple[records.Messages, ...]:
        return tuple(self)


@create_shared_memory.register(Messages)
def _create(space: Messages, n: int = 1, ctx: Any = multiprocessing) -> Any:
    return ctx.RawArray(c_char, n * (_SIZE_BYTES + _SLOT_BYTES))


@read_from_shared_memory.register(Messages)
def _read(space: Messages, shared_memory: Array[c_char], n: int = 1) -> Any:
    return _Slots(shared_memory, n)


@write_to_shared_memory.register(Messages)
def _write(space: Messages, index: int, value: records.Messages, shared_memory: Array[c_char]) -> None:
    json_bytes = json.dumps(value).encode()
    if len(json_bytes) > _SLOT_BYTES:
        correction = "give vector_kwargs={'shared_memory': False}, or take agentrl.make_vec"
        raise UsageError(
            f"an observation of {len(json_bytes)} bytes: shared memory has {_SLOT_BYTES} for each: {correction}"
        )
    slot_start = index * (_SIZE_BYTES + _SLOT_BYTES)
    shared_memory[slot_start : slot_start + _SIZE_BYTES + len(json_bytes)] = (
        len(json_bytes).to_bytes(_SIZE_BYTES) + json_bytes
    )
