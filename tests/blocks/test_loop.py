"""`examples/loop.py`: a few steps, and the whole of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "loop.py"
pytestmark = pytest.mark.bubblewrap


@pytest.fixture
def loop() -> ModuleType:
    spec = importlib.util.spec_from_file_location("loop", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loop_fits_a_page() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60


@pytest.mark.slow
def test_the_loop_steps_and_goes_on_from_its_checkpoint(
    loop: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "loop")
    before, after = loop.main(folder, steps=2, groups=2, held_out=4)
    assert 0 <= before <= 1 and 0 <= after <= 1
    loop.main(folder, steps=3, groups=2, held_out=4)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["step 1", "step 2", "step 3"]


@pytest.mark.slow
@pytest.mark.long
def test_the_whole_loop_learns_what_the_demo_learns(loop: ModuleType, tmp_path: Path) -> None:
    before, after = loop.main(str(tmp_path / "loop"))
    assert after - before >= 0.30 and after >= 0.85, (before, after)
