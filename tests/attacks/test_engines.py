"""Another user of the machine at the engines of a run, and at `agentrl serve`: nothing answers without a secret."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from attacks.other_user import OtherUser
from attacks.sockets import family, listening

pytestmark = [pytest.mark.other_user, pytest.mark.slow]
DEADLINE_S = 300.0
CLI = "from agentrl.cli.main import main; main()"
RUN = """
model = "agentrl/tiny-coder"
env = { id = "agentrl/Combination-v0" }
rollout = { workers = 1, group_size = 4, max_running = 16, max_turns = 4, max_tokens_per_turn = 12 }
engine = { replicas = 2, max_batch = 16, kv_cache_mb = 64 }
buffer = { groups_per_step = 2, skip_without_signal = false }
train = { steps = 500 }
"""
ASK = """if True:
    import json, socket, sys

    def ask(place, method, path, head=""):
        kind = socket.AF_UNIX if place[0] == "/" else socket.AF_INET
        host, _, port = place.rpartition(":")
        with socket.socket(kind) as client:
            client.settimeout(60)
            try:
                client.connect(place if kind == socket.AF_UNIX else (host, int(port)))
                body = json.dumps({"update_info": {"path": "/etc/passwd"}})
                size = "content-length: %d" % len(body)
                text = "%s %s HTTP/1.1\\r\\nhost: x\\r\\n%s%s\\r\\n\\r\\n%s" % (method, path, head, size, body)
                client.sendall(text.encode())
                return int(client.recv(4096).split()[1])
            except PermissionError:
                return "PermissionError"

    routes = ["/health", "/metrics", "/v1/models", "/is_paused"]
    changes = ["/pause", "/sleep", "/start_weight_update", "/update_weights", "/finish_weight_update",
               "/collective_rpc", "/v1/load_lora_adapter", "/inference/v1/generate", "/v1/chat/completions"]
    answers = [ask(sys.argv[1], "GET", path) for path in routes]
    answers += [ask(sys.argv[1], "POST", path) for path in changes]
    print(json.dumps(answers))
"""


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CLI, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def trains(process: subprocess.Popen[str], store: Path) -> list[str]:
    """The engines of a run whose learner has made a step."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended"
        with suppress(sqlite3.OperationalError), closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as db:
            urls = db.execute("SELECT value FROM meta WHERE key = 'engine_urls'").fetchone()
            steps = db.execute("SELECT max(step) FROM versions").fetchone()
            if urls and json.loads(urls[0]) and steps[0]:
                return json.loads(urls[0])
        time.sleep(0.1)
    raise AssertionError("the run made no step")


def answers(user: OtherUser, place: str) -> list[Any]:
    done = user.run(ASK, place, deadline_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_nobody_else_reaches_the_engines_of_a_run(other_user: OtherUser) -> None:
    with other_user.folder() as place:
        file, run = place / "run.toml", place / "run"
        file.write_text(RUN)
        with started("train", str(file), "--out", str(run)) as process:
            urls = trains(process, run / "store.sqlite")
            assert len(urls) == 2
            for url in urls:
                path = url.removeprefix("unix://")
                assert Path(path).is_socket() and Path(path).parent.stat().st_mode & 0o777 == 0o700
                assert set(answers(other_user, path)) == {"PermissionError"}
            found = listening(family(process.pid))
            assert {one.path for one in found if one.kind == "unix"} >= {url.removeprefix("unix://") for url in urls}
            assert [one for one in found if one.kind == "tcp"] == []
            assert secrets_shown(family(process.pid)) == []


def secrets_shown(pids: list[int]) -> list[bytes]:
    """The command lines with a secret that some process has in its environment."""
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
    variables = b"".join(Path(f"/proc/{pid}/environ").read_bytes() for pid in pids).split(b"\0")
    values = {one.partition(b"=")[2] for one in variables if one.startswith((b"AGENTRL_ENGINE_", b"AGENTRL_WEIGHTS_"))}
    assert len(values - {b""}) == 2
    return [line for line in lines for value in values - {b""} if value in line]


def answered(process: subprocess.Popen[str], begins: str) -> list[str]:
    """The lines that a command printed until one that begins so."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.strip())
        if lines[-1].startswith(begins):
            return lines
    raise AssertionError(lines)


def test_a_served_engine_answers_nobody_without_its_key(other_user: OtherUser) -> None:
    """Its key is in the environment variable that the command was given, and in no command line."""
    os.environ["AGENTRL_TEST_SERVE"] = "a key of ours"
    words = ["--port", "0", "--kv-cache-mb", "64", "--max-context", "256", "--api-key-env", "AGENTRL_TEST_SERVE"]
    with started("serve", "agentrl/tiny-coder", *words) as process:
        *said, url = answered(process, "http://")
        place = url.removeprefix("http://")
        assert set(answers(other_user, place)) == {401}
        (door,) = [one for one in listening(family(process.pid)) if one.kind == "tcp"]
        assert f"{door.host}:{door.port}" == place
        assert not any("a key of ours" in line for line in said)
        assert not any(b"a key of ours" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family(process.pid))
