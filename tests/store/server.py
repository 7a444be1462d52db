"""A PostgreSQL server in a folder of its own, for the tests marked postgres."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
from collections.abc import Generator, Sequence
from pathlib import Path

_DEADLINE_S = 120


def programs() -> Path | None:
    """The folder of PostgreSQL's server programs: on the path, or where Debian puts them; None if there is none."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return folders[-1].parent if folders else None


class Server:
    """One server. It listens on a socket in its folder and nowhere else."""

    def __init__(self, folder: Path, *, durable: bool = False, on: Sequence[str] = ()) -> None:
        """`durable`: it waits for its disk, as a server should; tests need not. `on`: what runs its programs elsewhere,
        in a network that may reach it."""
        found = programs()
        assert found is not None
        self._programs, self.folder, self._durable, self._on = found, folder, durable, list(on)
        self.url = f"postgresql://agentrl@/agentrl?host={folder}"

    def make(self) -> None:
        """Make the cluster and its database."""
        if os.geteuid() == 0:  # the server refuses to be root
            shutil.chown(self.folder, "postgres", "postgres")
        self._run(
            "initdb", "-D", f"{self.folder}/data", "-U", "agentrl", "-A", "trust", "-N", "--locale=C", "-E", "UTF8"
        )
        if self._on:
            with Path(self.folder, "data", "pg_hba.conf").open("a") as rules:
                rules.write("host all all samenet trust\n")
        self.start()
        self._run("createdb", "-h", f"{self.folder}", "-U", "agentrl", "agentrl")

    def start(self, *more: str) -> None:
        """Start it, with settings on top as `name=value`."""
        listens = "*" if self._on else ""
        settings = f"-k {self.folder} -c listen_addresses='{listens}' -c max_connections=40"
        settings += "".join(f" -c {setting}" for setting in more)
        settings += "" if self._durable else " -c fsync=off -c shared_buffers=32MB"
        self._run("pg_ctl", "-D", f"{self.folder}/data", "-w", "-l", f"{self.folder}/log", "-o", settings, "start")

    def stop(self, how: str = "fast") -> None:
        """Stop it: "fast" ends all sessions, "immediate" is a crash."""
        self._run("pg_ctl", "-D", f"{self.folder}/data", "-w", "-m", how, "stop")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), *arguments]
        if os.geteuid() == 0:
            command = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups", *command]
        command = [*self._on, *command]
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "LC_ALL": "C"}
        done = subprocess.run(command, cwd="/", env=environment, capture_output=True, timeout=_DEADLINE_S, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout!r} {done.stderr!r}"


@contextlib.contextmanager
def running(folder: Path, *, durable: bool = False, on: Sequence[str] = ()) -> Generator[Server]:
    """A server that runs until the end of the block."""
    server = Server(folder, durable=durable, on=on)
    server.make()
    try:
        yield server
    finally:
        with contextlib.suppress(AssertionError):  # a test may have stopped it
            server.stop("immediate")


def missing() -> str | None:
    """Why no server can be run here; None if it can."""
    if programs() is None:
        return "no PostgreSQL server is installed (Debian: postgresql)"
    if os.geteuid() == 0:
        try:
            pwd.getpwnam("postgres")
        except KeyError:
            return "a PostgreSQL server refuses to run as root, and there is no user postgres"
    return None
