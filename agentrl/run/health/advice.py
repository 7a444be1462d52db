"""Advice that a check gives: a cause, the figures that show it, and what to type. Knows no run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from shlex import quote
from statistics import fmean, median
from typing import Any

from agentrl.config.changes import at_a_resume


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Something is wrong: `name` is the check's, `cause` says what, in a sentence, `evidence` by which figures.
    `settings` are `section.key=value` of the run file that may fix it, `commands` are command lines that say more, as a
    shell takes them."""

    name: str
    cause: str
    evidence: str
    settings: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    def typed(self, path: object) -> list[str]:
        """Command lines to type, the likeliest fix first. A setting that a run keeps for its life needs a new run."""
        command_lines: list[str] = []
        # What cannot change at a resume is not proposed for one: the command that a person copies from here has to
        # work.
        new_run_settings = [setting for setting in self.settings if not at_a_resume(setting.partition("=")[0])]
        if resume_settings := [setting for setting in self.settings if setting not in new_run_settings]:
            command_lines.append(f"agentrl train --resume {quote(str(path))}{_set(resume_settings)}")
        if new_run_settings:
            command_lines.append(f"agentrl train run.toml --out {quote(f'{path}-2')}{_set(new_run_settings)}")
        return [*command_lines, *self.commands]

    def document(self, path: object) -> dict[str, Any]:
        """Return the advice as a JSON document."""
        settings, commands = list(self.settings), self.typed(path)
        return {
            "name": self.name,
            "cause": self.cause,
            "evidence": self.evidence,
            "settings": settings,
            "type": commands,
        }


def _set(settings: Iterable[str]) -> str:
    return "".join(f" --set {quote(setting)}" for setting in settings)


def share(part: float, whole: float) -> float:
    """A share of nothing is 0."""
    return part / whole if whole else 0.0


def percent(part: float, whole: float = 1.0) -> str:
    return f"{100 * share(part, whole):.0f}%"


def mean(values: Iterable[float]) -> float:
    """nan without values."""
    listed_values = list(values)
    return fmean(listed_values) if listed_values else math.nan


def middle(values: Iterable[float]) -> float:
    """The median; nan without values."""
    listed_values = list(values)
    return median(listed_values) if listed_values else math.nan
