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
    packed_bytes = (resources.files("agentrl.view") / _FILE).read_bytes()
    with closing(OwnedFolder(prefer_memory=False)) as demo_folder:
        with tarfile.open(fileobj=io.BytesIO(zstandard.decompress(packed_bytes))) as archive:
            # `filter="data"` although the archive is ours: it refuses links and paths outside the folder, and costs
            # nothing.
            archive.extractall(demo_folder.path / "demo", filter="data")
        yield demo_folder.path / "demo"


def pack(run: RunDir, out: Path) -> None:
    """Write what a page shows of a run in a file of SQLite into one file."""
    with tempfile.TemporaryDirectory() as scratch_folder:
        store_path, config_path = Path(scratch_folder) / "store.sqlite", Path(scratch_folder) / "config.json"
        config_path.write_text(to_json(run.config(), defaults=False))
        with (
            closing(sqlite3.connect(run.store_path)) as recorded_store,
            closing(sqlite3.connect(store_path)) as copied_store,
        ):
            # SQLite's own copy, not one of the file: what the write-ahead log still has would be missing.
            recorded_store.backup(copied_store)
            copied_store.execute("UPDATE versions SET path = NULL")
            copied_store.execute("UPDATE checkpoints SET path = ''")
            copied_store.execute("DELETE FROM leases")
            copied_store.execute("DELETE FROM metrics WHERE kind <> 'step'")
            copied_store.execute(f"DELETE FROM meta WHERE key NOT IN {_KEPT}")
            copied_store.execute("UPDATE meta SET value = ? WHERE key = 'config'", (config_path.read_text(),))
            copied_store.execute("DELETE FROM experts")
            copied_store.commit()
            # Out of WAL, so that the copy is one file, which opens in a folder that cannot be written to.
            copied_store.execute("PRAGMA journal_mode = DELETE")
            # Deleted rows stay in the pages of the file until it is written anew: with paths in them, and as dead
            # weight.
            copied_store.execute("VACUUM")
        packed_bytes = io.BytesIO()
        tokenizer_path = model_dir(run.config().model) / "tokenizer.json"
        with tarfile.open(fileobj=packed_bytes, mode="w") as archive:
            for file_path in (store_path, config_path, run.summary, tokenizer_path):
                # Without owner and time, which are those of the machine that packed it.
                archive_entry = tarfile.TarInfo(file_path.name)
                file_bytes = file_path.read_bytes()
                archive_entry.size = len(file_bytes)
                archive.addfile(archive_entry, io.BytesIO(file_bytes))
    out.write_bytes(zstandard.ZstdCompressor(level=22).compress(packed_bytes.getvalue()))


if __name__ == "__main__":
    pack(RunDir.open(Path(sys.argv[1])), Path(__file__).with_name(_FILE))
