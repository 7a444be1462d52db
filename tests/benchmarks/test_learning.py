"""The table of learning: what is run next, what a row says, and what the page says of rows that are not there."""

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

from agentrl import config, registry


def row(configuration: learning.Configuration, seed: int, **said: Any) -> dict[str, Any]:
    return {
        "configuration": configuration.name,
        "seed": seed,
        "settings": [*learning.CHEAP, *configuration.settings],
        "code": "abc",
        "before": 0.4,
        "after": 0.9,
        "steps": 8,
        "lag_mean": 1.0,
        "lag_max": 2,
        "wall_s": 100,
        "cpu_s": 60,
        "success": [0.0] * 3 + [1.0] * 5,
        **said,
    }


@pytest.mark.parametrize("configuration", learning.configurations(), ids=lambda one: one.name)
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


def test_seeds_go_round_and_ablations_come_last() -> None:
    first, second, last = learning.FIRST[0], learning.Configuration("other"), learning.LAST[0]
    assert [(one.name, seed) for one, seed in learning.jobs([last, first, second], None)] == [
        *[(one.name, seed) for seed in (1, 2, 3) for one in (first, second)],
        *[(first.name, seed) for seed in (4, 5)],
        *[(last.name, seed) for seed in (1, 2, 3)],
    ]
    assert learning.jobs([first], [7]) == [(first, 7)]


def test_a_row_of_other_settings_is_not_the_same_run() -> None:
    one = learning.FIRST[0]
    rows = [row(one, 2), row(one, 1), row(one, 3, settings=["train.steps=80"])]
    assert [found["seed"] for found in learning.found(rows, one)] == [1, 2]
    assert learning.found(rows, learning.FIRST[1]) == []


def test_the_level_is_reached_where_the_mean_of_the_last_steps_is_at_it() -> None:
    rates = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]  # means of five: 0.6, 0.6, 0.8
    assert (learning.steps_to(rates), learning.steps_to(rates[:6]), learning.steps_to([1.0])) == (7, None, None)


def test_the_table_has_medians_and_ranges_and_says_what_was_not_run() -> None:
    one, other = learning.Configuration("one", seeds=4), learning.Configuration("other", ("algo.kind=ppo",))
    rows = [
        row(one, 1, after=0.5, success=[0.0] * 8, lag_max=1),
        row(one, 2, after=0.9),
        row(one, 4, after=0.7, lag_mean=3.0),
    ]
    head, _, cells, _, missing, versions, machines = learning.table(rows, [one, other])
    assert cells.split(" | ")[1:7] == [
        "3 of 4", "0.400", "0.700 (0.500 to 0.900)", "7 (7 to >8)", "1.0, 2", "100"
    ]  # fmt: skip
    assert len(head.split(" | ")) == len(cells.split(" | "))
    assert missing == "**Not run:** one (seed 3), other (all 3 seeds)."
    assert versions == "Versions of the code: abc."
    assert machines == "Machines: 2 cores, 1 at once (3 runs)."


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


def test_a_row_says_what_machine_made_it_and_is_still_of_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    words = ("--out", str(out), "--seeds", "1", "--only", "grpo")
    assert learn(monkeypatch, *words, "--set", "train.device=cuda", "--code", "f00", "--jobs", "3") == 0
    (row,) = json.loads(out.read_text())
    assert (row["on"]["settings"], row["on"]["jobs"], row["code"]) == (["train.device=cuda"], 3, "f00")
    assert learning.found([row], learning.FIRST[0]) == [row]
    assert list(learning.table([row], learning.FIRST[:1]))[-1].endswith("3 at once, train.device=cuda (1 runs).")
    assert learn(monkeypatch, *words, "--set", "train.lr=1") == 2  # which would be another run
    assert "known: train.device" in capfd.readouterr().err


def test_runs_at_once_have_cores_of_their_own() -> None:
    assert learning.shares([0, 1, 4, 5, 6], 2) == [[0, 1], [4, 5]]
    assert learning.shares([0, 1], 1) == [[]]  # a single run has all
    assert learning.shares([0], 2) == [[], []]


def test_a_run_on_a_machine_too_busy_for_its_tests_is_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learning, "PROGRAM", (sys.executable, "-S", "-c", WROTE.replace("0.4", "0.14")))
    words = ("--out", str(tmp_path / "rows"), "--seeds", "1", "--only", "grpo")
    assert learn(monkeypatch, *words) == "1 runs failed"
    assert "solved only 0.14: this machine is too busy" in capfd.readouterr().err


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "the time is over"])
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
