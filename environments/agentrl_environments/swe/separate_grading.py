"""Grading in two boxes: the tests in one, the sources in another, so that no source can print a verdict.

For `unittest` tests in the folder `tests` that hand over plain data: see `agentrl_environments.judging`, which does it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agentrl.env import Grade
from agentrl.protocols import Sandbox, SandboxBackend
from agentrl_environments.judging import DEADLINE_S, SourceJudge
from agentrl_environments.rewards import carried
from agentrl_environments.swe.submitted_files import start_listing
from agentrl_environments.swe.verdicts import Log, graded

_TESTS: Final = "tests/"


@dataclass(frozen=True, slots=True)
class ApartTests:
    """Success: all listed tests pass. They see only the box's Python files."""

    fails: tuple[str, ...]
    passes: tuple[str, ...]
    image: str | None
    deadline_s: float = DEADLINE_S

    async def __call__(self, box: Sandbox, boxes: SandboxBackend) -> Grade:
        box_listing = await start_listing(box)
        python_files = await carried(box, sorted(file_path for file_path in box_listing if file_path.endswith(".py")))
        test_files = {
            file_path.removeprefix(_TESTS): file_bytes
            for file_path, file_bytes in python_files.items()
            if file_path.startswith(_TESTS)
        }
        source_files = {
            file_path: file_bytes for file_path, file_bytes in python_files.items() if not file_path.startswith(_TESTS)
        }
        verdicts = await SourceJudge(boxes, image=self.image, remembered=0).run(source_files, test_files)
        return graded(Log(frozenset(verdicts.passed)), self.fails, self.passes)
