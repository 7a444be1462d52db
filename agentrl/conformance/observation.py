"""The record of what a trainer did: its adapter's report, and the engine's samples. Standard library only.

An adapter appends events to a file, a line of JSON each, as they happen: a trainer that is killed leaves what it did
until then. The samples come from the scripted engine, never from the trainer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, cast

_HOLD_S: Final = 600.0  # until a kill that comes at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A turn that the engine sampled after `prompt`: `name` says whose, `tokens` and `logprobs` [T] are what it sent.
    `is_whole` is False if the engine failed before the turn's end."""

    name: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_whole: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A sequence of T tokens in the loss of optimizer step `step`, from 1: `scored` tokens are trained. `advantages`
    and `logprobs` (under the policy that sampled) are [T], 0 where a token is not scored; None if the adapter cannot
    see them. `life` counts the trainer's starts."""

    step: int
    tokens: tuple[int, ...]
    scored: tuple[bool, ...]
    advantages: tuple[float, ...] | None
    logprobs: tuple[float, ...] | None
    life: int = 0

    def spans(self) -> list[tuple[int, int]]:
        """Start and end of each unbroken run of scored tokens."""
        scored_spans: list[tuple[int, int]] = []
        for token_index, is_scored in enumerate(self.scored):
            if is_scored and scored_spans and scored_spans[-1][1] == token_index:
                scored_spans[-1] = (scored_spans[-1][0], token_index + 1)
            elif is_scored:
                scored_spans.append((token_index, token_index + 1))
        return scored_spans


@dataclass(slots=True, kw_only=True)
class Observation:
    """All of a case. `excluded` are episodes that the trainer reports as left out, with its reason; `notices` what it
    warned of; `steps` are the lives and optimizer steps that ended, and `finite` whether all weights were numbers then;
    `resumed` is the step from which the last life went on. `stopped` is the error that ended it, `unseen` what the
    adapter cannot observe, and why; `skipped` is the verdict, with its reason, of
    a case that the adapter does not play."""

    samples: list[Sample] = field(default_factory=list[Sample])
    rows: list[Row] = field(default_factory=list[Row])
    excluded: list[str] = field(default_factory=list[str])
    notices: list[str] = field(default_factory=list[str])
    steps: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    finite: list[bool] = field(default_factory=list[bool])
    resumed: int | None = None
    stopped: str | None = None
    finished: bool = False
    skipped: tuple[str, str] | None = None
    unseen: dict[str, str] = field(default_factory=dict[str, str])
    versions: dict[str, str] = field(default_factory=dict[str, str])


class Recorder:
    """Writes the events of one life of a trainer. For adapters. The trainer waits to be killed at the end of step
    `hold_at_step`."""

    def __init__(self, file: IO[str], *, hold_at_step: int | None = None) -> None:
        self._file, self._hold_at_step = file, hold_at_step

    def _write(self, event: str, **fields: Any) -> None:
        self._file.write(json.dumps({"event": event, **fields}) + "\n")
        self._file.flush()

    def row(
        self,
        step: int,
        tokens: Sequence[int],
        scored: Sequence[bool],
        advantages: Sequence[float] | None,
        logprobs: Sequence[float] | None,
    ) -> None:
        """A sequence that enters the loss of optimizer step `step` (from 1). All are [T]."""
        self._write(
            "row",
            step=step,
            tokens=list(tokens),
            scored=[bool(token_value) for token_value in scored],
            advantages=None if advantages is None else [float(token_value) for token_value in advantages],
            logprobs=None if logprobs is None else [float(token_value) for token_value in logprobs],
        )

    def excluded(self, reason: str) -> None:
        """An episode that the trainer leaves out."""
        self._write("excluded", reason=reason)

    def notice(self, text: str) -> None:
        """A warning of the trainer."""
        self._write("notice", text=text)

    def step(self, step: int, *, finite: bool) -> None:
        """An optimizer step ended, before any checkpoint of it; `finite` says whether all weights are numbers."""
        self._write("step", step=step, finite=finite)
        # A trainer that went on would be killed in a step or a checkpoint that differs from run to run.
        if self._hold_at_step is not None and step >= self._hold_at_step:
            time.sleep(_HOLD_S)

    def resumed(self, step: int) -> None:
        """The trainer goes on from its checkpoint of this step."""
        self._write("resumed", step=step)

    def unseen(self, what: str, reason: str) -> None:
        """The adapter cannot observe `what` (rows, advantages, logprobs) of this trainer."""
        self._write("unseen", what=what, reason=reason)

    def skipped(self, outcome: str, reason: str) -> None:
        """The adapter does not play this case: it is `not applicable`, or `not observed`."""
        self._write("skipped", outcome=outcome, reason=reason)

    def versions(self, versions: Mapping[str, str]) -> None:
        self._write("versions", versions=dict(versions))

    def stopped(self, error: str) -> None:
        """The trainer refused, or failed, with this error."""
        self._write("stopped", error=error)

    def finished(self) -> None:
        """The trainer came to its end."""
        self._write("finished")


def add_events(observation: Observation, path: Path, life: int) -> None:
    """Read what an adapter wrote. A last line that a kill cut short is left out."""
    for event_line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            adapter_event = cast("dict[str, Any]", json.loads(event_line))
        except ValueError:
            continue
        match adapter_event.pop("event"):
            case "row":
                optional_columns = {
                    column_name: adapter_event[column_name] and tuple(adapter_event[column_name])
                    for column_name in ("advantages", "logprobs")
                }
                required_columns = {
                    column_name: tuple(adapter_event[column_name]) for column_name in ("tokens", "scored")
                }
                observation.rows.append(
                    Row(step=adapter_event["step"], life=life, **required_columns, **optional_columns)
                )
            case "excluded":
                observation.excluded.append(adapter_event["reason"])
            case "notice":
                observation.notices.append(adapter_event["text"])
            case "step":
                observation.steps.append((life, adapter_event["step"]))
                observation.finite.append(adapter_event["finite"])
            case "resumed":
                observation.resumed = adapter_event["step"]
            case "unseen":
                observation.unseen[adapter_event["what"]] = adapter_event["reason"]
            case "skipped":
                observation.skipped = (adapter_event["outcome"], adapter_event["reason"])
            case "versions":
                observation.versions.update(adapter_event["versions"])
            case "stopped":
                observation.stopped = adapter_event["error"]
            case "finished":
                observation.finished = True
            case unknown_event:
                raise ValueError(f"{path}: no event {unknown_event!r} is known")
