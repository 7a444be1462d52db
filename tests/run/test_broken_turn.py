"""A real worker is killed in the middle of a long turn at a real engine, and another goes on with the turn."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from engine.conftest import Server, make_model
from rollout.conftest import write_tokenizer

from agentrl.config import parse
from agentrl.engine.rendering.renderer import Renderer
from agentrl.records import StopReason, Task, VersionSpan
from agentrl.run.run_folder import RunDir
from agentrl.run.scratch_space import ScratchSpace
from agentrl.store import RunStore

LENGTH, KILL_AT, BOUND = 2000, 200, 64
ENV = f"{Path(__file__).parent / 'envs.py'}:OneTurn"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Random weights that never end a turn, with a tokenizer of bytes."""
    from safetensors.torch import load_file, save_file

    folder = write_tokenizer(make_model(tmp_path / "model", vocab_size=258, max_position_embeddings=2 * LENGTH))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][list(Renderer(folder).stop_token_ids)] = 0.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def engine(model: Path, tmp_path: Path) -> Iterator[Server]:
    running = Server(model, tmp_path, "--served-version", "1", "--stream-tokens", "16")
    yield running
    running.close()


@pytest.fixture
def run(tmp_path: Path, model: Path, engine: Server) -> Iterator[RunDir]:
    """A run of one episode of one turn, whose engine serves the weights of step 0."""
    rollout = {"max_tokens_per_turn": LENGTH, "max_context": 2 * LENGTH - 1, "checkpoint_tokens": BOUND, "lease_s": 3.0}
    config = parse(
        {
            "model": str(model),
            "env": {"id": ENV},
            "rollout": {**rollout, "temperature": 0.05, "turn_deadline_s": 600.0},
            "train": {"tokens_per_batch": 2 * LENGTH},
        }
    )
    run = RunDir.create(tmp_path / "run", config)
    ScratchSpace(run).make()
    with RunStore.open(run.store_path) as store:
        store.versions.confirm_version(store.versions.mint_version(0))
        store.set_meta("engine_urls", json.dumps([engine.url]))
        store.set_meta("phase", "eval")
        store.groups.add_groups([Task(index=0, env=ENV, seed=1)], size=1, purpose="eval:a:now")
    yield run
    ScratchSpace(run).clear()


@contextmanager
def worker(run: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-m", "agentrl.run.processes.child", "worker", str(run.path), "0"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.02)


def written(run: RunDir) -> int:
    """Tokens of turns under way that the store has."""
    with sqlite3.connect(run.store_path) as connection:
        return connection.execute("SELECT COALESCE(SUM(n), 0) FROM partials").fetchone()[0]


def metric(engine: Server, name: str) -> float:
    lines = httpx.get(f"{engine.url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}{{"))


@pytest.mark.slow
def test_law_1_sigkill_of_a_worker_in_a_long_turn_costs_a_few_tokens(run: RunDir, engine: Server) -> None:
    with worker(run) as first:
        until(lambda: written(run) >= KILL_AT, first)
        first.kill()
        first.wait()
    until(lambda: metric(engine, "num_requests_running") == 0)
    kept, sampled = written(run), metric(engine, "generation_tokens_total")
    assert KILL_AT <= kept <= sampled < LENGTH
    assert sampled - kept <= BOUND
    with RunStore.open(run.store_path) as store, worker(run) as second:
        until(lambda: store.reads.trajectory(1).stop_reason is not None, second)
        (turn,) = store.reads.trajectory(1).turns
        assert store.reads.trajectory(1).stop_reason is StopReason.DONE
        assert store.reads.restarts(1) == []
    assert (len(turn.token_ids), turn.finish, turn.spans) == (LENGTH, "length", (VersionSpan(1, 0, LENGTH),))
    assert metric(engine, "generation_tokens_total") == LENGTH + sampled - kept, "nothing else was sampled again"
    assert written(run) == 0
