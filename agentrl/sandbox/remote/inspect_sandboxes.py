"""The backend `inspect`: boxes of inspect_ai's sandbox environments (docker and local of its own; k8s, modal, daytona
and others by its plug-ins).

inspect_ai's docker boxes have no network unless their compose file gives one; what others reach is their own matter,
so for these the backend needs `network=True`. `kind="local"` has no wall at all. What ends a box whose owner died: for
local the janitor of this machine; elsewhere, where commands start as root, a watch in the box after ten minutes of
silence; else the provider's own time limit, or `inspect sandbox cleanup KIND`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Final, cast

from agentrl.errors import SandboxUnavailable, boundary
from agentrl.host.clocks import host_time
from agentrl.host.installation import install_command
from agentrl.host.user_warnings import warn
from agentrl.protocols import SandboxSpec
from agentrl.sandbox.remote.box import AsyncioLoop, RemoteBackend
from agentrl.sandbox.remote.helper_calls import ProviderBox

_START_S: Final = 300.0
_STOP_S: Final = 60.0
_TASK: Final = "agentrl"
_COMPOSE: Final = """\
services:
  default:
    image: {image}
    x-local: true
    init: true
    command: tail -f /dev/null
    network_mode: none
    mem_limit: {memory}
    pids_limit: {pids}
    cpus: {cpus}
    security_opt: ["no-new-privileges:true"]
"""


class Inspect(RemoteBackend):
    """Boxes of an inspect_ai sandbox environment. `kind` is its name there, `config` its configuration file (a compose
    file, values of a chart). Without one a spec's image becomes a compose file of docker, closed. Needs the extra
    `inspect`, and the plug-in of the kind."""

    name = "inspect"

    def __init__(
        self, *, kind: str = "docker", config: str | None = None, network: bool = False, image: str | None = None
    ) -> None:
        super().__init__()
        self._kind, self._config, self._network, self._image = kind, config, network, image
        self._loop = AsyncioLoop()
        self._type: Any = None

    async def connect(self, spec: SandboxSpec) -> ProviderBox:
        """One sample's environment."""
        is_closed = self._kind == "docker" and self._config is None
        if spec.network and is_closed:
            raise SandboxUnavailable("inspect: this box is to have a network: give config=, a compose file with one")
        # Refused and not warned about: what such a box reaches is decided where we cannot look, and a spec without
        # `network` is a promise that the policy reaches nothing.
        if not (is_closed or spec.network or self._network):
            raise SandboxUnavailable(
                f"inspect: a box of {self._kind!r} may have a network, and this box is to have none: say network=true "
                "if the policy may reach what it reaches, or take the backend bubblewrap or docker"
            )
        config_file = self._config
        if is_closed:
            config_file = self._compose(spec)
        if self._kind == "local":
            warn("inspect: commands of the policy run on this machine WITHOUT a sandbox")
        if self._type is None:
            self._type = _environment_type(self._kind)
            if self._kind != "local":
                with host_time("inspect_ai", deadline_s=_START_S), boundary(SandboxUnavailable, "inspect:"):
                    await self._loop.call(lambda: self._type.task_init(_TASK, config_file), deadline_s=_START_S)
        sample_box = _Sample(self._loop, self._type, config_file, own_machine=self._kind == "local")
        with host_time("inspect_ai", deadline_s=_START_S), boundary(SandboxUnavailable, "inspect: no box:"):
            await sample_box.start()
        return sample_box

    def _compose(self, spec: SandboxSpec) -> str:
        image_name, limits = spec.image or self._image, spec.limits
        if image_name is None:
            raise SandboxUnavailable("inspect: docker needs an image: Inspect(image=...) or SandboxSpec(image=...)")
        compose_text = _COMPOSE.format(
            image=image_name, memory=limits.memory_bytes, pids=limits.pids + 24, cpus=limits.cpus
        )
        compose_file = self.folder() / f"compose-{abs(hash(compose_text))}.yaml"
        compose_file.write_text(compose_text)
        return str(compose_file)

    async def disconnect(self) -> None:
        if self._type is not None and self._kind != "local":
            environment_type, self._type = self._type, None
            await self._loop.call(lambda: environment_type.task_cleanup(_TASK, self._config, True), deadline_s=_STOP_S)
        await self._loop.aclose()


class _Sample:
    """The environment of one sample. Satisfies `ProviderBox`."""

    most_wait_s = 20.0

    def __init__(self, loop: AsyncioLoop, kind: Any, config: str | None, *, own_machine: bool) -> None:
        self.own_machine = own_machine
        self._loop, self._type, self._config = loop, kind, config
        self._all: dict[str, Any] = {}

    async def start(self) -> None:
        """Make it."""
        environments = await self._loop.call(
            lambda: self._type.sample_init(_TASK, self._config, {}), deadline_s=_START_S
        )
        self._all = cast("dict[str, Any]", environments)

    @property
    def _box(self) -> Any:
        return self._all.get("default") or next(iter(self._all.values()))

    async def execute(self, argv: Sequence[str], *, deadline_s: float) -> str:
        exec_result: Any = await self._loop.call(
            lambda: self._box.exec(
                list(argv), cwd="/", timeout=max(int(deadline_s), 1), timeout_retry=False, concurrency=False
            ),
            deadline_s=deadline_s + 5.0,
        )
        return str(exec_result.stdout)

    async def write_text(self, path: str, text: str, *, deadline_s: float) -> None:
        await self._loop.call(lambda: self._box.write_file(path, text), deadline_s=deadline_s)

    async def close(self) -> None:
        """Give it back."""
        if self._all:
            environments, self._all = self._all, {}
            sample_cleanup = self._type.sample_cleanup
            await self._loop.call(lambda: sample_cleanup(_TASK, self._config, environments, False), deadline_s=_STOP_S)


def _environment_type(kind: str) -> Any:
    """The class of an environment. Raises SandboxUnavailable that says what to install."""
    try:
        for module_name in ("docker.docker", "local"):  # its own kinds register as they are imported
            importlib.import_module(f"inspect_ai.util._sandbox.{module_name}")
        registry: Any = importlib.import_module("inspect_ai.util._sandbox.registry")
    except ImportError as import_error:
        raise SandboxUnavailable(
            f"inspect: inspect_ai is not installed ({import_error}): {install_command('inspect')}"
        ) from None
    with boundary(SandboxUnavailable, "inspect:"):
        return registry.registry_find_sandboxenv(kind)
