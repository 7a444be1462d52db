"""A whole training run with vLLM as its engine: launched with the run, gone with the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.runtime.rundir import RunDir
from agentrl.store import RunStore
from agentrl.store.audit import audit

from .test_fleet import alive

pytestmark = pytest.mark.vllm

ENVS = Path(__file__).parents[1] / "runtime" / "envs.py"
RUN = f"""
model = "agentrl/tiny-coder"
[env]
id = "{ENVS}:Vowels"
[rollout]
group_size = 4
max_running = 16
max_tokens_per_turn = 12
[engine]
kind = "vllm"
max_batch = 16
kv_cache_mb = 64
start_deadline_s = 280.0
admin_deadline_s = 60.0
[buffer]
groups_per_step = 2
[train]
steps = 3
"""


def processes_of(run: RunDir) -> list[int]:
    """Process ids whose environment or command line names the run's scratch space."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(run.scratch).encode() in text and alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def test_a_run_with_vllm_learns_from_tokens_of_every_version(tmp_path: Path) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "run"
    file.write_text(RUN)
    code = "from agentrl.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", str(file), "--out", str(out)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    run = RunDir.open(out)
    summary = json.loads(run.summary.read_text())
    assert summary["steps"] == 3
    with RunStore.open(run.store_path) as store:
        assert not audit(store).violations
    steps = [row for row in map(json.loads, run.metrics.read_text().splitlines()) if "sync_bytes" in row]
    assert [row["version"] for row in steps] == [2, 3, 4]  # 1 is what the run started from
    assert processes_of(run) == []
