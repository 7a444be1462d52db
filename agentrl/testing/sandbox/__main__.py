"""Check backends, and keep the tables of the page about them.

`python -m agentrl.testing.sandbox bubblewrap docker --image IMAGE --write benchmarks/sandbox_promises.md`.
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
    options = parser.parse_args(argv)
    reports = trio.run(_check_all, list(options.backends), options.image)
    table_text = tables(reports)
    if options.write is None:
        print(table_text)
    else:
        options.write.write_text(with_tables(options.write.read_text(), table_text))
    for report in reports:
        for outcome in report.failed:
            print(f"{report.backend}: {outcome.case.name}: {outcome.problem}")
    return 1 if any(report.failed for report in reports) else 0


def with_tables(document: str, text: str) -> str:
    """The document with `text` between the marks. Raises UsageError if the marks are missing."""
    before, begin_mark, after_begin = document.partition(BEGIN)
    _, end_mark, after = after_begin.partition(END)
    if not begin_mark or not end_mark:
        raise UsageError(f"the document lacks the marks {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{text}\n{END}{after}"


async def _check_all(names: Sequence[str], image: str | None) -> list[Report]:
    reports: list[Report] = []
    for backend_name in names:
        sandbox_backend = backend(backend_name, **({"image": image} if image and backend_name == "docker" else {}))
        try:
            reports.append(await check_sandbox(sandbox_backend))
        finally:
            await sandbox_backend.aclose()
    return reports


if __name__ == "__main__":
    raise SystemExit(main())
