"""Pictures for observations: pixels to a PNG file, a file to a part of a message's content; and contents of such parts
as our records have them.

Needs numpy and the standard library only. Which files a message may hold, `agentrl.tokens.images` says.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import UsageError
from agentrl.records import ImagePart, Message
from agentrl.tokens import images


def png(pixels_HWC: NDArray[np.uint8]) -> bytes:
    """A PNG file of these pixels: [height, width, 3], 8 bits each for red, green and blue. The same pixels give the
    same bytes with the same zlib. Raises UsageError for an array of another kind."""
    if pixels_HWC.dtype != np.uint8 or pixels_HWC.ndim != 3 or pixels_HWC.shape[2] != 3 or 0 in pixels_HWC.shape:
        raise UsageError(f"pixels are {pixels_HWC.dtype} {pixels_HWC.shape}: give uint8 [height, width, 3]")
    height, width, _ = pixels_HWC.shape
    lines = np.zeros((height, 1 + 3 * width), dtype=np.uint8)  # each line begins with its filter: 0, none
    lines[:, 1:] = pixels_HWC.reshape(height, 3 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def image_part(picture: bytes | NDArray[np.uint8]) -> dict[str, Any]:
    """A PNG, JPEG or WebP file, or pixels [height, width, 3], as a part of a message's content. Raises UsageError for
    anything else and for what is too large."""
    data = picture if isinstance(picture, bytes) else png(picture)
    try:
        return {"type": "image_url", "image_url": {"url": images.read(data).url}}
    except ValueError as error:
        raise UsageError(str(error)) from None


def with_images(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of OpenAI's parts as our records have it: the texts are joined as they are, and
    each image says where it stood. Others stay. Raises ValueError for a part that is neither, and for an image that
    `agentrl.tokens.images` refuses."""
    content: Any = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    text, image_parts = "", list[ImagePart]()
    for number, part in enumerate(cast("list[Any]", content)):
        fields = cast("Mapping[str, Any]", part if isinstance(part, Mapping) else {})
        kind, value = fields.get("type"), fields.get(str(fields.get("type")))
        url = cast("Mapping[str, Any]", value).get("url") if isinstance(value, Mapping) else None
        if kind == "text" and isinstance(value, str):
            text += value
        elif kind == "image_url" and isinstance(url, str):
            try:
                images.from_url(url)
            except ValueError as error:
                raise ValueError(f"content[{number}]: {error}") from None
            image_parts.append(ImagePart(at=len(text), url=url))
        else:
            hint = "give {'type': 'text', 'text': …} or {'type': 'image_url', 'image_url': {'url': 'data:…'}}"
            raise ValueError(f"content[{number}] = {part!r:.60}: {hint}")
    return {**message, "content": text, **({"images": image_parts} if image_parts else {})}


def with_parts(message: Message) -> dict[str, Any]:
    """A message as OpenAI's API has it: one with images has a list of parts as content."""
    fields, parts, start = dict(message), list[dict[str, Any]](), 0
    shown = cast("list[ImagePart]", fields.pop("images", []))
    for image in shown:
        if text := message["content"][start : image["at"]]:
            parts.append({"type": "text", "text": text})
        parts.append({"type": "image_url", "image_url": {"url": image["url"]}})
        start = image["at"]
    if text := message["content"][start:]:
        parts.append({"type": "text", "text": text})
    return {**fields, "content": parts} if shown else fields
