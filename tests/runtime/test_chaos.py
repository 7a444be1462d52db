"""A real run, hurt from outside under a seed, ends well, and an auditor that is nobody's friend finds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.testing import chaos_run
from agentrl.testing.chaos_run import ChaosRun, Fault

from .test_run import ENVS, run_file

SETTINGS = {
    "rollout": {"workers": 2, "lease_s": 24.0},
    "engine": {"liveness_deadline_s": 10.0, "admin_deadline_s": 8.0},
    "train": {"steps": 60, "checkpoint_every": 5, "liveness_deadline_s": 10.0},
    "eval": {"sets": []},
}


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_that_is_hurt_at_every_part_ends_well_and_breaks_no_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [("kill", "learner"), ("stop", "worker"), ("lock", "store"), ("kill", "engine"), ("stop", "supervisor")]
    monkeypatch.setattr(
        chaos_run, "plan", lambda number, seed: [Fault(kind=kind, part=part) for kind, part in faults][:number]
    )
    file = run_file(tmp_path, f"{ENVS}:Vowels", **SETTINGS)
    report = ChaosRun([str(file)], tmp_path / "run", faults=len(faults), every_s=1.0).run(print)
    assert report.ok, report
    assert len(report.outcomes) == len(faults)
