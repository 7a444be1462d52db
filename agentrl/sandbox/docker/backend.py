"""Boxes that are containers of a Docker engine, through the docker SDK, in threads. One container a box.

What bounds what (closed by default; only `SandboxSpec.network` opens): network none, no capabilities, no new
privileges, our own system call list, read-only root, /workspace and /tmp as tmpfs of bounded size and inodes, memory,
pids and CPU share of the container, rlimits of each process; commands run under a user id that no other box has.

How it ends: process 1 lives only while this process holds the container's stdin, and the engine removes a container
that ended. So a box goes when its owner dies, however it dies, also on an engine far away; a container that was made
but not started is removed by the owner's janitor. An ended command may leave processes: `kill -1` by the box's own user
ends them all at once, while the engine's process 1 is another user's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, cast

import trio

from agentrl.errors import SandboxError, SandboxLost, SandboxUnavailable, boundary
from agentrl.host.clocks import host_time
from agentrl.host.cpu_time import GroupCpuTime
from agentrl.host.installation import install_command
from agentrl.host.janitor import OwnedFolder, is_dead
from agentrl.protocols import SandboxSpec
from agentrl.sandbox.bubblewrap import seccomp
from agentrl.sandbox.docker.attached_streams import AttachedStreams, hijack
from agentrl.sandbox.docker.container import ENV, Container
from agentrl.sandbox.docker.engine_address import CA, CERTIFICATE, KEY, EngineAddress
from agentrl.sandbox.work_folder import WORKSPACE

T = TypeVar("T")

_LABEL, _HOST_LABEL = "agentrl.owner", "agentrl.host"
_KEEPER_UID = 65534  # of process 1, which the box's own user cannot signal
_FIRST_UID, _UIDS = 20_000, 40_000  # of the commands; below 65536, so that engines with mapped ids have them too
_SPARE_PIDS = 24  # for the engine's own threads and for what ends the policy's processes
_CALL_S = 60.0  # deadline of one call to the engine
_PING_S = 5.0  # and for it to say that it is there
_THREADS = 32
_CGROUPS = Path("/sys/fs/cgroup")
_IDLE = 4  # connections kept open between calls
_REMOVER = """
import http.client, json, socket, ssl, sys, urllib.parse
address, certificates, api, owner = sys.argv[1:]
url = urllib.parse.urlsplit(address)
if certificates:
    tls = ssl.create_default_context(cafile=certificates + "/ca.pem")
    tls.load_cert_chain(certificates + "/cert.pem", certificates + "/key.pem", password="")

def ask(method, path):
    if certificates:
        engine = http.client.HTTPSConnection(url.hostname, url.port, timeout=10, context=tls)
    else:
        engine = http.client.HTTPConnection(url.hostname or "localhost", url.port, timeout=10)
    if url.scheme == "unix":
        engine.sock = socket.socket(socket.AF_UNIX)
        engine.sock.settimeout(10)
        engine.sock.connect(url.path)
    engine.request(method, api + path)
    return engine.getresponse().read()

labels = urllib.parse.quote(json.dumps({"label": ["agentrl.owner=" + owner]}))
found = json.loads(ask("GET", "/containers/json?all=1&filters=" + labels))
for container in found:
    ask("DELETE", "/containers/" + container["Id"] + "?force=1")
sys.exit(len(found) > 0)
"""


class Docker:
    """Boxes of a Docker engine, closed by default. `image` is the default of specs that name none; it must be
    present on the engine and hold `sh` and coreutils. `base_url` is the engine's address (`unix://...`,
    `tcp://...`), by default DOCKER_HOST. `cert_path` is a folder with `ca.pem`, `cert.pem` and `key.pem`, for an engine
    over TLS; by default DOCKER_CERT_PATH, if DOCKER_TLS_VERIFY is set."""

    name = "docker"

    def __init__(
        self, *, image: str | None = None, base_url: str | None = None, cert_path: str | os.PathLike[str] | None = None
    ) -> None:
        self._image, self._base_url, self._cert_path = image, base_url, cert_path
        self._engine: DockerEngine | None = None
        self._boxes: set[Container] = set()
        self._opening = trio.Lock()
        self._failed_at, self._failure = -math.inf, ""

    async def create(self, spec: SandboxSpec | None = None) -> Container:
        """A new container. Raises SandboxUnavailable with what to do, SandboxError if the engine fails."""
        spec = spec or SandboxSpec()
        image_name = spec.image or self._image
        if image_name is None:
            raise SandboxUnavailable("docker needs an image: Docker(image=...) or SandboxSpec(image=...)")
        docker_engine = await self._open()
        docker_engine.check(spec)
        return await Container.open(docker_engine, dataclasses.replace(spec, image=image_name), self._boxes)

    async def _open(self) -> DockerEngine:
        began_s = time.monotonic()
        async with self._opening:
            if self._engine is None:
                if began_s <= self._failed_at:  # they waited for the same, and would wait as long again
                    raise SandboxUnavailable(self._failure)
                try:
                    self._engine = await DockerEngine.open(self._base_url, self._cert_path)
                except SandboxError as open_error:
                    self._failed_at, self._failure = time.monotonic(), str(open_error)
                    raise
            return self._engine

    async def aclose(self) -> None:
        """Remove all containers. Idempotent."""
        with trio.CancelScope(shield=True):
            for open_box in list(self._boxes):
                await open_box.close()
            if self._engine is not None:
                docker_engine, self._engine = self._engine, None
                await docker_engine.close()


class DockerEngine:
    """Calls to the engine, in threads; every failure is named as the host's, and their time is the host's. Satisfies
    `engine_protocol.ContainerEngine`."""

    def __init__(self, client: Any, address: EngineAddress) -> None:
        self._client, self._address = client, address
        self._cpus = float(client.info().get("NCPU", 1))
        self._threads = trio.CapacityLimiter(_THREADS)
        self._uids = itertools.count(secrets.randbelow(_UIDS))
        certificates = str(address.certificates.absolute()) if address.certificates else ""
        api_path = f"/v{client.api.api_version}"
        remover_command = [sys.executable, "-I", "-c", _REMOVER, address.url, certificates, api_path]
        self.folder = OwnedFolder(prefer_memory=False, remover=remover_command)
        self.owner, self.host = self.folder.path.name, _host()
        self._counters: dict[str, Path | None] = {}
        self._lost_at = -math.inf

    @classmethod
    async def open(cls, base_url: str | None, cert_path: str | os.PathLike[str] | None) -> DockerEngine:
        """Connect, and remove the containers of dead owners on this host."""
        try:
            import docker
        except ImportError:
            raise SandboxUnavailable(f"the docker SDK is not installed: {install_command('docker')}") from None

        docker_sdk = cast(Any, docker)

        def connect() -> DockerEngine:
            engine_address = EngineAddress.find(base_url, cert_path)
            client_options: dict[str, Any] = {
                "version": engine_address.api_version(),
                "timeout": _CALL_S,
                "max_pool_size": _IDLE,
            }
            if certificate_folder := engine_address.certificates:
                client_cert = (str(certificate_folder / CERTIFICATE), str(certificate_folder / KEY))
                client_options["tls"] = docker_sdk.tls.TLSConfig(
                    client_cert=client_cert, ca_cert=str(certificate_folder / CA), verify=True
                )
            with boundary(SandboxUnavailable, f"no docker engine answers at {engine_address.url}:"):
                docker_client = docker_sdk.DockerClient(base_url=engine_address.url, **client_options)
                docker_client.api.trust_env = False  # or REQUESTS_CA_BUNDLE would take the place of our CA
                return cls(docker_client, engine_address)

        docker_engine = await trio.to_thread.run_sync(connect)
        try:
            await docker_engine.call(docker_engine._reap)
        except BaseException:
            with trio.CancelScope(shield=True):
                await docker_engine.close()
            raise
        return docker_engine

    def _reap(self) -> None:
        containers = self._client.containers.list(all=True, filters={"label": f"{_HOST_LABEL}={self.host}"})
        for container in containers:
            if is_dead(container.labels.get(_LABEL, "")):
                with contextlib.suppress(Exception):
                    container.remove(force=True)

    def check(self, spec: SandboxSpec) -> None:
        """Raises SandboxUnavailable for a box that could reach the engine itself, which asks nobody who he is."""
        if spec.network and self._address.url.startswith("tcp:") and self._address.tls is None:
            raise SandboxUnavailable(
                f"a box with a network could take over the engine at {self._address.url}, which asks for no "
                "certificate: start it with --tlsverify, and give cert_path"
            )

    async def call(self, function: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Run one SDK call in a thread. Raises SandboxError; SandboxLost if the engine does not answer. If it does not
        even say that it is there, calls that waited for a thread meanwhile are not made: each would take its whole
        deadline as well. A call about a container that hangs stops no other box's."""
        began_s = time.monotonic()

        def run() -> T:
            if began_s <= self._lost_at:
                raise SandboxLost(self._address.lost("it did not answer another call"))
            try:
                with boundary(SandboxError, "docker:"):
                    return function(*arguments, **options)
            except SandboxError as call_error:
                cause = call_error.__cause__
                if not isinstance(cause, OSError) or hasattr(cause, "is_client_error"):  # the SDK's own: an answer
                    raise
                failure_description = f"{type(cause).__name__}; a call has {self._client.api.timeout:.0f} s"
                # An engine that answers a ping while one call hangs has a container in trouble; an engine that does not
                # answer is gone for all boxes. Only the second may let the waiting calls of others fail at once.
                if self._is_there():
                    raise SandboxLost(
                        f"the docker engine is there, and left a call unanswered ({failure_description})"
                    ) from cause
                self._lost_at = time.monotonic()
                raise SandboxLost(self._address.lost(failure_description)) from cause

        with host_time("the docker engine"):
            return await trio.to_thread.run_sync(run, limiter=self._threads)

    def _is_there(self) -> bool:
        api_client = self._client.api
        with contextlib.suppress(OSError):
            return bool(api_client.get(f"{api_client.base_url}/_ping", timeout=min(_PING_S, api_client.timeout)).ok)
        return False

    def next_uid(self) -> int:
        """A user id for a box's commands, so that its processes are counted by themselves."""
        return _FIRST_UID + next(self._uids) % _UIDS

    async def start_container(self, spec: SandboxSpec, uid: int) -> tuple[str, AttachedStreams]:
        """Create and start a container whose process 1 lives while the returned connection is open."""
        api_client = self._client.api
        container = await self.call(self._create, spec, uid)
        try:
            # Attached before it is started: process 1 reads its input from the first instant, and ends if nobody holds
            # it.
            keeper_streams = await self._hijack(f"/containers/{container}/attach?stdin=1&stream=1", {})
            try:
                await self.call(api_client.start, container)
                self._counters[container] = await self.call(self._find_counter, container)
            except BaseException:
                await keeper_streams.close()
                raise
        except BaseException:
            await self.remove(container)
            raise
        return container, keeper_streams

    def _create(self, spec: SandboxSpec, uid: int) -> str:
        limits = spec.limits
        tmpfs_options = f"rw,exec,nosuid,nodev,size={limits.disk_bytes},nr_inodes={max(1024, limits.disk_bytes >> 12)}"
        memory_bytes = limits.memory_bytes + 3 * limits.disk_bytes  # the work folder, /tmp and /dev/shm are memory too
        process_limits = {
            "nofile": limits.open_files,
            "fsize": limits.file_bytes,
            "core": 0,
            "cpu": math.ceil(limits.cpu_s),
        }
        api_client = self._client.api
        host_config = api_client.create_host_config(
            network_mode="bridge" if spec.network else "none",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges=true", f"seccomp={seccomp.docker_profile()}"],
            read_only=True,
            tmpfs={
                WORKSPACE: f"{tmpfs_options},uid={uid},gid={uid},mode=0755",
                "/tmp": f"{tmpfs_options},mode=1777",
                "/dev/shm": f"{tmpfs_options},mode=1777",
                **dict.fromkeys(spec.covered, "ro,nosuid,nodev,noexec,size=4096,mode=0555"),
            },
            ipc_mode="private",
            mem_limit=memory_bytes,
            memswap_limit=memory_bytes,
            pids_limit=limits.pids + _SPARE_PIDS,
            nano_cpus=int(min(limits.cpus, self._cpus) * 1e9),
            ulimits=[
                {"Name": limit_name, "Soft": limit_value, "Hard": limit_value}
                for limit_name, limit_value in process_limits.items()
            ],
            init=True,
            # The engine removes it when it ends, whoever is alive by then; our own removal is for those that never
            # started (law 4).
            auto_remove=True,
            # Else the engine writes all output of process 1 to a file on its disk, which no limit of the box bounds.
            log_config={"Type": "none"},
        )
        container = api_client.create_container(
            spec.image,
            ["cat"],
            user=f"{_KEEPER_UID}:{_KEEPER_UID}",
            hostname="box",
            working_dir=WORKSPACE,
            stdin_open=True,
            labels={_LABEL: self.owner, _HOST_LABEL: self.host},
            host_config=host_config,
            environment=ENV,
        )
        return container["Id"]

    async def _hijack(self, path: str, body: Mapping[str, object], *, output_bytes: int = 0) -> AttachedStreams:
        api_version = self._client.api.api_version
        with host_time("the docker engine"):
            return await hijack(self._address, f"/v{api_version}{path}", body, output_bytes=output_bytes)

    async def execute(
        self, container: str, argv: Sequence[str], uid: int, env: Mapping[str, str], output_bytes: int
    ) -> tuple[str, AttachedStreams]:
        """Start a command in a container: its id at the engine, and its streams."""
        exec_options = {"stdin": True, "environment": dict(env), "user": f"{uid}:{uid}", "workdir": "/"}
        execution = await self.call(self._client.api.exec_create, container, list(argv), **exec_options)
        start_options = {"Detach": False, "Tty": False}
        return execution["Id"], await self._hijack(
            f"/exec/{execution['Id']}/start", start_options, output_bytes=output_bytes
        )

    async def state(self, execution: str) -> tuple[bool, int | None]:
        """Whether a command still runs, or is yet to start, and its exit code."""

        def look() -> tuple[bool, int | None]:
            exec_report = self._client.api.exec_inspect(execution)
            return bool(exec_report["Running"]) or exec_report["ExitCode"] is None, exec_report["ExitCode"]

        return await self.call(look)

    async def processes(self, container: str) -> int:
        """How many processes a container has, threads among them where its control group can be read. The engine's own
        answer is the last resort: it starts ps for it."""
        if counter_file := self._counters.get(container):
            with contextlib.suppress(OSError, ValueError):
                return int(counter_file.read_text())
        return await self.call(lambda: len(self._client.api.top(container)["Processes"] or ()))  # null: none is left

    def cpu_time(self, container: str, cpus: float) -> GroupCpuTime:
        """Measure the CPU time of a container's processes from now on; nothing is known of an engine on another
        machine."""
        counter_file = self._counters.get(container)
        if counter_file is None:
            return GroupCpuTime(None, None, cpus=cpus)
        group_folder = counter_file.parent
        account_folder = str(group_folder).replace(str(_CGROUPS / "pids"), str(_CGROUPS / "cpuacct"), 1)
        accounts = Path(account_folder, "cpuacct.usage")
        usage_file = next((path for path in (group_folder / "cpu.stat", accounts) if path.is_file()), None)
        return GroupCpuTime(group_folder / "cgroup.procs", usage_file, cpus=cpus)

    def _find_counter(self, container: str) -> Path | None:
        """The file in which the kernel counts a container's tasks, if the engine runs on this machine."""
        if not self._address.url.startswith("unix:"):
            return None
        process_id = self._client.api.inspect_container(container)["State"]["Pid"]
        with contextlib.suppress(OSError):
            for group_line in Path(f"/proc/{process_id}/cgroup").read_text().splitlines():
                _, controllers, group_path = group_line.split(":", 2)
                counter_file = _CGROUPS / controllers / group_path.lstrip("/") / "pids.current"
                # The id in the path makes sure: with an engine in another container, the process id that it reports
                # belongs to another namespace, and here it may be any program's.
                if controllers in ("", "pids") and container in group_path and counter_file.is_file():
                    return counter_file
        return None

    async def is_running(self, container: str) -> bool:
        """Whether a container is there and runs."""
        return await self.call(lambda: bool(self._client.api.inspect_container(container)["State"]["Running"]))

    async def out_of_memory(self, container: str, since: float) -> bool:
        """Whether the kernel killed something of a container for want of memory, since a time (seconds, Unix, by this
        machine's clock; the engine's may be another)."""

        def look() -> bool:
            event_filters = {"container": container, "event": "oom"}
            # Asked by the engine's clock. With ours, an engine a minute behind would report no event at all, and a box
            # that ran out of memory would read as a broken host.
            engine_time = datetime.fromisoformat(self._client.info()["SystemTime"]).timestamp()
            engine_since = engine_time - (time.time() - since)
            memory_events = self._client.events(
                since=int(engine_since), until=int(engine_time) + 1, filters=event_filters
            )
            return any(True for _ in memory_events)

        return await self.call(look)

    async def remove(self, container: str) -> None:
        """End and remove a container, if it is there."""
        self._counters.pop(container, None)
        api_client = self._client.api

        def remove() -> None:
            try:
                try:
                    api_client.remove_container(container, force=True)
                except Exception as remove_error:
                    # `auto_remove` may have been quicker. It has to be waited for: a caller takes the return for the
                    # proof that the box is gone.
                    if "already in progress" not in str(remove_error):
                        raise
                    api_client.wait(container, condition="removed")
            except Exception as remove_error:
                if "No such container" not in str(remove_error):
                    raise

        await self.call(remove)

    async def close(self) -> None:
        await trio.to_thread.run_sync(self.folder.close)
        await trio.to_thread.run_sync(self._client.close)


def _host() -> str:
    """Return an id of this machine since its last start, which makes process ids of labels comparable."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
