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
        tasks = sum(1 for episodes in self.tasks.values() if episodes)
        counts = {"tasks": tasks, "episodes": episodes, "failed": self.failed}
        return {"name": self.name, "source": self.source, **counts, "unfinished_tasks": len(self.unfinished)}


def read(place: str, held_out: str | None = None) -> Results:
    """Read the results at `place`: a run's folder or one of `agentrl eval --out`, each with `:MOMENT` behind it if not
    the newest evaluation is meant, or a file of JSON lines. `held_out` names the set. Raises UsageError."""
    path, moment = Path(place), None
    # A folder's name may hold a colon, so that a moment is looked for only where no such folder is.
    if not path.exists() and ":" in place:
        before, _, moment = place.rpartition(":")
        path = Path(before)
    if RunDir(path).store_path.exists():
        results = _of_run(place, RunDir(path), held_out, moment)
    elif moment is not None and path.exists():
        raise UsageError(f"{place}: {path} is no run, so it has no moment {moment!r}")
    elif (file := path / RESULTS if path.is_dir() else path).is_file():
        results = _of_lines(place, file)
    else:
        hint = f"give a run, a folder of agentrl eval --out, or a file of JSON lines; {RESULTS} or a store"
        raise UsageError(f"{place} holds no results: {hint}")
    if not any(results.tasks.values()):
        raise UsageError(f"{place} ({results.source}) has no episode that ended by the model's own doing")
    return results


def _of_run(name: str, run: RunDir, held_out: str | None, moment: str | None) -> Results:
    with RunStore.read(run.store_path) as store:
        purpose = _purpose(run, store.groups.purposes(), held_out, moment)
        rows = store.reads.episodes(purpose, limit=_MOST)
    results = Results(name=name, source=purpose)
    # An environment without a verdict leaves success open; with one, an episode that it did not judge was not solved.
    judges = any(row.success is not None for row in rows)
    for row in sorted(rows, key=lambda row: row.group_id):
        key = TaskKey(row.task.env, str(row.task.seed), _arguments(row.task.kwargs, row.task.options))
        episodes = results.tasks.setdefault(key, [])
        if row.stop_reason is None and row.state in ("waiting", "running"):
            results.unfinished.add(key)
        elif row.stop_reason is None or not row.stop_reason.by_policy:
            results.failed += 1
        else:
            success = bool(row.success) if judges else None
            episodes.append(Episode(success, row.outcome, row.turns, row.tokens))
    return results


def _arguments(kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return json.dumps([dict(kwargs), dict(options)], sort_keys=True)


def _purpose(run: RunDir, purposes: list[str], held_out: str | None, moment: str | None) -> str:
    """Return the purpose of the evaluation to read, as the store names it. Raises UsageError, and names those that are
    there."""
    labels = {purpose: label for purpose in purposes if (label := read_label(purpose, now=0)) is not None}
    if not labels:
        hint = f"run agentrl eval {run.path} --out FOLDER and compare FOLDER"
        raise UsageError(f"{run.path} was not measured on held-out tasks: {hint}")
    sets = sorted({label.name for label in labels.values()})
    if held_out is None and len(sets) > 1:
        raise UsageError(f"{run.path} has the held-out sets {', '.join(sets)}: name one, --held-out NAME")
    chosen = {
        purpose: label
        for purpose, label in labels.items()
        if label.name == (held_out or sets[0]) and moment in (None, label.when, purpose.rpartition(":")[2])
    }
    if not chosen:
        missing = f"{held_out or sets[0]}:{moment}" if moment else held_out
        raise UsageError(f"{run.path} has no evaluation {missing}: there are {', '.join(sorted(labels))}")

    return max(chosen, key=lambda purpose: (_AGE.get(chosen[purpose].when, -1), chosen[purpose].step))


def _of_lines(name: str, file: Path) -> Results:
    """Read a file of JSON lines; `agentrl eval --endpoint` writes one with a first line about the evaluation."""
    results = Results(name=name, source=str(file))
    header: Mapping[str, Any] | None = None
    failed, seen = set[tuple[TaskKey, str]](), set[tuple[TaskKey, str]]()
    for place, row in _rows(file):
        if header is None and not seen and isinstance(row.get("of"), dict):
            header = cast("dict[str, Any]", row["of"])
            continue
        with notices.at(place):
            for unused in row.keys() - (_KEYS if header is None else _KEYS | _KEYS_OF_EVAL):
                notices.note("results", f"the key {unused[:60]!r} is not used")
        # An episode without a sample is one more of its task; a server's model plays each task once.
        episode = key, sample = _identity(place, row, header), _text(row.get("sample", place if header is None else 0))
        if episode in seen:
            raise UsageError(f"{place} is the second row of task {key.task}, sample {sample}: each stands once")
        if row.get("error"):
            failed.add(episode)
            continue
        failed.discard(episode)  # it was played in a later attempt
        seen.add(episode)
        results.tasks.setdefault(key, []).append(_episode(place, row))
    results.failed = len(failed)
    if header is not None and seen:
        _order_by_seed(results, {key for key, _ in failed})
    return results


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
    example = next(iter(results.tasks))
    seeds = {int(key.task) for key in [*results.tasks, *failed]}
    order = [example._replace(task=str(seed)) for seed in range(min(seeds), max(seeds) + 1)]
    results.unfinished = set(order) - results.tasks.keys() - failed
    results.tasks = {key: results.tasks.get(key, []) for key in order}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file with their places."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{file} cannot be read as JSON lines: {error}") from None
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except ValueError:
            row = None
            if number == len(lines):  # somebody writes it now, or a crash cut it off
                notices.note("results", "a last line that is cut off is not used", place=f"{file}, line {number}")
                continue
        if not isinstance(row, dict):
            raise UsageError(f"{file}, line {number} is no JSON object: give one row for each episode")
        yield f"{file}, line {number}", cast("dict[str, Any]", row)


def _episode(place: str, row: Mapping[str, Any]) -> Episode:
    success: Any = row.get("success")
    if success is not None and success not in (0, 1):
        raise UsageError(f"{place}: success is {success!r}, give true or false")
    values = {"outcome": row.get("outcome", row.get("reward")), "turns": row.get("turns"), "tokens": row.get("tokens")}
    for name, value in values.items():
        if value is not None and not (isinstance(value, int | float) and math.isfinite(value)):
            raise UsageError(f"{place}: {name} is {value!r}, give a finite number")
    if success is None and values["outcome"] is None:
        raise UsageError(f"{place} has neither success nor outcome")
    return Episode(None if success is None else bool(success), **values)
