"""The form of an adapter of a trainer. Standard library only."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import quote

from agentrl.conformance.observation import Recorder
from agentrl.conformance.scenario import Scenario

BUILT_IN: Final = {
    "agentrl": "agentrl.conformance.adapters.agentrl_trainer:ADAPTER",
    "trl": "agentrl.conformance.adapters.trl_trainer:ADAPTER",
    "verifiers": "agentrl.conformance.adapters.verifiers_rollouts:ADAPTER",
}
"""The adapters in this package, by trainer."""

_CALL_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The parts of a case that an adapter gets: a model folder, the URL of the scripted engine, and a folder of its own
    that outlives a kill."""

    model: Path
    url: str
    folder: Path

    def grade(self, name: str) -> float:
        """The reward that the grader gives for a sampled text: any text with the turn's name. Raises OSError if the
        grader's host fails."""
        with urllib.request.urlopen(f"{self.url}/grade?name={quote(name)}", timeout=_CALL_S) as grader_response:
            return float(json.load(grader_response)["reward"])

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the engine. Raises OSError."""
        body_bytes, request_headers = json.dumps(body).encode(), {"content-type": "application/json"}
        engine_request = urllib.request.Request(f"{self.url}{path}", body_bytes, request_headers)
        with urllib.request.urlopen(engine_request, timeout=_CALL_S) as engine_response:
            return cast("dict[str, Any]", json.load(engine_response))


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A trainer. `train` drives it over a scenario to its end and reports to the recorder what entered its loss; what
    the trainer raises passes through. `packages` are the distributions whose versions the table shows. `unseen` says
    what the adapter cannot observe of it, and why: rows, advantages, logprobs. `not_applicable` names the cases that
    this trainer cannot get into, `not_observed` those that it may get into and the adapter does not show, with the
    reasons."""

    packages: tuple[str, ...]
    train: Callable[[Scenario, Setup, Recorder], None]
    unseen: Mapping[str, str] = field(default_factory=dict[str, str])
    not_applicable: Mapping[str, str] = field(default_factory=dict[str, str])
    not_observed: Mapping[str, str] = field(default_factory=dict[str, str])
