"""A Docker engine of the tests' own, with one small image made of this machine's programs: nothing is pulled."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agentrl.host.janitor import OwnedFolder
from agentrl.host.ports import free_port

from . import certificates, rootfs

IMAGE = "agentrl-test:1"


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[str]:
    """Address of an engine that has the image `IMAGE`: the one that answers here, else a private `dockerd`."""
    address = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    if answers(address):
        import_image(address)
        yield address
        return
    with daemon() as address:
        yield address


@pytest.fixture(scope="session")
def busybox_image(docker_engine: str) -> str:
    """The name of an image with nothing but busybox, as `FROM scratch` and one static program make it."""
    with busybox_root() as root:
        import_root(docker_engine, root, "agentrl-busybox:1")
    return "agentrl-busybox:1"


@contextlib.contextmanager
def busybox_root(without: Collection[str] = ()) -> Iterator[Path]:
    """A root file system with busybox and links for all that it can be, but those in `without`."""
    program = shutil.which("busybox")
    if program is None:
        pytest.skip("busybox is not installed (apt-get install busybox-static)")
    names = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.split()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "root")
        for folder in ("bin", "etc", "proc", "dev", "tmp", "workspace"):
            (root / folder).mkdir(parents=True)
        shutil.copy2(program, root / "bin/busybox")
        for applet in {*names} - {"busybox", *without}:
            (root / "bin" / applet).symlink_to("busybox")
        (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n")
        (root / "tmp").chmod(0o1777)
        root.chmod(0o755)
        yield root


@dataclass(frozen=True)
class TlsEngine:
    """An engine that asks for certificates: `folder` holds the right ones. `local` is its socket, for the tests."""

    url: str
    folder: Path
    local: str


@pytest.fixture(scope="session")
def tls_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsEngine]:
    """A private `dockerd --tlsverify`, whose certificate is for 127.0.0.1, with the image `IMAGE`."""
    server, client = tmp_path_factory.mktemp("server"), tmp_path_factory.mktemp("client")
    authority = certificates.Authority("the CA of the tests")
    authority.issue(server, "127.0.0.1")
    authority.issue(client)
    url = f"tcp://127.0.0.1:{free_port()}"
    keys = [f"--tlscacert={server}/ca.pem", f"--tlscert={server}/cert.pem", f"--tlskey={server}/key.pem"]
    with daemon(f"--host={url}", "--tlsverify", *keys) as local:
        yield TlsEngine(url, client, local)


@contextlib.contextmanager
def daemon(*flags: str) -> Iterator[str]:
    """A private `dockerd` with the image `IMAGE`: the address of its socket."""
    with contextlib.closing(OwnedFolder(prefer_memory=False, patience_s=10.0)) as owned:
        name = str(owned.path)
        address = f"unix://{name}/docker.sock"
        with Path(name, "log").open("wb") as log:
            own = {**env(address), **owned.mark}
            command, pipe = daemon_command(name, *flags), subprocess.PIPE
            engine = subprocess.Popen(command, stdin=pipe, stdout=log, stderr=log, start_new_session=True, env=own)
        try:
            wait_for(address, engine, Path(name, "log"))
            import_image(address)
            yield address
        finally:
            assert engine.stdin is not None
            engine.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                engine.wait(timeout=20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)
            engine.wait()
            for line in reversed(Path("/proc/mounts").read_text().splitlines()):
                if line.split()[1].startswith(f"{name}/"):
                    subprocess.run(["umount", "-l", line.split()[1]], check=False)


# A daemon that only ends leaves its containers running.
UNTIL_STDIN_CLOSES = """
pidfile=$1
shift
{ dockerd --pidfile="$pidfile" "$@"; kill $$; } &
read -r _
docker ps --quiet | xargs --no-run-if-empty docker kill
kill "$(cat "$pidfile")"
wait
"""


def daemon_command(folder: str, *flags: str) -> list[str]:
    """A daemon without networks and without configuration of the machine's, that ends when this process has."""
    paths = [f"--host=unix://{folder}/docker.sock", f"--data-root={folder}/data", f"--exec-root={folder}/run"]
    network = ["--bridge=none", "--iptables=false", "--ip-masq=false", f"--config-file={folder}/none.json"]
    rest = ["--storage-driver=overlay2", "--shutdown-timeout=2", "--default-ulimit=nofile=1024:4096"]
    Path(folder, "none.json").write_text("{}")
    return ["sh", "-c", UNTIL_STDIN_CLOSES, "dockerd-of-tests", f"{folder}/pid", *paths, *network, *rest, *flags]


def answers(address: str) -> bool:
    return subprocess.run(["docker", "version"], env=env(address), capture_output=True, check=False).returncode == 0


def wait_for(address: str, daemon: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 150
    while not answers(address):
        if daemon.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"dockerd does not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.1)


def import_image(address: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name, "root")
        rootfs.build(root)
        import_root(address, root, IMAGE)


def import_root(address: str, root: Path, image: str) -> None:
    """Make an image of a folder, without a registry."""
    settings = ["-c", "ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "-c", "WORKDIR /workspace"]
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as tar:
        command = ["docker", "import", *settings, "-", image]
        subprocess.run(command, stdin=tar.stdout, env=env(address), check=True, capture_output=True, timeout=120)


def env(address: str) -> dict[str, str]:
    return {**os.environ, "DOCKER_HOST": address}
