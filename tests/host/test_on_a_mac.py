"""What needs no Linux, with a Mac's answers: `tests/parts/mac/sitecustomize.py` simulates them in all Python processes
of a test. Nobody has run it on a Mac."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAC = ROOT / "tests/parts/mac"
HOME = "agentrl/host/platform_checks.py"


def on_a_mac(code: str, folder: Path, *, timeout: float = 120) -> str:
    """What a program prints; its process and all Python below it are on a Mac."""
    (folder / "on_a_mac.py").write_text(textwrap.dedent(code))
    path = os.pathsep.join([str(MAC), str(folder), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "on_a_mac"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "ON_A_MAC": str(folder / "processes")},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def agentrl(*words: object) -> str:
    """The program that runs a command line."""
    return f"import sys; sys.argv = {['agentrl', *map(str, words)]!r}; from agentrl_command import main; main()"


def test_each_question_has_a_macs_answer(tmp_path: Path) -> None:
    printed = on_a_mac(
        """
        import math, os, subprocess, sys
        from pathlib import Path
        from agentrl.host import janitor, platform_checks as home
        from agentrl.host.cores import cores, multiplies_bfloat16
        from agentrl.host.spare_cores import idle_time_s

        assert sys.platform == "darwin" and not hasattr(os, "sched_getaffinity") and not Path("/proc/self").exists()
        assert not home.is_linux() and not home.has_proc() and not home.has_user_namespaces()
        assert home.default_sandbox() == "docker" and home.loopback() == "lo0" and home.free_memory_bytes() > 0
        assert len(home.own_cores()) == os.cpu_count() and 1 <= cores() <= os.cpu_count()
        assert idle_time_s() is None and not multiplies_bfloat16()
        assert home.open_files_folder() == Path("/dev/fd") and home.process_stat(os.getpid()) == []
        assert not home.is_stopped(os.getpid())
        child = subprocess.Popen(["true"], process_group=0)
        label = janitor.label()
        assert home.process_start(child.pid) == home.process_start(os.getpid()) == "unknown"
        assert not janitor.is_dead(label) and janitor.runs_here(label) is None
        child.wait()
        assert home.process_start(child.pid) == "" and janitor.is_dead(f"{child.pid}.unknown.none.x")
        print(home.memory_folder())
        """,
        tmp_path,
    )
    assert printed.strip() == tempfile.gettempdir()


def test_a_group_of_zombies_is_no_error(tmp_path: Path) -> None:
    """macOS refuses a signal to it. A reward process that is ended right after it died would fail its episode."""
    on_a_mac(
        """
        import os, subprocess, time
        from agentrl.host.platform_checks import kill_group

        child = subprocess.Popen(["true"], process_group=0, stdout=subprocess.PIPE)
        assert child.stdout.read() == b""
        until = time.monotonic() + 60
        try:
            while time.monotonic() < until:
                os.killpg(child.pid, 0)
            raise AssertionError("it became no zombie")
        except PermissionError:
            kill_group(child.pid)
        child.wait()
        kill_group(child.pid)
        """,
        tmp_path,
    )


@pytest.mark.medium
def test_every_module_can_be_imported(tmp_path: Path) -> None:
    """But for those of packages that are not installed."""
    printed = on_a_mac(
        """
        import importlib, pkgutil
        import agentrl, agentrl_environments, agentrl_tools

        count = 0
        for package in (agentrl, agentrl_environments, agentrl_tools):
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda _: None):
                if module.name.endswith("__main__") or ".repositories." in module.name:
                    continue
                try:
                    importlib.import_module(module.name)
                except ModuleNotFoundError as error:
                    assert not error.name.startswith("agentrl"), module.name
                count += 1
        print(count)
        """,
        tmp_path,
    )
    assert int(printed) > 400


def test_doctor_asks_for_nothing_that_no_mac_has(tmp_path: Path) -> None:
    printed = on_a_mac(agentrl("doctor"), tmp_path)
    assert "needs Linux" in printed and "sandbox = 'docker'" in " ".join(printed.split())


@pytest.mark.medium
def test_an_environment_is_made_checked_and_played(tmp_path: Path) -> None:
    on_a_mac(agentrl("new", "env", "my_env"), tmp_path)
    assert (tmp_path / "my_env").is_dir()
    printed = on_a_mac(
        """
        import agentrl

        print(agentrl.check_env("agentrl/Combination-v0"))
        """,
        tmp_path,
    )
    assert "leaks: this system has no /proc" in printed


def test_commands_run_without_walls_and_a_box_of_bubblewrap_is_refused(tmp_path: Path) -> None:
    on_a_mac(
        """
        import contextlib, os
        import trio
        from agentrl.errors import SandboxUnavailable
        from agentrl.protocols import SandboxSpec
        from agentrl.sandbox import backend

        async def main():
            boxes = backend("local-unsafe")
            box = await boxes.create(SandboxSpec())
            await box.write("a.txt", b"hello")
            done = await box.exec(["cat", "a.txt"])
            assert (done.exit_code, done.stdout) == (0, b"hello"), done
            done = await box.exec(["/bin/sh", "-c", "sleep 300 >/dev/null 2>&1 & echo $!"])
            with trio.fail_after(60), contextlib.suppress(ProcessLookupError):
                while True:  # a zombie until init reaps it
                    os.kill(int(done.stdout), 0)
                    await trio.sleep(0.01)
            await box.close()
            await boxes.aclose()
            try:
                await backend("bubblewrap").create(SandboxSpec())
            except SandboxUnavailable as error:
                assert "bubblewrap needs Linux: give sandbox = 'docker'" in str(error)
            else:
                raise AssertionError("a box of bubblewrap")

        trio.run(main)
        """,
        tmp_path,
    )


@pytest.mark.slow
def test_the_demo_trains_and_the_page_shows_its_run(tmp_path: Path) -> None:
    """The locksmith, on the embedded engine, for two steps: supervisor, worker, engine and learner are all on a Mac."""
    small = ("train.steps=2", "eval.every=0", 'eval.sets=[{ name = "held_out", n = 4 }]')
    settings = [word for setting in small for word in ("--set", setting)]
    printed = on_a_mac(agentrl("demo", "--out", tmp_path / "demo", *settings), tmp_path, timeout=600)
    assert "bubblewrap: needs Linux, so the demo has no code to run" in printed
    assert (tmp_path / "demo/summary.json").is_file()
    processes = (tmp_path / "processes").read_text()
    for program in ("run.processes.child learner", "run.processes.child worker", "engine.embedded", "run.preflight"):
        assert f"-m agentrl.{program} " in processes, processes
    page = on_a_mac(
        f"""
        import json, subprocess, sys, urllib.request
        from pathlib import Path

        server = subprocess.Popen(
            [sys.executable, "-c", {agentrl("view", tmp_path / "demo", "--port", "0")!r}],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            url = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
            with urllib.request.urlopen(url, timeout=60) as answer:
                print(answer.status, len(answer.read()))
        finally:
            server.terminate()
            server.wait(60)
        """,
        tmp_path,
        timeout=180,
    )
    assert re.fullmatch(r"200 \d{4,}\n", page)


def test_the_platform_is_asked_for_in_one_place() -> None:
    asks = re.compile(r"\b(sys\.platform|platform\.system|os\.uname|sched_getaffinity|/dev/shm\")")
    # Programs inside of boxes, and the walls that only Linux has, ask the kernel themselves.
    elsewhere = ("agentrl/sandbox/bubblewrap/", "agentrl/sandbox/docker/", "agentrl/testing/sandbox/", HOME)
    files = [file for folder in ("agentrl", "environments", "tools") for file in (ROOT / folder).rglob("*.py")]
    asking = [str(file.relative_to(ROOT)) for file in files if asks.search(file.read_text())]
    assert [file for file in asking if not file.startswith(elsewhere)] == []
