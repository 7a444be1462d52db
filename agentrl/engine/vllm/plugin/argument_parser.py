"""Asks the parser of the installed vLLM's server about arguments, and reads a configuration from them; serves nothing.

`python -m agentrl.engine.vllm.plugin.argument_parser`, in vLLM's interpreter, reads JSON from standard input: `base`,
the arguments of a server that works, the further ones to check by name, each as the words of a command line, and
`reserved`, names that are refused, with the reason. It prints the first thing wrong as JSON on its last line:
`{"key", "says", "near"}`, or `null`. Standard library only, besides vLLM.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import argparse
import difflib
import json
import re
import runpy
import sys
from typing import Any, NoReturn

from agentrl.engine.vllm.plugin.server import SERVER


# A BaseException: code around the parser may handle Exception, and must not swallow this.
class _ParserReached(BaseException):
    """The server has come to read its arguments."""


class _Refused(Exception):
    """The parser refused the arguments; the text is its message."""


def server_parser() -> Any:
    """The parser of vLLM's server, wherever this version of vLLM makes it."""

    def caught(self: Any, *_: Any, **__: Any) -> NoReturn:
        raise _ParserReached(self)

    # The parser is made inside the server's `__main__`, by functions whose names change from version to version. That
    # it calls `parse_args` does not change, so it is caught there.
    read, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, caught  # type: ignore[assignment]
    try:
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
    except _ParserReached as reached:
        return reached.args[0]
    finally:
        argparse.ArgumentParser.parse_args = read
    raise SystemExit(f"{SERVER} reads no arguments")


def wrong(
    parser: Any, base: list[str], arguments: dict[str, list[str]], reserved: dict[str, str]
) -> dict[str, Any] | None:
    """The first of the further arguments that is wrong beside `base`: its name (None if it is not known which one),
    vLLM's message, and a name near an unknown one."""
    for key, words in arguments.items():
        action = parser._option_string_actions.get(f"--{key}")  # the whole name: it takes shortened ones as well
        if action is None:
            names = [name[2:] for name in parser._option_string_actions if name.startswith("--")]
            return {"key": key, "says": None, "near": difflib.get_close_matches(key, names, n=1)}
        for name in action.option_strings:
            if name[2:] in reserved:
                return {"key": key, "says": reserved[name[2:]], "near": []}
        if refusal := _refusal(parser, ["--model", "m", *words]):
            return {"key": key, "says": refusal, "near": []}
    # Each argument alone may be fine, and the configuration of all refused. Then one is left out at a time: the one
    # without which it works is named.
    if refusal := _refusal(parser, [*base, *_all(arguments)], configure=True):
        for key in arguments:
            rest = {name: words for name, words in arguments.items() if name != key}
            if not _refusal(parser, [*base, *_all(rest)], configure=True):
                return {"key": key, "says": refusal, "near": []}
        return {"key": None, "says": refusal, "near": []}
    return None


def _all(arguments: dict[str, list[str]]) -> list[str]:
    return [word for words in arguments.values() for word in words]


def _refusal(parser: Any, argv: list[str], *, configure: bool = False) -> str | None:
    """Describe in one line what is wrong with a command line; None if nothing is."""

    def refuse(message: str) -> NoReturn:
        raise _Refused(message)

    parser.error = refuse
    try:
        args = parser.parse_args(argv)
        if loose := getattr(args, "model_tag", None):  # a place for the model's name, which takes any loose word
            refuse(f"unrecognized arguments: {loose}")
        if configure:
            from vllm.engine.arg_utils import AsyncEngineArgs

            AsyncEngineArgs.from_cli_args(args).create_engine_config()
    except Exception as error:  # whatever vLLM says of a setting
        return _line(error)
    return None


def _line(error: Exception) -> str:
    details: Any = getattr(error, "errors", None)
    if details is not None:  # of pydantic: a report of several lines
        first = details()[0]
        place = ".".join(str(part) for part in first["loc"])
        text = f"{place}: {first['msg']}" if place else first["msg"]
    else:
        text = str(error) or type(error).__name__
    return re.sub(r"\s+", " ", text).removeprefix("Value error, ").strip()


def main() -> None:
    request = json.load(sys.stdin)
    print("\n" + json.dumps(wrong(server_parser(), request["base"], request["given"], request["reserved"])), flush=True)


if __name__ == "__main__":
    main()
