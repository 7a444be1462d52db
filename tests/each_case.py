"""One test for the inputs of one rule, which runs them all and names each that breaks it.

`@pytest.mark.parametrize` is for inputs that need a test of their own: they are slow, or a part of the machine decides
whether they run. The rest is one rule with a list of inputs:

    @each_case("text, value", [("1 + 1", 2), ("2 * 3", 6)])
    def test_arithmetic(text, value): ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterable
from typing import Any

import pytest

from agentrl import notices

Test = Callable[..., Any]


def each_case(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Run the test for every case. Each gets a fresh `monkeypatch` and a `tmp_path` of its own, where it asks for them;
    it shares other fixtures with its neighbours."""
    keys = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    inputs = [dict(zip(keys, _values(case, len(keys)), strict=True)) for case in cases]

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        rest = [each for name, each in signature.parameters.items() if name not in keys]

        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def gathered(**fixtures: Any) -> None:
                errors: list[Exception] = []
                for arguments in _of_each(fixtures, inputs):
                    try:
                        await test(**arguments)
                    except (Exception, pytest.fail.Exception) as error:
                        errors.append(_named(error, arguments, keys))
                _report(errors, len(inputs))

        else:

            @functools.wraps(test)
            def gathered(**fixtures: Any) -> None:
                errors: list[Exception] = []
                for arguments in _of_each(fixtures, inputs):
                    try:
                        test(**arguments)
                    except (Exception, pytest.fail.Exception) as error:
                        errors.append(_named(error, arguments, keys))
                _report(errors, len(inputs))

        gathered.__signature__ = signature.replace(parameters=rest)  # pyright: ignore[reportAttributeAccessIssue]
        return gathered

    return decorate


def _values(case: Any, count: int) -> Iterable[Any]:
    if isinstance(case, type(pytest.param())):
        assert not case.marks, "a case with a mark needs a test of its own"
        return case.values
    return case if count > 1 else (case,)


def _of_each(fixtures: dict[str, Any], inputs: list[dict[str, Any]]) -> Generator[dict[str, Any]]:
    assert inputs, "no case"
    for number, case in enumerate(inputs):
        arguments = {**fixtures, **case}
        if "tmp_path" in fixtures:
            arguments["tmp_path"] = fixtures["tmp_path"] / f"case{number}"
            arguments["tmp_path"].mkdir()
        notices.OF_PROCESS.forget()
        if "monkeypatch" in fixtures:
            with pytest.MonkeyPatch.context() as arguments["monkeypatch"]:
                yield arguments
        else:
            yield arguments


def _named(error: BaseException, arguments: dict[str, Any], keys: list[str]) -> Exception:
    case = ", ".join(f"{key}={arguments[key]!r}" for key in keys)
    if not isinstance(error, Exception):  # `pytest.raises` without an error, `pytest.fail`
        error = AssertionError(str(error)).with_traceback(error.__traceback__)
    error.add_note(f"case: {case[:500]}")
    return error


def _report(errors: list[Exception], count: int) -> None:
    if errors:
        raise ExceptionGroup(f"{len(errors)} of {count} cases", errors)
