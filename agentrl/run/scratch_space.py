"""The scratch space of a run: weights on their way to the engine, and the work folders of boxes.

It lies in shared memory, on Ray in the run's folder, or in the `scratch_dir` of the configuration, under a name derived
from the run directory. It is removed when the supervisor ends, however that ends: by a janitor, which holds the run's
lock until all processes of the run are gone, so that the next start finds nothing of the last one. If the janitor is
killed too, the next run on the machine removes the rest.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import ConfigError, UsageError
from agentrl.host.janitor import Janitor, is_dead, label
from agentrl.run.run_folder import LOCK, RunDir, scratch_prefix

_PATIENCE_S = 8.0  # time for children to end by themselves after their lifeline ended
_OWNER = "owner"  # a file in scratch: the supervisor's label and the run's path


class ScratchSpace:
    """Makes and removes the folder at `RunDir.scratch`."""

    def __init__(self, run: RunDir) -> None:
        self._run, self.path = run, run.scratch

    @contextmanager
    def owned(self, lock: int) -> Generator[Mapping[str, str]]:
        """The scratch space of the process that holds the run's `lock`. When it is dead, processes with the yielded
        variable in their environment may end by themselves; after a grace period they are killed."""
        # Other runs' leftovers too: shared memory is the machine's RAM, and a run that was killed together with its
        # janitor may never be started again.
        for leftover in self.path.parent.glob(f"{scratch_prefix()}*"):
            _reap(leftover)
        free_command, variables = self._frees_engines()
        # Before anything is made: a supervisor that is killed in the next line already has somebody who cleans up.
        janitor = Janitor(
            self.path, patience_s=_PATIENCE_S, keep_open=[lock], remover=free_command, variables=variables
        )
        try:
            self.make()
            yield janitor.mark
        finally:
            shutil.rmtree(self.path, ignore_errors=True)
            janitor.close()

    def _frees_engines(self) -> tuple[Sequence[str], Mapping[str, str]]:
        """The command, and its variables, that frees engines of somebody else which the run leaves paused."""
        engine_settings = self._run.config().engine
        if not engine_settings.urls:
            return (), {}
        key_name = engine_settings.api_key_env
        key_variables = {key_name: os.environ[key_name]} if key_name and key_name in os.environ else {}
        return [
            sys.executable,
            "-m",
            "agentrl.run.children.attached_engines",
            str(self._run.path.resolve()),
        ], key_variables

    def make(self) -> None:
        """Make an empty scratch space that is ours alone; files of an earlier start are removed."""
        self.clear()
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            raise UsageError(f"{self.path} belongs to somebody else: remove it, or choose another --out") from None
        except OSError as error:
            correction = f"no folder can be made there ({error.strerror}): name one that is there and can be written to"
            raise ConfigError("scratch_dir", str(self.path.parent), correction) from error
        (self.path / _OWNER).write_text(f"{label()}\n{self._run.path.resolve()}")
        self._run.locks.mkdir()
        (self.path / "weights").mkdir()
        (self.path / "tmp").mkdir()

    def clear(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _reap(scratch: Path) -> None:
    """Remove scratch without an owner: its supervisor is dead, and nobody holds its run's lock (a working janitor or a
    next supervisor would hold it). The lock is held meanwhile, so that no supervisor starts."""
    try:
        scratch_stat = scratch.lstat()
        if not stat.S_ISDIR(scratch_stat.st_mode) or scratch_stat.st_uid != os.getuid() or scratch_stat.st_mode & 0o077:
            return  # somebody else's: nothing in it is opened, a pipe would hold us for ever
        owner_label, _, run_path = (scratch / _OWNER).read_text().partition("\n")
    except OSError:
        return
    if not is_dead(owner_label):
        return
    try:
        with (Path(run_path) / LOCK).open("r+") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Janitor(scratch, keep_open=[lock_file.fileno()]).close()
    except FileNotFoundError:  # the run was removed
        Janitor(scratch).close()
    except OSError:  # another process holds it, or we may not open it
        return
