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
    original, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, caught  # type: ignore[assignment]
    try:
        runpy.run_module(SERVER, run_name="__main__", alter_sys=True)
    except _ParserReached as reached:
        return reached.args[0]
    finally:
        argparse.ArgumentParser.parse_args = original
    raise SystemExit(f"{SERVER} reads no arguments")


def wrong(
    parser: Any, base: list[str], arguments: dict[str, list[str]], reserved: dict[str, str]
) -> dict[str, Any] | None:
    """The first of the further arguments that is wrong beside `base`: its name (None if it is not known which one),
    vLLM's message, and a name near an unknown one."""
    for argument, argument_words in arguments.items():
        # By the whole name: the parser takes shortened ones as well.
        parser_action = parser._option_string_actions.get(f"--{argument}")
        if parser_action is None:
            known_names = [name[2:] for name in parser._option_string_actions if name.startswith("--")]
            return {"key": argument, "says": None, "near": difflib.get_close_matches(argument, known_names, n=1)}
        for name in parser_action.option_strings:
            if name[2:] in reserved:
                return {"key": argument, "says": reserved[name[2:]], "near": []}
        if refusal := _refusal(parser, ["--model", "m", *argument_words]):
            return {"key": argument, "says": refusal, "near": []}
    # Each argument alone may be fine, and the configuration of all refused. Then one is left out at a time: the one
    # without which it works is named.
    if refusal := _refusal(parser, [*base, *_all(arguments)], configure=True):
        for argument in arguments:
            other_arguments = {name: argument_words for name, argument_words in arguments.items() if name != argument}
            if not _refusal(parser, [*base, *_all(other_arguments)], configure=True):
                return {"key": argument, "says": refusal, "near": []}
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
        parsed = parser.parse_args(argv)
        if loose_word := getattr(parsed, "model_tag", None):  # a place for the model's name, which takes any loose word
            refuse(f"unrecognized arguments: {loose_word}")
        if configure:
            from vllm.engine.arg_utils import AsyncEngineArgs

            AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    except Exception as error:  # whatever vLLM says of a setting
        return _line(error)
    return None


def _line(error: Exception) -> str:
    details: Any = getattr(error, "errors", None)
    if details is not None:  # of pydantic: a report of several lines
        first_detail = details()[0]
        location = ".".join(str(part) for part in first_detail["loc"])
        error_line = f"{location}: {first_detail['msg']}" if location else first_detail["msg"]
    else:
        error_line = str(error) or type(error).__name__
    return re.sub(r"\s+", " ", error_line).removeprefix("Value error, ").strip()


def main() -> None:
    request = json.load(sys.stdin)
    print("\n" + json.dumps(wrong(server_parser(), request["base"], request["given"], request["reserved"])), flush=True)


if __name__ == "__main__":
    main()
