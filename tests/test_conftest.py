"""The rule about missing parts, and what a killed pytest leaves: in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from descriptors import readable

pytest_plugins = ["pytester"]

DEADLINE_S = 300.0
CONFTEST = (Path(__file__).parent / "conftest.py").read_text()
PROBES = "\nPARTS.update(docker=lambda: 'no engine', gpu=lambda: 'no device', compiler=lambda: None)\n"


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makeconftest(CONFTEST + PROBES)
    pytester.makeini("[pytest]\naddopts = -ra --strict-markers\nmarkers =\n  docker\n  gpu\n  compiler\n")
    pytester.makepyfile("""
        import pytest

        @pytest.mark.docker
        def test_docker(): pass

        @pytest.mark.gpu
        def test_gpu(): pass

        @pytest.mark.compiler
        def test_compiler(): pass

        def test_plain(): pass
    """)
    return pytester


def test_a_missing_part_skips_with_its_reason(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGENTRL_REQUIRE", raising=False)
    result = suite.runpytest_inprocess()
    result.assert_outcomes(passed=2, skipped=2)
    result.stdout.fnmatch_lines(["not run: tests marked docker (no engine)", "*no docker: no engine*"])


def test_all_fails_for_a_missing_part_but_only_names_the_gpu(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTRL_REQUIRE", "all")
    result = suite.runpytest_inprocess()
    result.assert_outcomes(passed=2, errors=1, skipped=1)
    result.stdout.fnmatch_lines(["*AGENTRL_REQUIRE asks for docker: no engine*", "not run: tests marked gpu*"])


SKIPS = """
import pytest

{}

def test_it(): pytest.importorskip("nowhere", reason="pip install it")

@pytest.mark.xfail
def test_that_fails_as_it_must(): assert False
"""


@pytest.mark.medium
@pytest.mark.parametrize(
    ("first", "found"),
    [("", {"failed": 1, "xfailed": 1}), ("pytest.importorskip('nowhere', reason='pip install it')", {"errors": 1})],
)
def test_under_all_nothing_skips_itself(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, first: str, found: dict[str, int]
) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(SKIPS.format(first))
    monkeypatch.setenv("AGENTRL_REQUIRE", "all")
    for args in ((), ("-n", "1")):
        result = pytester.runpytest_subprocess(*args)
        result.assert_outcomes(**found)
        result.stdout.fnmatch_lines(["*AGENTRL_REQUIRE asks for all, and this was not run: *pip install it"])
    monkeypatch.setenv("AGENTRL_REQUIRE", "compiler")
    result = pytester.runpytest_subprocess()
    assert result.ret in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)


def test_an_unknown_part_is_refused(suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_REQUIRE", "dokcer")
    result = suite.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*AGENTRL_REQUIRE=dokcer*not among all, bubblewrap, docker*"])


HANGING = """
import os, subprocess, sys, time

DETACHED = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=s.DEVNULL, start_new_session=True).pid)"

def test_that_hangs():
    child = subprocess.Popen(["sleep", "600"])
    orphan = subprocess.run([sys.executable, "-c", DETACHED], stdout=subprocess.PIPE, text=True)
    with open("started", "w") as told:
        print(os.getpid(), child.pid, orphan.stdout.strip(), file=told, flush=True)
    time.sleep(600)
"""


@pytest.mark.medium
@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "with a worker"])
def test_law_4_a_killed_pytest_leaves_no_process_of_its_tests(pytester: pytest.Pytester, options: list[str]) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(HANGING)
    assert_it_ends_what_it_started_when_killed(pytester, *options)


def assert_it_ends_what_it_started_when_killed(pytester: pytest.Pytester, *options: str) -> None:
    """Its hanging test has told the three processes that have to go by writing their ids to a pipe."""
    started = pytester.path / "started"
    os.mkfifo(started)
    suite = subprocess.Popen([sys.executable, "-m", "pytest", "-q", *options], stdout=subprocess.DEVNULL)
    told = os.open(started, os.O_RDWR)  # for both, so that opening waits for nobody
    try:
        assert readable(told, DEADLINE_S), "it started nothing"
        processes = [os.pidfd_open(int(pid)) for pid in os.read(told, 4096).split()]
        assert not any(readable(process, 0.0) for process in processes)
    finally:
        suite.kill()
        suite.wait()
    assert [readable(process, DEADLINE_S) for process in processes] == [True] * 3


WITH_DOCKER = """
import os, subprocess, time
from pathlib import Path

def test_that_hangs(docker_engine):
    docker = ["docker", "--host", docker_engine]
    run = [*docker, "run", "--detach", "--network=none", "agentrl-test:1", "sleep", "600"]
    box = subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    inspect = [*docker, "inspect", "--format", "{{.State.Pid}}", box]
    process = subprocess.run(inspect, capture_output=True, text=True, check=True).stdout
    daemon = Path(docker_engine.removeprefix("unix://")).with_name("pid").read_text()
    with open("started", "w") as told:
        print(os.getpid(), daemon, process.strip(), file=told, flush=True)
    time.sleep(600)
"""


@pytest.mark.medium
@pytest.mark.docker
def test_law_4_a_killed_pytest_leaves_no_docker_engine(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(__file__).parent
    ours = f"import sys\nsys.path.insert(0, {str(folder)!r})\nfrom sandbox.conftest import docker_engine\n"
    pytester.makeconftest(CONFTEST + ours)
    pytester.makepyfile(WITH_DOCKER)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{pytester.path}/nobody.sock")  # so that it starts one of its own
    assert_it_ends_what_it_started_when_killed(pytester)
