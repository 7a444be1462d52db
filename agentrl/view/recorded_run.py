"""The run that `agentrl view --demo` shows: recorded once (`make view-demo`), shipped compressed beside the page.

`python -m agentrl.view.recorded_run RUN` packs a run's folder: what the page reads of it, without what belongs to the
machine that trained it. Of its configuration only settings that differ from the defaults are packed, so that the file
stays readable when a key goes.
"""

from __future__ import annotations

import io
import sqlite3
import sys
import tarfile
import tempfile
from collections.abc import Generator
from contextlib import closing, contextmanager
from importlib import resources
from pathlib import Path

import zstandard

from agentrl.config import to_json
from agentrl.host.janitor import OwnedFolder
from agentrl.models.resolve import model_dir
from agentrl.run.run_folder import RunDir

_FILE = "recorded_run.tar.zst"
# A list of what stays and not of what goes: a key that is added later may hold paths or names of a machine, and would
# be published.
_KEPT = "('config', 'created_s', 'phase', 'attempt', 'next_task', 'train_started_s', 'train_ended_s', 'model_params')"


@contextmanager
def recorded_run() -> Generator[Path]:
    """The folder of the recorded run, which is removed after the block."""
    packed = (resources.files("agentrl.view") / _FILE).read_bytes()
    with closing(OwnedFolder(prefer_memory=False)) as owner:
        with tarfile.open(fileobj=io.BytesIO(zstandard.decompress(packed))) as files:
            # `filter="data"` although the archive is ours: it refuses links and paths outside the folder, and costs
            # nothing.
            files.extractall(owner.path / "demo", filter="data")
        yield owner.path / "demo"


def pack(run: RunDir, out: Path) -> None:
    """Write what a page shows of a run in a file of SQLite into one file."""
    with tempfile.TemporaryDirectory() as folder:
        store, config = Path(folder) / "store.sqlite", Path(folder) / "config.json"
        config.write_text(to_json(run.config(), defaults=False))
        with closing(sqlite3.connect(run.store_path)) as recorded, closing(sqlite3.connect(store)) as copy:
            # SQLite's own copy, not one of the file: what the write-ahead log still has would be missing.
            recorded.backup(copy)
            copy.execute("UPDATE versions SET path = NULL")
            copy.execute("UPDATE checkpoints SET path = ''")
            copy.execute("DELETE FROM leases")
            copy.execute("DELETE FROM metrics WHERE kind <> 'step'")
            copy.execute(f"DELETE FROM meta WHERE key NOT IN {_KEPT}")
            copy.execute("UPDATE meta SET value = ? WHERE key = 'config'", (config.read_text(),))
            copy.execute("DELETE FROM experts")
            copy.commit()
            # Out of WAL, so that the copy is one file, which opens in a folder that cannot be written to.
            copy.execute("PRAGMA journal_mode = DELETE")
            # Deleted rows stay in the pages of the file until it is written anew: with paths in them, and as dead
            # weight.
            copy.execute("VACUUM")
        packed = io.BytesIO()
        tokenizer = model_dir(run.config().model) / "tokenizer.json"
        with tarfile.open(fileobj=packed, mode="w") as files:
            for path in (store, config, run.summary, tokenizer):
                # Without owner and time, which are those of the machine that packed it.
                entry = tarfile.TarInfo(path.name)
                content = path.read_bytes()
                entry.size = len(content)
                files.addfile(entry, io.BytesIO(content))
    out.write_bytes(zstandard.ZstdCompressor(level=22).compress(packed.getvalue()))


if __name__ == "__main__":
    pack(RunDir.open(Path(sys.argv[1])), Path(__file__).with_name(_FILE))
