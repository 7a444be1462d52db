"""The trainers themselves. What the table of `benchmarks/conformance.md` says of others is not asserted here, as their
next version may do otherwise. That their adapters still observe them is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.conformance import judges
from agentrl.conformance.cases import CASES
from agentrl.conformance.conduct import Report, conduct

TRL = Path(__file__).resolve().parents[2] / ".venv-peers" / "bin" / "python"
TOKENS = [case for case in CASES if case.name == "tokens"]


def verdicts(report: Report) -> dict[str, str]:
    return {result.case.name: f"{result.verdict.outcome}: {result.verdict.evidence}" for result in report.results}


@pytest.mark.slow
def test_ours_keeps_every_promise() -> None:
    found = verdicts(conduct("agentrl", CASES))
    assert len(found) == len(CASES)
    assert {name: verdict for name, verdict in found.items() if not verdict.startswith("holds: ")} == {}


@pytest.mark.slow
def test_weights_that_arrive_are_told_from_lost_ones() -> None:
    """The other side of `lost-weights`: the refusal there is not that of an engine which merely cannot answer."""
    lost = next(case for case in CASES if case.name == "lost-weights")
    arriving = replace(lost, scenario=replace(lost.scenario, delivery="whole"), judge=judges.as_sampled)
    (verdict,) = verdicts(conduct("agentrl", [arriving])).values()
    assert verdict == "holds: 8 episodes, 16 turns, 752 tokens as sampled"


@pytest.mark.slow
def test_verifiers_is_observed() -> None:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed: make adapters")
    (verdict,) = verdicts(conduct("verifiers", TOKENS)).values()
    assert verdict == "holds: 4 episodes, 8 turns, 376 tokens as sampled; advantages not observed"


@pytest.mark.long
@pytest.mark.peers
def test_trl_is_observed() -> None:
    (verdict,) = verdicts(conduct("trl", TOKENS, python=str(TRL))).values()
    assert verdict == "holds: 4 episodes, 8 turns, 376 tokens as sampled"
