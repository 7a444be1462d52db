"""Starts SGLang servers of ours: which interpreter, which flags, which environment, and when one is ready.

Owns the command line and the reading of a log that ends badly; what is the same for any server is in
`agentrl.engine.server_start`. Nothing of ours is installed beside SGLang: its interpreter runs `lifeline.py` by its
path. Never keeps a process: whoever starts the command ends it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any

from agentrl.config.vllm_arguments import words
from agentrl.engine.client import EngineClient
from agentrl.engine.server_start import Build, installed, starting, visible, wait_for, why_it_ended
from agentrl.engine.sglang import server_facts
from agentrl.errors import EngineError, EngineTimeout, EngineUnavailable, RunFailed, UsageError
from agentrl.host.user_warnings import warn
from agentrl.records import EngineKey

PYTHON_VARIABLE = "AGENTRL_SGLANG_PYTHON"
TESTED = "0.5."  # versions whose protocol the client speaks
_ASK_S = 2.0
_HINTS = (
    (r"No module named '?sglang", f"set {PYTHON_VARIABLE} to an interpreter that has SGLang"),
    (r"[Aa]ddress already in use", "another process has the port: start the run again"),
    (
        r"[Oo]ut of memory|Not enough memory",
        "lower engine.sglang.mem-fraction-static, or name more GPUs (engine.replicas)",
    ),
    (r"unrecognized arguments", "this SGLang lacks a flag: see [engine.sglang], and its --help"),
    (r"invalid choice", "see [engine.sglang], and SGLang's --help"),
    (r"No accelerator|No CUDA|no NVIDIA driver", "SGLang needs a GPU: take engine.kind = 'embedded' without one"),
)


def find_build(python: str | Path | None = None) -> Build:
    """The SGLang to start: of `python`, else of $AGENTRL_SGLANG_PYTHON, else of the running interpreter. Warns of a
    version whose protocol was not tried. Raises UsageError if there is none."""
    named_python = python or os.environ.get(PYTHON_VARIABLE)
    own_interpreter = sys.executable if importlib.util.find_spec("sglang") else None
    candidate = named_python or own_interpreter
    versions = installed(Path(candidate), ("sglang",)) if candidate else {}
    if not versions:
        complaint = f"{str(named_python)!r} has no SGLang" if named_python else "no SGLang found"
        raise UsageError(
            f"{complaint}: set {PYTHON_VARIABLE} to an interpreter that has it, or start the servers yourself and name "
            "them in engine.urls"
        )
    version = versions["sglang"]
    if not version.startswith(TESTED):
        # A warning, where vLLM's other versions are refused: nothing of ours runs inside SGLang that could break with
        # a new version, and `server_facts.require` asks for what training needs.
        warn(f"{candidate} has SGLang {version}; its protocol was tried with {TESTED}x")
    return Build(python=Path(str(candidate)), version=version)


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangLaunch:
    """One server to start, on `host` and `port`, for those who show `key`. `gpus` are those it takes, as torch counts
    them: its layers are split over several; without any SGLang takes the first. `lora_rank` 0 switches LoRA off.
    `arguments` are further ones of SGLang's server, as `agentrl.config.sglang_arguments.normal` spells them."""

    model: Path
    port: int
    build: Build
    key: EngineKey
    host: str = "127.0.0.1"
    max_model_len: int = 2048
    max_batch: int = 128
    dtype: str = "auto"
    stream_tokens: int = 16
    threads: int = 1
    gpus: tuple[int, ...] = ()
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    max_loras: int = 2
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def argv(self) -> list[str]:
        """The arguments after the interpreter, without the key. Those of `arguments` take the place of ours."""
        options: dict[str, Any] = {
            "model-path": str(self.model),
            "host": self.host,
            "port": self.port,
            "context-length": self.max_model_len,
            "max-running-requests": self.max_batch,
            "dtype": self.dtype,
            "sampling-defaults": "openai",  # none of the model's folder may change the sampling distribution
            "stream-interval": self.stream_tokens,
            "incremental-streaming-output": True,
            "enable-metrics": True,
            "log-level-http": "warning",
        }
        if self.lora_rank:
            target_names = [target_name.rpartition(".")[2] for target_name in self.lora_targets] or ["all"]
            options |= {"enable-lora": True, "max-lora-rank": self.lora_rank, "lora-target-modules": target_names}
            options |= {"max-loras-per-batch": self.max_loras + 1}  # one more for requests without any
        if len(self.gpus) > 1:
            options["tensor-parallel-size"] = len(self.gpus)
        options |= self.arguments
        flags = {name: value for name, value in options.items() if value is not False}  # off is a flag left out
        return [str(Path(__file__).with_name("lifeline.py")), *words(flags)]

    def env(self) -> dict[str, str]:
        """Variables to add to the environment."""
        environment = {
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),  # a run's own modules are for another interpreter
            "PYTHONSAFEPATH": "1",  # nor are those that lie beside `lifeline.py`
            "PYTHONDONTWRITEBYTECODE": "",  # thousands of modules: compiled anew they cost every start many seconds
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs are those of the distribution that is sampled from
            "OMP_NUM_THREADS": str(self.threads),
            **self.key.variables(signs=False),
        }
        return environment | ({"CUDA_VISIBLE_DEVICES": ",".join(visible(self.gpus))} if self.gpus else {})


async def ready(
    server: SGLangLaunch,
    *,
    version: int,
    deadline_s: float,
    ended: Callable[[], bool],
    log: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Wait until the server is up, tell it which weight version its folder holds, and see that it has what training
    needs, which warms it up. `say` gets a line from time to time about what is waited for.

    `ended` says whether its process is gone. Raises RunFailed with the cause from the log, if it is gone or time runs
    out, or if the address is another server's; UsageError as `server_facts.require`."""
    explanation = partial(why_it_ended, log, _HINTS)
    client = EngineClient(server.url, kind="sglang", version=version, api_key=server.key)
    stranger = EngineClient(server.url, kind="sglang")
    try:
        async with starting("SGLang", deadline_s=deadline_s, why=explanation):
            await wait_for(
                partial(_serves, client, stranger),
                name="SGLang",
                model=server.model,
                ended=ended,
                why=explanation,
                log=log,
                say=say,
            )
            await client.dialect.announce(client, version, deadline_s=10.0)
            await server_facts.require(client, context=server.max_model_len, adapters=bool(server.lora_rank))
    finally:
        await client.aclose()
        await stranger.aclose()


async def _serves(client: EngineClient, stranger: EngineClient) -> bool:
    """Whether the server is up. It has no proof of who it is: one that refuses who has no key, and knows ours, is ours.
    Raises RunFailed for another one."""
    try:
        # SGLang has no challenge to answer as our guard has. So two questions identify it: without a key it refuses,
        # with ours it does not. Another server that took the port first would fail one of them.
        if not await _refuses(stranger) or await _refuses(client):
            raise RunFailed(f"another server answers at {client.url}: start the run again, on another port")
        return not await client.dialect.paused(client, deadline_s=_ASK_S)  # while it warms up, too
    except (EngineUnavailable, EngineTimeout):
        return False


async def _refuses(client: EngineClient) -> bool:
    """Whether the server asks this client for a key. Raises EngineError for any other refusal."""
    try:
        await client.call("GET", "/model_info", deadline_s=_ASK_S)
    except EngineError as error:
        if error.status != HTTPStatus.UNAUTHORIZED:
            raise
        return True
    return False
