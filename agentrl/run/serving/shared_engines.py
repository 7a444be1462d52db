"""`agentrl fleet`: engines of one model that outlive the runs that share them, and the gateway before them.

Owns the engines' processes: one that dies, or is silent for `engine.liveness_deadline_s`, is started again, and its
tenants' fleets wait meanwhile. The runs bring the adapters back: each watches its own. Engines listen on sockets that
this user alone can reach, the gateway where the file says, and each tenant has a key. All of it ends with this process,
however that ends.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Self

import trio
from pydantic import Field, ValidationError, model_validator

from agentrl.config import MAX_LORA_RANK, EngineSettings
from agentrl.config.sections import Positive, Section, config_error
from agentrl.config.shared_engines import Tenant
from agentrl.engine.client import EngineClient
from agentrl.engine.router.gateway import QUANTUM, Gateway, SharedEngine
from agentrl.engine.running_engine import Door, running_engine
from agentrl.errors import ConfigError, EngineUnavailable, UsageError, matters
from agentrl.http.bounds import ServerBounds, raise_open_files
from agentrl.http.http_server import listen
from agentrl.models.resolve import model_dir
from agentrl.records import EngineKey
from agentrl.run.processes.restart import RestartBudget
from agentrl.run.serving.serve import end_on_signal

_LOOK_S = 1.0  # between two questions whether an engine lives
_LOADED = 4  # adapters of a tenant that a vLLM holds at once: with as many the turns of one batch may have begun


class FleetConfig(Section):
    """A fleet file."""

    model: str  # a registered id or a folder: the model of all tenants' runs
    host: str = "127.0.0.1"  # where the gateway listens
    port: Annotated[int, Field(ge=0, le=65_535)] = 8100  # 0 takes a free one
    max_context: Annotated[int, Field(ge=2)] = 2048  # tokens of prompt and answer together
    lora_rank: Annotated[int, Field(ge=1, le=MAX_LORA_RANK)] = 16  # the most that an adapter may have (vLLM)
    lora_targets: list[str] = Field(default_factory=list)  # adapters on these layers alone (vLLM on a CPU)
    quantum: Positive = QUANTUM  # tokens of one tenant before it is the next one's turn, times its weight
    queue_deadline_s: Positive = 240.0  # of a request in the queue: then it is answered 429
    lease_s: Positive = 120.0  # a tenant that asks for nothing for so long loses its adapters
    engine: EngineSettings = EngineSettings()
    tenants: Annotated[list[Tenant], Field(min_length=1)]

    @model_validator(mode="after")
    def _possible(self) -> Self:
        names = [tenant.name for tenant in self.tenants]
        if len(set(names)) != len(names):
            raise ConfigError("tenants.name", names, "each tenant has a name of its own")
        if self.engine.urls:
            raise ConfigError("engine.urls", self.engine.urls, "a fleet starts its engines: leave it out")
        if self.engine.sync != "auto":
            raise ConfigError("engine.sync", self.engine.sync, "only adapters travel to a fleet: leave it out")
        return self


def load(path: Path) -> FleetConfig:
    """Read a fleet file. Raises UsageError if it cannot be read, ConfigError for a bad setting."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read fleet file {str(path)!r}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    return parse(document)


def parse(document: dict[str, Any]) -> FleetConfig:
    """Validate a parsed document. Raises ConfigError."""
    try:
        return FleetConfig.model_validate(document)
    except ValidationError as error:
        raise config_error(error, FleetConfig) from None


def run(config: FleetConfig, say: Callable[[str], None]) -> None:
    """As `serve`, which it raises one error of."""
    try:
        trio.run(serve, config, say)
    except BaseExceptionGroup as group:
        raise matters(group) from None


async def serve(config: FleetConfig, say: Callable[[str], None]) -> None:
    """Serve until cancelled, or until SIGINT or SIGTERM; `say` gets the lines of each tenant's run file once all
    engines answer. Raises UsageError or RunFailed if something does not start, RunFailed if an engine dies again and
    again."""
    key = EngineKey.fresh()
    engines = [
        SharedEngine(
            config.tenants,
            key=key,
            places=config.engine.max_batch,
            queue_deadline_s=config.queue_deadline_s,
            lease_s=config.lease_s,
            quantum=config.quantum,
        )
        for _ in config.engine.places
    ]
    gateway = Gateway(config.tenants, engines)
    try:
        listeners = await trio.open_tcp_listeners(config.port, host=config.host)
    except OSError as error:
        hint = f"cannot listen there ({error.strerror}): give another host or port"
        raise ConfigError("port", f"{config.host}:{config.port}", hint) from error
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end_on_signal, nursery.cancel_scope)
        await nursery.start(gateway.run)
        async with trio.open_nursery() as starting:
            for number, engine in enumerate(engines):
                starting.start_soon(nursery.start, _keep, config, number, engine, key)
        raise_open_files(ServerBounds())
        nursery.start_soon(partial(listen, gateway, listeners, refuses=gateway.refuses))
        port = listeners[0].socket.getsockname()[1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        for tenant in config.tenants:
            urls = json.dumps([f"http://{host}:{port}/{tenant.name}/{number}" for number in range(len(engines))])
            say(f"{tenant.name}: {_line(tenant, gateway.keys[tenant.name], urls)}")


def _line(tenant: Tenant, key: EngineKey | None, urls: str) -> str:
    """What a tenant's user types; with the key that was made for it."""
    train = f"agentrl train RUN.toml --set engine.shared=true --set 'engine.urls={urls}'"
    if key is None:
        return train
    made = f"export {tenant.variable}={key.value}; " if tenant.key_env is None else ""
    return f"{made}{train} --set engine.api_key_env={tenant.variable}"


async def _keep(
    config: FleetConfig,
    number: int,
    engine: SharedEngine,
    key: EngineKey,
    *,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Have an engine run for ever; started is said when it first answers."""
    settings = config.engine.model_copy(
        update={"replicas": 1, "gpus": [own for own in [config.engine.places[number]] if own]}
    )
    budget, begun = RestartBudget(), False
    while True:
        try:
            async with running_engine(
                model_dir(config.model),
                settings,
                door=Door(key=key),
                max_context=config.max_context,
                lora_rank=config.lora_rank,
                lora_targets=config.lora_targets,
                max_loras=_LOADED * len(config.tenants),
            ) as (url, process):
                engine.url = url
                budget.well()
                if not begun:
                    begun = True
                    task_status.started()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(
                        _end_if_silent, EngineClient(url, api_key=key), process, settings.liveness_deadline_s
                    )
                    status = await process.wait()
                    nursery.cancel_scope.cancel()
                why = f"engine {number} ended with status {status}"
        except EngineUnavailable as error:
            if not begun:
                raise
            why = str(error)
        finally:
            engine.url = None
        await budget.spend(why)


async def _end_if_silent(client: EngineClient, process: trio.Process, deadline_s: float) -> None:
    """Kill an engine that has not answered for `deadline_s`."""
    async with aclosing(client):
        heard = trio.current_time()
        while trio.current_time() - heard < deadline_s:
            await trio.sleep(_LOOK_S)
            if await client.alive(deadline_s=max(_LOOK_S, heard + deadline_s - trio.current_time())):
                heard = trio.current_time()
    process.kill()
