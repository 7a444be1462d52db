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
    path = Path(where)
    kind = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    try:
        if path.suffix == ".parquet":
            table = require("pyarrow.parquet", what=f"reading {where!r}")
            with boundary(UsageError, f"cannot read {where!r}:", passes=(UsageError,)):
                return _plain(table.read_table(path).to_pylist(), where)
        read = _READERS.get(kind or ".jsonl")
        if read is None:
            raise UsageError(f"cannot read {where!r}: give {_FORMATS}")
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{where} is no gzip file: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {where!r}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text at byte {error.start}") from error
    return read(text, where)


def digest(where: str) -> str:
    """A digest of what `read_rows` reads; of a file's bytes if it is one. Raises UsageError."""
    if where.startswith("hf:"):
        return hashlib.sha256(json.dumps(read_rows(where), sort_keys=True).encode()).hexdigest()
    try:
        with Path(where).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read {where!r}: {error.strerror or error}") from error


def _of_hugging_face(where: str) -> list[Any]:
    name, *parts = where.removeprefix("hf:").split(":")
    if not name or len(parts) > 2 or not all(parts):
        raise ConfigError("rows", where, "give hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    datasets = require("datasets", what=f"reading {where!r}")
    config, split = (parts[0] if len(parts) == 2 else None), (parts[-1] if parts else "train")
    with boundary(UsageError, f"cannot read {where!r} (hf:NAME:CONFIG:SPLIT):", passes=(UsageError,)):
        return datasets.load_dataset(name, config, split=split).to_list()


def _json_lines(text: str, where: str) -> list[Mapping[str, Json]]:
    rows: list[Mapping[str, Json]] = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would part a text at its U+2028
        if not line.strip():
            continue
        try:
            row: Any = decode_row(line)
        except ValueError as error:
            raise UsageError(f"{where}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{where}, line {number} is not a JSON object")
        rows.append(cast("dict[str, Json]", row))
    return rows


def _json(text: str, where: str) -> list[Mapping[str, Json]]:
    """An array of objects; lines of objects otherwise, as many write them under this name too."""
    if not text.lstrip().startswith("["):
        return _json_lines(text, where)
    position, rows = text.index("[") + 1, list[Mapping[str, Json]]()
    while True:  # one by one, so that an error has a line
        position = _behind_space(text, position)
        if text[position : position + 1] == "]":
            break
        try:
            row, position = _DECODER.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            line = getattr(error, "lineno", None) or text.count("\n", 0, position) + 1
            raise UsageError(f"{where}, line {line} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(
                f"{where}, line {text.count(chr(10), 0, position) + 1}: entry {len(rows)} is not a JSON object"
            )
        rows.append(cast("dict[str, Json]", row))
        position = _behind_space(text, position)
        if text[position : position + 1] == ",":
            position += 1
        elif text[position : position + 1] != "]":
            raise UsageError(f"{where}, line {text.count(chr(10), 0, position) + 1} is not JSON: expected ',' or ']'")
    if text[position + 1 :].strip():
        raise UsageError(f"{where} is not JSON: there is more behind the array")
    return rows


def _behind_space(text: str, position: int) -> int:
    while text[position : position + 1].isspace():
        position += 1
    return position


def _table(text: str, where: str, delimiter: str) -> list[Mapping[str, Json]]:
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    bound = csv.field_size_limit(len(text) + 1)  # a file may be a single long text; csv's own bound is 128 KiB
    try:
        names = next(lines, list[str]())
        if not names or len(set(names)) < len(names) or not all(names):
            raise UsageError(f"{where}, line 1: {names} are not the names of columns")
        rows: list[Mapping[str, Json]] = []
        for values in lines:
            if not values:
                continue
            if len(values) != len(names):
                raise UsageError(f"{where}, line {lines.line_num} has {len(values)} values for {len(names)} columns")
            rows.append(dict(zip(names, values, strict=True)))
    except csv.Error as error:
        raise UsageError(f"{where}, line {lines.line_num} is not CSV: {error}") from error
    finally:
        csv.field_size_limit(bound)
    return rows


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
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys differ: of two values under one key JSON readers drop the first."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.60} stands twice in an object")
    return values


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
        for number, row in enumerate(rows):
            for column, value in cast("dict[str, Any]", row).items():
                try:
                    json.dumps(value, default=_as_text, allow_nan=False)
                except (TypeError, ValueError) as error:
                    problem = f"{where}, row {number}: JSON cannot carry column {column!r} = {value!r:.60}: {error}"
                    raise UsageError(problem) from error
        raise


def _as_text(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("bytes; decode the column first")
    return str(value)
