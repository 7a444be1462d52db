"""Chaos: starts a run as a user does, and injects faults from outside while it goes on, by a seed.

    report = ChaosRun(["run.toml"], Path("runs/chaos"), faults=10, seed=0).run(print)

It knows only the run's processes, its folder and its store's file: `/proc`, signals, locks. After each fault it waits
until the part is there again and the run advances; then an auditor that shares no code with the store checks it. Linux
only. `LEFT_OUT` lists the faults that it does not inject, and why.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.errors import RunFailed
from agentrl.testing.outside_audit import OutsideAuditor

LEFT_OUT = {
    "disk full": "would need the run's folder on a small file system: mount one, and fill it by hand",
    "socket cut, engine answers garbage": "would need a proxy before an engine that the run does not own",
    "clock jump": "an unprivileged process cannot set the clock for others",
}
PARTS = ("worker", "engine", "learner", "supervisor")
_SHORT_S, _LOCKED_S, _SLOW_S = 3.0, 8.0, 6.0
_POLL_S = 0.1
_READY_S = 600.0
_MARKS = {"worker": "child\0worker", "learner": "child\0learner", "engine": "engine"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A kind of fault and its part: `kill`, `stop` (for good), `pause` (stopped for some seconds), `slow` (stopped two
    thirds of the time), `lock` (the store's write lock is held)."""

    kind: str
    part: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A fault, the time until the run advanced again, the number of sampled tokens that its restarts left behind, and
    the auditor's findings."""

    fault: Fault
    at_s: float
    recovery_s: float
    tokens_lost: int
    violations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosReport:
    """`status` is the run's exit status, `left` the processes and folders that it left behind."""

    outcomes: tuple[Outcome, ...]
    status: int
    wall_s: float
    violations: tuple[str, ...]
    left: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the run ended well, every audit was clean, and nothing was left behind."""
        audits = (self.violations, *(one.violations for one in self.outcomes))
        return self.status == 0 and not self.left and not any(audits)


def plan(faults: int, seed: int) -> list[Fault]:
    """A seeded mix: every fault comes once before any comes again."""
    every = [Fault(kind=kind, part=part) for kind in ("kill", "stop", "pause") for part in PARTS]
    every += [Fault(kind="slow", part="engine"), Fault(kind="lock", part="store")]
    chance, found = random.Random(seed), list[Fault]()
    while len(found) < faults:
        found += chance.sample(every, len(every))
    return found[:faults]


@dataclass(slots=True)
class ChaosRun:
    """A run of `agentrl train WORDS --keep-alive --out FOLDER`. `every_s` is the mean pause between two faults. After a
    fault the run must advance within `recovery_deadline_s`, which is longer than any deadline in its settings."""

    words: Sequence[str]
    folder: Path
    faults: int
    seed: int = 0
    every_s: float = 60.0
    recovery_deadline_s: float = 900.0
    _auditor: OutsideAuditor = field(init=False)
    _process: subprocess.Popen[bytes] = field(init=False)

    def run(self, say: Callable[[str], None] = lambda _: None) -> ChaosReport:
        """Start the run, inject faults, wait for its end. Raises RunFailed if it does not advance again in time."""
        self._auditor = OutsideAuditor(self.folder / "store.sqlite")
        chance, started = random.Random(f"{self.seed}/when"), time.monotonic()
        outcomes: list[Outcome] = []
        log = self.folder.parent / f"{self.folder.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        main = [sys.executable, "-c", "from agentrl.cli import main; main()", "train", *self.words]
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*main, "--out", str(self.folder), "--keep-alive"],
                stdin=subprocess.PIPE,  # its lifeline: no process of the run outlives us
                stdout=output,
                stderr=output,
                env={**os.environ, "AGENTRL_KEPT": "1"},
                process_group=0,
            )
        try:
            self._advance("", set(), _READY_S)
            for fault in plan(self.faults, self.seed):
                self._rest(chance.expovariate(1 / self.every_s))
                if self._process.poll() is not None:
                    say(f"the run was over before {fault.kind} {fault.part}")
                    break
                outcomes.append(self._hurt(fault, time.monotonic() - started))
                say(_line(outcomes[-1]))
            status = self._process.wait()
        finally:
            if self._process.poll() is None:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(60)
                self._process.kill()
        return ChaosReport(
            outcomes=tuple(outcomes),
            status=status,
            wall_s=time.monotonic() - started,
            violations=tuple(self._auditor.look(ended=True)),
            left=tuple(self._left()),
        )

    def _hurt(self, fault: Fault, at_s: float) -> Outcome:
        self._auditor.look()
        before, began = self._auditor.abandoned, time.monotonic()
        pids = set[int]() if fault.part == "store" else self._found(fault.part)
        pid = max(pids, default=0)  # never 0 if a signal is sent
        dies = fault.kind in ("kill", "stop")
        match fault.kind:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "stop":
                os.kill(pid, signal.SIGSTOP)
            case "pause":
                with _stopped(pid):
                    time.sleep(_SHORT_S)
            case "slow":
                for _ in range(int(_SLOW_S / 0.3)):
                    with _stopped(pid):
                        time.sleep(0.2)
                    time.sleep(0.1)
            case _:
                with closing(sqlite3.connect(self._auditor.path, timeout=60.0, isolation_level=None)) as db:
                    db.execute("BEGIN IMMEDIATE")
                    time.sleep(_LOCKED_S)
                    db.execute("ROLLBACK")
        self._advance(fault.part if dies else "", pids, self.recovery_deadline_s)
        recovery_s = time.monotonic() - began
        found = self._auditor.look()
        return Outcome(
            fault=fault,
            at_s=at_s,
            recovery_s=recovery_s,
            tokens_lost=self._auditor.abandoned - before,
            violations=tuple(found),
        )

    def _advance(self, part: str, old: set[int], deadline_s: float) -> None:
        """Wait until the part has a process whose id is not in `old`, and works; without a part, until the run goes on;
        in both cases, at most until the run is over."""
        deadline, before = time.monotonic() + deadline_s, None
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                raise RunFailed(f"the run did not go on within {deadline_s:g} s; read {self.folder / 'logs'}")
            new = max(self._pids(part) - old, default=0) if part else 0
            if new or not part:
                work = self._work(part, new)
                before = -1 if part == "worker" else before
                if before is not None and work is not None and work > before:
                    return
                before = work if before is None else before
            time.sleep(_POLL_S)

    def _work(self, part: str, pid: int) -> int | None:
        """A number that grows as the part works, None if the store cannot be read now: a learner's newest version, a
        worker's leases, for other parts the newest turn."""
        sql, arguments = "SELECT COALESCE(MAX(id), 0) FROM turns", ()
        if part == "learner":
            sql = "SELECT COALESCE(MAX(version), 0) FROM versions"
        if part == "worker":  # a new worker has no lease: it works once it has one
            sql, arguments = "SELECT COUNT(*) - 1 FROM leases WHERE worker LIKE ?", (f"%.{pid}",)
        with (
            suppress(sqlite3.Error),
            closing(sqlite3.connect(f"file:{self._auditor.path}?mode=ro", uri=True, timeout=5.0)) as db,
        ):
            return db.execute(sql, arguments).fetchone()[0]
        return None

    def _rest(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self._process.poll() is None:
            time.sleep(_POLL_S)

    def _pids(self, part: str) -> set[int]:
        """The process ids of a part."""
        supervisor = 0
        with suppress(OSError, ValueError):
            supervisor = int((self.folder / "run.lock").read_text().partition(".")[0])
        if part == "supervisor" or not supervisor:
            return {supervisor} - {0}
        return {pid for pid, parent, words in _processes() if parent == supervisor and _MARKS[part] in words}

    def _found(self, part: str) -> set[int]:
        """Wait for the process ids of a part. Raises RunFailed."""
        deadline = time.monotonic() + self.recovery_deadline_s
        while not (pids := self._pids(part)):
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise RunFailed(f"the run has no {part}; read {self.folder / 'logs'}")
            time.sleep(_POLL_S)
        return pids

    def _left(self) -> Iterator[str]:
        """Processes and folders that the run left behind after its janitors had time to work."""
        name = hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:12]
        scratch = [Path(place) / f"agentrl-{os.getuid()}-{name}" for place in ("/dev/shm", tempfile.gettempdir())]
        deadline = time.monotonic() + 60.0
        while True:
            left = [str(path) for path in scratch if path.exists()]
            ours = [pid for pid, _, words in _processes() if f"{self.folder}\0" in words and pid != os.getpid()]
            left += [f"process {pid}" for pid in ours]
            if not left or time.monotonic() > deadline:
                yield from left
                return
            time.sleep(_POLL_S)


@contextmanager
def _stopped(pid: int) -> Generator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _processes() -> Iterator[tuple[int, int, str]]:
    """Id, parent's id and command line (each word ends with NUL) of every process except zombies."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError, ValueError):
                state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if state != "Z":
                    yield int(entry.name), int(parent), (entry / "cmdline").read_bytes().decode(errors="replace")


def _line(one: Outcome) -> str:
    found = "; ".join(one.violations) or "clean"
    return (
        f"{one.at_s:7.0f} s  {one.fault.kind:6} {one.fault.part:11} advanced after {one.recovery_s:6.1f} s, "
        f"{one.tokens_lost} tokens left behind, audit {found}"
    )
