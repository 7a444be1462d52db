"""Images as messages carry them, and the token ids that stand for them in a context.

A message keeps its text in `content` and its images beside it, in `images`: each has the URL of its data, and says
before which character of the text it stands. Nothing is ever fetched: only `data:` URLs are images.

In a prompt, all tokens of an image have the id `Image.token`, which is made of its content and lies beyond any
vocabulary. So two contexts with the same ids have the same images, and journals, prefix trees, caches and hashes of
prompts need not know what an image is. Where a context is computed, a model's own placeholder, the same for all images,
takes their place (`placed`).
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import sha256
from itertools import groupby
from typing import Final

from agentrl.records import Message, Step

FIRST: Final = 1 << 31
"""Token ids from here on are those of images."""

MOST_BYTES: Final = 8 << 20
# Checked from the header, before anything is decoded: a small file may unpack to gigabytes.
MOST_PIXELS: Final = 1 << 24
STORED: Final = "sha256:"
"""What the URL of an image begins with where its data lie elsewhere: a digest follows."""

TYPES: Final = ("image/png", "image/jpeg", "image/webp")
_SIZES_OF_JPEG: Final = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})  # segments that tell height and width


@dataclass(frozen=True)
class Image:
    """The bytes of a PNG, JPEG or WebP file, whose first bytes say which. `width` and `height` are in pixels."""

    data: bytes
    media_type: str
    width: int
    height: int

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the data, 64 hex digits."""
        return sha256(self.data).hexdigest()

    @property
    def token(self) -> int:
        """The id of its tokens."""
        # 31 bits of the content: two images may share a token. `joined` refuses them by name rather than to train on
        # the wrong one.
        return FIRST + int(self.digest[:8], 16) % FIRST

    @property
    def url(self) -> str:
        """It as a `data:` URL."""
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode()}"


def read(data: bytes) -> Image:
    """The image that a file holds. Raises ValueError for one that is no PNG, JPEG or WebP, or too large."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"an image of {len(data)} bytes: give one of at most {MOST_BYTES}, scaled down")
    try:
        media_type, width, height = _header(data)
    except (struct.error, IndexError):
        media_type, width, height = "", 0, 0
    if width < 1 or height < 1:
        raise ValueError(f"data that begin with {data[:8]!r} are no image: give a whole PNG, JPEG or WebP file")
    if width * height > MOST_PIXELS:
        raise ValueError(f"an image of {width} x {height} pixels: give one of at most {MOST_PIXELS}, scaled down")
    return Image(data, media_type, width, height)


def _header(data: bytes) -> tuple[str, int, int]:
    """Type, width and height by a file's first bytes; no sizes if it is of another kind."""
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
        return "image/png", *struct.unpack_from(">II", data, 16)
    if data.startswith(b"\xff\xd8\xff"):
        position = 2
        while data[position] == 0xFF and data[position + 1] not in _SIZES_OF_JPEG:
            position += 2 + struct.unpack_from(">H", data, position + 2)[0]
        height, width = struct.unpack_from(">HH", data, position + 5)
        return "image/jpeg", width if data[position] == 0xFF else 0, height
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP" and len(data) >= 30:
        return "image/webp", *_webp(data)
    return "", 0, 0


def _webp(data: bytes) -> tuple[int, int]:
    """Width and height by the first chunk of a WebP file, extended, lossless or lossy; zeros for another chunk."""
    kind = data[12:16]
    if kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    width, height = struct.unpack_from("<HH", data, 26)
    return (width & 0x3FFF, height & 0x3FFF) if kind == b"VP8 " else (0, 0)


@lru_cache(maxsize=64)
def from_url(url: str) -> Image:
    """The image in a `data:` URL. Raises ValueError for another URL, another type than the data have, and as `read`."""
    head, comma, body = url.partition(",")
    if not head.startswith("data:") or not comma:
        raise ValueError(f"url = {url[:60]!r}: give the image itself, as data:image/png;base64,…; nothing is fetched")
    media_type, _, encoding = head.removeprefix("data:").partition(";")
    if media_type not in TYPES or encoding != "base64":
        raise ValueError(f"url = {head[:60]!r}: give one of {', '.join(TYPES)}, with ;base64")
    # Before it is decoded: base64 has four characters for three bytes.
    if len(body) > MOST_BYTES * 4 // 3 + 4:
        raise ValueError(f"an image of about {len(body) * 3 // 4} bytes: give one of at most {MOST_BYTES}, scaled down")
    try:
        image = read(base64.b64decode(body, validate=True))
    except binascii.Error as error:
        raise ValueError(f"url = {url[:60]!r}: what follows the comma is no base64: {error}") from None
    if image.media_type != media_type:
        raise ValueError(f"url = {head!r}: the data are {image.media_type}: say so")
    return image


def of_messages(messages: Iterable[Message]) -> list[Image]:
    """The images of messages, in their order. Raises ValueError for one that is none."""
    return [from_url(part["url"]) for message in messages for part in message.get("images", ())]


def of_steps(start: Sequence[Message], steps: Iterable[Step | None]) -> dict[int, Image]:
    """The images that an episode has shown, by their token. Raises ValueError for two that differ and have the same."""
    shown = (start, *(messages for step in steps if step for messages in (step.observation, step.history)))
    return joined({image.token: image} for messages in shown for image in of_messages(messages or ()))


def runs(token_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Where images lie in a context: the token of each, the first place, one past the last. The same image twice
    without a token between is one run."""
    if not token_ids or max(token_ids) < FIRST:
        return
    for token, places in groupby(range(len(token_ids)), key=token_ids.__getitem__):
        if token >= FIRST:
            first, *rest = places
            yield token, first, first + len(rest) + 1


def placed(token_ids: Sequence[int], placeholder: int) -> list[int]:
    """A context with a model's own placeholder in the place of images."""
    return [placeholder if token >= FIRST else token for token in token_ids]


def joined(parts: Iterable[Mapping[int, Image]]) -> dict[int, Image]:
    """All images of several, by their token. Raises ValueError for two that differ and have the same."""
    images = dict[int, Image]()
    for part in parts:
        for token, image in part.items():
            if images.setdefault(token, image).digest != image.digest:
                raise ValueError(f"two images have the token {token}: change a pixel of one")
    return images


def shown(token_ids: Sequence[int], known: Mapping[int, Image]) -> tuple[Image, ...]:
    """The images of a context, in the order in which they begin; each once. Raises ValueError for one that is not
    `known`."""
    tokens = dict.fromkeys(token for token, _, _ in runs(token_ids))
    if missing := [token for token in tokens if token not in known]:
        raise ValueError(f"no message holds the image whose token is {missing[0]}")
    return tuple(known[token] for token in tokens)
