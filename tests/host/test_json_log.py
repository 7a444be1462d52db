"""Log lines as JSON (`agentrl.host.json_log`), in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from each_case import each_case

from agentrl.host import json_log

_DEADLINE_S = 300
NOISY = r"""
import os, signal, subprocess, sys
print('{"time": "forged", "level":', "\x1b[31mred\x1b[0m")
sys.stdout.flush()
os.write(2, b"(Engine pid=1) WARNING 11-27 from below: \xff\n")
os.write(1, b"1%\r2%\r\n\n")
subprocess.run(["sh", "-c", "echo agentrl: warning: from a program"])
os.write(1, b"x" * (5 << 18))
os.write(1, b"\nno end of line")
os.kill(os.getpid(), signal.SIGKILL)
"""
TOOLS = r"""
import logging, sys, threading
from agentrl.host import json_log
json_log.adopt()

def turn(number):
    with json_log.about(turn=number):
        print("say", number, end=" ")
        met.wait()
        print("and end")
        logging.getLogger("user").warning("warned %d", number)
        sys.stderr.write("left unfinished")

met = threading.Barrier(2)
threads = [threading.Thread(target=turn, args=(number,)) for number in (0, 1)]
for thread in threads: thread.start()
for thread in threads: thread.join()
logging.getLogger("agentrl.x").info("told")
logging.getLogger("httpx").info("not told")
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("failed")
print("outside")
"""


def printed(code: str) -> list[dict[str, Any]]:
    """What a Python program prints, as objects."""
    python = json_log.wrapped([sys.executable, "-c", code], "worker-0")
    done = subprocess.run(python, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_DEADLINE_S, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(row["process"] == "worker-0" and row["time"].endswith("Z") for row in rows)
    return rows


def test_no_print_breaks_the_json_and_none_is_lost() -> None:
    rows = printed(NOISY)
    long = [row["message"] for row in rows if row["message"].startswith("xx")]
    assert sum(map(len, long)) == 5 << 18
    assert max(map(len, long)) <= (1 << 20) + (1 << 16)
    assert [(row["level"], row["message"]) for row in rows if row["message"] not in long] == [
        ("info", '{"time": "forged", "level": \x1b[31mred\x1b[0m'),
        ("warning", "(Engine pid=1) WARNING 11-27 from below: \\xff"),
        ("info", "1%"),
        ("info", "2%"),
        ("warning", "agentrl: warning: from a program"),
        ("info", "no end of line"),
    ]


def test_lines_logged_and_printed_in_a_turn_have_its_ids() -> None:
    rows = printed(TOOLS)
    for number in (0, 1):
        of_turn = sorted((row["level"], row["message"]) for row in rows if row.get("turn") == number)
        said = f"say {number} and end"
        assert of_turn == [("info", "left unfinished"), ("info", said), ("warning", f"warned {number}")]
    others = {row["message"]: row for row in rows if "turn" not in row}
    assert sorted(others) == ["failed", "outside", "told"]
    assert (others["told"]["level"], others["told"]["logger"]) == ("info", "agentrl.x")
    assert others["failed"]["traceback"].endswith("ZeroDivisionError: division by zero")


def test_a_command_speaks_json_on_both_of_its_streams() -> None:
    code = "import sys; from agentrl.host import json_log as j; j.divert('top'); print('result'); j.tell('wrong', 40)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=_DEADLINE_S, check=True)
    out, err = (json.loads(stream) for stream in (done.stdout, done.stderr))
    assert (out["message"], out["level"], out["process"]) == ("result", "info", "top")
    assert (err["message"], err["level"]) == ("wrong", "error")


@each_case("line", ["plain text", '{"no": "message"}', "[1]", "7"])
def test_the_message_of_a_line_that_is_no_object_of_ours_is_the_line(line: str) -> None:
    assert json_log.message(line) == line
    assert json_log.message(json_log.line_of("learner", "info", line).decode()) == line
