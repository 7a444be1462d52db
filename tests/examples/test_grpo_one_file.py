"""The teaching script learns what it says it learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "grpo_one_file.py"


@pytest.mark.slow
def test_it_learns_to_sort() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", "75"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"held-out success: (\d\.\d+) before, (\d\.\d+) after", done.stdout)
    assert found, done.stdout
    assert float(found[1]) < 0.1
    assert float(found[2]) > 0.4
