"""As many cores as a control group pays for, of those that the process is bound to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from each_case import each_case

from agentrl.host.cores import cores


@each_case(
    ("quota", "expected"),
    [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8), ("", 8), (None, 8)],
)
def test_the_smaller_of_quota_and_binding(
    quota: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    limit = tmp_path / "cpu.max"
    if quota is not None:
        limit.write_text(quota)
    assert cores(limit) == expected
