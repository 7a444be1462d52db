"""Demonstrations of an environment's oracles, for `agentrl sft`: its gold policies, and for a share of the tasks an
oracle that errs, so that the model learns how to act and reinforcement still finds something to improve. None of them
cheats.

The same environment, seeds and share give the same file. Calls stand in it as calls, so that any model's chat template
writes them in its own dialect. Owns the choice of oracles and the lines; `agentrl.offline.demonstrations` reads them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import trio

from agentrl.config import Rollout
from agentrl.env import as_async, sync_async
from agentrl.env.checks.oracles import TURNS, HasOracles, Oracle
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import format_of
from agentrl.errors import ConfigError, EnvError, Tracebacks, UsageError, boundary
from agentrl.protocols import AsyncEnv
from agentrl.records import POLICY, Json, Message, Task
from agentrl.registration import make
from agentrl.rollout.text_policy import TextAnswer, TextPolicy, cause_of, play_text

# Enough that sandboxes overlap their waits, and few enough that a laptop runs them.
_AT_ONCE: Final = 8  # episodes
# An environment may have no oracle for some of its tasks; one that has none for 64 in a row most likely has none at
# all, and the search through its seeds would not end.
_IN_A_ROW: Final = 64  # tasks without a demonstration, after which the search ends
# An oracle's turns have no tokens, so a context of any length fits; the bound on turns catches a policy in a loop.
_LIMITS: Final = Rollout(max_context=1 << 30, max_turns=TURNS)


@dataclass(slots=True)
class Written:
    """Demonstrations in the file, those of them whose oracle errs, and tasks that were left out: no oracle could be
    shown."""

    demonstrations: int = 0
    mistaken: int = 0
    left_out: int = 0


def write(
    env: str,
    n: int,
    out: Path,
    *,
    mistakes: float = 0.0,
    seed: int = 0,
    kwargs: Mapping[str, Json] | None = None,
    overwrite: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Written:
    """Write `n` demonstrations of the tasks from `seed` on, one for each task; in about the share `mistakes` of them an
    oracle acts that does not get 1. `progress` gets their number so far. The file appears when it is whole.

    Raises UsageError if the environment has no oracles that could be shown, or one gets another outcome than it must;
    InfrastructureError if the environment fails; ConfigError for an argument that cannot be."""
    if not 0 <= mistakes <= 1:
        raise ConfigError("mistakes", mistakes, "give a share from 0 to 1")
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists: give another --out, or --overwrite")
    part_path = out.with_name(f"{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with part_path.open("w", encoding="utf-8") as part_file:

            def keep(line: Mapping[str, Any]) -> None:
                part_file.write(json.dumps(line) + "\n")

            written_counts = trio.run(_play_all, _Request(env, n, mistakes, seed, dict(kwargs or {})), keep, progress)
        part_path.replace(out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from error
    finally:
        part_path.unlink(missing_ok=True)
    return written_counts


@dataclass(frozen=True, slots=True)
class _Request:
    env: str
    n: int
    mistakes: float
    seed: int
    kwargs: dict[str, Json]


async def _play_all(
    request: _Request, keep: Callable[[Mapping[str, Any]], None], progress: Callable[[int], None]
) -> Written:
    """One seed after the other, some at the same time; their lines are in the order of the seeds."""
    written_counts, first_seed, in_a_row = Written(), request.seed, 0
    while written_counts.demonstrations < request.n:
        # In batches with a wait at the end of each, not with a pool that is always full: the lines must be in the
        # order of their seeds, and which seeds are played must not depend on which were quick.
        batch_seeds = range(first_seed, first_seed + min(_AT_ONCE, request.n - written_counts.demonstrations))
        line_by_seed: dict[int, dict[str, Any] | str] = {}
        failures: dict[int, Exception] = {}

        async def play(task_seed: int, results: dict[int, Any], failures: dict[int, Exception]) -> None:
            try:
                results[task_seed] = await _demonstration(request, task_seed)
            except Exception as error:  # raised below, outside the nursery, which would wrap it in a group
                failures[task_seed] = error

        async with trio.open_nursery() as nursery:
            for each_seed in batch_seeds:
                nursery.start_soon(play, each_seed, line_by_seed, failures)
        # The lowest seed's failure, so that the same command reports the same one however the tasks raced.
        if failures:
            raise failures[min(failures)]
        for each_seed in batch_seeds:
            seed_line = line_by_seed[each_seed]
            if isinstance(seed_line, str):
                written_counts.left_out, in_a_row = written_counts.left_out + 1, in_a_row + 1
                if in_a_row == _IN_A_ROW:
                    raise UsageError(f"{request.env}, seeds {each_seed - _IN_A_ROW + 1} to {each_seed}: {seed_line}")
                continue
            in_a_row = 0
            keep(seed_line)
            written_counts.demonstrations += 1
            written_counts.mistaken += seed_line["outcome"] < 1.0
        first_seed = batch_seeds.stop
        progress(written_counts.demonstrations)
    return written_counts


async def _demonstration(request: _Request, seed: int) -> dict[str, Any] | str:
    """The line of one task; or why it has none."""
    # A generator for each task, from the seed and its number alone: one for all would hand its numbers out in the
    # order in which tasks happen to run.
    task_random = random.Random(f"{request.seed}/{seed}")
    should_err = task_random.random() < request.mistakes
    tried_oracles: set[int] = set()
    while True:
        with boundary(EnvError, f"{request.env} raised", place=True):
            # A fresh environment at each try. One that has played an episode may keep state that the next oracle
            # would meet.
            environment = as_async(make(request.env, **request.kwargs))
        oracle_actor = _Actor(request.env, environment, should_err, task_random, tried_oracles)
        text_policy = TextPolicy(oracle_actor.answer, tool_format=environment.template_format)
        oracle_task = Task(index=seed, env=request.env, seed=seed, kwargs=request.kwargs)
        try:
            trajectory, episode_ending = await play_text(
                environment, oracle_task, text_policy, _LIMITS, tracebacks=Tracebacks(quiet=True)
            )
        except _NoOracle as none:
            return str(none)
        if episode_ending.error is not None:
            raise cause_of(episode_ending.error)
        acted_oracle = oracle_actor.oracle
        if acted_oracle is None:
            raise UsageError(f"{request.env}, seed {seed}: the episode is over before an oracle acts")
        # Refused, not left out: an oracle that gets another outcome than it declares means that the environment or
        # its reward is wrong, and whatever is trained on it learns that.
        if trajectory.outcome != acted_oracle.outcome:
            problem = f"{acted_oracle.name!r} gets {trajectory.outcome:g} and must get {acted_oracle.outcome:g}"
            raise UsageError(f"{request.env}, seed {seed}: {problem}: see agentrl validate {request.env}")
        if any(
            played_turn.role != POLICY or played_turn.parent != (played_turn.index - 1 if played_turn.index else None)
            for played_turn in trajectory.turns
        ):
            return "its episodes have several roles or rewrite their history: they are no single conversation"
        # An oracle that was silent in a turn is tried no more (`tried_oracles`), and the loop plays another one: a
        # template writes an empty message as an end of the turn, which would teach the model to say nothing.
        if all(played_turn.text.strip() for played_turn in trajectory.turns):
            messages = _with_ids(text_policy.conversation(trajectory))
            last_spoken = max(position for position, message in enumerate(messages) if message["role"] == "assistant")
            tool_field = {"tools": list(oracle_actor.tools)} if oracle_actor.tools else {}
            origin = {"env": request.env, "seed": seed, "oracle": acted_oracle.name, "outcome": acted_oracle.outcome}
            return {"messages": messages[: last_spoken + 1], **tool_field, **origin}


class _NoOracle(Exception):
    """The task has no oracle of the requested kind that could be shown."""


@dataclass(slots=True)
class _Actor:
    """Acts as one of the task's oracles: a gold one, or with `errs` one that does not get 1. `tried` has the places of
    those that wrote nothing in a turn: silence is no demonstration."""

    env_id: str
    env: AsyncEnv
    errs: bool
    rng: random.Random
    tried: set[int]
    oracle: Oracle | None = None
    tools: Sequence[Mapping[str, Json]] = ()
    _calls: int = 0

    async def answer(
        self, messages: object, news: Sequence[Message], tools: Sequence[Mapping[str, Json]]
    ) -> TextAnswer:
        if self.oracle is None:
            self.oracle, self.tools = self._chosen(), tools
        with boundary(EnvError, f"{self.env_id}: oracle {self.oracle.name!r} raised", place=True):
            # On this thread: an oracle computes its answer from the task and returns at once; a thread for each turn
            # would cost more than it does.
            oracle_text: str = await sync_async.call(self.oracle.policy, tuple(news), blocking=False)
        return TextAnswer(oracle_text, self._as_message(oracle_text))

    def _chosen(self) -> Oracle:
        oracles = list(self.env.oracles()) if isinstance(self.env, HasOracles) else []
        if not oracles:
            correction = "write a method oracles() as agentrl.env.checks.oracles describes it"
            raise UsageError(f"{self.env_id} offers no oracles: {correction}")
        fitting_numbers = [
            oracle_number
            for oracle_number, oracle in enumerate(oracles)
            if (oracle.outcome < 1.0) == self.errs and not oracle.cheats and oracle_number not in self.tried
        ]
        if not fitting_numbers:
            raise _NoOracle("no oracle errs in words: leave out --mistakes" if self.errs else "no oracle gets 1")
        oracle_number = self.rng.choice(fitting_numbers)
        self.tried.add(oracle_number)
        return oracles[oracle_number]

    def _as_message(self, text: str) -> Message:
        """The turn as any chat template takes it: calls as calls, if the environment has tools and all are whole."""
        parsed_text = format_of(self.env).parse(text, self.tools)
        tool_calls = [tool_call for tool_call in parsed_text.calls if isinstance(tool_call, ToolCall)]
        # A policy that errs may write a broken call on purpose. It stays the text that it is.
        if not (self.tools and tool_calls) or len(tool_calls) < len(parsed_text.calls):
            return Message(role="assistant", content=text)
        api_calls: list[dict[str, Json]] = []
        for tool_call in tool_calls:
            function: dict[str, Json] = {"name": tool_call.name, "arguments": dict(tool_call.arguments)}
            api_calls.append({"id": f"call{self._calls:05d}", "type": "function", "function": function})
            self._calls += 1
        return Message(role="assistant", content=parsed_text.text.strip(), tool_calls=api_calls)


def _with_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages; answers to calls have the ids of the calls, in their order."""
    with_ids, call_ids = list[Message](), list[Json]()
    for message in messages:
        if message["role"] == "assistant":
            call_ids = [tool_call["id"] for tool_call in message.get("tool_calls", [])]
        elif message["role"] == "tool" and call_ids:
            message = cast("Message", {**message, "tool_call_id": call_ids.pop(0)})
        with_ids.append(message)
    return with_ids
