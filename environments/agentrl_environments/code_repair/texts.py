"""Texts for the policy: the prompt of a task and the reports of its tools. Pure functions, so that demonstrations and
the environment cannot differ. Knows nothing of sandboxes, rewards or tokenizers."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.records import Message
from agentrl_environments.code_repair.tasks import Check

INSTRUCTION = "Make the tests pass."
REPLACED = "ok"  # what `replace_line` answers
_LONGEST_VALUE = 40


def opening(source: str, checks: Sequence[Check], values: Sequence[str] | str) -> tuple[Message, ...]:
    """The messages an episode starts with: the module with line numbers, and how each of its visible tests stands.

    `values` are the `repr`s of the calls' values, or one text that says why the module did not run."""
    shown_lines = [
        f"{line_number} {source_line}" for line_number, source_line in enumerate(source.split("\n"), start=1)
    ]
    if isinstance(values, str):
        shown_lines.append(_short(values))
    else:
        shown_lines.extend(
            _result(visible_check, call_value) for visible_check, call_value in zip(checks, values, strict=True)
        )
    return ({"role": "system", "content": INSTRUCTION}, {"role": "user", "content": "\n".join(shown_lines)})


def report(checks: Sequence[Check], values: Sequence[str] | str) -> str:
    """The report of `run_tests`: how many pass, and the first that fails (or why the module did not run)."""
    summary = f"{passed(checks, values)}/{len(checks)} pass"
    if isinstance(values, str):
        return f"{summary}\n{_short(values)}"
    failing_checks = [
        (visible_check, call_value)
        for visible_check, call_value in zip(checks, values, strict=True)
        if call_value != visible_check.expected
    ]
    return f"{summary}\n{_result(*failing_checks[0])}" if failing_checks else summary


def _result(check: Check, value: str) -> str:
    if value == check.expected:
        return f"ok {check.call} == {check.expected}"
    return f"FAIL {check.call} == {check.expected}, got {_short(value)}"


def passed(checks: Sequence[Check], values: Sequence[str] | str) -> int:
    """How many tests pass."""
    if isinstance(values, str):
        return 0
    return sum(call_value == next_check.expected for next_check, call_value in zip(checks, values, strict=True))


def _short(value: str) -> str:
    return value if len(value) <= _LONGEST_VALUE else value[: _LONGEST_VALUE - 1] + "…"
