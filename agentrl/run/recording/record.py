"""`agentrl record`: a recorder in front of an engine that somebody else runs, and the program that it may start.

Owns the folder, the connection to the engine, the socket and the program; `recorder` answers the requests. Whatever it
starts ends with it, however that ends.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final, Literal

import trio

from agentrl import config as configuration
from agentrl.config import RunConfig
from agentrl.config.run_config import key_in
from agentrl.config.sections import check_url
from agentrl.engine.client import EngineClient
from agentrl.engine.router.router import Fleet
from agentrl.engine.scoring_client import ScoringClient
from agentrl.env.agent_programs.model_endpoint import MAX_BODY, Response, written
from agentrl.env.agent_programs.session import Session
from agentrl.env.tools.parsers import DEFAULT, get_format
from agentrl.errors import EngineError, EngineTimeout, EngineUnavailable, UsageError, matters
from agentrl.host.child_environment import OF_THE_RUN
from agentrl.host.clocks import HostClock
from agentrl.host.janitor import owned_folder
from agentrl.http.bounds import ServerBounds
from agentrl.http.http_server import Typed, listen
from agentrl.models.resolve import model_dir, renderer_of, vocabulary
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.drain import TurnGate
from agentrl.run.recording.answer_stream import AnswerStream
from agentrl.run.recording.client_sampling import ClientSampling
from agentrl.run.recording.recorded_env import RecordedConversation
from agentrl.run.recording.recorder import Recorder
from agentrl.run.recording.text_upstream import TextUpstream
from agentrl.run.run_folder import RECORDED, RunDir
from agentrl.store import TEXT, TRAIN, RunStore
from agentrl.store.journal_writer import JournalWriter

Upstream = Literal["embedded", "vllm", "sglang", "openai"]

_KEY_FILE: Final = "record.key"
_KEY_VARIABLE: Final = "AGENTRL_RECORD_KEY"  # the variable that the printed lines name for a key that was made
_CONTEXT: Final = 32_768  # tokens of a conversation where neither engine nor model says how many it takes
_DISK_S: Final = 60.0  # how long a write waits for space on a full disk
_ANSWER_S: Final = 600.0  # for an answer of a server that gives no tokens
_CLOSE_S: Final = 2.0  # for connections to close
_TERM_S: Final = 10.0  # for a program to end after SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """`engine` is the URL of the engine, which gives no tokens if its `kind` is "openai"; `engine_key` is the variable
    with its key, `key_variable` that of the key that clients show. `idle_s`: seconds without a request after which a
    conversation ends. `awake` bounds the conversations in memory, `most` all that go on. With a `command` the recorder
    ends with it."""

    engine: str
    model: str
    out: Path
    kind: Upstream = "vllm"
    engine_key: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    key_variable: str | None = None
    no_key: bool = False
    idle_s: float = 3600.0
    max_context: int | None = None
    awake: int = 256
    most: int = 10_000
    command: tuple[str, ...] = ()

    @property
    def is_text(self) -> bool:
        """Whether the engine gives no tokens, and `model` is its name there."""
        return self.kind == "openai"


def record(settings: RecordSettings) -> int:
    """Record until SIGINT or SIGTERM, or until the command ends; returns its exit status, else 0. Raises UsageError
    for a folder that is no recorder's or is in use, ConfigError for an engine that is no URL, EngineUnavailable if
    none answers."""
    if settings.no_key and settings.key_variable is not None:
        raise UsageError("--no-key and --api-key-env: give one of them")
    check_url("--engine", settings.engine)
    run_dir, run_config = opened_folder(settings)
    with run_dir.lock(f"end it first, or give another --out than {settings.out}"):
        with RunStore.open(run_dir.store_path) as run_store:
            run_dir.write_config(run_config, run_store)  # the engine may be another one than before
        try:
            return trio.run(_record, settings, run_dir, run_config, clock=HostClock())
        except BaseExceptionGroup as task_errors:  # of the recorder's tasks: one line says what ended them
            raise matters(task_errors) from None


def opened_folder(settings: RecordSettings) -> tuple[RunDir, RunConfig]:
    """The folder of the recordings, new or as it is, and the settings with which they go on. Raises as `record`."""
    run_dir = RunDir(settings.out)
    is_new = not run_dir.store_path.exists()
    if not is_new:
        _check(run_dir, settings)
    context_tokens = settings.max_context or trio.run(_room, settings)
    run_config = _config(settings, context_tokens)
    return (RunDir.create(settings.out, run_config) if is_new else run_dir), run_config


def _config(settings: RecordSettings, room: int) -> RunConfig:
    """The settings of the folder as a run's: its model, its engine, and how a conversation is played."""
    rollout_settings: dict[str, Any] = {
        "group_size": 1,
        "max_context": room,
        "max_tokens_per_turn": room - 1,
        # A client may not have read a token that is not in the store, and no chunk waits for another to be written.
        "checkpoint_tokens": 0 if settings.is_text else 1,
        "snapshot_every_turns": 0,
        "max_observation_bytes": MAX_BODY,
        "turn_deadline_s": 3600.0,
        "episode_deadline_s": 1e9,  # a conversation may go on for ever
    }
    engine_settings: dict[str, Any] = {"kind": "vllm" if settings.is_text else settings.kind, "urls": [settings.engine]}
    if settings.engine_key is not None:
        engine_settings["api_key_env"] = settings.engine_key
    return configuration.parse(
        {
            "name": settings.out.resolve().name,
            "model": settings.model,
            "env": {"id": RECORDED},
            "rollout": rollout_settings,
            "engine": engine_settings,
            "algo": {"kind": "reinforce++"},  # of episodes without siblings
            "train": {"tokens_per_batch": room},
        }
    )


def _check(run: RunDir, settings: RecordSettings) -> None:
    """Raise UsageError for a folder that a recorder cannot go on with."""
    run_config = run.config()
    if not run.is_recording:
        raise UsageError(f"{run.path} holds a run and no recordings: give another --out")
    # Tokens of two models in one conversation would be one row of nobody's policy.
    if run_config.model != settings.model:
        raise UsageError(
            f"{run.path} has recordings of {run_config.model}: give --model {run_config.model} or another --out"
        )


async def _record(settings: RecordSettings, run: RunDir, config: RunConfig) -> int:
    client_key = _key(settings, run)
    async with serving(settings, run, config, client_key) as (recorder, bound_port):
        if settings.command:
            return await _run_command(settings, recorder, bound_port, client_key or "")
        for announcement in _announced(settings, bound_port, client_key):
            print(announcement, flush=True)
        await _signalled()
        return 0


@asynccontextmanager
async def serving(
    settings: RecordSettings, run: RunDir, config: RunConfig, key: str | None
) -> AsyncGenerator[tuple[Recorder, int]]:
    """A recorder over the folder `run`, and the port at which it answers, for as long as the block runs. Its caller
    holds the folder's lock."""
    async with AsyncExitStack() as exit_stack:
        writable_store = exit_stack.enter_context(closing(RunStore.open(run.store_path)))
        store_reader = exit_stack.enter_context(closing(RunStore.read(run.store_path, away_s=0)))
        journal_writer = await exit_stack.enter_async_context(
            JournalWriter(writable_store, store_reader, disk_wait_s=_DISK_S)
        )
        upstream = await exit_stack.enter_async_context(_upstream(settings, config, journal_writer))
        listeners = await _listeners(settings)
        turn_gate = TurnGate()

        def context(env: RecordedConversation) -> RolloutContext:
            return replace(upstream.context(env), make_env=env.made_for, gate=turn_gate)

        async with trio.open_nursery() as nursery:
            recorder = Recorder(
                journal_writer,
                context,
                nursery,
                gate=turn_gate,
                lease_s=config.rollout.lease_s,
                tool_format=upstream.tool_format,
                name=f"recorder.{os.getpid()}",
                model=settings.model,
                purpose=upstream.purpose,
                idle_s=settings.idle_s,
                awake=settings.awake,
                most=settings.most,
                repeats=bool(settings.command),
            )
            await recorder.restore()
            nursery.start_soon(recorder.keep_leases)
            nursery.start_soon(recorder.end_sleepers)
            server_bounds = ServerBounds(body_bytes=MAX_BODY)
            nursery.start_soon(
                partial(listen, recorder, listeners, bounds=server_bounds, refuses=partial(_refuses, key))
            )
            yield recorder, listeners[0].socket.getsockname()[1]
            with trio.CancelScope(shield=True):
                await recorder.aclose()
            nursery.cancel_scope.cancel()


# --- the engine


@dataclass(frozen=True, slots=True)
class _Upstream:
    """An engine for conversations: the context of each, the dialect of its calls, the purpose of its episodes."""

    context: Callable[[RecordedConversation], RolloutContext]
    tool_format: str
    purpose: str


@asynccontextmanager
async def _upstream(settings: RecordSettings, config: RunConfig, store: JournalWriter) -> AsyncGenerator[_Upstream]:
    common_context: dict[str, Any] = {"store": store, "settings": config.rollout, "make_env": _nobody_makes}
    if settings.is_text:
        engine_key = None if settings.engine_key is None else key_in(settings.engine_key, "--key-variable")
        scoring_client = ScoringClient(settings.engine, model=settings.model, api_key=engine_key, deadline_s=_ANSWER_S)

        def as_text(env: RecordedConversation) -> RolloutContext:
            upstream = TextUpstream(scoring_client, env, deadline_s=_ANSWER_S)
            return RolloutContext(engine=upstream, renderer=upstream, **common_context)

        yield _Upstream(as_text, DEFAULT, TEXT)
        return
    renderer = renderer_of(config)
    tool_format = get_format(renderer.tool_format or DEFAULT)
    engine_fleet = Fleet.configured(
        [_client(settings)], config.engine, decode=renderer.decode, knows=partial(_note_version, store, set[int]())
    )

    def as_tokens(env: RecordedConversation) -> RolloutContext:
        env.stream = AnswerStream(renderer.decode, tool_format, thinks=renderer.thinks)
        client_sampling = ClientSampling(engine_fleet, env.waiting, renderer.decode, env.note_prompt)
        return RolloutContext(engine=client_sampling, renderer=renderer, **common_context)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine_fleet.control)
        try:
            yield _Upstream(as_tokens, renderer.tool_format or DEFAULT, TRAIN)
        finally:
            nursery.cancel_scope.cancel()
            with trio.move_on_after(_CLOSE_S, shield=True):
                await engine_fleet.aclose()


def _nobody_makes(task: object) -> Any:
    raise AssertionError("a conversation brings its environment")


async def _note_version(store: JournalWriter, known: set[int], version: int) -> bool:
    """Take a weight version of the engine into the store; every version is welcome."""
    if version not in known:
        await store.write(partial(store.store.versions.note_version, version))
        known.add(version)
    return True


def _client(settings: RecordSettings) -> EngineClient:
    engine_key = None if settings.engine_key is None else key_in(settings.engine_key, "--key-variable")
    vocabulary_words = None if settings.is_text else vocabulary(model_dir(settings.model))
    engine_kind = "vllm" if settings.kind == "openai" else settings.kind
    return EngineClient(settings.engine, kind=engine_kind, api_key=engine_key, vocabulary=vocabulary_words)


async def _room(settings: RecordSettings) -> int:
    """The most tokens of a conversation, as the engine says. Raises EngineUnavailable."""
    engine_client = _client(settings)
    try:
        model_list: Any = json.loads(await engine_client.call("GET", "/v1/models", deadline_s=30.0))
        context_tokens = model_list["data"][0].get("max_model_len")
    except (EngineUnavailable, EngineTimeout) as error:
        raise EngineUnavailable(f"no engine answers at {settings.engine} ({error}): start it") from error
    except (EngineError, ValueError, KeyError, IndexError, TypeError, AttributeError):
        context_tokens = None
    finally:
        await engine_client.aclose()
    return (
        context_tokens if isinstance(context_tokens, int) and context_tokens >= 2 and not settings.is_text else _CONTEXT
    )


# --- the door


def _key(settings: RecordSettings, run: RunDir) -> str | None:
    """The key that clients show; None without one."""
    if settings.key_variable is not None:
        if not (variable_value := os.environ.get(settings.key_variable)):
            raise UsageError(f"--api-key-env {settings.key_variable}: this environment variable is not set: export it")
        return variable_value
    if settings.command:  # every user of this machine reaches the port, and the program has the key anyway
        return secrets.token_urlsafe(24)
    if settings.no_key or _is_loopback(settings.host):
        return None
    # In the folder, which is its owner's alone: clients that come back after a restart show the key that they have.
    key_path = run.path / _KEY_FILE
    if not key_path.exists():
        descriptor = os.open(key_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as key_stream:
            key_stream.write(secrets.token_urlsafe(24))
    return key_path.read_text(encoding="utf-8")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _refuses(key: str | None, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, Typed] | None:
    """The refusal of a request without the key, None if it shows it; the HTTP server calls it."""
    if key is None:
        return None
    shown_key = headers.get("authorization", "").removeprefix("Bearer ") or headers.get("x-api-key", "")
    if hmac.compare_digest(shown_key.encode(), key.encode()):
        return None
    error_body = {"message": "show the recorder's key as a bearer token or x-api-key", "type": "authentication_error"}
    return written(Response(401, {"type": "error", "error": error_body}))


async def _listeners(settings: RecordSettings) -> list[trio.SocketListener]:
    bound_host = "127.0.0.1" if settings.command else settings.host
    try:
        return await trio.open_tcp_listeners(settings.port, host=bound_host)
    except OSError as error:
        raise UsageError(
            f"--port {settings.port} of {bound_host} cannot be used ({error.strerror}): give another"
        ) from None


def _announced(settings: RecordSettings, port: int, key: str | None) -> list[str]:
    url_host = f"[{settings.host}]" if ":" in settings.host else settings.host
    base_url = f"http://{url_host}:{port}"
    announcements = [f"recording to {settings.out}; Ctrl-C ends it, and the same command goes on"]
    if key is not None and settings.key_variable is None:
        announcements.append(f"key: export {_KEY_VARIABLE}={key}")
    elif key is None and not _is_loopback(settings.host):
        announcements.append("key: none; everybody who reaches this address may use the engine")
    return [
        *announcements,
        f"OpenAI's clients: OPENAI_BASE_URL={base_url}/v1",
        f"Anthropic's: ANTHROPIC_BASE_URL={base_url}",
        base_url,
    ]


async def _signalled() -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            return


# --- the program


async def _run_command(settings: RecordSettings, recorder: Recorder, port: int, key: str) -> int:
    """Run the command to its end, and end its conversation; returns its exit status as a shell does."""
    # By its words, so that the same command goes on with its conversation after a crash, and another one does not.
    session_id = f"command-{blake2b(repr(settings.command).encode(), digest_size=6).hexdigest()}"
    variables = Session(f"http://127.0.0.1:{port}/session/{session_id}", key, {}, settings.model).variables
    async with owned_folder() as process_owner:
        try:
            process = await trio.lowlevel.open_process(
                list(settings.command), env={**OF_THE_RUN.without(os.environ), **variables, **process_owner.mark}
            )
        except OSError as error:
            raise UsageError(f"{settings.command[0]} cannot be started: {error.strerror}") from None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_pass_signals_on, process)
            exit_status = await process.wait()
            nursery.cancel_scope.cancel()
    exit_status = exit_status if exit_status >= 0 else 128 - exit_status
    is_success = exit_status == 0
    await recorder.end_session(
        session_id, {"outcome": float(is_success), "success": is_success, "exit_code": exit_status}
    )
    print(f"recorded in {settings.out}: agentrl view {settings.out}", file=sys.stderr)
    return exit_status


async def _pass_signals_on(process: trio.Process) -> None:
    """Let the program decide what a signal means. Ctrl-C reaches it by itself, as it is in this process group."""
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for received in signals:
            if received == signal.SIGTERM:
                process.terminate()
                with trio.move_on_after(_TERM_S):
                    await process.wait()
                process.kill()
