"""Chaos: starts a run as a user does, and injects faults from outside while it goes on, by a seed.

    report = ChaosRun(["run.toml"], Path("runs/chaos"), faults=10, seed=0).run(print)

It knows only the run's processes, its folder and its store's rows: `/proc`, signals, sockets, locks. A fault shows
that it was real (`tests.parts.faults`), or it counts as a violation. After each fault the part has to work and the
run to advance again; then an auditor that shares no code with the store checks it. Linux only. `LEFT_OUT` lists the
faults that it does not inject, and why.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentrl.config.sections import URL_SCHEMES
from agentrl.engine.http_client import socket_of
from agentrl.errors import RunFailed
from tests.parts import faults, store_rows
from tests.parts.faults import JUNK, NoEffect, WallClock
from tests.parts.outside_audit import OutsideAuditor

LEFT_OUT = {
    "reward server, docker engine": "the run does not own them: only the connections to reward servers are cut",
    "lock of a store in PostgreSQL": "the server ends a session that holds it silently; tests/store has it",
    "loss of power": "the kernel keeps what a killed process wrote; tests/store/test_power_loss.py has it",
}
PARTS = ("worker", "engine", "learner", "supervisor")
_SHORT_S, _LOCKED_S, _SLOW_S, _FULL_S, _JUMP_S, _AHEAD_S = 3.0, 8.0, 6.0, 10.0, 10.0, 3600.0
_RESTART_S = 300.0  # for the command that restarts the database
_POLL_S = 0.1
_READY_S = 600.0
_PRESENT_S = 20.0  # how long a fault waits for a part that comes and goes
_MARKS = {"worker": "child\0worker", "learner": "child\0learner", "engine": "engine", "box": "bwrap"}
_MARKS["rank"] = "agentrl.learner.parallel.rank_process"
_ABOVE = {"box": "worker", "rank": "learner"}  # whose children they are; all others are the supervisor's


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A kind of fault and its part. `kill`, `stop` (for good), `pause` (stopped for some seconds), `slow` (stopped two
    thirds of the time); `lock` (the store's write lock is held), `cut` (connections to the part end), `garbage` (bytes
    in the part's answers), `jump` (the wall clock goes ahead by an hour, and back), `full` (no space on the disk),
    `restart` (of the server of a store in PostgreSQL, by a command of the user's)."""

    kind: str
    part: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.part}"


EVERY = (
    *(Fault(kind=kind, part=part) for kind in ("kill", "stop", "pause") for part in PARTS),
    Fault(kind="slow", part="engine"),
    Fault(kind="lock", part="store"),
    Fault(kind="cut", part="engine"),
    Fault(kind="garbage", part="engine"),
    Fault(kind="jump", part="clock"),
    Fault(kind="full", part="disk"),
    Fault(kind="cut", part="rewards"),
    Fault(kind="kill", part="box"),
    Fault(kind="kill", part="rank"),
    Fault(kind="restart", part="database"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultOutcome:
    """A fault, the proof that it was real, the time until the run advanced again, the number of sampled tokens that it
    left behind, and the auditor's findings. `at_stake` are the tokens of unfinished groups when it came: what a restart
    of these groups would have lost."""

    fault: Fault
    at_s: float
    recovery_s: float
    tokens_lost: int
    at_stake: int = 0
    proof: str = ""
    violations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosReport:
    """`status` is the run's exit status, `left` the processes and folders that it left behind, `skipped` the faults for
    which there was no part; of `tokens` sampled ones in all, `abandoned` were left behind."""

    outcomes: tuple[FaultOutcome, ...]
    status: int
    wall_s: float
    violations: tuple[str, ...]
    left: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    tokens: int = 0
    abandoned: int = 0

    @property
    def ok(self) -> bool:
        """Whether the run ended well, every audit was clean, and nothing was left behind."""
        audits = (self.violations, *(outcome.violations for outcome in self.outcomes))
        return self.status == 0 and not self.left and not any(audits)


def plan(number: int, seed: int, among: Sequence[Fault] = EVERY) -> list[Fault]:
    """A seeded mix: every fault comes once before any comes again."""
    chance, found = random.Random(seed), list[Fault]()
    while len(found) < number:
        found += chance.sample(among, len(among))
    return found[:number]


def possible(folder: Path, config: dict[str, Any], *, restarts: bool = False) -> list[Fault]:
    """The faults that a run with this configuration, in this folder, can have; `restarts`: there is a command that
    restarts its database."""
    small, boxed = _small(folder), "bubblewrap" in json.dumps(config.get("env", {}))
    found = [fault for fault in EVERY if not lacks(fault, config, small=small, restarts=restarts)]
    return [fault for fault in found if boxed or fault.part != "box"]


def lacks(fault: Fault, config: dict[str, Any], *, small: bool, restarts: bool) -> str:
    """What a run with this configuration lacks for a fault, and how it gets it; "" if it lacks nothing. `small`: its
    folder has a small disk of its own."""
    file = config.get("cluster", {}).get("store") is None
    match fault.part:
        case "disk" if not small:
            return "the run's folder has no small disk of its own: give --disk-mb 512, and install bubblewrap (bwrap)"
        case "store" if not file:
            return "only a store in a file has such a lock: leave cluster.store out"
        case "database" if file:
            return "the run's store is a file: give --set cluster.store=postgresql://user@host/database"
        case "database" if not restarts:
            return "give --restart-database COMMAND, which restarts the server"
        case "rewards" if not _urls(config):
            return "no [[rewards]] table has the url of a server"
        case "rank" if config.get("train", {}).get("parallel", {}).get("ranks", 1) < 2:
            return "the learner has no ranks: give --set train.parallel.ranks=2"
        case "engine" if fault.kind != "cut" and config.get("engine", {}).get("urls"):
            return "engines at engine.urls are not the run's own: leave it out"
        case _:
            return ""


def _small(folder: Path) -> bool:
    return folder.stat().st_dev != folder.parent.stat().st_dev


def _urls(config: dict[str, Any]) -> list[str]:
    """The servers of reward sources; not those that are the run's own engines."""
    return [url for table in config.get("rewards", ()) if (url := table.get("url") or "").startswith(URL_SCHEMES)]


@dataclass(slots=True)
class ChaosRun:
    """A run of `agentrl train WORDS --keep-alive --out FOLDER`. `every_s` is the mean pause between two faults, `among`
    the faults to choose from (default: all that are possible). After a fault the run must advance within
    `recovery_deadline_s`, which is longer than any deadline in its settings. `restart` is the shell's command that
    restarts the database of its store."""

    words: Sequence[str]
    folder: Path
    faults: int
    seed: int = 0
    every_s: float = 60.0
    recovery_deadline_s: float = 900.0
    among: Sequence[Fault] = ()
    restart: str = ""
    _auditor: OutsideAuditor = field(init=False)
    _process: subprocess.Popen[bytes] = field(init=False)
    _clock: WallClock = field(init=False)
    _chance: random.Random = field(init=False)

    def run(self, say: Callable[[str], None] = lambda _: None) -> ChaosReport:
        """Start the run, inject faults, wait for its end. Raises RunFailed if it does not advance again in time."""
        self._auditor = OutsideAuditor(store_rows.place(self.folder))
        self._chance, started = random.Random(f"{self.seed}/when"), time.monotonic()
        self._clock = WallClock()
        try:
            self._start()
            outcomes, skipped = self._hurt_it(say, started)
            status = self._process.wait()
        finally:
            if self._process.poll() is None:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(60)
                self._process.kill()
            self._clock.close()
        return ChaosReport(
            outcomes=tuple(outcomes),
            status=status,
            wall_s=time.monotonic() - started,
            violations=tuple(self._auditor.look(ended=True)),
            left=tuple(self._left()),
            skipped=tuple(skipped),
            tokens=self._auditor.tokens,
            abandoned=self._auditor.abandoned,
        )

    def _start(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        main = [sys.executable, "-c", "from agentrl.cli.main import main; main()", "train", *self.words]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [*main, "--out", str(self.folder), "--keep-alive"],
                stdin=subprocess.PIPE,  # its lifeline: no process of the run outlives us
                stdout=output,
                stderr=output,
                env={**os.environ, **self._clock.variables, "AGENTRL_KEPT": "1"},
                process_group=0,
            )

    def _hurt_it(self, say: Callable[[str], None], started: float) -> tuple[list[FaultOutcome], list[str]]:
        outcomes, skipped = list[FaultOutcome](), list[str]()
        self._advance("", set(), _READY_S)
        self._auditor.path = store_rows.place(self.folder)
        if not self._auditor.path.exists():
            raise RunFailed(f"the run did not start; read {self._log}")
        among = self.among or possible(self.folder, self._config(), restarts=bool(self.restart))
        for fault in plan(self.faults, self.seed, among):
            self._rest(self._chance.expovariate(1 / self.every_s))
            if self._process.poll() is not None:
                say(f"the run was over before {fault}")
                break
            if not self._there(fault.part):
                skipped.append(str(fault))
                say(f"skipped {fault}: the run has none now")
                continue
            outcomes.append(self._hurt(fault, time.monotonic() - started))
            say(_line(outcomes[-1]))
        return outcomes, skipped

    def _hurt(self, fault: Fault, at_s: float) -> FaultOutcome:
        self._auditor.look()
        before, at_stake, began = self._auditor.abandoned, self._auditor.at_stake, time.monotonic()
        part = "learner" if fault.part == "rank" else fault.part  # which then starts again, with all its ranks
        pids, old = self._pids_if_any(fault.part), self._pids_if_any(part)
        proof, unreal = "", list[str]()
        try:
            proof = self._inject(fault, max(pids, default=0))
        except NoEffect as error:
            unreal = [f"{fault} had no effect: {error}"]
        dies = fault.kind in ("kill", "stop") and part in PARTS
        self._recover(part if dies else "", old)
        recovery_s = time.monotonic() - began
        found = unreal + self._auditor.look()
        return FaultOutcome(
            fault=fault,
            at_s=at_s,
            recovery_s=recovery_s,
            tokens_lost=self._auditor.abandoned - before,
            at_stake=at_stake,
            proof=proof,
            violations=tuple(found),
        )

    def _recover(self, part: str, old: set[int]) -> None:
        self._advance(part, old, self.recovery_deadline_s)

    def _inject(self, fault: Fault, pid: int) -> str:
        """Do it. Returns what shows that it was real; raises NoEffect."""
        match fault.kind:
            case "kill" | "stop":
                os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
                states = "XZ" if fault.kind == "kill" else "TtXZ"
                self._until(lambda: faults.state(pid) in states, 30.0, f"process {pid} goes on")
                return f"process {pid}"
            case "pause":
                with faults.stopped(pid):
                    time.sleep(_SHORT_S)
                return f"{_SHORT_S:g} s"
            case "slow":
                for _ in range(int(_SLOW_S / 0.3)):
                    with faults.stopped(pid):
                        time.sleep(0.2)
                    time.sleep(0.1)
                return f"{_SLOW_S:g} s"
            case "lock":
                with closing(sqlite3.connect(self._auditor.path, timeout=60.0, isolation_level=None)) as db:
                    db.execute("BEGIN IMMEDIATE")
                    time.sleep(_LOCKED_S)
                    db.execute("ROLLBACK")
                return f"{_LOCKED_S:g} s"
            case "cut":
                return self._cut(fault.part)
            case "garbage":
                return self._garble(pid)
            case "jump":
                return self._jump()
            case "restart":
                return self._restart_database()
            case _:
                if not _small(self.folder):
                    raise NoEffect("the run's folder has no disk of its own, and that of others is not filled")
                with faults.full_disk(self.folder):
                    time.sleep(_FULL_S)
                return f"{_FULL_S:g} s"

    def _cut(self, part: str) -> str:
        cut: list[faults.Connection] = []

        def cut_some() -> bool:
            ports = self._engine_ports() if part == "engine" else self._reward_ports()
            cut.extend(faults.cut_connections(self._pids("worker") | self._pids("learner"), ports))
            return bool(cut)

        self._until(cut_some, 60.0, f"no process was connected to {part}")
        return f"{len(cut)} connections"

    def _garble(self, pid: int) -> str:
        junk, sent = self._chance.choice(JUNK), list[faults.Connection]()

        def sent_some() -> bool:
            sent.extend(faults.garble(pid, self._engine_ports(), junk))
            return bool(sent)

        self._until(sent_some, 60.0, "nobody was connected to the engine")
        self._until(lambda: len(faults.still_open(sent)) < len(sent), 60.0, "no client left a connection")
        return f"{len(sent)} connections"

    def _jump(self) -> str:
        latest = "SELECT COALESCE(MAX(until_s), 0) FROM leases"
        try:
            self._clock.set(_AHEAD_S)
            began = time.monotonic()
            self._until(
                lambda: (self._ask(latest) or 0) > time.time() + _AHEAD_S / 2, 120.0, "no lease is from its future"
            )
            time.sleep(max(0.0, _JUMP_S - (time.monotonic() - began)))
        finally:
            self._clock.set(0.0)
        return f"{_AHEAD_S:g} s ahead, and back"

    def _restart_database(self) -> str:
        since = "SELECT CAST(extract(epoch FROM pg_postmaster_start_time()) AS double precision)"
        before, began = self._ask(since), time.monotonic()
        if before is None or not self.restart:
            raise NoEffect("give the command that restarts the server of a store in PostgreSQL")
        try:
            subprocess.run(self.restart, shell=True, timeout=_RESTART_S, check=True, capture_output=True)
        except subprocess.SubprocessError as error:
            raise NoEffect(f"{self.restart}: {error}") from None
        self._until(lambda: (self._ask(since) or before) > before, 60.0, "the server is the one that was there before")
        return f"away for {time.monotonic() - began:.1f} s at most"

    def _until(self, done: Callable[[], bool], deadline_s: float, otherwise: str) -> None:
        deadline = time.monotonic() + deadline_s
        while not done():
            if time.monotonic() > deadline:
                raise NoEffect(f"{otherwise} after {deadline_s:g} s")
            if self._process.poll() is not None:
                raise NoEffect("the run was over")
            time.sleep(_POLL_S / 4)

    def _advance(self, part: str, old: set[int], deadline_s: float) -> None:
        """Wait until the part has a process whose id is not in `old`, and works (an engine: for clients); without a
        part, until the run goes on; in both cases, at most until the run is over."""
        deadline, before = time.monotonic() + deadline_s, None
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                raise RunFailed(f"the run did not go on within {deadline_s:g} s; read {self.folder / 'logs'}")
            new = max(self._pids(part) - old, default=0) if part else 0
            if not part or (new and (part != "engine" or faults.serves(new, self._engine_ports()))):
                work = self._work(part, new)
                before = -1 if part == "worker" else before
                if before is not None and work is not None and work > before:
                    return
                before = work if before is None else before
            time.sleep(_POLL_S)

    def _work(self, part: str, pid: int) -> int | None:
        """A number that grows as the part works, None if the store cannot be read now: a learner's newest version, a
        worker's leases, for other parts the newest turn."""
        if part == "learner":
            return self._ask("SELECT COALESCE(MAX(version), 0) FROM versions")
        if part == "worker":  # a new worker has no lease: it works once it has one
            return self._ask("SELECT COUNT(*) - 1 FROM leases WHERE worker LIKE ?", f"%.{pid}")
        return self._ask("SELECT COALESCE(MAX(id), 0) FROM turns")

    def _ask(self, sql: str, *arguments: object) -> Any:
        """One value of the store, None if it cannot be read now."""
        return store_rows.ask(store_rows.place(self.folder), sql, *arguments)

    @property
    def _log(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.log"

    def _config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text())

    def _engine_ports(self) -> set[int | str]:
        urls: list[str] = json.loads(self._ask("SELECT value FROM meta WHERE key = 'engine_urls'") or "[]")
        return {_port(url) for url in urls}

    def _reward_ports(self) -> set[int | str]:
        return {_port(url) for url in _urls(self._config())}

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
        owners = self._pids(_ABOVE[part]) if part in _ABOVE else {supervisor}
        return {
            pid
            for pid, parent, words in faults.processes()
            if _MARKS[part] in words and (parent in owners or (part in PARTS and self._on_ray(words)))
        }

    def _on_ray(self, words: str) -> bool:
        """Whether a process with this command line is one of the run's that Ray's processes started, here."""
        return str(self.folder) in words and "\0train\0" not in words and self._config()["cluster"]["launcher"] == "ray"

    def _pids_if_any(self, part: str) -> set[int]:
        return self._pids(part) if part in _MARKS or part == "supervisor" else set()

    def _there(self, part: str) -> bool:
        """Wait for a process of a part. False if there is none for a while; raises RunFailed if the run cannot be
        without it."""
        deadline = time.monotonic() + (_PRESENT_S if part == "box" else self.recovery_deadline_s)
        while (part in _MARKS or part == "supervisor") and not self._pids(part):
            if time.monotonic() > deadline or self._process.poll() is not None:
                if part == "box" or self._process.poll() is not None:
                    return False
                raise RunFailed(f"the run has no {part}; read {self.folder / 'logs'}")
            time.sleep(_POLL_S / 10)
        return True

    def _left(self) -> Iterator[str]:
        """Processes and folders that the run left behind after its janitors had time to work."""
        name = hashlib.sha256(str(self.folder.resolve()).encode()).hexdigest()[:12]
        scratch = [Path(place) / f"agentrl-{os.getuid()}-{name}" for place in ("/dev/shm", tempfile.gettempdir())]
        deadline = time.monotonic() + 60.0
        while True:
            left = [str(path) for path in scratch if path.exists()]
            found = list(faults.processes())
            above = _ancestors({pid: parent for pid, parent, _ in found})
            left += [f"process {pid}" for pid, _, words in found if f"{self.folder}\0" in words and pid not in above]
            if not left or time.monotonic() > deadline:
                yield from left
                return
            time.sleep(_POLL_S)


def _ancestors(parents: dict[int, int]) -> set[int]:
    """This process and those above it, whose command lines may name the run's folder too."""
    found, pid = set[int](), os.getpid()
    while pid in parents:
        found.add(pid)
        pid = parents[pid]
    return found


def _port(url: str) -> int | str:
    if (path := socket_of(url)) is not None:
        return path
    found = urlsplit(url)
    return found.port or (443 if found.scheme == "https" else 80)


def _line(outcome: FaultOutcome) -> str:
    found = "; ".join(outcome.violations) or "clean"
    return (
        f"{outcome.at_s:7.0f} s  {outcome.fault.kind:7} {outcome.fault.part:11} "
        f"advanced after {outcome.recovery_s:6.1f} s, "
        f"{outcome.tokens_lost} tokens left behind, {outcome.at_stake} at stake, audit {found} ({outcome.proof})"
    )
