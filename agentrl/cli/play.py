"""A person plays the policy: prints the model's input and takes typed text as the model's output."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio

from agentrl.config import Rollout
from agentrl.env import as_async
from agentrl.env.gymnasium_wrappers import shown
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import format_of, get_format
from agentrl.errors import EnvError, Tracebacks, boundary
from agentrl.protocols import AsyncEnv
from agentrl.records import NO_TOOLS, Json, Message, Messages, ShownTools, Step, StopReason, Task
from agentrl.registration import make
from agentrl.rollout.memory_store import MemoryStore
from agentrl.rollout.text_policy import TextAnswer, TextPolicy, Tools, cause_of, play_text

_LIMITS = Rollout(max_context=1 << 30)  # messages, of which a person reads any number
_HELP = "a line is your action; `/TOOL key=value …` calls a tool; `/quit` ends"


def play(
    env_id: str, *, seed: int, kwargs: Mapping[str, Any], read: Callable[[str], str], write: Callable[[str], None]
) -> bool:
    """Play one episode. Returns whether it ended in success. Raises UsageError, InfrastructureError."""
    return trio.run(_play, env_id, seed, dict(kwargs), read, write)


async def _play(
    env_id: str, seed: int, kwargs: dict[str, Any], read: Callable[[str], str], write: Callable[[str], None]
) -> bool:
    with boundary(EnvError, f"{env_id} raised", place=True):
        environment: AsyncEnv = as_async(make(env_id, **kwargs))
        human_player = _Person(environment, read, write)
    played_task = Task(index=0, env=env_id, seed=seed, kwargs=kwargs)
    text_policy = TextPolicy(human_player.answer, tool_format=environment.template_format)
    try:
        trajectory, episode_ending = await play_text(
            environment,
            played_task,
            text_policy,
            _LIMITS,
            store=_Shown(environment, write),
            tracebacks=Tracebacks(quiet=True),
        )
    except _Left:
        return False
    if episode_ending.error is not None:
        raise cause_of(episode_ending.error)
    if episode_ending.stop_reason is StopReason.POLICY_FAULT:
        write(f"episode over: {episode_ending.stop_reason.value} ({episode_ending.detail.partition(': ')[2]})")
        return False
    last_step = trajectory.turns[-1].step
    assert last_step is not None
    human_player.show(last_step.observation)
    reward_sum = sum(played_turn.reward for played_turn in trajectory.turns)
    write(f"episode over: outcome {last_step.outcome}, success {last_step.success}, step rewards {reward_sum:+.2f}")
    return bool(last_step.success)


class _Left(Exception):
    """The person ends the episode."""


class _Person:
    """Shows the person what is new, and asks for each action."""

    def __init__(self, env: AsyncEnv, read: Callable[[str], str], write: Callable[[str], None]) -> None:
        self._read, self._write, self._format = read, write, format_of(env).name

    def show(self, messages: Sequence[Message]) -> None:
        for new_message in messages:
            self._write(shown(new_message))

    async def answer(self, messages: object, news: Sequence[Message], tools: Tools) -> TextAnswer:
        """A typed action. Raises _Left."""
        while True:
            self.show(news)
            try:
                typed_line = self._read("> ")
            except EOFError:
                raise _Left from None
            if typed_line.strip() == "/quit":
                raise _Left
            try:
                return TextAnswer(action_of(typed_line, self._format, tools))
            except ValueError as error:
                self._write(f"({error})")


class _Shown(MemoryStore):
    """The journal of an episode that a person reads while it is written."""

    def __init__(self, env: AsyncEnv, write: Callable[[str], None]) -> None:
        super().__init__()
        self._env, self._write = env, write

    async def begin(self, episode_id: int, fence: int, start: Messages, tools: ShownTools = NO_TOOLS) -> None:
        await super().begin(episode_id, fence, start, tools)
        self._write(f"({_HELP})")
        for tool_schema in self._env.tool_schemas():
            self._write(f"tool {_signature(tool_schema)}")

    async def journal_step(self, episode_id: int, fence: int, turn_index: int, step: Step) -> None:
        await super().journal_step(episode_id, fence, turn_index, step)
        if step.reward:
            self._write(f"(reward {step.reward:+.2f})")


def action_of(line: str, tool_format: str = "hermes", tools: Tools = ()) -> str:
    """A typed line as an action: `/tool key=value` becomes a tool call of that format, `\\n` in text a new line.

    Raises ValueError for a call that is not of that form."""
    if not line.startswith("/"):
        return line.replace("\\n", "\n")
    tool_name, *argument_words = shlex.split(line[1:]) or [""]
    if not tool_name:
        raise ValueError("name a tool: /TOOL key=value")
    arguments: dict[str, Json] = {}
    for argument_word in argument_words:
        argument_name, equals_sign, value_text = argument_word.partition("=")
        if not equals_sign:
            raise ValueError(f"{argument_word!r} is not key=value")
        try:
            arguments[argument_name] = json.loads(value_text)
        except json.JSONDecodeError:
            # What is no JSON is a text, so that a person need not quote words within words.
            arguments[argument_name] = value_text
    call_format = get_format(tool_format)
    return call_format.write(call_format.spelled(ToolCall(tool_name, arguments), tools))


def _signature(schema: Mapping[str, Json]) -> str:
    function = schema.get("function", schema)
    parameters = function.get("parameters", {}).get("properties", {})
    arguments = " ".join(f"{argument_name}=…" for argument_name in parameters)
    return f"/{function['name']} {arguments}: {function.get('description', '')}"
