"""Runs the cases with a trainer: engines here, the trainer in a child process with deadlines, then the judges.

The child plays one case after the other, since to import a trainer takes longer than a case. If it dies, or overruns a
case's deadline, another one goes on with the next case.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentrl.conformance import child
from agentrl.conformance.cases import Case
from agentrl.conformance.judges import Verdict
from agentrl.conformance.observation import Observation, add_events
from agentrl.conformance.scripted_engine import ScriptedEngine, serving
from agentrl.conformance.tiny_model import write_model
from agentrl.errors import UsageError

_POLL_S: Final = 0.25
_START_S: Final = 240.0  # to import a trainer on a busy machine
_END_S: Final = 30.0  # for a process that was killed


@dataclass(frozen=True, slots=True)
class Result:
    """A case and how it ended."""

    case: Case
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All of a trainer's cases. `versions` are those of its packages, in the Python that ran it."""

    trainer: str
    versions: dict[str, str]
    results: list[Result]

    @property
    def broken(self) -> bool:
        return any(case_result.verdict.outcome == "breaks" for case_result in self.results)

    def document(self) -> dict[str, Any]:
        """The report for a program: `results` has an object for each case, in order."""
        result_documents = [
            {
                "case": case_result.case.name,
                "verdict": case_result.verdict.outcome,
                "evidence": case_result.verdict.evidence,
                "promise": case_result.case.promise,
                "happens": case_result.case.happens,
            }
            for case_result in self.results
        ]
        return {"trainer": self.trainer, "versions": self.versions, "results": result_documents}


@dataclass(slots=True)
class _Play:
    """A case with its engine and its files."""

    case: Case
    engine: ScriptedEngine
    order: dict[str, Any]
    folder: Path
    lives: int = 0

    def events(self) -> Path:
        return self.folder / f"events-{self.lives}.jsonl"

    def begin_life(self) -> dict[str, Any]:
        """The order for the next life of the trainer."""
        self.lives += 1
        hold_at_step = self.case.scenario.kill_at_step if self.lives == 1 else None
        return {**self.order, "events": str(self.events()), "hold_at_step": hold_at_step}

    def observation(self) -> Observation:
        """All that is known up to now."""
        observation = Observation(samples=self.engine.samples())
        for life_number in range(1, self.lives + 1):
            add_events(observation, self.folder / f"events-{life_number}.jsonl", life_number - 1)
        return observation

    def has_ended(self) -> bool:
        """Whether the newest life has reported its end."""
        newest_life = Observation()
        add_events(newest_life, self.events(), 0)
        return newest_life.finished or newest_life.stopped is not None

    def was_reached(self) -> bool:
        return self.events().exists()

    def stop(self, reason: str) -> None:
        """Note why the newest life ended, which could not say so."""
        with self.events().open("a", encoding="utf-8") as events_file:
            events_file.write("\n" + json.dumps({"event": "stopped", "error": reason}) + "\n")


def conduct(
    trainer: str, cases: Sequence[Case], *, python: str | None = None, notify: Callable[[str], None] = lambda _: None
) -> Report:
    """Play the cases with a trainer, by the Python at `python` (default: this one), and judge them.

    Raises UsageError if that Python has no such trainer."""
    with tempfile.TemporaryDirectory(prefix="agentrl-conformance-") as temporary_path, ExitStack() as engine_stack:
        work_folder = Path(temporary_path)
        model_folders = {
            writes_tool: write_model(work_folder / f"model-{writes_tool}", writes_tool=writes_tool)
            for writes_tool in (True, False)
        }
        case_plays: list[_Play] = []
        for played_case in cases:
            case_folder = work_folder / played_case.name
            (case_folder / "trainer").mkdir(parents=True)
            case_engine, engine_url = engine_stack.enter_context(
                serving(played_case.scenario, model_folders[played_case.scenario.writes_tool])
            )
            case_order = {
                "name": played_case.name,
                "model": str(model_folders[played_case.scenario.writes_tool]),
                "url": engine_url,
                "folder": str(case_folder / "trainer"),
                "scenario": played_case.scenario.document(),
            }
            case_plays.append(_Play(played_case, case_engine, case_order, case_folder))
        start_child = _Starter(trainer, python or sys.executable, work_folder)
        _play_in_turn(
            [case_play for case_play in case_plays if case_play.case.scenario.kill_at_step is None], start_child, notify
        )
        for case_play in case_plays:
            if case_play.case.scenario.kill_at_step is not None:
                notify(case_play.case.name)
                _play_twice(case_play, start_child)
        return _report(trainer, case_plays)


def _report(trainer: str, plays: Sequence[_Play]) -> Report:
    versions: dict[str, str] = {}
    case_results: list[Result] = []
    for case_play in plays:
        observation = case_play.observation()
        versions.update(observation.versions)
        case_results.append(Result(case_play.case, judge(case_play.case, observation)))
    return Report(trainer=trainer, versions=versions, results=case_results)


def judge(case: Case, seen: Observation) -> Verdict:
    """The verdict of a case."""
    if seen.skipped is None:
        return case.judge(seen, case.scenario)
    skip_outcome, skip_reason = seen.skipped
    return Verdict("not applicable" if skip_outcome == "not applicable" else "not observed", skip_reason)


class _Starter:
    """Starts children of one trainer; their output goes to a file."""

    def __init__(self, trainer: str, python: str, folder: Path) -> None:
        self._trainer, self._python, self._folder = trainer, python, folder
        self._alone = Path(python).absolute() != Path(sys.executable).absolute()
        self.log = folder / "child.log"

    @contextmanager
    def __call__(self, orders: Sequence[dict[str, Any]]) -> Generator[subprocess.Popen[bytes]]:
        """A child that plays these orders; it and what it started are dead after the block."""
        order_path = self._folder / "order.json"
        order_path.write_text(json.dumps({"trainer": self._trainer, "alone": self._alone, "cases": list(orders)}))
        environment = {
            variable_name: variable_value
            for variable_name, variable_value in os.environ.items()
            if not (self._alone and variable_name == "PYTHONPATH")
        }
        # No trainer may ask a hub for anything: the model folder is all there is.
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        child_command = [self._python, child.__file__, str(order_path)]
        with self.log.open("wb") as log_file:
            child_process = subprocess.Popen(
                child_command,
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                env=environment,
                start_new_session=True,
            )
            try:
                yield child_process
            finally:
                kill(child_process)

    def last_words(self) -> str:
        """The last line that a child wrote."""
        log_lines = [log_line for log_line in self.log.read_text(errors="replace").splitlines() if log_line.strip()]
        return log_lines[-1][:300] if log_lines else "no output"


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill -9 a child and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_END_S)
    if process.stdin is not None:
        process.stdin.close()


def _play_in_turn(plays: list[_Play], start: _Starter, notify: Callable[[str], None]) -> None:
    remaining_plays = list(plays)
    while remaining_plays:
        with start([case_play.begin_life() for case_play in remaining_plays]) as child_process:
            is_first = True
            while remaining_plays:
                case_play = remaining_plays.pop(0)
                notify(case_play.case.name)
                if not _came_to_its_end(case_play, child_process, start, is_first=is_first):
                    break
                is_first = False


def _came_to_its_end(play: _Play, process: subprocess.Popen[bytes], start: _Starter, *, is_first: bool) -> bool:
    """Wait for the end of a case, which may be the first of its child. False if the child cannot go on with the next
    one."""
    begun_at_s, was_reached = time.monotonic(), False
    # Adapters import their trainer in the first case that they play: none may look slow because this machine is.
    patience_s = play.case.deadline_s + (_START_S if is_first else 0.0)
    while not play.has_ended():
        if process.poll() is not None:
            if process.returncode == child.UNUSABLE:
                raise UsageError(start.last_words())
            if not play.has_ended():
                play.stop(f"its process ended with code {process.returncode}: {start.last_words()}")
            return False
        if not was_reached and play.was_reached():
            begun_at_s, was_reached = time.monotonic(), True
        if time.monotonic() - begun_at_s > (patience_s if was_reached else _START_S):
            play.stop(f"it had not come to its end after {patience_s:g} s")
            return False
        time.sleep(_POLL_S)
    return True


def _play_twice(play: _Play, start: _Starter) -> None:
    """Kill the first life once it has reported its steps; let the second come to its end."""
    last_step = play.case.scenario.kill_at_step or 0
    deadline_s = time.monotonic() + _START_S + play.case.deadline_s
    with start([play.begin_life()]) as child_process:
        while child_process.poll() is None and time.monotonic() < deadline_s and not play.has_ended():
            if any(reported_step >= last_step for _, reported_step in play.observation().steps):
                break
            time.sleep(_POLL_S)
    if play.has_ended():
        return
    with start([play.begin_life()]) as child_process:
        _came_to_its_end(play, child_process, start, is_first=True)
