"""Process rewards that leave the best policy what it is: differences of a potential, measured on a copy of the box.

    r'(s, a, s') = r(s, a, s') + gamma * phi(s') - phi(s)        phi of the end of an episode is 0

Rewards of this form, and no others, change no optimal policy whatever the task is (Ng, Harada and Russell 1999, "Policy
invariance under reward transformations", theorem 1). The potential is counted from where the episode begins, so that at
gamma = 1 its rewards add up to nothing: a policy that shows a high potential on the way and throws it away has won
nothing, and one that does nothing has lost nothing. An episode that its driver ends from outside gives back what it
stands at: the environment says how much in `info["unsettled"]`.

The potential is measured on a fork of the agent's box, so that measuring leaves no trace in it. Knows nothing of
prompts, tools or tasks.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

import trio

from agentrl.errors import SandboxPathError
from agentrl.protocols import Sandbox
from agentrl_environments.judging import SourceJudge

LARGEST_ARTIFACT: Final = 1 << 18  # bytes; what is larger is no source that anyone wrote
_LINT: Final = (Path(__file__).parent / "boxed" / "lint.py").read_text("utf-8")
_LINT_S: Final = 10.0


class Potential(Protocol):
    """Says how good a state of a box is, in a copy that it may do anything with. Equal states, equal values."""

    async def __call__(self, copy: Sandbox) -> float: ...


class PotentialDelta:
    """The reward of each step of an episode: `weight * (gamma * phi(after) - phi(before))`, phi 0 at its start."""

    def __init__(self, potential: Potential, *, gamma: float = 1.0, weight: float = 1.0) -> None:
        self._potential, self._gamma, self._weight = potential, gamma, weight
        self._phi = self._first = 0.0

    @property
    def unsettled(self) -> float:
        """The number to add to the last step's reward if the episode ends there from outside."""
        return -self._weight * self._gamma * self._phi

    async def begin(self, box: Sandbox) -> None:
        """An episode starts with the box as it is. Raises SandboxError."""
        self._phi, self._first = 0.0, await self._measured(box)

    async def step(self, box: Sandbox, *, over: bool) -> float:
        """The reward of the step that led to the box as it is; `over`: it ended the episode. Raises SandboxError."""
        phi_before = self._phi
        self._phi = 0.0 if over else await self._measured(box) - self._first
        return self._weight * (self._gamma * self._phi - phi_before)

    async def _measured(self, box: Sandbox) -> float:
        try:
            async with forked(box) as box_copy:
                return await self._potential(box_copy)
        except SandboxPathError:  # the policy's own doing: folders too deep to copy, files where folders should be
            return 0.0


class TestDelta(PotentialDelta):
    """The potential is the share of `required` tests that pass; the tests are ours, whatever stands in the box."""

    __test__ = False  # no test class, whatever pytest thinks of its name

    def __init__(
        self,
        judge: SourceJudge,
        artifacts: Sequence[str],
        tests: Mapping[str, bytes],
        required: Sequence[str],
        *,
        gamma: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """`artifacts` are the paths of the sources that are judged, `tests` the test files by name."""

        async def share(copy: Sandbox) -> float:
            verdicts = await judge.run(await carried(copy, artifacts), tests)
            return len(verdicts.passed.intersection(required)) / len(required)

        super().__init__(share, gamma=gamma, weight=weight)


class LintDelta(PotentialDelta):
    """The potential is 1 / (1 + findings): unused imports and variables, code that is never reached and the like; a
    file that does not parse counts ten. `boxed/lint.py` has the list."""

    def __init__(self, artifacts: Sequence[str], *, gamma: float = 1.0, weight: float = 1.0) -> None:
        async def tidiness(copy: Sandbox) -> float:
            lint_command = ["python3", "-I", "-S", "-c", _LINT, *artifacts]
            lint_result = await copy.exec(lint_command, timeout_s=_LINT_S)
            return 1.0 / (1.0 + json.loads(lint_result.stdout)) if lint_result.exit_code == 0 else 0.0

        super().__init__(tidiness, gamma=gamma, weight=weight)


@asynccontextmanager
async def forked(box: Sandbox) -> AsyncGenerator[Sandbox]:
    """A copy of a box, closed afterwards."""
    box_copy = await box.fork()
    try:
        yield box_copy
    finally:
        with trio.CancelScope(shield=True):
            await box_copy.close()


async def carried(box: Sandbox, artifacts: Sequence[str]) -> dict[str, bytes]:
    """The declared files as they stand. What is missing, no plain file or too large is left out: that is the policy's
    own doing, and what imports it will fail. Raises SandboxError."""
    carried_files: dict[str, bytes] = {}
    for artifact_path in artifacts:
        try:
            carried_files[artifact_path] = await box.read(artifact_path, most_bytes=LARGEST_ARTIFACT)
        except SandboxPathError:
            continue
    return carried_files
