"""What is told of a run from beside it, and how it is ended from there."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentrl import config as configuration
from agentrl.cli.main import app
from agentrl.errors import AgentRLError, UsageError
from agentrl.records import StopReason, Task
from agentrl.run import resume_overrides, supervisor
from agentrl.run.reporting import status
from agentrl.run.run_folder import RunDir
from agentrl.store import Ending, RunStore, run_values

HOLDS = """
import signal, sys
from pathlib import Path
from agentrl.run.run_folder import RunDir

with RunDir(Path(sys.argv[1])).lock():
    if sys.argv[2] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("held", flush=True)
    signal.pause()
"""
NOW = 10_000.0


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    settings = {"model": "m", "env": {"id": "e"}, "train": {"steps": 80}}
    return RunDir.create(tmp_path / "run", configuration.parse(settings))


@contextmanager
def supervised(run: RunDir, how: str = "") -> Iterator[subprocess.Popen[str]]:
    """A process that holds the run, as its supervisor does."""
    words = [sys.executable, "-c", HOLDS, str(run.path), how]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def step(run: RunDir, number: int, time_s: float, **values: object) -> None:
    with RunStore.open(run.store_path, clock=lambda: time_s) as store:
        store.set_meta("phase", "train")
        store.metrics.record("step", number, {"success_mean": 0.5, "lag_mean": 1.0, **values})  # pyright: ignore[reportArgumentType]


def typed(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_run_that_never_began_says_how_to_begin(run: RunDir) -> None:
    told = list(status.lines(status.status(run)))
    assert told[0] == f"{run.path}: not under way"
    assert told[1:] == ["step      0 of 80", "groups    none", f"next      agentrl train --resume {run.path}"]


def test_a_run_under_way_says_its_process_and_its_pace(run: RunDir) -> None:
    for at in range(12):
        step(run, at + 1, NOW + 5 * at, alarms=["kl is 3"] if at == 11 else [])
    with run.lock():
        found = status.status(run, lambda: NOW + 5 * 11 + 7)
    assert (found["state"], found["pid"], found["phase"]) == ("under way", os.getpid(), "train")
    assert (found["step"], found["last_step_ago_s"], found["step_s"], found["late_s"]) == (12, 7.0, 5.0, None)
    told = list(status.lines(found))
    assert told[1] == "step      12 of 80, the last 7 s ago; a step takes 5 s"
    assert "alarm     kl is 3" in told
    assert told[-1] == f"next      agentrl logs {run.path} --follow; agentrl stop {run.path}"


def test_of_many_evaluations_the_first_and_the_last_are_told(run: RunDir) -> None:
    step(run, 60, NOW)
    found = status.status(run, lambda: NOW)
    for steps, said in (
        (range(0, 40, 10), "0: 0.00, 10: 0.10, 20: 0.20, 30: 0.30"),
        (range(0, 70, 10), "0: 0.00, …, 50: 0.50, 60: 0.60"),
    ):
        found["held_out"] = {number: number / 100 for number in steps}
        assert f"success   0.50 in the last steps; held-out at {said}; lag 1.0 steps" in list(status.lines(found))


def test_success_by_step_has_intervals_over_groups(run: RunDir) -> None:
    """Wilson's, by scipy; steps without a group, or whose tasks have no success, are none."""
    stats = pytest.importorskip("scipy.stats")
    rates = [(0.25, 8), (0.5, 8), (None, 8), (0.5, 0), (0.75, 16), (1.0, 16)]
    for at, (rate, groups) in enumerate(rates, 1):
        step(run, at, NOW + at, success_mean=rate, group_count=groups)
    found = status.status(run, lambda: NOW + 7)
    oracle = [stats.binomtest(won, n).proportion_ci(method="wilson") for won, n in ((2, 8), (4, 8), (12, 16), (16, 16))]
    assert [(point["first"], point["groups"]) for point in found["curve"]] == [(1, 8), (2, 8), (5, 16), (6, 16)]
    for point, interval in zip(found["curve"], oracle, strict=True):
        assert (point["low"], point["high"]) == pytest.approx((interval.low, interval.high), abs=1e-12)
    (line,) = (line for line in status.lines(found) if line.startswith("curve"))
    assert line.startswith("curve     success at step 1: 0.25 (0.07 to 0.59), 2: 0.50 (0.22 to 0.78), 5: 0.75")
    for at in range(7, 11):
        step(run, at, NOW + at, success_mean=0.5, group_count=4)
    pooled = status.status(run, lambda: NOW + 11)["curve"]
    assert [(point["first"], point["last"], point["groups"]) for point in pooled] == [
        (1, 2, 16),
        (5, 6, 32),
        (7, 8, 8),
        (9, 10, 8),
    ]
    assert pooled[0]["success"] == 0.375


def test_the_pace_of_a_young_run_is_that_of_its_few_steps(run: RunDir) -> None:
    step(run, 1, NOW)
    assert status.status(run, lambda: NOW)["step_s"] is None
    step(run, 2, NOW + 300)
    step(run, 3, NOW + 600)
    with run.lock():
        found = status.status(run, lambda: NOW + 600 + 70)
    assert (found["step_s"], found["late_s"]) == (300.0, None)


@pytest.mark.parametrize(("ago_s", "late"), [(59.0, False), (61.0, True)])
def test_a_run_whose_steps_stopped_coming_is_told_from_one_that_works(run: RunDir, ago_s: float, late: bool) -> None:
    step(run, 1, NOW)
    step(run, 2, NOW + 5)
    with run.lock():
        found = status.status(run, lambda: NOW + 5 + ago_s)
    assert found["late_s"] == (ago_s if late else None)
    assert ("no step for 61 s: agentrl logs" in list(status.lines(found))[-1]) is late
    assert status.status(run, lambda: NOW + 5 + ago_s)["late_s"] is None, "nothing is late where nothing runs"


def test_a_learner_that_waits_says_what_for(run: RunDir) -> None:
    step(run, 1, NOW)
    with RunStore.open(run.store_path) as store:
        store.set_meta(run_values.LEARNER_WAITS.key, "step 2 waits for groups: 3 of 8 are scored")
    with run.lock():
        assert "waits     step 2 waits for groups: 3 of 8 are scored" in list(status.lines(status.status(run)))
    assert not any(line.startswith("waits") for line in status.lines(status.status(run))), "nobody waits now"


def test_steps_come_in_phases_that_a_supervisor_enters() -> None:
    assert set(status.STEPS_COME) < set(re.findall(r'_enter\("(\w+)"\)', inspect.getsource(supervisor)))


def test_a_run_that_has_ended_is_over(run: RunDir) -> None:
    step(run, 80, NOW)
    run.summary.write_text("{}")
    told = list(status.lines(status.status(run)))
    assert told[0] == f"{run.path}: over"
    longer = f"agentrl train --resume {run.path} --set train.steps=160"
    assert told[-1].endswith(f"{longer} trains it for longer")
    assert status.stop(run, 0).endswith(f"go on with {longer}"), "without more steps it would do nothing"
    assert status.scale(run, engines=None, workers=3).endswith(longer)


def test_a_run_that_was_stopped_early_goes_on_by_a_plain_resume(run: RunDir) -> None:
    step(run, 3, NOW)
    run.summary.write_text("{}")
    with RunStore.open(run.store_path) as store:
        run_values.STOPPED_EARLY.set(store, "held-out success has not risen for 5 steps")
    found = status.status(run, lambda: NOW)
    assert (found["state"], found["stopped_early"]) == ("over", "held-out success has not risen for 5 steps")
    told, plain = list(status.lines(found)), f"agentrl train --resume {run.path}"
    assert "stopped   early: held-out success has not risen for 5 steps" in told
    assert told[-1] == f"next      {plain} trains it on to step 80"
    assert status.stop(run, 0).endswith(f"go on with {plain}")
    assert status.scale(run, engines=None, workers=3).endswith(plain)


def test_a_run_that_goes_on_for_longer_is_not_over_by_its_earlier_end(run: RunDir) -> None:
    step(run, 80, NOW)
    run.summary.write_text('{"steps": 80}')
    with RunStore.open(run.store_path) as store:
        store.versions.confirm_version(store.versions.mint_version(80))
    resume_overrides.change(run, ["train.steps=160"])
    step(run, 81, NOW + 5)
    told = list(status.lines(status.status(run)))
    assert (told[0], told[-1]) == (f"{run.path}: not under way", f"next      agentrl train --resume {run.path}")
    assert status.stop(run, 0).endswith(f"go on with agentrl train --resume {run.path}")
    assert (run.path / "summary-80.json").read_text() == '{"steps": 80}', "what it says of the earlier end is kept"


def test_a_supervisor_that_a_signal_stopped_is_told_and_can_be_ended(run: RunDir) -> None:
    with supervised(run) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        found = status.status(run)
        assert (found["state"], found["pid"]) == ("stopped by a signal", process.pid)
        assert list(status.lines(found))[-1] == f"next      kill -CONT {process.pid}"
        assert "is stopped; go on with agentrl train --resume" in status.stop(run, 60)


def test_a_run_is_stopped_from_beside_it_and_lets_go_of_its_lock(run: RunDir) -> None:
    with supervised(run) as process:
        done = typed("stop", run.path)
        assert done.exit_code == 0 and f"go on with agentrl train --resume {run.path}" in done.output
        assert process.wait(60) == -signal.SIGTERM
    with run.lock():
        pass
    assert "is not under way" in typed("stop", run.path).output


def test_a_run_that_does_not_end_is_said_with_its_process(run: RunDir) -> None:
    with supervised(run, "deaf") as process, pytest.raises(UsageError, match=rf"within 0 s.*kill -9 {process.pid}"):
        status.stop(run, 0)


def test_a_run_of_another_machine_is_not_called_dead_nor_signalled(run: RunDir) -> None:
    with run.lock():
        run.lock_path.write_text(f"{os.getpid()}.17.4026531999.abcd")  # its process id means nothing here
        assert status.holder(run) == status.Holder("elsewhere")
        with pytest.raises(AgentRLError, match="on the machine on which it was started"):
            status.stop(run, 0)
        with RunStore.read(run.store_path) as store:
            assert store.meta(run_values.STOP_REQUESTED.key) == run.lock_path.read_text(), (
                "it is asked through its store"
            )
    assert status.holder(run) == status.Holder("nobody")


def test_a_program_gets_the_status_as_json(run: RunDir) -> None:
    step(run, 3, NOW)
    found = json.loads(typed("status", run.path, "--json").output)
    assert (found["step"], found["steps"], found["state"]) == (3, 80, "not under way")


def test_logs_show_the_last_lines_and_no_control_character(run: RunDir) -> None:
    (run.logs / "learner.log").write_text("one\ntwo\nthree\n")
    (run.logs / "worker-0.log").write_bytes(b"policy printed \x1b]0;owned\x07 \xff\n")
    assert typed("logs", run.path, "learner", "-n", 2).output == "learner: two\nlearner: three\n"
    both = typed("logs", run.path).output
    assert both.splitlines()[-1] == "worker-0: policy printed \\x1b]0;owned\\x07 \ufffd"
    missing = typed("logs", run.path, "../config")
    assert isinstance(missing.exception, UsageError) and "it has: learner, worker-0" in str(missing.exception)


@pytest.mark.medium
def test_followed_logs_end_with_the_run_and_miss_nothing(run: RunDir) -> None:
    log = run.logs / "learner.log"
    log.write_text("before\n")
    with supervised(run) as process:
        words = [sys.executable, "-c", "from agentrl.cli.main import main; main()", "logs", str(run.path), "-f"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None and following.stdout.readline() == "learner: before\n"
            with log.open("a") as file:
                file.write("meanwhile\n")
            assert following.stdout.readline() == "learner: meanwhile\n"
            with log.open("a") as file:
                file.write("at the end\n")
            process.kill()
            assert following.stdout.read() == "learner: at the end\n"
            assert following.wait(60) == 0


def test_a_failed_group_is_counted_once_and_with_why_and_where(run: RunDir) -> None:
    detail = "e: step raised KeyError: 'a' (/home/me/env.py:12)"
    with RunStore.open(run.store_path) as store:
        store.versions.confirm_version(store.versions.mint_version(0))
        store.groups.add_groups([Task(index=0, env="e", seed=0)], size=1, purpose="train")
        (claim,) = store.leases.claim("w", 1, lease_s=1e9)
        store.journal.finish(
            claim.episode_id,
            claim.fence,
            Ending(stop_reason=StopReason.ENV_FAILED, outcome=None, success=None, detail=detail),
        )
    told = typed("status", run.path).stdout
    assert "groups    1 dropped (env_failed)\n" in told
    assert f"failed    1 of 1 episodes, the last: {detail}; agentrl tasks {run.path} --failed\n" in told
    table = typed("tasks", run.path, "--failed").stdout
    assert "KeyError: 'a'" in table and "/home/me/env.py:12" in table
    assert typed("tasks", run.path).exit_code == 0
