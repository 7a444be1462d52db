"""The benchmark of running episodes: its drivers play whole episodes, and its figures are of those."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import running
from _running_server import completion_of, stream_of
from _running_shape import TOKENS, TURNS, Waits, settings

from agentrl.store import RunStore


def test_waits_have_their_mean() -> None:
    waits = Waits(seed=1, mean_s=4.0)
    drawn = [waits.draw() for _ in range(20_000)]
    assert 3.9 < sum(drawn) / len(drawn) < 4.1 and min(drawn) > 0


def test_workers_share_the_running_episodes() -> None:
    assert settings(1000, workers=4).rollout.workers == 4
    assert settings(1000, workers=4).rollout.max_running == 1000


def test_both_protocols_answer_with_the_same_tokens() -> None:
    tokens = list(range(10, 10 + TOKENS))
    head, _, body = stream_of(tokens).partition(b"\r\n\r\n")
    assert f"content-length: {len(body)}".encode() in head
    events = [json.loads(line[6:]) for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    assert [token for event in events for token in event["choices"][0]["token_ids"]] == tokens
    (choice,) = json.loads(completion_of(tokens).partition(b"\r\n\r\n")[2])["choices"]
    assert choice["token_ids"] == tokens and len(choice["logprobs"]["content"]) == TOKENS


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
        assert store.progress()[0] == 32 * TURNS
