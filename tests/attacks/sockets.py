"""What processes listen on: TCP and Unix sockets, read from /proc as `ss -ltnpx` does.

assert {(one.kind, one.host) for one in listening(family(run.pid))} <= {("unix", None)}
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TCP_LISTENS, _UNIX_LISTENS = "0A", 0x10000  # include/net/tcp_states.h, __SO_ACCEPTCON of linux/net.h


@dataclass(frozen=True, kw_only=True)
class Listening:
    """A socket that waits for connections, of one process (a socket that several hold is listed for each)."""

    pid: int
    kind: str
    """`tcp` or `unix`."""
    host: str | None = None
    """The address as text (`127.0.0.1`, `::`); None of a Unix socket."""
    port: int | None = None
    path: str | None = None
    """Of a Unix socket; an abstract one begins with `@`."""


def family(pid: int) -> list[int]:
    """The living processes that `pid` started, with itself, and those that these started."""
    children: dict[int, list[int]] = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(place.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(place.parent.name))
    found = [pid]
    for one in found:
        found.extend(children.get(one, []))
    return found


def listening(pids: Iterable[int]) -> list[Listening]:
    """Every listening socket of these processes, each looked up in the network namespace of its process. A process that
    has ended has none."""
    found: list[Listening] = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            inodes = _inodes(pid)
            found += [*_tcp(pid, inodes), *_unix(pid, inodes)]
    return found


def _inodes(pid: int) -> set[str]:
    found: set[str] = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            kind, _, inode = str(descriptor.readlink()).partition(":")
            if kind == "socket":
                found.add(inode.strip("[]"))
    return found


def _tcp(pid: int, inodes: set[str]) -> list[Listening]:
    found: list[Listening] = []
    for table in ("tcp", "tcp6"):
        for line in _lines(Path(f"/proc/{pid}/net/{table}")):
            local, state, inode = line[1], line[3], line[9]
            if state == _TCP_LISTENS and inode in inodes:
                host, _, port = local.partition(":")
                found.append(Listening(pid=pid, kind="tcp", host=_address(host), port=int(port, 16)))
    return found


def _unix(pid: int, inodes: set[str]) -> list[Listening]:
    found: list[Listening] = []
    for line in _lines(Path(f"/proc/{pid}/net/unix")):
        if int(line[3], 16) & _UNIX_LISTENS and line[6] in inodes:
            found.append(Listening(pid=pid, kind="unix", path=" ".join(line[7:])))
    return found


def _lines(table: Path) -> list[list[str]]:
    return [line.split() for line in table.read_text().splitlines()[1:]] if os.access(table, os.R_OK) else []


def _address(text: str) -> str:
    """/proc writes each 32-bit word of an address in the byte order of the machine."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
