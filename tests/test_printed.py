"""What the commands print is what tests/printed/ holds."""

from __future__ import annotations

import pytest

from agentrl.cli.command_groups import GROUPS
from tests import printed

# Its good answer is about this machine.
_OF_THE_MACHINE = {"doctor"}


def test_each_command_has_its_scenarios() -> None:
    commands = {name for group in GROUPS.values() for name in group}
    assert printed.SCENARIOS.keys() == commands - _OF_THE_MACHINE
    assert {path.stem for path in printed.FOLDER.iterdir()} == printed.SCENARIOS.keys()


@pytest.mark.parametrize("command", printed.SCENARIOS)
def test_a_command_prints_what_is_held(command: str) -> None:
    held = (printed.FOLDER / f"{command}.txt").read_text()
    with printed.workplace() as folder:
        assert printed.printed(command, folder) == held, f"read the difference, then: python -m tests.printed {command}"
