"""The system call filters that lie in the package say what the list in the source says."""

from __future__ import annotations

import errno
import struct
import tempfile

import pytest
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


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_shipped_filter_is_the_compiled_list(machine: str) -> None:
    with tempfile.TemporaryFile() as file:
        seccomp.compile_filter(machine, file)
        file.seek(0)
        compiled = file.read()
    shipped = seccomp.shipped(machine)
    for number in (*range(600), 0x40000000, 0xFFFFFFFF):
        for argument in (0, 1, 2, 16, 17, 40, 0x5412, 0x541C, 0x10000000, 1 << 32 | 0x5412, 0xFFFFFFFF, 2**64 - 1):
            call = (AUDIT[machine], number, argument, argument)
            assert verdict(shipped, *call) == verdict(compiled, *call), call


@pytest.mark.parametrize("machine", seccomp.MACHINES)
@pytest.mark.parametrize(
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


@pytest.mark.parametrize("kind", ["seccomp", "computing"])
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
