"""The page of runs on a store of 100,000 episodes and two million turns: seconds of its answers, memory of its server.

    agentrl bench view [--episodes 100000] [--turns 20] [--rounds 5] [--pairs 5] [--folder DIR] [--out FILE.json]

The store gets its history by SQL (see `_store_rows`), and outcomes, endings and texts that differ. The server is the
command `agentrl view`. Each figure is the least of `--rounds` requests over HTTP, and beside it the mean of the CPU
that the server took for it: on a busy machine these are what the page itself costs. "First paint" needs Chromium: from
the navigation to the browser's first paint, and until the run's curves are there. Then a run goes on in the store, 100
turns a second, while ten viewers follow it and while nobody does, by turns. `--folder` keeps the store for another
time: it takes 2 GB of disk and two minutes.
Prints the table of view.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
from _store_rows import write_history
from _store_run import ANSWER, START, turn

from agentrl.config import parse
from agentrl.records import Task
from agentrl.run.run_folder import RunDir
from agentrl.store import Claim, RunStore

RARE, OFTEN = "needle in the haystack", "failing test"
EPISODES = {
    "newest first": {},
    "not solved": {"success": "no"},
    "an outcome": {"min": "0.5", "max": "0.5"},
    "ended by its length": {"stop": "turn_limit"},
    "late": {"late": "yes"},
    "left untrained": {"dropped": "yes"},
    "at least 20 turns": {"min_turns": "20"},
    "of a role": {"role": "critic"},
    "of weights 300 to 310": {"from_weights": "300", "to_weights": "310"},
    "of a step": {"step": "300"},
    "by length": {"sort": "tokens"},
    "page 1,000": {"offset": "50000"},
}
TEXTS = {
    "search: in most episodes": {"q": OFTEN},
    "search: in one episode": {"q": RARE},
    "search: nowhere": {"q": "zebra"},
}


def make_run(path: Path, episodes: int, turns: int) -> None:
    """The folder of a run with that many ended episodes."""
    document = {"name": "large", "model": "m", "env": {"id": "agentrl/CodeRepair-v0"}, "train": {"steps": 1000}}
    run = RunDir.create(path, parse(document))
    with RunStore.open(run.store_path) as store:
        write_history(store, episodes, turns)
    with closing(sqlite3.connect(run.store_path)) as store, store:
        store.execute(
            "UPDATE episodes SET outcome = iif(outcome IS NULL, NULL, (id * 7919 % 5) / 4.0),"
            " success = (id * 7919 % 5) = 4, n_tokens = n_tokens + id * 31 % 997, ended_s = ended_s + id % 60,"
            " stop_reason = iif(stop_reason = 'done' AND id % 3 = 0, 'turn_limit', stop_reason)"
        )
        store.execute("UPDATE episodes SET late = 1 WHERE id % 50 = 0 AND evaluation = 0")
        store.execute("UPDATE episodes SET dropped = 'stale' WHERE id % 40 = 0 AND evaluation = 0")
        store.execute("UPDATE turns SET role = 'critic' WHERE episode_id % 100 = 7 AND idx = 1")
        store.execute("UPDATE turns SET text = text || ? WHERE id = 777", (RARE,))


@contextmanager
def page(runs: Path, tree: Path | None = None) -> Generator[tuple[str, int]]:
    """The command beside us, of this working tree or of another: its address with the token, and its process."""
    words = [str(Path(sys.executable).with_name("agentrl")), "view", str(runs), "--port", "0"]
    env = os.environ if tree is None else {**os.environ, "PYTHONPATH": str(tree.resolve())}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=env) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip(), server.pid
        finally:
            server.terminate()


def memory_mb(pid: int) -> float:
    """The largest memory that a process has held."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1000


def answers(address: str, pid: int, rounds: int) -> dict[str, float]:
    """The least seconds of each answer, and the mean of the server's CPU for it."""
    base, _, token = address.partition("/#token=")
    asked: dict[str, tuple[str, dict[str, str]]] = {
        "list of runs": ("/api/runs", {}),
        "run": ("/api/runs/large", {}),
        "last minutes": ("/api/runs/large/lanes", {}),
        "curves": ("/api/runs/large/metrics", {"names": ",".join(f"value_{k}" for k in range(20))}),
        **{f"episodes: {name}": ("/api/runs/large/episodes", query) for name, query in EPISODES.items()},
        **{name: ("/api/runs/large/episodes", query) for name, query in TEXTS.items()},
        "episode": ("/api/runs/large/episodes/50000", {}),
        "group": ("/api/runs/large/groups/6000", {}),
        "step": ("/api/runs/large/steps/300", {}),
    }
    found: dict[str, float] = {}
    with httpx.Client(base_url=base, headers={"authorization": f"Bearer {token}"}, timeout=120) as client:
        for name, (path, query) in asked.items():
            spent: list[float] = []
            before = cpu_s(pid)
            for k in range(rounds):
                began = time.perf_counter()
                # an address of its own each time: the same ones would share an answer
                client.get(path, params={**query, "round": str(k)}).raise_for_status()
                spent.append(time.perf_counter() - began)
            found[name] = min(spent)
            found[f"{name}, CPU"] = (cpu_s(pid) - before) / rounds
    return found


def first_paint(address: str, rounds: int) -> dict[str, float]:
    """Seconds until a browser has painted the run's page, and until its curves are there; nothing without Chromium."""
    if (chromium := shutil.which("chromium")) is None:
        return {}
    from playwright.sync_api import sync_playwright

    base, _, token = address.partition("#")
    painted: list[float] = []
    whole: list[float] = []
    with (
        sync_playwright() as play,
        closing(play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])) as one,
    ):
        for _ in range(rounds):
            tab = one.new_context(viewport={"width": 1440, "height": 900}).new_page()
            tab.goto(f"{base}#{token}")
            tab.wait_for_selector("main > .page-runs")
            tab.goto("about:blank")
            began = time.perf_counter()
            tab.goto(f"{base}#/run/large")
            tab.wait_for_selector(".page-run .plot svg")
            whole.append(time.perf_counter() - began)
            entry = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
            painted.append(tab.evaluate(entry) / 1000)
            tab.context.close()
    return {"first paint": min(painted), "curves painted": min(whole)}


def watched(address: str, pid: int, store: Path, *, n: int, pairs: int) -> dict[str, float]:
    """What the page costs a run that goes on: CPU of a turn's write, by turns while `n` viewers follow the run
    and while nobody does; the CPU of the server meanwhile, as a share of a core."""
    with RunStore.open(store) as run:
        run.groups.add_groups([Task(index=0, env="agentrl/CodeRepair-v0", seed=0)], size=2 * pairs, purpose="train")
        claims = run.leases.claim("bench", 2 * pairs, lease_s=1e6)
        version = run.versions.current_version().version
        spent: dict[bool, list[float]] = {True: [], False: []}
        server: list[float] = []
        for k, claim in enumerate(claims):
            looking = bool(k % 2)
            with viewers(address, n if looking else 0, "large"):
                before, began = cpu_s(pid), time.perf_counter()
                spent[looking].append(_play(run, claim, version))
                if looking:
                    server.append((cpu_s(pid) - before) / (time.perf_counter() - began))
    cost = [100 * (a / b - 1) for a, b in zip(spent[True], spent[False], strict=True)]
    return {
        "a turn's write, nobody looks": statistics.median(spent[False]),
        f"a turn's write, {n} viewers": statistics.median(spent[True]),
        "difference of the pairs, %": statistics.median(cost),
        f"the server's share of a core, {n} viewers, %": 100 * statistics.median(server),
    }


def _play(run: RunStore, claim: Claim, version: int, turns: int = 400, pace_s: float = 0.01) -> float:
    """Write an episode at a run's pace; the mean CPU seconds of a turn and its answer."""
    run.journal.begin(claim.episode_id, claim.fence, START)
    spent = 0.0
    for index in range(turns):
        began = time.thread_time()
        run.journal.journal_turn(claim.episode_id, claim.fence, turn(index, version))
        run.journal.journal_step(claim.episode_id, claim.fence, index, ANSWER)
        spent += time.thread_time() - began
        time.sleep(pace_s)
    return spent / turns


@contextmanager
def viewers(address: str, n: int, run: str) -> Generator[None]:
    """So many viewers of a run's page, each with its news and its answers, all in a process of their own."""
    if n == 0:
        yield
        return
    words = [sys.executable, str(Path(__file__).with_name("_viewers.py")), address, str(n), run]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "all look\n"
            yield
            if process.poll() is not None:
                raise SystemExit("the viewers ended before their window did: it says nothing")
        finally:
            process.terminate()


def cpu_s(pid: int) -> float:
    """The CPU time of a process so far, to the microsecond: the clock that `clock_getcpuclockid(3)` names."""
    return time.clock_gettime((~pid << 3) | 2)


def table(found: dict[str, float]) -> str:
    """One figure a row."""

    def shown(name: str, value: float) -> str:
        if "memory" in name:
            return f"{value:,.0f} MB"
        if name.endswith("%"):
            return f"{value:.1f}"
        return f"{1000 * value:.2f} ms" if "write" in name else f"{1000 * value:,.0f} ms"

    rows = [
        f"| {name} | {shown(name, value)} | {shown(name, found[of]) if (of := f'{name}, CPU') in found else ''} |"
        for name, value in found.items()
        if not name.endswith(", CPU")
    ]
    return "\n".join(["| | least | CPU of the server |", "|---|---|---|", *rows])


def main() -> None:
    """Make the store unless it is there, ask the page, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        if not (folder / "large").exists():
            make_run(folder / "large", given.episodes, given.turns)
        found: dict[str, Any] = {}
        with page(folder) as (address, pid):
            found |= answers(address, pid, given.rounds)
            found |= first_paint(address, given.rounds)
            found |= watched(address, pid, folder / "large" / "store.sqlite", n=10, pairs=given.pairs)
            found["memory of the server"] = memory_mb(pid)
    print(table(found))
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
