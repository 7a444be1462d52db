"""Another user opens more connections to servers of ours than they have places."""

from __future__ import annotations

import urllib.request
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path

import pytest
from engine.conftest import Server, make_model

from attacks.other_user import OtherUser

pytestmark = [pytest.mark.other_user, pytest.mark.slow]

ATTACKERS, COUNT = 4, 5_000

# Opens COUNT connections, as far as it can, half of them with a part of a request; then waits.
FLOOD = """if True:
    import resource, socket, sys
    port, count = map(int, sys.argv[1:])
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    held = []
    for number in range(count):
        try:
            one = socket.socket()
            one.settimeout(60)
            one.connect(("127.0.0.1", port))
            if number % 2:
                one.send(b"POST /inference/v1/generate HTTP/1.1\\r\\ncontent-length: 9\\r\\n\\r\\nx")
            held.append(one)
        except OSError:
            pass
    print("all", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path: Path) -> Generator[Server]:
    running = Server(make_model(tmp_path / "model", tie_word_embeddings=True), tmp_path)
    yield running
    running.close()


@pytest.mark.long
def test_twenty_thousand_idle_connections_do_not_starve_an_engine(server: Server, other_user: OtherUser) -> None:
    with ExitStack() as stack:
        port = server.url.rpartition(":")[2]
        attackers = [stack.enter_context(other_user.running(FLOOD, port, COUNT)) for _ in range(ATTACKERS)]
        assert [attacker.stdout and attacker.stdout.readline() for attacker in attackers] == ["all\n"] * ATTACKERS
        for _ in range(20):
            with urllib.request.urlopen(f"{server.url}/health", timeout=60) as answer:
                assert answer.status == 200
    with urllib.request.urlopen(f"{server.url}/health", timeout=60) as answer:
        assert answer.status == 200
