"""`python -m agentrl.testing.sandbox bubblewrap docker`: the tables of docs/sandbox.md."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import trio

from agentrl.sandbox import backend
from agentrl.testing.sandbox import Report, check_sandbox, tables


def main(argv: Sequence[str] | None = None) -> int:
    """Check registered backends and print the tables; exit code 1 if any promise is broken."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("backends", nargs="+", help="registry ids: bubblewrap, docker, ...")
    names: list[str] = parser.parse_args(argv).backends

    async def check_all() -> list[Report]:
        reports: list[Report] = []
        for name in names:
            each = backend(name)
            try:
                reports.append(await check_sandbox(each))
            finally:
                await each.aclose()
        return reports

    reports = trio.run(check_all)
    print(tables(reports))
    return 1 if any(report.failed for report in reports) else 0


if __name__ == "__main__":
    raise SystemExit(main())
