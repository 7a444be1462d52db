"""Evaluation of a model that somebody else serves: episodes over any OpenAI-compatible chat endpoint, no tokens needed.

Owns the conversation (the environment's messages to the API's, its tool calls to the environment's text) and the
results file, one line per episode: an episode in it is not played again. If the endpoint or the environment's host
fails, the episode is tried again, then counted as failed; it is never a score of the model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar, cast

import trio

from agentrl import clock
from agentrl.clock import Whose
from agentrl.config import RunConfig
from agentrl.engine.scoring import ScoringClient
from agentrl.env import answers, as_async
from agentrl.env.dialects import get_format
from agentrl.env.tool_calls import ToolCall
from agentrl.errors import EnvError, InfrastructureError, PolicyFault, RunFailed, UsageError, boundary
from agentrl.protocols import AsyncEnv
from agentrl.records import Json, Message, Messages, Step, StopReason, Task
from agentrl.registration import make
from agentrl.runtime.evaluation import EvalResult, tasks_of
from agentrl.sandbox import sharing
from agentrl.settings import HeldOut

T = TypeVar("T")

RESULTS = "results.jsonl"
_TURN_S = 300.0  # deadline of one answer unless rollout.turn_deadline_s is set: reasoning models take minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A served model, and how to ask it. `attempts` is the most attempts at one episode."""

    client: ScoringClient
    concurrency: int = 16
    attempts: int = 3
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])


def evaluate(
    config: RunConfig, endpoint: Endpoint, n: int, out: Path, *, on_result: Callable[[Mapping[str, Json]], None]
) -> EvalResult:
    """Play the first `n` held-out tasks of `config.env`, except those already in `out`. Returns the means over all.

    Raises UsageError if `out` holds the results of another evaluation, RunFailed if no episode could be played."""
    tasks = tasks_of(config, HeldOut(name="tasks", n=n), n)
    of = {"model": config.model, "env": config.env.id, "kwargs": config.env.kwargs, "options": config.env.options}
    file = _ResultsFile(out, json.loads(json.dumps(of)))
    done = file.read()
    left = [task for task in tasks if task.seed not in done]
    failures: list[str] = []

    def keep(row: Mapping[str, Json]) -> None:
        file.add(row)
        on_result(row)
        if "error" in row:
            failures.append(str(row["error"]))

    trio.run(_play_all, config, endpoint, left, keep)
    rows = [row for seed, row in file.read().items() if seed in {task.seed for task in tasks}]
    if not rows:
        raise RunFailed(f"no episode could be played ({failures[0]}); the same command tries all again")
    return _means(rows, failed=n - len(rows))


def line(row: Mapping[str, Json]) -> str:
    """One readable line about an episode."""
    if "error" in row:
        return f"seed {row['seed']}: failed, {row['error']}"
    return f"seed {row['seed']}: outcome {row['outcome']:g} in {row['turns']} turns ({row['stop_reason']})"


class _ResultsFile:
    """A first line about the evaluation, then one line per episode. A line that a crash cut off is ignored."""

    def __init__(self, folder: Path, of: Mapping[str, Json]) -> None:
        self._path, self._of = folder / RESULTS, dict(of)

    def read(self) -> dict[int, dict[str, Json]]:
        """The finished episodes by seed; failed ones are left out, to be played again."""
        rows = list(self._rows())
        if not rows:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"of": self._of}) + "\n", encoding="utf-8")
            return {}
        if rows[0].get("of") != self._of:
            raise UsageError(f"{self._path} holds an evaluation of {rows[0].get('of')}: give another --out")
        return {row["seed"]: row for row in rows[1:] if "error" not in row}

    def add(self, row: Mapping[str, Json]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _rows(self) -> Iterator[dict[str, Json]]:
        if not self._path.is_file():
            return
        data = self._path.read_bytes()
        if not data.endswith(b"\n"):
            data = data[: data.rfind(b"\n") + 1]
            self._path.write_bytes(data)
        for line in data.splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                raise UsageError(f"{self._path} is no results file of agentrl eval: give another --out") from None


async def _play_all(
    config: RunConfig, endpoint: Endpoint, tasks: list[Task], keep: Callable[[Mapping[str, Json]], object]
) -> None:
    sharing.configure(config.sandbox.arguments())
    places = trio.CapacityLimiter(endpoint.concurrency)

    async def one(task: Task) -> None:
        async with places:
            keep(await _attempts(config, endpoint, task))

    async with trio.open_nursery() as nursery:
        for task in tasks:
            nursery.start_soon(one, task)


async def _attempts(config: RunConfig, endpoint: Endpoint, task: Task) -> Mapping[str, Json]:
    """One line of the results. After a failure of infrastructure the episode is played again from its beginning."""
    failure = ""
    for _ in range(endpoint.attempts):
        try:
            return await _Episode(config, endpoint, task).play()
        except InfrastructureError as error:
            failure = " ".join(str(error).split())
    return {"seed": task.seed, "error": failure}


class _TimeUp(Exception):
    """An action of the model took longer than allowed."""


class _Episode:
    """One episode: `_said` is the conversation in the API's form."""

    def __init__(self, config: RunConfig, endpoint: Endpoint, task: Task) -> None:
        self._config, self._endpoint, self._task = config, endpoint, task
        self._said: list[Message] = []
        self._asked_ids: list[str] = []
        self._turns, self._total = 0, 0.0

    async def play(self) -> Mapping[str, Json]:
        """Raises InfrastructureError."""
        started, task = time.time(), self._task
        with boundary(EnvError, f"{task.env} raised", place=True):
            env: AsyncEnv = as_async(make(task.env, **task.kwargs))
            try:
                reason, last = await self._run(env)
            finally:
                with trio.move_on_after(self._config.rollout.step_deadline_s, shield=True):
                    await env.aclose()
        return {
            "seed": task.seed,
            "outcome": last.outcome or 0.0,
            "success": bool(last.success),
            "reward": self._total,
            "turns": self._turns,
            "stop_reason": reason.value,
            "seconds": round(time.time() - started, 3),
            "messages": cast("Json", self._said),
        }

    async def _run(self, env: AsyncEnv) -> tuple[StopReason, Step]:
        task, settings = self._task, self._config.rollout
        turn_s = settings.turn_deadline_s if "turn_deadline_s" in settings.model_fields_set else _TURN_S
        seen = await self._in_time("reset", answers.start(env, task))
        tools: dict[str, Json] = {"tools": schemas} if (schemas := list(env.tool_schemas())) else {}
        options = {**self._endpoint.options, **tools}
        while True:
            self._hear(seen.observation)
            if settings.max_turns is not None and self._turns >= settings.max_turns:
                ended = await self._in_time("end", answers.end(env, StopReason.TURN_LIMIT, task))
                return StopReason.TURN_LIMIT, answers.joined(seen, ended)
            answer = await self._endpoint.client.message(self._said, deadline_s=turn_s, **options)
            self._turns += 1
            action = self._say(answer, str(getattr(env, "tool_format", "hermes")))
            try:
                step = await self._in_time("step", answers.act(env, action, task))
            except PolicyFault:
                return StopReason.POLICY_FAULT, seen
            except _TimeUp:
                return StopReason.TIME_LIMIT, seen
            seen = step
            self._total += step.reward
            if step.terminated or step.truncated:
                self._hear(step.observation)
                return StopReason.DONE if step.terminated else StopReason.TRUNCATED, step

    async def _in_time(self, what: str, answer: Awaitable[T]) -> T:
        """Raises EnvError past the deadline of the environment's own code, _TimeUp past the deadline of the action that
        the model asked for."""
        deadline_s = self._config.rollout.step_deadline_s
        with clock.watch(own_s=deadline_s, policy_s=deadline_s) as watch:
            return await answer
        if watch.over is Whose.POLICY:
            raise _TimeUp
        raise EnvError(f"{self._task.env}: {what} took over {deadline_s:g} s")

    def _hear(self, messages: Messages) -> None:
        """Add the environment's messages; answers to calls get the ids of the calls, in their order."""
        for message in messages:
            heard = Message(role=message["role"], content=message["content"])
            if message["role"] == "tool":
                if not self._asked_ids:  # the model wrote the call as text: the API has no call
                    heard["role"] = "user"
                else:
                    heard["tool_call_id"] = self._asked_ids.pop(0)
            self._said.append(heard)

    def _say(self, answer: Mapping[str, Json], dialect: str) -> str:
        """Add the model's answer to the conversation; returns it as a policy's text for the environment."""
        content, calls = str(answer.get("content") or ""), list(answer.get("tool_calls") or [])
        said = Message(role="assistant", content=content)
        self._asked_ids = []
        written = [_written(call, dialect) for call in calls]
        if calls and all(written):
            said["tool_calls"] = calls
            self._asked_ids = [str(call.get("id") or "") for call in calls]
        self._said.append(said)
        return content + "".join(text or json.dumps(call) for text, call in zip(written, calls, strict=True))


def _written(call: Any, dialect: str) -> str | None:
    """A call of the API in one of our dialects; None if its arguments are not a JSON object."""
    try:
        function = call["function"]
        arguments = json.loads(function["arguments"] or "{}")
        if not isinstance(arguments, dict):
            return None
        return get_format(dialect).write(ToolCall(str(function["name"]), cast("dict[str, Json]", arguments)))
    except (KeyError, TypeError, ValueError):
        return None


def _means(rows: list[dict[str, Json]], *, failed: int) -> EvalResult:
    return EvalResult(
        name="tasks",
        success=fmean(float(row["success"]) for row in rows),
        outcome=fmean(row["outcome"] for row in rows),
        turns=fmean(row["turns"] for row in rows),
        tokens=0.0,
        n=len(rows),
        failed=failed,
    )
