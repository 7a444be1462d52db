"""The system calls that a command of a bubblewrap box may make: a list of allowed ones, compiled by libseccomp.

The compiled programs lie beside this file (`seccomp-<machine>.bpf`), so that nothing but the kernel is needed to use
them; `python -m agentrl.sandbox.bubblewrap.seccomp` compiles them again (extra `seccomp`), and a test compares. Other
calls answer ENOSYS, as on a kernel that lacks it, or EPERM where programs expect a refusal. Like docker's default
profile, but stricter: neither ptrace nor process_vm_*, no name spaces, no keyrings, no io_uring, and sockets of four
families only. Other instruction sets (32-bit, x32) are killed.

No control group of version 1 counts a socket's buffer, so a request for a larger one has no effect. A box without a
control group has a narrower list (`uncounted`): there only rlimits bound memory, and none counts what the kernel keeps
outside of an address space: files without a name, System V's objects, large pipes, pages moved into a pipe.

A third, far shorter list is that of code which only computes (`agentrl.sandbox.warm_python`): it may use its own memory
and read and write the files that were open at its start. Any other call ends it by SIGSYS.
"""

from __future__ import annotations

import errno
import json
import platform
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any

from agentrl.errors import SandboxUnavailable

MACHINES = ("x86_64", "aarch64")

_FILES = """
access chdir chmod chown chown32 close close_range copy_file_range creat dup dup2 dup3 faccessat faccessat2 fadvise64
fallocate fchdir fchmod fchmodat fchown fchownat fcntl fdatasync fgetxattr flistxattr flock fremovexattr fsetxattr
fstat fstatfs fsync ftruncate getcwd getdents getdents64 getxattr lchown lgetxattr link linkat listxattr llistxattr
lremovexattr lseek lsetxattr lstat mkdir mkdirat mknod mknodat name_to_handle_at newfstatat open openat openat2
pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv removexattr rename renameat
renameat2 rmdir sendfile setxattr splice stat statfs statx symlink symlinkat sync_file_range syncfs tee truncate umask
unlink unlinkat utime utimensat utimes futimesat vmsplice write writev
"""
_MEMORY = """
brk get_mempolicy madvise membarrier memfd_create mincore mlock mlock2 mlockall mmap mprotect mremap msync munlock
munlockall munmap pkey_alloc pkey_free pkey_mprotect remap_file_pages
"""
_PROCESSES = """
arch_prctl capget execve execveat exit exit_group fork futex get_robust_list get_thread_area getcpu getegid geteuid
getgid getgroups getpgid getpgrp getpid getppid getpriority getresgid getresuid getrlimit getrusage getsid gettid
getuid ioprio_get ioprio_set kill landlock_add_rule landlock_create_ruleset landlock_restrict_self pidfd_open
pidfd_send_signal prctl prlimit64 restart_syscall rseq sched_get_priority_max sched_get_priority_min sched_getaffinity
sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_setaffinity sched_setattr sched_setparam
sched_setscheduler sched_yield seccomp set_robust_list set_thread_area set_tid_address setfsgid setfsuid setgid
setgroups setpgid setpriority setregid setresgid setresuid setreuid setrlimit setsid setuid tgkill tkill vfork wait4
waitid
"""
_SIGNALS = """
pause rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait
rt_tgsigqueueinfo sigaltstack signalfd signalfd4
"""
_TIME = """
alarm clock_getres clock_gettime clock_nanosleep getitimer gettimeofday nanosleep setitimer time timer_create
timer_delete timer_getoverrun timer_gettime timer_settime timerfd_create timerfd_gettime timerfd_settime times
"""
_EVENTS = """
epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 inotify_add_watch
inotify_init inotify_init1 inotify_rm_watch pipe pipe2 poll ppoll pselect6 select
"""
_SOCKETS = """
accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg sendmsg
sendto setsockopt shutdown socketpair
"""
_IPC = """
mq_getsetattr mq_notify mq_open mq_timedreceive mq_timedsend mq_unlink msgctl msgget msgrcv msgsnd semctl semget semop
semtimedop shmat shmctl shmdt shmget
"""
_SYSTEM = "getrandom io_cancel io_destroy io_getevents io_setup io_submit sysinfo uname"

_REFUSED = """
acct add_key adjtimex bpf chroot clock_adjtime clock_settime delete_module fanotify_init finit_module fsconfig fsmount
fsopen fspick init_module ioperm iopl kcmp kexec_file_load kexec_load keyctl lookup_dcookie mbind migrate_pages mount
mount_setattr move_mount move_pages nfsservctl open_by_handle_at open_tree perf_event_open pidfd_getfd pivot_root
process_madvise process_vm_readv process_vm_writev ptrace quotactl quotactl_fd reboot request_key setdomainname
sethostname set_mempolicy setns settimeofday swapoff swapon sync syslog umount2 unshare userfaultfd vhangup
"""
_COMPUTING = "brk exit exit_group madvise mmap mprotect mremap munmap read write"
_NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW* flag
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, 16)  # 16: netlink, which name look-ups ask
_REFUSED_IOCTLS = (0x5412, 0x541C)  # TIOCSTI, TIOCLINUX: put keys into the terminal of whoever watches
_STOPS = (
    ("kill tkill pidfd_send_signal rt_sigqueueinfo", 1, 19),  # SIGSTOP
    ("tgkill rt_tgsigqueueinfo", 2, 19),
    ("fcntl", 1, 10),  # F_SETSIG, after which the kernel sends it
)
"""Calls that stop another process: names, which argument, and its value. An engine starts each command, and ours too,
as the box's user: what is stopped before it runs hangs the engine's calls for that container, its removal among them.
Bubblewrap starts commands where the box's processes see none of them."""
_PERSONALITIES = (0, 0xFFFFFFFF)  # Linux's own, and the question which one it is

_UNCOUNTED = frozenset({"landlock_create_ruleset", "memfd_create", "msgget", "vmsplice"})
"""Answered as by a kernel that lacks them. vmsplice: 4 KiB in a pipe hold a huge page of 2 MiB."""
_SMALL_IPC = {"shmget": 4096, "semget": 32}
"""Second argument (bytes, semaphores) of what an uncounted box may make, below this power of two. The kernel has 4,096
segments and 32,000 sets for a name space: 16 MiB, and about 80 MiB. PostgreSQL asks for 56 bytes."""
_SET_PIPE_SIZE = 1031
_SOCKET_LEVEL, _SOCKET_BUFFERS, _ZERO_COPY = 1, (7, 8), 60  # SOL_SOCKET; SO_SNDBUF and SO_RCVBUF; SO_ZEROCOPY


def _socket_options() -> Iterator[tuple[int | None, list[tuple[int, int, int]]]]:
    """The rules of setsockopt: the error (None allows; 0 does nothing, and says that it was done, as the kernel bounds
    these sizes unasked, too), and conditions (argument, mask, value). SO_ZEROCOPY, which pins pages, is refused."""
    socket_condition = (1, 0xFFFFFFFF, _SOCKET_LEVEL)
    for mask_and_value in all_but((_SOCKET_LEVEL,)):
        yield None, [(1, *mask_and_value)]
    for mask_and_value in all_but((*_SOCKET_BUFFERS, _ZERO_COPY)):
        yield None, [socket_condition, (2, *mask_and_value)]
    for buffer_option in _SOCKET_BUFFERS:
        yield 0, [socket_condition, (2, 0xFFFFFFFF, buffer_option)]


def program(kind: str = "seccomp") -> bytes:
    """The compiled filter for this machine: of a box (`seccomp`), of a box without a control group (`uncounted`), or of
    code that only computes (`computing`). Raises SandboxUnavailable for an instruction set we have none for."""
    return shipped({"arm64": "aarch64", "amd64": "x86_64"}.get(platform.machine().lower(), platform.machine()), kind)


def shipped(machine: str, kind: str = "seccomp") -> bytes:
    """The compiled filter that lies beside this file."""
    filter_path = _path(machine, kind)
    if not filter_path.is_file():
        raise SandboxUnavailable(f"no system call filter for {machine!r}; there is one for {', '.join(MACHINES)}")
    return filter_path.read_bytes()


# Why the filter lists what is allowed, and why a forbidden call gets an error.
#
# A list of forbidden calls would be shorter. But kernels get new calls, and a list that was written today forbids none
# of them. io_uring_setup, for example, came with Linux 5.1: after it a program hands its reads, writes and connections
# to the kernel through memory, and a filter of system calls never sees them. So a call that nobody has listed does not
# exist here.
#
# ENOSYS is the answer of a kernel that is too old for a call, and programs are ready for it. The C library starts a
# thread by clone3, and by clone if the kernel does not know clone3. The box needs this second way: the flags of clone3
# lie in memory, which a filter cannot read, and those of clone lie in a register. So `clone` is allowed as long as it
# makes no new name space. With EPERM the C library would give up, and no program of the box could start a thread. EPERM
# is for calls that programs expect to be refused, such as mount and ptrace: they report it or go on without.
#
# To kill the process would be the safest answer to an attack. It would also end a harmless program that only tries
# whether a call exists, and the policy would get the blame for it (law 3). Code that only computes has no such excuse:
# there any other call ends it (`compile_computing`).
#
# The price is a list that somebody has to keep up. A program that needs a newer call uses an older one or fails until
# the call is listed. `tests/sandbox/test_seccomp.py` has the verdict for each of these calls (`test_verdicts`).
def compile_filter(machine: str, file: IO[bytes], *, counted: bool = True) -> None:
    """Write the filter for `machine` to an open binary file; `counted` if a control group counts the box's memory.
    Needs libseccomp and its Python binding."""
    import pyseccomp  # pyright: ignore[reportMissingTypeStubs]

    filter_rules, architecture = _filter(machine, pyseccomp.ERRNO(errno.ENOSYS))

    def add(action: int, names: str, *conditions: pyseccomp.Arg) -> None:
        for call_name in names.split():
            # The lists are for two instruction sets, and older calls (open, stat, fork) exist on one of them only.
            if pyseccomp.resolve_syscall(architecture, call_name) >= 0:
                filter_rules.add_rule(action, call_name, *conditions)

    masked_equal = pyseccomp.MASKED_EQ
    ruled_calls = {"setsockopt"} if counted else {"setsockopt", "fcntl", *_UNCOUNTED, *_SMALL_IPC}
    for call_names in (_FILES, _MEMORY, _PROCESSES, _SIGNALS, _TIME, _EVENTS, _SOCKETS, _IPC, _SYSTEM):
        add(pyseccomp.ALLOW, " ".join(call_name for call_name in call_names.split() if call_name not in ruled_calls))
    for error_number, conditions in _socket_options():
        filter_action = pyseccomp.ALLOW if error_number is None else pyseccomp.ERRNO(error_number)
        add(
            filter_action,
            "setsockopt",
            *(
                pyseccomp.Arg(position, masked_equal, match_mask, match_value)
                for position, match_mask, match_value in conditions
            ),
        )
    if not counted:
        for call_name, upper_bound in _SMALL_IPC.items():
            add(pyseccomp.ALLOW, call_name, pyseccomp.Arg(1, masked_equal, 2**64 - upper_bound, 0))
        for match_mask, match_value in all_but((_SET_PIPE_SIZE,)):
            add(pyseccomp.ALLOW, "fcntl", pyseccomp.Arg(1, masked_equal, match_mask, match_value))
        add(pyseccomp.ERRNO(errno.EPERM), "fcntl", pyseccomp.Arg(1, masked_equal, 0xFFFFFFFF, _SET_PIPE_SIZE))
    add(pyseccomp.ERRNO(errno.EPERM), _REFUSED)
    add(pyseccomp.ALLOW, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, _NEW_NAMESPACES, 0))
    for socket_family in _FAMILIES:
        add(pyseccomp.ALLOW, "socket", pyseccomp.Arg(0, pyseccomp.EQ, int(socket_family)))
    for personality in _PERSONALITIES:
        add(pyseccomp.ALLOW, "personality", pyseccomp.Arg(0, pyseccomp.EQ, personality))
    for match_mask, match_value in all_but(_REFUSED_IOCTLS):
        add(pyseccomp.ALLOW, "ioctl", pyseccomp.Arg(1, pyseccomp.MASKED_EQ, match_mask, match_value))
    filter_rules.export_bpf(file)


def compile_computing(machine: str, file: IO[bytes]) -> None:
    """Write the filter of code that only computes for `machine` to an open binary file. Needs libseccomp and its Python
    binding."""
    import pyseccomp  # pyright: ignore[reportMissingTypeStubs]

    filter_rules, _ = _filter(machine, pyseccomp.TRAP)  # not KILL, which the kernel writes to its log each time
    for call_name in _COMPUTING.split():
        filter_rules.add_rule(pyseccomp.ALLOW, call_name)
    filter_rules.export_bpf(file)


def _filter(machine: str, otherwise: int) -> tuple[Any, int]:
    """A filter without rules for one instruction set, and libseccomp's number of that."""
    import pyseccomp  # pyright: ignore[reportMissingTypeStubs]

    architecture = {"x86_64": pyseccomp.Arch.X86_64, "aarch64": pyseccomp.Arch.AARCH64}[machine]
    filter_rules = pyseccomp.SyscallFilter(otherwise)
    if architecture != pyseccomp.system_arch():
        filter_rules.add_arch(architecture)
        filter_rules.remove_arch(pyseccomp.system_arch())
    return filter_rules, architecture


def docker_profile() -> str:
    """Return the list of allowed calls as a profile for a Docker engine (JSON, format of moby's
    `profiles/seccomp/default.json`).

    Engines older than the field `defaultErrnoRet` answer EPERM to calls that are not on the list."""

    def rule(names: str, action: str, *conditions: tuple[int, str, int, int], error: int | None = None) -> object:
        arguments = [
            {"index": argument_index, "op": comparison, "value": first_value, "valueTwo": second_value}
            for argument_index, comparison, first_value, second_value in conditions
        ]
        rule_fields = {"names": names.split(), "action": action, "args": arguments}
        return rule_fields if error is None else {**rule_fields, "errnoRet": error}

    allow, masked_equal = "SCMP_ACT_ALLOW", "SCMP_CMP_MASKED_EQ"
    call_lists = (_FILES, _MEMORY, _PROCESSES, _SIGNALS, _TIME, _EVENTS, _SOCKETS, _IPC, _SYSTEM)
    ruled_calls = {"setsockopt", *(call_name for call_names, _, _ in _STOPS for call_name in call_names.split())}
    allowed_calls = [call_name for call_name in " ".join(call_lists).split() if call_name not in ruled_calls]
    profile_rules = [rule(" ".join(allowed_calls), allow), rule(_REFUSED, "SCMP_ACT_ERRNO", error=errno.EPERM)]
    for call_names, argument_index, stopped_value in _STOPS:
        profile_rules += [
            rule(call_names, allow, (argument_index, masked_equal, match_mask, match_value))
            for match_mask, match_value in all_but((stopped_value,))
        ]
        profile_rules.append(
            rule(
                call_names,
                "SCMP_ACT_ERRNO",
                (argument_index, masked_equal, 0xFFFFFFFF, stopped_value),
                error=errno.EPERM,
            )
        )
    for error_number, conditions in _socket_options():
        rule_conditions = [
            (position, masked_equal, match_mask, match_value) for position, match_mask, match_value in conditions
        ]
        profile_rules.append(
            rule(
                "setsockopt", allow if error_number is None else "SCMP_ACT_ERRNO", *rule_conditions, error=error_number
            )
        )
    profile_rules += [
        rule("clone", allow, (0, masked_equal, _NEW_NAMESPACES, 0)),
        rule("clone3", "SCMP_ACT_ERRNO", error=errno.ENOSYS),
    ]
    profile_rules += [rule("socket", allow, (0, "SCMP_CMP_EQ", int(socket_family), 0)) for socket_family in _FAMILIES]
    profile_rules += [rule("personality", allow, (0, "SCMP_CMP_EQ", personality, 0)) for personality in _PERSONALITIES]
    profile_rules += [
        rule("ioctl", allow, (1, masked_equal, match_mask, match_value))
        for match_mask, match_value in all_but(_REFUSED_IOCTLS)
    ]
    profile = {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": errno.ENOSYS, "syscalls": profile_rules}
    return json.dumps(profile)


def all_but(refused: tuple[int, ...], bits: int = 32) -> list[tuple[int, int]]:
    """Pairs (mask, value) such that a number's low `bits` match one of them exactly if it is none of `refused`.

    The kernel looks at the low word only, libseccomp compares all 64 bits: `!=` could be passed by setting a high bit.
    So the complement is spelled out: at each bit, the branches of the binary tree that hold no refused number."""
    masks_and_values: list[tuple[int, int]] = []
    prefixes = {0}
    for bit in reversed(range(bits)):
        prefix_mask = ((1 << bits) - 1) >> bit << bit
        refused_prefixes = {refused_number & prefix_mask for refused_number in refused}
        masks_and_values += [
            (prefix_mask, prefix | branch << bit)
            for prefix in sorted(prefixes)
            for branch in (0, 1)
            if prefix | branch << bit not in refused_prefixes
        ]
        prefixes = refused_prefixes
    return masks_and_values


def _path(machine: str, kind: str) -> Path:
    return Path(__file__).with_name(f"{kind}-{machine}.bpf")


if __name__ == "__main__":
    for name in MACHINES:
        uncounted = partial(compile_filter, counted=False)
        kinds = {"seccomp": compile_filter, "uncounted": uncounted, "computing": compile_computing}
        for kind, compiled in kinds.items():
            with _path(name, kind).open("wb") as target:
                compiled(name, target)
