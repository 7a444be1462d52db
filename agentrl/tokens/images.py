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
        media_type, pixel_width, pixel_height = _header(data)
    except (struct.error, IndexError):
        media_type, pixel_width, pixel_height = "", 0, 0
    if pixel_width < 1 or pixel_height < 1:
        raise ValueError(f"data that begin with {data[:8]!r} are no image: give a whole PNG, JPEG or WebP file")
    if pixel_width * pixel_height > MOST_PIXELS:
        raise ValueError(
            f"an image of {pixel_width} x {pixel_height} pixels: give one of at most {MOST_PIXELS}, scaled down"
        )
    return Image(data, media_type, pixel_width, pixel_height)


def _header(data: bytes) -> tuple[str, int, int]:
    """Type, width and height by a file's first bytes; no sizes if it is of another kind."""
    if data.startswith(b"\x89PNG\r\n\x1a\n") and data[12:16] == b"IHDR":
        return "image/png", *struct.unpack_from(">II", data, 16)
    if data.startswith(b"\xff\xd8\xff"):
        position = 2
        while data[position] == 0xFF and data[position + 1] not in _SIZES_OF_JPEG:
            position += 2 + struct.unpack_from(">H", data, position + 2)[0]
        pixel_height, pixel_width = struct.unpack_from(">HH", data, position + 5)
        return "image/jpeg", pixel_width if data[position] == 0xFF else 0, pixel_height
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP" and len(data) >= 30:
        return "image/webp", *_webp(data)
    return "", 0, 0


def _webp(data: bytes) -> tuple[int, int]:
    """Width and height by the first chunk of a WebP file, extended, lossless or lossy; zeros for another chunk."""
    chunk_kind = data[12:16]
    if chunk_kind == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if chunk_kind == b"VP8L":
        (size_bits,) = struct.unpack_from("<I", data, 21)
        return 1 + (size_bits & 0x3FFF), 1 + (size_bits >> 14 & 0x3FFF)
    pixel_width, pixel_height = struct.unpack_from("<HH", data, 26)
    return (pixel_width & 0x3FFF, pixel_height & 0x3FFF) if chunk_kind == b"VP8 " else (0, 0)


@lru_cache(maxsize=64)
def from_url(url: str) -> Image:
    """The image in a `data:` URL. Raises ValueError for another URL, another type than the data have, and as `read`."""
    url_head, separator, encoded_data = url.partition(",")
    if not url_head.startswith("data:") or not separator:
        raise ValueError(f"url = {url[:60]!r}: give the image itself, as data:image/png;base64,…; nothing is fetched")
    media_type, _, encoding = url_head.removeprefix("data:").partition(";")
    if media_type not in TYPES or encoding != "base64":
        raise ValueError(f"url = {url_head[:60]!r}: give one of {', '.join(TYPES)}, with ;base64")
    # Before it is decoded: base64 has four characters for three bytes.
    if len(encoded_data) > MOST_BYTES * 4 // 3 + 4:
        raise ValueError(
            f"an image of about {len(encoded_data) * 3 // 4} bytes: give one of at most {MOST_BYTES}, scaled down"
        )
    try:
        url_image = read(base64.b64decode(encoded_data, validate=True))
    except binascii.Error as error:
        raise ValueError(f"url = {url[:60]!r}: what follows the comma is no base64: {error}") from None
    if url_image.media_type != media_type:
        raise ValueError(f"url = {url_head!r}: the data are {url_image.media_type}: say so")
    return url_image


def of_messages(messages: Iterable[Message]) -> list[Image]:
    """The images of messages, in their order. Raises ValueError for one that is none."""
    return [from_url(shown_image["url"]) for message in messages for shown_image in message.get("images", ())]


def of_steps(start: Sequence[Message], steps: Iterable[Step | None]) -> dict[int, Image]:
    """The images that an episode has shown, by their token. Raises ValueError for two that differ and have the same."""
    shown_messages = (start, *(messages for step in steps if step for messages in (step.observation, step.history)))
    return joined({image.token: image} for messages in shown_messages for image in of_messages(messages or ()))


def runs(token_ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Where images lie in a context: the token of each, the first place, one past the last. The same image twice
    without a token between is one run."""
    if not token_ids or max(token_ids) < FIRST:
        return
    for image_token, run_positions in groupby(range(len(token_ids)), key=token_ids.__getitem__):
        if image_token >= FIRST:
            first_position, *later_positions = run_positions
            yield image_token, first_position, first_position + len(later_positions) + 1


def placed(token_ids: Sequence[int], placeholder: int) -> list[int]:
    """A context with a model's own placeholder in the place of images."""
    return [placeholder if context_token >= FIRST else context_token for context_token in token_ids]


def joined(parts: Iterable[Mapping[int, Image]]) -> dict[int, Image]:
    """All images of several, by their token. Raises ValueError for two that differ and have the same."""
    images_by_token = dict[int, Image]()
    for token_images in parts:
        for image_token, image in token_images.items():
            if images_by_token.setdefault(image_token, image).digest != image.digest:
                raise ValueError(f"two images have the token {image_token}: change a pixel of one")
    return images_by_token


def shown(token_ids: Sequence[int], known: Mapping[int, Image]) -> tuple[Image, ...]:
    """The images of a context, in the order in which they begin; each once. Raises ValueError for one that is not
    `known`."""
    image_tokens = dict.fromkeys(image_token for image_token, _, _ in runs(token_ids))
    if missing_tokens := [image_token for image_token in image_tokens if image_token not in known]:
        raise ValueError(f"no message holds the image whose token is {missing_tokens[0]}")
    return tuple(known[image_token] for image_token in image_tokens)
