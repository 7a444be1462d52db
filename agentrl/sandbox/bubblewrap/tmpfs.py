"""A bounded file system without root: a tmpfs mounted in a user and mount namespace of its own.

No process lives in the namespaces: descriptors keep them, so they end with this process, however it ends. Commands of
the box enter by `nsenter`; this process reaches the files through a descriptor of the mount.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
from pathlib import Path

_START_S = 10.0
_MOUNT = """mount -t tmpfs -o "$1" agentrl-box "$2" && mkdir "$2/work" "$2/tmp" "$2/shm" || exit
mkdir "$2/usr" && mount -t overlay -o "ro,nosuid,nodev,$3" agentrl-usr "$2/usr" 2>/dev/null || rmdir "$2/usr"
echo ready && read -r _"""


class Enclosure:
    """One namespace pair with one tmpfs. `root` is where this process finds it, `mountpoint` where its commands do."""

    def __init__(self, mountpoint: Path, *, options: str, overlay: str = "") -> None:
        """Mount over the empty folder `mountpoint`, with `overlay` (a mount option) in its folder `usr` where that can
        be. Raises OSError where this user may not."""
        tools = [shutil.which(name) for name in ("unshare", "nsenter", "mount")]
        if None in tools:
            raise OSError("util-linux is not installed")
        self._nsenter = str(tools[1])
        self.mountpoint = mountpoint
        self._fds: list[int] = []
        argv = [str(tools[0]), "--user", "--map-root-user", "--mount", "--propagation", "private"]
        argv += ["sh", "-c", _MOUNT, "sh", options, str(mountpoint), overlay]
        maker = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            assert maker.stdout
            ready, _, _ = select.select([maker.stdout], [], [], _START_S)
            if not ready or maker.stdout.readline() != b"ready\n":
                maker.kill()
                _, words = maker.communicate()
                raise OSError(words.decode(errors="replace").strip() or "no namespace of one's own")
            proc = f"/proc/{maker.pid}"
            for name in (f"{proc}/ns/user", f"{proc}/ns/mnt", f"{proc}/root{mountpoint}"):
                self._fds.append(os.open(name, os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            self.close()
            raise
        finally:
            maker.kill()
            maker.communicate()

    @property
    def root(self) -> Path:
        return Path(f"/proc/self/fd/{self._fds[2]}")

    @property
    def entrance(self) -> list[str]:
        """The words before a command that run it inside. They name our descriptors by our process id: were they
        inherited, the command inside would hold them too."""
        user, mount, _ = (f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds)
        return [self._nsenter, f"--user={user}", f"--mount={mount}", "--preserve-credentials", "--"]

    def close(self) -> None:
        """Let go: the kernel frees the file system when no command is left in it. Idempotent."""
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds = []
