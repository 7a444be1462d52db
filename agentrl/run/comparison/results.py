"""Results of one model, task by task: from a run's held-out evaluation, a folder of `agentrl eval --out`, or a file of
JSON lines with a row for each episode.

Owns the reading. Episodes that infrastructure ended, or that have not ended, are counted and judge nobody (law 3).
Never compares anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from agentrl import notices
from agentrl.errors import UsageError
from agentrl.run.evaluation.held_out import read_label
from agentrl.run.evaluation.of_endpoint import RESULTS
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore

NUMBERS = ("outcome", "turns", "tokens")
_MOST = 1 << 30  # episodes of an evaluation
_AGE = {"before": 0, "during": 1, "now": 2, "after": 3}  # the newest moment is read if nobody names one
_KEYS = frozenset({"task", "seed", "env", "sample", "success", "outcome", "reward", "turns", "tokens", "error"})
_KEYS_OF_EVAL = frozenset({"stop_reason", "cut_turns", "seconds", "messages"})


class TaskKey(NamedTuple):
    """Identity of a task: its environment, its seed or row, and the arguments and options of the environment as JSON.
    A file of JSON lines need not name the environment."""

    env: str
    task: str
    arguments: str = ""


class Episode(NamedTuple):
    """An episode that the policy ended. A number that nobody recorded is None."""

    success: bool | None
    outcome: float | None
    turns: float | None
    tokens: float | None


@dataclass(slots=True, kw_only=True)
class Results:
    """The episodes of one model by task, in the order in which tasks began; a task may have none yet. `failed` counts
    episodes that infrastructure ended, `unfinished` holds the tasks with episodes that have not ended."""

    name: str
    source: str
    tasks: dict[TaskKey, list[Episode]] = field(default_factory=dict[TaskKey, list[Episode]])
    failed: int = 0
    unfinished: set[TaskKey] = field(default_factory=set[TaskKey])

    def document(self) -> dict[str, Any]:
        """The counts, for JSON."""
        episodes = sum(len(episodes) for episodes in self.tasks.values())
        task_count = sum(1 for episodes in self.tasks.values() if episodes)
        count_fields = {"tasks": task_count, "episodes": episodes, "failed": self.failed}
        return {"name": self.name, "source": self.source, **count_fields, "unfinished_tasks": len(self.unfinished)}


def read(place: str, held_out: str | None = None) -> Results:
    """Read the results at `place`: a run's folder or one of `agentrl eval --out`, each with `:MOMENT` behind it if not
    the newest evaluation is meant, or a file of JSON lines. `held_out` names the set. Raises UsageError."""
    results_path, moment = Path(place), None
    # A folder's name may hold a colon, so that a moment is looked for only where no such folder is.
    if not results_path.exists() and ":" in place:
        path_text, _, moment = place.rpartition(":")
        results_path = Path(path_text)
    if RunDir(results_path).store_path.exists():
        model_results = _of_run(place, RunDir(results_path), held_out, moment)
    elif moment is not None and results_path.exists():
        raise UsageError(f"{place}: {results_path} is no run, so it has no moment {moment!r}")
    elif (lines_file := results_path / RESULTS if results_path.is_dir() else results_path).is_file():
        model_results = _of_lines(place, lines_file)
    else:
        suggestion = f"give a run, a folder of agentrl eval --out, or a file of JSON lines; {RESULTS} or a store"
        raise UsageError(f"{place} holds no results: {suggestion}")
    if not any(model_results.tasks.values()):
        raise UsageError(f"{place} ({model_results.source}) has no episode that ended by the model's own doing")
    return model_results


def _of_run(name: str, run: RunDir, held_out: str | None, moment: str | None) -> Results:
    with RunStore.read(run.store_path) as run_store:
        eval_purpose = _purpose(run, run_store.groups.purposes(), held_out, moment)
        episode_rows = run_store.reads.episodes(eval_purpose, limit=_MOST)
    model_results = Results(name=name, source=eval_purpose)
    # An environment without a verdict leaves success open; with one, an episode that it did not judge was not solved.
    has_verdicts = any(episode_row.success is not None for episode_row in episode_rows)
    for episode_row in sorted(episode_rows, key=lambda row: row.group_id):
        task_key = TaskKey(
            episode_row.task.env,
            str(episode_row.task.seed),
            _arguments(episode_row.task.kwargs, episode_row.task.options),
        )
        episodes = model_results.tasks.setdefault(task_key, [])
        if episode_row.stop_reason is None and episode_row.state in ("waiting", "running"):
            model_results.unfinished.add(task_key)
        elif episode_row.stop_reason is None or not episode_row.stop_reason.by_policy:
            model_results.failed += 1
        else:
            is_success = bool(episode_row.success) if has_verdicts else None
            episodes.append(Episode(is_success, episode_row.outcome, episode_row.turns, episode_row.tokens))
    return model_results


def _arguments(kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return json.dumps([dict(kwargs), dict(options)], sort_keys=True)


def _purpose(run: RunDir, purposes: list[str], held_out: str | None, moment: str | None) -> str:
    """Return the purpose of the evaluation to read, as the store names it. Raises UsageError, and names those that are
    there."""
    eval_labels = {
        eval_purpose: eval_label
        for eval_purpose in purposes
        if (eval_label := read_label(eval_purpose, now=0)) is not None
    }
    if not eval_labels:
        suggestion = f"run agentrl eval {run.path} --out FOLDER and compare FOLDER"
        raise UsageError(f"{run.path} was not measured on held-out tasks: {suggestion}")
    set_names = sorted({eval_label.name for eval_label in eval_labels.values()})
    if held_out is None and len(set_names) > 1:
        raise UsageError(f"{run.path} has the held-out sets {', '.join(set_names)}: name one, --held-out NAME")
    chosen_labels = {
        eval_purpose: eval_label
        for eval_purpose, eval_label in eval_labels.items()
        if eval_label.name == (held_out or set_names[0])
        and moment in (None, eval_label.when, eval_purpose.rpartition(":")[2])
    }
    if not chosen_labels:
        missing_name = f"{held_out or set_names[0]}:{moment}" if moment else held_out
        raise UsageError(f"{run.path} has no evaluation {missing_name}: there are {', '.join(sorted(eval_labels))}")

    return max(
        chosen_labels, key=lambda purpose: (_AGE.get(chosen_labels[purpose].when, -1), chosen_labels[purpose].step)
    )


def _of_lines(name: str, file: Path) -> Results:
    """Read a file of JSON lines; `agentrl eval --endpoint` writes one with a first line about the evaluation."""
    model_results = Results(name=name, source=str(file))
    eval_header: Mapping[str, Any] | None = None
    failed_episodes, seen_episodes = set[tuple[TaskKey, str]](), set[tuple[TaskKey, str]]()
    for row_place, episode_row in _rows(file):
        if eval_header is None and not seen_episodes and isinstance(episode_row.get("of"), dict):
            eval_header = cast("dict[str, Any]", episode_row["of"])
            continue
        with notices.at(row_place):
            for unused_key in episode_row.keys() - (_KEYS if eval_header is None else _KEYS | _KEYS_OF_EVAL):
                notices.note("results", f"the key {unused_key[:60]!r} is not used")
        # An episode without a sample is one more of its task; a server's model plays each task once.
        task_key = _identity(row_place, episode_row, eval_header)
        sample_name = _text(episode_row.get("sample", row_place if eval_header is None else 0))
        episode_key = task_key, sample_name
        if episode_key in seen_episodes:
            raise UsageError(
                f"{row_place} is the second row of task {task_key.task}, sample {sample_name}: each stands once"
            )
        if episode_row.get("error"):
            failed_episodes.add(episode_key)
            continue
        failed_episodes.discard(episode_key)  # it was played in a later attempt
        seen_episodes.add(episode_key)
        model_results.tasks.setdefault(task_key, []).append(_episode(row_place, episode_row))
    model_results.failed = len(failed_episodes)
    if eval_header is not None and seen_episodes:
        _order_by_seed(model_results, {task_key for task_key, _ in failed_episodes})
    return model_results


def _identity(place: str, row: Mapping[str, Any], header: Mapping[str, Any] | None) -> TaskKey:
    if header is not None:
        if not isinstance(row.get("seed"), int):
            raise UsageError(f"{place} names no seed, as rows of agentrl eval do")
        arguments = _arguments(header.get("kwargs", {}), header.get("options", {}))
        return TaskKey(str(header.get("env", "")), str(row["seed"]), arguments)
    if "task" not in row and "seed" not in row:
        raise UsageError(f"{place} names no task: give each row task or seed")
    return TaskKey(str(row.get("env", "")), _text(row.get("task", row.get("seed"))))


def _order_by_seed(results: Results, failed: set[TaskKey]) -> None:
    """Put the tasks of `agentrl eval --endpoint` into the order in which they began: its file has that of their ends.
    Seeds are consecutive, so that one that is missing in between has not ended."""
    example_key = next(iter(results.tasks))
    task_seeds = {int(task_key.task) for task_key in [*results.tasks, *failed]}
    ordered_keys = [
        example_key._replace(task=str(task_seed)) for task_seed in range(min(task_seeds), max(task_seeds) + 1)
    ]
    results.unfinished = set(ordered_keys) - results.tasks.keys() - failed
    results.tasks = {task_key: results.tasks.get(task_key, []) for task_key in ordered_keys}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file with their places."""
    try:
        file_text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as read_error:
        raise UsageError(f"{file} cannot be read as JSON lines: {read_error}") from None
    file_lines = file_text.split("\n")
    for line_number, file_line in enumerate(file_lines, 1):
        if not file_line.strip():
            continue
        try:
            parsed_row: Any = json.loads(file_line)
        except ValueError:
            parsed_row = None
            if line_number == len(file_lines):  # somebody writes it now, or a crash cut it off
                notices.note("results", "a last line that is cut off is not used", place=f"{file}, line {line_number}")
                continue
        if not isinstance(parsed_row, dict):
            raise UsageError(f"{file}, line {line_number} is no JSON object: give one row for each episode")
        yield f"{file}, line {line_number}", cast("dict[str, Any]", parsed_row)


def _episode(place: str, row: Mapping[str, Any]) -> Episode:
    row_success: Any = row.get("success")
    if row_success is not None and row_success not in (0, 1):
        raise UsageError(f"{place}: success is {row_success!r}, give true or false")
    row_values = {
        "outcome": row.get("outcome", row.get("reward")),
        "turns": row.get("turns"),
        "tokens": row.get("tokens"),
    }
    for value_name, row_value in row_values.items():
        if row_value is not None and not (isinstance(row_value, int | float) and math.isfinite(row_value)):
            raise UsageError(f"{place}: {value_name} is {row_value!r}, give a finite number")
    if row_success is None and row_values["outcome"] is None:
        raise UsageError(f"{place} has neither success nor outcome")
    return Episode(None if row_success is None else bool(row_success), **row_values)
