"""Pages whose tables are written by the benchmarks that measure them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def write_between(page: Path, begin: str, end: str, lines: Iterable[str]) -> None:
    """Put lines between two marks of a page, in place of those that are there."""
    before, rest = page.read_text().split(begin)
    text = "\n".join(lines)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}")
