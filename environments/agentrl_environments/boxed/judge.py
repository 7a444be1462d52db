"""Runs in a box of its own with the tests: a plain `unittest` run, in which the repository's modules are elsewhere.

`import lru` gives a stand-in whose functions and classes are called in the suspect's box. Values that come back are
plain data of exact built-in types, or `Remote` handles. A handle is never equal to, nor less than, nor nearly plain
data, and it swallows no error: an object of the policy that says yes to everything is not the number that a test
expects, and cannot keep a failed assertion from being heard.

Writes to stdout: `>` and a message for the suspect, or `=` and a verdict for the host. Reads what the suspect says.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import unittest
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from wire import Channel, Gone, ProtocolError, decode, encode, private_pipes

_TESTS = "tests"
_SHORT = 300


class Remote:
    """An object in the suspect's box. Its attributes and calls are evaluated there."""

    __slots__ = ("_court", "_handle")

    def __init__(self, court: Court, handle: int) -> None:
        object.__setattr__(self, "_court", court)
        object.__setattr__(self, "_handle", handle)

    def __getattr__(self, name: str) -> Any:
        return self._court.ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._court.ask("set", self, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._court.ask("call", self, args, kwargs)

    def __eq__(self, other: object) -> Any:
        return self._court.ask("eq", self, other) if isinstance(other, Remote) else False

    def __ne__(self, other: object) -> Any:
        return self._court.ask("ne", self, other) if isinstance(other, Remote) else True

    def __hash__(self) -> int:
        return hash(self._handle)

    def __bool__(self) -> bool:
        return self._court.ask("bool", self) is True

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        self._court.ask("__exit__", self, kind, error, None)
        return False  # whatever it says: what was raised may be the failure of a test, or skip what would fail


def _forwarded(verb: str, *, swapped: bool = False) -> Any:
    def ask(self: Remote, *arguments: Any) -> Any:
        return self._court.ask(verb, *([*arguments, self] if swapped else [self, *arguments]))

    return ask


def _compared(verb: str) -> Any:
    def ask(self: Remote, other: Any) -> Any:
        return _forwarded(verb)(self, other) if isinstance(other, Remote) else NotImplemented

    return ask


for _verb in ("len", "iter", "next", "str", "repr", "getitem", "setitem", "delitem", "contains", "neg", "abs"):
    setattr(Remote, f"__{_verb}__", _forwarded(_verb))
for _verb in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor"):
    setattr(Remote, f"__{_verb.rstrip('_')}__", _forwarded(_verb))
    setattr(Remote, f"__r{_verb.rstrip('_')}__", _forwarded(_verb, swapped=True))
for _verb in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_verb}__", _compared(_verb))
setattr(Remote, "__enter__", _forwarded("__enter__"))  # noqa: B010  (beside its likes)


class RemoteModule(ModuleType):
    """A module in the suspect's box."""

    _remote: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._remote is None or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._remote, name)


class RemoteError(Exception):
    """Base of the stand-ins for exceptions that the repository defines."""

    text = ""

    def __str__(self) -> str:
        return self.text


class Court:
    """Asks the suspect, and makes of its answers what the tests may see."""

    def __init__(self, packages: list[str]) -> None:
        self._packages = packages
        self._remotes: dict[int, Any] = {}
        self._callbacks: list[Any] = []
        incoming, self._outgoing = private_pipes()
        self._channel = Channel(incoming, self._outgoing, self._call_back, prefix=">")

    def ask(self, verb: str, *arguments: Any) -> Any:
        """Raises the suspect's exception, Gone, ProtocolError."""
        return self._exchange([verb, *(encode(argument, self._export) for argument in arguments)])

    def _exchange(self, request: list[Any]) -> Any:
        suspect_answer = self._channel.ask(request)
        if type(suspect_answer) is not dict or len(suspect_answer) != 1:
            raise ProtocolError("no answer")
        if "value" in suspect_answer:
            return decode(suspect_answer["value"], self._resolve)
        raise self._raised(suspect_answer.get("raise"))

    def verdict(self, test: str, passed: bool, text: str) -> None:
        message_bytes = ("=" + json.dumps([test, passed, text[-_SHORT:]]) + "\n").encode()
        while message_bytes:
            message_bytes = message_bytes[os.write(self._outgoing, message_bytes) :]

    # --- imports of the repository's packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] not in self._packages:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> RemoteModule:
        return RemoteModule(spec.name)

    def exec_module(self, module: RemoteModule) -> None:
        module._remote = self._exchange(["import", module.__name__])

    # --- objects of either side

    def _export(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return {"object": value._handle}
        if isinstance(value, type) and hasattr(value, "remote_handle"):
            return {"object": value.remote_handle}
        if isinstance(value, RemoteError):
            return {"object": vars(value)["remote_instance"]}
        if isinstance(value, BaseException):
            return {"error": [type(value).__name__, [str(value)]]}
        if getattr(builtins, getattr(value, "__name__", ""), None) is value:
            return {"builtin": value.__name__}
        if callable(value):
            self._callbacks.append(value)
            return {"callback": len(self._callbacks) - 1}
        raise TypeError(f"a test handed over a {type(value).__name__}: give plain data or a function")

    def _resolve(self, tag: str, inside: Any) -> Any:
        if tag == "object" and type(inside) is int:
            if inside not in self._remotes:
                self._remotes[inside] = Remote(self, inside)
            return self._remotes[inside]
        if tag == "builtin" and type(inside) is str:
            builtin_class = getattr(builtins, inside, None)
            if isinstance(builtin_class, type) and issubclass(builtin_class, Exception):
                return builtin_class
            return RuntimeError  # SystemExit and its like end nothing here
        if tag == "class" and type(inside) is list and len(inside) == 3:
            remote_handle, class_name, class_bases = inside
            if remote_handle not in self._remotes:
                local_bases = [decode(class_base, self._resolve) for class_base in class_bases]
                exception_bases = tuple(
                    class_base
                    for class_base in local_bases
                    if isinstance(class_base, type) and issubclass(class_base, Exception)
                )
                remote_bases = (
                    ()
                    if any(issubclass(exception_base, RemoteError) for exception_base in exception_bases)
                    else (RemoteError,)
                )
                try:
                    self._remotes[remote_handle] = type(
                        class_name, (*remote_bases, *exception_bases), {"remote_handle": remote_handle}
                    )
                except (TypeError, ValueError) as error:
                    raise ProtocolError(f"no class: {error}") from error
            return self._remotes[remote_handle]
        raise ProtocolError(tag)

    def _raised(self, data: Any) -> BaseException:
        """The exception that the suspect described. Raises ProtocolError."""
        try:
            error_class, arguments, error_text, error_attributes = (
                decode(data_part, self._resolve) for data_part in data["parts"]
            )
            if not issubclass(error_class, RemoteError):
                return error_class(*arguments)
            error = error_class.__new__(error_class)
            error.args = arguments
            error.__dict__.update({**error_attributes, "text": str(error_text), "remote_instance": int(data["handle"])})
            return error
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise ProtocolError(f"no exception: {error}") from error

    def _call_back(self, request: Any) -> Any:
        """The suspect calls a function that a test handed over, and nothing else."""
        try:
            callback_handle, arguments, keywords = request
            function = self._callbacks[callback_handle]
            returned_value = function(*decode(arguments, self._resolve), **decode(keywords, self._resolve))
            return {"value": encode(returned_value, self._export)}
        except (Gone, ProtocolError):
            raise
        except Exception as error:
            return {"raise": self._export(error)}


def _of_data(method: Any) -> Any:
    """An assertion about two numbers, which a handle is not."""

    def check(self: unittest.TestCase, first: Any, second: Any, *rest: Any, **named: Any) -> None:
        if isinstance(first, Remote) or isinstance(second, Remote):
            self.fail("an object of the repository is no number: hand over plain data")
        method(self, first, second, *rest, **named)

    return check


def _of_members(method: Any) -> Any:
    """An assertion about a member: the judge looks for it among what a handle iterates over."""

    def check(self: unittest.TestCase, member: Any, container: Any, *rest: Any, **named: Any) -> None:
        checked_container: Any = container
        method(self, member, list(checked_container) if isinstance(container, Remote) else container, *rest, **named)

    return check


class ReportedResult(unittest.TestResult):
    """Reports each test to the host as it ends. A test passes that ran to its end and failed nowhere."""

    def __init__(self, court: Court) -> None:
        super().__init__()
        self._court, self._wrong = court, ""

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._wrong, self._passed = "", False

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._passed = True

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._wrong = f"{err[0].__name__}: {err[1]}"

    addFailure = addError

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._wrong = "skipped"

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        has_passed = self._passed and not self._wrong
        self._court.verdict(test.id(), has_passed, "" if has_passed else self._wrong or "did not end")


def main() -> None:
    """`judge.py PACKAGE...`: run all tests of the tests folder."""
    test_court = Court(sys.argv[1:])
    sys.meta_path.insert(0, test_court)  # type: ignore[arg-type]
    test_case_class = unittest.TestCase
    for assert_name, guard_method in (
        ("AlmostEqual", _of_data),
        ("NotAlmostEqual", _of_data),
        ("In", _of_members),
        ("NotIn", _of_members),
    ):
        setattr(test_case_class, f"assert{assert_name}", guard_method(getattr(test_case_class, f"assert{assert_name}")))
    unittest.TestLoader().discover(_TESTS, "test*.py").run(ReportedResult(test_court))
    test_court.verdict("", True, "end")


if __name__ == "__main__":
    main()
