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
        return any(result.verdict.outcome == "breaks" for result in self.results)

    def document(self) -> dict[str, Any]:
        """The report for a program: `results` has an object for each case, in order."""
        rows = [
            {
                "case": result.case.name,
                "verdict": result.verdict.outcome,
                "evidence": result.verdict.evidence,
                "promise": result.case.promise,
                "happens": result.case.happens,
            }
            for result in self.results
        ]
        return {"trainer": self.trainer, "versions": self.versions, "results": rows}


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
        hold = self.case.scenario.kill_at_step if self.lives == 1 else None
        return {**self.order, "events": str(self.events()), "hold_at_step": hold}

    def observation(self) -> Observation:
        """All that is known up to now."""
        seen = Observation(samples=self.engine.samples())
        for life in range(1, self.lives + 1):
            add_events(seen, self.folder / f"events-{life}.jsonl", life - 1)
        return seen

    def has_ended(self) -> bool:
        """Whether the newest life has reported its end."""
        newest = Observation()
        add_events(newest, self.events(), 0)
        return newest.finished or newest.stopped is not None

    def was_reached(self) -> bool:
        return self.events().exists()

    def stop(self, reason: str) -> None:
        """Note why the newest life ended, which could not say so."""
        with self.events().open("a", encoding="utf-8") as file:
            file.write("\n" + json.dumps({"event": "stopped", "error": reason}) + "\n")


def conduct(
    trainer: str, cases: Sequence[Case], *, python: str | None = None, notify: Callable[[str], None] = lambda _: None
) -> Report:
    """Play the cases with a trainer, by the Python at `python` (default: this one), and judge them.

    Raises UsageError if that Python has no such trainer."""
    with tempfile.TemporaryDirectory(prefix="agentrl-conformance-") as place, ExitStack() as engines:
        folder = Path(place)
        models = {writes: write_model(folder / f"model-{writes}", writes_tool=writes) for writes in (True, False)}
        plays: list[_Play] = []
        for case in cases:
            case_folder = folder / case.name
            (case_folder / "trainer").mkdir(parents=True)
            engine, url = engines.enter_context(serving(case.scenario, models[case.scenario.writes_tool]))
            order = {
                "name": case.name,
                "model": str(models[case.scenario.writes_tool]),
                "url": url,
                "folder": str(case_folder / "trainer"),
                "scenario": case.scenario.document(),
            }
            plays.append(_Play(case, engine, order, case_folder))
        start = _Starter(trainer, python or sys.executable, folder)
        _play_in_turn([play for play in plays if play.case.scenario.kill_at_step is None], start, notify)
        for play in plays:
            if play.case.scenario.kill_at_step is not None:
                notify(play.case.name)
                _play_twice(play, start)
        return _report(trainer, plays)


def _report(trainer: str, plays: Sequence[_Play]) -> Report:
    versions: dict[str, str] = {}
    results: list[Result] = []
    for play in plays:
        seen = play.observation()
        versions.update(seen.versions)
        results.append(Result(play.case, judge(play.case, seen)))
    return Report(trainer=trainer, versions=versions, results=results)


def judge(case: Case, seen: Observation) -> Verdict:
    """The verdict of a case."""
    if seen.skipped is None:
        return case.judge(seen, case.scenario)
    outcome, reason = seen.skipped
    return Verdict("not applicable" if outcome == "not applicable" else "not observed", reason)


class _Starter:
    """Starts children of one trainer; their output goes to a file."""

    def __init__(self, trainer: str, python: str, folder: Path) -> None:
        self._trainer, self._python, self._folder = trainer, python, folder
        self._alone = Path(python).absolute() != Path(sys.executable).absolute()
        self.log = folder / "child.log"

    @contextmanager
    def __call__(self, orders: Sequence[dict[str, Any]]) -> Generator[subprocess.Popen[bytes]]:
        """A child that plays these orders; it and what it started are dead after the block."""
        path = self._folder / "order.json"
        path.write_text(json.dumps({"trainer": self._trainer, "alone": self._alone, "cases": list(orders)}))
        environment = {name: value for name, value in os.environ.items() if not (self._alone and name == "PYTHONPATH")}
        # No trainer may ask a hub for anything: the model folder is all there is.
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [self._python, child.__file__, str(path)]
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )
            try:
                yield process
            finally:
                kill(process)

    def last_words(self) -> str:
        """The last line that a child wrote."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1][:300] if lines else "no output"


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill -9 a child and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_END_S)
    if process.stdin is not None:
        process.stdin.close()


def _play_in_turn(plays: list[_Play], start: _Starter, notify: Callable[[str], None]) -> None:
    remaining = list(plays)
    while remaining:
        with start([play.begin_life() for play in remaining]) as process:
            is_first = True
            while remaining:
                play = remaining.pop(0)
                notify(play.case.name)
                if not _came_to_its_end(play, process, start, is_first=is_first):
                    break
                is_first = False


def _came_to_its_end(play: _Play, process: subprocess.Popen[bytes], start: _Starter, *, is_first: bool) -> bool:
    """Wait for the end of a case, which may be the first of its child. False if the child cannot go on with the next
    one."""
    begun, was_reached = time.monotonic(), False
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
            begun, was_reached = time.monotonic(), True
        if time.monotonic() - begun > (patience_s if was_reached else _START_S):
            play.stop(f"it had not come to its end after {patience_s:g} s")
            return False
        time.sleep(_POLL_S)
    return True


def _play_twice(play: _Play, start: _Starter) -> None:
    """Kill the first life once it has reported its steps; let the second come to its end."""
    steps = play.case.scenario.kill_at_step or 0
    deadline = time.monotonic() + _START_S + play.case.deadline_s
    with start([play.begin_life()]) as process:
        while process.poll() is None and time.monotonic() < deadline and not play.has_ended():
            if any(step >= steps for _, step in play.observation().steps):
                break
            time.sleep(_POLL_S)
    if play.has_ended():
        return
    with start([play.begin_life()]) as process:
        _came_to_its_end(play, process, start, is_first=True)
