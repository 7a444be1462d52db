"""Whose a store in PostgreSQL is: that of the folder that made it, wherever the folder is moved, and of no copy.

Owns the note beside the address file, which says where the folder was last. No lock in a folder keeps two copies of it
from writing to the one store that both name. Never connects.
"""

from __future__ import annotations

from pathlib import Path

from agentrl.errors import UsageError

NOTE = "store.folder"
"""The name of the note in a run's folder."""


def note(address: Path) -> None:
    """Say that the store that an address file names belongs to the folder of this file."""
    address.with_name(NOTE).write_text(f"{address.parent.resolve()}\n", encoding="utf-8")


def forget(address: Path) -> None:
    """Remove the note."""
    address.with_name(NOTE).unlink(missing_ok=True)


def check(address: Path) -> None:
    """Raises UsageError if the folder of an address file is a copy: the folder that it was copied from is still there
    and names the same store. One that was moved, or made before there were notes, is no copy."""
    try:
        first = Path(address.with_name(NOTE).read_text(encoding="utf-8").strip())
        other = first / address.name
        copied = not other.samefile(address) and other.read_bytes() == address.read_bytes()
    except (OSError, ValueError):
        return
    if copied:
        mend = f"agentrl store copy {address.parent} --to sqlite"
        raise UsageError(f"{address.parent} is a copy of {first}, and both name one store: give it its own: {mend}")
