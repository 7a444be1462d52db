"""What a test may need from the machine, and what becomes of it where that is missing.

A test marked with a part (`@pytest.mark.docker`) is skipped, with the reason, on a machine that lacks the part.
`AGENTRL_REQUIRE=all` (or a comma list of parts) makes it fail instead, so that a green run says that nothing was left
out. `all` stands for every part that some collected test is marked with, save `gpu`: that one is named in the closing
lines where it was not there. Under `all` a test or a file that skips itself fails as well.

What a test starts carries the mark of its pytest process (or of its worker, under xdist) and ends with it, also where
that is killed.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings

from agentrl import notices, registry
from agentrl.host.janitor import OwnedFolder

# Torch reads it as it loads. The products here are tiny: more threads wait for one another, on a busy machine for long.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def notice_board() -> None:
    """A notice is logged once in a process: each test begins with none."""
    notices.OF_PROCESS.forget()


@pytest.fixture(autouse=True)
def registrations() -> Generator[None]:
    """What a test registers ends with it: other tests of the process list all ids, and see none of its."""
    with mock.patch.dict(registry._registered):
        yield


# Property tests judge what the code does, not how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def _bubblewrap() -> str | None:
    if not shutil.which("bwrap"):
        return "bwrap is not installed"
    return _fails(["bwrap", "--unshare-all", "--ro-bind", "/", "/", "true"])


def _docker() -> str | None:
    """An engine that answers, or what the tests start one with."""
    if os.geteuid() == 0 and shutil.which("dockerd") and shutil.which("docker"):
        return None
    if not shutil.which("docker"):
        return "docker is not installed"
    return _fails(["docker", "version", "--format", "{{.Server.Version}}"])


def _postgres() -> str | None:
    from store.server import missing

    return missing() or (None if importlib.util.find_spec("psycopg") else "psycopg is not installed")


def _vllm() -> str | None:
    from agentrl.engine.vllm.launch import find_build
    from agentrl.errors import UsageError

    try:
        find_build()
    except UsageError as error:
        return str(error)
    return None


def _ray() -> str | None:
    return None if importlib.util.find_spec("ray") else "ray is not installed"


def _netns() -> str | None:
    from run.network import missing

    return missing()


def _other_user() -> str | None:
    from attacks.other_user import missing

    return missing()


def _chromium() -> str | None:
    if not shutil.which("chromium"):
        return "chromium is not installed"
    return None if importlib.util.find_spec("playwright") else "playwright is not installed"


def _axe() -> str | None:
    return None if importlib.util.find_spec("axe_playwright_python") else "axe-playwright-python is not installed"


def _gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def _compiler() -> str | None:
    name = os.environ.get("CXX", "g++")
    return None if shutil.which(name) else f"the C++ compiler {name!r} is not installed"


def _adapters() -> str | None:
    names = ("anthropic", "bfcl_eval", "datasets", "ipykernel", "minisweagent", "mlflow", "nbclient", "openai")
    names += ("openenv", "pettingzoo", "prometheus_client", "pyarrow", "pygame", "reasoning_gym", "tensorboard")
    names += ("textarena", "verifiers", "wandb")
    missing = [name for name in names if not importlib.util.find_spec(name)]
    return f"not installed: {', '.join(missing)} (make adapters)" if missing else None


def _tinker() -> str | None:
    return None if importlib.util.find_spec("tinker") else "tinker is not installed (make adapters)"


def _remote() -> str | None:
    missing = [name for name in ("swerex", "inspect_ai") if not importlib.util.find_spec(name)]
    return f"not installed: {', '.join(missing)} (make test-remote)" if missing else None


def _programs(name: str = "programs") -> str | None:
    ready = Path(__file__).parent.parent / f".venv-{name}" / ".ready"
    return None if ready.is_file() else f"not installed: .venv-{name} (make {name})"


def _programs_all() -> str | None:
    return _programs("programs-all")


def _cookbook() -> str | None:
    return _programs()


def _peers() -> str | None:
    return _programs("peers")


def _smollm2() -> str | None:
    from agentrl.models.smollm2 import absent

    names = absent()
    return f"not installed: {', '.join(names)} (make smollm2)" if names else None


def _sglang() -> str | None:
    there = Path(__file__).parents[1].joinpath("build/wheels/sglang/.ready").exists()
    return None if there else "no build/wheels/sglang with SGLang's message types (make sglang-types)"


def _templates() -> str | None:
    from templates.catalogue import missing

    return missing()


def _fails(argv: list[str]) -> str | None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return f"{argv[0]} did not answer in 120 s"
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return f"{argv[0]} does not work here: {lines[-1] if lines else f'exit code {done.returncode}'}"


PARTS: dict[str, Callable[[], str | None]] = {
    "bubblewrap": _bubblewrap,
    "docker": _docker,
    "postgres": _postgres,
    "vllm": _vllm,
    "adapters": _adapters,
    "tinker": _tinker,
    "remote": _remote,
    "programs": _programs,
    "programs_all": _programs_all,
    "cookbook": _cookbook,
    "peers": _peers,
    "smollm2": _smollm2,
    "sglang": _sglang,
    "templates": _templates,
    "ray": _ray,
    "netns": _netns,
    "other_user": _other_user,
    "compiler": _compiler,
    "axe": _axe,
    "chromium": _chromium,
    "gpu": _gpu,
}


@functools.cache
def missing(part: str) -> str | None:
    """Why `part` cannot be used on this machine; None if it can."""
    return PARTS[part]()


def required(setting: str) -> frozenset[str]:
    """The parts that must be there under this value of AGENTRL_REQUIRE. Raises UsageError for an unknown one."""
    names = {name.strip() for name in setting.split(",") if name.strip()}
    if "all" in names:
        names = (names - {"all"}) | (PARTS.keys() - {"gpu"})
    if unknown := names - PARTS.keys():
        raise pytest.UsageError(f"AGENTRL_REQUIRE={setting}: {sorted(unknown)} not among all, {', '.join(PARTS)}")
    return frozenset(names)


_required_key = pytest.StashKey[frozenset[str]]()
_ABSENT = "absent part"  # name of a report's property: (part, reason)
_ORDERLY_S = 2.0  # for servers that end by themselves when their owner is gone


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_required_key] = required(os.environ.get("AGENTRL_REQUIRE", ""))
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell; commands would inherit it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # a mask is inherited, too
    owner, patch = OwnedFolder(prefer_memory=False, patience_s=_ORDERLY_S), pytest.MonkeyPatch()
    for name, value in owner.mark.items():
        patch.setenv(name, value)
    patch.setenv("PYTHONDONTWRITEBYTECODE", "")  # else every process compiles torch and transformers for itself
    config.add_cleanup(owner.close)
    config.add_cleanup(patch.undo)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """A test that changes what Ctrl-C does changes it for the commands of every test after it: it fails itself."""
    before = signal.getsignal(signal.SIGINT)
    yield
    if signal.getsignal(signal.SIGINT) is not before:
        signal.signal(signal.SIGINT, before)
        pytest.fail("this test changed what SIGINT does, and left it so", pytrace=False)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes longest: where several workers run tests, none is left with a long file at the end."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker("slow")
        elif item.get_closest_marker("vllm"):
            item.add_marker("medium")  # each of their servers takes half a minute to start, before any test of it
    slow = Counter(worker_group(item.nodeid) for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: (worker_group(item.nodeid) != "vllm", -slow[worker_group(item.nodeid)]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Under xdist each worker gets whole groups of tests, in the order of collection."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return worker_group(nodeid)

    config.option.loadscopereorder = False
    return ByGroup(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Say how a worker of xdist died: it tells only that it is gone."""
    if error:
        try:
            code = node.gateway._io.popen.wait(10)
        except (AttributeError, subprocess.TimeoutExpired):
            return
        how = f"by signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"with exit status {code}"
        print(f"\nworker {node.gateway.id} ended {how}", flush=True)


def worker_group(nodeid: str) -> str:
    """Tests of one group run on one worker: those of a file; those of all files that share vLLM servers, Docker's or
    embedded engines."""
    shared = (part for part in ("vllm", "docker", "tests/engine/") if part in nodeid)
    return next(shared, nodeid.partition("::")[0])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for part in PARTS:
        if item.get_closest_marker(part) and (reason := missing(part)):
            item.user_properties.append((_ABSENT, (part, reason)))
            if part in item.config.stash[_required_key]:
                pytest.fail(f"AGENTRL_REQUIRE asks for {part}: {reason}", pytrace=False)
            pytest.skip(f"no {part}: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _ABSENT not in dict(report.user_properties):
        _must_not_skip(item.config, report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _must_not_skip(collector.config, report)
    return report


def _must_not_skip(config: pytest.Config, report: pytest.TestReport | pytest.CollectReport) -> None:
    """`pytest.importorskip` and its like know nothing of AGENTRL_REQUIRE."""
    if report.skipped and not hasattr(report, "wasxfail") and config.stash[_required_key] >= PARTS.keys() - {"gpu"}:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"AGENTRL_REQUIRE asks for all, and this was not run: {why}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for found in terminalreporter.stats.values() for report in found]
    named = [dict(getattr(report, "user_properties", ())).get(_ABSENT) for report in reports]
    for part, reason in sorted({tuple(one) for one in named if one}):
        terminalreporter.write_line(f"not run: tests marked {part} ({reason})")
