"""Which runs a page shows, by id, and a read-only handle of each. Knows nothing of HTTP, and writes nothing."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from tokenizers import Tokenizer

from agentrl.config import RunConfig
from agentrl.errors import AgentRLError
from agentrl.models.resolve import model_dir
from agentrl.run.evaluation import held_out
from agentrl.run.reporting import status
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.metrics import Metric, finite

_LIVE_S, _OVER_S = 2.0, 20.0
"""How long a run's state is taken as known, of one under way and of one that is not."""
_T = TypeVar("_T")
_AWAY_S = 5.0  # for a database that does not answer


class OpenedRun:
    """One run of a page. Threads may share it. What is read of a run that goes on is at most `_LIVE_S` old."""

    def __init__(self, id: str, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self.id, self.run, self._clock = id, run, clock
        # Reentrant: answers are made of others (`state` reads `steps`, which opens the store). One lock for a run,
        # since its reads share the caches; answers of different runs do not wait for each other.
        self._lock = threading.RLock()
        self._handle: RunStore | None = None
        self._inode = 0
        self._rows: list[Metric] = []
        self._flat: list[dict[str, float | None]] = []
        self._status: tuple[float, dict[str, Any]] | None = None
        self._config: tuple[object, RunConfig] | None = None  # a mark of the file, and what it held
        self._evaluations: dict[str, held_out.EvalResult] = {}  # those that are finished
        self._seldom: dict[str, tuple[float, Any]] = {}  # until when, and what

    @contextmanager
    def store(self) -> Generator[RunStore]:
        """The run's store, to look at. A handle of a store that failed, or was replaced, is opened anew next time."""
        with self._lock:
            inode = 0
            with suppress(FileNotFoundError):  # a run may be made anew meanwhile
                # By the inode: `--overwrite` makes a new file of the same name, and the handle would go on showing
                # the old run, which has no name any more.
                inode = self.run.store_path.stat().st_ino
            if inode != self._inode:
                self._forget()
            if self._handle is None:
                self._handle, self._inode = RunStore.read(self.run.store_path, away_s=_AWAY_S), inode
            store_handle = self._handle
        try:
            yield store_handle
        except AgentRLError:
            with self._lock:
                # Not every error is the handle's: an unknown episode raises as well, and must not throw away all
                # caches. So it is tried with the cheapest question there is.
                if store_handle is self._handle and not self._answers(store_handle):
                    self._forget()
            raise

    @staticmethod
    def _answers(handle: RunStore) -> bool:
        try:
            handle.metrics.progress()
        except AgentRLError:
            return False
        return True

    def _forget(self) -> None:
        if self._handle is not None:
            with suppress(AgentRLError):
                self._handle.close()
        self._handle, self._rows, self._flat, self._status, self._evaluations = None, [], [], None, {}
        self._seldom, self._config = {}, None
        # Where `cached_property` keeps its value: a new run under this name may have another model.
        self.__dict__.pop("tokenizer", None)

    close = _forget

    def look_anew(self) -> None:
        """Drop the cached status: somebody requested something of the run, and what it does now is not what it did."""
        with self._lock:
            self._status = None

    @property
    def config(self) -> RunConfig:
        """The run's configuration as it is now: settings change while it goes on."""
        file_mark = None
        with suppress(FileNotFoundError):
            file_facts = (self.run.path / "config.json").stat()
            file_mark = file_facts.st_ino, file_facts.st_mtime_ns
        with self._lock:
            if self._config is None or self._config[0] != file_mark:
                self._config = file_mark, self.run.config()
            return self._config[1]

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the run's model, to show single tokens; None if its files are not here."""
        if (recorded_file := self.run.path / "tokenizer.json").is_file():  # a recorded run brings it
            return Tokenizer.from_file(str(recorded_file))
        for model_name in (str(self.run.path), self.config.model):
            with suppress(AgentRLError, OSError):
                return Tokenizer.from_file(str(model_dir(model_name) / "tokenizer.json"))
        return None

    def state(self) -> dict[str, Any]:
        """Return the status of the run, as `agentrl status --json` prints it."""
        with self._lock:
            if self._status is not None:
                read_s, cached_status = self._status
                if self._clock() - read_s < (_LIVE_S if is_live(cached_status) else _OVER_S):
                    return cached_status
            run_status = status.status(self.run, rows=self.steps())
            self._status = self._clock(), run_status
            return run_status

    def steps(self) -> list[Metric]:
        """The rows of the optimizer steps that count, by step. Only new ones are read, unless the run went back."""
        with self.store() as run_store, self._lock:
            # A restart may have undone steps that were read. Another attempt is the sign of it, and then all are read
            # again; otherwise a poll costs only the new rows, however long the run is.
            if self._rows and self._rows[-1].attempt != run_store.lineage.attempt:
                self._rows, self._flat = [], []
            new_rows = run_store.metrics.values("step", after=self._rows[-1].step if self._rows else -1)
            self._rows += new_rows
            self._flat += (dict(_flat(step_row.values)) for step_row in new_rows)
            return list(self._rows)

    def values(self) -> list[dict[str, float | None]]:
        """The numbers of each of `steps`; a dot goes into a table (`measures.entropy`)."""
        with self._lock:
            self.steps()
            return list(self._flat)

    def seldom(self, name: str, read: Callable[[RunStore], _T]) -> _T:
        """Return the result of `read`, which may read every episode of a large run. The result is reused under its
        `name` for fifty times as long as `read` took, so that a page that looks on costs the run little."""
        with self._lock:
            reused_until, answer = self._seldom.get(name, (0.0, None))
            if name not in self._seldom or self._clock() >= reused_until:
                began_s = self._clock()
                with self.store() as run_store:
                    answer = read(run_store)
                # 2 % of the time at most, whatever the query costs: a fixed interval would be too short for a large
                # run and needlessly long for a small one.
                self._seldom[name] = self._clock() + 50 * (self._clock() - began_s), answer
            return cast("_T", answer)

    def step_at(self, time_s: float) -> int:
        """The last step that was made by a time, in seconds since the epoch; 0 before the first."""
        step_rows = self.steps()
        position = bisect_right([step_row.time_s for step_row in step_rows], time_s)
        return step_rows[position - 1].step if position else 0

    def evaluation(self, name: str, purpose: str) -> held_out.EvalResult | None:
        """The result of one evaluation; None as long as it goes on."""
        with self._lock:
            if purpose not in self._evaluations:
                with self.store() as store:
                    eval_result = held_out.result(store, name, purpose) if held_out.finished(store, purpose) else None
                if eval_result is None:
                    return None
                self._evaluations[purpose] = eval_result
            return self._evaluations[purpose]


def is_live(state: Mapping[str, Any]) -> bool:
    """Whether somebody holds the run, by its state."""
    return state["state"] not in ("over", "not under way")


class OpenedRuns:
    """The runs in `places`, each the folder of a run or a folder of such. Those that begin later come along."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places: Final = [place.resolve() for place in places]
        self._lock = threading.Lock()
        self._known: dict[Path, OpenedRun] = {}
        self.closing = threading.Event()  # then no client gets news any more

    def all(self) -> list[OpenedRun]:
        """Every run that is there now, those that were begun last first."""
        with self._lock:
            run_paths = [run_path for place in self._places for run_path in _runs_in(place)]
            for run_path in run_paths:
                if run_path not in self._known:
                    self._known[run_path] = OpenedRun(self._free_id(run_path.name), RunDir(run_path))
            opened_runs = [self._known[run_path] for run_path in dict.fromkeys(run_paths)]
        return sorted(opened_runs, key=lambda one: _begun(one.run), reverse=True)

    def __getitem__(self, id: str) -> OpenedRun:
        """Raises KeyError for an id of no run that is there."""
        for opened_run in self.all():
            if opened_run.id == id:
                return opened_run
        raise KeyError(id)

    def _free_id(self, name: str) -> str:
        taken_ids = {opened_run.id for opened_run in self._known.values()}
        # Two folders may hold runs of the same name. An id stays with its path as long as the page is served, since
        # addresses of the page have it.
        candidates = (name if number == 1 else f"{name}~{number}" for number in range(1, len(taken_ids) + 2))
        return next(candidate for candidate in candidates if candidate not in taken_ids)

    def close(self) -> None:
        """Close every handle."""
        # Before the handles: answers that wait for news (`_changes`) end on it, and would otherwise ask a closed
        # store.
        self.closing.set()
        for opened_run in self._known.values():
            opened_run.close()


def _runs_in(place: Path) -> list[Path]:
    if RunDir(place).store_path.exists():
        return [place]
    with suppress(OSError):
        return [run_path for run_path in place.iterdir() if run_path.is_dir() and RunDir(run_path).store_path.exists()]
    return []


def _begun(run: RunDir) -> float:
    for run_file in (run.path / "config.json", run.store_path):
        with suppress(OSError):
            return run_file.stat().st_mtime
    return 0.0


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float | None]]:
    for metric_name, metric_value in values.items():
        if isinstance(metric_value, dict):
            if metric_name != "group_weights":  # by a group's number
                yield from _flat(cast("Mapping[str, Any]", metric_value), f"{prefix}{metric_name}.")
        elif isinstance(metric_value, int | float):
            yield prefix + metric_name, cast("float | None", finite(float(metric_value)))
