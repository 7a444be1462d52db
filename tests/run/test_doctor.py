"""What `agentrl doctor` finds of this machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agentrl.cli.doctor import examine


@pytest.mark.parametrize(("thrown_away", "works"), [(True, False), (False, True)])
def test_doctor_names_bytecode_that_is_thrown_away(
    thrown_away: bool, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the learner needs twice the time to start, and a run under faults starts it often."""
    monkeypatch.setattr("agentrl.cli.doctor._output", lambda _: "")
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))  # nothing lies there
    monkeypatch.setattr(sys, "dont_write_bytecode", thrown_away)
    (found,) = (one for one in examine() if one.part == "bytecode")
    assert found.works is works and not found.needed
    assert ("PYTHONDONTWRITEBYTECODE" in found.hint) is not works
