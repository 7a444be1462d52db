"""A whole training run with vLLM as its engine: launched with the run, gone with the run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from agentrl.engine.weight_sync.canary import TOLERANCE
from agentrl.host.ports import free_port
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.audit import audit
from tests.run.gate import ENVS, Gate

from .test_fleet import alive

pytestmark = [pytest.mark.vllm, pytest.mark.slow]  # a run starts its own servers

RUN_S = 560
ADAPTERS = ("train.lora_rank=4", "train.steps=8", "rollout.turn_deadline_s=250")
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
start_deadline_s = 500.0
liveness_deadline_s = 120.0
[buffer]
groups_per_step = 2
skip_without_signal = false
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


def assert_nothing_remains(run: RunDir) -> None:
    deadline = time.monotonic() + 60
    while (left := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, [command_line(pid) for pid in left]


def train(out: Path, *settings: str, **environment: str) -> subprocess.Popen[str]:
    """A run that has begun; its engines take part in what it was started with."""
    file = out.with_suffix(".toml")
    file.write_text(RUN)
    chosen = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-c", "from agentrl.cli.main import main; main()", "train", str(file), "--out", str(out)]
    pipe = subprocess.PIPE
    env = {**os.environ, **environment}
    return subprocess.Popen([*command, *chosen], stdout=pipe, stderr=pipe, text=True, env=env)


def end(process: subprocess.Popen[str], deadline_s: float = RUN_S) -> tuple[int, str]:
    """Its exit status and what it said."""
    try:
        output, errors = process.communicate(timeout=deadline_s)
    finally:
        process.kill()
    return process.returncode, errors[-2000:] + output[-2000:]


def steps_of(run: RunDir) -> list[dict[str, Any]]:
    lines = run.metrics.read_text().splitlines(keepends=True) if run.metrics.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # the last one may be half written
    return [row for row in rows if "sync_bytes" in row]


def wait_for_step(step: int, run: RunDir, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + RUN_S
    while len(steps_of(run)) < step and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)  # on another process


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it ended meanwhile
        return ""


def kill_engine(run: RunDir) -> None:
    (engine,) = (pid for pid in processes_of(run) if "plugin.server" in command_line(pid))
    os.kill(engine, signal.SIGKILL)


@pytest.mark.parametrize("sync", ["full", pytest.param("delta", marks=pytest.mark.long)])
def test_a_run_with_vllm_learns_from_tokens_of_every_version(tmp_path: Path, sync: str) -> None:
    status, said = end(train(tmp_path / "run", f"engine.sync={sync}"))
    assert status == 0, said
    run = RunDir.open(tmp_path / "run")
    assert json.loads(run.summary.read_text())["steps"] == 3
    with RunStore.open(run.store_path) as store:
        assert not audit(store).violations
    steps = steps_of(run)
    assert [row["version"] for row in steps] == [2, 3, 4]  # 1 is what the run started from
    assert max(row["canary_error"] for row in steps) < TOLERANCE["float32"]
    first, *later = (row["sync_bytes"] for row in steps)
    assert all(size < first for size in later) if sync == "delta" else all(size == first for size in later)
    assert_nothing_remains(run)


@pytest.mark.timeout(1200)  # vLLM starts twice
@pytest.mark.long
def test_adapters_are_trained_without_a_pause_and_a_new_engine_gets_the_current_one(tmp_path: Path) -> None:
    gate = Gate(tmp_path, at=10)
    process, run = train(tmp_path / "run", *ADAPTERS, *gate.settings), RunDir(tmp_path / "run")
    try:
        wait_for_step(2, run, process)
        kill_engine(run)
        gate.open()
    finally:
        status, said = end(process, 2 * RUN_S)
    assert status == 0, said
    with RunStore.open(run.store_path) as store:
        assert not audit(store).violations
    steps = steps_of(run)
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert {row["pause_s"] for row in steps} == {0.0}
    assert max(row["canary_error"] for row in steps) < TOLERANCE["float32"]
    newest = run.checkpoints / "step-00000008"
    assert max(row["sync_bytes"] for row in steps) < newest.joinpath("model.safetensors").stat().st_size / 4
    assert newest.joinpath("adapter/adapter_model.safetensors").is_file()
    assert json.loads(run.summary.read_text())["restarts"] == {"engine-0": 1}
    assert_nothing_remains(run)


@pytest.mark.long
def test_weights_that_an_engine_did_not_take_end_the_run_and_are_named(tmp_path: Path) -> None:
    status, said = end(train(tmp_path / "run", "train.lr=0.01", AGENTRL_VLLM_CPU_FIXES="0"))
    assert status == 1
    assert "canary" in said and "not taken: lm_head (tied to model.embed_tokens.weight)" in said
    assert_nothing_remains(RunDir(tmp_path / "run"))


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def served(port: int) -> Iterator[None]:
    """A server of its own, which nobody looks after: up when the block begins, killed at its end."""
    command = [sys.executable, "-c", "from agentrl.cli.main import main; main()", "serve", "agentrl/tiny-coder"]
    options = ["--kind", "vllm", "--port", str(port), "--kv-cache-mb", "64", "--max-context", "1024", "--no-key"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    watch = threading.Timer(RUN_S, process.kill)
    watch.start()
    try:
        assert process.stdout is not None
        assert any(line.startswith("http://") for line in process.stdout)
        yield
    finally:
        watch.cancel()
        process.kill()
        process.communicate()
        deadline = time.monotonic() + 60
        while listens(port) and time.monotonic() < deadline:  # its engine goes by itself
            time.sleep(0.05)


@pytest.mark.timeout(1200)  # vLLM starts twice
@pytest.mark.long
def test_an_attached_server_is_killed_and_started_again_by_hand_and_the_run_goes_on(tmp_path: Path) -> None:
    port, gate = free_port(), Gate(tmp_path, at=12)
    run, attached = RunDir(tmp_path / "run"), (f'engine.urls=["http://127.0.0.1:{port}"]', "train.steps=8")
    with ExitStack() as last:
        with served(port):
            process = train(tmp_path / "run", *attached, *gate.settings)
            last.callback(process.kill)
            wait_for_step(3, run, process)
        gate.open()
        last.enter_context(served(port))
        status, said = end(process)
    assert status == 0, said
    with RunStore.open(run.store_path) as store:
        assert not audit(store).violations
    steps = steps_of(run)
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert max(row["canary_error"] for row in steps) < TOLERANCE["float32"]
    assert json.loads(run.summary.read_text())["restarts"] == {}
