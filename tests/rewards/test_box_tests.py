"""Tests in a box of their own: what is carried over, what a result may mean, and whose a hang is."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import marshal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio
from each_case import each_case
from trio.testing import MockClock

from agentrl.config.sections import RewardSource
from agentrl.errors import ConfigError, HostBusy, SandboxPathError, ScoreError, UsageError
from agentrl.protocols import ExecResult, SandboxSpec
from agentrl.rewards.hidden_tests import ArtifactsOf, laid_over, value_of
from agentrl.rewards.scorer import Scorer, rewarder_of
from agentrl.run import reward_services
from agentrl.sandbox.work_folder import Folder
from agentrl.store import LeaseLost, RunStore, StoreError
from agentrl.store.journal_writer import JournalWriter
from tests.rewards.conftest import run_config
from tests.rewards.test_sources import eventually
from tests.store.play import START, answer, play_all, serve, turn

TESTS = """
import unittest
from module import double

class Double(unittest.TestCase):
    def test_small(self): self.assertEqual(double(2), 4)
    def test_large(self): self.assertEqual(double(50), 100)
"""
UNITTEST = ["python3", "-B", "-m", "unittest", "-q", "hidden"]
RIGHT, HALF, WRONG = (
    b"def double(x): return 2 * x",
    b"def double(x): return x + 2",
    b"def double(x): return -1",
)


def settings(**changes: Any) -> RewardSource:
    return RewardSource(**{"source": "tests", "kind": "tests", "command": UNITTEST, **changes})


def hidden(task: Any) -> Mapping[str, bytes]:
    return {"hidden.py": TESTS.encode()}


def outside(task: Any) -> Mapping[str, bytes]:
    return {"../hidden.py": TESTS.encode()}


def worked(store: RunStore, *works: bytes | None) -> str:
    """An episode of two is played for so many turns; the id of the last one."""
    claim, _ = store.leases.claim("worker", 2, lease_s=30.0)
    store.journal.begin(claim.episode_id, claim.fence, START)
    id = ""
    for index, work in enumerate(works):
        id = f"{claim.episode_id}.0.{index}"
        store.journal.journal_turn(claim.episode_id, claim.fence, turn(index, 1))
        if work is not None:
            store.journal.keep_artifacts(claim.episode_id, claim.fence, id, {"module.py": work})
        store.journal.journal_step(claim.episode_id, claim.fence, index, answer(index))
    return id


def scorer_of(store: RunStore, **changes: Any) -> Scorer:
    own = settings(**{"retries": 0, **changes})
    desk = JournalWriter(store, inline=True)
    return Scorer(own, desk, rewarder_of(own, artifacts_of=desk.artifacts))


def always(work: dict[str, bytes]) -> ArtifactsOf:
    async def artifacts(_: str) -> dict[str, bytes]:
        return work

    return artifacts


@pytest.mark.medium
@pytest.mark.bubblewrap
async def test_each_turns_work_gets_the_share_of_hidden_tests_that_it_passes(store: RunStore, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "hidden.py").write_text(TESTS)
    worked(store, HALF, RIGHT, WRONG, b"import os; os._exit(0)", b"import time; time.sleep(3600)")
    # An attempt that a busy machine was too slow for is the host's failure, and is made again: only the box that really
    # spent its time has a value.
    scorer = scorer_of(store, files=str(tmp_path / "tests"), call_deadline_s=12.0, retries=4)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scorer.serve)
        await eventually(lambda: len(store.scores.recorded()) == 5, within_s=240)
        nursery.cancel_scope.cancel()
    assert [one.value for one in store.scores.recorded()] == [0.5, 1.0, 0.0, 0.0, 0.0]


@pytest.mark.bubblewrap
@pytest.mark.parametrize("name", ["hidden.py/module.py", "../module.py", "a\udcff.py", "a\ud800.py", "a\0"])
async def test_work_whose_names_no_box_takes_gets_nothing_and_is_no_failure(store: RunStore, name: str) -> None:
    id = worked(store, None)
    rewarder = rewarder_of(settings(call=f"{__name__}:hidden"), artifacts_of=always({name: RIGHT}))
    assert await rewarder(store.reads.trajectory(int(id.split(".")[0]))) == 0.0  # type: ignore[misc]


FORGED = b"import unittest\nclass Forged(unittest.TestCase):\n    def test_it(self): pass\n"


def unchecked(source: bytes) -> bytes:
    """Bytecode that Python never compares with its source (PEP 552)."""
    code = marshal.dumps(compile(source, "hidden.py", "exec", dont_inherit=True))
    return importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8) + code


@each_case(
    "forged",
    [
        {"hidden.py": FORGED},
        {"hidden.py": b"", "./hidden.py": FORGED},
        {"hidden.py": b"", "/workspace/hidden.py": FORGED},
        {"hidden/__init__.py": FORGED},
        {".//hidden/__init__.py": FORGED},
        {"//workspace/../workspace/hidden/__init__.py": FORGED},
        {f"hidden{importlib.machinery.EXTENSION_SUFFIXES[-1]}": FORGED},
        {f"__pycache__/hidden.{sys.implementation.cache_tag}.pyc": unchecked(FORGED)},
    ],
)
def test_nothing_of_the_work_stands_in_the_place_of_a_test(tmp_path: Path, forged: dict[str, bytes]) -> None:
    """The oracle is Python's own search for the module, in a real work folder."""
    with tempfile.TemporaryDirectory(dir=tmp_path) as name, closing(Folder(Path(name), limit=1 << 20)) as folder:
        for path, data in laid_over({"module.py": WRONG, "hidden.txt": b"", **forged}, hidden(None)).items():
            folder.write(path, data)
        assert folder.read("module.py") == WRONG and folder.read("hidden.txt") == b""
        spec = importlib.machinery.PathFinder.find_spec("hidden", [name])
        assert spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader)
        assert spec.loader.get_code("hidden") == compile(TESTS, "hidden.py", "exec", dont_inherit=True)


@each_case(
    "forged",
    [
        {"tests.py": FORGED, "tests/__init__.py": b""},
        {"tests.py": b"__path__ = ['mine']", "mine/hidden.py": FORGED},
        {"tests/__init__.py": b"__path__ = ['mine']", "mine/hidden.py": FORGED},
        {"./tests/__init__.py": b"import sys; sys.modules['tests.hidden'] = sys", "tests/other.py": b""},
    ],
)
def test_the_folder_of_a_test_leads_to_no_other_test(tmp_path: Path, forged: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as name, closing(Folder(Path(name), limit=1 << 20)) as folder:
        for path, data in laid_over({"module.py": RIGHT, **forged}, {"tests/hidden.py": TESTS.encode()}).items():
            folder.write(path, data)
        command = [sys.executable, "-S", "-c", "import tests.hidden as test; print(test.Double.__name__)"]
        imported = subprocess.run(command, cwd=name, capture_output=True, text=True, timeout=60, check=False)
        assert imported.stdout == "Double\n", imported.stderr


@pytest.mark.bubblewrap
async def test_tests_whose_names_no_box_takes_are_a_failure(store: RunStore) -> None:
    id = worked(store, RIGHT)
    rewarder = rewarder_of(settings(call=f"{__name__}:outside"), artifacts_of=always({"module.py": RIGHT}))
    with pytest.raises(SandboxPathError):
        await rewarder(store.reads.trajectory(int(id.split(".")[0])))  # type: ignore[misc]


@pytest.mark.bubblewrap
async def test_a_box_without_the_command_is_named_and_is_no_score(store: RunStore) -> None:
    id = worked(store, RIGHT)
    with pytest.raises(ScoreError, match=r"a box of bubblewrap has no 'pytest5': give an image with it, or its path"):
        await scorer_of(store, command=["pytest5"]).score(id)


@each_case(
    ("score", "result", "value"),
    [
        ("exit", {"exit_code": 0}, 1.0),
        ("exit", {"exit_code": 1}, 0.0),
        ("number", {"stdout": b"noise\n0.75\n\n"}, 0.75),
        ("number", {"stdout": b'{"score": 0.25}'}, 0.25),
        ("number", {"stdout": b"1e9"}, 1.0),
        ("number", {"stdout": b"nan"}, 0.0),
        ("number", {"stdout": b"0.5\nkilled"}, 0.0),
        ("number", {"stdout": b"[" * 8000}, 0.0),
        ("number", {"stdout": b""}, 0.0),
        ("share", {"stdout": b"5 passed\n===== 1 failed, 2 passed, 1 error in 0.1s ====="}, 0.5),
        ("share", {"stderr": b"Ran 4 tests in 0.1s\n\nFAILED (failures=1, errors=1)"}, 0.5),
        ("share", {"stderr": b"Ran 4 tests in 0.1s\n\nOK", "exit_code": 0}, 1.0),
        ("share", {"stderr": b"Ran 4 tests in 0.1s\n\nOK (skipped=3)", "exit_code": 0}, 1.0),
        ("share", {"stderr": b"Ran 4 tests in 0.1s\n\nOK (skipped=4)", "exit_code": 0}, 0.0),
        ("share", {"stderr": b"Ran 4 tests in 0.1s\n\nFAILED (failures=1, skipped=2)"}, 0.5),
        ("share", {"stdout": b"===== 3 passed in 0.1s ====="}, 0.0),  # beside exit code 1
        ("share", {"stdout": b"===== 3 passed, 1 skipped in 0.1s =====", "exit_code": 0}, 1.0),
        ("exit", {"stdout": b"===== 3 skipped in 0.01s =====", "exit_code": 0}, 0.0),
        ("exit", {"stdout": b"===== no tests ran in 0.01s =====", "exit_code": 0}, 0.0),
        ("exit", {"stderr": b"Ran 2 tests in 0.1s\n\nOK (skipped=2)", "exit_code": 0}, 0.0),
        (
            "exit",
            {"stdout": b"ok. 5 passed; 0 failed\nDoc-tests\nok. 0 passed; 0 failed", "exit_code": 0},
            1.0,
        ),
        ("exit", {"stdout": b"test result: ok. 0 passed; 0 failed; 3 ignored", "exit_code": 0}, 0.0),
        ("exit", {"stdout": b"Ran 2 tests in 0.1s\n\nOK (skipped=2)", "exit_code": 0}, 0.0),
        ("exit", {"stdout": b"Ran 2 tests in 0.1s\n\nOK (skipped=1)", "exit_code": 0}, 1.0),
        ("exit", {"stdout": b"Tests:       3 skipped, 3 total", "exit_code": 0}, 0.0),
        ("exit", {"stdout": b"  0 passing (2ms)\n  3 pending", "exit_code": 0}, 0.0),
        ("exit", {"stdout": b"  1 passing (2ms)\n  3 pending", "exit_code": 0}, 1.0),
        ("exit", {"stdout": b"# tests 3\n# pass 0\n# fail 0\n# skipped 3", "exit_code": 0}, 0.0),
        ("exit", {"stdout": "\u2139 pass 2\n\u2139 skipped 3".encode(), "exit_code": 0}, 1.0),
        ("exit", {"stdout": b"ok  \tpkg\t0.002s [no tests to run]\n?   \tb\t[no test files]", "exit_code": 0}, 0.0),
        ("exit", {"stdout": b"ok  \tpkg\t0.002s\n?   \tb\t[no test files]", "exit_code": 0}, 1.0),
        ("exit", {"stdout": b"--- SKIP: TestA (0.00s)\nPASS\nok  \tpkg\t0.1s", "exit_code": 0}, 0.0),
        ("exit", {"stdout": b"--- SKIP: TestA (0.00s)\n--- PASS: TestB (0.00s)\nok  \tp\t0.1s", "exit_code": 0}, 1.0),
        ("exit", {"stdout": b"ok then: all good", "exit_code": 0}, 1.0),
        ("share", {"stdout": b"Ran 4 tests in 0.1s\n\nFAILED (failures=1, errors=1)"}, 0.5),
        ("share", {"stderr": b"Ran 4 tests in 0.1s"}, 0.0),
        ("share", {"stdout": b"\xff\x00", "stderr": b"Segmentation fault"}, 0.0),
        ("share", {"stdout": b"9 passed", "timed_out": True}, 0.0),
        ("exit", {"exit_code": 0, "oom": True}, 0.0),
    ],
)
def test_a_result_means_a_number_from_0_to_1(score: str, result: dict[str, Any], value: float) -> None:
    assert value_of(ExecResult(**{"exit_code": 1, "stdout": b"", "stderr": b"", **result}), score) == value


def test_a_time_out_is_the_hosts_where_the_host_withheld_half_of_the_time() -> None:
    late = ExecResult(exit_code=137, stdout=b"", stderr=b"", timed_out=True, duration_s=60.0, cpu_s=0.4)
    assert value_of(replace(late, starved_s=10.0), "share") == 0.0
    with pytest.raises(HostBusy, match=r"got no processor for 55 s \(0\.4 s of CPU time used\)"):
        value_of(replace(late, starved_s=55.0), "share")


@each_case("flood", [b"1 passed " * 500_000, b"9" * 4_000_000, b"\n" * 4_000_000, b"Ran 1 test in \n" * 300_000])
@each_case("score", ["share", "number"])
def test_reading_a_flood_costs_no_more_than_its_tail(score: str, flood: bytes) -> None:
    began = time.process_time()
    assert 0.0 <= value_of(ExecResult(exit_code=0, stdout=flood, stderr=flood), score) <= 1.0
    assert time.process_time() - began < 0.5


BOXES: list[SandboxSpec] = []


class Fake:
    """A backend whose boxes pass all tests, or never come."""

    name = "fake"
    hangs = False

    async def create(self, spec: SandboxSpec) -> Any:
        if self.hangs:
            await trio.sleep_forever()
        BOXES.append(spec)
        return self

    async def exec(self, argv: Any, **_: Any) -> ExecResult:
        return ExecResult(exit_code=0, stdout=b"1 passed", stderr=b"")

    async def close(self) -> None: ...

    async def aclose(self) -> None: ...


class Hanging(Fake):
    hangs = True


HERE = "tests.rewards.test_box_tests"


async def test_a_host_that_hangs_is_the_sources_failure_and_no_score(
    store: RunStore, autojump_clock: MockClock
) -> None:
    id, began = worked(store, RIGHT), trio.current_time()
    with pytest.raises(ScoreError, match="no answer within 30 s"):
        await scorer_of(store, sandbox=f"{HERE}:Hanging").score(id)
    assert trio.current_time() - began == pytest.approx(30.0)
    assert store.scores.recorded() == []


async def test_tests_may_depend_on_the_task_and_equal_work_is_tested_once(store: RunStore) -> None:
    worked(store, RIGHT, RIGHT, WRONG)
    scorer = scorer_of(store, sandbox=f"{HERE}:Fake", call=f"{HERE}:hidden", call_deadline_s=10.5)
    for index in range(3):
        assert await scorer.score(f"1.0.{index}") == 1.0
    runs = [spec for spec in rewritten() if spec.files]
    assert [set(spec.files) for spec in runs] == [{"module.py", "hidden.py"}] * 2
    assert {spec.limits.wall_s for spec in runs} == {7.0} and not any(spec.network for spec in runs)


def rewritten() -> list[SandboxSpec]:
    """The boxes that the backend's module has seen: it is imported by its name, perhaps once more."""
    import importlib

    return importlib.import_module(HERE).BOXES


async def test_changes_of_the_share_may_be_the_reward(store: RunStore) -> None:
    worked(store, RIGHT, RIGHT)
    scorer = scorer_of(store, kind="shaping", sandbox=f"{HERE}:Fake")
    assert await scorer.score("1.0.0") == 1.0
    assert await scorer.score("1.0.1") == -1.0, "it is the last one, so far"


async def test_an_environment_without_artifacts_is_named(store: RunStore) -> None:
    id = worked(store, None)
    with pytest.raises(ScoreError, match=r"test/Env-v0 gave no artifacts for turn 1\.0\.0: give .* artifacts\(\)"):
        await scorer_of(store, sandbox=f"{HERE}:Fake").score(id)


def test_artifacts_are_those_of_the_last_holder_and_leave_with_the_tokens(store: RunStore) -> None:
    id = worked(store, RIGHT)
    assert store.journal.artifacts(id) == {"module.py": RIGHT}
    with pytest.raises(LeaseLost):
        store.journal.keep_artifacts(1, 99, id, {})
    with pytest.raises(StoreError, match="has no turn"):
        store.journal.artifacts("1.0.7")
    store.deaths.release_all()
    play_all(store)
    for id in store.scores.awaiting("tests", 9):
        store.scores.score(id, "tests", 1.0)
    store.buffer.take(1, 1, max_lag=1)
    store.lineage.checkpoint(1, serve(store, 1), "x")
    assert store.lineage.retain(60, keep_steps=50, keep_sample=0.0) == 1
    assert store.journal.artifacts("1.0.0") is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"command": []}, r"rewards\.command = \[\]: a source of kind 'tests' needs it"),
    ],
)
def test_tests_that_cannot_be_run_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings(**changes)


def test_a_run_does_not_begin_without_the_folder_of_tests(store: RunStore) -> None:
    with pytest.raises(UsageError, match=r"rewards\.files = 'no_such_folder' is no folder"):
        reward_services.declare(run_config(settings(files="no_such_folder")), store)
