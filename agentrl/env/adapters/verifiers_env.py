"""verifiers (v1), both ways: its environments as ours, and ours as a taskset and environment of its kind.

Its environments run as they are, with their harness, runtime and rewards; their model is our policy, which they reach
over HTTP like any other. They need `uv` on the PATH, with which verifiers sets its harness programs up.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, cast

from agentrl.env.agent_programs import ProgramEnv, Session
from agentrl.env.asyncio_code import in_asyncio
from agentrl.env.core import as_messages
from agentrl.env.optional_imports import require
from agentrl.env.tool_env import Grade
from agentrl.env.tools.parsers import get_format
from agentrl.env.tools.tools import function_schema
from agentrl.errors import EnvError, UsageError
from agentrl.records import Json, Message, Messages

_OF_THE_HOST: Final = ("SandboxError", "ToolsetError", "InterceptionError", "TunnelError")
_COUNTED: dict[tuple[str, str, str, int], int] = {}  # tasks of a set, counted up to the requested ones


class Verifiers(ProgramEnv):
    """`agentrl/Verifiers-v0`. An environment of verifiers (v1), unchanged. `taskset` is the id of an installed
    taskset, `env` that of an environment to pair it with (default: the taskset's own, else the single-agent one).

    Task `index` of the options is played, else one drawn below `tasks`. `harness` and `runtime` are those of every
    agent that the environment declares; `config` overrides any part of verifiers' own configuration. All agents are
    the policy: where several speak, their conversations are forks of one episode. The outcome is the sum of rewards
    of the first agent's trace."""

    def __init__(
        self,
        taskset: str,
        *,
        env: str = "",
        tasks: int = 100,
        harness: str = "null",
        runtime: str = "subprocess",
        config: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        self._vf = require("verifiers.v1", what="Verifiers", package="verifiers")
        self._loaders = require("verifiers.v1.utils.loaders", what="Verifiers", package="verifiers")
        try:
            self._config = self._resolved(taskset, env, harness, runtime, config or {})
        except (ModuleNotFoundError, AttributeError, TypeError, ValueError) as config_error:
            raise UsageError(
                f"verifiers makes no environment of {taskset!r}: {config_error}{_hint(taskset)}"
            ) from config_error
        if tasks < 1:
            raise UsageError(f"tasks = {tasks}: give 1 or more")
        count_key = (taskset, env, repr(config), tasks)
        if count_key not in _COUNTED:  # once a process, for a set may take long to load; in a thread, for it may block
            with ThreadPoolExecutor(1) as one_thread:
                _COUNTED[count_key] = one_thread.submit(self._count, tasks).result()
        if _COUNTED[count_key] < tasks:
            raise UsageError(
                f"tasks = {tasks}: the taskset {taskset!r} has {_COUNTED[count_key]}: give as many or fewer"
            )
        self._tasks = tasks
        super().__init__(self._play, **settings)

    def make_task(self, options: Mapping[str, Json]) -> Mapping[str, Json]:
        random_index = int(self.np_random.integers(self._tasks))
        return {"index": int(options.get("index", random_index))}

    def grade(self, task: Mapping[str, Json], result: Any) -> Grade:
        rewards_by_name = {
            reward_name: named_reward.value
            for reward_name, named_reward in result.rewards.items()
            if named_reward is not None
        }
        total_reward = float(result.reward)
        return Grade(outcome=total_reward, success=total_reward >= 1.0, info={"rewards_by_name": rewards_by_name})

    def _resolved(self, taskset: str, env: str, harness: str, runtime: str, more: Mapping[str, Any]) -> Any:
        agent_config = require("verifiers.v1.configs.agent", what="Verifiers", package="verifiers").AgentConfig
        config_fields = self._loaders.env_config_type(taskset, env).model_fields
        role_names = [
            field_name
            for field_name, field_info in config_fields.items()
            if isinstance(field_info.default, agent_config)
        ]
        role_settings = {
            role_name: {"harness": {"id": harness}, "runtime": {"type": runtime}} for role_name in role_names
        }
        settings = {"id": env, "taskset": {"id": taskset}, "interception": {"type": "server"}, **role_settings}
        return self._loaders.resolve_env_config(_merged(settings, more))

    def _count(self, at_most: int) -> int:
        counted_set = self._loaders.load_environment(self._config).taskset
        return sum(1 for _ in itertools.islice(counted_set, at_most))

    async def _play(self, session: Session) -> Any:
        return await in_asyncio(self._episode, session)

    async def _episode(self, session: Session) -> Any:
        verifiers = self._vf
        verifiers_env = await asyncio.to_thread(self._loaders.load_environment, self._config)
        task_index = int(session.task["index"])
        chosen_task = await asyncio.to_thread(_task_at, verifiers_env.taskset, task_index)
        client_config = verifiers.EvalClientConfig(base_url=f"{session.base_url}/v1", api_key_var="AGENTRL_NO_KEY")
        async with verifiers_env.serving():
            model_context = verifiers.ModelContext(
                model=session.model, client=client_config, sampling=verifiers.SamplingConfig()
            )
            episode = await verifiers_env.run_episode(chosen_task, model_context)
        episode_errors = [
            *episode.errors,
            *(episode_error for trace in episode.traces for episode_error in trace.errors),
        ]
        # The host's first, wherever they stand in the list: a harness that lost its box often fails in other ways too,
        # and by the first one alone the policy would be scored for it (law 3).
        for episode_error in episode_errors:
            if episode_error.type in _OF_THE_HOST:
                raise EnvError(f"verifiers: {episode_error.type}: {episode_error.message}")
        if episode_errors:  # of a reward, a hook or a harness that read what the policy wrote
            raise RuntimeError(f"verifiers: {episode_errors[0].type}: {episode_errors[0].message}")
        if not episode.traces:
            raise EnvError("verifiers: no trace")
        return episode.traces[0]


def export(make: Callable[[], Any], *, size: int = 1_000_000) -> tuple[type, type]:
    """A verifiers `Taskset` and `Env` class for an environment of ours: seeds 0, 1, … are its tasks.

    A module that names both in its `__all__` is a plugin of verifiers::

        Tasks, Game = export(lambda: agentrl.make("agentrl/Calculator-v0"))
        __all__ = ["Game", "Tasks"]

    The agent `player` writes what our policy writes, tool calls included, as text."""
    vf = require("verifiers.v1", what="exporting to verifiers", package="verifiers")

    class SeedData(vf.TaskData):
        seed: int

    class SeedTask(vf.Task[SeedData, vf.State, vf.TaskConfig]):
        pass

    class Tasks(vf.Taskset[SeedTask, vf.TasksetConfig]):
        def load(self) -> Any:
            for seed in range(size):
                own_env = make()
                opening, _ = own_env.reset(seed=seed)
                messages = _with_tool_instructions(own_env, as_messages(opening))
                own_env.close()
                prompt_messages = [{"role": message["role"], "content": message["content"]} for message in messages]
                yield SeedTask(SeedData(name=f"seed {seed}", prompt=prompt_messages, seed=seed), self.config.task)

    class GameConfig(vf.EnvConfig):
        player: vf.AgentConfig = vf.AgentConfig()  # pyright: ignore[reportInvalidTypeForm, reportUnknownMemberType]

    class Game(vf.Env[GameConfig]):
        async def run(self, task: Any, agents: Any) -> None:
            own_env, total_reward, step_info = make(), 0.0, dict[str, Json]()
            try:
                await asyncio.to_thread(own_env.reset, seed=task.data.seed)
                async with agents.player.interaction(task) as interaction:
                    segment = await interaction.turn()
                    while not segment.terminated:
                        step_result = await asyncio.to_thread(own_env.step, segment.last_reply)
                        observation, reward, terminated, truncated, step_info = step_result
                        total_reward += float(reward)
                        if terminated or truncated:
                            break
                        segment = await interaction.turn(
                            "\n".join(message["content"] for message in as_messages(observation))
                        )
            finally:
                await asyncio.to_thread(own_env.close)
            interaction.trace.record_reward("outcome", float(step_info.get("outcome", 0.0)), 1.0)
            interaction.trace.record_reward("process", total_reward, 1.0)

    return Tasks, Game


def _with_tool_instructions(env: Any, messages: Messages) -> Messages:
    """The opening with the tools in its system message: verifiers' chat template gets no tools of ours, and its policy
    writes calls as text."""
    function_schemas = [function_schema(tool_schema) for tool_schema in env.unwrapped.tool_schemas()]
    if not function_schemas:
        return messages
    instructions = get_format(env.unwrapped.tool_format or env.unwrapped.template_format).instructions(function_schemas)
    if messages and messages[0]["role"] == "system":
        system_message = cast("Message", {**messages[0], "content": f"{messages[0]['content']}\n\n{instructions}"})
        return (system_message, *messages[1:])
    return (Message(role="system", content=instructions), *messages)


def _hint(taskset: str) -> str:
    """A hint for a module that is an environment of verifiers' old kind; empty for any other."""
    try:
        is_old_kind = callable(getattr(importlib.import_module(taskset.replace("-", "_")), "load_environment", None))
    except Exception:  # its author's own code ran
        is_old_kind = False
    correction = "make it a taskset of v1, or run its program through agentrl/Program-v0"
    return (
        f" (it has a load_environment, as verifiers v0 had: v1 has no such environments; {correction})"
        if is_old_kind
        else ""
    )


def _task_at(taskset: Any, index: int) -> Any:
    for task in itertools.islice(taskset, index, index + 1):
        return task
    raise EnvError(f"the taskset has no task {index}")


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """`more` laid over `base`, nested objects key by key."""
    merged_settings = dict(base)
    for setting_name, setting_value in more.items():
        base_value = merged_settings.get(setting_name)
        are_both_nested = isinstance(base_value, Mapping) and isinstance(setting_value, Mapping)
        merged_settings[setting_name] = (
            _merged(cast("Mapping[str, Any]", base_value), cast("Mapping[str, Any]", setting_value))
            if are_both_nested
            else setting_value
        )
    return merged_settings
