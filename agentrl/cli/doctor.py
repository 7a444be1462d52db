"""Checks what this machine has for training agents, and gives hints for missing parts."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import cache_from_source
from pathlib import Path

from agentrl.engine.vllm.launch import find_build
from agentrl.errors import UsageError
from agentrl.host.cores import cores
from agentrl.host.installation import install_command
from agentrl.host.platform_checks import has_user_namespaces, is_linux

_DEADLINE_S = 20


_CHECKOUT = (Path(__file__).parents[2] / "Makefile").is_file()
_INSTALL = "run make setup" if _CHECKOUT else install_command("train")


@dataclass(frozen=True, slots=True)
class PartCheck:
    """One part: whether it works, what was seen, a hint if it does not. `make demo` stops without a `needed` part."""

    part: str
    works: bool
    seen: str
    hint: str = ""
    needed: bool = False


def examine() -> list[PartCheck]:
    """Look at every part; each check has a deadline."""
    checks: tuple[Callable[[], PartCheck], ...] = (_python, _cpu, _gpu, _torch, _bytecode, bubblewrap, _docker, _vllm)
    return [check() for check in checks]


def _python() -> PartCheck:
    version = ".".join(map(str, sys.version_info[:3]))
    return PartCheck("python", sys.version_info >= (3, 11), version, "install Python 3.11 or newer", needed=True)


def _cpu() -> PartCheck:
    n_cores = cores()
    return PartCheck("cpu", n_cores >= 2, f"{n_cores} cores", "the engine and the learner want a core each")


def _gpu() -> PartCheck:
    seen = _output(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    hint = "none is needed: engine.kind = 'embedded' runs on the CPU"
    return PartCheck("gpu", bool(seen), seen or "none", "" if seen else hint)


def _torch() -> PartCheck:
    # Found without an import, which takes seconds and, where the installation is broken, ends this process instead of
    # naming the part.
    if importlib.util.find_spec("torch") is None:
        return PartCheck("torch", False, "not installed", _INSTALL, needed=True)
    from importlib.metadata import version

    return PartCheck("torch", True, version("torch"), needed=True)


def _bytecode() -> PartCheck:
    spec = importlib.util.find_spec("torch")
    is_kept = spec is not None and spec.origin is not None and Path(cache_from_source(spec.origin)).exists()
    if is_kept or spec is None or not sys.dont_write_bytecode:
        return PartCheck("bytecode", True, "kept" if is_kept else "is kept from the first start on")
    hint = "each process of a run compiles torch anew when it starts: unset PYTHONDONTWRITEBYTECODE"
    return PartCheck("bytecode", False, "is thrown away", hint)


def bubblewrap() -> PartCheck:
    hint = "install the package bubblewrap and allow user namespaces, or use sandbox = 'local-unsafe' at your own risk"
    if not is_linux():
        # Nobody can install it there, so nothing waits for it.
        return PartCheck("bubblewrap", False, "needs Linux", "use sandbox = 'docker', the default here")
    if shutil.which("bwrap") is None:
        return PartCheck("bubblewrap", False, "not installed", hint, needed=True)
    works = has_user_namespaces()
    seen = _output(["bwrap", "--version"]) or "?"
    return PartCheck(
        "bubblewrap", works, seen if works else f"{seen}, but it cannot make a namespace", hint, needed=True
    )


def _docker() -> PartCheck:
    seen = _output(["docker", "version", "--format", "{{.Server.Version}}"])
    hint = f"optional, for sandbox = 'docker': start a docker engine, and {install_command('docker')}"
    return PartCheck("docker", bool(seen), f"engine {seen}" if seen else "no engine answers", "" if seen else hint)


def _vllm() -> PartCheck:
    try:
        build = find_build()
    except UsageError as error:
        return PartCheck("vllm", False, "not found", f"optional, for engine.kind = 'vllm': {error}")
    kind = "CPU build" if build.cpu else "CUDA build"
    return PartCheck("vllm", True, f"{build.version} ({kind})")


def _output(argv: list[str]) -> str:
    """A command's stripped output, empty if the command fails or is missing."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
