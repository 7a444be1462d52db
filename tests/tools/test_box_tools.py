"""Shell, Python session, files and search, in real boxes."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
from each_case import each_case

from agentrl.errors import SandboxError, SandboxPathError, ToolArgumentError, ToolError
from agentrl.protocols import ExecResult, Sandbox, SandboxSpec, Tool
from agentrl.sandbox.current_box import CurrentBox
from agentrl.testing.fake_sandbox import FakeSandbox
from agentrl_tools.base import command_result
from agentrl_tools.files import ApplyPatch, ListFiles, ReadFile, ReplaceText, WriteFile
from agentrl_tools.python import Python
from agentrl_tools.search import Search
from agentrl_tools.shell import Shell

from .floods import EndsAtOnce, Floods, Says

pytestmark = pytest.mark.bubblewrap


async def test_shell_shows_output_and_status(box: Sandbox) -> None:
    shell = Shell(box)
    result = await shell.call({"command": "echo out; echo err >&2; exit 3"})
    assert (result.content, result.is_error) == ("out\nerr\n[exit code 3]", True)
    assert result.data == {"exit_code": 3, "timed_out": False, "oom": False}
    assert (await shell.call({"command": "true"})).content == "[no output]"


@pytest.mark.medium
async def test_shell_timeout_is_a_result(box: Sandbox) -> None:
    result = await Shell(box, timeout_s=20).call({"command": "echo begun; sleep 60", "timeout": 2})
    assert result.content == "begun\n[ended after 2 s]" and result.is_error


async def test_shell_keeps_bytes_and_flags_cuts(box: Sandbox) -> None:
    result = await Shell(box).call({"command": r"printf '\377\376ok'"})
    assert (result.content, result.truncated) == ("\\xff\\xfeok", False)
    result = await Shell(box, output_bytes=100).call({"command": "yes | head -c 5000"})
    assert result.truncated and "output cut" in result.content and len(result.content) < 200


@each_case("arguments", [{}, {"command": 1}, {"command": "x", "timeout": 0}, {"command": "x", "y": 1}])
async def test_wrong_arguments_never_reach_the_box(arguments: dict[str, object]) -> None:
    box = FakeSandbox(SandboxSpec())
    with pytest.raises(ToolArgumentError):
        await Shell(box).call(arguments)
    assert box.commands == []


def test_out_of_memory_is_said() -> None:
    killed = ExecResult(exit_code=137, stdout=b"", stderr=b"", oom=True)
    assert command_result(killed, 100, 1.0).content == "[killed: out of memory]"


async def test_python_session_keeps_its_state(box: Sandbox) -> None:
    python = Python(box)
    assert (await python.call({"code": "x = 20\ndef f(n): return n + x"})).content == "[no output]"
    assert (await python.call({"code": "f(22)"})).content == "42"
    result = await python.call({"code": "import os\nprint('a'); os.system('echo b'); x += 1\nx"})
    assert sorted(result.content.split()) == ["21", "a", "b"]


async def test_python_errors_are_tracebacks_of_the_code(box: Sandbox) -> None:
    python = Python(box)
    result = await python.call({"code": "y = 1\n1/0"})
    assert result.is_error and result.content.endswith("ZeroDivisionError: division by zero")
    assert "<session>" in result.content and "exec(compile" not in result.content
    assert (await python.call({"code": "y"})).content == "1"
    assert "SyntaxError" in (await python.call({"code": "def"})).content
    assert "SystemExit" in (await python.call({"code": "exit(3)"})).content


@pytest.mark.medium
async def test_python_session_that_hangs_or_dies_starts_afresh(box: Sandbox) -> None:
    python = Python(box, timeout_s=10.0)  # which it has to start in, too
    await python.call({"code": "kept = 1"})
    result = await python.call({"code": "while True: pass"})
    assert result.is_error and "restarted" in result.content
    assert "NameError" in (await python.call({"code": "kept"})).content
    assert "restarted" in (await python.call({"code": "import os; os._exit(1)"})).content
    assert (await python.call({"code": "1 + 1"})).content == "2"


async def test_python_output_is_bounded_and_input_ends(box: Sandbox) -> None:
    python = Python(box, output_bytes=200)
    result = await python.call({"code": "print('x' * 100000)"})
    assert result.truncated and len(result.content) < 400
    assert "EOFError" in (await python.call({"code": "input()"})).content
    assert (await python.call({"code": r"import sys; sys.stdout.buffer.write(b'\xff'); None"})).content == "\\xff"


async def test_python_forged_answers_do_not_crash_the_host(box: Sandbox) -> None:
    python = Python(box)
    result = await python.call({"code": "replies.write(b'{}\\n'); replies.flush()"})
    assert "NameError" in result.content  # the session's own names are not the code's
    forge = "import os\nfor fd in range(3, 20):\n  try: os.write(fd, b'not json\\n')\n  except OSError: pass"
    assert (await python.call({"code": forge})).is_error


@each_case(
    "reply",
    [b"[" * 20_000, b"9" * 20_000, b"[1]", b"null", b'{"output": 1, "failed": 0, "cut": 0}', b'{"output": "\xc3\xa9"}'],
)
async def test_a_reply_that_the_code_wrote_itself_is_an_error_that_the_model_reads(reply: bytes) -> None:
    python = Python(cast(Sandbox, Says(b"ready", reply)))
    assert "no readable answer" in (await python.call({"code": "1"})).content


async def test_what_a_python_session_writes_is_bounded() -> None:
    box = Floods(b"ready\n")
    result = await Python(cast(Sandbox, box), output_bytes=50_000).call({"code": "1"})
    assert result.is_error and "it was restarted and is empty" in result.content
    assert box.written <= 2 * 50_000 + 1_024 + (3 << 16)


async def test_python_session_ends_with_aclose(box: Sandbox) -> None:
    python = Python(box)
    await python.call({"code": "z = 1"})
    await python.aclose()
    await python.aclose()
    assert "NameError" in (await python.call({"code": "z"})).content


async def test_read_file_numbers_lines(box: Sandbox) -> None:
    await box.write("d/f.txt", b"one\ntwo\xff\nthree\n")
    read = ReadFile(box)
    assert (await read.call({"path": "d/f.txt"})).content == "1\tone\n2\ttwo\\xff\n3\tthree"
    assert (await read.call({"path": "d/f.txt", "first": 2, "last": 2})).content == "2\ttwo\\xff"
    with pytest.raises(ToolError, match="has 3 lines"):
        await read.call({"path": "d/f.txt", "first": 9})
    with pytest.raises(SandboxPathError):
        await read.call({"path": "../../etc/passwd"})


async def test_write_then_replace_keeps_other_bytes(box: Sandbox) -> None:
    assert (await WriteFile(box).call({"path": "a/b", "content": "ä"})).content == "wrote 2 bytes to a/b"
    await box.write("raw", b"\xff old \xfe")
    replace = ReplaceText(box)
    await replace.call({"path": "raw", "old": "old", "new": "new ü"})
    assert await box.read("raw") == b"\xff new \xc3\xbc \xfe"
    await box.write("twice", b"x x")
    with pytest.raises(ToolError, match="occurs 2 times"):
        await replace.call({"path": "twice", "old": "x", "new": "y"})
    with pytest.raises(ToolError, match="occurs 0 times"):
        await replace.call({"path": "twice", "old": "z", "new": "y"})


PATCH = """\
diff --git a/keep.py b/keep.py
--- a/keep.py
+++ b/keep.py
@@ -40,3 +40,3 @@ a wrong number
 def f():
-    return 1
+    return 2
     # end
--- /dev/null
+++ b/new/file.txt
@@ -0,0 +1,2 @@
+first
+second
--- a/gone.txt
+++ /dev/null
@@ -1 +0,0 @@
-bye
"""


async def test_patch_changes_makes_and_removes_files(box: Sandbox) -> None:
    await box.write("keep.py", b"# \xff\ndef f():\n    return 1\n    # end\n")
    await box.write("gone.txt", b"bye\n")
    result = await ApplyPatch(box).call({"patch": PATCH})
    assert "keep.py" in result.content
    assert await box.read("keep.py") == b"# \xff\ndef f():\n    return 2\n    # end\n"
    assert await box.read("new/file.txt") == b"first\nsecond\n"
    with pytest.raises(SandboxPathError):
        await box.read("gone.txt")


async def test_patch_that_does_not_fit_changes_nothing(box: Sandbox) -> None:
    await box.write("keep.py", b"def f():\n    return 1\n    # end\n")
    await box.write("gone.txt", b"other\n")
    with pytest.raises(ToolError, match=r"hunk 1 does not fit gone\.txt"):
        await ApplyPatch(box).call({"patch": PATCH})
    assert await box.read("keep.py") == b"def f():\n    return 1\n    # end\n"


async def test_search_finds_lines(box: Sandbox) -> None:
    await box.write("a.py", b"import os\nx = 1\n")
    await box.write("d/b.txt", b"Import this\n")
    search = Search(box)
    assert (await search.call({"pattern": "^import"})).content == "a.py:1:import os"
    found = (await search.call({"pattern": "import", "ignore_case": True})).content.splitlines()
    assert sorted(found) == ["a.py:1:import os", "d/b.txt:1:Import this"]
    assert (await search.call({"pattern": "import", "ignore_case": True, "glob": "*.txt"})).content.startswith(
        "d/b.txt"
    )
    assert (await search.call({"pattern": "nothing"})).content == "no match"
    with pytest.raises(ToolError):
        await search.call({"pattern": "(unclosed"})
    assert (await search.call({"pattern": "--help"})).content == "no match"


@each_case("make", [Shell, Python, ReadFile, WriteFile, ReplaceText, ApplyPatch, Search])
def test_is_a_tool_of_the_protocol(make: Callable[[Sandbox], Tool]) -> None:
    tool: Tool = make(FakeSandbox(SandboxSpec()))
    assert tool.schema["name"] == tool.name and tool.schema["description"]
    assert tool.schema["parameters"]["type"] == "object"


async def test_list_files_leaves_out_what_nobody_wrote(box: Sandbox) -> None:
    for path in ("a/b.py", "a/c/d.txt", "z", ".git/config", "a/__pycache__/b.pyc", "a/.hidden"):
        await box.write(path, b"")
    assert (await ListFiles(box).call({})).content.split("\n") == ["a/b.py", "a/c/d.txt", "z"]
    assert (await ListFiles(box).call({"path": "a/c"})).content == "a/c/d.txt"
    await box.exec(["mkdir", "empty"])
    assert (await ListFiles(box).call({"path": "empty"})).content == "no file"
    for path in ("nowhere", "-delete"):
        with pytest.raises(ToolError):
            await ListFiles(box).call({"path": path})


async def test_search_names_the_file_also_if_it_was_given(box: Sandbox) -> None:
    await box.write("a.py", b"x = 1\n")
    assert (await Search(box).call({"pattern": "x", "path": "a.py"})).content == "a.py:1:x = 1"


async def test_a_current_box_is_the_one_of_the_episode() -> None:
    current = CurrentBox()
    with pytest.raises(SandboxError, match="no episode"):
        await current.read("a")
    first, second = FakeSandbox(SandboxSpec()), FakeSandbox(SandboxSpec())
    for box in (first, second):
        current.box = box
        await WriteFile(current).call({"path": "a", "content": "x"})
        assert box.files == {"a": b"x"}
        await current.close()
        await current.close()
        assert box.closed and current.box is None


async def test_a_python_session_starts_whatever_the_work_folder_holds(box: Sandbox) -> None:
    for name in (
        "ast",
        "base64",
        "json",
        "os",
        "tempfile",
        "traceback",
        "sitecustomize",
        "usercustomize",
        "encodings/__init__",
    ):
        await box.write(f"{name}.py", b"import os; os._exit(0)")
    await box.write("mine.py", b"x = 42")
    assert (await Python(box).call({"code": "import mine; mine.x"})).content == "42"


async def test_a_python_session_starts_in_a_box_whose_disk_is_full(box: Sandbox) -> None:
    fill = "for f in /tmp/a /workspace/b; do for i in 1 2 3 4 5 6 7; do cat /dev/zero > $f$i; done; done"
    await box.exec(["sh", "-c", fill])
    assert (await Python(box).call({"code": "1 + 1"})).content == "2"


@each_case("code", [0, 1, 137])
async def test_a_python_session_that_does_not_start_is_the_policys_fault(code: int) -> None:
    with pytest.raises(ToolError, match="no Python session starts"):
        await Python(cast(Sandbox, EndsAtOnce(code))).call({"code": "1"})


async def test_a_box_without_python_is_a_failure_of_the_environment() -> None:
    with pytest.raises(SandboxError, match="no python3"):
        await Python(cast(Sandbox, EndsAtOnce(127))).call({"code": "1"})
