"""Rows of task data: files and Hugging Face data sets. Read whole; a row is a JSON-safe object."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

from agentrl.env.optional_imports import require
from agentrl.errors import ConfigError, UsageError, boundary
from agentrl.records import Json

Rows = Sequence[Mapping[str, Json]]

_FORMATS: Final = ".jsonl, .json, .csv or .tsv (each also with .gz), .parquet, or hf:NAME[:CONFIG][:SPLIT]"


def read_rows(where: str) -> Rows:
    """The rows of a file, by the end of its name: `.jsonl` (also `.ndjson`), `.json` (an array of objects, or lines of
    them), `.csv` and `.tsv` (a line of names first; values are texts), each also with `.gz` behind it, or `.parquet`; a
    name without an end is one of JSON lines.
    Or of `hf:NAME`, `hf:NAME:SPLIT`, `hf:NAME:CONFIG:SPLIT`: a Hugging Face data set, of its split `train` if none is
    named. Text is UTF-8, with or without a byte order mark.

    Raises UsageError, naming file and line, for what cannot be read; for Parquet and Hugging Face the packages
    `pyarrow` and `datasets` must be installed."""
    if where.startswith("hf:"):
        return _plain(_of_hugging_face(where), where)
    file_path = Path(where)
    file_kind = file_path.with_suffix("").suffix if file_path.suffix == ".gz" else file_path.suffix
    try:
        if file_path.suffix == ".parquet":
            parquet_module = require("pyarrow.parquet", what=f"reading {where!r}")
            with boundary(UsageError, f"cannot read {where!r}:", passes=(UsageError,)):
                return _plain(parquet_module.read_table(file_path).to_pylist(), where)
        read_text = _READERS.get(file_kind or ".jsonl")
        if read_text is None:
            raise UsageError(f"cannot read {where!r}: give {_FORMATS}")
        file_bytes = file_path.read_bytes()
        file_text = (gzip.decompress(file_bytes) if file_path.suffix == ".gz" else file_bytes).decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as read_error:
        raise UsageError(f"{where} is no gzip file: {read_error}") from read_error
    except OSError as read_error:
        raise UsageError(f"cannot read {where!r}: {read_error.strerror or read_error}") from read_error
    except UnicodeDecodeError as read_error:
        raise UsageError(f"{where} is not UTF-8 text at byte {read_error.start}") from read_error
    return read_text(file_text, where)


def digest(where: str) -> str:
    """A digest of what `read_rows` reads; of a file's bytes if it is one. Raises UsageError."""
    if where.startswith("hf:"):
        return hashlib.sha256(json.dumps(read_rows(where), sort_keys=True).encode()).hexdigest()
    try:
        with Path(where).open("rb") as open_file:
            return hashlib.file_digest(open_file, "sha256").hexdigest()
    except OSError as read_error:
        raise UsageError(f"cannot read {where!r}: {read_error.strerror or read_error}") from read_error


def _of_hugging_face(where: str) -> list[Any]:
    set_name, *name_parts = where.removeprefix("hf:").split(":")
    if not set_name or len(name_parts) > 2 or not all(name_parts):
        raise ConfigError("rows", where, "give hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    datasets = require("datasets", what=f"reading {where!r}")
    config_name = name_parts[0] if len(name_parts) == 2 else None
    split_name = name_parts[-1] if name_parts else "train"
    with boundary(UsageError, f"cannot read {where!r} (hf:NAME:CONFIG:SPLIT):", passes=(UsageError,)):
        return datasets.load_dataset(set_name, config_name, split=split_name).to_list()


def _json_lines(text: str, where: str) -> list[Mapping[str, Json]]:
    read_lines: list[Mapping[str, Json]] = []
    for line_number, json_line in enumerate(text.split("\n"), start=1):  # splitlines would part a text at its U+2028
        if not json_line.strip():
            continue
        try:
            line_row: Any = decode_row(json_line)
        except ValueError as json_error:
            raise UsageError(f"{where}, line {line_number} is not JSON: {json_error}") from json_error
        if not isinstance(line_row, dict):
            raise UsageError(f"{where}, line {line_number} is not a JSON object")
        read_lines.append(cast("dict[str, Json]", line_row))
    return read_lines


def _json(text: str, where: str) -> list[Mapping[str, Json]]:
    """An array of objects; lines of objects otherwise, as many write them under this name too."""
    if not text.lstrip().startswith("["):
        return _json_lines(text, where)
    position, read_entries = text.index("[") + 1, list[Mapping[str, Json]]()
    while True:  # one by one, so that an error has a line
        position = _behind_space(text, position)
        if text[position : position + 1] == "]":
            break
        try:
            array_entry, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as json_error:
            line_number = getattr(json_error, "lineno", None) or text.count("\n", 0, position) + 1
            raise UsageError(f"{where}, line {line_number} is not JSON: {json_error}") from json_error
        if not isinstance(array_entry, dict):
            raise UsageError(
                f"{where}, line {text.count(chr(10), 0, position) + 1}: entry {len(read_entries)} is not a JSON object"
            )
        read_entries.append(cast("dict[str, Json]", array_entry))
        position = _behind_space(text, position)
        if text[position : position + 1] == ",":
            position += 1
        elif text[position : position + 1] != "]":
            raise UsageError(f"{where}, line {text.count(chr(10), 0, position) + 1} is not JSON: expected ',' or ']'")
    if text[position + 1 :].strip():
        raise UsageError(f"{where} is not JSON: there is more behind the array")
    return read_entries


def _behind_space(text: str, position: int) -> int:
    while text[position : position + 1].isspace():
        position += 1
    return position


def _table(text: str, where: str, delimiter: str) -> list[Mapping[str, Json]]:
    csv_lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    field_limit = csv.field_size_limit(len(text) + 1)  # a file may be a single long text; csv's own bound is 128 KiB
    try:
        column_names = next(csv_lines, list[str]())
        if not column_names or len(set(column_names)) < len(column_names) or not all(column_names):
            raise UsageError(f"{where}, line 1: {column_names} are not the names of columns")
        table_rows: list[Mapping[str, Json]] = []
        for line_values in csv_lines:
            if not line_values:
                continue
            if len(line_values) != len(column_names):
                raise UsageError(
                    f"{where}, line {csv_lines.line_num} has {len(line_values)} values for {len(column_names)} columns"
                )
            table_rows.append(dict(zip(column_names, line_values, strict=True)))
    except csv.Error as csv_error:
        raise UsageError(f"{where}, line {csv_lines.line_num} is not CSV: {csv_error}") from csv_error
    finally:
        csv.field_size_limit(field_limit)
    return table_rows


def _csv(text: str, where: str) -> list[Mapping[str, Json]]:
    return _table(text, where, ",")


def _tsv(text: str, where: str) -> list[Mapping[str, Json]]:
    return _table(text, where, "\t")


_READERS: Final[Mapping[str, Callable[[str, str], Rows]]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _tsv,
}


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number that JSON has")


def _finite(digits: str) -> float:
    float_value = float(digits)
    return float_value if math.isfinite(float_value) else _refuse(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ: of two values under one key JSON readers drop the first."""
    object_values = dict(pairs)
    if len(object_values) < len(pairs):
        key_names = [key_name for key_name, _ in pairs]
        doubled_key = next(key_name for key_name in key_names if key_names.count(key_name) > 1)
        raise ValueError(f"the key {doubled_key!r:.60} stands twice in an object")
    return object_values


# Stricter than `json.loads`: NaN, 1e999 and a key that stands twice are all read without a word by Python, and each
# changes the data (infinity, or the first of two values lost).
_DECODER: Final = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_object)


def decode_row(line: str) -> Any:
    """Decode a line of JSON. Raises ValueError, also for NaN, numbers that are not finite, keys that stand twice in an
    object, and values in values without end."""
    try:
        return _DECODER.decode(line)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _plain(rows: list[Any], where: str) -> list[Mapping[str, Json]]:
    """Rows of typed columns as JSON has them: dates and decimals become texts; bytes are refused."""
    try:
        return json.loads(json.dumps(rows, default=_as_text, allow_nan=False))
    except (TypeError, ValueError):
        # Only after the whole has failed: looking at each value of a large data set takes many times as long as one
        # call that encodes it.
        for row_index, typed_row in enumerate(rows):
            for column_name, cell_value in cast("dict[str, Any]", typed_row).items():
                try:
                    json.dumps(cell_value, default=_as_text, allow_nan=False)
                except (TypeError, ValueError) as json_error:
                    problem = f"JSON cannot carry column {column_name!r} = {cell_value!r:.60}: {json_error}"
                    raise UsageError(f"{where}, row {row_index}: {problem}") from json_error
        raise


def _as_text(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("bytes; decode the column first")
    return str(value)
