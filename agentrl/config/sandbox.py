"""The `[sandbox]` table of a run file: where the engines of a run's boxes are."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from agentrl.config.sections import Section
from agentrl.errors import ConfigError


class DockerSettings(Section):
    """The engine of the backend `docker`, for a whole run; without it docker's own variables name one."""

    base_url: str | None = None  # of the engine: tcp://HOST:2376 or unix:///PATH; default: DOCKER_HOST
    cert_path: str | None = None  # folder of ca.pem, cert.pem and key.pem, for tcp://; at this path on every node
    image: str | None = None  # of boxes whose environment names none

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        parts = urlsplit(self.base_url or "")
        if self.base_url and (parts.scheme not in ("tcp", "unix") or not (parts.netloc or parts.path)):
            raise ConfigError("sandbox.docker.base_url", self.base_url, "give tcp://HOST:2376 or unix:///PATH")
        if parts.scheme == "tcp" and self.cert_path is None:
            hint = f"{self.base_url} is reached over TLS alone: give the folder of ca.pem, cert.pem and key.pem"
            raise ConfigError("sandbox.docker.cert_path", None, hint)
        if parts.scheme != "tcp" and self.cert_path is not None:
            hint = "it is for an engine over TLS: give base_url = 'tcp://HOST:2376' as well, or leave it out"
            raise ConfigError("sandbox.docker.cert_path", self.cert_path, hint)
        return self


class Sandboxes(Section):
    """Settings of the backends that boxes come from; which backend, the environment says."""

    docker: DockerSettings = DockerSettings()
    swe_rex: dict[str, Any] = Field(
        default_factory=dict
    )  # arguments of the backend `swe-rex`: deployment, network, and the deployment's fields
    inspect: dict[str, Any] = Field(
        default_factory=dict
    )  # arguments of the backend `inspect`: kind, config, network, image

    def beside(self, folder: Path) -> Self:
        """With a folder of certificates taken from `folder`."""
        if self.docker.cert_path is None:
            return self
        path = str((folder / Path(self.docker.cert_path).expanduser()).resolve())
        return self.model_copy(update={"docker": self.docker.model_copy(update={"cert_path": path})})

    def arguments(self) -> dict[str, dict[str, Any]]:
        """What the constructor of a backend is given, by its registry id."""
        own = {"swe-rex": dict(self.swe_rex), "inspect": dict(self.inspect)}
        return {"docker": self.docker.model_dump(exclude_none=True), **own}
