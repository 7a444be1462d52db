"""The cases for a GPU, at tiny size on the CPU: none of them first fails on the machine that costs money."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import _gpu_learner
import _gpu_run
import _gpu_step
import gpu
import pytest
import torch
import weights
from _gpu_case import CASES, Bench, Skipped

from agentrl import config as configuration
from agentrl.config import RunConfig, Train
from agentrl.config.train import ParallelPlan

SLOW = ("run", "ipc", "ranks")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench("cpu", True, tmp_path_factory.mktemp("gpu"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.long] if name in SLOW else ())
        for name in CASES
        if name != "colocated"
    ],
)
def test_every_case_runs_at_tiny_size(name: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in gpu.installed(bench.work / f"site-{name}").items():
        monkeypatch.setenv(variable, value)
    try:
        rows = list(CASES[name].run(bench))
    except Skipped as why:
        assert name in ("vllm", "attention", "staged") and str(why)
        return
    assert rows and all(isinstance(value, str | int | float | None) for row in rows for value in row.values())
    json.dumps(rows)


def test_all_cases_together_have_forty_minutes_and_settings_that_exist() -> None:
    assert sum(case.deadline_s for case in CASES.values()) <= 40 * 60
    for settings in (*_gpu_step.SMALL.values(), *_gpu_step.LARGE.values()):
        Train(**settings)
    for name, layout in _gpu_learner.LAYOUTS.items():
        Train(parallel=ParallelPlan(ranks=2, **layout), **_gpu_learner._ALSO.get(name, {}))


class Trained:
    """In the place of `agentrl train` and of scripts: reads the run file with the settings, and writes the metrics of
    two steps."""

    def __init__(self) -> None:
        self.runs: dict[str, RunConfig] = {}
        self.scripts: list[list[str]] = []

    def run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        at = command.index("train")
        settings = [word for before, word in pairwise(command) if before == "--set"]
        out = Path(command[command.index("--out") + 1])
        config = self.runs[out.name] = configuration.load(Path(command[at + 1]), settings)
        out.mkdir(parents=True)
        row = {"reward_mean": 0.5, "mismatch_max": 0.0, "busy_s": 1.0}
        told = {f"{name}_s": 0.1 for name in ("turn_wait", "sleep", "restore", "park", "asleep", "pause")}
        row |= told | {"swap_bytes": 10, "canary_error": 0.0} if config.engine.colocated else {}
        (out / "metrics.jsonl").write_text("".join(json.dumps(row | {"step": at}) + "\n" for at in (1, 2)))
        return subprocess.CompletedProcess(command, 0, "", "")

    @contextmanager
    def popen(self, command: list[str], **_: object) -> Iterator[SimpleNamespace]:
        assert Path(command[1]).is_file()
        self.scripts.append(command[2:])
        yield SimpleNamespace(stdout=['{"path": "shm", "pause_ms": 3.0}\n', "| a table |\n"], returncode=0)


def test_cases_with_vllm_ask_for_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = Trained()
    stub = SimpleNamespace(run=there.run, Popen=there.popen, DEVNULL=None, PIPE=None)
    monkeypatch.setattr(_gpu_run, "subprocess", stub)
    monkeypatch.setattr(_gpu_run.importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    bench = Bench("cuda", False, tmp_path)
    rows = [row for name in ("colocated", "vllm", "staged") for row in CASES[name].run(bench)]
    assert [row.get("run", row.get("path")) for row in rows] == (
        ["colocated", "step 1", "step 2", "vllm-files", "vllm-ipc", "vllm-nccl", "shm"]
    )
    assert rows[1]["swap_bytes"] == 10
    shared, nccl = there.runs["colocated"], there.runs["vllm-nccl"]
    assert shared.engine.colocated and shared.engine.kind == "vllm" and shared.train.device == "cuda"
    assert nccl.engine.gpus == [[1]] and there.runs["vllm-ipc"].sync == "ipc"
    monkeypatch.setattr(sys, "argv", ["weights.py", *there.scripts[0]])
    asked: list[object] = []
    monkeypatch.setattr(weights.trio, "run", lambda _, *given: asked.extend(given) or [])
    weights.main()
    assert asked[:3] == ["500M", ["shm"], 5]
    monkeypatch.setattr(_gpu_run, "PAUSE_MS", 1.0)
    with pytest.raises(AssertionError, match="the engine paused for 3 ms, more than 1"):
        list(CASES["staged"].run(bench))
    list(CASES["colocated"].run(Bench("cpu", True, tmp_path / "tiny")))
    assert there.runs["colocated"].engine.kind == "embedded"
