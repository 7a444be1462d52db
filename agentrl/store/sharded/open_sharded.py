"""Makes a run's store over several databases. Never knows a call of the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from agentrl.errors import StoreError
from agentrl.store.databases.database import Database
from agentrl.store.databases.open_store import connect, part, remove
from agentrl.store.schema import FIRST_META
from agentrl.store.sharded.placement import spaced
from agentrl.store.sharded.store import ShardedStore


def made(path: Path, config_json: str, urls: Sequence[str], clock: Callable[[], float]) -> ShardedStore:
    """A new store in the databases at `urls`; the first is the control store. If one of them cannot be had, nothing is
    left in the others. Raises as `RunStore.create`."""
    dbs: list[Database] = []
    try:
        for shard, url in enumerate(urls):
            dbs.append(connect(part(path, shard), clock=clock, create=True, url=url))
        for shard, db in enumerate(dbs):
            db.prepare(create=True, first=_first(db, config_json, shard, len(urls)))
    except BaseException:
        with suppress(StoreError):
            remove(part(path, 0))
        for shard, db in enumerate(dbs):
            db.close()
            part(path, shard).unlink(missing_ok=True)
        raise
    return ShardedStore(dbs)


def _first(db: Database, config_json: str, shard: int, n: int) -> Callable[[], object]:
    def first() -> None:
        db.execute(FIRST_META, (config_json,))
        spaced(db, shard, n)

    return first
