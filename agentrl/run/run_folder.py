"""A run's directory, which its owner alone can read: the place of every file.

    RUN/config.json         the whole configuration, defaults included
    RUN/store.sqlite        the run store: journal, buffer, lineage, metrics
    RUN/store.address       in its place: where the run store is, if PostgreSQL has it
    RUN/store.folder        beside it: where this folder was when it last had the store
    RUN/checkpoints/        step-NNNNNNNN/ folders that any engine can serve
    RUN/engines/            what each engine answered at /metrics last
    RUN/evaluation/         weights that wait to be measured, of a run with eval.engines
    RUN/logs/               one log per process; NAME.error holds the one line of its error
    RUN/tokens/STEP.jsonl   what `agentrl retrain --dump` writes there for the page of runs
    RUN/notes.json          tags and a note that somebody wrote on the page of runs
    RUN/metrics.jsonl       every metric row, one JSON object per line
    RUN/summary.json  RUN/curves.png  RUN/transcripts.md      written at the end
    RUN/summary-NNN.json    that of an earlier end, after NNN steps, of a run that goes on for longer

What lies in scratch is in `agentrl.run.scratch_space`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from agentrl import config as configuration
from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, UsageError
from agentrl.host.janitor import is_dead, label
from agentrl.host.platform_checks import memory_folder
from agentrl.store import RunStore
from agentrl.store.databases import open_store
from agentrl.store.databases.open_store import ADDRESS, STORE
from agentrl.store.run_values import CONFIG, CREATED_S

_DEAD_S, _POLL_S = 30.0, 0.05  # how long to wait for the janitor of a dead supervisor
RECORDED = "recorded"
"""The environment of a folder of `agentrl record`. Nobody can play it: its other side is a client."""
LOCKS = "locks"
LOCK = "run.lock"
_OTHERS = 0o077


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of one run. Creating the object touches nothing."""

    path: Path

    @property
    def store_path(self) -> Path:
        address_path = self.path / ADDRESS
        return address_path if address_path.exists() else self.path / STORE

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def engine_figures(self) -> Path:
        return self.path / "engines"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def notes(self) -> Path:
        return self.path / "notes.json"

    def token_dump(self, step: int) -> Path:
        """Where the page of runs looks for what a step did to each token."""
        return self.path / "tokens" / f"{step}.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def lock_path(self) -> Path:
        """The file whose lock is the run's, with the label of who took it last."""
        return self.path / LOCK

    @property
    def scratch(self) -> Path:
        """The scratch space in the run's `scratch_dir`; by default in shared memory, else in the temporary folder."""
        # Shared memory by default: a weight file is written and read once a step, by processes of one machine, and need
        # not survive them. On a disk each step would write the model to it.
        scratch_root = memory_folder()
        with suppress(UsageError):  # the run is gone: use the default place
            run_config = self.config()
            shared_folder = self.path.resolve() if run_config.cluster.on_ray else scratch_root  # nodes share no memory
            scratch_root = Path(run_config.scratch_dir or shared_folder)
        # From the run's path, so that a next start finds and clears what a killed one has left, without a file that
        # says where it was.
        folder_name = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()[:12]
        return scratch_root / f"{scratch_prefix()}{folder_name}"

    @property
    def locks(self) -> Path:
        """The folder in scratch of the locks that `agentrl.engine.weight_sync.weight_lock` takes."""
        return self.scratch / LOCKS

    @classmethod
    def create(cls, path: Path, config: RunConfig, *, overwrite: bool = False) -> RunDir:
        """A new run directory with configuration and empty store. Raises UsageError if a run is there already."""
        run_folder = cls(path)
        if run_folder.store_path.exists():
            if not overwrite:
                correction = f"give --overwrite or another --out, or continue it by agentrl train --resume {path}"
                raise UsageError(f"{path} holds a run: {correction}")
            with run_folder.lock():
                open_store.remove(run_folder.store_path)
                shutil.rmtree(path)
        # Never into a folder that holds something else, and `--overwrite` removes runs alone: a mistyped `--out` of
        # somebody's home is a message.
        elif path.is_dir() and any(folder_entry != run_folder.logs for folder_entry in path.iterdir()):
            raise UsageError(f"{path} is not empty and holds no run: give another --out")
        try:
            run_folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            close_to_others(run_folder.path)
            run_folder.logs.mkdir(exist_ok=True)
            run_folder.checkpoints.mkdir()
        except OSError as error:
            raise UsageError(f"{path} cannot be made a run's folder ({error.strerror}): give another --out") from None
        store_url = config.cluster.store
        store_path = path / (STORE if store_url is None else ADDRESS)
        try:
            with RunStore.create(store_path, configuration.to_json(config), url=store_url) as run_store:
                CREATED_S.set(run_store, time.time())
                run_folder.write_config(config, run_store)
        except BaseException:  # a database that is not there, say: the corrected command needs the folder free
            with suppress(AgentRLError):
                open_store.remove(run_folder.store_path)
            run_folder._leave_logs()
            raise
        return run_folder

    def discard(self) -> None:
        """Remove a run that never began: all but its logs, which say why; the logs too if they are empty."""
        open_store.remove(self.store_path)
        self._leave_logs()

    def _leave_logs(self) -> None:
        for folder_entry in self.path.iterdir():
            if folder_entry.is_dir() and folder_entry != self.logs:
                shutil.rmtree(folder_entry)
            elif folder_entry != self.logs:
                folder_entry.unlink()
        if not any(log_path.stat().st_size for log_path in self.logs.iterdir()):
            shutil.rmtree(self.path)

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing run. Raises UsageError if there is none."""
        run_folder = cls(path)
        if not run_folder.store_path.exists():
            raise UsageError(f"{path} holds no run (no store.sqlite or store.address): give a run directory")
        return run_folder

    def config(self) -> RunConfig:
        """The run's configuration; the store's copy if the file is gone. Raises UsageError for a broken file, or
        one of another format."""
        config_path = self.path / "config.json"
        try:
            return configuration.from_json(config_path.read_text(encoding="utf-8"), config_path)
        except FileNotFoundError:
            with RunStore.read(self.store_path) as run_store:
                return configuration.from_json(CONFIG.of(run_store.meta) or "{}", self.store_path)
        except (OSError, ValueError) as error:
            correction = "fix it, or remove it: the run store has a copy"
            raise UsageError(f"{config_path} is no configuration ({error}): {correction}") from None

    @property
    def is_recording(self) -> bool:
        """Whether the folder is that of `agentrl record`, and no run."""
        return self.config().env.id == RECORDED

    def write_config(self, config: RunConfig, store: RunStore) -> None:
        """Store `config` as the run's configuration, in its file and in its store."""
        config_text = configuration.to_json(config)
        # The store first: the file is for people and can be made again from the store, which every process reads.
        CONFIG.set(store, config_text)
        new_file = self.path / "config.json.new"
        new_file.write_text(config_text, encoding="utf-8")
        new_file.replace(self.path / "config.json")

    def lock(self, hint: str = "") -> _Lock:
        """The lock of the run's only supervisor: a context manager that yields its descriptor. Raises UsageError while
        another supervisor holds the run, with a hint how to fix that; waits for the janitor of a dead one."""
        return _Lock(self.lock_path, hint or f"wait for it, or agentrl stop {self.path}")


def scratch_prefix() -> str:
    """The prefix of the names of this user's scratch spaces."""
    return f"agentrl-{os.getuid()}-"


def close_to_others(folder: Path, *, option: str = "--out") -> None:
    """Leave a folder of transcripts and weights to its owner alone, also one that was made before: a start runs the
    code that a run's folder names. `option` is the command's for the folder, which a warning names."""
    earlier_mode = stat.S_IMODE(folder.stat().st_mode)
    if not earlier_mode & _OTHERS:
        return
    with suppress(OSError):
        folder.chmod(earlier_mode & ~_OTHERS)
    if stat.S_IMODE(folder.stat().st_mode) & _OTHERS:
        correction = f"put {option} where you can close it"
        message = f"warning: other users of this machine can read {folder} (mode {earlier_mode:o}): {correction}"
    else:
        message = f"{folder} was open to other users (mode {earlier_mode:o}): it is yours alone now"
    print(f"agentrl: {message}", file=sys.stderr)


@dataclass(slots=True)
class _Lock:
    path: Path
    hint: str
    _file: IO[str] | None = None

    def __enter__(self) -> int:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = self.path.open("a+")
        except OSError as error:
            correction = "make it yours to write to, or copy its folder to where you may"
            raise UsageError(f"{self.path} cannot be written ({error.strerror}): {correction}") from None
        deadline = time.monotonic() + _DEAD_S
        while True:
            try:
                # flock and not a file that is made with O_EXCL: the kernel gives it up with the last descriptor,
                # however its holder dies. The janitor inherits the descriptor, so the lock outlives a killed supervisor
                # for exactly as long as there is something to clean up.
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                self._file.seek(0)
                if not is_dead(self._file.read()) or time.monotonic() > deadline:
                    self._file.close()
                    raise UsageError(f"another process is running {self.path.parent}: {self.hint}") from None
                time.sleep(_POLL_S)
        close_to_others(self.path.parent)
        self._file.truncate(0)
        self._file.write(label())
        self._file.flush()
        return self._file.fileno()

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
