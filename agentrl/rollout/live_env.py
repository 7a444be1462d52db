"""The live environment of one episode: made, reset or restored, stepped and closed, each call under its deadline.

Knows neither journal nor engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import trio

from agentrl.env import step_results
from agentrl.errors import EnvError, InfrastructureError, PolicyFault, boundary
from agentrl.protocols import AsyncEnv, KeyedEnv, SnapshotEnv
from agentrl.records import Json, ShownTools, Step, StopReason, Task, Turn
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.env_calls import ENDS_A_PROCESS, EnvCalls, TimeUp, one_line
from agentrl.rollout.take_snapshots import prepare

ToolSchemas = Sequence[Mapping[str, Json]]


class LiveEnv:
    """The environment of an episode of `task`. `latest` is its last answer; `calls` bounds every call into it, and
    counts the seconds that the policy's actions took."""

    __slots__ = ("_context", "_env", "_keyed", "_schemas", "calls", "latest", "task")

    def __init__(self, task: Task, context: RolloutContext) -> None:
        self.task, self._context = task, context
        self.calls = EnvCalls(task.env, context.settings.step_deadline_s)
        self.latest = Step(observation=())
        self._env: AsyncEnv | None = None
        self._keyed: KeyedEnv | None = None
        self._schemas: dict[str | None, ToolSchemas] = {}

    @property
    def env(self) -> AsyncEnv:
        """The environment itself."""
        assert self._env is not None, "the environment is open"
        return self._env

    @property
    def with_snapshots(self) -> SnapshotEnv | None:
        """The environment itself if it offers snapshots."""
        env = self.env
        return env if isinstance(env, SnapshotEnv) and env.has_snapshots else None

    @property
    def policy_writes_prompts(self) -> bool:
        """True if the policy may write roles and tools of its prompts, and not only words."""
        return getattr(self.env, "policy_writes_prompts", False)

    async def open(self) -> None:
        """Make the environment."""
        env: AsyncEnv = await self.calls("make", lambda: _call(self._context.make_env, self.task))
        # Checking a protocol at run time is slow: it is done once here, not at every action.
        self._env, self._keyed = env, env if isinstance(env, KeyedEnv) else None
        prepare(env, self._context.settings)
        env.template_format = self._context.renderer.tool_format or ""

    async def close(self) -> None:
        """End the environment, within a deadline of its own, also when the episode was cancelled. Idempotent."""
        env, self._env = self._env, None
        if env is None:
            return
        # Shielded from the cancellation that often brought us here: an environment that is not closed leaves a box and
        # its processes behind. Bounded nevertheless, as its code may hang (law 4); the janitor removes what is left
        # then.
        with trio.move_on_after(self._context.settings.step_deadline_s, shield=True):
            close_label = f"{self.task.env}: close raised"
            try:
                with boundary(EnvError, close_label, passes=(InfrastructureError,), place=True):
                    await env.aclose()
            except ENDS_A_PROCESS as error:
                raise EnvError(f"{close_label} {one_line(error)}") from error

    async def reset(self) -> None:
        """Reset the environment for the task; `latest` then holds its first messages."""
        env, most_bytes = self.env, self._context.settings.observation_bytes
        self.latest = await self.calls("reset", lambda: step_results.start(env, self.task, most_bytes))

    async def tool_schemas(self, *, again: bool = False) -> ToolSchemas:
        """The tools of the role that acts next, as the environment returned them last; with `again`, at each fresh
        start of a conversation, it is called anew."""
        # By role: in a chat of an agent with a customer only the agent has tools, and the customer's prompts must not
        # show them.
        env, acting_role = self.env, self.latest.role
        if acting_role not in self._schemas or again:
            self._schemas[acting_role] = await self.calls("tool_schemas", lambda: _call(env.tool_schemas))
        return self._schemas[acting_role]

    def shown(self, schemas: ToolSchemas) -> ShownTools:
        """Tools, and the format in which the policy calls them."""
        return ShownTools(tuple(schemas), getattr(self.env, "tool_format", None) or self.env.template_format)

    def charge(self, turn: Turn) -> None:
        """Report the turn's sampled tokens, which `EpisodeLimits.tokens` bounds."""
        self.env.charge_tokens(len(turn.token_ids))

    async def step(self, turn: Turn) -> Step:
        """The answer to the action that `turn` is. Raises TimeUp, PolicyFault."""
        env, settings = self.env, self._context.settings
        self.charge(turn)
        env.action_cut = turn.finish == "length"
        if self._keyed is not None:
            self._keyed.action_id = turn.id
        # Not below 0: a replay may have used more of the episode's time than there was at first. The call then ends at
        # its first checkpoint with the policy's time up, and not with an error of ours about a negative deadline.
        remaining_s = max(min(settings.step_deadline_s, settings.episode_deadline_s - self.calls.seconds), 0.0)
        act_call = partial(step_results.act, env, turn.text, self.task, settings.observation_bytes, turn.index)
        env_answer: Step = await self.calls("step", act_call, policy_s=remaining_s)
        self.latest = env_answer
        return env_answer

    async def end(self, reason: StopReason) -> tuple[Step, str]:
        """The environment's verdict on an episode that ends at a limit of the run: it may judge the work so far. If
        that work cannot be judged, or not in time, the outcome is 0, and the second value is the reason."""
        env, deadline_s = self.env, self._context.settings.step_deadline_s
        try:
            return await self.calls("end", lambda: step_results.end(env, reason, self.task), policy_s=deadline_s), ""
        except (TimeUp, PolicyFault) as error:
            # Scored as 0 and not left out: the work of the policy is what could not be judged in time, for example
            # tests that its code makes hang. To leave it out would reward hanging the grader (law 3).
            return Step(observation=(), outcome=0.0, success=False), one_line(error)


async def _call(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
