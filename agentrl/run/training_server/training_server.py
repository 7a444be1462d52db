"""A training server's parts together: the folder with its state, the learner in this process, an engine beside it, the
door. All of it ends with this process, however that ends; the folder stays, and the next life goes on from it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from agentrl.config import EngineSettings
from agentrl.engine.rendering.renderer import Renderer
from agentrl.engine.running_engine import Door, running_engine
from agentrl.errors import ConfigError, UsageError, matters
from agentrl.http.bounds import ServerBounds, raise_open_files
from agentrl.http.http_server import listen
from agentrl.learner.adapter_learner import AdapterLearner
from agentrl.models.resolve import model_dir
from agentrl.run.run_folder import close_to_others
from agentrl.run.serving.serve import end_on_signal
from agentrl.run.training_server.call_log import CallLog
from agentrl.run.training_server.kept_engine import KeptEngine
from agentrl.run.training_server.sampling_calls import HELD, SamplingCalls
from agentrl.run.training_server.sessions import SILENT_S, Sessions
from agentrl.run.training_server.tinker_api import Futures, TinkerApi
from agentrl.run.training_server.tinker_messages import MOST_RANK, messages
from agentrl.run.training_server.training_calls import TrainingCalls

_PREFIX = "tml-"  # the client takes no other keys
_BOUNDS = ServerBounds(body_bytes=256 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingServerSettings:
    """`state` is the folder that outlives the server. `engine` samples, and the learner has its `fixed_threads`; a vLLM
    makes room for adapters of `lora_rank` at most, the embedded engine takes all. `key_variable` names the environment
    variable with the key, None: that of the folder, which the first life makes; `no_key`: everybody who reaches the
    address may train. A session that is silent for `silent_s` ends."""

    model: str
    state: Path
    host: str = "127.0.0.1"
    port: int = 8000
    key_variable: str | None = None
    no_key: bool = False
    max_context: int = 2048
    engine: EngineSettings = field(default_factory=EngineSettings)
    lora_rank: int = 32
    device: str = "cpu"
    silent_s: float = SILENT_S


@dataclass(frozen=True, slots=True)
class RunningTrainingServer:
    """Where it answers, its key, and its engine."""

    url: str
    key: str | None
    engine: KeptEngine


def serve_training(settings: TrainingServerSettings) -> None:
    """Serve until SIGINT or SIGTERM. When everything answers, prints how to use it, and last its URL on a line of its
    own. Raises as `training_server`."""

    async def main() -> None:
        async with training_server(settings) as server:
            for announced_line in _announced(settings, server):
                print(announced_line, flush=True)
            with trio.CancelScope() as cancel_scope:
                await end_on_signal(cancel_scope)

    with suppress(KeyboardInterrupt):  # Ctrl-C while it starts
        try:
            trio.run(main)
        except BaseExceptionGroup as group:
            raise matters(group) from None


@asynccontextmanager
async def training_server(settings: TrainingServerSettings) -> AsyncGenerator[RunningTrainingServer]:
    """A server for as long as the block runs. Raises UsageError for a setting or a folder that cannot be."""
    messages()
    state_folder = settings.state.absolute()
    state_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    close_to_others(state_folder, option="--state")  # it has prompts and weights
    with _locked(state_folder):
        server_key, model_folder = _key(settings, state_folder), model_dir(settings.model)
        # Before the model is loaded: a port that is taken is reported in a second and not after minutes.
        listeners = await _listening(settings)
        # In a thread, so that Ctrl-C is heard while a large model is read.
        learner = await trio.to_thread.run_sync(_learner, settings, model_folder)
        engine_settings = settings.engine.model_copy(
            update={"weights_from": [*settings.engine.weights_from, str(state_folder)]}
        )
        most_rank = settings.lora_rank if engine_settings.kind == "vllm" else MOST_RANK
        start_engine = partial(
            running_engine,
            model_folder,
            engine_settings,
            door=Door(),
            max_context=settings.max_context,
            lora_rank=most_rank,
            max_loras=HELD,
        )
        kept_engine = KeptEngine(start_engine, vocabulary=learner.vocab, patience_s=engine_settings.start_deadline_s)
        with CallLog(state_folder / "calls.sqlite") as call_log:
            async with trio.open_nursery() as nursery:
                await nursery.start(kept_engine.run)
                futures = Futures(call_log)
                training_calls = TrainingCalls(
                    call_log,
                    learner,
                    state_folder,
                    most_tokens=settings.max_context,
                    most_rank=most_rank,
                    answered=futures.answered,
                )
                sampling_calls = SamplingCalls(
                    call_log,
                    kept_engine,
                    state_folder,
                    kind=engine_settings.kind,
                    most_rank=most_rank,
                    vocab=learner.vocab,
                    max_context=settings.max_context,
                    places=engine_settings.max_batch,
                    ends=Renderer(model_folder).stop_token_ids,
                    answered=futures.answered,
                )
                sessions = Sessions(call_log, silent_s=settings.silent_s, ended=training_calls.end)
                tinker_api = TinkerApi(
                    call_log,
                    sessions=sessions,
                    training=training_calls,
                    sampling=sampling_calls,
                    futures=futures,
                    key=server_key,
                    name=settings.model,
                    tokenizer=str(model_folder),
                    max_context=settings.max_context,
                )
                await nursery.start(sessions.run)
                await nursery.start(training_calls.run)
                await nursery.start(sampling_calls.run)
                raise_open_files(_BOUNDS)
                # The door opens last: the first call of a client must find sessions, training and sampling at work, and
                # calls that an earlier life accepted come before it.
                nursery.start_soon(partial(listen, tinker_api, listeners, bounds=_BOUNDS, refuses=tinker_api.refuses))
                shown_host = f"[{settings.host}]" if ":" in settings.host else settings.host
                bound_port = listeners[0].socket.getsockname()[1]
                yield RunningTrainingServer(f"http://{shown_host}:{bound_port}", server_key, kept_engine)
                nursery.cancel_scope.cancel()


async def _listening(settings: TrainingServerSettings) -> list[trio.SocketListener]:
    try:
        return await trio.open_tcp_listeners(settings.port, host=settings.host)
    except OSError as error:
        correction = f"cannot listen there ({error.strerror}): give another --host or --port"
        raise ConfigError("port", f"{settings.host}:{settings.port}", correction) from error


def _learner(settings: TrainingServerSettings, model: Path) -> AdapterLearner:
    return AdapterLearner(model, device=settings.device, threads=settings.engine.fixed_threads)


def _announced(settings: TrainingServerSettings, server: RunningTrainingServer) -> list[str]:
    key_line = "key: none; everybody who reaches this address may train: a client gives any key that begins with tml-"
    if server.key is not None:
        key_line = (
            f"key: export TINKER_API_KEY={server.key if settings.key_variable is None else f'${settings.key_variable}'}"
        )
    return [
        f"model: {settings.model}; state: {settings.state}",
        f"a client: export TINKER_BASE_URL={server.url}",
        key_line,
        server.url,
    ]


def _key(settings: TrainingServerSettings, folder: Path) -> str | None:
    """The server's key. Raises UsageError for one that is not set, or that no client would send."""
    if settings.no_key:
        if settings.key_variable is not None:
            raise UsageError("--no-key and --api-key-env: give one of them")
        return None
    if settings.key_variable is not None:
        server_key = os.environ.get(settings.key_variable, "")
        if not server_key.startswith((_PREFIX, "eyJ")):
            correction = f"it has to begin with {_PREFIX}, or the tinker client will not send it"
            raise UsageError(f"--api-key-env {settings.key_variable}: export a key there; {correction}")
        return server_key
    key_file = folder / "key"
    if not key_file.is_file():
        draft_file = folder / f".key.{secrets.token_hex(4)}"
        draft_file.touch(mode=0o600)
        draft_file.write_text(f"{_PREFIX}{secrets.token_urlsafe(24)}")
        # Renamed into place, so that a second process never reads half a key; and made with mode 0600 before anything
        # is in it.
        draft_file.rename(key_file)
    return key_file.read_text()


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Hold the folder. Raises UsageError if another server does."""
    with (folder / "lock").open("w") as lock_file:
        try:
            # A lock of the kernel and no file with a process id: it goes with its process, so that a server which was
            # killed leaves nothing that somebody has to remove.
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"--state {str(folder)!r}: another server has it: end that one, or give another") from None
        yield
