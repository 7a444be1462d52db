"""Rows of task data: JSON lines, Parquet, Hugging Face data sets. Read whole; a row is a JSON-safe object."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from agentrl.env.optional import require
from agentrl.errors import UsageError
from agentrl.records import Json


def read_rows(where: str) -> Sequence[Mapping[str, Json]]:
    """The rows of `file.jsonl`, `file.parquet`, or `hf:NAME[:SPLIT]` (a Hugging Face data set, split `train`).

    Raises UsageError, naming file and line, for what cannot be read; for Parquet and Hugging Face the packages
    `pyarrow` and `datasets` must be installed."""
    if where.startswith("hf:"):
        name, _, split = where.removeprefix("hf:").partition(":")
        return _plain(
            require("datasets", what=f"reading {where!r}").load_dataset(name, split=split or "train").to_list(), where
        )
    path = Path(where)
    try:
        if path.suffix == ".parquet":
            return _plain(require("pyarrow.parquet", what=f"reading {where!r}").read_table(path).to_pylist(), where)
        return _json_lines(path.read_text(encoding="utf-8"), where)
    except OSError as error:
        raise UsageError(f"cannot read {where!r}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8 text at byte {error.start}") from error


def _json_lines(text: str, where: str) -> list[Mapping[str, Json]]:
    rows: list[Mapping[str, Json]] = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would part a text at its U+2028
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{where}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise UsageError(f"{where}, line {number} is not a JSON object")
        rows.append(cast("dict[str, Json]", row))
    return rows


def _plain(rows: list[Any], where: str) -> list[Mapping[str, Json]]:
    """Rows of typed columns as JSON has them: dates and decimals become texts; bytes are refused."""
    try:
        return json.loads(json.dumps(rows, default=_as_text, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where} has a column that JSON cannot carry: {error}") from error


def _as_text(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("bytes; decode the column first")
    return str(value)
