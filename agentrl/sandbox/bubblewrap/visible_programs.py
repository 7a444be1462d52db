"""The programs of this machine that a box without an image sees: /usr without the things put there for its users.

Hidden are /usr/src, /usr/local (but for the interpreter, if that is where the first `python3` is) and the packages of
environments and tools, in which solutions can be read. If the kernel allows it, a box sees /usr through an
overlay of its own: the files are the same, but locks and watches on them meet nobody else. Knows nothing of boxes.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final

USR: Final = Path("/usr")
_GROUPS: Final = ("agentrl.environments", "agentrl.tools")
_MS_RDONLY, _MS_NOSUID, _MS_NODEV = 1, 2, 4


def hidden(usr: Path = USR, packages: Iterable[Path] | None = None) -> list[Path]:
    """The paths below `usr` that no box sees."""
    found = [usr / "src"]
    local, kept = usr / "local", _interpreter(usr)
    if not kept:
        found.append(local)
    else:
        folders = {folder for path in kept for folder in path.parents if folder.is_relative_to(local)}
        found += [each for folder in folders for each in folder.iterdir() if each not in kept and each not in folders]
        found += [path / name for path in kept for name in ("site-packages", "dist-packages")]
    found += [path for path in (_packages() if packages is None else packages) if path.is_relative_to(usr)]
    there = sorted(path for path in found if path.exists())
    return [path for path in there if not any(other in there for other in path.parents)]


def _interpreter(usr: Path) -> set[Path]:
    """The paths below `usr/local` that `python3` needs, if that is where it is."""
    binaries = usr / "local" / "bin"
    program = (binaries / "python3").resolve()
    if not program.is_file() or not program.is_relative_to(usr / "local"):
        return set()
    library = usr / "local" / "lib"
    names = [binaries / name for name in ("python", "python3", program.name)]
    return {program, *(name for name in names if name.exists()), library / program.name, *library.glob("libpython3*")}


def _packages() -> list[Path]:
    """Where agentrl, and the packages that offer environments or tools, are installed."""
    names = {"agentrl"}
    for group in _GROUPS:
        names |= {
            each.value.partition(":")[0].partition(".")[0] for each in importlib.metadata.entry_points(group=group)
        }
    found: list[Path] = []
    for name in names:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            continue
        if spec is not None:
            found += map(Path, spec.submodule_search_locations or [spec.origin or "/nonexistent"])
    return found


class Overlay:
    """Layers that show `usr` without some paths. `lower` is the mount's option, empty where layers cannot be made."""

    def __init__(self, mask: Path, without: Iterable[Path], usr: Path = USR) -> None:
        self.lower = "" if any(sign in str(mask) for sign in ":,\\") else f"lowerdir={mask}:{usr}"
        try:
            mask.mkdir(mode=0o755)
            for path in without:
                target = mask / path.relative_to(usr)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.mknod(target, stat.S_IFCHR)  # what hides a name in an overlay; it takes no rights to make
            for folder in mask.rglob("*/"):
                folder.chmod(0o755)
        except OSError:
            self.lower = ""

    def mount(self, target: Path) -> bool:
        """Mount it over an empty folder, as root; whether that is possible here."""
        if not self.lower:
            return False
        libc = ctypes.CDLL(None, use_errno=True)
        flags = _MS_RDONLY | _MS_NOSUID | _MS_NODEV
        return libc.mount(b"agentrl-usr", bytes(target), b"overlay", flags, self.lower.encode()) == 0
