"""How rows store records: token arrays as packed blobs, messages and infos as JSON, text as text. Exact both ways.

Owns the blob's layout and knows no table. A blob is these bytes, little-endian, compressed with zstandard::

    u8 width of a log-prob (4 or 8) · u32 P · u32 T · u32[P] prompt ids · u32[T] sampled ids · f32|f64[T] log-probs
    then, for each named column: u8 n · u8[n] name · u8 type code of Python's `array` · u32 bytes · the numbers

Engines compute log-probs in float32; a blob holds float32 only where that is exact, else float64. The experts of a
mixture of experts are these bytes, compressed in the same way::

    u8 width of an expert (1 or 2) · u32 first token · u16 layers · u16 experts a token · the array itself
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import sys
import threading
from array import array
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, Final

import zstandard

from agentrl.errors import StoreError, UnknownIdError
from agentrl.records import (
    Json,
    MemberRecord,
    Message,
    Messages,
    RoutedExperts,
    ShownTools,
    Step,
    StopReason,
    Task,
    Turn,
    VersionSpan,
)
from agentrl.tokens import columns, images

_HEADER = struct.Struct("<BII")
_COLUMN = struct.Struct("<BI")
_EXPERTS = struct.Struct("<BIHH")
_LEVEL = 3
_JSON: Final = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_CODES: Final = {"float32": "f", "float64": "d", "int32": "i", "int64": "q", "uint8": "B"}


def pack_tokens(turn: Turn) -> bytes:
    """The blob of a turn's prompt ids, sampled ids, log-probs and columns.

    Raises StoreError for an id that is no 32-bit unsigned integer or a log-prob that is not finite (law 1)."""
    # The sum is a quick test that runs in C: it is finite only if every number is. It may overflow although each is
    # finite, so a sum that is not finite is looked at one by one.
    if not math.isfinite(sum(turn.logprobs)) and not all(map(math.isfinite, turn.logprobs)):
        raise StoreError(f"turn {turn.index}: a sampled token's log-prob is not finite")
    logprobs = array("f", turn.logprobs)
    # The store never rounds a log-prob (law 1): half the bytes are taken only where they give back the very same
    # number.
    if tuple(logprobs) != turn.logprobs:
        logprobs = array("d", turn.logprobs)
    try:
        all_token_ids = array("I", (*turn.prompt_ids, *turn.token_ids))
    except (OverflowError, TypeError) as error:
        raise StoreError(f"turn {turn.index}: a token id is not an unsigned 32-bit integer: {error}") from error
    header = _HEADER.pack(logprobs.itemsize, len(turn.prompt_ids), len(turn.token_ids))
    packed_columns = pack_columns(turn.columns, len(turn.token_ids), f"turn {turn.index}")
    return _compressed(header + _little(all_token_ids) + _little(logprobs) + packed_columns)


def unpack_tokens(blob: bytes) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...], columns.Columns]:
    """Prompt ids [P], sampled ids [T], log-probs [T] and columns of a blob."""
    unpacked_blob = _decompressed(blob)
    logprob_bytes, prompt_count, token_count = _HEADER.unpack_from(unpacked_blob)
    all_token_ids = array("I")
    ids_end = _HEADER.size + all_token_ids.itemsize * (prompt_count + token_count)
    all_token_ids.frombytes(unpacked_blob[_HEADER.size : ids_end])
    logprobs = array("f" if logprob_bytes == 4 else "d")
    columns_start = ids_end + logprob_bytes * token_count
    logprobs.frombytes(unpacked_blob[ids_end:columns_start])
    if sys.byteorder == "big":
        all_token_ids.byteswap()
        logprobs.byteswap()
    return (
        tuple(all_token_ids[:prompt_count]),
        tuple(all_token_ids[prompt_count:]),
        tuple(logprobs),
        unpack_columns(unpacked_blob[columns_start:]),
    )


def with_columns(blob: bytes, named: columns.Columns, what: str) -> bytes:
    """A blob of tokens with more columns; those that it has stay. Raises StoreError as `pack_columns`."""
    unpacked_blob = _decompressed(blob)
    _, _, token_count = _HEADER.unpack_from(unpacked_blob)
    present_columns = unpack_tokens(blob)[3]
    # A second column of one name would only be appended, and a reader by name would get the later one: what was written
    # must not change.
    added_columns = {
        column_name: column_values for column_name, column_values in named.items() if column_name not in present_columns
    }
    return _compressed(unpacked_blob + pack_columns(added_columns, token_count, what))


def pack_columns(named: columns.Columns, n: int, what: str) -> bytes:
    """The columns of `n` tokens. Raises StoreError naming `what` for one that is not registered, has another length, or
    whose numbers its dtype cannot hold."""
    packed_parts = list[bytes]()
    try:
        columns.check(named, n)
        # By name and with the type in the blob, so that a process which never imported the package that registered a
        # column can read it back: the viewer, an export, the store of somebody else.
        for column_name, column_values in named.items():
            type_code = _CODES[columns.column(column_name).dtype]
            packed_values = _little(array(type_code, column_values))
            packed_parts += (
                bytes([len(column_name)]),
                column_name.encode(),
                _COLUMN.pack(ord(type_code), len(packed_values)),
                packed_values,
            )
    except (UnknownIdError, ValueError, TypeError, OverflowError) as error:
        raise StoreError(f"{what}: its columns cannot be written: {error}") from error
    return b"".join(packed_parts)


def unpack_columns(data: bytes) -> columns.Columns:
    """Read what `pack_columns` wrote, whether the columns are registered here or not."""
    columns_by_name, position = dict[str, tuple[float, ...]](), 0
    while position < len(data):
        name_end = position + 1 + data[position]
        type_code, value_bytes = _COLUMN.unpack_from(data, name_end)
        values_start = name_end + _COLUMN.size
        if values_start + value_bytes > len(data):
            raise StoreError("a column of a turn's tokens is cut off")
        column_values: array[Any] = array(chr(type_code))
        column_values.frombytes(data[values_start : values_start + value_bytes])
        if sys.byteorder == "big":
            column_values.byteswap()
        columns_by_name[data[position + 1 : name_end].decode()] = tuple(column_values)
        position = values_start + value_bytes
    return columns_by_name


def pack_experts(experts: RoutedExperts) -> bytes:
    """The blob of a turn's experts."""
    header = _EXPERTS.pack(experts.width, experts.start, experts.layers, experts.per_token)
    return _compressed(header + experts.data)


def unpack_experts(blob: bytes) -> RoutedExperts:
    """Read what `pack_experts` wrote."""
    unpacked_blob = _decompressed(blob)
    width, start, layers, per_token = _EXPERTS.unpack_from(unpacked_blob)
    return RoutedExperts(
        start=start, layers=layers, per_token=per_token, width=width, data=unpacked_blob[_EXPERTS.size :]
    )


class _Compressor(threading.local):
    """One of each thread: to make one takes longer than a turn's tokens. The four bytes of a checksum show that a bit
    of a blob changed, which would else be another token (law 1)."""

    def __init__(self) -> None:
        self.compress = zstandard.ZstdCompressor(_LEVEL, write_checksum=True).compress


_compressor = _Compressor()


def _compressed(data: bytes) -> bytes:
    return _compressor.compress(data)


def _decompressed(blob: bytes) -> bytes:
    """Raises ZstdError for a blob that was damaged."""
    try:
        return zstandard.decompress(blob)
    except MemoryError:  # of the size that its header says
        raise zstandard.ZstdError(f"a blob of {len(blob)} bytes says that it holds more than fits in memory") from None


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
    """Text for people, such as an error's: characters that UTF-8 cannot hold are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def to_json(value: Json, what: str) -> str:
    """Compact JSON. Raises StoreError naming `what` if the value is not JSON-safe (also for NaN and infinity)."""
    try:
        json_text = _JSON.encode(value)
        json_text.encode()
    except UnicodeEncodeError:
        # A lone surrogate may stand in JSON as an escape and not in UTF-8. Only such a value is written in ASCII: for
        # all others, escapes would make text that is not English two to three times as long.
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise StoreError(f"{what} is not JSON-safe: {error}") from error
    return json_text


def pack_messages(messages: Messages, what: str) -> str:
    """Messages as a JSON list, with the data of their images."""
    return to_json(list(messages), what)


def unpack_messages(text: str) -> Messages:
    """Read what `pack_messages` wrote."""
    messages: list[Message] = json.loads(text)
    return tuple(messages)


def pack_tools(tools: ShownTools) -> tuple[str, str]:
    """The digest and the text of a row of `tool_sets`; both are empty without tools."""
    if not tools.schemas:
        return "", ""
    packed_tools = to_json({"schemas": list(tools.schemas), "dialect": tools.dialect}, "the tools of an episode")
    return hashlib.sha256(packed_tools.encode()).hexdigest(), packed_tools


def unpack_tools(text: str) -> ShownTools:
    """Read the text that `pack_tools` wrote."""
    tool_fields = json.loads(text)
    return ShownTools(tuple(tool_fields["schemas"]), tool_fields["dialect"])


Blobs = dict[str, bytes]
"""The data of images, by digest."""


def without_images(messages: Messages, into: Blobs, what: str) -> Messages:
    """Messages whose images are named by digest; their data go `into` a dict. Raises StoreError for one that is no
    image."""
    if not any("images" in message for message in messages):  # most often
        return messages
    return tuple(_each_url(message, partial(_digest_of, into=into, what=what)) for message in messages)


def with_images(messages: Messages, data_of: Callable[[str], bytes]) -> Messages:
    """Messages that `without_images` made, with their images again; `data_of` gives the data of a digest."""
    if not any("images" in message for message in messages):
        return messages
    return tuple(_each_url(message, lambda url: _url_of(url, data_of)) for message in messages)


def _each_url(message: Message, changed: Callable[[str], str]) -> Message:
    if not (shown_images := message.get("images")):
        return message
    return {**message, "images": [{**shown_image, "url": changed(shown_image["url"])} for shown_image in shown_images]}


def _digest_of(url: str, into: Blobs, what: str) -> str:
    try:
        read_image = images.from_url(url)
    except ValueError as error:
        raise StoreError(f"{what}: {error}") from error
    into[read_image.digest] = read_image.data
    return images.STORED + read_image.digest


def _url_of(url: str, data_of: Callable[[str], bytes]) -> str:
    image_data = data_of(url.removeprefix(images.STORED))
    try:
        return images.read(image_data).url
    except ValueError as error:
        raise StoreError(f"the store's image {url!r} is damaged: {error}") from error


def pack_spans(spans: tuple[VersionSpan, ...]) -> str:
    """Version spans as JSON `[[version, start, end], …]`; a recomputed one has a 1 after these."""
    # A fourth number only where it says something: almost every turn has one span, and there is a row of these for each
    # turn of the run.
    span_numbers = ([span.version, span.start, span.end, *[1] * span.recomputed] for span in spans)
    return json.dumps(list(span_numbers), separators=(",", ":"))


def unpack_spans(text: str) -> tuple[VersionSpan, ...]:
    """Read what `pack_spans` wrote."""
    return tuple(VersionSpan(*span[:3], recomputed=len(span) > 3) for span in json.loads(text))


def pack_task(task: Task) -> str:
    """A task as JSON."""
    task_fields: dict[str, Json] = {"index": task.index, "env": task.env, "seed": task.seed}
    if task.kwargs:
        task_fields["kwargs"] = dict(task.kwargs)
    if task.options:
        task_fields["options"] = dict(task.options)
    return to_json(task_fields, f"task {task.index}")


def unpack_task(text: str) -> Task:
    """Read what `pack_task` wrote."""
    task_fields: dict[str, Any] = json.loads(text)
    return Task(**task_fields)


def pack_identity(task: Task) -> str:
    """A task's identity: equal for two tasks that are the same, wherever they stand in their source."""
    # Without the index, which says where a task stands in its source. The same row in a second epoch, or in a file with
    # lines added above it, is the same task, and stays in quarantine.
    return json.dumps([task.env, task.seed, dict(task.kwargs), dict(task.options)], sort_keys=True)


def pack_answer(step: Step, what: str) -> str:
    """All of a step but messages, reward and flags as one JSON object: gymnasium's info and the other fields.

    Raises StoreError for an info with a key that is a field of `Step`, or that is not JSON-safe."""
    # The fields of a step and the user's info share one JSON object, so a key of theirs with our name would be read
    # back as our field: an `info["outcome"]` would become a reward. It is refused, never renamed (law 8).
    if reserved_keys := sorted(_ANSWER.keys() & step.info):
        raise StoreError(f"{what}: info[{reserved_keys[0]!r}] is a field of the step: set that")
    step_fields = {
        field_name: field_value
        for field_name, field_default in _ANSWER.items()
        if (field_value := getattr(step, field_name)) != field_default
    }
    return to_json({**step.info, **step_fields}, f"{what}: info") if step_fields or step.info else "{}"


def unpack_answer(text: str) -> dict[str, Any]:
    """The fields of a step that `pack_answer` wrote, with `info`."""
    packed_fields: dict[str, Json] = json.loads(text)
    step_fields = {
        field_name: read_field(packed_fields.pop(field_name))
        for field_name, read_field in _READ.items()
        if field_name in packed_fields
    }
    return {**step_fields, "info": packed_fields}


def _read_roles(value: Json) -> dict[str, float]:
    return {str(role_name): float(role_value) for role_name, role_value in value.items()}


_READ: Final[Mapping[str, Callable[[Any], Any]]] = {
    "outcome": float,
    "success": bool,
    "stop_reason": StopReason,
    "history": tuple,
    "continues": int,
    "masked": bool,
    "role": str,
    "rewards": _read_roles,
    "outcomes": _read_roles,
    "unsettled": float,
    "observation_cut": int,
    "compaction": str,
}
_EMPTY: Final = Step(observation=())
_ANSWER: Final = {name: getattr(_EMPTY, name) for name in _READ}  # a field with its default was not set


_RECORD: Final = tuple(field.name for field in fields(MemberRecord))


def pack_record(record: Mapping[int, MemberRecord]) -> str:
    """The record that a group's members are judged against, by member, as JSON."""
    return json.dumps(
        {
            str(member_index): {field_name: getattr(member_record, field_name) for field_name in _RECORD}
            for member_index, member_record in record.items()
        }
    )


def unpack_record(text: str) -> dict[int, MemberRecord]:
    """Read what `pack_record` wrote; every number is the same."""
    return {
        int(member_index): MemberRecord(
            outcome=packed_member["outcome"],
            outcomes=packed_member["outcomes"],
            rewards={role_name: tuple(turn_rewards) for role_name, turn_rewards in packed_member["rewards"].items()},
            streams={
                role_name: {source_name: tuple(turn_values) for source_name, turn_values in role_sources.items()}
                for role_name, role_sources in packed_member["streams"].items()
            },
            weights=packed_member["weights"],
            states={role_name: tuple(turn_states) for role_name, turn_states in packed_member["states"].items()},
        )
        for member_index, packed_member in json.loads(text).items()
    }


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """Files by path as one compressed blob: u32 length of a JSON list of paths and lengths, the list, the contents."""
    listing = json.dumps([[file_path, len(file_data)] for file_path, file_data in files.items()]).encode()
    return _compressed(struct.pack("<I", len(listing)) + listing + b"".join(files.values()))


def unpack_files(blob: bytes) -> dict[str, bytes]:
    """Read what `pack_files` wrote."""
    unpacked_blob = _decompressed(blob)
    position = 4 + struct.unpack_from("<I", unpacked_blob)[0]
    files_by_path: dict[str, bytes] = {}
    for file_path, file_length in json.loads(unpacked_blob[4:position]):
        files_by_path[file_path] = unpacked_blob[position : position + file_length]
        position += file_length
    return files_by_path
