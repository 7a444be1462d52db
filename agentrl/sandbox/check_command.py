"""Checks a command of a box before any process exists: arguments, environment, deadline. Shared by the backends.

A command that no host could run (NUL bytes, no program, too long) is the policy's own doing: a result, not an error."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from agentrl.protocols import ExecResult

NO_COMMAND, REFUSED = 127, 126
_MAX_BYTES = 1 << 20  # of all arguments and environment; Linux takes two of them with the pointers
_MAX_COUNT = 8_000  # bubblewrap takes 9,000 of its own and the command's together
_MAX_ONE = (128 << 10) - 1  # of one argument, Linux's MAX_ARG_STRLEN


class CommandRefused(Exception):
    """The command cannot be run; `result` says so as a shell would."""

    def __init__(self, why: str, code: int = REFUSED) -> None:
        super().__init__(why)
        self.result = ExecResult(exit_code=code, stdout=b"", stderr=f"sandbox: {why}\n".encode(errors="replace"))


def checked_argv(argv: Sequence[str]) -> list[bytes]:
    """The arguments as bytes. Raises CommandRefused."""
    if not argv or not argv[0]:
        raise CommandRefused("no command given")
    encoded_arguments = [_encode(argument, "argument") for argument in argv]
    # Checked by us and not left to the kernel: its E2BIG would come from the start of bwrap, look like a broken host,
    # and cost an episode that is not scored whenever a policy writes a long command.
    if sum(map(len, encoded_arguments)) > _MAX_BYTES or len(encoded_arguments) > _MAX_COUNT:
        raise CommandRefused("argument list too long")
    return encoded_arguments


def checked_env(env: Mapping[str, str]) -> dict[bytes, bytes]:
    """The environment as bytes. Raises CommandRefused."""
    encoded_variables = {
        _encode(variable_name, "variable name"): _encode(variable_value, "variable")
        for variable_name, variable_value in env.items()
    }
    if any(not variable_name or b"=" in variable_name for variable_name in encoded_variables):
        raise CommandRefused("a variable's name is empty or holds '='")
    if (
        sum(len(variable_name) + len(variable_value) for variable_name, variable_value in encoded_variables.items())
        > _MAX_BYTES
    ):
        raise CommandRefused("environment too large")
    return encoded_variables


def _encode(text: str, what: str) -> bytes:
    try:
        encoded_text = os.fsencode(text)
    except UnicodeEncodeError as encode_error:
        raise CommandRefused(f"{what} is not encodable: {encode_error.reason}") from None
    if b"\0" in encoded_text:
        raise CommandRefused(f"{what} holds a NUL byte")
    if len(encoded_text) > _MAX_ONE:
        raise CommandRefused(f"{what} too long")
    return encoded_text
