"""CPU time of a tree of processes on this machine, and the time in which the machine withheld it.

Law 3 needs the second number. A test run that timed out may have slept, looped, or stood in the queue of a machine with
too much to do, and wall time cannot tell them apart: a sleeping program has used no CPU either. Linux counts, for each
thread, how long it was ready to run without a processor (`/proc/PID/schedstat`). That is the host's time.

    starved = min(longest wait of a thread, wall time - CPU time / processors that the tree may use)

The second bound keeps a program from starving itself: one that keeps its own processors busy with many threads, or uses
up the quota of its box, has had its due. Threads that lowered their own priority do not count. Threads that started and
ended between two looks are not seen, so the number is a lower bound, and 0 where the kernel does not count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from agentrl.errors import HostBusy
from agentrl.host.clocks import HOST_DEADLINE_S

_TICKS = os.sysconf("SC_CLK_TCK")
_MOST_PROCESSES = 1024  # of one tree that are looked at
_NICE, _POLICY = 16, 38  # places in /proc/PID/stat after the name of the program


class CpuTime:
    """CPU time of a process and its descendants since the first look."""

    def __init__(self, root: int, *, cpus: float = 1.0) -> None:
        """`root` is a process id on this machine; `cpus` is how many processors its tree may keep busy."""
        self._priority = os.getpriority(os.PRIO_PROCESS, 0)
        self._before_s = 0.0
        self.follow(root, cpus=cpus)
        self.cpu_s = 0.0
        """CPU seconds, user and system, with those of descendants that have ended and were waited for."""
        self.starved_s = 0.0
        """Seconds in which the tree could have run and this machine gave it no processor."""

    def follow(self, root: int, *, cpus: float) -> None:
        """Look at the tree of another process from now on."""
        # At most one: with four, a single thread that ran all the time would look as if three quarters of it had been
        # withheld.
        self._root, self._cpus = root, min(1.0, cpus)
        self._waits: dict[str, float] = {}
        self._looked_s = time.monotonic()

    def begin(self) -> None:
        """Count from now on: what processes that run already have used does not count."""
        self.look()
        self._before_s += self.cpu_s
        self.cpu_s = self.starved_s = 0.0

    def look(self) -> float:
        """Read the counters. Returns the seconds of starvation since the last look."""
        looked_s, process_ids, waits_by_thread = time.monotonic(), list(self._tree()), dict[str, float]()
        cpu_s = self._cpu_seconds(process_ids)
        for process_id in process_ids:
            try:
                for thread_path in Path(f"/proc/{process_id}/task").iterdir():
                    thread_stat = _stat(thread_path / "stat")
                    if int(thread_stat[_NICE]) <= self._priority and thread_stat[_POLICY] == "0":
                        waits_by_thread[f"{process_id}/{thread_path.name}"] = (
                            int((thread_path / "schedstat").read_text().split()[1]) / 1e9
                        )
            except (OSError, ValueError, IndexError):  # it has ended, or this kernel does not say
                continue
        wall_s, self._looked_s = looked_s - self._looked_s, looked_s
        used_s = max(0.0, cpu_s - self.cpu_s)
        longest_s = max(
            (waited_s - self._waits.get(thread_key, 0.0) for thread_key, waited_s in waits_by_thread.items()),
            default=0.0,
        )
        starved_s = max(0.0, min(longest_s, wall_s - used_s / self._cpus))
        # Never backwards: a process that ended without being waited for takes its seconds with it.
        self._waits, self.cpu_s = waits_by_thread, max(self.cpu_s, cpu_s)
        self.starved_s += starved_s
        return starved_s

    @property
    def starved_out(self) -> bool:
        """Whether this machine has starved the tree for longer than anything waits for it."""
        return self.starved_s >= HOST_DEADLINE_S

    def _cpu_seconds(self, pids: Sequence[str]) -> float:
        return sum(cpu_seconds(int(process_id)) or 0.0 for process_id in pids) - self._before_s

    def _tree(self) -> Iterator[str]:
        pending_ids, process_count = [str(self._root)], 0
        while pending_ids and process_count < _MOST_PROCESSES:
            process_id = pending_ids.pop()
            process_count += 1
            yield process_id
            try:
                for thread_path in Path(f"/proc/{process_id}/task").iterdir():
                    pending_ids += (thread_path / "children").read_text().split()
            except OSError:  # it has ended
                continue


class GroupCpuTime(CpuTime):
    """CPU time of a control group's processes since this was made, as far as this machine has the group."""

    def __init__(self, processes: Path | None, usage: Path | None, *, cpus: float = 1.0) -> None:
        """`processes` is the group's list of processes (`cgroup.procs`), `usage` its count of CPU time: `cpu.stat`, or
        `cpuacct.usage` of control groups of version 1. With None nothing is known, and nothing is ever starved."""
        self._processes, self._usage = processes, usage
        super().__init__(0, cpus=cpus)
        self.begin()

    @property
    def known(self) -> bool:
        """Whether the CPU time of the group can be read."""
        return self._usage is not None

    def count(self) -> None:
        """Read the CPU time without a look at the processes."""
        self.cpu_s = max(self.cpu_s, self._group_s() - self._before_s)

    def _tree(self) -> Iterator[str]:
        with suppress(OSError):
            if self._processes is not None:
                yield from self._processes.read_text().split()[:_MOST_PROCESSES]

    def _cpu_seconds(self, pids: Sequence[str]) -> float:
        return self._group_s() - self._before_s

    def _group_s(self) -> float:
        """CPU seconds of the group since it was made, 0 where they cannot be read."""
        with suppress(OSError, ValueError, KeyError):
            if self._usage is not None:
                usage_text = self._usage.read_text()
                if " " not in usage_text:  # `cpuacct.usage` of version 1: one number, in nanoseconds
                    return int(usage_text) / 1e9
                return int(dict(usage_line.split() for usage_line in usage_text.splitlines())["usage_usec"]) / 1e6
        return 0.0


def cpu_seconds(pid: int) -> float | None:
    """CPU seconds of a process and of its descendants that have ended. A process that has ended still has them until
    its parent reaps it. None if it is gone."""
    try:
        return sum(int(tick_count) for tick_count in _stat(Path(f"/proc/{pid}/stat"))[11:15]) / _TICKS
    except (OSError, ValueError):
        return None


def starved_out(starved_s: float, cpu_s: float) -> HostBusy:
    """The error for a program that timed out because this machine gave it no processor for so long."""
    return HostBusy(
        f"a program was ready to run and got no processor for {starved_s:.0f} s ({cpu_s:.1f} s of CPU time"
        " used): this machine has too much to do"
    )


def _stat(file: Path) -> list[str]:
    """The fields of a `stat` file after the program's name, which may hold anything."""
    return file.read_text(errors="replace").rpartition(")")[2].split()
