"""Another user of the same machine, who attacks what the tests start.

    @pytest.mark.other_user
    def test_nobody_else_reads_it(other_user):
        done = other_user.run("import sys; print(open(sys.argv[1]).read())", path)
        assert "PermissionError" in done.stderr

    with other_user.running("...", port) as process:    # goes on beside the test, ends with the block
        process.stdout.readline()

The code runs under a uid and gid of its own, in no group, in `/`, on an interpreter that this user may read. It has
the standard library and no package of ours: an attacker has none of it either. Hand it values as arguments
(`sys.argv[1:]`). A folder of pytest's (`tmp_path`, mode 0700) would protect what lies in it by itself, and the test
would prove nothing: put what is attacked into `other_user.folder()`, which every user may enter.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

_BARE_UIDS = range(61000, 64000)  # no distribution gives them out
_PYTHONS = (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3")


@dataclass(frozen=True, kw_only=True)
class OtherUser:
    """An account without rights. Made by `account`, handed to tests as the fixture `other_user`."""

    uid: int
    gid: int
    python: str

    def run(
        self, code: str, *args: object, input: str = "", deadline_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Run Python as this user to its end; the result has `returncode`, `stdout` and `stderr`. Raises
        subprocess.TimeoutExpired after `deadline_s`, when it is killed."""
        with self.running(code, *args) as process:
            out, err = process.communicate(input, timeout=deadline_s)
            return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    @contextlib.contextmanager
    def running(self, code: str, *args: object) -> Generator[subprocess.Popen[str]]:
        """A process of Python as this user, with pipes as its three streams. Killed where the block ends."""
        process = _start(self, code, *args)
        with process:
            try:
                yield process
            finally:
                process.kill()

    @contextlib.contextmanager
    def folder(self) -> Generator[Path]:
        """A new folder of the tests' own user that every other user may enter and list, as `/srv`."""
        with tempfile.TemporaryDirectory(prefix="agentrl-open-", dir="/tmp") as name:
            Path(name).chmod(0o755)
            yield Path(name)


def _start(user: OtherUser, code: str, *args: object) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    mark = {name: value for name, value in os.environ.items() if name == "AGENTRL_OWNER"}  # it ends with the tests
    return subprocess.Popen(
        [user.python, "-I", "-c", code, *map(str, args)],
        user=user.uid, group=user.gid, extra_groups=[], cwd="/", stdin=pipe, stdout=pipe, stderr=pipe, text=True,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"} | mark, start_new_session=True,
    )  # fmt: skip


@contextlib.contextmanager
def account() -> Generator[OtherUser]:
    """A throw-away account of this machine; a bare uid where none can be made. Needs root."""
    name, python = f"agentrl-other-{os.getpid()}", _python()
    assert python is not None
    useradd = shutil.which("useradd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if useradd and _works([useradd, "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", name]):
        found = pwd.getpwnam(name)
        try:
            yield OtherUser(uid=found.pw_uid, gid=found.pw_gid, python=python)
        finally:
            _works([str(Path(useradd).with_name("userdel")), name])
    else:
        taken = {entry.pw_uid for entry in pwd.getpwall()}
        uid = next(uid for uid in _BARE_UIDS[os.getpid() % len(_BARE_UIDS) :] if uid not in taken)
        yield OtherUser(uid=uid, gid=uid, python=python)


def missing() -> str | None:
    """Why there is no other user on this machine; None if there can be one."""
    if os.geteuid() != 0:
        return "only root becomes another user"
    return None if _python() else f"no other user may run any of {', '.join(_PYTHONS)}"


@functools.cache
def _python() -> str | None:
    """An interpreter that another user may run: one below /root is often none."""
    for python in _PYTHONS:
        user = OtherUser(uid=_BARE_UIDS[0], gid=_BARE_UIDS[0], python=python)
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if user.run("import json, os, socket; print(os.getuid())").stdout.strip() == str(user.uid):
                return python
    return None


def _works(argv: list[str]) -> bool:
    try:
        return subprocess.run(argv, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
