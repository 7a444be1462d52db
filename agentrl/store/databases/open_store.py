"""Which database a run has: SQLite in a file, or PostgreSQL if the path is that of an address file.

PostgreSQL's driver is an extra, so `postgres` is imported only for runs that have one. A store in PostgreSQL belongs to
the folder that made it, wherever the folder is moved, and to no copy: a note beside the address file says where the
folder was last, since no lock in a folder keeps two copies of it from writing to the one store that both name.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import UsageError
from agentrl.host.installation import install_command
from agentrl.store.databases.database import Database
from agentrl.store.databases.sqlite import SQLite, SQLiteUpkeep

STORE = "store.sqlite"
"""The name of SQLite's file in a run's folder."""

ADDRESS = "store.address"
"""The name of the file in its place that says where the store is."""

SUFFIX = ".address"
"""What the names of address files end in."""

NOTE = "store.folder"
"""The name of the note in a run's folder."""


def note_folder(address: Path) -> None:
    """Say that the store that an address file names belongs to the folder of this file."""
    address.with_name(NOTE).write_text(f"{address.parent.resolve()}\n", encoding="utf-8")


def forget_folder(address: Path) -> None:
    """Remove the note."""
    address.with_name(NOTE).unlink(missing_ok=True)


def refuse_copy(address: Path) -> None:
    """Raises UsageError if the folder of an address file is a copy: the folder that it was copied from is still there
    and names the same store. One that was moved, or made before there were notes, is no copy."""
    try:
        original_folder = Path(address.with_name(NOTE).read_text(encoding="utf-8").strip())
        original_address = original_folder / address.name
        # The same file by two paths is no copy (a symbolic link, a mount of another name), nor is an address that was
        # given a new store since. Paths alone would refuse both.
        is_copied = not original_address.samefile(address) and original_address.read_bytes() == address.read_bytes()
    except (OSError, ValueError):
        return
    if is_copied:
        copy_command = f"agentrl store copy {address.parent} --to sqlite"
        raise UsageError(
            f"{address.parent} is a copy of {original_folder}, and both name one store: give it its own: {copy_command}"
        )


def connect(path: Path, *, clock: Callable[[], float], create: bool = False, url: str | None = None) -> Database:
    """Connect to write. With `create`, a store that is yet to be prepared; in the database at `url` if there is one.

    Raises UsageError if there is none, or if the driver is not installed, StoreError if it cannot be reached."""
    if path.suffix != SUFFIX:
        sqlite_driver = SQLite.connect(path, create=create)
        return Database(sqlite_driver, SQLiteUpkeep(sqlite_driver), clock)
    _require_driver()
    from agentrl.store.databases.postgres.address import Address
    from agentrl.store.databases.postgres.postgres import open_database

    if url is None:
        return open_database(path, Address.read(path), clock)
    if path.exists():
        raise UsageError(f"{path} names a run's store already: resume it, or choose another folder")
    address = Address.of(url, path.parent)
    database = open_database(path, address, clock)
    # After the database has answered: a wrong URL leaves no file behind that would make the folder look like a run.
    address.write(path)
    note_folder(path)
    return database


def look(path: Path, *, clock: Callable[[], float]) -> Database:
    """Connect to look: nothing is written, and no writer waits. Raises as `connect` does."""
    if path.suffix != SUFFIX:
        sqlite_driver = SQLite.look(path)
        return Database(sqlite_driver, SQLiteUpkeep(sqlite_driver), clock)
    _require_driver()
    from agentrl.store.databases.postgres.address import Address
    from agentrl.store.databases.postgres.postgres import open_database

    database = open_database(path, Address.read(path), clock, reads=True)
    try:
        database.prepare(create=False)
    except BaseException:
        database.close()
        raise
    return database


def own(path: Path) -> None:
    """Have a store for the folder that names it, which its only writer calls first. Raises UsageError if the folder is
    a copy of another that names the same store; one that was moved is noted anew."""
    if path.suffix == SUFFIX:
        refuse_copy(path)
        note_folder(path)


@contextmanager
def supervising(path: Path, *, of_copy: bool = False) -> Generator[Callable[[], None]]:
    """Be the only supervisor of a run in the block, on whatever host others are; for a file the lock in the run's
    folder is enough. It yields a check that this is still so: call it now and then. Raises UsageError, which
    names the other supervisor, or for a folder that is a copy (see `own`) unless `of_copy`, StoreAway; the look raises
    RunFailed."""
    if path.suffix != SUFFIX:
        yield lambda: None
        return
    if not of_copy:
        refuse_copy(path)
    _require_driver()
    from agentrl.store.databases.postgres.address import Address
    from agentrl.store.databases.postgres.supervisor_lock import Supervision

    supervision = Supervision(path, Address.read(path))
    supervision.take()
    try:
        yield supervision.check
    finally:
        supervision.close()


def remove(path: Path) -> None:
    """Remove the tables that a store's address file names, for good; nothing for a file of SQLite. Raises UsageError if
    they are those of another folder, see `own`, or somebody supervises their run."""
    if path.suffix != SUFFIX:
        return
    with supervising(path):
        # Under the lock of a supervisor, and the note first. If this dies before the tables are dropped, the address
        # file is still there and the command can be given again.
        forget_folder(path)
        from agentrl.store.databases.postgres.address import Address
        from agentrl.store.databases.postgres.postgres import drop_schema

        if path.exists():
            drop_schema(path, Address.read(path))


def _require_driver() -> None:
    try:
        import psycopg  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise UsageError(f"a store in PostgreSQL needs its driver ({error}): {install_command('postgres')}") from None
