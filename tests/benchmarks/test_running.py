"""The benchmark of running episodes: its drivers play whole episodes, and its figures are of those."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import running
from _running_shape import TOKENS, TURNS

from agentrl.store import RunStore


@pytest.mark.medium
def test_two_workers_play_whole_episodes_over_http(tmp_path: Path) -> None:
    tokens = running.tokens_of(tmp_path)
    assert len(tokens) == TOKENS
    server = [sys.executable, str(running.HERE / "_running_server.py"), "0.01", ",".join(map(str, tokens))]
    with subprocess.Popen(server, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        found = running.ours(url, 32, 2, tmp_path)
        process.kill()
    assert found["turns_s"] > 0 and found["cpu_ms_a_turn"] > 0
    (path,) = tmp_path.glob("*.sqlite")
    with RunStore.open(path) as store:
        assert store.metrics.progress()[0] == 32 * TURNS
