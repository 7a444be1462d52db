"""The promises of a box, gathered by room: one test keeps those of a room and names each that is broken."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from agentrl.errors import SandboxUnavailable
from agentrl.protocols import SandboxBackend
from agentrl.testing.sandbox import CASES, Case, box_files, commands, escapes, lifetime, misuse

ROOMS = {
    "commands": commands.CASES,
    "files": box_files.CASES,
    "lifetime": lifetime.CASES,
    "escapes": escapes.CASES,
    "misuse": misuse.CASES,
}
"""All cases. Those of the last two attack a wall; a few of the others need one."""

WITHOUT_WALLS = {
    room: plain for room, cases in ROOMS.items() if (plain := [case for case in cases if not case.isolation])
}
"""The cases that a backend without walls keeps."""


def named(names: Collection[str]) -> list[Case]:
    """The cases of these names. Raises AssertionError for a name that no case has."""
    assert {*names} <= {case.name for case in CASES}
    return [case for case in CASES if case.name in names]


async def keep(backend: SandboxBackend, cases: Iterable[Case]) -> None:
    """Run the cases one after the other. Raises ExceptionGroup with the failure of each that does not hold."""
    errors: list[Exception] = []
    for case in cases:
        try:
            await case.run(backend)
        except SandboxUnavailable:
            raise
        except Exception as error:
            error.add_note(f"promise: {case.name}")
            errors.append(error)
    if errors:
        raise ExceptionGroup(f"{backend.name} breaks {len(errors)} promises", errors)
