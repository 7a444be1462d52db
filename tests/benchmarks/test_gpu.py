"""The cases for a GPU, at tiny size on the CPU: none of them first fails on the machine that costs money."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import _gpu_checks
import gpu
import pytest
import torch
from _gpu_case import CASES, Bench, Case, Row, Skipped


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench("cpu", True, tmp_path_factory.mktemp("gpu"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ("run", "ipc") else ()) for name in CASES],
)
def test_every_case_runs_at_tiny_size(name: str, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in gpu.installed(bench.work / f"site-{name}").items():
        monkeypatch.setenv(variable, value)
    try:
        rows = list(CASES[name].run(bench))
    except Skipped as why:
        assert name in ("vllm", "attention") and str(why)
        return
    assert rows and all(isinstance(value, str | int | float | None) for row in rows for value in row.values())
    json.dumps(rows)


def test_the_parity_of_a_learner_that_differs_is_a_failure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    true, calls = _gpu_checks.stepped, iter(range(1000))

    def stepped(*args: object, **settings: object) -> object:
        told, gradient, update = true(*args, **settings)
        return told, gradient * (1 + 1e-3 * (next(calls) % 2)), update

    monkeypatch.setattr(_gpu_checks, "stepped", stepped)
    with pytest.raises(AssertionError, match=r"grpo: gradients are 1\.0e-03 apart"):
        list(CASES["parity"].run(bench))


@pytest.fixture
def some_case(monkeypatch: pytest.MonkeyPatch) -> Case:
    """A case that prints a row and then fails."""

    def broken(bench: Bench) -> Iterator[Row]:
        yield {"a": 1}
        raise ValueError("no such thing")

    monkeypatch.setattr(_gpu_checks, "broken", broken, raising=False)
    case = Case("some", 1, "_gpu_checks:broken", "")
    monkeypatch.setitem(CASES, "some", case)
    return case


def test_a_case_that_fails_keeps_its_rows(some_case: Case, bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    code = gpu.child("some", bench)
    found = gpu.result(some_case, capsys.readouterr().out, code, late=False, seconds=0.0)
    assert (found["status"], found["why"]) == ("failed", "ValueError: no such thing")
    assert found["rows"] == [{"a": 1}]


def test_a_case_at_its_deadline_keeps_its_rows(some_case: Case) -> None:
    found = gpu.result(some_case, 'a library says this\n{"row": {"a": 1}}\n{"row": {"a', -9, late=True, seconds=1.0)
    assert (found["status"], found["rows"]) == ("late", [{"a": 1}])


def test_a_child_that_hangs_is_ended_at_its_deadline(
    tmp_path: Path, some_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu.py").write_text("import signal; signal.pause()")
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    assert gpu.run(some_case, Bench("cpu", True, tmp_path), os.environ)["status"] == "late"


def test_without_a_gpu_the_check_says_so_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu.child("machine", Bench("cuda", False, tmp_path)) == 1
    assert "sees no GPU: give --tiny" in capsys.readouterr().out


def test_the_table_shows_each_row() -> None:
    results = [{"case": "machine", "status": "ok", "seconds": 1.0, "rows": [{"what": "a|b", "value": 12345.6}]}]
    assert "| a/b | 12,346 |" in gpu.table(results)
