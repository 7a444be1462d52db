"""Red team: attempts to see or touch things outside the box, or to outlive it.

An attack that would harm the machine if it succeeded is made only after a harmless probe has proven its wall (`walls`).
"""

from __future__ import annotations

import functools
import os
import secrets
import socket
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import trio

from agentrl.errors import SandboxPathError
from agentrl.testing.sandbox import walls
from agentrl.testing.sandbox.case import (
    GUARD_S,
    Bench,
    Case,
    case,
    host_processes,
    must_refuse,
    must_vanish,
    output,
    py,
    sh,
)

CASES: list[Case] = []
attack = functools.partial(case, CASES, "red team")

_CALL = """
import ctypes, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
def refused(*arguments):
    "Whether a raw system call fails with a refusal, not merely with bad arguments."
    ctypes.set_errno(0)
    if libc.syscall(*arguments) >= 0:
        return False
    return ctypes.get_errno() in (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EROFS)
import platform
ARM = platform.machine() == "aarch64"
"""


@contextmanager
def secret_file() -> Generator[tuple[Path, str]]:
    """A file on the host that no box may read, and its text."""
    secret_text = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="host-secret-") as folder_name:
        secret_path = Path(folder_name) / "secret"
        secret_path.write_text(secret_text)
        Path(folder_name).chmod(0o755)
        # Readable and writable for all: what keeps the box away has to be its wall, not the permissions of a file.
        secret_path.chmod(0o666)
        yield secret_path, secret_text


def only(path: Path) -> bool:
    """Whether a file is the only entry of its folder."""
    return list(path.parent.iterdir()) == [path]


# --- paths and links -------------------------------------------------------------------------------------------------


@attack()
async def _(bench: Bench) -> None:
    """reading through a planted link to a host file"""
    with secret_file() as (path, secret):
        async with bench.box() as box:
            await output(box, f"ln -s {path} direct; ln -s {path.parent} dir; ln -s direct chain")
            for name in ("direct", "dir/secret", "chain"):
                with suppress(SandboxPathError):
                    assert secret.encode() not in await box.read(name), name


@attack()
async def _(bench: Bench) -> None:
    """writing through a planted link to a host file or folder"""
    with secret_file() as (path, secret):
        async with bench.box() as box:
            await output(box, f"ln -s {path} direct; ln -s {path.parent} dir")
            for name in ("direct", "dir/secret", "dir/new"):
                with suppress(SandboxPathError):
                    await box.write(name, b"owned")
        assert path.read_text() == secret and only(path)


@attack()
async def _(bench: Bench) -> None:
    """paths with .. and absolute paths in read, write and download"""
    with secret_file() as (path, _secret):
        async with bench.box() as box:
            await output(box, "mkdir -p a/b; ln -s ../../.. up; ln -s / root")
            ups = "../" * 12 + str(path).lstrip("/")
            for name in (str(path), ups, "a/../../" + ups, "up/" + ups, "root" + str(path), "/workspace/../" + ups):
                await must_refuse(box.read(name))
                await must_refuse(box.write(name, b"owned"))
                await must_refuse(box.download(name, path.parent / "stolen"))
        assert only(path)


@attack()
async def _(bench: Bench) -> None:
    """swapping a folder for a link while the host reads and writes below it"""
    swap_program = """
import os
os.makedirs("real/d"); open("real/d/secret", "w").write("inside")
os.symlink(TARGET, "real/l")
while True:
    os.rename("real/d", "real/x"); os.rename("real/l", "real/d")
    os.rename("real/d", "real/l"); os.rename("real/x", "real/d")
"""
    with secret_file() as (path, secret):
        async with bench.box() as box:
            await box.start(["python3", "-c", f"TARGET = {str(path.parent)!r}\n{swap_program}"])
            with trio.fail_after(GUARD_S):
                while (await sh(box, "test -e real/l || test -e real/d")).exit_code:
                    pass
            # A race is won or lost by chance, so the attack is repeated; by time and not by count alone, as a call
            # takes a millisecond on one backend and a hundred on another.
            deadline = trio.current_time() + 10.0
            for attempt_number in range(300):
                if trio.current_time() > deadline:
                    break
                with suppress(SandboxPathError):
                    assert secret.encode() not in await box.read("real/d/secret")
                    await box.write(f"real/d/new{attempt_number % 7}", b"owned")
        assert path.read_text() == secret and only(path)


@attack()
async def _(bench: Bench) -> None:
    """a downloaded tree that holds links to the outside"""
    plant_script = (
        "mkdir -p t/d; ln -s / t/root; ln -s ../../etc t/up; ln -s . t/dot; ln -s dot/.. t/sly; ln -s d t/fine"
    )
    with tempfile.TemporaryDirectory() as name:
        target_folder = Path(name) / "out" / "tree"
        async with bench.box() as box:
            await output(box, plant_script + "; ln -s ../.. t/d/high; ln -s ../.. top; echo x > t/d/f")
            await box.download("t", target_folder)
        planted_links = [path for path in target_folder.rglob("*") if path.is_symlink()]
        links_outside = [path for path in planted_links if not path.resolve().is_relative_to(target_folder.resolve())]
        assert not links_outside, f"leads out: {[str(path.relative_to(target_folder)) for path in links_outside]}"
        assert (target_folder / "d" / "f").read_text() == "x\n"


@attack()
async def _(bench: Bench) -> None:
    """a pipe, a socket or a device where the host reads a file"""
    async with bench.box() as box:
        await py(box, "import os, socket; os.mkfifo('fifo'); socket.socket(socket.AF_UNIX).bind('sock')")
        await sh(box, "mknod null c 1 3; mknod disk b 8 0; mkdir out; ln -s /dev/zero zero; cp -a fifo out/")
        with trio.fail_after(GUARD_S), tempfile.TemporaryDirectory() as name:
            for path in ("fifo", "sock", "null", "disk", "zero"):
                await must_refuse(box.read(path))
            await must_refuse(box.write("fifo", b"x"))
            await box.download("out", Path(name) / "out")
            assert not list((Path(name) / "out").iterdir())


@attack()
async def _(bench: Bench) -> None:
    """a hard link to a file of the host's file system"""
    async with bench.box() as box:
        result = await sh(box, "ln /usr/bin/env stolen || ln -P /etc/passwd stolen")
        assert result.exit_code != 0, result


@attack()
async def _(bench: Bench) -> None:
    """reading the host's files by their paths"""
    with secret_file() as (path, secret):
        async with bench.box() as box:
            host_places = f"{path} /root /home /var/lib /proc/1/root{path} /proc/1/cwd /proc/self/root{path}"
            result = await sh(box, f"cat {host_places}; ls -R /root /home 2>/dev/null | head -50")
            assert secret.encode() not in result.stdout and not result.stdout.strip(), result.stdout[:200]


@attack()
async def _(bench: Bench) -> None:
    """writing to the system: /usr, /etc, /bin, /lib, /dev, the root folder"""
    async with bench.box() as box:
        await walls.read_only_system(box)
        for folder in ("/usr/bin", "/etc", "/bin", "/lib", "/dev", "/"):
            result = await sh(box, f"echo x > {folder}/owned || mkdir {folder}/owned2 || touch {folder}")
            assert result.exit_code != 0, f"{folder} can be written"


# --- the kernel ------------------------------------------------------------------------------------------------------


@attack()
async def _(bench: Bench) -> None:
    """kernel settings through /proc/sys, /sys and sysrq"""
    kernel_files = (
        "/proc/sys/kernel/core_pattern /proc/sys/kernel/hostname /proc/sys/vm/drop_caches /proc/sysrq-trigger"
    )
    attack_program = """
import os, sys
for path in sys.argv[1:]:
    try: os.close(os.open(path, os.O_WRONLY)); print("HIT", path)  # opened, never written
    except OSError: pass
"""
    async with bench.box() as box:
        result = await py(box, attack_program, *kernel_files.split(), "/sys/power/state", "/sys/kernel/uevent_helper")
        assert b"HIT" not in result.stdout, result


@attack()
async def _(bench: Bench) -> None:
    """memory, disks and the kernel log as device nodes"""
    device_files = (
        "/dev/mem /dev/kmsg /dev/port /dev/kcore /proc/kcore /dev/sda /dev/vda /dev/nvme0n1 /dev/loop0 /dev/kvm"
    )
    attack_program = """
import os, sys
for path in sys.argv[1:]:
    try: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)); print("HIT", path)  # opened, never read
    except OSError: pass
"""
    async with bench.box() as box:
        await sh(box, "mknod d b 8 0")
        result = await py(box, attack_program, *device_files.split(), "d")
        assert not result.stdout, result


@attack()
async def _(bench: Bench) -> None:
    """mount, pivot_root, chroot, and the new mount calls"""
    async with bench.box() as box:
        await walls.no_capabilities(box)
        result = await py(
            box,
            _CALL
            + """
import os
os.mkdir("m")
numbers = (40, 41, 51, 39, 428, 430, 442) if ARM else (165, 155, 161, 166, 428, 430, 442)
held = [refused(n, b"m" if n != 430 else b"tmpfs", b"m", b"tmpfs", 0, 0) for n in numbers]
print(all(held), held)
""",
        )
        assert result.stdout.startswith(b"True"), result
        assert (await sh(box, "mount -t tmpfs none m || mount --bind /workspace m")).exit_code != 0


@attack()
async def _(bench: Bench) -> None:
    """new user, mount, pid or network namespaces"""
    async with bench.box() as box:
        for namespace_flag in ("--user --map-root-user", "--mount", "--pid --fork", "--net", "--user"):
            assert (await sh(box, f"unshare {namespace_flag} true")).exit_code != 0, namespace_flag
        attack_program = _CALL + "flags = 0x10000000 | 17\nprint(refused(220 if ARM else 56, flags, 0, 0, 0, 0))"
        assert (await py(box, attack_program)).stdout == b"True\n"


@attack()
async def _(bench: Bench) -> None:
    """capabilities, new privileges, and the system call filter as /proc/self/status shows them"""
    async with bench.box() as box:
        status_lines = (await output(box, "cat /proc/self/status")).splitlines()
        status_fields = dict(line.split(":\t", 1) for line in status_lines if ":\t" in line)
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(status_fields[name], 16) == 0, f"{name} is {status_fields[name]}"
        assert (status_fields["NoNewPrivs"], status_fields["Seccomp"]) == ("1", "2"), status_fields


@attack()
async def _(bench: Bench) -> None:
    """setuid programs and setuid(0)"""
    async with bench.box() as box:
        result = await sh(box, "cp /usr/bin/id myid && chmod 6755 myid && ./myid -u")
        assert result.stdout.split()[0] != b"0", result
        attack_program = "import os\ntry:\n    os.setuid(0); print('root')\nexcept OSError:\n    print('refused')"
        assert (await py(box, attack_program)).stdout == b"refused\n"


@attack()
async def _(bench: Bench) -> None:
    """ptrace, process_vm_readv, bpf, perf, userfaultfd, keyrings, kexec, modules, io_uring"""
    x86_calls = (
        "(101, 0), (310, 1), (321, 0), (298, 0), (323, 0), (248, b'user'), (250, 0), (246, 0, 1000), (175, 0), (425, 8)"
    )
    arm_calls = (
        "(117, 0), (270, 1), (280, 0), (241, 0), (282, 0), (217, b'user'), (219, 0), (104, 0, 1000), (105, 0), (425, 8)"
    )
    attack_program = (
        f"{_CALL}\nheld = [refused(*call, 0, 0, 0, 0, 0) for call in (({arm_calls}) if ARM else ({x86_calls}))]"
    )
    async with bench.box() as box:
        result = await py(box, f"{attack_program}\nprint(all(held), held)")
        assert result.stdout.startswith(b"True"), result


@attack()
async def _(bench: Bench) -> None:
    """keys typed into the terminal of whoever watches (TIOCSTI), also with high bits set"""
    attack_program = """
import fcntl, os, ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
parent, child = os.openpty()
hits = 0
for request in (0x5412, 0x5412 | 1 << 32, 0x541C):
    for fd in (0, 1, 2, child):  # no key is given: that there is none is found out after the right to type it
        libc.syscall(29 if os.uname().machine == "aarch64" else 16, fd, ctypes.c_ulong(request), None)
        hits += ctypes.get_errno() == errno.EFAULT
print(hits)
"""
    async with bench.box() as box:
        assert (await py(box, attack_program)).stdout == b"0\n"


@attack()
async def _(bench: Bench) -> None:
    """the host's clock, name, priorities and hard limits"""
    attack_program = """
import os, resource, time
hits = []
def attempt(name, *call):
    try:
        call[0](*call[1:]); hits.append(name)
    except (OSError, ValueError):
        pass
attempt("clock", time.clock_settime, time.CLOCK_REALTIME, 0.0)
attempt("hostname", __import__("socket").sethostname, "owned")
attempt("nice", os.nice, -10)
attempt("realtime", os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50))
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
attempt("nofile", resource.setrlimit, resource.RLIMIT_NOFILE, (hard + 1, hard + 1))
print(hits)
"""
    name = socket.gethostname()
    async with bench.box() as box:
        await walls.no_capabilities(box)
        assert (await py(box, attack_program)).stdout == b"[]\n"
    assert socket.gethostname() == name


@attack()
async def _(bench: Bench) -> None:
    """control groups: mounting them, leaving them, raising their bounds"""
    attack_script = """
for f in $(find /sys/fs/cgroup -writable -type f 2>/dev/null | head -5); do echo HIT $f; done
mkdir -p cg && mount -t cgroup -o memory none cg && echo HIT mount
mount -t cgroup2 none cg && echo HIT mount2
true
"""
    async with bench.box() as box:
        await walls.no_capabilities(box)
        assert b"HIT" not in (await sh(box, attack_script)).stdout


# --- other processes -------------------------------------------------------------------------------------------------


@attack()
async def _(bench: Bench) -> None:
    """peeking at the host's processes through /proc"""
    async with bench.box() as box:
        marker = f"peek{secrets.token_hex(8)}"
        # A process that is surely there: without it, a box that sees nothing at all could not be told from one whose
        # /proc was just not read.
        with walls.witness(marker):
            attack_script = "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'"
            listing = await output(box, attack_script)
        assert marker not in listing
        visible_count = await output(box, "ls -d /proc/[0-9]* | wc -l")
        # A backend's own calls are some, on a busy machine.
        assert int(visible_count) < 30, f"{visible_count} processes are visible"


@attack()
async def _(bench: Bench) -> None:
    """secrets in the environment and descriptors that were left open"""
    secret = secrets.token_hex(16)
    os.environ["AGENTRL_RED_TEAM_SECRET"] = secret
    read_end, write_end = os.pipe()
    # The mistake that is looked for: a library that opens a descriptor without the flag that closes it at an exec.
    os.set_inheritable(read_end, True)
    try:
        async with bench.box() as box:
            listing = await output(box, "env; cat /proc/self/environ /proc/1/environ 2>/dev/null; true")
            assert secret not in listing
            attack_program = "import os\nfor fd in range(300):\n  try: os.fstat(fd); print(fd)\n  except OSError: pass"
            assert (await py(box, attack_program)).stdout == b"0\n1\n2\n"
    finally:
        del os.environ["AGENTRL_RED_TEAM_SECRET"]
        os.close(read_end)
        os.close(write_end)


@attack()
async def _(bench: Bench) -> None:
    """signals to the supervisor and to everything in sight"""
    attack_program = """
import os
for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
    try:
        if pid != os.getpid(): os.kill(pid, 9)
    except OSError: pass
"""
    async with bench.box() as box:
        await walls.own_processes(box)
        await sh(box, "kill -KILL $PPID; kill -KILL 1; sleep 0.1", timeout_s=10)
        await py(box, attack_program, timeout_s=10)
        assert await output(box, "echo alive") == "alive\n"


@attack()
async def _(bench: Bench) -> None:
    """outliving the end of a command by a double fork with a session of its own"""
    marker = f"98765.{secrets.randbelow(10**9)}"
    attack_program = f"""
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        os.execvp("sleep", ["sleep", "{marker}"])
    os._exit(0)
os.wait()
"""
    async with bench.box() as box:
        with trio.fail_after(GUARD_S):
            await py(box, attack_program)
            await must_vanish(marker)


@attack()
async def _(bench: Bench) -> None:
    """outliving a timeout by a double fork with a session of its own"""
    marker = f"98765.{secrets.randbelow(10**9)}"
    attack_script = f"setsid sh -c 'trap \"\" HUP TERM; (sleep {marker} & sleep {marker}) & ' ; sleep {marker}"
    async with bench.box() as box:
        with trio.fail_after(GUARD_S):
            assert (await sh(box, attack_script, timeout_s=1.0)).timed_out
            await must_vanish(marker)


@attack()
async def _(bench: Bench) -> None:
    """outliving the box by a background process that double-forked"""
    marker = f"98765.{secrets.randbelow(10**9)}"
    async with bench.box() as box:
        attack_script = f"setsid sh -c 'sleep {marker} & echo ready; sleep {marker}' & sleep {marker}"
        box_process = await box.start(["sh", "-c", attack_script])
        with trio.fail_after(GUARD_S):
            assert await box_process.receive() == b"ready\n"
        # The counter-test: a marker that is never found would let this case pass on a backend that ends nothing.
        assert host_processes(marker), "the case looks in the wrong place"
    await must_vanish(marker)


# --- the network -----------------------------------------------------------------------------------------------------


@attack()
async def _(bench: Bench) -> None:
    """reaching a server on the host: loopback, every address, abstract sockets"""
    name = f"\0agentrl-{secrets.token_hex(8)}"
    with socket.socket() as host_server, socket.socket(socket.AF_UNIX) as abstract_socket:
        host_server.bind(("0.0.0.0", 0))
        host_server.listen()
        abstract_socket.bind(name)
        abstract_socket.listen()
        addresses = {"127.0.0.1", *socket.gethostbyname_ex("localhost")[2], "172.17.0.1", "10.0.0.1", "192.168.0.1"}
        attack_program = f"""
import socket
hits = []
for address in {sorted(addresses)!r}:
    try: socket.create_connection((address, {host_server.getsockname()[1]}), timeout=1); hits.append(address)
    except OSError: pass
try: socket.socket(socket.AF_UNIX).connect({name!r}); hits.append("abstract")
except OSError: pass
print(hits)
"""
        async with bench.box() as box:
            assert (await py(box, attack_program)).stdout == b"[]\n"


@attack()
async def _(bench: Bench) -> None:
    """names, datagrams to the outside, raw and packet sockets"""
    attack_program = """
import socket
hits = []
try: socket.getaddrinfo("example.com", 80); hits.append("name")
except OSError: pass
for family, kind, protocol in ((2, 3, 1), (17, 3, 0), (40, 1, 0), (38, 5, 0)):
    try: socket.socket(family, kind, protocol); hits.append((family, kind))
    except OSError: pass
try: socket.socket(2, 2).connect(("8.8.8.8", 53)); hits.append("route")  # sends nothing
except OSError: pass
print(hits)
"""
    async with bench.box() as box:
        result = await py(box, attack_program)
        assert result.stdout == b"[]\n", result
