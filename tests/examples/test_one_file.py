"""The teaching scripts learn what they say they learn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "steps"), [("grpo_one_file.py", 75), pytest.param("ppo_one_file.py", 100, marks=pytest.mark.long)]
)
def test_it_learns_to_sort(script: str, steps: int) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), "--steps", str(steps)],
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
