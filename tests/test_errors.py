"""The boundary: somebody else's exception becomes one line of ours, once."""

from __future__ import annotations

import pytest
import trio

from agentrl.errors import EnvError, PolicyFault, SandboxError, ToolError, UsageError, boundary


def raise_(error: BaseException) -> None:
    raise error


def test_a_foreign_exception_becomes_one_line_with_its_cause() -> None:
    cause = ValueError("no\n  number")
    with pytest.raises(EnvError) as raised, boundary(EnvError, "mine/Env: step raised"):
        raise cause
    assert str(raised.value) == "mine/Env: step raised ValueError: no number"
    assert raised.value.__cause__ is cause


def test_the_place_is_where_it_was_raised() -> None:
    line = raise_.__code__.co_firstlineno + 1
    with pytest.raises(EnvError) as raised, boundary(EnvError, "mine/Env raised", place=True):
        raise_(KeyError("a"))
    assert str(raised.value) == f"mine/Env raised KeyError: 'a' ({__file__}:{line})"


def test_a_syntax_error_names_its_own_place_and_an_error_never_raised_has_none() -> None:
    with pytest.raises(UsageError) as raised, boundary(UsageError, "cannot import:", place=True):
        compile("class X(:", "x.py", "exec")
    assert str(raised.value) == "cannot import: SyntaxError: invalid syntax (x.py, line 1)"
    with pytest.raises(EnvError) as failed, boundary(EnvError, "it raised", place=True):
        raise ExceptionGroup("two", [ValueError("one"), ValueError("two")])
    assert str(failed.value) == "it raised ValueError: one"


@pytest.mark.parametrize("error", [SandboxError("no box"), UsageError("no such id")])
def test_a_failure_that_has_its_name_keeps_it(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, boundary(EnvError, "mine/Env: step raised"):
        raise error
    assert raised.value is error and error.__cause__ is None


def test_what_may_pass_is_the_callers_word() -> None:
    with pytest.raises(ToolError, match=r"^bad$"), boundary(EnvError, "step raised", passes=(PolicyFault,)):
        raise ToolError("bad")
    with pytest.raises(EnvError, match=r"^reset raised ToolError: bad$"), boundary(EnvError, "reset raised"):
        raise ToolError("bad")


async def test_of_a_nursery_the_error_that_matters_is_named() -> None:
    async def run(error: Exception) -> None:
        with boundary(EnvError, "step raised"):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(trio.sleep_forever)
                await trio.lowlevel.checkpoint()
                raise error

    with pytest.raises(EnvError, match=r"^step raised KeyError: 'a'$"):
        await run(KeyError("a"))
    with pytest.raises(SandboxError, match=r"^no box$"):
        await run(SandboxError("no box"))


def test_a_cancellation_or_an_exit_is_no_failure() -> None:
    with pytest.raises(SystemExit), boundary(EnvError, "step raised"):
        raise SystemExit(3)


async def test_a_cancelled_call_is_cancelled() -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        with boundary(EnvError, "step raised"):
            await trio.lowlevel.checkpoint()
    assert scope.cancelled_caught
