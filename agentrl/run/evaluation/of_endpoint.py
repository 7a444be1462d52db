"""Evaluation of a model that somebody else serves: episodes over any OpenAI-compatible chat endpoint, no tokens needed.

Owns the results file, one line per episode: an episode in it is not played again. `agentrl.rollout.episode` plays it,
with the policy that `served_model` makes of the model. If the endpoint or the environment's host fails, the episode is
tried again, then counted as failed; it is never a score of the model.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import trio

from agentrl import config as configuration
from agentrl import notices
from agentrl.algos.pass_at_k import pass_at
from agentrl.config import Rollout, RunConfig
from agentrl.config.sections import HeldOut
from agentrl.engine.scoring_client import ScoringClient
from agentrl.env import as_async
from agentrl.env.chat_messages import plain_messages
from agentrl.errors import (
    ConfigError,
    EngineUnavailable,
    EnvError,
    InfrastructureError,
    RunFailed,
    Tracebacks,
    UsageError,
    boundary,
)
from agentrl.records import Json, Message, Task, Trajectory
from agentrl.registration import make
from agentrl.rollout.env_calls import one_line
from agentrl.rollout.text_policy import play_text
from agentrl.run.evaluation.held_out import EvalResult, tasks_of
from agentrl.run.evaluation.served_model import ServedModel, as_api
from agentrl.sandbox import shared_backend

RESULTS = "results.jsonl"
_TURN_S = 300.0  # deadline of one answer unless rollout.turn_deadline_s is set: reasoning models take minutes
_MOST_TURNS = 1000  # of an episode, unless rollout.max_turns is set: a server need not have a limit on the context
_UNCOUNTED = 1 << 30  # tokens of a context: the server alone counts them

_SAMPLING = {"max_tokens_per_turn": "max_tokens", **{name: name for name in ("temperature", "top_p", "stop")}}
"""Settings of sampling, and what the API calls them."""

_LIMITS = ("step_deadline_s", "episode_deadline_s", "max_observation_bytes")
_OWN = ("temperature", "top_p")  # settings of sampling that [eval] may have of its own
_TAKEN = (
    "env.*",
    "sandbox.*",
    *(f"rollout.{name}" for name in (*_SAMPLING, "max_turns", "turn_deadline_s", *_LIMITS)),
    *(f"eval.{name}" for name in _OWN),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A served model, and how to ask it. `attempts` is the most attempts at one episode."""

    client: ScoringClient
    concurrency: int = 16
    attempts: int = 3
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])
    tracebacks: Tracebacks = field(default_factory=Tracebacks)


def configured(model: str, env: str, overrides: Sequence[str]) -> RunConfig:
    """The settings of an evaluation at an endpoint. Raises ConfigError for one that has no effect there."""
    document: dict[str, Any] = {
        "model": model,
        "env": {"id": env},
        "rollout": {"max_context": _UNCOUNTED},
        "train": {"tokens_per_batch": _UNCOUNTED},
    }
    for override in overrides:
        setting_key, _, setting_value = override.partition("=")
        if not any(fnmatchcase(setting_key.strip(), setting_pattern) for setting_pattern in _TAKEN):
            correction = f"no effect at an --endpoint, which takes {', '.join(_TAKEN)}: leave it out"
            raise ConfigError(setting_key.strip(), setting_value, correction)
        configuration.apply_override(document, override)
    return configuration.parse(document)


def sampling(config: RunConfig) -> dict[str, Json]:
    """The options of a request: what the settings name, as evaluation samples; the others are the server's own."""
    eval_sampling = config.eval_sampling
    setting_values = {
        **{field_name: getattr(eval_sampling, field_name) for field_name in _OWN},
        "stop": list(eval_sampling.stop),
    }
    setting_values["max_tokens_per_turn"] = eval_sampling.max_tokens
    # Only what somebody has set is sent: a server's own defaults are part of what is measured, and some servers refuse
    # settings that their model does not know.
    set_fields = config.rollout.model_fields_set | config.eval.model_fields_set
    return {
        option_name: setting_values[setting_name]
        for setting_name, option_name in _SAMPLING.items()
        if setting_name in set_fields
    }


def evaluate(
    config: RunConfig, endpoint: Endpoint, n: int, out: Path, *, on_result: Callable[[Mapping[str, Json]], None]
) -> EvalResult:
    """Play the first `n` held-out tasks of `config.env`, except those already in `out`. Returns the means over all.

    Raises UsageError if `out` holds the results of another evaluation, or if nobody listens at the endpoint; RunFailed
    if no episode could be played."""
    held_out_tasks = tasks_of(config, HeldOut(name="tasks", n=n), n)
    results_file = _ResultsFile(out, json.loads(json.dumps(_of(config, endpoint))))
    finished_rows = results_file.read()
    remaining = [held_out_task for held_out_task in held_out_tasks if held_out_task.seed not in finished_rows]
    failures: list[str] = []

    def keep(row: Mapping[str, Json]) -> None:
        results_file.add(row)
        on_result(row)
        if "error" in row:
            failures.append(str(row["error"]))

    trio.run(_play_all, config, endpoint, remaining, keep)
    result_rows = [
        result_row
        for task_seed, result_row in results_file.read().items()
        if task_seed in {held_out_task.seed for held_out_task in held_out_tasks}
    ]
    if not result_rows:
        raise RunFailed(f"no episode could be played ({failures[0]}); the same command tries all again")
    return _means(result_rows, failed=n - len(result_rows))


def conversations(out: Path, n: int) -> Iterator[tuple[dict[str, Json], tuple[Message, ...]]]:
    """The first `n` episodes of a results file by seed, each with its messages."""
    result_rows = sorted(_ResultsFile(out, {}).finished(), key=lambda row: cast("int", row["seed"]))
    for result_row in result_rows[:n]:
        yield result_row, plain_messages(cast("list[Message]", result_row["messages"]))


def line(row: Mapping[str, Json]) -> str:
    """One readable line about an episode."""
    if "error" in row:
        return f"seed {row['seed']}: failed, {row['error']}"
    return f"seed {row['seed']}: outcome {row['outcome']:g} in {row['turns']} turns ({row['stop_reason']})"


def _of(config: RunConfig, endpoint: Endpoint) -> dict[str, Json]:
    """All that decides the results."""
    env_settings, rollout = config.env, config.rollout
    return {
        "url": endpoint.client.url,
        "model": config.model,
        "env": env_settings.id,
        "kwargs": env_settings.kwargs,
        "options": env_settings.options,
        "sampling": dict(endpoint.options),
        "limits": {
            "max_turns": _most_turns(rollout),
            "turn_deadline_s": _turn_s(rollout),
            **{limit_name: getattr(rollout, limit_name) for limit_name in _LIMITS},
        },
        "image": config.sandbox.docker.image,
    }


def _most_turns(limits: Rollout) -> int:
    return _MOST_TURNS if limits.max_turns is None else limits.max_turns


def _turn_s(limits: Rollout) -> float:
    return limits.turn_deadline_s if "turn_deadline_s" in limits.model_fields_set else _TURN_S


class _ResultsFile:
    """A first line about the evaluation, then one line per episode. A line that a crash cut off is ignored."""

    def __init__(self, folder: Path, of: Mapping[str, Json]) -> None:
        self._path, self._of = folder / RESULTS, dict(of)

    def read(self) -> dict[int, dict[str, Json]]:
        """The finished episodes by seed; failed ones are left out, to be played again."""
        result_rows = list(self._rows())
        if not result_rows:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps({"of": self._of}) + "\n", encoding="utf-8")
            return {}
        recorded: dict[str, Json] = result_rows[0].get("of") or {}
        # Everything that decides a result is in the first line and compared. A mean over episodes of two temperatures,
        # or of two models under one name, would be nobody's score.
        if differing := [
            field_name
            for field_name in {**self._of, **recorded}
            if recorded.get(field_name) != self._of.get(field_name)
        ]:
            problem = f"holds another evaluation ({', '.join(differing)} differ)"
            raise UsageError(f"{self._path} {problem}: give another --out")
        # By seed, the last line wins; failed episodes are left out and played again, as a failure of the server says
        # nothing about the model (law 3).
        return {result_row["seed"]: result_row for result_row in self.finished()}

    def finished(self) -> list[dict[str, Json]]:
        """The episodes that were played to their end, in the order of the file."""
        return [result_row for result_row in list(self._rows())[1:] if "error" not in result_row]

    def add(self, row: Mapping[str, Json]) -> None:
        with self._path.open("a", encoding="utf-8") as results_file:
            # A line at a time, appended: what was played at a server is paid for, and a crash may cost the episode
            # under way and no other.
            results_file.write(json.dumps(row) + "\n")

    def _rows(self) -> Iterator[dict[str, Json]]:
        if not self._path.is_file():
            return
        file_bytes = self._path.read_bytes()
        if not file_bytes.endswith(b"\n"):
            # Cut off in the file too: appended to, half of a line and the next one would be one broken line in the
            # middle.
            file_bytes = file_bytes[: file_bytes.rfind(b"\n") + 1]
            self._path.write_bytes(file_bytes)
        for json_line in file_bytes.splitlines():
            try:
                yield json.loads(json_line)
            except ValueError:
                raise UsageError(f"{self._path} is no results file of agentrl eval: give another --out") from None


async def _play_all(
    config: RunConfig, endpoint: Endpoint, tasks: list[Task], keep: Callable[[Mapping[str, Json]], object]
) -> None:
    shared_backend.configure(config.sandbox.arguments())
    try:
        # Once, before the first episode: without it each of many episodes would be tried three times against an address
        # at which nobody listens.
        await endpoint.client.reach()
    except EngineUnavailable as error:
        raise UsageError(f"{error}: start the server, or give another --endpoint") from None
    limiter = trio.CapacityLimiter(endpoint.concurrency)

    async def one(task: Task) -> None:
        async with limiter:
            keep(await _attempts(config, endpoint, task))

    async with trio.open_nursery() as nursery:
        for next_task in tasks:
            nursery.start_soon(one, next_task)


async def _attempts(config: RunConfig, endpoint: Endpoint, task: Task) -> Mapping[str, Json]:
    """One line of the results. After a failure of infrastructure the episode is played again from its beginning."""
    failure = ""
    for _ in range(endpoint.attempts):
        try:
            with boundary(EnvError, f"{task.env} raised", place=True):
                environment = as_async(make(task.env, **task.kwargs))
        except InfrastructureError as error:
            failure = one_line(error)
            endpoint.tracebacks.log(error, f"{task.env}, seed {task.seed}: {failure}")
            continue
        started_s = time.time()
        served_model = ServedModel(
            endpoint.client, environment, deadline_s=_turn_s(config.rollout), options=endpoint.options
        )
        trajectory, episode_ending = await play_text(
            environment, task, served_model.policy, _limits(config.rollout), tracebacks=endpoint.tracebacks
        )
        if episode_ending.error is None:
            roles = dict.fromkeys(played_turn.role for played_turn in trajectory.turns)
            if len(roles) > 1:
                notices.note("roles", f"one model plays all of them: {', '.join(roles)}", place=task.env)
            return _row(trajectory, served_model, time.time() - started_s)
        failure = one_line(episode_ending.error)
    return {"seed": task.seed, "error": failure}


def _limits(settings: Rollout) -> Rollout:
    """The settings with the limits that hold for a server."""
    return settings.model_copy(update={"max_turns": _most_turns(settings), "turn_deadline_s": _turn_s(settings)})


def _row(trajectory: Trajectory, model: ServedModel, seconds: float) -> dict[str, Json]:
    played_turns, outcome = trajectory.turns, trajectory.outcome or 0.0
    last_step = played_turns[-1].step if played_turns else None
    # An episode whose last step did not end it has filled its context.
    unsettled_reward = 0.0 if last_step is None or last_step.terminated or last_step.truncated else last_step.unsettled
    assert trajectory.stop_reason is not None
    return {
        "seed": trajectory.task.seed,
        "outcome": outcome,
        "success": outcome >= 1.0 if trajectory.success is None else trajectory.success,
        "reward": sum(played_turn.reward for played_turn in played_turns) + unsettled_reward,
        "turns": len(played_turns),
        "stop_reason": trajectory.stop_reason.value,
        "cut_turns": sum(played_turn.finish == "length" for played_turn in played_turns),
        "seconds": round(seconds, 3),
        "messages": cast("Json", as_api(model.policy.conversation(trajectory))),
        **({} if model.tokens is None else {"tokens": model.tokens}),
    }


def _means(rows: list[dict[str, Json]], *, failed: int) -> EvalResult:
    return EvalResult(
        name="tasks",
        success=fmean(float(result_row["success"]) for result_row in rows),
        outcome=fmean(result_row["outcome"] for result_row in rows),
        turns=fmean(result_row["turns"] for result_row in rows),
        tokens=fmean(result_row["tokens"] for result_row in rows)
        if all("tokens" in result_row for result_row in rows)
        else None,
        n=len(rows),
        failed=failed,
        pass_at=pass_at([(1, int(bool(result_row["success"]))) for result_row in rows]),
    )
