"""A port that stays free until its server listens on it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from agentrl.host import ports
from agentrl.host.ports import free_port

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not RANGE.exists(), reason="needs /proc")
def test_a_port_is_none_that_the_system_gives_unasked() -> None:
    first, _ = map(int, RANGE.read_text().split())
    if first < 32_768:
        pytest.skip("this system gives nearly all ports unasked")
    assert all(1024 < free_port() < first for _ in range(200))


def test_a_port_that_somebody_has_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        theirs = taken.getsockname()[1]
        monkeypatch.setattr(ports, "_PORTS", (theirs, ours))
        assert {free_port() for _ in range(20)} == {ours}
        monkeypatch.setattr(ports, "_PORTS", (theirs,))
        assert free_port() not in (theirs, 0)  # then any


def test_a_host_that_is_not_ours_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.1")
