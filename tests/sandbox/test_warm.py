"""Warm interpreters: a run costs no box, can only compute, and leaves nothing to the run after it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import trio
from each_case import each_case

from agentrl.errors import SandboxUnavailable
from agentrl.protocols import Limits, Sandbox, SandboxSpec
from agentrl.sandbox import backend
from agentrl.sandbox.bubblewrap import seccomp
from agentrl.sandbox.shared_backend import SharedBackend
from agentrl.sandbox.warm_python import WarmPython

pytestmark = pytest.mark.bubblewrap

SPEC = SandboxSpec(limits=Limits(wall_s=5.0, cpu_s=2.0, memory_bytes=256 << 20, pids=8, output_bytes=16 << 10))
BEFORE = "import posix, sys\ncode = sys.stdin.buffer.read().decode()\n"
AFTER = "said = []\nexec(code)\nposix.write(1, repr(said).encode())\nposix._exit(0)\n"
# What a run can see of what came before it. `os` is frozen into the interpreter: no file is read for it.
PROBE = """
import builtins, os, sys
said += [len("abc"), sorted(os.environ), sorted(sys.modules), sorted(globals()), sys.argv, sys.path]
said += [sys.getrecursionlimit(), sorted(vars(builtins)), sys._getframe(1).f_back is None, {}.get("left")]
"""
MARK = "a secret of the first run"[::-1]


class Counted:
    """A backend that counts its boxes."""

    name = "counted"

    def __init__(self) -> None:
        self.boxes: list[Sandbox] = []
        self._inner = backend("bubblewrap")

    async def create(self, spec: SandboxSpec) -> Sandbox:
        self.boxes.append(await self._inner.create(spec))
        return self.boxes[-1]

    async def aclose(self) -> None:
        await self._inner.aclose()


@pytest.fixture
async def boxes() -> AsyncGenerator[Counted]:
    boxes = Counted()
    yield boxes
    await boxes.aclose()


def warm_in(boxes: Counted | SharedBackend, *, before: str = BEFORE, deadline_s: float = 20.0) -> WarmPython:
    return WarmPython(boxes, SPEC, before=before, after=AFTER, deadline_s=deadline_s)


async def test_many_runs_cost_one_box(boxes: Counted) -> None:
    warm = warm_in(boxes)
    for number in range(20):
        assert await warm.run(f"said.append({number} * 2)".encode()) == f"[{number * 2}]".encode()
    assert len(boxes.boxes) == 1


@pytest.mark.filterwarnings("ignore:sandbox 'local-unsafe'")
async def test_without_a_wall_around_the_box_a_run_is_shut_in_all_the_same() -> None:
    plain = backend("local-unsafe")
    warm = WarmPython(plain, SandboxSpec(), before=BEFORE, after=AFTER, deadline_s=60.0)
    said = [await warm.run(code) for code in (b"said.append(1)", b"import os\nos.getpid()", b"said.append(2)")]
    await plain.aclose()
    assert said == [b"[1]", None, b"[2]"]


async def test_runs_at_the_same_time_have_an_interpreter_each(boxes: Counted) -> None:
    warm, answers = warm_in(boxes), dict[int, bytes | None]()

    async def run(number: int) -> None:
        answers[number] = await warm.run(f"said.append({number})".encode())

    for _ in range(2):
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(run, number)
        assert answers == {number: f"[{number}]".encode() for number in range(4)}
    assert len(boxes.boxes) == 4


HOSTILE = {
    "kill the parent": "import os\nos.kill(os.getppid(), 9)",
    "stop the parent": "import os\nos.kill(os.getppid(), 19)",
    "signal all in sight": "import os\nos.kill(-1, 9)",
    "find the parent": "import os\nsaid.append(os.getppid())",
    "read the parent's memory": "open('/proc/1/mem', 'rb')",
    "look for descriptors of the parent": "import os\nsaid.append(os.listdir('/proc/self/fd'))",
    "duplicate descriptors": "import os\nsaid += [os.dup(fd) for fd in range(3)]",
    "close descriptors": "import os\nos.closerange(0, 256)",
    "leave a module in the work folder": "open('/workspace/ast.py', 'w').write('1/0')",
    "leave a file elsewhere": "open('/tmp/left', 'w').close()",
    "leave a daemon": "import os\nif not os.fork():\n    os.setsid()\n    while True: pass",
    "a fork bomb": "import os\nwhile True: os.fork()",
    "a thread": "import _thread\n_thread.start_new_thread(print, ())",
    "another program": "import os\nos.execv('/usr/bin/sleep', ['sleep', '1000'])",
    "sleep": "import time\ntime.sleep(1000)",
    "handle the trap": "import signal\nsignal.signal(31, lambda *_: None)",
    "shared memory": "import mmap\nmmap.mmap(-1, 4096)\nimport os\nos.memfd_create('x')",
    "a socket": "import socket\nsocket.socket(socket.AF_UNIX)",
    "the parent's clock": "import time\nsaid.append(time.clock_gettime(~1 << 3 | 2))",
    "priorities": "import os\nos.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
    "memory without end": "x = b'x' * (1 << 30)",
    "crash": "f = lambda: 0\nf.__code__ = f.__code__.replace(co_code=b'\\x90\\x7f\\x90\\xff\\x90\\xff\\x64\\xff')\nf()",
}


@pytest.mark.medium
@each_case("code", HOSTILE.values())
async def test_a_run_that_does_more_than_compute_has_no_answer_and_leaves_nothing(boxes: Counted, code: str) -> None:
    warm, before = warm_in(boxes), len(boxes.boxes)
    fresh = await warm.run(PROBE.encode())
    assert fresh is not None
    assert await warm.run(code.encode()) is None
    assert await warm.run(PROBE.encode()) == fresh
    assert len(boxes.boxes) <= before + 2


HARMLESS = {
    "patch what is built in": "import builtins\nbuiltins.len = lambda _: 7\nbuiltins.left = 1",
    "patch modules": "import sys\nsys.modules.clear()\nsys.path[:] = ['/workspace']\nsys.setrecursionlimit(50)",
    "the environment": "import os\nos.environ['PYTHONSTARTUP'] = '/workspace/x.py'\nos.putenv('LEFT', '1')",
    "globals": "import __main__\n__main__.left = posix.left = 1",
    "exit": "posix._exit(0)",
    "exit with a failure": "posix._exit(9)",
    "forge frames of the parent": "posix.write(1, b'\\0\\0\\0\\0\\1x' * 3)\nposix._exit(0)",
    "raise": "raise SystemExit(3)",
}


@each_case("code", HARMLESS.values())
async def test_changes_to_its_own_memory_end_with_a_run(boxes: Counted, code: str) -> None:
    warm, before = warm_in(boxes), len(boxes.boxes)
    fresh = await warm.run(PROBE.encode())
    await warm.run(code.encode())
    assert fresh is not None and await warm.run(PROBE.encode()) == fresh
    assert len(boxes.boxes) == before + 1


async def test_a_run_that_writes_without_end_is_ended(boxes: Counted) -> None:
    warm = warm_in(boxes)
    assert await warm.run(b"while True: posix.write(1, b'x' * 4096)") is None
    assert await warm.run(b"said.append(1)") == b"[1]"
    assert len(boxes.boxes) == 1


async def test_a_run_past_its_deadline_costs_the_interpreter(boxes: Counted) -> None:
    warm = warm_in(boxes, deadline_s=0.2)
    assert await warm.run(b"while True: pass") is None
    warm = warm_in(boxes)
    assert await warm.run(b"said.append(1)") == b"[1]"
    with pytest.raises(Exception, match="closed"):
        await boxes.boxes[0].read("x")


async def test_an_interpreter_that_died_is_replaced(boxes: Counted) -> None:
    warm = warm_in(boxes)
    assert await warm.run(b"said.append(1)") == b"[1]"
    await boxes.boxes[0].close()
    assert await warm.run(b"said.append(2)") == b"[2]"


async def test_no_run_finds_the_input_or_output_of_another_in_its_memory(boxes: Counted) -> None:
    """The second run searches all of its memory, before it is shut in."""
    search = """
left = 0
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps.readlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if " rw" in line and "[v" not in line:
            memory.seek(start)
            left += memory.read(end - start).count(bytes(reversed(needle)))
"""
    search = f"needle = {MARK.encode()!r}\nif code.startswith('#search'):" + search.replace("\n", "\n    ")
    warm = warm_in(boxes, before=BEFORE + search + "\n")
    marks = 600 * MARK[::-1]
    assert await warm.run(f"said.append({marks!r})".encode()) == f"[{marks!r}]".encode()
    assert await warm.run(b"#search\nsaid.append(left)") == b"[0]"
    assert await warm.run(f"#search {MARK[::-1]}\nsaid.append(left > 0)".encode()) == b"[True]"


@pytest.mark.parametrize("after_s", [0.0, 0.1], ids=["as its interpreter is looked at", "as it runs"])
async def test_a_cancelled_run_leaves_no_box(boxes: Counted, after_s: float) -> None:
    warm = warm_in(boxes)
    await warm.run(b"")
    with trio.move_on_after(after_s):
        await warm.run(b"while True: pass")
    with pytest.raises(Exception, match="closed"):
        await boxes.boxes[0].read("x")


async def test_a_backend_that_closed_meanwhile_is_used_again() -> None:
    boxes = SharedBackend("bubblewrap")
    warm = warm_in(boxes)
    for number in range(2):
        await boxes.enter()
        assert await warm.run(f"said.append({number})".encode()) == f"[{number}]".encode()
        await boxes.leave()


async def test_a_filter_that_does_not_hold_is_noticed(boxes: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    await boxes.create(SPEC)  # the boxes' own filter is the true one
    allow_all = bytes([0x06, 0, 0, 0]) + (0x7FFF0000).to_bytes(4, "little")
    monkeypatch.setattr(seccomp, "program", lambda kind: allow_all)
    warm = warm_in(boxes)
    assert [await warm.run(b"said.append(1)") for _ in range(3)] == [None] * 3
    assert len(boxes.boxes) == 2  # it is not tried again


async def test_a_machine_without_a_filter_runs_nothing_warm(boxes: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(kind: str) -> bytes:
        raise SandboxUnavailable("no filter for a vax")

    monkeypatch.setattr(seccomp, "program", program)
    assert await warm_in(boxes).run(b"said.append(1)") is None
    assert not boxes.boxes


async def test_what_does_not_fit_is_run_another_way(boxes: Counted) -> None:
    assert await warm_in(boxes).run(b"#" * (1 << 20)) is None
    assert not boxes.boxes
