"""A whole run whose weights go from the learner's memory into its engine, with vLLM's `nccl` over gloo (see `gloo`)."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from agentrl.engine.vllm.launch import find_build
from agentrl.engine.weight_sync.canary import TOLERANCE
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.audit import audit
from tests.run.gate import Gate

from . import gloo
from .test_run import RUN, RUN_S, assert_nothing_remains, end, kill_engine, steps_of, wait_for_step

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("engine.sync=nccl", "train.device=cuda:1", "train.steps=6", "rollout.turn_deadline_s=250")


def train(folder: Path, gate: Gate) -> subprocess.Popen[str]:
    """A run in an environment that has vLLM beside ours, as a learner that sends over NCCL needs it."""
    standin = folder / "standin"
    standin.mkdir()
    gloo.carry(standin)
    gloo.carry_to_learner(standin)
    file = folder / "run.toml"
    file.write_text(RUN)
    main = (
        f"import sys; sys.path.append({sysconfig.get_path('purelib')!r}); "
        # the CPU build is refused
        "from agentrl.engine.vllm import launch; launch.check_sender = lambda *_, **__: None; "
        "from agentrl.run import trainer; trainer.check_limits = lambda _: None; "
        "from agentrl.cli.main import main; main()"
    )
    command = [find_build().python, "-c", main, "train", file, "--out", folder / "run"]
    command += [word for setting in (*SETTINGS, *gate.settings) for word in ("--set", setting)]
    path = [standin, ROOT, ROOT / "environments", ROOT / "tools"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


@pytest.mark.long
@pytest.mark.timeout(1200)  # vLLM starts twice
def test_a_run_learns_without_weight_files_and_a_new_engine_gets_the_current_weights(tmp_path: Path) -> None:
    gate = Gate(tmp_path, at=8)
    process, run = train(tmp_path, gate), RunDir(tmp_path / "run")
    try:
        wait_for_step(2, run, process)
        kill_engine(run)
        gate.open()
    finally:
        status, said = end(process, 2 * RUN_S)
    assert status == 0, said
    with RunStore.open(run.store_path) as store:
        assert not audit(store).violations
        assert store.versions.weights_path(store.versions.current_version().version) is None
    steps = steps_of(run)
    assert [row["step"] for row in steps] == list(range(1, 7))
    assert max(row["canary_error"] for row in steps) < TOLERANCE["float32"]
    assert all(0 < row["pause_s"] <= row["sync_s"] and row["sync_bytes"] > 0 for row in steps)
    assert json.loads(run.summary.read_text())["restarts"] == {"engine-0": 1}
    assert_nothing_remains(run)
