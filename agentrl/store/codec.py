"""How records lie in rows: token arrays as packed blobs, messages and infos as JSON, text as text. Exact both ways.

Owns the blob's layout and knows no table. A blob is zstandard over, little-endian::

    u8 width of a log-prob (4 or 8) · u32 P · u32 T · u32[P] prompt ids · u32[T] sampled ids · f32|f64[T] log-probs

Log-probs are float32 in the engines that make them; they are stored so only where that is exact. The experts of a
mixture are zstandard over::

    u8 width of an expert (1 or 2) · u32 first token · u16 layers · u16 experts a token · the array itself
"""

from __future__ import annotations

import json
import math
import struct
import sys
from array import array
from collections.abc import Mapping
from typing import Any

import zstandard

from agentrl.errors import StoreError
from agentrl.records import Json, Message, Messages, RoutedExperts, Task, Turn, VersionSpan

_HEADER = struct.Struct("<BII")
_EXPERTS = struct.Struct("<BIHH")
_LEVEL = 3


def pack_tokens(turn: Turn) -> bytes:
    """The blob of a turn's prompt ids, sampled ids and log-probs.

    Raises StoreError for an id that is no 32-bit unsigned integer or a log-prob that is not finite (law 1)."""
    if not all(map(math.isfinite, turn.logprobs)):
        raise StoreError(f"turn {turn.index}: a sampled token's log-prob is not finite")
    logprobs = array("f", turn.logprobs)
    if tuple(logprobs) != turn.logprobs:
        logprobs = array("d", turn.logprobs)
    try:
        ids = array("I", (*turn.prompt_ids, *turn.token_ids))
    except (OverflowError, TypeError) as error:
        raise StoreError(f"turn {turn.index}: a token id is not an unsigned 32-bit integer: {error}") from error
    header = _HEADER.pack(logprobs.itemsize, len(turn.prompt_ids), len(turn.token_ids))
    return zstandard.compress(header + _little(ids) + _little(logprobs), _LEVEL)


def unpack_tokens(blob: bytes) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Prompt ids [P], sampled ids [T] and log-probs [T] of a blob."""
    data = zstandard.decompress(blob)
    width, n_prompt, n_tokens = _HEADER.unpack_from(data)
    ids = array("I")
    end = _HEADER.size + ids.itemsize * (n_prompt + n_tokens)
    ids.frombytes(data[_HEADER.size : end])
    logprobs = array("f" if width == 4 else "d")
    logprobs.frombytes(data[end:])
    if sys.byteorder == "big":
        ids.byteswap()
        logprobs.byteswap()
    return tuple(ids[:n_prompt]), tuple(ids[n_prompt:]), tuple(logprobs)


def pack_experts(experts: RoutedExperts) -> bytes:
    """The blob of a turn's experts."""
    header = _EXPERTS.pack(experts.width, experts.start, experts.layers, experts.per_token)
    return zstandard.compress(header + experts.data, _LEVEL)


def unpack_experts(blob: bytes) -> RoutedExperts:
    """Read what `pack_experts` wrote."""
    data = zstandard.decompress(blob)
    width, start, layers, per_token = _EXPERTS.unpack_from(data)
    return RoutedExperts(start=start, layers=layers, per_token=per_token, width=width, data=data[_EXPERTS.size :])


def _little(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def pack_text(text: str) -> str | bytes:
    """Model output may hold lone surrogates, which no UTF-8 column takes: such text is stored as bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def unpack_text(stored: str | bytes) -> str:
    """Read what `pack_text` wrote."""
    return stored if isinstance(stored, str) else stored.decode("utf-8", "surrogatepass")


def printable(text: str) -> str:
    """Text for people, such as an error's: what UTF-8 cannot hold is escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def to_json(value: Json, what: str) -> str:
    """Compact JSON. Raises StoreError naming `what` if the value is not JSON-safe (also for NaN and infinity)."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise StoreError(f"{what} is not JSON-safe: {error}") from error
    return text


def pack_messages(messages: Messages, what: str) -> str:
    """Messages as a JSON list."""
    return to_json(list(messages), what)


def unpack_messages(text: str) -> Messages:
    """Read what `pack_messages` wrote."""
    messages: list[Message] = json.loads(text)
    return tuple(messages)


def pack_spans(spans: tuple[VersionSpan, ...]) -> str:
    """Version spans as JSON `[[version, start, end], …]`."""
    return json.dumps([[span.version, span.start, span.end] for span in spans], separators=(",", ":"))


def unpack_spans(text: str) -> tuple[VersionSpan, ...]:
    """Read what `pack_spans` wrote."""
    return tuple(VersionSpan(version, start, end) for version, start, end in json.loads(text))


def pack_task(task: Task) -> str:
    """A task as JSON."""
    fields: dict[str, Json] = {"index": task.index, "env": task.env, "seed": task.seed}
    if task.kwargs:
        fields["kwargs"] = dict(task.kwargs)
    if task.options:
        fields["options"] = dict(task.options)
    return to_json(fields, f"task {task.index}")


def unpack_task(text: str) -> Task:
    """Read what `pack_task` wrote."""
    fields: dict[str, Any] = json.loads(text)
    return Task(**fields)


def pack_identity(task: Task) -> str:
    """What makes two tasks the same, wherever they stand in their source."""
    return json.dumps([task.env, task.seed, dict(task.kwargs), dict(task.options)], sort_keys=True)


def pack_info(info: Mapping[str, Json], what: str) -> str:
    """A step's info as a JSON object."""
    return to_json(dict(info), what) if info else "{}"
