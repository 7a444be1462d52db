"""Texts for the policy: the prompt of a task and the report of a test run. Knows nothing of boxes or rewards."""

from __future__ import annotations

import re
from typing import Final

from agentrl_environments.repo_repair.tasks import RepoTask

_MOST_NAMED: Final = 20
_TIMES: Final = re.compile(r"(?m)^(Ran \d+ tests?) in [0-9.]+s$")
_VERDICTS: Final = ("OK", "FAILED (", "NO TESTS RAN")
_ADDRESSES: Final = re.compile(r"\b0x[0-9a-f]{6,}\b")


def prompt(task: RepoTask) -> str:
    """The task in words: what is wrong, what may be done, what is handed in."""
    where = f"The folder holds a Python project, {task.repository}/, with unittest tests in tests/."
    parts = [f"{where}\n\n{task.readme.strip()}"]
    if task.breakage.kind == "feature":
        path = task.breakage.edits[0].path
        parts.append(f"Add {task.breakage.subject} to {path}:\n\n```python\n{task.breakage.signature}\n```")
    else:
        failing = task.shown_failing
        named = "\n".join(f"- {test}" for test in failing[:_MOST_NAMED])
        more = f"\n- and {len(failing) - _MOST_NAMED} more" if len(failing) > _MOST_NAMED else ""
        what = f"The body of {task.breakage.subject} is missing" if task.breakage.kind == "stub" else "It has a bug"
        parts.append(f"{what}: these tests fail.\n{named}{more}\n\nMend the project, not the tests.")
    files = ", ".join(sorted(task.broken))
    parts.append(f"Handed in are {files}, and nothing else; they are judged by these and further tests.")
    return "\n\n".join(parts)


def report(output: str) -> str:
    """A test run's output with its verdict on top, so that cutting a long output keeps it."""
    output = steady(output)
    verdicts = [line for line in output.splitlines() if line.startswith(_VERDICTS)]
    return f"{verdicts[-1]}\n\n{output}" if verdicts else output


def steady(output: str) -> str:
    """A test run's output without what differs from run to run: times and addresses."""
    return _ADDRESSES.sub("0x…", _TIMES.sub(r"\1", output))
