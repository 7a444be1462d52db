"""The auditor that imports nothing of ours finds what is cut into a store, and remembers what it saw."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from agentrl.records import StopReason
from agentrl.store import RunStore
from tests.parts.chaos_run import EVERY, PARTS, plan
from tests.parts.outside_audit import OutsideAuditor

from .play import admit, play, play_all, serve


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store of four groups: two trained, one taken, one that failed."""
    path = tmp_path / "store.sqlite"
    with RunStore.create(path, "{}") as store:
        serve(store, 0)
        admit(store, limit=4, max_lag=9)
        claims = store.leases.claim("a", 8, lease_s=1e6)
        for claim in claims[:6]:
            play(store, claim)
        for claim in claims[6:]:
            play(store, claim, stop=StopReason.ENGINE_FAILED, outcome=None)
        store.buffer.take(1, 2, max_lag=1)
        store.lineage.checkpoint(1, serve(store, 1), "/checkpoints/1")
        store.buffer.take(2, 1, max_lag=1)
    return path


def cut(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


def test_a_whole_store_is_clean_and_stays_so_while_it_grows(path: Path) -> None:
    auditor = OutsideAuditor(path)
    assert auditor.look(ended=True) == []
    assert (auditor.turns, auditor.tokens, auditor.abandoned) == (16, 48, 0)
    with RunStore.open(path) as store:
        admit(store, limit=2, max_lag=9)
        play_all(store)
    assert auditor.look(ended=True) == []
    assert auditor.turns == 24


BREACHES = {
    "has no tokens": "DELETE FROM tokens WHERE turn_id = 1",
    "its row says": "UPDATE turns SET n_prompt = n_prompt + 1 WHERE id = 1",
    "its spans cover 2 of 3": "UPDATE turns SET spans = '[[1,0,2]]' WHERE id = 1",
    "leave a gap": "UPDATE turns SET spans = '[[1,1,3]]' WHERE id = 1",
    "version 99 was never minted": "UPDATE turns SET spans = '[[99,0,3]]' WHERE id = 1",
    "turns of an episode's trial are missing": "UPDATE turns SET idx = 7 WHERE id = 1",
    "in the lineage and not taken": "UPDATE episodes SET taken_step = NULL WHERE id = 1",
    "had not ended": "UPDATE episodes SET stop_reason = NULL WHERE id = 1",
    "law 3": "UPDATE episodes SET outcome = NULL WHERE id IN (1, 2)",
    "taken beyond its lag": "UPDATE lineage SET step = 9 WHERE id = 1",
    "held by nobody": "UPDATE episodes SET state = 'running', holder = 'a/1' WHERE id = 1",
}


def test_every_breach_is_found(path: Path, tmp_path: Path) -> None:
    missed = list[str]()
    for n, (what, statement) in enumerate(BREACHES.items()):
        copy = Path(shutil.copy(path, tmp_path / f"{n}.sqlite"))
        cut(copy, statement)
        if not any(what in line for line in OutsideAuditor(copy).look(ended=True)):
            missed.append(what)
    assert missed == []


def test_what_is_trained_twice_is_found(path: Path) -> None:
    cut(path, "DROP INDEX trained_exactly_once")
    with closing(sqlite3.connect(path)) as db:
        names = ", ".join(row[1] for row in db.execute("PRAGMA table_info(lineage)") if row[1] != "id")
    cut(path, f"INSERT INTO lineage ({names}) SELECT {names} FROM lineage WHERE id = 1")
    assert any("trained twice" in line for line in OutsideAuditor(path).look())


def test_it_remembers_tokens_and_fences(path: Path) -> None:
    auditor = OutsideAuditor(path)
    auditor.look()
    cut(path, "UPDATE turns SET text = 'other' WHERE id = 1", "UPDATE episodes SET fence = 0 WHERE id = 2")
    cut(
        path,
        "DELETE FROM tokens WHERE turn_id = 4",
        "DELETE FROM steps WHERE turn_id = 4",
        "DELETE FROM turns WHERE id = 4",
    )
    found = auditor.look()
    assert {"law 1: turn 1 was changed", "law 1: turn 4 was lost", "fence of episode 2 fell from 1 to 0"} <= set(found)


def test_it_loads_nothing_of_the_package_but_itself() -> None:
    code = "import sys, tests.parts.outside_audit; print([m for m in sys.modules if m.startswith('agentrl.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "agentrl.store" not in done.stdout and "agentrl.records" not in done.stdout


def test_a_plan_is_decided_by_its_seed_and_hurts_every_part() -> None:
    assert plan(30, 7) == plan(30, 7) != plan(30, 8)
    assert {(fault.kind, fault.part) for fault in plan(len(EVERY), 7)} >= {
        (kind, part) for kind in ("kill", "stop") for part in PARTS
    }
