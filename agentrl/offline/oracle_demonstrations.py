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
    part = out.with_name(f"{out.name}.part")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:

            def keep(line: Mapping[str, Any]) -> None:
                file.write(json.dumps(line) + "\n")

            written = trio.run(_play_all, _Request(env, n, mistakes, seed, dict(kwargs or {})), keep, progress)
        part.replace(out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)
    return written


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
    written, seed, in_a_row = Written(), request.seed, 0
    while written.demonstrations < request.n:
        # In batches with a wait at the end of each, not with a pool that is always full: the lines must be in the
        # order of their seeds, and which seeds are played must not depend on which were quick.
        seeds = range(seed, seed + min(_AT_ONCE, request.n - written.demonstrations))
        lines: dict[int, dict[str, Any] | str] = {}
        failures: dict[int, Exception] = {}

        async def play(task_seed: int, results: dict[int, Any], failures: dict[int, Exception]) -> None:
            try:
                results[task_seed] = await _demonstration(request, task_seed)
            except Exception as error:  # raised below, outside the nursery, which would wrap it in a group
                failures[task_seed] = error

        async with trio.open_nursery() as nursery:
            for each_seed in seeds:
                nursery.start_soon(play, each_seed, lines, failures)
        # The lowest seed's failure, so that the same command reports the same one however the tasks raced.
        if failures:
            raise failures[min(failures)]
        for each_seed in seeds:
            line = lines[each_seed]
            if isinstance(line, str):
                written.left_out, in_a_row = written.left_out + 1, in_a_row + 1
                if in_a_row == _IN_A_ROW:
                    raise UsageError(f"{request.env}, seeds {each_seed - _IN_A_ROW + 1} to {each_seed}: {line}")
                continue
            in_a_row = 0
            keep(line)
            written.demonstrations += 1
            written.mistaken += line["outcome"] < 1.0
        seed = seeds.stop
        progress(written.demonstrations)
    return written


async def _demonstration(request: _Request, seed: int) -> dict[str, Any] | str:
    """The line of one task; or why it has none."""
    # A generator for each task, from the seed and its number alone: one for all would hand its numbers out in the
    # order in which tasks happen to run.
    rng = random.Random(f"{request.seed}/{seed}")
    errs = rng.random() < request.mistakes
    tried: set[int] = set()
    while True:
        with boundary(EnvError, f"{request.env} raised", place=True):
            # A fresh environment at each try. One that has played an episode may keep state that the next oracle
            # would meet.
            env = as_async(make(request.env, **request.kwargs))
        actor = _Actor(request.env, env, errs, rng, tried)
        policy = TextPolicy(actor.answer, tool_format=env.template_format)
        task = Task(index=seed, env=request.env, seed=seed, kwargs=request.kwargs)
        try:
            trajectory, ending = await play_text(env, task, policy, _LIMITS, tracebacks=Tracebacks(quiet=True))
        except _NoOracle as none:
            return str(none)
        if ending.error is not None:
            raise cause_of(ending.error)
        oracle = actor.oracle
        if oracle is None:
            raise UsageError(f"{request.env}, seed {seed}: the episode is over before an oracle acts")
        # Refused, not left out: an oracle that gets another outcome than it declares means that the environment or
        # its reward is wrong, and whatever is trained on it learns that.
        if trajectory.outcome != oracle.outcome:
            problem = f"{oracle.name!r} gets {trajectory.outcome:g} and must get {oracle.outcome:g}"
            raise UsageError(f"{request.env}, seed {seed}: {problem}: see agentrl validate {request.env}")
        if any(
            turn.role != POLICY or turn.parent != (turn.index - 1 if turn.index else None) for turn in trajectory.turns
        ):
            return "its episodes have several roles or rewrite their history: they are no single conversation"
        # An oracle that was silent in a turn is tried no more (`tried`), and the loop plays another one: a template
        # writes an empty message as an end of the turn, which would teach the model to say nothing.
        if all(turn.text.strip() for turn in trajectory.turns):
            messages = _with_ids(policy.conversation(trajectory))
            last = max(place for place, message in enumerate(messages) if message["role"] == "assistant")
            tools = {"tools": list(actor.tools)} if actor.tools else {}
            about = {"env": request.env, "seed": seed, "oracle": oracle.name, "outcome": oracle.outcome}
            return {"messages": messages[: last + 1], **tools, **about}


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
            text: str = await sync_async.call(self.oracle.policy, tuple(news), blocking=False)
        return TextAnswer(text, self._as_message(text))

    def _chosen(self) -> Oracle:
        oracles = list(self.env.oracles()) if isinstance(self.env, HasOracles) else []
        if not oracles:
            hint = "write a method oracles() as agentrl.env.checks.oracles describes it"
            raise UsageError(f"{self.env_id} offers no oracles: {hint}")
        fits = [
            number
            for number, oracle in enumerate(oracles)
            if (oracle.outcome < 1.0) == self.errs and not oracle.cheats and number not in self.tried
        ]
        if not fits:
            raise _NoOracle("no oracle errs in words: leave out --mistakes" if self.errs else "no oracle gets 1")
        number = self.rng.choice(fits)
        self.tried.add(number)
        return oracles[number]

    def _as_message(self, text: str) -> Message:
        """The turn as any chat template takes it: calls as calls, if the environment has tools and all are whole."""
        parsed = format_of(self.env).parse(text, self.tools)
        calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
        # A policy that errs may write a broken call on purpose. It stays the text that it is.
        if not (self.tools and calls) or len(calls) < len(parsed.calls):
            return Message(role="assistant", content=text)
        written: list[dict[str, Json]] = []
        for call in calls:
            function: dict[str, Json] = {"name": call.name, "arguments": dict(call.arguments)}
            written.append({"id": f"call{self._calls:05d}", "type": "function", "function": function})
            self._calls += 1
        return Message(role="assistant", content=parsed.text.strip(), tool_calls=written)


def _with_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages; answers to calls have the ids of the calls, in their order."""
    with_ids, call_ids = list[Message](), list[Json]()
    for message in messages:
        if message["role"] == "assistant":
            call_ids = [call["id"] for call in message.get("tool_calls", [])]
        elif message["role"] == "tool" and call_ids:
            message = cast("Message", {**message, "tool_call_id": call_ids.pop(0)})
        with_ids.append(message)
    return with_ids
