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
    part_checks: tuple[Callable[[], PartCheck], ...] = (
        _python,
        _cpu,
        _gpu,
        _torch,
        _bytecode,
        bubblewrap,
        _docker,
        _vllm,
    )
    return [check_part() for check_part in part_checks]


def _python() -> PartCheck:
    python_version = ".".join(map(str, sys.version_info[:3]))
    return PartCheck("python", sys.version_info >= (3, 11), python_version, "install Python 3.11 or newer", needed=True)


def _cpu() -> PartCheck:
    core_count = cores()
    return PartCheck("cpu", core_count >= 2, f"{core_count} cores", "the engine and the learner want a core each")


def _gpu() -> PartCheck:
    gpu_lines = _output(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    install_hint = "none is needed: engine.kind = 'embedded' runs on the CPU"
    return PartCheck("gpu", bool(gpu_lines), gpu_lines or "none", "" if gpu_lines else install_hint)


def _torch() -> PartCheck:
    # Found without an import, which takes seconds and, where the installation is broken, ends this process instead of
    # naming the part.
    if importlib.util.find_spec("torch") is None:
        return PartCheck("torch", False, "not installed", _INSTALL, needed=True)
    from importlib.metadata import version

    return PartCheck("torch", True, version("torch"), needed=True)


def _bytecode() -> PartCheck:
    torch_spec = importlib.util.find_spec("torch")
    is_kept = (
        torch_spec is not None and torch_spec.origin is not None and Path(cache_from_source(torch_spec.origin)).exists()
    )
    if is_kept or torch_spec is None or not sys.dont_write_bytecode:
        return PartCheck("bytecode", True, "kept" if is_kept else "is kept from the first start on")
    cache_hint = "each process of a run compiles torch anew when it starts: unset PYTHONDONTWRITEBYTECODE"
    return PartCheck("bytecode", False, "is thrown away", cache_hint)


def bubblewrap() -> PartCheck:
    install_hint = (
        "install the package bubblewrap and allow user namespaces, or use sandbox = 'local-unsafe' at your own risk"
    )
    if not is_linux():
        # Nobody can install it there, so nothing waits for it.
        return PartCheck("bubblewrap", False, "needs Linux", "use sandbox = 'docker', the default here")
    if shutil.which("bwrap") is None:
        return PartCheck("bubblewrap", False, "not installed", install_hint, needed=True)
    has_namespaces = has_user_namespaces()
    bwrap_version = _output(["bwrap", "--version"]) or "?"
    return PartCheck(
        "bubblewrap",
        has_namespaces,
        bwrap_version if has_namespaces else f"{bwrap_version}, but it cannot make a namespace",
        install_hint,
        needed=True,
    )


def _docker() -> PartCheck:
    server_version = _output(["docker", "version", "--format", "{{.Server.Version}}"])
    install_hint = f"optional, for sandbox = 'docker': start a docker engine, and {install_command('docker')}"
    return PartCheck(
        "docker",
        bool(server_version),
        f"engine {server_version}" if server_version else "no engine answers",
        "" if server_version else install_hint,
    )


def _vllm() -> PartCheck:
    try:
        vllm_build = find_build()
    except UsageError as error:
        return PartCheck("vllm", False, "not found", f"optional, for engine.kind = 'vllm': {error}")
    build_kind = "CPU build" if vllm_build.cpu else "CUDA build"
    return PartCheck("vllm", True, f"{vllm_build.version} ({build_kind})")


def _output(argv: list[str]) -> str:
    """A command's stripped output, empty if the command fails or is missing."""
    try:
        completed_process = subprocess.run(argv, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return completed_process.stdout.strip() if completed_process.returncode == 0 else ""
