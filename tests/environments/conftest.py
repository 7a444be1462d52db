"""Shipped environments are checked with fewer actions than for a user; `test_nothing_dropped` plays them for longer."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def few_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.env.checks.checks.FUZZ_EXAMPLES", 20)
