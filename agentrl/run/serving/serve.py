"""An engine by itself: started, announced, ended with its owner. Other runs attach to it by its URL.

It has only the weights of the model's folder; a run that attaches sends its own. The engine never outlives this
process, however that ends. It asks for a key, unless that is switched off.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import trio

from agentrl.config import EngineSettings
from agentrl.engine.running_engine import Door, running_engine
from agentrl.errors import EngineUnavailable, UsageError
from agentrl.records import EngineKey

_KEY = "AGENTRL_SERVE_KEY"  # the variable that the printed lines name for a key that was made


def key_of(variable: str | None, *, none: bool) -> EngineKey | None:
    """The key of `agentrl serve`: that of an environment variable, a new one, or `none`. Raises UsageError if the
    variable is not set."""
    if none and variable is not None:
        raise UsageError("--no-key and --api-key-env: give one of them")
    if none:
        return None
    if variable is None:
        # A key by default: whoever reaches an engine's port can push weights to it, and a shared machine has other
        # users.
        return EngineKey.of(EngineKey.fresh().value)
    if not (key_value := os.environ.get(variable)):
        raise UsageError(f"--api-key-env {variable}: this environment variable is not set: export it")
    return EngineKey.of(key_value)


def serve(
    model: Path,
    settings: EngineSettings,
    *,
    door: Door,
    name: str,
    max_context: int,
    key_variable: str | None = None,
    lora_rank: int = 0,
    lora_targets: Sequence[str] = (),
    kept_sets: bool = False,
) -> None:
    """Serve `model` by the name `name` until SIGINT or SIGTERM. When the engine answers, prints how to use it, and last
    its URL on a line of its own. `key_variable` has the key, if it was not made here. Raises UsageError or RunFailed if
    it does not start, EngineUnavailable if it ends by itself."""

    async def main() -> int | None:
        exit_status = None
        async with running_engine(
            model,
            settings,
            door=door,
            name=name,
            max_context=max_context,
            lora_rank=lora_rank,
            lora_targets=lora_targets,
            kept_sets=kept_sets,
        ) as (engine_url, engine_process):
            for announced_line in _announced(engine_url, settings.kind, name, door.key, key_variable):
                print(announced_line, flush=True)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(end_on_signal, nursery.cancel_scope)
                exit_status = await engine_process.wait()
                nursery.cancel_scope.cancel()
        return exit_status

    with suppress(KeyboardInterrupt):  # Ctrl-C while it starts
        exit_status = trio.run(main)
        if exit_status is not None:
            raise EngineUnavailable(f"the engine ended by itself with exit status {exit_status}")


def _announced(url: str, kind: str, name: str, key: EngineKey | None, variable: str | None) -> list[str]:
    is_new_key = key is not None and variable is None
    variable_name = variable or _KEY
    train_option = "" if key is None else f" --set engine.api_key_env={variable_name}"
    eval_option = "" if key is None else f" --key-variable {variable_name}"
    return [
        f"model: {name}",
        *([f"key: export {variable_name}={key.value}"] if key is not None and is_new_key else []),
        *(["key: none; everybody who reaches this address may use the engine and change it"] if key is None else []),
        f"a run: agentrl train RUN.toml --set engine.kind={kind} --set 'engine.urls=[\"{url}\"]'{train_option}",
        f"a test: agentrl eval --endpoint {url} --model {name} --env agentrl/Calculator-v0{eval_option}",
        url,
    ]


async def end_on_signal(scope: trio.CancelScope) -> None:
    """Cancel `scope` at SIGINT or SIGTERM."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
            return
