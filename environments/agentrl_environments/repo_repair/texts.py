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
    folder_words = f"The folder holds a Python project, {task.repository}/, with unittest tests in tests/."
    prompt_parts = [f"{folder_words}\n\n{task.readme.strip()}"]
    if task.breakage.kind == "feature":
        feature_path = task.breakage.edits[0].path
        prompt_parts.append(
            f"Add {task.breakage.subject} to {feature_path}:\n\n```python\n{task.breakage.signature}\n```"
        )
    else:
        failing_tests = task.shown_failing
        test_list = "\n".join(f"- {test_name}" for test_name in failing_tests[:_MOST_NAMED])
        more_words = f"\n- and {len(failing_tests) - _MOST_NAMED} more" if len(failing_tests) > _MOST_NAMED else ""
        fault_words = (
            f"The body of {task.breakage.subject} is missing" if task.breakage.kind == "stub" else "It has a bug"
        )
        prompt_parts.append(
            f"{fault_words}: these tests fail.\n{test_list}{more_words}\n\nMend the project, not the tests."
        )
    file_list = ", ".join(sorted(task.broken))
    prompt_parts.append(f"Handed in are {file_list}, and nothing else; they are judged by these and further tests.")
    return "\n\n".join(prompt_parts)


def report(output: str) -> str:
    """A test run's output with its verdict on top, so that cutting a long output keeps it."""
    output = steady(output)
    verdict_lines = [output_line for output_line in output.splitlines() if output_line.startswith(_VERDICTS)]
    return f"{verdict_lines[-1]}\n\n{output}" if verdict_lines else output


def steady(output: str) -> str:
    """A test run's output without what differs from run to run: times and addresses."""
    return _ADDRESSES.sub("0x…", _TIMES.sub(r"\1", output))
