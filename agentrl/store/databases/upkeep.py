"""Work on a store as a whole: making, checking, copying and tidying it. Rare, and never in a turn's path."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from agentrl.store import schema
from agentrl.store.databases.driver import ChangeWatch, Driver
from agentrl.store.databases.transactions import Transactions


class Upkeep(ABC):
    """The rare calls of one database. Each is made inside a transaction, unless it says otherwise."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    # --- a new store, and whether a store is there

    def make_place(self) -> None:  # noqa: B027
        """Make what tables of a new store lie in, outside a transaction."""

    @abstractmethod
    def is_made(self) -> bool:
        """Whether the tables are there."""

    @abstractmethod
    def check(self) -> None:
        """Raise UsageError if there is no store, FormatError if it has another schema."""

    @abstractmethod
    def create_tables(self) -> None: ...

    def opened(self) -> None:  # noqa: B027
        """A store of our schema is there: see that it is used as we use it, outside a transaction."""

    # --- its rows

    def forget(self, groups: Sequence[int]) -> None:
        """Drop the large arrays of groups; `reclaim` may do so later."""
        for table_name in schema.BYTES:
            turns_of_group = "SELECT t.id FROM turns t JOIN episodes e ON e.id = t.episode_id WHERE e.group_id = ?"
            self._driver.execute_many(
                f"DELETE FROM {table_name} WHERE turn_id IN ({turns_of_group})", [(group_id,) for group_id in groups]
            )

    def reclaim(self, transactions: Transactions) -> None:  # noqa: B027
        """Give back the space of what was forgotten, outside a transaction, if the database does not by itself."""

    @abstractmethod
    def skip_numbers(self, table: str, beyond: int, n: int) -> None:
        """Leave out the next `n` numbers of a table's rows, and all up to `beyond` and `n` more."""

    @abstractmethod
    def faults(self) -> list[str]:
        """The faults that the database's own check finds in the store. The whole file is read: 600 MB take a second."""

    @abstractmethod
    def watch(self) -> ChangeWatch:
        """Watch the store for writes of all processes, on a connection of its own."""

    # --- a copy into another database

    @abstractmethod
    def tables(self) -> dict[str, tuple[str, ...]]:
        """The columns of each of the store's tables."""

    @abstractmethod
    def loosen(self) -> None:
        """Let the open transaction write rows before those that they refer to."""

    def renumber(self) -> None:  # noqa: B027
        """Let numbers of new rows go on after the highest there is, if the database does not by itself."""
