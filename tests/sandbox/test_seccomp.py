"""The system call filters that lie in the package say what the list in the source says."""

from __future__ import annotations

import errno
import struct
import tempfile

import pytest
from each_case import each_case
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import SandboxUnavailable
from agentrl.sandbox.bubblewrap import seccomp

pyseccomp = pytest.importorskip("pyseccomp", exc_type=(ImportError, RuntimeError), reason="needs libseccomp")

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386 = 0x40000003
ALLOW, ERRNO, TRAP, KILL_PROCESS, KILL_THREAD = 0x7FFF0000, 0x00050000, 0x00030000, 0x80000000, 0
ENOSYS, EPERM = ERRNO | errno.ENOSYS, ERRNO | errno.EPERM


def verdict(program: bytes, audit: int, number: int, *arguments: int) -> int:
    """Run a classic BPF program over one system call: its return value. Follows the kernel's
    Documentation/networking/filter.rst for the instructions that libseccomp makes."""
    words = [(a >> shift) & 0xFFFFFFFF for a in (*arguments, *[0] * 6)[:6] for shift in (0, 32)]
    data = [number, audit, 0, 0, *words]
    at = value = 0
    while True:
        code, if_true, if_false, k = struct.unpack_from("=HBBI", program, at * 8)
        at += 1
        match code:
            case 0x20:  # load a word
                value = data[k // 4]
            case 0x54:  # and
                value &= k
            case 0x05:  # jump
                at += k
            case 0x15:  # jump if equal
                at += if_true if value == k else if_false
            case 0x25:  # jump if greater
                at += if_true if value > k else if_false
            case 0x35:  # jump if greater or equal
                at += if_true if value >= k else if_false
            case 0x45:  # jump if any bit is set
                at += if_true if value & k else if_false
            case 0x06:  # return
                return k
            case _:
                raise AssertionError(f"instruction {code:#x} is unknown here")


def number_of(name: str, machine: str) -> int:
    arch = {"x86_64": pyseccomp.Arch.X86_64, "aarch64": pyseccomp.Arch.AARCH64}[machine]
    return pyseccomp.resolve_syscall(arch, name)


@each_case("kind", ["seccomp", "uncounted"])
@each_case("machine", seccomp.MACHINES)
def test_shipped_filter_is_the_compiled_list(machine: str, kind: str) -> None:
    with tempfile.TemporaryFile() as file:
        seccomp.compile_filter(machine, file, counted=kind == "seccomp")
        file.seek(0)
        compiled = file.read()
    shipped = seccomp.shipped(machine, kind)
    if compiled == shipped:
        return  # another version of libseccomp orders its jumps otherwise: then verdicts are compared
    small = (0, 1, 2, 7, 8, 16, 17, 31, 32, 40, 60, 1031, 4095, 4096)
    some = (*small, 0x5412, 0x541C, 0x10000000, 1 << 32 | 0x5412, 0xFFFFFFFF, 2**64 - 1)
    for number in (*range(600), 0x40000000, 0xFFFFFFFF):
        for argument in some:
            call = (AUDIT[machine], number, argument, argument)
            assert verdict(shipped, *call) == verdict(compiled, *call), call


@each_case("machine", seccomp.MACHINES)
@each_case(
    ("name", "arguments", "expected"),
    [
        ("read", (), ALLOW),
        ("execve", (), ALLOW),
        ("ptrace", (0,), EPERM),
        ("mount", (), EPERM),
        ("unshare", (0,), EPERM),
        ("bpf", (), EPERM),
        ("keyctl", (), EPERM),
        ("io_uring_setup", (), ENOSYS),
        ("clone3", (), ENOSYS),
        ("clone", (17,), ALLOW),
        ("clone", (0x10000000 | 17,), ENOSYS),
        ("clone", (0x02000000 | 17,), ENOSYS),
        ("socket", (2,), ALLOW),
        ("socket", (1,), ALLOW),
        ("socket", (17,), ENOSYS),
        ("socket", (40,), ENOSYS),
        ("ioctl", (0, 0x5401), ALLOW),
        ("ioctl", (0, 0x5412), ENOSYS),
        ("ioctl", (0, 1 << 32 | 0x5412), ENOSYS),
        ("ioctl", (0, 0x541C), ENOSYS),
    ],
)
def test_verdicts(machine: str, name: str, arguments: tuple[int, ...], expected: int) -> None:
    program = seccomp.shipped(machine)
    assert verdict(program, AUDIT[machine], number_of(name, machine), *arguments) == expected


HIGH = 1 << 32  # the kernel looks at the low word of an int


@each_case("machine", seccomp.MACHINES)
@each_case(
    ("name", "arguments", "counted", "uncounted"),
    [
        ("setsockopt", (3, 1, 2), ALLOW, ALLOW),  # SO_REUSEADDR
        ("setsockopt", (3, 6, 1), ALLOW, ALLOW),  # TCP_NODELAY
        ("setsockopt", (3, 6, 7), ALLOW, ALLOW),  # the number of SO_SNDBUF, at another level
        ("setsockopt", (3, 1, 7), ERRNO, ERRNO),  # SO_SNDBUF: done, without effect
        ("setsockopt", (3, 1, 8), ERRNO, ERRNO),  # SO_RCVBUF
        ("setsockopt", (3, HIGH | 1, HIGH | 8), ERRNO, ERRNO),
        ("setsockopt", (3, 1, 60), ENOSYS, ENOSYS),  # SO_ZEROCOPY
        ("fcntl", (3, 4), ALLOW, ALLOW),  # F_SETFL
        ("fcntl", (3, 1030), ALLOW, ALLOW),  # F_DUPFD_CLOEXEC
        ("fcntl", (3, 1031), ALLOW, EPERM),  # F_SETPIPE_SZ
        ("fcntl", (3, HIGH | 1031), ALLOW, EPERM),
        ("memfd_create", (), ALLOW, ENOSYS),
        ("vmsplice", (), ALLOW, ENOSYS),
        ("splice", (), ALLOW, ALLOW),
        ("landlock_create_ruleset", (), ALLOW, ENOSYS),
        ("msgget", (), ALLOW, ENOSYS),
        ("shmget", (0, 56), ALLOW, ALLOW),  # PostgreSQL's
        ("shmget", (0, 4095), ALLOW, ALLOW),
        ("shmget", (0, 4096), ALLOW, ENOSYS),
        ("shmget", (0, HIGH), ALLOW, ENOSYS),  # a size has 64 bits
        ("semget", (0, 17), ALLOW, ALLOW),
        ("semget", (0, 32), ALLOW, ENOSYS),
    ],
)
def test_memory_that_is_in_no_address_space(
    machine: str, name: str, arguments: tuple[int, ...], counted: int, uncounted: int
) -> None:
    for kind, expected in (("seccomp", counted), ("uncounted", uncounted)):
        found = verdict(seccomp.shipped(machine, kind), AUDIT[machine], number_of(name, machine), *arguments)
        assert found == expected, kind


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_a_box_without_a_control_group_differs_in_seven_calls(machine: str) -> None:
    plain, uncounted = seccomp.shipped(machine), seccomp.shipped(machine, "uncounted")
    names = ("memfd_create", "vmsplice", "landlock_create_ruleset", "msgget", "shmget", "semget", "fcntl")
    numbers = {number_of(name, machine) for name in names}
    for number in set(range(600)) - numbers:
        for argument in (0, 1, 7, 1031, 4096):
            call = (AUDIT[machine], number, argument, argument, argument)
            assert verdict(plain, *call) == verdict(uncounted, *call), number


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_code_that_only_computes_has_ten_system_calls(machine: str) -> None:
    program = seccomp.shipped(machine, "computing")
    with tempfile.TemporaryFile() as file:
        seccomp.compile_computing(machine, file)
        file.seek(0)
        assert file.read() == program
    names = ("read", "write", "mmap", "munmap", "mremap", "mprotect", "madvise", "brk", "exit", "exit_group")
    allowed = {number_of(name, machine) for name in names}
    for number in range(600):
        assert verdict(program, AUDIT[machine], number) == (ALLOW if number in allowed else TRAP), number


@each_case("kind", ["seccomp", "uncounted", "computing"])
def test_other_instruction_sets_are_killed(kind: str) -> None:
    for machine in seccomp.MACHINES:
        assert verdict(seccomp.shipped(machine, kind), I386, 4) in (KILL_PROCESS, KILL_THREAD)
    x32 = 0x40000000
    assert verdict(seccomp.shipped("x86_64", kind), AUDIT["x86_64"], x32 | 1) in (KILL_PROCESS, KILL_THREAD)


def test_unknown_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seccomp.platform, "machine", lambda: "vax")
    with pytest.raises(SandboxUnavailable, match="vax"):
        seccomp.program()


@given(st.sets(st.integers(0, 255), min_size=1, max_size=4), st.integers(0, 255))
def test_all_but_is_the_complement(refused: set[int], number: int) -> None:
    pairs = seccomp.all_but(tuple(refused), bits=8)
    assert any(number & mask == value for mask, value in pairs) == (number not in refused)
