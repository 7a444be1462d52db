"""Counts what this process holds: child processes, descriptors, threads, temporary files. For checks; Linux only."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Held:
    """Names of what is held; equal names are counted."""

    processes: Counter[str]
    descriptors: Counter[str]
    threads: Counter[str]
    files: Counter[str]


def can_measure() -> bool:
    return Path("/proc/self/fd").is_dir()


def measure(folder: Path) -> Held:
    """What this process holds now; `folder` is where its temporary files go."""
    return Held(Counter(_children()), Counter(_descriptors()), Counter(_threads()), Counter(_files(folder)))


def left_since(before: Held, folder: Path, *, patience_s: float) -> list[str]:
    """Names that are held now and were not before, save those that go by themselves within `patience_s`."""
    until = time.monotonic() + patience_s
    while True:
        now = measure(folder)
        left = [
            f"{kind} {name}"
            for kind, one, two in (
                ("process", before.processes, now.processes),
                ("descriptor", before.descriptors, now.descriptors),
                ("thread", before.threads, now.threads),
                ("file", before.files, now.files),
            )
            for name in (two - one).elements()
        ]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.02)


def _children() -> Iterable[str]:
    parent = str(os.getpid())
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name, _, rest = (entry / "stat").read_text().rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        if rest.split()[1] == parent:
            yield f"{entry.name} ({name.partition('(')[2]})"


def _descriptors() -> Iterable[str]:
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        yield target.partition(":")[0] if ":[" in target else target


def _threads() -> Iterable[str]:
    """trio keeps idle worker threads for some seconds: those are its own."""
    return (thread.name for thread in threading.enumerate() if not thread.name.lower().startswith("trio"))


def _files(folder: Path) -> Iterable[str]:
    return (str(path) for path in folder.rglob("*"))
