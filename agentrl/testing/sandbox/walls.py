"""Proofs that a wall stands, for use before an attack that would harm the machine without this wall.

A probe does no harm if its wall is missing: it opens without writing, counts to a bound, looks without touching. It has
to print `closed`; after any other output the attack is left out and the case fails. Never knows the attacks.
"""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from agentrl.protocols import Sandbox
from agentrl.testing.sandbox.case import py

Wall = Callable[[Sandbox], Awaitable[None]]
"""A proof. Raises AssertionError if the wall is missing, or if the box cannot tell."""

_SYSTEM = """
import errno, os
def writable(folder):
    try:
        os.close(os.open(folder, os.O_TMPFILE | os.O_WRONLY))  # a file without a name, gone as it is closed
    except OSError as error:
        return error.errno in (errno.EOPNOTSUPP, errno.EISDIR) and os.access(folder, os.W_OK)
    return True
found = [folder for folder in ("/", "/usr/bin", "/etc", "/bin", "/lib", "/dev") if writable(folder)]
print(f"open: {found}" if found else "closed")
"""

_CAPABILITIES = """
lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
held = [name for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb") if int(lines[name], 16)]
print(f"open: {held}" if held else "closed")
"""

_PROCESSES = """
import os, sys
here, marker = os.readlink("/proc/self/ns/pid"), sys.argv[1][::-1].encode()
def words(pid):
    try:
        return open(f"/proc/{pid}/cmdline", "rb").read()
    except OSError:
        return b""
seen = [pid for pid in os.listdir("/proc") if pid.isdecimal()]
shared = here in sys.argv[2:] or len(seen) > 9 or any(marker in words(pid) for pid in seen)
print(f"open: {here}, {len(seen)} processes are visible" if shared else "closed")
"""
_INITIAL = "pid:[4026531836]"  # the kernel's fixed number of a machine's first pid namespace

_COUNT = """
import os, signal, sys
bound, children = int(sys.argv[1]), []
try:
    while len(children) < bound + 8:
        if (pid := os.fork()) == 0:
            signal.alarm(20)
            signal.pause()
        children.append(pid)
except OSError:
    pass
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
print("closed" if len(children) <= bound else f"open: {len(children)} processes with a bound of {bound}")
"""

_FOLDER = """
import sys
print("closed" if open("/workspace/.mine").read() == sys.argv[1] else "open")
"""


async def read_only_system(box: Sandbox) -> None:
    """No part of the system can be written."""
    await _proven(box, "the system is read-only", _SYSTEM)


async def no_capabilities(box: Sandbox) -> None:
    """The box has no right that an ordinary user lacks."""
    await _proven(box, "the box has no capabilities", _CAPABILITIES)


async def own_processes(box: Sandbox) -> None:
    """The box has its own pid namespace: neither this process's nor the machine's first."""
    marker = f"seen{secrets.token_hex(8)}"
    with witness(marker):  # passed backwards, so that the probe does not find its own command line
        await _proven(box, "the box sees only its own processes", _PROCESSES, marker[::-1], _own_number(), _INITIAL)


async def bounded_processes(box: Sandbox, bound: int) -> None:
    """The box cannot have more processes than `bound`."""
    await _proven(box, "the number of processes is bounded", _COUNT, str(bound))


async def own_work_folder(box: Sandbox) -> None:
    """`/workspace`, by its path, is the box's work folder and not the machine's."""
    random_token = secrets.token_hex(8)
    await box.write(".mine", random_token.encode())
    await _proven(box, "/workspace is the box's own", _FOLDER, random_token)


def _own_number() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return _INITIAL


@contextmanager
def witness(marker: str) -> Generator[None]:
    """A process on the host with `marker` in its command line."""
    witness_process = subprocess.Popen([sys.executable, "-c", "input()", marker], stdin=subprocess.PIPE)
    try:
        yield
    finally:
        witness_process.kill()
        witness_process.communicate()


async def _proven(box: Sandbox, wall: str, probe: str, *arguments: str) -> None:
    result = await py(box, probe, *arguments)
    printed = result.stdout.decode(errors="replace").strip() or result.stderr.decode(errors="replace").strip()[-200:]
    assert printed == "closed", f"not so: {wall} ({printed or 'no answer'}); the attack was left out"
