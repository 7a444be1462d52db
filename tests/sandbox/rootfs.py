"""A small root file system of this machine's own programs: what an image of the docker or bubblewrap backend is."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

SHELL = ("sh", "ls", "cat", "prlimit")
_OTHERS = """
bash chmod cp cut date dd df du echo env false find git grep gzip head hostname id kill ln mkdir mkfifo mknod mount mv
nice od patch printf pwd readlink rm rmdir sed seq setsid sha256sum sleep sort stat tail tar tee timeout touch tr true
truncate umount uname unshare wc xargs yes python3.11 python3
"""
PROGRAMS = (*SHELL, *_OTHERS.split())
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}


def build(root: Path, programs: Iterable[str] = PROGRAMS) -> None:
    """Copy programs, the libraries that they load, and Python's standard library, if `python3` is among them."""
    for folder in ("usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "etc", "proc", "dev", "tmp", "workspace"):
        (root / folder).mkdir(parents=True)
    for name, target in LINKS.items():
        (root / name).symlink_to(target)
    programs = list(programs)
    copied = [_copy(Path("/usr/bin") / name, root) for name in programs if (Path("/usr/bin") / name).exists()]
    if "python3" in programs:
        library = Path("/usr/lib/python3.11")
        heavy = shutil.ignore_patterns("test", "idlelib", "tkinter", "lib2to3", "ensurepip", "__pycache__", "config-*")
        shutil.copytree(library, root / library.relative_to("/"), symlinks=True, ignore=heavy)
        copied += (library / "lib-dynload").glob("*.so")
    for needed in _libraries(copied):
        _copy(needed, root)
    (root / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/tmp:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\nnogroup:x:65534:\n")
    (root / "tmp").chmod(0o1777)
    root.chmod(0o755)


def _copy(path: Path, root: Path) -> Path:
    """Copy a file to the same place below `root`, and what it links to; the real file."""
    real = path.resolve()
    target = root / ("usr" if not real.is_relative_to("/usr") else "") / real.relative_to("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy2(real, target)
    alias = root / ("usr" if not path.is_relative_to("/usr") else "") / path.relative_to("/")
    if alias != target and not alias.exists():
        alias.parent.mkdir(parents=True, exist_ok=True)
        alias.symlink_to("/" + str(target.relative_to(root)))
    return real


def _libraries(files: Iterable[Path]) -> set[Path]:
    found: set[Path] = set()
    for file in files:
        listing = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=False).stdout
        found |= {Path(word) for word in listing.split() if word.startswith("/") and not word.endswith(":")}
    return found
