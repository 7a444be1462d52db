"""`python -m agentrl.engine.embedded`: serve a small model from this machine's CPU.

Exit codes: 0 stopped on request, 1 the engine failed, 2 it cannot start with these arguments (one line says why).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentrl.errors import ConfigError, ModelError, UsageError
from agentrl.host import json_log
from agentrl.host.quick_imports import quick_imports
from agentrl.host.spare_cores import SpareCores
from agentrl.records import EngineKey

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from agentrl.engine.embedded.chat import Chat
    from agentrl.engine.embedded.engine import Engine
    from agentrl.engine.embedded.vision_tower import VisionTower


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m agentrl.engine.embedded", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and safetensors")
    parser.add_argument("--weights", type=Path, default=None, help="a safetensors file to serve instead of the model's")
    parser.add_argument(
        "--weights-from",
        action="append",
        default=[],
        metavar="PLACE",
        help="a folder or URL that new weights may come from; may be repeated; default: where learners of this machine "
        "keep them; the folder of --model is always one",
    )
    parser.add_argument("--socket", type=Path, default=None, help="a Unix socket to serve on, in a private folder")
    parser.add_argument("--host", default="127.0.0.1", help=f"without --socket; its key is ${EngineKey.VALUE}")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--no-key", action="store_true", help="let everybody who reaches --host use and change it")
    parser.add_argument(
        "--threads", type=_threads, default="auto", help="of the arithmetic, or auto: as many as cores idle"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="float32",
        help="of weights, keys and values; auto: bfloat16 for a large model on a CPU with instructions for it",
    )
    parser.add_argument("--max-batch", type=int, default=128, help="requests that run at once")
    parser.add_argument("--max-model-len", type=int, default=None, help="tokens of prompt and generation together")
    parser.add_argument("--kv-cache-mb", type=int, default=512)
    parser.add_argument("--stream-tokens", type=int, default=16, help="tokens of one streamed chunk")
    parser.add_argument("--served-version", type=int, default=0, help="version of the weights served first")
    parser.add_argument("--served-model-name", default=None)
    parser.add_argument(
        "--tool-parser", default=None, metavar="MODULE:CLASS", help="how calls of tools are written, for chats"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the sampler; the order of requests matters too")
    parser.add_argument("--api", choices=("vllm", "sglang"), default="vllm", help="the dialect that it speaks")
    parser.add_argument("--ready-file", type=Path, default=None, help="written as JSON {url, pid} once serving")
    parser.add_argument("--lifeline", action="store_true", help="exit when standard input reaches its end")
    return parser.parse_args(arguments)


def _threads(text: str) -> int | Literal["auto"]:
    if text != "auto" and not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number from 1, or auto")
    return "auto" if text == "auto" else int(text)


def build(arguments: argparse.Namespace) -> tuple[Engine, Starlette]:
    """Read the model and lay out the cache. Returns the engine and its HTTP application.

    Raises UsageError where the settings do not fit the model."""
    from agentrl.engine.embedded.architecture import LARGE, read_architecture

    architecture = read_architecture(arguments.model)
    # Torch comes only now: a wrong argument, a port in use, a model that it lacks need not wait for it.
    import torch

    from agentrl.engine.embedded.batching import Batcher
    from agentrl.engine.embedded.engine import Engine
    from agentrl.engine.embedded.model import EmbeddedModel, KVStore, read_weights
    from agentrl.engine.embedded.requests import UnknownModel
    from agentrl.engine.embedded.sglang_server import SGLangServer, not_loaded
    from agentrl.engine.embedded.vllm_server import VllmServer
    from agentrl.engine.weight_sync.weight_sources import Sources, everyday

    torch.set_num_threads(1 if arguments.threads == "auto" else arguments.threads)
    context_length = arguments.max_model_len or min(architecture.max_positions, 2048)
    if not 2 <= context_length <= architecture.max_positions:
        raise ConfigError("--max-model-len", context_length, f"the model has {architecture.max_positions} positions")
    dtype = getattr(torch, architecture.fastest_dtype if arguments.dtype == "auto" else arguments.dtype)
    bytes_per_slot = KVStore.bytes_per_token(architecture, dtype) * context_length
    # A slot is as long as the longest context, and there are no pages as in vLLM: attention then reads one plain
    # tensor, which is what a CPU does well. Untouched pages of it cost no memory.
    slot_count = (arguments.kv_cache_mb << 20) // bytes_per_slot
    if slot_count < 1:
        raise ConfigError("--kv-cache-mb", arguments.kv_cache_mb, f"one context needs {-(-bytes_per_slot >> 20)} MB")
    # More slots than twice the running requests would only hold prefixes that nobody comes back for.
    slot_count = min(slot_count, 2 * arguments.max_batch)
    weights = read_weights(arguments.weights or arguments.model)
    tower = _tower(arguments.model) if architecture.vision else None
    model = EmbeddedModel(architecture, weights, length=context_length, dtype=dtype, tower=tower)
    engine_batcher = Batcher(
        model,
        KVStore(architecture, slot_count, context_length, dtype),
        max_batch=arguments.max_batch,
        version=arguments.served_version,
        stream_tokens=arguments.stream_tokens,
        seed=arguments.seed,
        decode=_decoder(arguments.model),
    )
    # A run that is attached sends the weights it starts from, which are those of the folder that this engine serves.
    weight_sources = Sources([*(arguments.weights_from or everyday()), str(arguments.model)])
    model_name = arguments.served_model_name or str(arguments.model)
    shares_cores = arguments.threads == "auto" and architecture.parameters >= LARGE
    engine = Engine(
        engine_batcher,
        name=model_name,
        sources=weight_sources,
        chat=_chat(arguments),
        spare=SpareCores() if shares_cores else None,
        unknown_model=UnknownModel if arguments.api == "vllm" else not_loaded,
    )
    return engine, (VllmServer if arguments.api == "vllm" else SGLangServer)(engine).app


def _tower(model: Path) -> VisionTower:
    """Imports transformers, which takes longer than all else that an engine does until it serves."""
    from agentrl.engine.embedded.vision_tower import VisionTower

    return VisionTower(model)


def _chat(arguments: argparse.Namespace) -> Chat | None:
    """Chats with the model, if it has a chat template. Raises UsageError."""
    from agentrl.engine.embedded.chat import Chat, parser_at

    tool_parser = None if arguments.tool_parser is None else parser_at(arguments.tool_parser)
    try:
        return Chat(arguments.model, tool_parser)
    except ModelError:
        return None


def _decoder(model: Path) -> Callable[[Sequence[int]], str] | None:
    from tokenizers import Tokenizer

    tokenizer_path = model / "tokenizer.json"
    if not tokenizer_path.is_file():
        return None
    return partial(Tokenizer.from_file(str(tokenizer_path)).decode, skip_special_tokens=False)


def listen(host: str, port: int, path: Path | None = None) -> socket.socket:
    """A listening socket, on a Unix socket at `path` if there is one. Raises UsageError if the address cannot be had.
    Connections wait until the engine serves."""
    if path is not None:
        listener = socket.socket(socket.AF_UNIX)
        try:
            path.unlink(missing_ok=True)  # of an engine that was killed
            listener.bind(str(path))
            listener.listen(2048)
        except OSError as error:
            listener.close()
            raise UsageError(f"cannot listen on {path}: {error}; choose another --socket") from None
        return listener
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Else a restarted engine could not have its own port for a minute, as long as connections of the dead one are in
    # TIME_WAIT. A port on which somebody listens is refused all the same.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
    return listener


async def serve(
    engine: Engine,
    app: Starlette,
    listener: socket.socket,
    *,
    ready_file: Path | None,
    key: EngineKey | None,
) -> int:
    """Serve until SIGTERM or SIGINT, or until a pass fails. Returns the exit code."""
    import uvicorn

    from agentrl.engine.auth import Guard
    from agentrl.engine.embedded.bounded_protocol import BoundedProtocol
    from agentrl.http.bounds import Connections, ServerBounds, raise_open_files

    server_bounds = ServerBounds()
    # Each running turn is a connection, and a group of a thousand turns is more than the 1024 descriptors that most
    # systems give a process at first.
    raise_open_files(server_bounds)

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Generator[None]:
            yield  # handled here, so that a requested end is exit code 0

    server_config = uvicorn.Config(
        app if key is None else Guard(app, key),
        http=partial(BoundedProtocol, connections=Connections(server_bounds), bounds=server_bounds),  # pyright: ignore[reportArgumentType]
        log_level="warning",
        access_log=False,
        lifespan="off",
        timeout_keep_alive=600,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    http_server = Server(server_config)
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signal_number, setattr, http_server, "should_exit", True)
    driving_task = asyncio.create_task(engine.loop.drive())
    # A pass that fails ends the process. A server that goes on answering `/health` without a loop behind it would
    # look alive to the router, and hold every turn up to its deadline. `driving.result()` below makes it exit code 1.
    driving_task.add_done_callback(lambda _: setattr(http_server, "should_exit", True))
    serving_task = asyncio.create_task(http_server.serve(sockets=[listener]))
    while not http_server.started and not serving_task.done():  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.005)
    url = _url(listener)
    if ready_file is not None:
        # Written aside and renamed: the parent polls for this file, and could read half of it.
        draft_path = ready_file.with_suffix(ready_file.suffix + ".draft")
        draft_path.write_text(json.dumps({"url": url, "pid": os.getpid()}))
        draft_path.rename(ready_file)
    print(f"embedded engine ready at {url}", flush=True)
    await serving_task
    if driving_task.done():
        driving_task.result()
    driving_task.cancel()
    return 0


def _url(listener: socket.socket) -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix://{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _exit_with_stdin() -> None:
    # Not through sys.stdin: a thread inside it at the interpreter's end is a fatal error.
    while os.read(0, 4096):
        pass
    os._exit(0)


def main(arguments: list[str] | None = None) -> int:
    """Start, serve, return the exit code."""
    json_log.adopt()
    options = parse_arguments(arguments)
    if options.lifeline:
        threading.Thread(target=_exit_with_stdin, daemon=True).start()
    try:
        # From the environment: the list of processes shows a command line to every user of the machine.
        engine_key = None if options.no_key else EngineKey.of_environment()
        if engine_key is None and options.socket is None and not options.no_key:
            raise UsageError(f"an engine on {options.host} needs a key in ${EngineKey.VALUE}: set it, or give --no-key")
        # Before torch and the model are loaded: an address in use is one line after a tenth of a second, not after
        # the minute that a model takes. Clients that come early wait in the socket's queue.
        listener = listen(options.host, options.port, options.socket)
        with quick_imports():
            engine, app = build(options)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return asyncio.run(serve(engine, app, listener, ready_file=options.ready_file, key=engine_key))


if __name__ == "__main__":
    sys.exit(main())
