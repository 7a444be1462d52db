"""Files and patches that a policy made large or odd: refused or read in linear time, never a failure of the host."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from each_case import each_case

from agentrl.errors import PolicyFault, SandboxPathError, ToolError
from agentrl.protocols import Sandbox, SandboxSpec
from agentrl.testing.fake_sandbox import FakeSandbox
from agentrl.testing.printing import check_linear
from agentrl_tools.files import ApplyPatch, ReadFile, ReplaceText
from agentrl_tools.patching import Hunk, apply_hunks, parse_patch

HEADER = "--- a/f\n+++ b/f\n"


def box_of(**files: bytes) -> Sandbox:
    return FakeSandbox(SandboxSpec(files=files))


async def test_a_file_larger_than_the_bound_is_refused_before_it_is_read() -> None:
    box = box_of(f=b"\n" * 6_000_000)
    patch = HEADER + "@@ -1 +1 @@\n-\n+x\n"
    calls = [ReadFile(box).call({"path": "f"}), ReplaceText(box).call({"path": "f", "old": "a", "new": "b"})]
    calls.append(ApplyPatch(box).call({"patch": patch}))
    for call in calls:
        tracemalloc.start()
        try:
            with pytest.raises(SandboxPathError, match="larger than 4194304 bytes"):
                await call
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()


async def test_of_a_file_with_endless_lines_only_what_is_shown_is_numbered() -> None:
    read = ReadFile(box_of(f=b"\n" * 4_000_000))
    tracemalloc.start()
    try:
        result = await read.call({"path": "f"})
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()
    assert result.truncated and result.content.startswith("1\t\n2\t\n") and result.content.endswith("4000000\t")
    assert (await read.call({"path": "f", "first": 3_999_999})).content == "3999999\t\n4000000\t"


@pytest.mark.medium
def test_reading_a_patch_costs_no_more_than_linear_time_and_memory() -> None:
    lines = [HEADER, "--- a/f\n", "+++ b/f\n", "@@ -1 +1 @@\n", "\\ No newline\n"]
    check_linear(parse_patch, words=[*lines, "@@ -1,2 ", "+1", "+", "diff --git "])


def test_applying_a_patch_costs_no_more_than_linear_time_and_memory() -> None:
    def long_hunk(text: str) -> str:
        wanted = " \n" * (len(text) // 4)
        return apply_hunks(text, parse_patch(f"{HEADER}@@ -1 +1 @@\n{wanted}-end\n")[0].hunks, "f")

    def many_hunks(text: str) -> str:
        return apply_hunks("\n" * len(text), parse_patch(HEADER + text)[0].hunks, "f")

    check_linear(long_hunk, signs=["\n"], seeds=0)
    check_linear(many_hunks, signs=["@@ -1 +1 @@\n-\n+x\n"], seeds=0)


@each_case(
    "patch",
    [
        HEADER + "@@ -" + "9" * 5_000 + " +1 @@\n-a\n+b\n",
        HEADER + "@@ -" + "9" * 20 + " +1 @@\n-a\n+b\n",
        "".join(f"--- /dev/null\n+++ b/f{n}\n@@ -0,0 +1 @@\n+x\n" for n in range(9_100)),
    ],
)
async def test_a_patch_beyond_all_bounds_is_the_policys_fault(patch: str) -> None:
    box = box_of(f=b"a\n")
    with pytest.raises(ToolError):
        await ApplyPatch(box).call({"patch": patch})
    assert await box.read("f") == b"a\n"


async def test_hunks_that_take_too_long_to_place_are_refused_and_the_next_call_works() -> None:
    box = box_of(f=(b"\n" * 999 + b"a\n") * 200)
    with pytest.raises(PolicyFault, match="takes too long to place"):
        await ApplyPatch(box).call({"patch": HEADER + "@@ -1 +1 @@\n-a\n+b\n" * 200})
    await ApplyPatch(box).call({"patch": HEADER + "@@ -190010 +1 @@\n-a\n+b\n"})
    lines = (await box.read("f")).split(b"\n")
    assert lines[189_999] == b"b" and lines.count(b"b") == 1


def test_hunks_go_where_a_plain_search_puts_them() -> None:
    chosen = random.Random(1)
    for _ in range(300):
        lines = chosen.choices("ab", k=chosen.randint(0, 12))
        old, hint = chosen.choices("ab", k=chosen.randint(1, 4)), chosen.randint(1, 14)
        places = [at for at in range(len(lines) - len(old) + 1) if lines[at : at + len(old)] == old]
        place = min(places, key=lambda at: abs(at - hint + 1), default=None)
        text = "".join(f"{line}\n" for line in lines)
        hunk = Hunk(hint, old, ["X"])
        if place is None:
            with pytest.raises(ToolError, match="does not fit"):
                apply_hunks(text, [hunk], "f")
        else:
            wanted = [*lines[:place], "X", *lines[place + len(old) :]]
            assert apply_hunks(text, [hunk], "f").split("\n")[:-1] == wanted


async def test_line_numbers_written_with_a_point_are_line_numbers() -> None:
    box = box_of(f=b"a\nb\nc\n")
    assert (await ReadFile(box).call({"path": "f", "first": 2.0, "last": 2.0})).content == "2\tb"
