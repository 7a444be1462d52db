"""Writes the table of `benchmarks/conformance.md` from reports of `agentrl conformance --json`, a column each.

agentrl conformance --json > ours.json
agentrl conformance --trainer trl --python .venv-peers/bin/python --json > trl.json
python benchmarks/conformance.py ours.json trl.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from _page import write_between

PAGE = Path(__file__).with_suffix(".md")


def table(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The verdicts, then the evidence of each."""
    yield "| case | " + " | ".join(report["trainer"] for report in reports) + " |"
    yield "| --- " * (len(reports) + 1) + "|"
    for rows in zip(*(report["results"] for report in reports), strict=True):
        assert len({row["case"] for row in rows}) == 1, "the reports have different cases"
        verdicts = [f"**{row['verdict']}**" if row["verdict"] == "breaks" else row["verdict"] for row in rows]
        yield f"| `{rows[0]['case']}` | " + " | ".join(verdicts) + " |"
    for report in reports:
        versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        yield ""
        yield f"## {report['trainer']}"
        yield ""
        yield f"With {versions}."
        yield ""
        yield "| case | verdict | evidence |"
        yield "| --- | --- | --- |"
        for row in report["results"]:
            evidence = row["evidence"].replace("|", "\\|").replace("<", "&lt;")
            yield f"| `{row['case']}` | {row['verdict']} | {evidence} |"


if __name__ == "__main__":
    found = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
    write_between(PAGE, "<!-- reports -->", "<!-- end -->", table(found))
