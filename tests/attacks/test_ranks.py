"""Ranks of a learner meet where no other user of the machine, and no other machine, can take part."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from learner.making import tiny_qwen3
from learner.test_ranks import STEP_OF, config, groups
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from agentrl.learner.learner import Learner
from agentrl.learner.parallel.ranks import Leader
from attacks.other_user import OtherUser
from attacks.sockets import Listening, listening

GREETING = """if True:
    import socket, struct, sys
    for place, port in enumerate(map(int, sys.argv[1:])):  # the first one answers, however late; the others do not
        with socket.create_connection(("127.0.0.1", port), timeout=2 if place else 60) as connection:
            connection.sendall(struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 4711))  # torch gives back the last four bytes
            try:
                print(port, connection.recv(4) == struct.pack("<I", 4711))
            except OSError:
                print(port, False)
"""
CLAIMS = """if True:
    import socket, struct, sys
    held = []
    for port in map(int, sys.argv[1:]):
        for number in range(40):  # gloo's pairs are told apart by a number, from 0; it keeps what is accepted for good
            held.append(socket.create_connection(("127.0.0.1", port), timeout=60))
            held[-1].sendall(struct.pack("<Q", number) + bytes(range(1, 256)) if number % 2 else b"")
    print("all sent", flush=True)
    input()
"""


@pytest.fixture
def two() -> Generator[Leader]:
    ranks = Leader([torch.device("cpu")] * 2, deadline_s=120, start_s=200)
    yield ranks
    ranks.close()


def of_ranks(ranks: Leader) -> list[Listening]:
    return [one for one in listening([os.getpid(), *ranks.processes]) if one.kind == "tcp"]


@pytest.mark.other_user
@pytest.mark.slow
def test_no_port_of_the_ranks_takes_orders_or_disturbs_a_step(
    two: Leader, other_user: OtherUser, tmp_path: Path
) -> None:
    learner = Learner(config().learner, tiny_qwen3(tmp_path), ranks=two)
    learner.step(groups(3), step_of=STEP_OF)
    known = TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    found = [one for one in of_ranks(two) if one.port != known.port]
    assert {one.host for one in found} == {"127.0.0.1"}
    ports = [one.port for one in found]
    said = dict(
        line.split() for line in other_user.run(GREETING, known.port, *ports, deadline_s=120).stdout.splitlines()
    )
    assert said.pop(str(known.port)) == "True", "a store of torch's on a port would have been seen"
    assert said == {str(port): "False" for port in ports}

    with other_user.running(CLAIMS, *ports) as process:
        assert process.stdout is not None and process.stdout.readline() == "all sent\n"
        learner.step(groups(3, 1), step_of=STEP_OF)
    assert two.ledger.names(0) == two.ledger.names(1)


@pytest.mark.medium
@pytest.mark.other_user
def test_the_file_in_which_ranks_meet_is_closed_to_others(two: Leader, other_user: OtherUser) -> None:
    store = Path(two._member.store.path)  # pyright: ignore
    assert store.stat().st_size
    assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
    for call in ("open(sys.argv[1])", "open(sys.argv[1], 'ab')", "os.unlink(sys.argv[1])"):
        assert "PermissionError" in other_user.run(f"import os, sys; {call}", store).stderr
