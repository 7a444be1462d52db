"""Log lines as JSON: one object a line with `time`, `level`, `process`, `message` and the ids that it is about.

A process's standard output and error go through a pipe to a small process that writes each line as an object, so that
no print breaks the JSON: neither one of user code, nor of a C library or a program that it starts; and the last words
of a process that was killed are not lost. What Python code logs (`logging`) or prints goes there as an object already,
with the ids of `about`. Knows neither runs nor episodes. Standard library only: `wrapped` runs this file by itself.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, cast

VARIABLE: Final = "AGENTRL_LOG_FORMAT"
"""The environment variable that says how a process and those that it starts log: `text` or `json`."""

_TO = "AGENTRL_LOG_TO"  # the pipe for objects of a program that `wrapped` runs, and its name: 5:worker-0
_MOST = 1 << 20  # bytes of a line; a longer one becomes several objects
_LEVEL = re.compile(r"(?:agentrl[\w -]*: *|\([^)]*\) *)?(debug|info|warning|alarm|error|critical)\b[ :]", re.IGNORECASE)
_objects: int | None = None  # where objects of this process go
_process = ""  # its name


def is_on() -> bool:
    """Whether this process and those that it starts write their logs as JSON."""
    return os.environ.get(VARIABLE) == "json"


@dataclass(slots=True)
class _Subject:
    """Subject of log lines; `begun` is a line that is printed in parts."""

    ids: Mapping[str, Any]
    begun: str = ""


_NOTHING: Final = _Subject({})
_subject: ContextVar[_Subject] = ContextVar("subject of log lines", default=_NOTHING)


class about:
    """Lines that are logged or printed inside have these ids, in threads and tasks that are started there too. A class
    and no generator, since each turn has one.

    >>> with about(episode=12), about(turn=3):
    ...     _subject.get().ids
    {'episode': 12, 'turn': 3}
    """

    __slots__ = ("_ids", "_subject", "_token")

    def __init__(self, **ids: Any) -> None:
        self._ids = ids

    def __enter__(self) -> None:
        self._subject = _Subject({**_subject.get().ids, **self._ids})
        self._token = _subject.set(self._subject)

    def __exit__(self, *_: object) -> None:
        _subject.reset(self._token)
        # A line without its end, as `print(..., end="")` leaves it, has no later moment at which its ids are still
        # known.
        if self._subject.begun:
            _print(self._subject.begun, self._subject)


def line_of(process: str, level: str, message: str, ids: Mapping[str, Any] | None = None) -> bytes:
    """One object as a line. Control characters and what is no Unicode are escaped."""
    utc_time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps(
        {"time": utc_time, "level": level, "process": process, "message": message, **(ids or {})}
    ).encode()


def read(line: str) -> dict[str, Any] | None:
    """A log's line, if it is an object of ours; None for text."""
    with suppress(ValueError, RecursionError):
        log_entry: Any = json.loads(line)
        if isinstance(log_entry, dict) and "message" in log_entry:
            return cast("dict[str, Any]", log_entry)
    return None


def message(line: str) -> str:
    """The message of a log's line, whether it is JSON or text."""
    return line if (log_entry := read(line)) is None else str(log_entry["message"])


def wrapped(argv: Sequence[str], process: str) -> list[str]:
    """The command that writes what `argv` prints as JSON, under the name `process`, and becomes `argv`: it has the same
    process id, standard input and environment."""
    return [sys.executable, "-I", "-S", __file__, process, *argv]


def divert(process: str) -> None:
    """Have this process, and what inherits its streams, write JSON from now on. Call it before threads are started."""
    sys.stdout.flush()
    sys.stderr.flush()
    _log_to(_diverted(process), process)


def adopt() -> None:
    """Log as JSON, with ids, in a program that `wrapped` runs. Elsewhere do nothing."""
    log_target = os.environ.pop(_TO, None)
    if log_target is not None:
        descriptor, _, process_name = log_target.partition(":")
        _log_to(int(descriptor), process_name)


def tell(line: str, level: int = logging.INFO) -> None:
    """Say a line to whoever started this process: logged if its log is JSON, else on standard error."""
    if _objects is None:
        print(line, file=sys.stderr, flush=True)
    else:
        logging.getLogger("agentrl").log(level, "%s", line)


def objects() -> int | None:
    """A file descriptor for the output of a process that writes JSON itself; None if this one writes text."""
    return _objects


class JsonHandler(logging.Handler):
    def __init__(self, fd: int, process: str) -> None:
        super().__init__()
        self._fd, self._process = fd, process

    def emit(self, record: logging.LogRecord) -> None:
        try:
            subject_ids = {"logger": record.name, **_subject.get().ids}
            if record.exc_info:
                subject_ids["traceback"] = logging.Formatter().formatException(record.exc_info)
            log_line = line_of(self._process, record.levelname.lower(), record.getMessage(), subject_ids)
        except Exception:  # a record that cannot be written, of whatever code
            self.handleError(record)
            return
        with suppress(OSError):
            _write(self._fd, log_line + b"\n")


class _Prints(io.TextIOWrapper):
    """A standard stream: what is printed inside of `about` has its ids, the rest goes as programs' output does."""

    def write(self, text: str, /) -> int:
        subject = _subject.get()
        if subject is _NOTHING:
            return super().write(text)
        *whole_lines, subject.begun = (subject.begun + text).split("\n")
        if len(subject.begun) > _MOST:
            whole_lines, subject.begun = [*whole_lines, subject.begun], ""
        for whole_line in whole_lines:
            _print(whole_line, subject)
        return len(text)


def _print(line: str, subject: _Subject) -> None:
    if _objects is not None and line.strip():
        with suppress(OSError):
            _write(_objects, line_of(_process, _level_of(line), line, subject.ids) + b"\n")


def _log_to(fd: int, process: str) -> None:
    global _objects, _process
    os.set_inheritable(fd, False)
    _objects, _process = fd, process
    logging.getLogger().addHandler(JsonHandler(fd, process))
    logging.getLogger("agentrl").setLevel(logging.INFO)
    sys.stdout, sys.stderr = (
        _Prints(os.fdopen(stream_number, "wb", closefd=False), "utf-8", "backslashreplace", line_buffering=True)
        for stream_number in (1, 2)
    )


def _diverted(process: str) -> int:
    """Give standard output and error of this process to a new one, which makes objects of their lines. Returns the pipe
    for lines that are objects already."""
    stream_numbers = [1] if os.path.sameopenfile(1, 2) else [1, 2]
    stream_pipes, (objects_out, objects_in) = {stream_number: os.pipe() for stream_number in stream_numbers}, os.pipe()
    if (child_pid := os.fork()) == 0:
        if os.fork():  # nobody of ours has to wait for it
            os._exit(0)
        exit_status = 1
        try:
            os.setsid()  # Ctrl-C and the end of a group are not for it: it ends when no writer is left
            for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
                signal.signal(signal_number, signal.SIG_IGN)
            stream_by_source = {read_end: stream_number for stream_number, (read_end, _) in stream_pipes.items()}
            stream_by_source[objects_out] = 2
            for descriptor in {int(link.name) for link in Path("/dev/fd").iterdir()} - {1, 2, *stream_by_source}:
                with suppress(OSError):  # that of the listing itself
                    os.close(descriptor)
            _relay(stream_by_source, objects_out, process)
            exit_status = 0
        finally:
            os._exit(exit_status)
    os.waitpid(child_pid, 0)
    for read_end in (objects_out, *(read_end for read_end, _ in stream_pipes.values())):
        os.close(read_end)
    os.dup2(stream_pipes[1][1], 1)
    os.dup2(stream_pipes.get(2, stream_pipes[1])[1], 2)
    for _, write_end in stream_pipes.values():
        os.close(write_end)
    return objects_in


def _relay(sources: Mapping[int, int], objects: int, process: str) -> None:
    """Write what comes from each source to its stream, until no writer is left. `objects` has lines that are JSON."""
    unended_lines = dict.fromkeys(sources, b"")
    while unended_lines:
        for ready_source in select.select(list(unended_lines), [], [])[0]:
            read_bytes = os.read(ready_source, 1 << 16)
            *whole_lines, unended_line = re.split(
                rb"\n" if ready_source == objects else rb"[\r\n]+", unended_lines[ready_source] + read_bytes
            )
            # Objects are never cut, since half of one is no JSON, and our own code makes none without an end.
            if not read_bytes or (len(unended_line) > _MOST and ready_source != objects):
                whole_lines, unended_line = [*whole_lines, unended_line], b""
            unended_lines[ready_source] = unended_line
            if not read_bytes:
                del unended_lines[ready_source]
            output_lines = (
                whole_lines
                if ready_source == objects
                else [_of_text(process, log_line) for log_line in whole_lines if log_line.strip()]
            )
            with suppress(OSError):  # the reader is gone, or the disk is full: the process goes on
                _write(sources[ready_source], b"".join(log_line + b"\n" for log_line in output_lines if log_line))


def _of_text(process: str, line: bytes) -> bytes:
    line_text = line.decode(errors="backslashreplace")
    return line_of(process, _level_of(line_text), line_text)


def _level_of(text: str) -> str:
    level_name = "info" if (level_match := _LEVEL.match(text)) is None else level_match[1].lower()
    return "warning" if level_name == "alarm" else level_name


def _write(fd: int, data: bytes) -> None:
    unwritten = memoryview(data)
    while unwritten:
        unwritten = unwritten[os.write(fd, unwritten) :]


def _main() -> None:
    process_name, *command_words = sys.argv[1:]
    descriptor = _diverted(process_name)
    os.set_inheritable(descriptor, True)
    os.environ[_TO] = f"{descriptor}:{process_name}"
    # The command takes the place of this process, instead of being its child: so signals, the exit status and the
    # process id are the command's own, and nobody between has to pass them on.
    os.execvp(command_words[0], command_words)


if __name__ == "__main__":
    _main()
