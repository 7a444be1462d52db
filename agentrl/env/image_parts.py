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
    pixel_height, pixel_width, _ = pixels_HWC.shape
    # Each line begins with its filter: 0, none.
    filtered_lines = np.zeros((pixel_height, 1 + 3 * pixel_width), dtype=np.uint8)
    filtered_lines[:, 1:] = pixels_HWC.reshape(pixel_height, 3 * pixel_width)
    image_header = struct.pack(">IIBBBBB", pixel_width, pixel_height, 8, 2, 0, 0, 0)
    png_chunks = ((b"IHDR", image_header), (b"IDAT", zlib.compress(filtered_lines.tobytes(), 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(chunk_kind, chunk_data) for chunk_kind, chunk_data in png_chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def image_part(picture: bytes | NDArray[np.uint8]) -> dict[str, Any]:
    """A PNG, JPEG or WebP file, or pixels [height, width, 3], as a part of a message's content. Raises UsageError for
    anything else and for what is too large."""
    file_bytes = picture if isinstance(picture, bytes) else png(picture)
    try:
        return {"type": "image_url", "image_url": {"url": images.read(file_bytes).url}}
    except ValueError as image_error:
        raise UsageError(str(image_error)) from None


def with_images(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is a list of OpenAI's parts as our records have it: the texts are joined as they are, and
    each image says where it stood. Others stay. Raises ValueError for a part that is neither, and for an image that
    `agentrl.tokens.images` refuses."""
    content: Any = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    joined_text, image_parts = "", list[ImagePart]()
    for part_index, content_part in enumerate(cast("list[Any]", content)):
        part_fields = cast("Mapping[str, Any]", content_part if isinstance(content_part, Mapping) else {})
        part_kind, part_value = part_fields.get("type"), part_fields.get(str(part_fields.get("type")))
        image_url = cast("Mapping[str, Any]", part_value).get("url") if isinstance(part_value, Mapping) else None
        if part_kind == "text" and isinstance(part_value, str):
            joined_text += part_value
        elif part_kind == "image_url" and isinstance(image_url, str):
            try:
                images.from_url(image_url)
            except ValueError as image_error:
                raise ValueError(f"content[{part_index}]: {image_error}") from None
            image_parts.append(ImagePart(at=len(joined_text), url=image_url))
        else:
            correction = "give {'type': 'text', 'text': …} or {'type': 'image_url', 'image_url': {'url': 'data:…'}}"
            raise ValueError(f"content[{part_index}] = {content_part!r:.60}: {correction}")
    return {**message, "content": joined_text, **({"images": image_parts} if image_parts else {})}


def with_parts(message: Message) -> dict[str, Any]:
    """A message as OpenAI's API has it: one with images has a list of parts as content."""
    message_fields, content_parts, text_start = dict(message), list[dict[str, Any]](), 0
    shown_images = cast("list[ImagePart]", message_fields.pop("images", []))
    for shown_image in shown_images:
        if text_between := message["content"][text_start : shown_image["at"]]:
            content_parts.append({"type": "text", "text": text_between})
        content_parts.append({"type": "image_url", "image_url": {"url": shown_image["url"]}})
        text_start = shown_image["at"]
    if text_between := message["content"][text_start:]:
        content_parts.append({"type": "text", "text": text_between})
    return {**message_fields, "content": content_parts} if shown_images else message_fields
