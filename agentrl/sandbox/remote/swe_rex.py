"""The backend `swe-rex`: boxes that SWE-ReX deploys (local, docker, modal, fargate, daytona, remote).

A box of SWE-ReX is reached over HTTP, so it has a network, and who it can reach is the deployment's matter: docker's
bridge, a provider's rules. That is not the closed box that a spec asks for by default, so the backend needs
`network=True`. `deployment="local"` has no wall at all. What ends a box whose owner died: for local the janitor of this
machine; elsewhere, where commands start as root, a watch in the box after ten minutes of silence; else the provider's
own time limit.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final, TypeVar

import trio

from agentrl.errors import SandboxUnavailable, UsageError, boundary
from agentrl.host.clocks import host_time
from agentrl.host.installation import install_command
from agentrl.host.user_warnings import warn
from agentrl.protocols import SandboxSpec
from agentrl.sandbox.remote.box import AsyncioLoop, RemoteBackend
from agentrl.sandbox.remote.helper_calls import ProviderBox

T = TypeVar("T")

DEPLOYMENTS: Final = ("local", "docker", "modal", "fargate", "daytona", "remote")
_START_S: Final = 300.0
_STOP_S: Final = 60.0


class SweRex(RemoteBackend):
    """Boxes of SWE-ReX. `deployment` is one of its kinds, `options` are fields of the kind's own configuration
    (`swerex.deployment.config`). A spec's image goes into the field `image`. Needs the extra `swe-rex`."""

    name = "swe-rex"

    def __init__(
        self, *, deployment: str = "docker", network: bool = False, image: str | None = None, **options: Any
    ) -> None:
        super().__init__()
        if deployment not in DEPLOYMENTS:
            raise UsageError(f"swe-rex: deployment = {deployment!r}: choose one of {', '.join(DEPLOYMENTS)}")
        self._deployment, self._network, self._image, self._options = deployment, network, image, options
        self._loop = AsyncioLoop()

    async def connect(self, spec: SandboxSpec) -> ProviderBox:
        """Deploy one box."""
        if not (spec.network or self._network):
            raise SandboxUnavailable(
                "swe-rex: its boxes have a network, and this box is to have none: say network=true if the policy may "
                "reach what the deployment reaches, or take the backend bubblewrap or docker"
            )
        deployment_options, image_name = dict(self._options), spec.image or self._image
        is_local = self._deployment == "local"
        if image_name is not None and not is_local:
            deployment_options["image"] = image_name
        with boundary(SandboxUnavailable, "swe-rex:"):
            make_deployment = _maker(self._deployment, deployment_options)
        if is_local:
            warn("swe-rex: commands of the policy run on this machine WITHOUT a sandbox")
        deployed_box = _Deployment(self._loop, blocking=is_local)
        with host_time("SWE-ReX", deadline_s=_START_S + 10.0), boundary(SandboxUnavailable, "swe-rex: no box:"):
            await deployed_box.start(make_deployment)
        return deployed_box

    async def disconnect(self) -> None:
        await self._loop.aclose()


class _Deployment:
    """One deployment. Satisfies `ProviderBox`."""

    def __init__(self, loop: AsyncioLoop, *, blocking: bool) -> None:
        self.own_machine = blocking
        self.most_wait_s = 20.0 if blocking else 0.5  # its server does nothing else while a command runs
        self._loop, self._blocking = loop, blocking
        self._deployment: Any = None

    async def start(self, make: Callable[[], Any]) -> None:
        """Deploy. A deployment that was begun is known, and stopped if it fails or the caller is cancelled."""
        # Known before it is started: a deployment that fails half-way may have started a machine already, which costs
        # money until somebody stops it.
        self._deployment = make()
        try:
            await self._call(self._deployment.start, deadline_s=_START_S)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self.close()
            raise

    async def execute(self, argv: Sequence[str], *, deadline_s: float) -> str:
        swerex_command = _library("runtime.abstract").Command(command=list(argv), timeout=deadline_s)
        response: Any = await self._call(
            lambda: self._deployment.runtime.execute(swerex_command), deadline_s=deadline_s
        )
        return str(response.stdout)

    async def write_text(self, path: str, text: str, *, deadline_s: float) -> None:
        write_request = _library("runtime.abstract").WriteFileRequest(path=path, content=text)
        await self._call(lambda: self._deployment.runtime.write_file(write_request), deadline_s=deadline_s)

    async def close(self) -> None:
        """Stop the deployment."""
        if self._deployment is not None:
            deployment, self._deployment = self._deployment, None
            await self._call(deployment.stop, deadline_s=_STOP_S)

    async def _call(self, make: Callable[[], Coroutine[Any, Any, T]], *, deadline_s: float) -> T:
        """A coroutine of SWE-ReX; the local runtime blocks the loop that it runs in, so it has one of its own."""
        if self._blocking:
            return await self._loop.call(lambda: asyncio.to_thread(asyncio.run, make()), deadline_s=deadline_s)
        return await self._loop.call(make, deadline_s=deadline_s)


def _maker(kind: str, options: Mapping[str, Any]) -> Callable[[], Any]:
    """Return the function that makes a deployment of a kind. Raises SandboxUnavailable without SWE-ReX, a ValueError
    for wrong options."""
    config_module = _library("deployment.config")
    deployment: Any = getattr(config_module, f"{kind.capitalize()}DeploymentConfig")(**options)
    return deployment.get_deployment


def _library(module: str) -> Any:
    """A module of SWE-ReX, which a machine need not have."""
    try:
        return importlib.import_module(f"swerex.{module}")
    except ImportError as error:
        raise SandboxUnavailable(
            f"swe-rex: it, or what this deployment needs, is not installed ({error}): {install_command('swe-rex')}"
        ) from None
