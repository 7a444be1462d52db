"""A run's directory and its scratch space: who writes what where.

    RUN/config.json         the whole configuration, defaults included
    RUN/store.sqlite        the run store: journal, buffer, lineage, metrics
    RUN/checkpoints/        step-NNNNNN/ folders that any engine can serve
    RUN/logs/               one log a process; NAME.error holds the one line it failed with
    RUN/metrics.jsonl       every metric row, one JSON object a line
    RUN/summary.json  RUN/curves.png  RUN/transcripts.md      written at the end

Scratch (weights on their way to the engine, boxes' work folders) lies in shared memory, under a name that follows from
the run directory, so that the next start finds and removes what a killed one left.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from agentrl import config as configuration
from agentrl.config import RunConfig
from agentrl.errors import UsageError
from agentrl.store import RunStore


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run. Creating the object touches nothing."""

    path: Path

    @property
    def store_path(self) -> Path:
        return self.path / "store.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def scratch(self) -> Path:
        """Shared memory where the system has it, else its temporary folder."""
        root = Path("/dev/shm")
        if not os.access(root, os.W_OK):
            root = Path(tempfile.gettempdir())
        name = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:12]
        return root / f"agentrl-{os.getuid()}-{name}"

    @classmethod
    def create(cls, path: Path, config: RunConfig, *, overwrite: bool = False) -> RunDir:
        """A new run directory with configuration and empty store. Raises UsageError if a run is there already."""
        run = cls(path)
        if run.store_path.exists():
            if not overwrite:
                raise UsageError(f"{path} holds a run: give --resume {path}, --overwrite, or another --out")
            with run.lock():
                shutil.rmtree(path)
        elif path.exists() and any(path.iterdir()):
            raise UsageError(f"{path} is not empty and holds no run: give another --out")
        run.logs.mkdir(parents=True)
        run.checkpoints.mkdir()
        text = configuration.to_json(config)
        (path / "config.json").write_text(text)
        with RunStore.create(run.store_path, text) as store:
            store.set_meta("created_s", str(time.time()))
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run. Raises UsageError if there is none."""
        run = cls(path)
        if not run.store_path.exists():
            raise UsageError(f"{path} holds no run (no store.sqlite)")
        return run

    def config(self) -> RunConfig:
        return configuration.from_json((self.path / "config.json").read_text())

    def lock(self) -> _Lock:
        """One supervisor at a time: a context manager that raises UsageError while another holds the run."""
        return _Lock(self.path / "run.lock")

    def make_scratch(self) -> None:
        """An empty scratch space that is ours alone; what an earlier start left in it is removed."""
        self.clear_scratch()
        try:
            self.scratch.mkdir(mode=0o700)
        except FileExistsError:
            raise UsageError(f"{self.scratch} belongs to somebody else: remove it, or choose another --out") from None
        (self.scratch / "weights").mkdir()
        (self.scratch / "tmp").mkdir()

    def clear_scratch(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)


@dataclass(slots=True)
class _Lock:
    path: Path
    _file: IO[str] | None = None

    def __enter__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("w")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UsageError(f"another process is running {self.path.parent}: wait for it or stop it") from None

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
