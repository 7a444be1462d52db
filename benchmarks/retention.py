"""What retention costs a store in PostgreSQL, and how much space it gives back: parts dropped, beside rows deleted.

    agentrl bench retention [--episodes 100000] [--turns 2] [--bytes 4400] [--sample 0.02]

Fills a store with trained episodes whose tokens are random bytes, then drops all but the sample: once as the store does
(it moves what is kept out of each part and drops the part), once row by row, with the VACUUM that gives the space to
later rows. CPU is the server's; WAL is what it logs, a replica receives and a backup keeps. The server is started in a
temporary folder, with its disk waited for (fsync). Prints the table of postgres.md.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import postgres as journal
import psycopg

from agentrl.store import RunStore
from agentrl.store.databases.open_store import ADDRESS, remove
from agentrl.store.databases.upkeep import Upkeep

GROUP = 8  # episodes
_STEPS = 100  # in which the groups were trained, so that groups of one age lie together


def fill(store: RunStore, url: str, *, episodes: int, turns: int, size: int) -> None:
    """Trained episodes, written by the server itself."""
    db: Any = store._db
    with db.write():
        db.driver.partitions.room(episodes * turns)
    noise = "SELECT string_agg(sha512((t.id * 1000 + n)::text::bytea), NULL) FROM generate_series(1, %s / 64) n"
    with psycopg.connect(url) as plain:
        plain.execute(f"SET search_path TO {db.driver.session.schema}".encode())
        plain.execute("SET session_replication_role = replica")  # no triggers: they count what is written, row by row
        for statement, arguments in (
            (
                "INSERT INTO groups (id, purpose, task, size, state, started_step, admitted_s, taken_step)"
                " SELECT g, 'train', '{}', %s, 'trained', 0, 0, g * %s / %s FROM generate_series(1, %s) g",
                (GROUP, _STEPS, episodes // GROUP, episodes // GROUP),
            ),
            (
                "INSERT INTO episodes (id, group_id, member, evaluation, state, stop_reason, outcome)"
                " SELECT (g.id - 1) * %s + m + 1, g.id, m, 0, 'finished', 'done', 1 FROM groups g,"
                " generate_series(0, %s - 1) m",
                (GROUP, GROUP),
            ),
            (
                "INSERT INTO turns (id, episode_id, trial, idx, role, learns, finish, text, spans, n_prompt, n_tokens,"
                " started_s, ended_s) SELECT (e.id - 1) * %s + i + 1, e.id, 0, i, 'policy', 1, 'stop', %s,"
                " '[[1,0,600]]', 150, 600, 0, 0 FROM episodes e, generate_series(0, %s - 1) i ORDER BY e.id, i",
                (turns, b"x" * 1800, turns),
            ),
            (f"INSERT INTO tokens SELECT t.id, ({noise}) FROM turns t ORDER BY t.id", (size,)),
        ):
            plain.execute(statement.encode(), arguments)
    with psycopg.connect(url, autocommit=True) as plain:
        plain.execute("VACUUM ANALYZE")  # as it does by itself in a store that is that old
        plain.execute("CHECKPOINT")


def rows_deleted(store: RunStore, url: str, sample: float) -> None:
    """Retention as it is in a file: row by row; then the rows' space is free."""
    db: Any = store._db
    db.upkeep.forget = lambda groups: Upkeep.forget(db.upkeep, groups)
    store.lineage.retain(_STEPS, keep_steps=0, keep_sample=sample)
    with psycopg.connect(url, autocommit=True) as plain:
        plain.execute(f"VACUUM {db.driver.session.schema}.tokens".encode())


def parts_dropped(store: RunStore, url: str, sample: float) -> None:
    store.lineage.retain(_STEPS, keep_steps=0, keep_sample=sample)


def measured(way: Callable[[RunStore, str, float], None], url: str, pid: int, folder: Path, chosen: Any) -> str:
    with RunStore.create(folder / ADDRESS, "{}", url=url) as store:
        fill(store, url, episodes=chosen.episodes, turns=chosen.turns, size=chosen.bytes)
        before, wal, cpu, began = size_of(url), journal.written(url), journal.server_s(pid), time.perf_counter()
        way(store, url, chosen.sample)
        took, cpu = time.perf_counter() - began, journal.server_s(pid) - cpu
        with psycopg.connect(url, autocommit=True) as plain:
            plain.execute("CHECKPOINT")
        wal, after = journal.written(url) - wal, size_of(url)
        with store._db.read():
            ((kept,),) = store._db.rows("SELECT COUNT(*) FROM tokens")
    remove(folder / ADDRESS)
    (folder / ADDRESS).unlink()
    said = f"{took:.1f} | {cpu:.1f} | {wal / 2**20:.0f} | {before / 2**20:.0f} | {after / 2**20:.0f} | {kept:,}"
    return f"| {way.__name__.replace('_', ' ')} | {said} |"


def size_of(url: str) -> int:
    """Bytes of all tables and indexes of the database."""
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT pg_database_size(current_database())").fetchone()
    assert row is not None
    return int(row[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=2, help="of each episode")
    parser.add_argument("--bytes", type=int, default=4400, help="of the packed tokens of a turn")
    parser.add_argument("--sample", type=float, default=0.02, help="of groups, kept")
    chosen = parser.parse_args()
    print("| way | seconds | server CPU, s | WAL, MiB | before, MiB | after, MiB | turns with tokens after |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name, journal.server_at(None, Path(name)) as (url, pid):
        assert pid is not None
        for way in (parts_dropped, rows_deleted):
            print(measured(way, url, pid, Path(name), chosen), flush=True)


if __name__ == "__main__":
    main()
