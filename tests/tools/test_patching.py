"""All of a patch is applied, or nothing: what git says of files beside their lines, and what no patch can say."""

from __future__ import annotations

import pytest
from each_case import each_case

from agentrl.errors import PolicyFault, SandboxPathError, ToolError
from agentrl.protocols import Sandbox, SandboxSpec
from agentrl.testing.fake_sandbox import FakeSandbox
from agentrl_environments.swe.trees import reversed_patch
from agentrl_tools.files import ApplyPatch, WriteFile
from agentrl_tools.patching import parse_patch

FIRST = "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 1\n+x = 10\n"
GIT = """\
diff --git a/tests/__init__.py b/tests/__init__.py
new file mode 100644
index 0000000..e69de29
diff --git a/old.sh b/tests/new.sh
similarity index 100%
rename from old.sh
rename to tests/new.sh
diff --git a/gone.py b/gone.py
deleted file mode 100644
index e69de29..0000000
diff --git a/run b/run
old mode 100644
new mode 100755
diff --git a/a.py b/b.py
similarity index 60%
copy from a.py
copy to b.py
index 1..2 100644
--- a/a.py
+++ b/b.py
@@ -1 +1 @@
-x = 1
+x = 10
"""


async def patched(patch: str, **files: bytes) -> dict[str, bytes]:
    box = FakeSandbox(SandboxSpec(files={name.replace("_py", ".py"): data for name, data in files.items()}))
    await ApplyPatch(box).call({"patch": patch})
    return box.files


@each_case("header", ["@@ def foo():", "@@ @@", "@@", "@@ -10,2 +10,3", "@@ ... @@", "@@@ -1 -1 +1 @@@"])
async def test_a_line_that_is_no_header_of_a_hunk_is_an_error_and_nothing_is_written(header: str) -> None:
    box = FakeSandbox(SandboxSpec(files={"a.py": b"x = 1\nw = 4\n"}))
    with pytest.raises(
        ToolError, match=r"^line 6 of the patch is no header of a hunk: .*; write .*'@@ -12,3 \+12,4 @@'"
    ):
        await ApplyPatch(box).call({"patch": f"{FIRST}{header}\n-w = 4\n+w = 40\n"})
    assert box.files["a.py"] == b"x = 1\nw = 4\n"


async def test_lines_end_where_files_have_it_so() -> None:
    windows = await patched("--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n x\r\n-y\r\n+z\r\n", a_py=b"x\r\ny\r\n")
    assert windows["a.py"] == b"x\r\nz\r\n"
    odd = "a\x0cb\x1c\u2028c\x85\rd"
    made = await patched(f"--- a/a.py\n+++ b/a.py\n@@ -1 +1,2 @@\n {odd}\n+end\n", a_py=f"{odd}\n".encode())
    assert made["a.py"] == f"{odd}\nend\n".encode()


@pytest.mark.bubblewrap
async def test_what_git_says_beside_the_lines_is_applied(box: Sandbox) -> None:
    for name in ("gone.py", "run"):
        await box.write(name, b"")
    await box.write("a.py", b"x = 1\n")
    await box.write("old.sh", b"echo hi\n")
    await box.exec(["chmod", "+x", "old.sh"])
    await ApplyPatch(box).call({"patch": GIT})
    left = await box.exec(["find", ".", "-type", "f", "-printf", "%P %m\n"])
    modes = {
        name: bool(int(mode, 8) & 0o100) for name, mode in (line.split() for line in left.stdout.decode().splitlines())
    }
    assert modes == {"tests/__init__.py": False, "tests/new.sh": True, "run": True, "a.py": False, "b.py": False}
    assert await box.read("b.py") == b"x = 10\n" and await box.read("a.py") == b"x = 1\n"
    assert await box.read("tests/__init__.py") == b"" and await box.read("tests/new.sh") == b"echo hi\n"
    await ApplyPatch(box).call({"patch": "diff --git a/run b/run\nold mode 100755\nnew mode 100644\n"})
    assert (await box.exec(["test", "-x", "run"])).exit_code == 1


def test_what_git_says_can_be_taken_back() -> None:
    back = reversed_patch(GIT.partition("diff --git a/a.py")[0])
    said = [(one.old, one.new, one.executable) for one in parse_patch(back)]
    init, new = "tests/__init__.py", "tests/new.sh"
    assert said == [("run", "run", False), (None, "gone.py", False), (new, "old.sh", None), (init, None, None)]


@each_case(
    ("patch", "why"),
    [
        ("diff --git a/d.bin b/d.bin\nnew file mode 100644\nGIT binary patch\nliteral 3\nKcmZQz\n", r"binary.*d\.bin"),
        ("diff --git a/d.bin b/d.bin\nindex 1..2 100644\nBinary files a/d.bin and b/d.bin differ\n", r"binary.*d\.bin"),
        ("Binary files a/d.bin and b/d.bin differ\n", r"binary.*d\.bin"),
        (
            "diff --git a/link b/link\nnew file mode 120000\n--- /dev/null\n+++ b/link\n@@ -0,0 +1 @@\n+/etc\n",
            "mode 120000",
        ),
        ("diff --git a/x b/y\nnew file mode 100644\n", "names no file"),
        ("--- a/a.py\n+++ b/a.py\n", r"no hunk found for a\.py"),
        ('--- "a/\\377"\n+++ "b/\\377"\n@@ -1 +1 @@\n-a\n+b\n', "cannot be read: write it without quotes"),
        ("diff --git \n@@ -1 +1 @@\n-a\n+b\n", "names no file"),
    ],
)
async def test_what_a_patch_cannot_say_is_named_and_nothing_is_written(patch: str, why: str) -> None:
    for whole in (patch, FIRST + patch):
        box = FakeSandbox(SandboxSpec(files={"a.py": b"x = 1\n"}))
        with pytest.raises(ToolError, match=why):
            await ApplyPatch(box).call({"patch": whole})
        assert box.files == {"a.py": b"x = 1\n"} and not box.commands


@pytest.mark.bubblewrap
async def test_a_path_that_cannot_be_written_takes_all_back(box: Sandbox) -> None:
    await box.write("a.py", b"x = 1\n")
    await box.write("there", b"old\n")
    new = "--- /dev/null\n+++ b/{}\n@@ -0,0 +1 @@\n+new\n"
    for bad in ("../../bad", "a.py/below", "/etc/bad"):
        with pytest.raises(SandboxPathError):
            await ApplyPatch(box).call({"patch": FIRST + new.format("good.py") + new.format("there") + new.format(bad)})
        assert (await box.read("a.py"), await box.read("there")) == (b"x = 1\n", b"old\n")
        with pytest.raises(SandboxPathError):
            await box.read("good.py")


def test_names_that_git_quotes_are_read() -> None:
    old, new = (rf'"{side}/\303\251 \"x\".py"' for side in "ab")
    (made,) = parse_patch(f"diff --git {old} {new}\nnew file mode 100644\n")
    (changed,) = parse_patch(f"--- {old}\n+++ {new}\n@@ -1 +1 @@\n-a\n+b\n")
    assert made.new == changed.old == changed.new == 'é "x".py'


async def test_two_names_of_one_file_are_one_file() -> None:
    again = FIRST.replace("a/a.py", "a/./a.py").replace("b/a.py", "b/d/../a.py").replace("x = 1", "x = 10")
    assert (await patched(FIRST + again, a_py=b"x = 1\n"))["a.py"] == b"x = 100\n"


async def test_what_is_kept_to_take_a_patch_back_is_bounded() -> None:
    files = {f"f{at}": b"x\n" * 1_900_000 for at in range(6)}
    box = FakeSandbox(SandboxSpec(files=files))
    parts = [f"--- /dev/null\n+++ b/{name}\n@@ -0,0 +1 @@\n+x\n" for name in files]
    with pytest.raises(PolicyFault, match="more than 16777216 bytes"):
        await ApplyPatch(box).call({"patch": "".join(parts)})
    await WriteFile(box).call({"path": "f0", "content": ""})


MAIL = """\
From 7be525c9d9ec400be1c288ee1aa832e4cd89316b Mon Sep 17 00:00:00 2001
From: N <n@example.org>
Subject: [PATCH 1/2] First

---
 m | 2 +-
 1 file changed, 1 insertion(+), 1 deletion(-)

diff --git a/m b/m
index c63bfd6..6372083 100644
--- a/m
+++ b/m
@@ -1,3 +1,3 @@
 a
-- b
+c
 d
-- 
2.39.5

From fd3c80cf4cbd9b9db6106a43ded541d36865461c Mon Sep 17 00:00:00 2001
Subject: [PATCH 2/2] Second

---
 m | 1 +
 n | 1 +

diff --git a/m b/m
index 6372083..3d9570c 100644
--- a/m
+++ b/m
@@ -1,3 +1,4 @@
 a
 c
 d
+e
diff --git a/n b/n
new file mode 100644
index 0000000..587be6b
--- /dev/null
+++ b/n
@@ -0,0 +1 @@
+x
-- 
2.39.5 (Apple Git-154)

"""


@pytest.mark.bubblewrap
async def test_a_mail_of_two_commits_is_applied_and_taken_back(box: Sandbox) -> None:
    """As `git format-patch --stdout` wrote it: each commit ends in two dashes and git's version."""
    await box.write("m", b"a\n- b\nd\n")
    tool = ApplyPatch(box)
    await tool.call({"patch": MAIL})
    assert (await box.read("m"), await box.read("n")) == (b"a\nc\nd\ne\n", b"x\n")
    await tool.call({"patch": reversed_patch(MAIL)})
    assert await box.read("m") == b"a\n- b\nd\n"
    with pytest.raises(SandboxPathError):
        await box.read("n")
