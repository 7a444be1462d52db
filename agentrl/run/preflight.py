"""Checks of a few seconds before anything starts, for mistakes that a run would only find once its engines are up.

One task of each source is reset as a worker does it, in a process of its own: environments and their boxes are made,
the chat template renders the first messages, the rows' columns fill the prompt, and reward functions judge a canned
answer. A failure that several tasks share is one line, and the run does not start; one of a single task, or a reset
that takes long, is a warning. Never knows engines, store or learner.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from agentrl import config as configuration
from agentrl import registry
from agentrl.config import RunConfig
from agentrl.config.machine_defaults import Machine
from agentrl.engine.rendering.renderer import Renderer
from agentrl.env import as_async, dataset_env, step_results
from agentrl.errors import AgentRLError, ConfigError, InfrastructureError, UsageError
from agentrl.host.clocks import HostClock
from agentrl.host.platform_checks import free_memory_bytes, kill_group
from agentrl.models.resolve import model_dir, renderer_of
from agentrl.protocols import AsyncEnv
from agentrl.records import Task
from agentrl.rewards.hidden_tests import BoxTests
from agentrl.rollout import compaction
from agentrl.rollout.env_calls import EnvCalls, one_line
from agentrl.rollout.render_messages import rendered
from agentrl.rollout.take_snapshots import prepare
from agentrl.run.evaluation import held_out as evaluation
from agentrl.run.reporting.failed_tasks import skips
from agentrl.run.task_sources import source_tasks
from agentrl.sandbox import shared_backend

_TASKS: Final = 3  # of a source that are tried: one that is broken does not speak for the others
_TASK_S: Final = 30.0  # of each, at most: one that takes longer is not checked
_DEADLINE_S: Final = 120.0  # of the whole: then the run starts without it
_WORKER_MB: Final = 90  # resident memory of a worker with the tiny model's tokenizer, before it imports an environment
_EPISODE_MB: Final = 0.25  # and of a running episode: its texts, tokens and tasks of trio


def check_limits(config: RunConfig) -> None:
    """Compare settings with what model and machine have. Raises ConfigError."""
    positions = _positions(model_dir(config.model))
    if positions is not None and config.rollout.max_context > positions:
        correction = f"the model {config.model!r} has {positions} positions: give at most that"
        raise ConfigError("rollout.max_context", config.rollout.max_context, correction)
    compaction_settings = config.rollout.compaction
    if compaction_settings is not None and compaction_settings.how != compaction.SUMMARY:
        compaction.shortener(compaction_settings)
    if config.env.reward:
        _check_rewarder("env.reward", config.env.reward)
    for source_number, reward_source in enumerate(config.rewards):
        if reward_source.call is not None:
            _check_rewarder(f"rewards.{source_number}.call", reward_source.call)
    if config.cluster.on_ray:  # other machines play and learn
        return
    if config.train.device != "cpu" and Machine.seen().gpus == 0:
        correction = "torch sees no GPU here: give 'cpu', or install a torch that was built for this machine's GPU"
        raise ConfigError("train.device", config.train.device, correction)
    free_mb = free_memory_bytes() / (1 << 20)
    for limit_name, each_mb in (("workers", _WORKER_MB), ("max_running", _EPISODE_MB)):
        limit_value = getattr(config.rollout, limit_name)
        if limit_value * each_mb > free_mb:
            correction = (
                f"each takes about {each_mb:g} MB of memory, and {free_mb / 1024:.1f} GB are free: give at most "
            )
            raise ConfigError(f"rollout.{limit_name}", limit_value, correction + str(max(1, int(free_mb / each_mb))))


def check_tasks(config: RunConfig, *, task_s: float = _TASK_S, deadline_s: float = _DEADLINE_S) -> None:
    """Reset tasks of each source in a process of its own, within `task_s` seconds each and `deadline_s` in all, and
    warn on stderr. Raises UsageError for what would fail everywhere. On a cluster nothing is checked: its nodes may
    have what this machine lacks."""
    if config.cluster.on_ray:
        return
    python_path = os.pathsep.join(path_entry for path_entry in sys.path if path_entry)
    # A process of its own: a reset runs the user's code, which may exit, hang or take memory, and imports what a
    # supervisor must not have loaded. Its own process group, so that whatever the environment has started ends with it.
    check_process = subprocess.Popen(
        [sys.executable, "-m", __name__, str(min(task_s, config.rollout.step_deadline_s))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path, "TOKENIZERS_PARALLELISM": "false"},
        process_group=0,
    )
    try:
        findings_text, stderr_text = check_process.communicate(configuration.to_json(config), timeout=deadline_s)
    except subprocess.TimeoutExpired:
        _warn(f"no task could be reset within {deadline_s:g} s: the run starts without this check")
        return
    finally:
        kill_group(check_process.pid)
        check_process.communicate()
    if check_process.returncode:
        last_line = (stderr_text.strip().splitlines() or ["no output"])[-1]
        raise UsageError(f"a worker could not start: it ended with status {check_process.returncode} ({last_line})")
    error_texts: list[str] = []
    for finding_line in findings_text.splitlines():
        finding_kind, _, finding_text = finding_line.partition(" ")
        if finding_kind == "warning":
            _warn(finding_text)
        elif finding_kind == "error":
            error_texts.append(finding_text)
    if error_texts:
        raise UsageError(error_texts[0])


def _warn(text: str) -> None:
    print(f"agentrl: warning: {text}", file=sys.stderr)


def _check_rewarder(field: str, reference: str) -> None:
    """Refuse what cannot be called with one episode; a class is taken for one whose object is called."""
    function = registry.load_reference(reference)
    with suppress(ValueError):  # the signature of some builtins is not known
        try:
            inspect.signature(function).bind(object())
        except TypeError:
            correction = (
                f"takes {inspect.signature(function)}: give a function of one argument (see docs/how-to/rewards.md)"
            )
            raise ConfigError(field, reference, correction) from None


def _positions(folder: Path) -> int | None:
    """How many positions the model has, scaled ones included; None if its config.json does not say."""
    described: dict[str, Any] = json.loads((folder / "config.json").read_text())
    described = {**described, **(described.get("text_config") or {})}
    positions: Any = described.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    rope_scaling: dict[str, Any] = described.get("rope_scaling") or described.get("rope_parameters") or {}
    scale_factor = rope_scaling.get("factor")
    if isinstance(scale_factor, int | float):
        return max(positions, int(scale_factor * rope_scaling.get("original_max_position_embeddings", positions)))
    return positions


# --- in the process


def main(task_s: float) -> None:
    """Read a configuration; write a line for each finding."""
    answers_to = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment prints is no finding
    run_config = configuration.from_json(sys.stdin.read())
    renderer = renderer_of(run_config)
    for finding_kind, finding_text in trio.run(_findings, run_config, renderer, task_s, clock=HostClock()):
        answers_to.write(f"{finding_kind} {' '.join(finding_text.split())}\n")
    answers_to.flush()
    os._exit(0)  # threads of an environment may hang


async def _findings(config: RunConfig, renderer: Renderer, task_s: float) -> list[tuple[str, str]]:
    shared_backend.configure(config.sandbox.arguments())
    findings: list[tuple[str, str]] = []
    for reward_source in config.rewards:
        if reward_source.reads_work:
            try:
                with trio.move_on_after(task_s):
                    await BoxTests(reward_source, _no_artifacts).check()
            except AgentRLError as error:
                findings.append(("error", f"reward source {reward_source.source!r}: {error}"))
    for is_trained, candidate_tasks in _sources(config):
        failures: list[str] = []
        for candidate_task in candidate_tasks:
            try:
                with trio.move_on_after(task_s) as cancel_scope:
                    evaluation_set = await _played(config, renderer, candidate_task)
                    if is_trained and evaluation_set:
                        findings.append(("warning", f"{candidate_task.env} is trained on: {evaluation_set}"))
            except AgentRLError as error:
                failures.append(one_line(error) if isinstance(error, InfrastructureError) else str(error))
                continue
            if cancel_scope.cancelled_caught:
                findings.append(
                    ("warning", f"{candidate_task.env}, seed {candidate_task.seed}, was not reset within {task_s:g} s")
                )
            # One task that works is enough for its source: the aim is to find what is broken for all. A broken row of a
            # thousand is found, and named, while the run goes on.
            break
        findings += [
            ("error" if len(failures) == len(candidate_tasks) else "warning", failure_text) for failure_text in failures
        ]
    return findings


async def _no_artifacts(_: str) -> None:
    return None


def _sources(config: RunConfig) -> Iterator[tuple[bool, list[Task]]]:
    """The first tasks of each source that the run does not skip, and whether it trains on them; seeds of one
    environment are one source."""
    skipped_ids = config.rollout.skip_tasks
    training_tasks = source_tasks(config, _TASKS + len(skipped_ids))
    remaining = [
        [listed_task for listed_task in listed_tasks if not skips(listed_task, skipped_ids)][:_TASKS]
        for listed_tasks in training_tasks
    ]
    held_out = [evaluation.tasks_of(config, eval_set, min(eval_set.n, _TASKS)) for eval_set in config.eval.sets]
    seen_tasks: list[Task] = []
    sources = [*((True, tasks) for tasks in remaining), *((False, tasks) for tasks in held_out)]
    for is_trained, listed_tasks in sources:
        if not listed_tasks:
            continue
        first_task = replace(listed_tasks[0], index=0, seed=0)
        if first_task not in seen_tasks:
            seen_tasks.append(first_task)
            yield is_trained, listed_tasks


async def _played(config: RunConfig, renderer: Renderer, task: Task) -> str:
    """Reset a task, render it; one answer is judged if the environment is of rows. Returns why the environment's tasks
    are for evaluation alone, if they are."""
    env_calls = EnvCalls(task.env, _DEADLINE_S)  # the caller's deadline comes first
    environment: AsyncEnv = await env_calls("make", partial(_called, partial(_made, task)))
    try:
        inner_env = getattr(environment, "unwrapped", environment)
        refusal = str(getattr(inner_env, "unrewarded", ""))
        if refusal and not config.env.reward and not config.rewards:
            raise UsageError(refusal)
        prepare(environment, config.rollout)
        start_result = await env_calls(
            "reset", lambda: step_results.start(environment, task, config.rollout.observation_bytes)
        )
        tool_schemas = await env_calls("tool_schemas", partial(_called, environment.tool_schemas))
        render_prompt = partial(renderer.start, tools=tool_schemas)
        prompt_ids = await rendered(render_prompt, start_result.observation, tool_schemas, env=task.env, acted=False)
        if len(prompt_ids) >= config.rollout.max_context:
            correction = f"the prompt of {task.env}, seed {task.seed}, has {len(prompt_ids)} tokens: give more"
            raise ConfigError("rollout.max_context", config.rollout.max_context, correction)
        if task.env in dataset_env.IDS:
            # Any answer will do: a reward function that lacks a column, or returns a string, fails at the first one it
            # judges.
            await env_calls("step", lambda: step_results.act(environment, "42", task))
        return str(getattr(inner_env, "evaluation_set", ""))
    finally:
        with trio.move_on_after(5, shield=True):
            await environment.aclose()


def _made(task: Task) -> AsyncEnv:
    return as_async(registry.resolve("environments", task.env)(**task.kwargs))


async def _called(function: Callable[[], Any]) -> Any:
    return function()


if __name__ == "__main__":
    main(float(sys.argv[1]))
