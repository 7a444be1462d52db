"""The interfaces of parts that can be plugged in: environments, tools, sandboxes, engines, rewards.

These are structural types: your class satisfies one if it has the methods. The public checkers in `agentrl.testing`
test whether it keeps the promises of these docstrings.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import urlsplit

from agentrl.errors import ConfigError
from agentrl.records import (
    Generation,
    ImagePart,
    Json,
    Message,
    RoutedExperts,
    SamplingParams,
    StopReason,
    Trajectory,
    VersionSpan,
)
from agentrl.tokens.columns import Columns
from agentrl.tokens.images import Image

# --- environments -----------------------------------------------------------------------------------------------


@runtime_checkable
class AsyncEnv(Protocol):
    """An environment that a rollout drives. `agentrl.env.Env` has both interfaces; a plain `gymnasium.Env` is wrapped.

    `areset`/`astep` follow gymnasium's five-tuple; observations are the messages to append. Both may raise
    `InfrastructureError`; any other exception becomes `EnvError` at the rollout's boundary."""

    template_format: str
    """Set by the driver before the reset: the dialect in which the model's chat template writes tool calls."""

    action_cut: bool
    """Set by the driver before each step: whether the action was cut (`Turn.finish` is "length") before the policy
    ended it."""

    def tool_schemas(self) -> Sequence[Mapping[str, Json]]:
        """OpenAI-style function schemas for the chat template; empty if the environment has no tools."""
        ...

    async def areset(
        self, *, seed: int | None = None, options: Mapping[str, Json] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, Json]]: ...

    async def astep(self, action: str) -> tuple[tuple[Message, ...], float, bool, bool, dict[str, Json]]: ...

    async def aend(self, reason: StopReason) -> dict[str, Json]:
        """The driver ends the episode at its own limit. Returns the info, with `outcome` if there is one."""
        ...

    def charge_tokens(self, count: int) -> None:
        """The driver reports how many tokens the next action cost."""
        ...

    @property
    def replayable(self) -> bool:
        """Whether the same actions after the same reset give the same observations again."""
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class SnapshotEnv(Protocol):
    """An environment whose episode can go on elsewhere without repeating its actions."""

    @property
    def has_snapshots(self) -> bool:
        """Whether `snapshot` and `restore` work."""
        ...

    async def snapshot(self) -> bytes:
        """The whole state between two steps, sufficient for another process and perhaps another host."""
        ...

    async def restore(self, snapshot: bytes) -> None:
        """Bring a fresh instance, before any reset, to the state of `snapshot`."""
        ...


@runtime_checkable
class BoundedSnapshots(Protocol):
    """An environment that must know ahead how large a snapshot may be: `snapshot_bytes`, set before the reset; with 0
    none is taken."""

    snapshot_bytes: int


@runtime_checkable
class BoundedObservations(Protocol):
    """An environment that wants to know how many bytes of text its driver keeps of one answer: `observation_bytes`, set
    before the reset."""

    observation_bytes: int


@runtime_checkable
class ArtifactEnv(Protocol):
    """An environment whose work can be tested elsewhere, by a reward source of kind `tests`."""

    async def artifacts(self) -> Mapping[str, bytes]:
        """The declared files of the agent's work as they stand after the last step, by relative path. What is missing
        or no plain file is left out. Runs nothing, and changes nothing in the agent's box."""
        ...


@runtime_checkable
class KeyedEnv(Protocol):
    """An environment that gets the id of the next action: `action_id`, set before each step, is unique in its run and
    the same if another worker repeats the action. A service that uses it as an idempotency key does its work once."""

    action_id: str


# --- sandboxes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one box. Every field has a finite default: a box is closed by default and opened explicitly. Raises
    ConfigError for what is no finite number above 0, or not whole where bytes, files or processes are counted."""

    wall_s: float = 10.0  # default deadline of one exec
    cpu_s: float = 10.0  # CPU time of one process
    cpus: float = 1.0  # CPU time of the box per second, if the backend has a quota
    memory_bytes: int = 512 << 20  # address space of one process (cgroup memory of the box if there is a cgroup)
    pids: int = 64
    open_files: int = 256
    file_bytes: int = 64 << 20  # largest file a process may write
    disk_bytes: int = 256 << 20  # the whole work folder, if the backend can bound it
    output_bytes: int = 64 << 10  # stdout and stderr each; more is cut and flagged

    def __post_init__(self) -> None:
        for each_field in fields(self):
            value = getattr(self, each_field.name)
            number_kinds, kind_words = (
                (int, "a whole number") if each_field.type in (int, "int") else (int | float, "a finite number")
            )
            # Infinity too is refused: a box without a bound is what these limits are there to prevent, and NaN compares
            # as neither.
            if isinstance(value, bool) or not isinstance(value, number_kinds) or not 0 < value < math.inf:
                raise ConfigError(each_field.name, value, f"give {kind_words} above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPolicy:
    """Hosts that a closed box may reach in a phase, through a proxy (`agentrl.sandbox.network_policy`): `allow` has
    `host:port`. The phase `setup` ends before the policy's first command. A name whose address is not public is
    refused, unless `private`. Raises ConfigError."""

    allow: Sequence[str]
    phase: str = "setup"
    private: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.allow, str) or not self.allow:
            raise ConfigError("network.allow", self.allow, 'give a list of hosts with ports, as ["pypi.org:443"]')
        if self.phase != "setup":
            raise ConfigError("network.phase", self.phase, "choose setup: the agent itself has no network")
        for allowed_entry in self.allow:
            self.parsed(allowed_entry)

    @staticmethod
    def parsed(entry: str) -> tuple[str, int]:
        """Host and port of an entry. Raises ConfigError."""
        host_name, port_number = "", None
        with suppress(ValueError, AttributeError):
            parsed_url = urlsplit(f"//{entry}")
            # One spelling of each name, as the proxy compares by text: `PyPI.org.` is the same host as `pypi.org`.
            host_name, port_number = (parsed_url.hostname or "").lower().rstrip("."), parsed_url.port
        # No patterns: `*.example.com` would also allow the name that somebody else may register or point wherever he
        # likes.
        if not host_name or not port_number or any(refused_sign in entry for refused_sign in "/@*? "):
            raise ConfigError("network.allow", entry, "give host:port, as pypi.org:443")
        return host_name, port_number


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """The kind of a box. `image` is the backend's own name of a root file system, None for its default. `covered` are
    folders of the image that the box finds empty (a history with the solution, say), where the backend can do that."""

    image: str | None = None
    limits: Limits = field(default_factory=Limits)
    network: bool = False
    covered: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])  # written into the work folder at creation


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """How a command ended. A failing, killed or timed-out command is a result, never an exception.

    `timed_out` says that the command used up time of its own: the time that it ran, slept or waited for its own
    children. The time in which it was ready to run and the host gave it no processor is `starved_s`; a box moves the
    deadline on by it, and raises HostBusy when that does not end. A backend that cannot tell leaves it 0."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    oom: bool = False
    truncated: bool = False
    duration_s: float = 0.0
    """Wall time in seconds, `starved_s` included."""
    cpu_s: float | None = None
    """CPU time in seconds, user and system, of the command and all that it started; None if the backend cannot tell."""
    starved_s: float = 0.0


class BoxProcess(Protocol):
    """A background process of a box; it dies with the box. Output not yet received is kept up to `Limits.output_bytes`;
    more is cut and flagged as truncated."""

    async def send(self, data: bytes) -> None:
        """Write to its stdin; does nothing if the process has ended or closed it."""
        ...

    async def receive(self, timeout_s: float | None = None) -> bytes:
        """New bytes of its stdout: at least one, or none at the end of output or after `timeout_s` seconds."""
        ...

    async def wait(self, timeout_s: float | None = None) -> ExecResult | None:
        """Its result, with output not yet received; None if it still runs after `timeout_s` seconds."""
        ...

    async def kill(self) -> ExecResult:
        """End it and all it started. Idempotent."""
        ...


class Sandbox(Protocol):
    """One box with a private work folder `/workspace`. Paths are relative to it and cannot leave it.

    Raises `SandboxError` when the box's host fails, `SandboxPathError` (the policy's own doing) when a path in the box
    is missing, of the wrong kind, leads out, finds no space or is larger than the caller allows; a command's failure in
    the box is an `ExecResult`. Waiting in `exec`, in a `BoxProcess`, and for files that processes in the box can hold
    back, is the policy's time: a box waits in `agentrl.host.clocks.policy_time()`."""

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> ExecResult: ...

    async def start(
        self, argv: Sequence[str], *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> BoxProcess: ...
    async def read(self, path: str, *, most_bytes: int | None = None) -> bytes: ...
    async def write(self, path: str, data: bytes) -> None: ...
    async def upload(self, source: Path, target: str) -> None: ...
    async def download(self, source: str, target: Path) -> None: ...
    async def snapshot(self) -> str: ...
    async def restore(self, snapshot: str) -> None: ...
    async def fork(self) -> Sandbox: ...
    async def close(self) -> None: ...


@runtime_checkable
class PackableSandbox(Protocol):
    """A box whose files can go on in another box, maybe on another host. Only files: both raise `BoxBusy`, a
    SandboxError, while processes run in the box."""

    async def pack(self, most_bytes: int) -> bytes:
        """All that the box's commands have written, as at most `most_bytes` bytes. Raises SandboxPathError if it comes
        to more, or the files exceed the bounds of the box."""
        ...

    async def unpack(self, data: bytes) -> None:
        """Replace the box's files by those of a packed box of this backend. The bytes may be hostile: they cannot lead
        out of the box. Raises SandboxError if they are damaged, SandboxPathError if they do not fit."""
        ...


class SandboxBackend(Protocol):
    """Makes boxes. `name` is its registry id; `create` raises `SandboxUnavailable`, which says what to install."""

    name: str

    async def create(self, spec: SandboxSpec) -> Sandbox: ...
    async def aclose(self) -> None: ...


# --- tools ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The text for the model with the `images` that stand in it, and `data` that only the environment sees."""

    content: str
    is_error: bool = False
    truncated: bool = False
    images: Sequence[ImagePart] = ()
    data: Mapping[str, Json] = field(default_factory=dict[str, Json])


class Tool(Protocol):
    """Something the policy may call. `schema` is an OpenAI-style function schema (name, description, parameters).

    `call` raises `PolicyFault` (the model reads the text) or `InfrastructureError` (law 3)."""

    name: str
    parallel: bool

    @property
    def schema(self) -> Mapping[str, Json]: ...

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult: ...


# --- engines ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Tokens in. `session` names the episode, so that a fleet can choose the engine that has its prefix cached. `model`
    names one of several models of an engine (an adapter), None its own; a run whose roles have adapters of their own
    gives `policy`, the role, and for a past self `version`: its weight version, 0 for the model that the run began
    with (None: the current one). `experts_from` asks a mixture for the experts
    of tokens from this index on. `kept` asks for the set that each token was drawn from, in the column of that name
    (`agentrl.tokens.sampling_mask`). `images` are those that `token_ids` name, see `agentrl.tokens.images`. With
    `ignore_eos` nothing but the stops of `sampling` ends it; else some servers also end at the model's own end token.

    The last `sampled` of `token_ids` were sampled earlier in this turn, maybe elsewhere: a stop text may begin in them.
    `max_tokens`, `deadline_s` and the answer cover only the rest. `on_chunk` is called with each chunk as it comes, and
    its exception ends the request; an engine that does not stream may ignore it."""

    request_id: str
    session: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline_s: float = 120.0
    model: str | None = None
    policy: str | None = None
    version: int | None = None
    experts_from: int | None = None
    kept: bool = False
    images: tuple[Image, ...] = ()
    ignore_eos: bool = False
    sampled: int = 0
    on_chunk: Callable[[Chunk], None] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some sampled tokens of a stream. `spans` count from the chunk's first token; if an engine names versions only at
    the end, a later chunk restates earlier tokens with negative starts, and the later statement holds
    (`agentrl.engine.router.turn_request` joins chunks). `columns` holds more about each token, see
    `agentrl.tokens.columns`. The last chunk has `finish` and `experts` of the whole request. `spent_s` is the part of
    its deadline that the request has used, if known. A chunk without tokens and `finish` says that the request left an
    engine and goes on at another."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish: str | None = None
    experts: RoutedExperts | None = None
    spent_s: float = 0.0
    columns: Columns = field(default_factory=dict[str, tuple[float, ...]])

    @classmethod
    def whole(cls, generation: Generation) -> Chunk:
        """All of a generation as the only chunk of its stream."""
        return cls(
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            spans=generation.spans,
            finish=generation.finish,
            experts=generation.experts,
            columns=generation.columns,
        )


class Engine(Protocol):
    """Tokens in, tokens out. Raises `EngineUnavailable`/`EngineTimeout`; earlier samples are in the chunks."""

    def stream(self, request: GenerateRequest) -> AsyncIterator[Chunk]: ...
    async def generate(self, request: GenerateRequest) -> Generation: ...
    async def aclose(self) -> None: ...


class MessageRenderer(Protocol):
    """Messages to the tokens of a conversation, and sampled tokens to text, as `agentrl.engine.rendering.renderer`
    does it by a model's chat template. Raises ModelError for messages that it refuses."""

    stop_token_ids: tuple[int, ...]
    """Each of them ends a turn."""

    @property
    def tool_format(self) -> str | None:
        """The dialect in which the policy is to write tool calls; None if it is not known."""
        ...

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] = ()) -> tuple[int, ...]:
        """The prompt of a fresh conversation, up to where the policy speaks."""
        ...

    def extend(
        self, sampled: Sequence[int], messages: Sequence[Message], tools: Sequence[Mapping[str, Json]] = ()
    ) -> tuple[int, ...]:
        """The tokens to append after a turn's `sampled` ones: those of the new messages."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a turn's sampled tokens, without the one that ends it."""
        ...


# --- rewards ----------------------------------------------------------------------------------------------------


class Rewarder(Protocol):
    """Scores a finished episode: gives its outcome reward. It is any callable `trajectory -> float`, plain or async
    (`agentrl.rewards.Judge`). If it raises InfrastructureError, the episode leaves loss and baseline."""

    def __call__(self, trajectory: Trajectory) -> float | Awaitable[float]: ...
