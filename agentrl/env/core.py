"""The environment contract: a `gymnasium.Env` whose actions are text and whose observations are chat messages.

An author writes one side, `reset`/`step` or `areset`/`astep`, and gets the other. The first line of either reset is
`super().reset(seed=seed)` (or `await super().areset(seed=seed)`), which seeds `self.np_random`. This module knows no
model, no tokens and no rollout.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, Literal, cast

import gymnasium
import trio

from agentrl.env import spaces
from agentrl.env.asyncio_code import adapted
from agentrl.env.sync_async import LoopThread, call, in_thread, refused_exit
from agentrl.errors import EnvError, UsageError
from agentrl.protocols import AsyncEnv
from agentrl.records import Json, Message, Messages, StopReason

Info = dict[str, Json]
ResetResult = tuple[Messages, Info]
StepResult = tuple[Messages, float, bool, bool, Info]

_ASYNC: Final = ("areset", "astep", "aclose", "aend", "snapshot", "restore")
CLOSE_DEADLINE_S: Final = 30.0
"""How long `aclose` may take, also when its caller was cancelled."""


class Env(gymnasium.Env[Messages, str]):
    """A `gymnasium.Env` for language agents that trains.

    `step(action)` takes the policy's text and returns `(messages, reward, terminated, truncated, info)`: the messages
    to append, the process reward of this turn, gymnasium's two flags, and a JSON-safe `info` that must be equal on
    replay (no timings). Keys of `info` with a meaning: `outcome` (float, the episode's outcome reward), `success`
    (bool), `stop_reason` (a `StopReason`), `history` (a list of messages that replaces all before it), `continues`
    (with a history: the index of the earlier turn that it goes on from, by the messages of the observation),
    `unsettled` (float, is added to the last reward if somebody else ends the episode; see
    `agentrl_environments.rewards`).

    Example::

        class Echo(agentrl.Env):
            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                return ({"role": "user", "content": "Say hello."},), {}

            def step(self, action):
                good = "hello" in action.lower()
                return (), 0.0, True, False, {"outcome": float(good), "success": good}

    Use one instance from one side only: async code closes with `aclose` what it opened, sync code with `close`. Raise
    `InfrastructureError` for a failure that the policy could not have caused.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "human"], "render_fps": 1}  # noqa: RUF012  (gymnasium's form)
    action_space = spaces.Text()
    observation_space = spaces.Messages()
    render_mode: str | None = None
    """Set by `make(id, render_mode=…)`: with "ansi" `render` gives the transcript, "human" prints it as it goes."""

    blocking: ClassVar[bool] = True
    """Whether sync `reset`/`step`/`close` may block and so go to a thread; False has them called in place."""

    replayable: bool = False
    """A promise: reset with the same seed and options and the same actions give the same observations."""

    async_library: Literal["trio", "asyncio"] | None = None
    """The library of the class's async methods and tools; None: read from their code. Code for asyncio runs on a loop
    in a thread of its own, see `agentrl.env.asyncio_code`."""

    needs_step_s: float = 0.0
    """Seconds that an honest policy may need in one step, such as a long test run. A run whose deadlines are shorter,
    and would end it as the policy's time limit, says so at its start."""

    needs_step_by: str = ""
    """The setting that decides `needs_step_s`, if one does."""
    unrewarded: str = ""
    """Why nothing in the environment gives an episode a reward, and what to do: a run is refused with this line unless
    it has a rewarder or reward sources."""

    evaluation_set: str = ""
    """Why the tasks are for evaluation alone: a run that trains on them says so at its start."""

    tool_format: str | None = None
    """The dialect in which the policy is to write tool calls, see `agentrl.env.tools.parsers`; None: that of the
    model's chat template."""

    template_format: str = "hermes"
    """The dialect of the model's chat template; the driver sets it before the reset."""

    action_cut: bool = False
    """Whether the action that comes was cut before the policy ended it: at the tokens or seconds of a turn, or at the
    end of its context. The driver sets it before each step."""

    action_id: str = ""
    """The action that comes, by a name that is unique in its run; the driver sets it before each step. Another worker
    repeats an action under the same name: give it as an idempotency key to services whose work is slow or dear."""

    policy_writes_prompts: bool = False
    """Whether the policy may have written all of what it reads once it has acted, roles and tools included, as its code
    can speak for an agent program. A prompt that the chat template refuses is then the policy's fault."""

    observation_bytes: int = 16 << 20
    """The most bytes of text in one answer that its driver keeps. The driver sets it before the reset."""

    snapshot_bytes: int = 4 << 20
    """The most bytes that a snapshot may have; 0: none will be taken. The driver sets it before the reset."""

    _loop: LoopThread | None = None
    _abandoned: trio.Event | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for method_name in ("reset", "step", "close"):
            # gymnasium's wrappers call these three and would take the coroutine for the answer. Said at the class,
            # since at the first step it reads like a wrong tuple.
            if inspect.iscoroutinefunction(vars(cls).get(method_name)):
                correction = f"write async def a{method_name}, or a plain def {method_name}"
                raise UsageError(f"{cls.__name__}.{method_name} is async: {correction}")
        if cls.__module__.partition(".")[0] != "agentrl":
            for method_name in _ASYNC:
                if inspect.iscoroutinefunction(method := vars(cls).get(method_name)):
                    setattr(cls, method_name, adapted(method))

    # --- gymnasium's side

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        """Start an episode: the first messages and an info. Overrides begin with `super().reset(seed=seed)`."""
        gymnasium.Env.reset(self, seed=seed)  # pyright: ignore[reportUnknownMemberType]
        # Both conditions: an author who writes both sides calls `super().reset` from one of them, and must not be led
        # round in a circle.
        if self._overrides("areset") and not self._overrides("reset"):
            return self._run(self._areset_with, seed, options)
        return (), {}

    def step(self, action: str) -> StepResult:
        """Answer one action. An environment that wrote `astep` gets this one."""
        if self._overrides("astep"):
            return self._run(self.astep, action)
        raise NotImplementedError(f"{type(self).__name__} must write step or astep")

    def close(self) -> None:
        """Close what the environment holds. Idempotent."""
        try:
            if self._overrides("aclose") and not self._overrides("close"):
                self._run(self.aclose)
        finally:
            if self._loop is not None:
                self._loop.stop()
                self._loop = None

    def render(self) -> Any:
        """A `render_mode` shows the transcript, by `agentrl.env.gymnasium_wrappers.Rendered`; one made without has
        none."""
        class_name = type(self).__name__
        raise UsageError(f"{class_name} has no render_mode: make it by agentrl.make(id, render_mode='ansi') or 'human'")

    def end_now(self, reason: StopReason) -> Info:
        """`aend` for sync code."""
        return self._run(self.aend, reason) if self._overrides("aend") else {}

    # --- trio's side

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Json] | None = None) -> ResetResult:
        """`reset` for async code. Overrides begin with `await super().areset(seed=seed)`."""
        if self._overrides("reset") and not self._overrides("areset"):
            return await self._in_thread("reset", self.reset, seed=seed, options=options)
        gymnasium.Env.reset(self, seed=seed)  # pyright: ignore[reportUnknownMemberType]
        return (), {}

    async def astep(self, action: str) -> StepResult:
        """`step` for async code.

        Cancelling a sync `step` leaves its thread behind: the environment then refuses everything but `aclose`."""
        if self._overrides("step"):
            return await self._in_thread("step", self.step, action)
        raise NotImplementedError(f"{type(self).__name__} must write step or astep")

    async def aclose(self) -> None:
        """Close what the environment holds within `CLOSE_DEADLINE_S`, also if the caller was cancelled."""
        if not self._overrides("close"):
            return
        with trio.move_on_after(CLOSE_DEADLINE_S, shield=True):
            if self._abandoned is not None:
                # Half of the time for the call that was left behind: `close` needs what it holds, and usually it ends
                # as soon as its own wait is over. If it does not, the other half is still there to close without it.
                with trio.move_on_after(CLOSE_DEADLINE_S / 2):
                    await self._abandoned.wait()
            await call(self.close, blocking=self.blocking)

    async def aend(self, reason: StopReason) -> Info:
        """The driver ends the episode for a reason of its own (a limit of the run): the last info, with `outcome`
        if the environment can judge the episode as it stands. The default gives no keys."""
        return {}

    def charge_tokens(self, count: int) -> None:
        """The driver reports the sampled tokens of the turn to come; environments with a token limit count them."""

    # --- what a driver may ask

    def tool_schemas(self) -> list[Mapping[str, Json]]:
        """OpenAI-style schemas (`{"type": "function", "function": {...}}`) for the chat template."""
        return []

    async def snapshot(self) -> bytes:
        """The whole state between two steps, for `restore` of another instance, maybe on another host. A run asks for
        it after a turn (`rollout.snapshot_every_turns`), so that an episode whose worker died repeats no action."""
        raise NotImplementedError(f"{type(self).__name__} takes no snapshots")

    async def restore(self, snapshot: bytes) -> None:
        """Bring a fresh instance, which was not reset, to the state of `snapshot`."""
        raise NotImplementedError(f"{type(self).__name__} takes no snapshots")

    @property
    def has_snapshots(self) -> bool:
        """Whether this class wrote `snapshot` and `restore`."""
        return self._overrides("snapshot") and self._overrides("restore")

    async def __aenter__(self) -> Env:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- inside

    @classmethod
    def _overrides(cls, name: str) -> bool:
        return getattr(cls, name) is not getattr(Env, name)

    def _run(self, function: Any, *args: Any) -> Any:
        if self._loop is None:
            self._loop = LoopThread()
            # By the object's end and not by `__del__`: the loop's thread would otherwise live as long as the process
            # for each environment that somebody forgot to close.
            weakref.finalize(self, self._loop.stop)
        return self._loop.run(function, *args)

    async def _areset_with(self, seed: int | None, options: Mapping[str, Any] | None) -> ResetResult:
        return await self.areset(seed=seed, options=options)

    async def _in_thread(self, what: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        # A step that was left behind still works on this instance in its thread. Any further call would run beside it,
        # on state that neither of them expects.
        if self._abandoned is not None:
            raise EnvError(f"{type(self).__name__}.{what}: an earlier call was cancelled in the middle; make a new one")
        if not self.blocking:
            return await call(function, *args, blocking=False, **kwargs)

        def left(ended: trio.Event) -> None:
            self._abandoned = ended

        try:
            return await in_thread(functools.partial(function, *args, **kwargs), left=left)
        except SystemExit as exit_request:
            raise refused_exit(function, exit_request) from exit_request


class _Wrapped(Env):
    """Any gymnasium environment whose actions and observations are text, seen as an `Env`. What gymnasium's wrappers do
    not know, such as grading at a limit, goes to the `Env` within them."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._env = env
        self._inner = env.unwrapped if isinstance(env.unwrapped, Env) else None
        self.replayable = bool(getattr(env.unwrapped, "replayable", False))
        self.tool_format = getattr(env.unwrapped, "tool_format", None)

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        if self._inner is not None:
            self._inner.template_format = self.template_format
        observation, info = self._env.reset(seed=seed, options=None if options is None else dict(options))
        return as_messages(observation), info

    def step(self, action: str) -> StepResult:
        if self._inner is not None:
            self._inner.action_cut, self._inner.action_id = self.action_cut, self.action_id
        observation, reward, terminated, truncated, info = self._env.step(action)
        if truncated:  # by a wrapper, maybe: an environment that ended by itself has nothing to add
            info = {**self._end(StopReason.TRUNCATED), **info}
        return as_messages(observation), float(reward), bool(terminated), bool(truncated), info

    def _end(self, reason: StopReason) -> Info:
        return self._inner.end_now(reason) if self._inner is not None else {}

    async def aend(self, reason: StopReason) -> Info:
        return await self._in_thread("end", self._end, reason)

    def charge_tokens(self, count: int) -> None:
        if self._inner is not None:
            self._inner.charge_tokens(count)

    def oracles(self) -> Sequence[Any]:
        """Oracles of the environment within: a wrapper that changes its task breaks them."""
        inner_oracles = getattr(self._inner, "oracles", None)
        return inner_oracles() if inner_oracles is not None else ()

    def close(self) -> None:
        self._env.close()
        super().close()

    def tool_schemas(self) -> list[Mapping[str, Json]]:
        inner_schemas = getattr(self._env.unwrapped, "tool_schemas", None)
        return list(inner_schemas()) if inner_schemas is not None else []


def as_messages(observation: Any) -> Messages:
    """A text becomes one user message; messages stay. Raises UsageError for anything else."""
    if isinstance(observation, str):
        return (Message(role="user", content=observation),)
    if isinstance(observation, list | tuple):
        messages = tuple(cast("tuple[Message, ...]", observation))
        if (reason := _SPACE.why_not(messages)) is None:
            return messages
        raise UsageError(f"observation is no tuple of messages: {reason}")
    raise UsageError(f"observation is a {type(observation).__name__}, neither text nor messages")


_SPACE = spaces.Messages(max_images=spaces.MOST_IMAGES)


def as_async(env: Any) -> AsyncEnv:
    """The async side of any environment: ours as it is, a wrapped or plain `gymnasium.Env` with text in and out.

    Raises UsageError for spaces that are not text (see `agentrl.env.adapters` for those) and for an object that is
    not an environment."""
    if isinstance(env, AsyncEnv):
        return env
    if not isinstance(env, gymnasium.Env):
        raise UsageError(f"{env!r} is no environment: derive from agentrl.Env or gymnasium.Env")
    gymnasium_env = cast("gymnasium.Env[Any, Any]", env)
    if not isinstance(gymnasium_env.action_space, spaces.Text | gymnasium.spaces.Text):
        problem = f"{gymnasium_env} takes actions from {gymnasium_env.action_space}, not text"
        raise UsageError(f"{problem}: wrap it with agentrl.env.adapters.TextGym")
    return _Wrapped(gymnasium_env)
