"""The command `agentrl` in this process: what a command line prints and how it ends, without a second interpreter.

A test that needs a process of its own (signals, what is imported, a killed command) starts one itself.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

import pytest

from agentrl.cli.main import main


class Finished(NamedTuple):
    """The exit code of a command, and its texts."""

    code: int
    out: str
    err: str


def agentrl(*arguments: object, stdin: str = "", env: Mapping[str, str] | None = None) -> Finished:
    """Run a command line. What it changes of the environment and of the path of modules is taken back."""
    out, err, code = io.StringIO(), io.StringIO(), 0

    def exit_at_once(status: int) -> NoReturn:
        raise SystemExit(status)

    def replace_process(*_: object) -> NoReturn:
        raise AssertionError("this command becomes another program: start it as a process")

    variables, path = dict(os.environ), list(sys.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["agentrl", *map(str, arguments)])
        patch.setattr("sys.stdin", io.StringIO(stdin))
        patch.setattr("os._exit", exit_at_once)
        patch.setattr("os.execv", replace_process)
        patch.setattr("os.execve", replace_process)
        try:
            os.environ.update(env or {})
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        finally:
            sys.path[:] = path
            os.environ.clear()
            os.environ.update(variables)
    return Finished(code, out.getvalue(), err.getvalue())
