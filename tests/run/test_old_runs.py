"""Run folders of an older version: they open, are clean, and go on.

`old_runs.tar.zst` has three folders that the commit 86cc13b of this repository wrote, of runs that were
killed in step 3 after a checkpoint of step 2: stores as SQL that sqlite3 and pg_dump wrote, configuration, checkpoint.
`file` and `server` are one run, in a file and copied to PostgreSQL; `several` had its store in three databases of
PostgreSQL. Weights are left out: those of the shipped model are in their place.
"""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import subprocess
import tarfile
import tempfile
from collections.abc import Generator
from contextlib import closing
from io import BytesIO
from pathlib import Path

import pytest
import zstandard
from store.server import Server, running

from agentrl.errors import UsageError
from agentrl.models.resolve import model_dir
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.audit import audit
from agentrl.testing.outside_audit import OutsideAuditor

from .test_run import DEADLINE_S, command

OLD = Path(__file__).parent / "old_runs.tar.zst"
FILE, *SERVERS = ["file", pytest.param("server", marks=pytest.mark.postgres)]
STEPS = 6


@pytest.fixture(scope="module")
def server() -> Generator[Server]:
    with tempfile.TemporaryDirectory(prefix="agentrl-pg-") as folder, running(Path(folder)) as server:
        yield server


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> RunDir:
    """The run folder of the parameter's name as the older version left it."""
    with tarfile.open(fileobj=BytesIO(zstandard.decompress(OLD.read_bytes(), 1 << 24))) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / request.param
    (folder / "logs").mkdir()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    shutil.copy(model_dir("agentrl/tiny-coder") / "model.safetensors", checkpoint)
    for dump in sorted(folder.glob("store*.sql")):
        place, sql = dump.with_suffix(""), dump.read_text()
        if place.suffix == ".sqlite":
            with closing(sqlite3.connect(place)) as db:
                db.executescript(sql)
        else:
            _restore(request.getfixturevalue("server"), place, sql)
        dump.unlink()
    return RunDir(folder)


def _restore(server: Server, place: Path, sql: str) -> None:
    import psycopg

    (old,) = set(re.findall(r"CREATE SCHEMA (\w+);", sql))
    schema = f"{old}_{place.parent.parent.name}"  # each test has its own
    with psycopg.connect(server.url, autocommit=True) as database:
        database.execute(sql.replace(old, schema).encode())
    place.write_text(json.dumps({"url": server.url, "schema": schema}))


def clean(run: RunDir) -> None:
    with RunStore.read(run.store_path) as store:
        assert audit(store, run.checkpoints).violations == []
    assert OutsideAuditor(run.store_path).look() == []


@pytest.mark.parametrize("run", [FILE, *SERVERS], indirect=True)
def test_an_old_store_opens_and_is_clean(run: RunDir) -> None:
    with RunStore.open(run.store_path) as store:
        assert {step: len(store.lineage(step)) for step in (1, 2, 3)} == {1: 4, 2: 4, 3: 4}
        assert store.meta("phase") == "train" and run.config().train.steps == STEPS
        assert [len(one.turns) for one in store.trajectories("train")] == [6] * 12 + [4] * 4, "ended, and under way"
    clean(run)


@pytest.mark.postgres
@pytest.mark.parametrize("run", ["several"], indirect=True)
def test_a_store_in_several_databases_is_refused_and_gathered_by_what_the_refusal_says(run: RunDir) -> None:
    for opens in (RunStore.open, RunStore.read):
        with pytest.raises(UsageError, match="in 3 databases") as refused:
            opens(run.store_path)
    found = re.search(r"agentrl (store copy .+ --to sqlite)", str(refused.value))
    assert found is not None and "\n" not in str(refused.value)
    subprocess.run(command(*found[1].split()), check=True, capture_output=True, timeout=DEADLINE_S)
    with RunStore.open(run.store_path) as store:
        assert {step: len(store.lineage(step)) for step in (1, 2, 3)} == {1: 4, 2: 4, 3: 4}
        assert run.config().cluster.store is not None, "the settings name the first database: the folder decides"
    clean(run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(FILE, marks=pytest.mark.long),
        *SERVERS,
        pytest.param("several", marks=[pytest.mark.postgres, pytest.mark.long]),
    ],
    indirect=True,
)
def test_an_old_run_goes_on_and_ends_clean(run: RunDir) -> None:
    if (run.path / "store.1.address").exists():
        gathers = command("store", "copy", run.path, "--to", "sqlite")
        subprocess.run(gathers, check=True, capture_output=True, timeout=DEADLINE_S)
    again = subprocess.run(
        command("train", "--resume", run.path), capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert again.returncode == 0, again.stdout + again.stderr
    with RunStore.read(run.store_path) as store:
        assert sorted(store.steps_trained()) == list(range(1, STEPS + 1))
    clean(run)
    assert OutsideAuditor(run.store_path).look(ended=True) == []
