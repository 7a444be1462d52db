"""Faults that an unprivileged user can inject into his own processes from outside, each with a proof that it is real.

    cut_connections(pids, ports)   the connections of these processes to these ports end; the kernel's own shutdown
    garble(pid, ports, junk)       bytes that no engine sent, into the answers under way of the process that listens
    full_disk(folder)              the file system of `folder`, which must be a small one, has no byte left
    WallClock                      processes started with its variables read a wall clock that `set` moves

Sockets of other processes are reached by `pidfd_getfd`, which copies a descriptor: nothing has to stand between an
engine and its clients, and no process is asked to cooperate. The clock is a `sitecustomize` on PYTHONPATH. Linux only;
knows processes, sockets and files, never a run.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_GETFD = 438  # the number of pidfd_getfd on every architecture
_ESTABLISHED, _CONNECTED = "01", "03"  # phases of TCP, and of a Unix socket
_BLOCK = 1 << 20


def _chunk(event: bytes) -> bytes:
    return f"{len(event):x}".encode() + b"\r\n" + event + b"\r\n"


JUNK = (
    b"\xff\xfe\x00 no chunk begins like this \r\n\r\n",
    _chunk(b'data: {"choices": [{"index": 0, "token_\n\n'),
    _chunk(b'data: {"choices":[{"index":0,"token_ids":[-1],"logprobs":{"content":[{"logprob":-1.0}]}}]}\n\n'),
)
"""What `garble` may send: no HTTP at all, a whole chunk whose event is cut, a whole event with a token that is none."""

_SITE = """
import os, struct, time

if os.environ.get("AGENTRL_CHAOS_CLOCK"):
    import mmap

    _file = os.open(os.environ["AGENTRL_CHAOS_CLOCK"], os.O_RDONLY)
    _ahead = mmap.mmap(_file, 8, prot=mmap.PROT_READ)
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + struct.unpack("d", _ahead)[0]
    time.time_ns = lambda: _time_ns() + int(struct.unpack("d", _ahead)[0] * 1e9)
"""


class NoEffect(Exception):
    """A fault that should have been injected was not: the check that follows would prove nothing."""


@dataclass(frozen=True, slots=True)
class Connection:
    """An established connection, as one of its two processes has it. Ports tell it apart on this machine. Of a Unix
    socket the server's end has a path, and the client's an empty one."""

    inode: str
    local: int | str
    remote: int | str


def processes() -> Iterator[tuple[int, int, str]]:
    """Id, parent's id and command line (each word ends with NUL) of every process except zombies."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError, ValueError):
                state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if state != "Z":
                    yield int(entry.name), int(parent), (entry / "cmdline").read_bytes().decode(errors="replace")


@contextmanager
def stopped(pid: int) -> Generator[None]:
    """A process stands still for the time of the block. Raises NoEffect if the kernel does not say that it does."""
    os.kill(pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + 60.0
        while state(pid) not in "TtXZ":
            if time.monotonic() > deadline:
                raise NoEffect(f"process {pid} was stopped and goes on")
            time.sleep(0.005)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def state(pid: int) -> str:
    """The kernel's letter for the state of a process; X if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def connections() -> dict[str, Connection]:
    """The established connections of this network namespace, by inode; of Unix sockets those of the side that listens,
    which alone has a name."""
    found = {inode: Connection(inode, path, "") for inode, path in _unix_sockets().items() if path}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                _, local, remote, phase, *rest = line.split()
                if phase == _ESTABLISHED:
                    local_port, remote_port = (int(address.rpartition(":")[2], 16) for address in (local, remote))
                    found[rest[5]] = Connection(rest[5], local_port, remote_port)
    return found


def _unix_sockets() -> dict[str, str]:
    """The connected Unix sockets by inode, with the path of those that have one."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            _, _, _, _, _, phase, inode, *path = line.split(maxsplit=7)
            if phase == _CONNECTED:
                found[inode] = path[0] if path else ""
    return found


def cut_connections(pids: Collection[int], ports: Collection[int | str]) -> list[Connection]:
    """End the connections that these processes have to `ports`, in both directions. Returns those that were cut. A port
    may also be the path of a Unix socket, here and below."""
    cut: list[Connection] = []
    for pid in pids:
        for connection, end in _ends(pid):
            if connection.remote in ports:
                with end, suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                    cut.append(connection)
            else:
                end.close()
    return cut


def garble(pid: int, ports: Collection[int | str], junk: bytes) -> list[Connection]:
    """Send `junk` to the other ends of the connections that `pid` has on `ports`. Returns the connections."""
    sent: list[Connection] = []
    for connection, end in _ends(pid):
        with end:
            if connection.local in ports:
                with suppress(OSError):
                    end.send(junk, socket.MSG_DONTWAIT)
                    sent.append(connection)
    return sent


def serves(pid: int, ports: Collection[int | str]) -> bool:
    """Whether somebody is connected to `pid` on one of `ports`."""
    found = False
    for connection, end in _ends(pid):
        with end:
            found = found or connection.local in ports
    return found


def still_open(garbled: Collection[Connection]) -> list[Connection]:
    """Those whose other end still uses them."""
    known = connections()
    used = {(connection.remote, connection.local) for connection in known.values()}
    return [
        connection
        for connection in garbled
        if (connection.local, connection.remote) in used or (connection.remote == "" and connection.inode in known)
    ]


def _ends(pid: int) -> Iterator[tuple[Connection, socket.socket]]:
    """Copies of the sockets of a process, with their connections; close them."""
    known = {inode: Connection(inode, path, "") for inode, path in _unix_sockets().items()} | connections()
    libc = ctypes.CDLL(None, use_errno=True)
    with suppress(ProcessLookupError, FileNotFoundError):
        process = os.pidfd_open(pid)
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    match = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink()))
                    if match and (connection := known.get(match[1])):
                        descriptor = libc.syscall(_GETFD, process, int(entry.name), 0)
                        if descriptor < 0 and ctypes.get_errno() in (errno.EPERM, errno.ENOSYS):
                            raise NoEffect(f"pidfd_getfd is not allowed here: {os.strerror(ctypes.get_errno())}")
                        if descriptor >= 0:
                            end = socket.socket(fileno=descriptor)
                            yield _named(connection, end), end
        finally:
            os.close(process)


def _named(connection: Connection, end: socket.socket) -> Connection:
    """With the path of the server, if this is a client's end of a Unix socket."""
    if end.family != socket.AF_UNIX:
        return connection
    with suppress(OSError):
        return Connection(connection.inode, connection.local, end.getpeername() or "")
    return connection


@contextmanager
def full_disk(folder: Path) -> Generator[None]:
    """Fill the file system of `folder` for the time of the block. Raises NoEffect if something can be written at the
    block's end."""
    ballast, probe = folder / "ballast", folder / "ballast-probe"
    try:
        with ballast.open("wb", buffering=0) as file:
            for size in (_BLOCK, 4096, 1):
                with suppress(OSError):
                    while True:
                        file.write(bytes(size))
        yield
        try:
            probe.write_bytes(bytes(_BLOCK))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        else:
            raise NoEffect(f"{folder} has space although it was filled")
    finally:
        for path in (probe, ballast):
            path.unlink(missing_ok=True)


class WallClock:
    """A wall clock of its own for processes that are started with `variables`: `set` moves it at once in all of them,
    and in their children. Other clocks go on, as in reality."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="agentrl-clock-")
        folder = Path(self._folder.name)
        (folder / "sitecustomize.py").write_text(_SITE)
        (folder / "ahead").write_bytes(struct.pack("d", 0.0))
        with (folder / "ahead").open("r+b") as file:
            self._ahead = mmap.mmap(file.fileno(), 8)
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        self.variables = {"PYTHONPATH": path, "AGENTRL_CHAOS_CLOCK": str(folder / "ahead")}

    def set(self, ahead_s: float) -> None:
        """From now on it is `ahead_s` seconds ahead of the true time."""
        struct.pack_into("d", self._ahead, 0, ahead_s)

    def close(self) -> None:
        """Remove its files; processes that have it go on with it."""
        self._ahead.close()
        self._folder.cleanup()
