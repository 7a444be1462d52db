"""Red team: attempts to use up the host's resources, or to spoil later commands.

Each attack ends by itself at a bound that the machine can bear, or is made only after a probe has proven its wall.
"""

from __future__ import annotations

import functools
import os
import resource
import secrets
from contextlib import suppress
from pathlib import Path

import trio

from agentrl.errors import SandboxPathError
from agentrl.protocols import Limits
from agentrl.testing.sandbox import walls
from agentrl.testing.sandbox.case import GUARD_S, QUICK, Bench, Case, case, output, py, sh

CASES: list[Case] = []
attack = functools.partial(case, CASES, "red team")
_MB = 1 << 20


def own_memory() -> int:
    """Peak resident memory of this process, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@attack()
async def _(bench: Bench) -> None:
    """a fork bomb"""
    async with bench.box(limits=Limits(pids=32, wall_s=20.0)) as box:
        # The proof first: without the bound this attack would take the machine down that runs the test, and with it
        # every other run there.
        await walls.bounded_processes(box, 32)
        with trio.fail_after(GUARD_S):
            await sh(box, "b() { b | b & }; b; sleep 1", timeout_s=2.0)
            attack_program = """
import os, time
n = 0
try:
    while n < 100 and os.fork(): n += 1
    if n < 100: time.sleep(1); os._exit(0)
except OSError: pass
print(n)
"""
            result = await py(box, attack_program)
            assert 0 < int(result.stdout) <= 32, result
            assert await output(box, "echo alive") == "alive\n"


@attack()
async def _(bench: Bench) -> None:
    """a thread bomb"""
    attack_program = """
import threading, time
n = 0
try:
    while n < 500:
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start(); n += 1
except RuntimeError: pass
print(n, flush=True)
"""
    async with bench.box(limits=Limits(pids=32, wall_s=20.0)) as box:
        result = await py(box, attack_program)
        assert 0 < int(result.stdout) <= 32, result


@attack()
async def _(bench: Bench) -> None:
    """a memory bomb in one process"""
    attack_program = "b = [bytearray(b'x') * (16 << 20) for _ in range(64)]"
    async with bench.box(limits=Limits(memory_bytes=128 * _MB, wall_s=20.0)) as box:
        with trio.fail_after(GUARD_S):
            result = await py(box, attack_program)
        assert not result.timed_out and result.exit_code != 0, result
        assert result.oom or b"MemoryError" in result.stderr, result
        assert await output(box, "echo alive") == "alive\n"


_HOARD = """
import ctypes, os, socket, sys
most, libc = 512 << 20, ctypes.CDLL(None)
libc.shmat.restype, libc.mmap.restype = ctypes.c_void_p, ctypes.c_void_p
libc.shmget.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.shmdt.argtypes, libc.munmap.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t]
libc.vmsplice.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
held, kept = 0, []  # bytes that are in no address space, and what holds them
def fill(put, size):
    global held
    while held < most and (sent := put(bytes(size))):
        held += sent
def pairs():
    while held < most:
        kept.append(pair := socket.socketpair())
        for one in pair:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, most)
            one.setblocking(False)
            try: fill(one.send, 4096)
            except BlockingIOError: pass
def datagrams():
    global held
    while held < most:
        kept.append(one := socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, most)
        one.bind(("127.0.0.1", 0))
        room = one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        for _ in range(room // 40000): kept[0].sendto(bytes(40000), one.getsockname())
        held += room
def pipes():
    while held < most:
        kept.append(pipe := os.pipe())
        os.set_blocking(pipe[1], False)
        try: __import__("fcntl").fcntl(pipe[1], 1031, 1 << 20)
        except OSError: pass
        try: fill(lambda data: os.write(pipe[1], data), 4096)
        except BlockingIOError: pass
def huge_pages():  # 4 KiB in a pipe hold 2 MiB
    global held
    class Vector(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
    while held < most:
        kept.append(pipe := os.pipe())
        for _ in range(16):
            at = libc.mmap(None, 4 << 20, 3, 0x22, -1, 0)
            page = at + (2 << 20) - 1 & -(2 << 20)
            libc.madvise(page, 2 << 20, 14)
            ctypes.memset(page, 1, 2 << 20)
            assert libc.vmsplice(pipe[1], ctypes.byref(Vector(page, 4096)), 1, 2) > 0
            libc.munmap(at, 4 << 20)
            held += 2 << 20
def nameless_files():
    while held < most:
        kept.append(file := os.memfd_create("hoard"))
        for _ in range(8): fill(lambda data: os.write(file, data), 1 << 20)
def segments():
    global held
    while held < most:
        at = libc.shmat(libc.shmget(0, 32 << 20, 0o1600), None, 0)
        assert at not in (None, 2**64 - 1)
        ctypes.memset(at, 1, 32 << 20)
        libc.shmdt(at)
        held += 32 << 20
try: globals()[sys.argv[1]]()
except (OSError, AssertionError): pass
print(held >> 20)
"""


@attack(deadline_s=180.0)
async def _(bench: Bench) -> None:
    """memory in no address space: sockets, pipes, files without a name, System V's segments"""
    async with bench.box(limits=Limits(memory_bytes=128 * _MB, disk_bytes=16 * _MB, wall_s=30.0)) as box:
        for hoard_kind in ("pairs", "datagrams", "pipes", "huge_pages", "nameless_files", "segments"):
            result = await py(box, _HOARD, hoard_kind)
            was_killed = result.exit_code == 137
            assert was_killed or (result.exit_code == 0 and int(result.stdout) <= 192), (hoard_kind, result)
        assert await output(box, "echo alive") == "alive\n"


@attack()
async def _(bench: Bench) -> None:
    """more CPU time than the deadline: all cores, all processes"""
    async with bench.box(limits=Limits(cpu_s=30.0, wall_s=1.0)) as box:
        with trio.fail_after(GUARD_S):
            result = await sh(box, "for i in 1 2 3 4 5 6 7 8; do timeout 600 sh -c 'while :; do :; done' & done; wait")
        assert result.timed_out, result


@attack()
async def _(bench: Bench) -> None:
    """filling the disk from the work folder with many files"""
    disk_limits = Limits(disk_bytes=16 * _MB, file_bytes=4 * _MB, wall_s=20.0)
    async with bench.box(limits=disk_limits) as box:
        with trio.fail_after(GUARD_S):
            await sh(
                box, "i=0; while [ $i -lt 40 ]; do head -c 2000000 /dev/zero > f$i || exit 1; i=$((i+1)); done; sleep 1"
            )
            used_bytes = int(await output(box, "du -sk . | cut -f1")) * 1024
            # Twice the bound: a backend that can only measure the folder is late by what is written between two looks.
            assert used_bytes <= 2 * disk_limits.disk_bytes, (
                f"{used_bytes} bytes written past a bound of {disk_limits.disk_bytes}"
            )
            await output(box, "rm -f f*")
            await box.write("after", b"still usable")


@attack()
async def _(bench: Bench) -> None:
    """filling the disk from /tmp and /dev/shm"""
    disk_limits = Limits(disk_bytes=16 * _MB, file_bytes=64 * _MB, memory_bytes=128 * _MB, wall_s=20.0)
    async with bench.box(limits=disk_limits) as box:
        for memory_folder in ("/tmp", "/dev/shm"):
            folder = f"{memory_folder}/agentrl-{secrets.token_hex(8)}"
            fill_script = (
                f"mkdir {folder} && cd {folder} && for i in 1 2 3 4 5; do head -c 60000000 /dev/zero > f$i; done"
            )
            with trio.fail_after(GUARD_S):
                result = await sh(box, f"{fill_script}; du -sk . | cut -f1; sleep 1")
            written_bytes = int(result.stdout.split()[0]) * 1024 if result.stdout.split() else 0
            assert written_bytes <= 2 * disk_limits.disk_bytes, f"{written_bytes} bytes in {memory_folder}"
            await sh(box, f"rm -rf {folder}")


@attack()
async def _(bench: Bench) -> None:
    """one file larger than the bound, also a sparse one"""
    async with bench.box(limits=Limits(file_bytes=1 * _MB, wall_s=20.0)) as box:
        result = await sh(
            box, "head -c 50000000 /dev/zero > big; truncate -s 1T sparse; stat -c %s big sparse 2>/dev/null"
        )
        assert all(int(file_size) <= _MB for file_size in result.stdout.split()), result


@attack()
async def _(bench: Bench) -> None:
    """locks and watches on the system's files, which other boxes and the host use too"""
    lock_program = "import fcntl, sys; f = open('/usr/bin/env'); fcntl.flock(f, 2 | 4); print('held', flush=True)"
    watch_program = """
import ctypes, select, sys
libc = ctypes.CDLL(None)
watcher = libc.inotify_init()
if watcher >= 0: libc.inotify_add_watch(watcher, b"/usr/bin", 0x3F)
print("ready", flush=True)
sys.stdin.readline()
print(bool(watcher >= 0 and select.select([watcher], [], [], 0)[0]), flush=True)
"""
    async with bench.box() as first_box, bench.box() as other_box:
        holder = await first_box.start(["python3", "-c", f"{lock_program}; sys.stdin.read()"])
        with trio.fail_after(GUARD_S):
            assert await holder.receive() == b"held\n"
            watcher = await first_box.start(["python3", "-c", watch_program])  # it may see all of its own box
            assert await watcher.receive() == b"ready\n"
            assert (await py(other_box, lock_program)).stdout == b"held\n", "a lock is shared with another box"
            await sh(other_box, "/usr/bin/env true")
            with suppress(OSError):
                await trio.Path("/usr/bin/env").read_bytes()
            await watcher.send(b"\n")
            assert await watcher.receive() == b"False\n", "what others open is seen"


@attack(deadline_s=120.0)
async def _(bench: Bench) -> None:
    """a hundred thousand empty files"""
    attack_program = """
import os, sys, tempfile
made = 0
for place in ("/workspace", "/tmp", "/dev/shm"):
    with tempfile.TemporaryDirectory(dir=place, prefix="agentrl-") as folder:
        n = 0
        try:
            while n < 100_000: os.close(os.open(f"{folder}/{n}", os.O_CREAT)); n += 1
        except OSError: pass
        print(place, n, flush=True)
"""
    async with bench.box(limits=Limits(disk_bytes=16 * _MB, wall_s=60.0, cpu_s=60.0)) as box:
        await walls.own_work_folder(box)
        with trio.fail_after(2 * GUARD_S):
            result = await py(box, attack_program)
        file_counts = [int(line.split()[1]) for line in result.stdout.splitlines()]
        assert len(file_counts) == 3 and max(file_counts) < 80_000, result


@attack()
async def _(bench: Bench) -> None:
    """endless output on stdout and stderr"""
    async with bench.box(limits=Limits(output_bytes=10_000, wall_s=2.0, cpu_s=30.0)) as box:
        used_before = own_memory()
        with trio.fail_after(GUARD_S):
            # Endless for the bound of 10,000 bytes, and with an end of its own: a backend that fails the case must not
            # fill this machine.
            endless_output = "yes | head -c 200000000"
            result = await sh(box, f"({endless_output}) & ({endless_output}) >&2; sleep 30")
        assert result.timed_out and result.truncated, result
        assert (len(result.stdout), len(result.stderr)) == (10_000, 10_000)
        assert own_memory() - used_before < 50 * _MB


@attack()
async def _(bench: Bench) -> None:
    """reading a file that grows without end or is sparse"""
    async with bench.box(limits=Limits(disk_bytes=8 * _MB, wall_s=20.0)) as box:
        await sh(box, "truncate -s 60M sparse")
        used_before = own_memory()
        for sparse_path in ("sparse", "/workspace/sparse"):
            with suppress(SandboxPathError):
                assert len(await box.read(sparse_path)) <= 64 * _MB
        assert own_memory() - used_before < 200 * _MB


@attack()
async def _(bench: Bench) -> None:
    """snapshot and download of a sparse tree that is a thousand times larger than the disk"""
    async with bench.box(limits=Limits(disk_bytes=16 * _MB, file_bytes=64 * _MB, wall_s=20.0)) as box:
        await output(box, "mkdir s; cd s; for i in $(seq 1 200); do truncate -s 60M f$i; done")
        with trio.fail_after(GUARD_S):
            with suppress(SandboxPathError):
                await box.snapshot()
        await output(box, "rm -rf s")
        await box.restore(await box.snapshot())


@attack()
async def _(bench: Bench) -> None:
    """a tree too deep to walk"""
    attack_program = "import os\nfor n in range(3000):\n  try: os.mkdir('d'); os.chdir('d')\n  except OSError: break"
    async with bench.box() as box:
        await py(box, attack_program)
        with trio.fail_after(GUARD_S):
            with suppress(SandboxPathError):
                await box.snapshot()


@attack()
async def _(bench: Bench) -> None:
    """names and modes that make removal hard"""
    attack_program = """
import os
os.makedirs(b"locked/\\xff\\xfe/in"); open(b"locked/\\xff\\xfe/in/\\n", "w").close()
for path in (b"locked/\\xff\\xfe/in", b"locked/\\xff\\xfe", b"locked"): os.chmod(path, 0)
os.chmod(".", 0)
"""
    async with bench.box() as box:
        await py(box, attack_program)
        await sh(box, "true")
    async with bench.box() as box:
        assert await output(box, "echo alive") == "alive\n"


@attack()
async def _(bench: Bench) -> None:
    """taking the work folder away: modes, renames, deletion"""
    async with bench.box() as box:
        await walls.own_work_folder(box)
        await sh(box, "cd /; rm -rf /workspace /workspace/* ; mv /workspace /gone; chmod 0 /workspace; true")
        result = await sh(box, "cd /; chmod 755 /workspace; cd /workspace && echo alive")
        assert result.exit_code in (0, 126), result


@attack()
async def _(bench: Bench) -> None:
    """background processes that take all a box may have, then one more command"""
    async with bench.box(limits=Limits(pids=24, memory_bytes=128 * _MB, wall_s=10.0)) as box:
        await walls.bounded_processes(box, 24)
        await box.start(["sh", "-c", "while :; do sleep 100 & done"])
        await trio.sleep(0.5)
        with trio.fail_after(GUARD_S):
            result = await sh(box, "echo alive", timeout_s=5.0)
        assert result.exit_code in (0, 1, 2, 126, 127, 137), result


@attack()
async def _(bench: Bench) -> None:
    """waiting for input that never comes"""
    async with bench.box(limits=QUICK) as box:
        with trio.fail_after(GUARD_S):
            result = await sh(box, "read line; python3 -c 'input()'; cat /dev/tty")
        assert not result.timed_out, result


@attack(deadline_s=180.0)
async def _(bench: Bench) -> None:
    """thirty commands leave as many processes, zombies and folders as before"""

    def processes() -> int:
        child_count = 0
        for process_folder in Path("/proc").iterdir():
            if process_folder.name.isdecimal():
                try:
                    parent_id = (process_folder / "stat").read_text().rpartition(")")[2].split()[1]
                    child_count += parent_id == str(os.getpid())
                except OSError:
                    continue
        return child_count

    async with bench.box() as box:
        await sh(box, "true")
        used_before = processes()
        for _ in range(30):
            await sh(box, "(sleep 100 &) ; exit 0")
        assert processes() <= used_before, f"{processes() - used_before} children more than before"
