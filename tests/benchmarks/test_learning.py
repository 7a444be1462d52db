"""The table of learning: its runs can begin, finished ones are kept, and its page is that of its rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import learning
import pytest
from each_case import each_case

from agentrl import config, registry


@each_case("configuration", learning.configurations())
def test_each_configuration_is_a_run_that_can_begin(configuration: learning.Configuration) -> None:
    chosen = config.load(learning.RUN_FILE, [*learning.CHEAP, *configuration.settings])
    assert (chosen.train.steps, chosen.buffer.groups_per_step) == (80, 4)
    assert [(held_out.name, held_out.n) for held_out in chosen.eval.sets] == [("held_out", learning.TASKS)]


def test_every_algorithm_has_a_configuration() -> None:
    tried = {
        config.load(learning.RUN_FILE, one.settings).algo.kind  # of its own name, too: a new kind is found by it
        for one in learning.configurations()
    }
    assert tried == set(registry.ids("algorithms")) - {"rloo", "distil"}
    grpo, rloo = (config.algorithm(kind)().model_dump(exclude={"kind"}) for kind in ("grpo", "rloo"))
    assert grpo == rloo  # one serves for both


def test_the_page_is_that_of_the_rows() -> None:
    """Nobody wrote into its table by hand, and it holds every row that is there."""
    rows = json.loads((learning.HERE / "learning.json").read_text())
    between = learning.PAGE.read_text().split(learning.BEGIN)[1].split(learning.END)[0].strip()
    measured = [line for line in between.splitlines() if "Not run" not in line]  # a new algorithm has no rows yet
    assert measured == [line for line in learning.table(rows, learning.configurations()) if "Not run" not in line]


STEP = {"kind": "step", "lag_mean": 1.0, "success_mean": 0.5, "groups_skipped": 2, "groups_without_signal": 0}
SUMMARY = {
    "eval": {"sets": {"held_out": {"before": {"success": 0.4}, "after": {"success": 0.9}}}},
    "steps": 1,
    "episodes": 8,
    "tokens_trained": 100,
    "max_lag_seen": 2,
    "wall_s": 3.0,
}
WROTE = f"""
import json, pathlib, sys, time
assert "algo.kind=ppo" not in sys.argv, "it failed"
folder = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
folder.mkdir()
(folder / "summary.json").write_text({json.dumps(json.dumps(SUMMARY))})
(folder / "metrics.jsonl").write_text({json.dumps(json.dumps(STEP))})
"""
HANGS = """
import os, time
with open(os.environ["BEGUN"], "a") as begun:
    begun.write(f"{os.getpid()}\\n")
time.sleep(600)
"""


def learn(monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    """What `agentrl bench learning` ends with."""
    monkeypatch.setattr("sys.argv", ["learning", *words])
    with pytest.raises(SystemExit) as ended:
        learning.main()
    return ended.value.code


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each page had; runs are processes that only write what a run ends with."""
    pages: list[int] = []
    monkeypatch.setattr(learning, "publish", lambda rows: pages.append(len(rows)))
    monkeypatch.setattr(learning, "PROGRAM", (sys.executable, "-S", "-c", WROTE))
    monkeypatch.setattr(learning, "LOOK_S", 0.01)
    monkeypatch.setattr(learning.signal, "signal", lambda number, handler: None)
    return pages


def test_finished_runs_are_kept_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    words = ("--out", str(out), "--seeds", "1", "--jobs", "2", "--only")
    assert learn(monkeypatch, *words, "grpo") == 0
    first = out.read_text()
    assert learn(monkeypatch, *words, "grpo", "ppo", "gspo") == "1 runs failed"
    assert "ppo, seed 1 failed" in (said := capfd.readouterr().err) and "AssertionError: it failed" in said
    assert [one["configuration"] for one in json.loads(out.read_text())] == ["grpo", "gspo"]
    assert json.loads(out.read_text())[0] == json.loads(first)[0]
    assert published == [1, 2]
    assert learn(monkeypatch, *words, "dapo", "--most-minutes", "0") == 0
    assert published == [1, 2, 2]


@each_case("how", ["SIGTERM", "SIGINT", "the time is over"])
def test_a_bench_that_ends_leaves_no_run_behind(tmp_path: Path, how: str) -> None:
    """Two runs at once that would take minutes: both have begun, and neither goes on."""
    begun, over = tmp_path / "begun", tmp_path / "over"
    code = f"""
import learning, pathlib, time, types
over = pathlib.Path({str(over)!r})
learning.time = types.SimpleNamespace(sleep=time.sleep, monotonic=lambda: 100.0 * over.exists())
learning.PROGRAM = {(sys.executable, "-S", "-c", HANGS)!r}
learning.publish = lambda rows: None
learning.main()
"""
    words = ["--out", str(tmp_path / "rows"), "--jobs", "2", "--most-minutes", "1"]
    os.mkfifo(begun)
    env = os.environ | {"BEGUN": str(begun)}
    bench = subprocess.Popen([sys.executable, "-c", code, *words], env=env, cwd=learning.HERE)
    with os.fdopen(os.open(begun, os.O_RDWR)) as told:  # which never ends: a run may open it while another closes it
        pids = [int(told.readline()) for _ in range(2)]
    if how.startswith("SIG"):
        bench.send_signal(getattr(signal, how))
    else:
        over.touch()
    assert (bench.wait(60) == 0) == (how == "the time is over")
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
