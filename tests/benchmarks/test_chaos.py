"""A real run, hurt from outside under a seed, ends well, and an auditor that is nobody's friend finds nothing."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from chaos import Hurts, hurt, main
from rich.console import Console
from run.test_run import ENVS, command, run_file
from store.server import running

from agentrl.errors import AgentRLError
from agentrl.store import RunStore
from tests.parts import chaos_run, faults
from tests.parts.chaos_run import ChaosReport, ChaosRun, Fault, FaultOutcome, possible
from tests.parts.faults import NoEffect
from tests.parts.outside_audit import OutsideAuditor

SETTINGS = {
    "rollout": {"workers": 2, "lease_s": 24.0},
    "engine": {"liveness_deadline_s": 16.0},
    "train": {"steps": 160, "checkpoint_every": 5, "liveness_deadline_s": 10.0},
    "eval": {"sets": []},
}


FAULTS = (
    Fault(kind="kill", part="learner"),
    Fault(kind="cut", part="engine"),
    Fault(kind="stop", part="worker"),
    Fault(kind="lock", part="store"),
    Fault(kind="garbage", part="engine"),
    Fault(kind="kill", part="engine"),
    Fault(kind="jump", part="clock"),
    Fault(kind="stop", part="supervisor"),
)


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_that_is_hurt_at_every_part_ends_well_and_breaks_no_law(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chaos_run, "plan", lambda number, seed, among: list(FAULTS)[:number])
    file = run_file(tmp_path, f"{ENVS}:Vowels", **SETTINGS)
    report = ChaosRun([str(file)], tmp_path / "run", faults=len(FAULTS), every_s=1.0).run(print)
    assert report.ok, report
    assert [one.fault for one in report.outcomes] == list(FAULTS)
    assert all(one.proof for one in report.outcomes)


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.bubblewrap
@pytest.mark.timeout(600)
def test_a_run_whose_disk_was_full_goes_on_and_what_it_wrote_is_brought_out(tmp_path: Path) -> None:
    file, out = run_file(tmp_path, f"{ENVS}:Vowels", **SETTINGS), tmp_path / "run"
    hurt = command("bench", "chaos", file, "--out", out, "--faults", 1, "--every-s", 1, "--only", "full:disk")
    hurt += ["--disk-mb", "64", "--set", "train.steps=30"]
    done = subprocess.run(hurt, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "full" in done.stdout and "clean" in done.stdout
    assert OutsideAuditor(out / "store.sqlite").look(ended=True) == []
    assert json.loads((out / "summary.json").read_text())["steps"] == 30


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["pause", "cut", "garbage"])
def test_a_fault_that_silently_does_nothing_is_a_violation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Over a store without a run: the injection is replaced by nothing."""
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        store.set_meta("engine_urls", '["http://127.0.0.1:1"]')
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as victim:
        one = ChaosRun([], tmp_path, faults=1)
        one._auditor, one._process = OutsideAuditor(tmp_path / "store.sqlite"), victim
        one._chance = random.Random(0)
        monkeypatch.setattr(one.__class__, "_pids", lambda self, part: {victim.pid})
        monkeypatch.setattr(one.__class__, "_advance", lambda self, part, old, deadline_s: None)
        monkeypatch.setattr(os, "kill", lambda pid, number: None)
        ticks = iter(range(100_000))
        clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), sleep=lambda seconds: None, time=time.time)
        for module in (chaos_run, faults):  # threads of others that sleep must not spin meanwhile
            monkeypatch.setattr(module, "time", clock)
        outcome = one._hurt(Fault(kind=kind, part="engine"), 0.0)
    assert len(outcome.violations) == 1 and outcome.violations[0].startswith(f"{kind}:engine had no effect: ")
    assert not ChaosReport(outcomes=(outcome,), status=0, wall_s=0.0, violations=(), left=()).ok


def test_a_disk_that_others_use_is_never_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos_run.faults, "full_disk", lambda folder: pytest.fail("it was filled"))
    (tmp_path / "run").mkdir()
    with pytest.raises(NoEffect, match="no disk of its own"):
        ChaosRun([], tmp_path / "run", faults=1)._inject(Fault(kind="full", part="disk"), 0)


def test_the_runs_own_engines_are_no_reward_server(tmp_path: Path) -> None:
    config = {"rewards": [{"url": "policy"}], "engine": {"urls": ["http://h"]}}
    assert not {"cut:rewards", "kill:engine", "slow:engine"} & {str(one) for one in possible(tmp_path, config)}
    assert {"cut:engine", "kill:worker"} < {str(one) for one in possible(tmp_path, config)}
    server = {"rewards": [{"url": "http://h:1"}]}
    assert "cut:rewards" in {str(one) for one in possible(tmp_path, server)}


@pytest.mark.medium
@pytest.mark.postgres
def test_a_database_that_was_not_restarted_is_no_fault(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="agentrl-pg-") as folder, running(Path(folder)) as server:
        with RunStore.create(tmp_path / "store.address", "{}", url=server.url):
            pass
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            one = ChaosRun([], tmp_path, faults=1)
            one._process, one.restart = process, "exit 1"
            with pytest.raises(NoEffect, match="exit status 1"):
                one._restart_database()
            here, python = Path(__file__).parent.parent, sys.executable
            again = f"s = Server(Path({folder!r})); s.stop('immediate'); s.start()"
            code = f"from pathlib import Path; from store.server import Server; {again}"
            one.restart = f"PYTHONPATH={here} {python} -c {shlex.quote(code)}"
            assert "away for" in one._restart_database()
        config = {"cluster": {"store": server.url}}
        assert not {fault.part for fault in possible(tmp_path, config)} & {"store", "database", "rank"}
        assert "database" in {fault.part for fault in possible(tmp_path, config, restarts=True)}


def finished(folder: Path, step_s: float, success: float) -> None:
    """What a run of four steps leaves for a comparison."""
    folder.mkdir(parents=True, exist_ok=True)
    with RunStore.create(
        folder / "store.sqlite", "{}", clock=iter(100.0 + step_s * n for n in range(99)).__next__
    ) as it:
        for step in range(1, 5):
            it.metrics.record("step", step, {})
        it.set_meta("train_started_s", "100")
        it.set_meta("train_ended_s", str(100 + 4 * step_s))
    held_out = {"sets": {"held_out": {"before": None, "after": {"success": success}}}}
    (folder / "summary.json").write_text(json.dumps({"eval": held_out}))


def test_a_comparison_hurts_a_run_from_tokens_and_one_from_groups_by_the_same_faults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out, seen = tmp_path / "run.toml", tmp_path / "run", list[ChaosRun]()

    def hurt_it(self: ChaosRun, say: object) -> ChaosReport:
        seen.append(self)
        groups = "rollout.resume=group" in self.words
        finished(self.folder, 15.0 if groups else 12.0, 0.8)
        fault = Fault(kind="kill", part="worker")
        hit = FaultOutcome(fault=fault, at_s=1.0, recovery_s=2.0, tokens_lost=300 if groups else 0, at_stake=400)
        return ChaosReport(
            outcomes=(hit,),
            status=0,
            wall_s=9.0,
            violations=(),
            left=(),
            tokens=9000,
            abandoned=300 if groups else 0,
        )

    def quiet(argv: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        finished(Path(argv[-1]), 10.0, 0.9)
        return subprocess.CompletedProcess(argv, 0)

    monkeypatch.setattr(ChaosRun, "run", hurt_it)
    monkeypatch.setattr(subprocess, "run", quiet)
    what = Hurts(
        file=file,
        out=out,
        faults=3,
        seed=7,
        every_s=9.0,
        only=(),
        settings=("train.steps=4",),
        compare=True,
        restart_groups=True,
    )
    console = Console(width=200, record=True)
    assert hurt(what, console)
    assert [(one.seed, one.every_s, one.faults) for one in seen] == [(7, 9.0, 3)] * 2
    assert [list(one.words)[-1] for one in seen] == ["rollout.resume=tokens", "rollout.resume=group"]
    rows = [[cell.strip() for cell in line.split("│")] for line in console.export_text().splitlines()]
    assert [row[1:-1] for row in rows if len(row) == 7] == [
        ["(no faults)", "held_out 0.900", "1.00", "", ""],
        ["from its tokens", "held_out 0.800", "0.83", "8.0 s", "0 of 9000"],
        ["from its group's start", "held_out 0.800", "0.67", "20.0 s", "300 of 9000"],
    ]


def test_without_a_comparison_one_run_restarts_its_groups(tmp_path: Path) -> None:
    what = Hurts(
        file=tmp_path / "run.toml",
        out=tmp_path / "run",
        faults=1,
        seed=0,
        every_s=1.0,
        only=(),
        settings=(),
        compare=False,
        restart_groups=True,
    )
    (run,) = what.runs.values()
    assert run.words == [str(tmp_path / "run.toml"), "--set", "rollout.resume=group"] and run.out == tmp_path / "run"


POSTGRES = ("--set", "cluster.store=postgresql://a@h/d")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["none.toml"], "cannot read run file 'none.toml'"),
        (["run.toml", "--set", "train.stepps=3"], "train.stepps"),
        (["run.toml", "--only", "kill:nobody"], "there is no such fault"),
        (["run.toml", "--every-s", "0"], "--every-s 0: must be a number of seconds above 0"),
        (["run.toml", "--only", "full:disk", "--disk-mb", "0"], "--only full:disk: .* give --disk-mb 512"),
        (["run.toml", "--only", "kill:rank"], "--only kill:rank: .* --set train.parallel.ranks=2"),
        (["run.toml", "--only", "cut:rewards"], "no .*rewards.* table has the url"),
        (["run.toml", "--only", "restart:database"], "the run's store is a file: give --set cluster.store=postgresql"),
        (["run.toml", "--restart-database", "true"], "--restart-database: the run's store is a file"),
        (["run.toml", "--only", "lock:store", *POSTGRES], "leave cluster.store out"),
        (["run.toml", "--only", "restart:database", *POSTGRES], "give --restart-database COMMAND"),
        (["run.toml", "--only", "kill:engine", "--set", "engine.urls=['http://h']"], "are not the run's own"),
    ],
)
def test_chaos_that_cannot_begin_leaves_no_folder_in_its_own_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('model = "agentrl/tiny-coder"\nenv.id = "test/Env-v0"\n')
    with pytest.raises(AgentRLError, match=says):
        main([*words, "--out", "hurt"])
    assert not Path("hurt").exists()
