"""Check backends, and keep the tables of the page about them.

`python -m agentrl.testing.sandbox bubblewrap docker --image IMAGE --write docs/reference/sandbox-promises.md`.
Without `--write` the tables are printed."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import trio

from agentrl.errors import UsageError
from agentrl.sandbox import backend
from agentrl.testing.sandbox import Report, check_sandbox, tables

BEGIN, END = "<!-- tables: made by python -m agentrl.testing.sandbox -->", "<!-- end of tables -->"


def main(argv: Sequence[str] | None = None) -> int:
    """Check registered backends and print or write the tables; exit code 1 if any promise is broken."""
    parser = argparse.ArgumentParser(prog="python -m agentrl.testing.sandbox", description=main.__doc__)
    parser.add_argument("backends", nargs="+", help="registry ids: bubblewrap, docker, ...")
    parser.add_argument("--image", help="image of the backend docker")
    parser.add_argument("--write", type=Path, help="a document whose tables are replaced")
    chosen = parser.parse_args(argv)
    reports = trio.run(_check_all, list(chosen.backends), chosen.image)
    text = tables(reports)
    if chosen.write is None:
        print(text)
    else:
        chosen.write.write_text(with_tables(chosen.write.read_text(), text))
    for report in reports:
        for outcome in report.failed:
            print(f"{report.backend}: {outcome.case.name}: {outcome.problem}")
    return 1 if any(report.failed for report in reports) else 0


def with_tables(document: str, text: str) -> str:
    """The document with `text` between the marks. Raises UsageError if the marks are missing."""
    before, mark, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        raise UsageError(f"the document lacks the marks {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


async def _check_all(names: Sequence[str], image: str | None) -> list[Report]:
    reports: list[Report] = []
    for name in names:
        each = backend(name, **({"image": image} if image and name == "docker" else {}))
        try:
            reports.append(await check_sandbox(each))
        finally:
            await each.aclose()
    return reports


if __name__ == "__main__":
    raise SystemExit(main())
