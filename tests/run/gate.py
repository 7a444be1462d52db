"""Keeps a run from being over before its test has done to it what it means to."""

from __future__ import annotations

from pathlib import Path

ENVS = Path(__file__).parent / "envs.py"


class Gate:
    """`settings` give a run the environment `Held`: its tasks from seed `at` on wait until the gate is opened.

    With two groups a step and seeds from 0 the run makes `at / 2` steps at most before that."""

    def __init__(self, folder: Path, at: int) -> None:
        self._file = folder / "gate"
        self.kwargs = f'gate="{self._file}", at={at}'
        self.settings = (f"env.id={ENVS}:Held", f"env.kwargs={{{self.kwargs}}}")

    @property
    def arguments(self) -> tuple[str, ...]:
        """The settings as words of a command line."""
        return tuple(word for setting in self.settings for word in ("--set", setting))

    def open(self) -> None:
        self._file.touch()
