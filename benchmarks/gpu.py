"""What runs on an NVIDIA GPU, checked by one command: named cases, the most valuable first.

Each case is a child process with a deadline of its own: one that fails, or hangs, costs the others nothing, and rows
that it had printed by then are kept. A case that this machine cannot run is skipped, and says why. The results are
lines of JSON in `$OUT/gpu.json` (or `--out`), and a table beside it; `--publish` puts the table into
`benchmarks/gpu.md` instead.

    python3 benchmarks/gpu.py [--only NAME ...] [--tiny] [--out FILE] [--publish]
    python3 benchmarks/gpu.py --list

`--tiny` runs the same code on a CPU at tiny size, so that no case first fails on the machine that costs money. Nothing
has to be installed but the packages: the checkout itself is the program.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _gpu_case import CASES, Bench, Case, Skipped

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TABLE = HERE / "gpu.md"
SHARED_MEMORY = Path("/dev/shm")
ROOM = 40 << 30  # bytes that model folders may take


def child(name: str, bench: Bench) -> int:
    """Run one case here; each of its rows is a line of JSON. Returns the exit status."""
    try:
        bench.check()
        for row in CASES[name].run(bench):
            print(json.dumps({"row": row}), flush=True)
    except Skipped as why:
        print(json.dumps({"skipped": str(why)}), flush=True)
    except Exception as error:  # the parent reports it; whatever it is, other cases go on
        traceback.print_exc()
        print(json.dumps({"failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}))
        return 1
    return 0


def run(case: Case, bench: Bench, environment: Mapping[str, str]) -> dict[str, Any]:
    """One case in a child. Its status is ok, failed, skipped or late."""
    command = [sys.executable, str(HERE / "gpu.py"), "--child", case.name, "--work", str(bench.work)]
    command += ["--tiny"] if bench.tiny else []
    began = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, env=dict(environment), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    late = False
    try:
        said, _ = process.communicate(timeout=case.deadline_s)
    except subprocess.TimeoutExpired:
        late = True
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return result(case, said, process.returncode, late=late, seconds=time.perf_counter() - began)


def result(case: Case, said: str, code: int, *, late: bool, seconds: float) -> dict[str, Any]:
    """What a child's output comes to. Libraries may print lines of their own between the rows."""
    told = [json.loads(line) for line in said.splitlines() if line.startswith('{"') and line.endswith("}")]
    found: dict[str, Any] = {"case": case.name, "status": "ok", "seconds": round(seconds, 1)}
    if late:
        found |= {"status": "late", "why": f"not done after {case.deadline_s} s"}
    elif why := next((one["skipped"] for one in told if "skipped" in one), None):
        found |= {"status": "skipped", "why": why}
    elif code:
        failed = (one["failed"] for one in told if "failed" in one)
        found |= {"status": "failed", "why": next(failed, f"exit status {code}")}
    return {**found, "rows": [one["row"] for one in told if "row" in one]}


def scratch_folder() -> Path | None:
    """Where model folders are written: shared memory if it has room, else where temporary files go."""
    roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM
    return SHARED_MEMORY if roomy else None


def installed(folder: Path) -> dict[str, str]:
    """The environment of a child in which this checkout is installed, with the entry points of pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"agentrl-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: agentrl\nVersion: {project['version']}\n")
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    paths = [HERE, ROOT, ROOT / "environments", ROOT / "tools", folder]
    given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), *given])}


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """The results as Markdown."""
    lines = ["# What was checked on a GPU", "", "`python3 benchmarks/gpu.py` wrote this; see `docs/how-to/gpu.md`.", ""]
    lines += ["| case | status | s | |", "|---|---|---|---|"]
    lines += [f"| {one['case']} | {one['status']} | {one['seconds']} | {one.get('why', '')} |" for one in results]
    for one in results:
        if not one["rows"]:
            continue
        names = list(dict.fromkeys(name for row in one["rows"] for name in row))
        lines += ["", f"## {one['case']}", "", CASES[one["case"]].says, ""]
        lines += [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
        lines += [f"| {' | '.join(shown(row.get(name)) for name in names)} |" for row in one["rows"]]
    return "\n".join(lines) + "\n"


def shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value).replace("|", "/")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=list(CASES), metavar="NAME", default=list(CASES))
    parser.add_argument("--tiny", action="store_true", help="on the CPU, at tiny size")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "gpu.json")
    parser.add_argument("--publish", action="store_true", help=f"write the table to {TABLE.relative_to(ROOT)}")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        return child(chosen.child, Bench.here(chosen.work, tiny=chosen.tiny))
    if chosen.list:
        for case in CASES.values():
            print(f"{case.name:12} {case.deadline_s:4} s  {case.says}")
        return 0
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=scratch_folder()) as scratch:
        environment = installed(Path(scratch) / "site")
        bench = Bench.here(Path(scratch), tiny=chosen.tiny)
        for name in chosen.only:
            print(f"== {name} (at most {CASES[name].deadline_s} s)", file=sys.stderr, flush=True)
            results.append(run(CASES[name], bench, environment))
            print(json.dumps(results[-1]), flush=True)
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            chosen.out.write_text("".join(json.dumps(one) + "\n" for one in results))
            (TABLE if chosen.publish else chosen.out.with_suffix(".md")).write_text(table(results))
    return 1 if any(one["status"] in ("failed", "late") for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
