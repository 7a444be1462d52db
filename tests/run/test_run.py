"""Whole runs with real processes: engine, worker, learner, store. Small, on the shipped tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from agentrl import config as configuration
from agentrl.errors import RunFailed
from agentrl.learner.checkpoints.folders import newest
from agentrl.records import GroupState
from agentrl.run.run_folder import RunDir
from agentrl.run.trainer import Trainer, evaluate
from agentrl.store import RunStore
from agentrl.store.audit import audit
from agentrl.store.run_values import LEARNER_WAITS

from .envs import Vowels, length_reward
from .gate import Gate

DEADLINE_S = 500
SMALL: dict[str, Any] = {
    "model": "agentrl/tiny-coder",
    "rollout": {"group_size": 4, "max_running": 16, "max_turns": 4, "max_tokens_per_turn": 12},
    "engine": {"max_batch": 16, "kv_cache_mb": 64},
    "buffer": {"groups_per_step": 2, "skip_without_signal": False},
    "train": {"steps": 4, "checkpoint_every": 2},
    "eval": {"sets": [{"name": "held_out", "n": 4}], "every": 2, "n_during": 2},
}
SUMMARY_KEYS = {
    *("eval", "steps", "episodes", "tokens_trained", "wall_s", "train_s", "trainer_idle_share", "max_lag_seen"),
    *("episode_engine_share", "replays"),
    *("seed", "model_params", "versions"),
}
ENVS = Path(__file__).parent / "envs.py"


def run_file(tmp_path: Path, env: str, **sections: Any) -> Path:
    """A TOML run file made of SMALL and `sections`."""
    document = {**SMALL, "env": {"id": env}}
    for name, values in sections.items():
        document[name] = {**document.get(name, {}), **values}
    lines = [f"model = {json.dumps(document['model'])}"]
    for name, values in document.items():
        if isinstance(values, dict):
            lines.append(f"[{name}]")
            lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
    file = tmp_path / "run.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-c", "from agentrl.cli.main import main; main()", *map(str, arguments)]


@contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own; whatever is left of it is killed at the end."""
    process = subprocess.Popen(
        command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=DEADLINE_S)


def wait_until(true: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Until `true` of what the run's process does."""
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.05)


def wait_for_step(path: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until the run's metrics show `step`."""
    wait_until(lambda: any(f'"step": {step},' in line for line in _lines(path / "metrics.jsonl")), process)


def last_step(run: RunDir) -> int:
    """The last step in the run's metrics, of which a line may be half written."""
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return max((row.get("step", 0) for row in rows), default=0)


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def children(run: RunDir) -> list[int]:
    """Process ids whose command line names the run or its scratch space."""
    found: list[int] = []
    names = str(run.path), str(run.scratch)  # the second reads the run's configuration
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if any(name in word for word in words for name in names):
                found.append(int(entry.name))
    return found


def child(run: RunDir, role: str, process: subprocess.Popen[str] | None = None) -> int:
    """The process id of one child. Where the run's `process` is given, the child may be between two lives."""
    found: list[int] = []

    def there() -> bool:
        found[:] = [pid for pid in children(run) if role in command_line(pid)]
        return bool(found)

    if process is not None:
        wait_until(there, process)
    assert there(), f"no {role} among {[command_line(pid) for pid in children(run)]}"
    return found[0]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # it ended meanwhile
        return ""


def assert_nothing_remains(run: RunDir) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while (left := children(run)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, [command_line(pid) for pid in left]
    assert not run.scratch.exists()


def assert_lawful(run: RunDir, steps: int) -> None:
    with RunStore.open(run.store_path) as store:
        report = audit(store)
        assert not report.violations
        trained = [episode for step in range(1, steps + 1) for episode in store.lineage.episodes_of(step)]
        assert len(trained) == len(set(trained))
        assert len({store.reads.trajectory(episode).group_id for episode in trained}) == steps * 2
        assert store.groups.counts()[GroupState.TRAINED] == steps * 2


@pytest.mark.slow
def test_a_run_from_python_with_a_reward_of_ones_own(tmp_path: Path) -> None:
    summary = Trainer(env=Vowels, config=SMALL, reward=length_reward, out=tmp_path / "run").train()
    run = RunDir.open(tmp_path / "run")
    assert set(summary) >= SUMMARY_KEYS
    assert json.loads(run.summary.read_text()) == summary
    assert (summary["steps"], summary["episodes"]) == (4, 32)
    assert summary["eval"]["tasks"] == summary["eval"]["before"]["n"] == summary["eval"]["after"]["n"] == 4
    assert summary["max_lag_seen"] <= 4
    with RunStore.open(run.store_path) as store:
        for trajectory in store.reads.trajectories("train"):
            if trajectory.outcome is not None:
                assert trajectory.outcome == length_reward(trajectory)
        assert store.groups.counts("eval:held_out:during@2") == {GroupState.SCORED: 2}
    assert (run.path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "after: " in (run.path / "transcripts.md").read_text()
    said = "".join(log.read_text() for log in run.logs.iterdir())
    assert "torchao" not in said and "_pytree" not in said  # which transformers imports, and which warns
    assert_lawful(run, steps=4)
    assert_nothing_remains(run)
    longer = Trainer.resume(run.path, settings=["train.steps=6"])
    assert (longer["steps"], longer["episodes"], longer["eval"]["after"]["n"]) == (6, 48, 4)
    assert longer["train_s"] > summary["train_s"]
    with RunStore.open(run.store_path) as store:
        assert store.groups.counts("eval:held_out:during@4") == {GroupState.SCORED: 4}
    assert_lawful(run, steps=6)
    trained = str(run.checkpoints / "step-00000006")
    again = configuration.parse({**SMALL, "model": trained, "env": {"id": f"{ENVS}:Vowels"}})
    (result,) = evaluate(again, out=tmp_path / "eval")
    assert (result.name, result.n) == ("held_out", 4)


@pytest.mark.medium
def test_law_2_killed_whole_and_resumed_a_run_trains_every_group_once(tmp_path: Path) -> None:
    file = run_file(tmp_path, f"{ENVS}:Vowels", train={"steps": 6, "checkpoint_every": 2}, eval={"sets": []})
    run, gate = RunDir(tmp_path / "run"), Gate(tmp_path, at=8)
    with started("train", file, "--out", run.path, *gate.arguments) as process:
        wait_for_step(run.path, 3, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(DEADLINE_S)
    gate.open()
    with started("train", "--resume", run.path) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert "6 steps" in out
    assert_lawful(run, steps=6)
    assert_nothing_remains(run)
    with RunStore.open(run.store_path) as store:
        assert store.lineage.attempt >= 2


@pytest.mark.slow
@pytest.mark.long
def test_ranks_that_compute_passes_together_train_a_run(tmp_path: Path) -> None:
    """Losses and gradients are compared in `tests/learner/test_ranks.py`: here the run's own processes make two steps,
    and its engine takes the weights, which the canary compares."""
    file = run_file(tmp_path, f"{ENVS}:Vowels", train={"steps": 2}, eval={"sets": []})
    asked = [f"--set=train.parallel.{name}=2" for name in ("ranks", "tensor")]
    with started("train", file, "--out", tmp_path / "run", *asked) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, out + err
    run = RunDir.open(tmp_path / "run")
    summary = json.loads(run.summary.read_text())
    assert (summary["steps"], summary["steps_updated"], summary["episodes"]) == (2, 2, 16)
    assert run.config().train.parallel.tensor == 2
    checkpoint = newest(run.checkpoints)
    assert checkpoint is not None and len(list((checkpoint / "optimizer").iterdir())) == 2  # of each rank
    assert_lawful(run, steps=2)
    assert_nothing_remains(run)


@pytest.mark.slow
def test_a_run_mends_itself_when_engine_worker_and_learner_die(tmp_path: Path) -> None:
    file = run_file(tmp_path, f"{ENVS}:Vowels", train={"steps": 8, "checkpoint_every": 2})
    run, gate = RunDir(tmp_path / "run"), Gate(tmp_path, at=14)
    with started("train", file, "--out", run.path, *gate.arguments) as process:
        for step, role in ((1, "engine.embedded"), (3, "worker"), (5, "learner")):
            wait_for_step(run.path, step, process)
            os.kill(child(run, role, process), signal.SIGKILL)
        with RunStore.open(run.store_path) as store:
            LEARNER_WAITS.set(store, "step 1 waits for groups")  # as if it had died while it did
        gate.open()
        _, err = process.communicate(timeout=DEADLINE_S)
        with RunStore.read(run.store_path) as store:
            assert not LEARNER_WAITS.of(store.meta), "the next learner waits no more"
    assert process.returncode == 0, err
    summary = json.loads(run.summary.read_text())
    assert set(summary["restarts"]) == {"engine-0", "worker-0", "learner"}
    assert_lawful(run, steps=8)
    assert_nothing_remains(run)


@pytest.mark.long
def test_law_2_a_run_with_a_critic_and_groups_of_one_mends_itself_when_its_learner_dies(tmp_path: Path) -> None:
    file = run_file(tmp_path, f"{ENVS}:Vowels", train={"steps": 8, "checkpoint_every": 2}, eval={"sets": []})
    run, gate = RunDir(tmp_path / "run"), Gate(tmp_path, at=10)
    chosen = ("--set", "algo.kind=ppo", "--set", "rollout.group_size=1", "--set", "algo.critic_warmup_steps=2")
    with started("train", file, "--out", run.path, *chosen, *gate.arguments) as process:
        wait_for_step(run.path, 3, process)
        os.kill(child(run, "learner", process), signal.SIGKILL)
        gate.open()
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert set(json.loads(run.summary.read_text())["restarts"]) == {"learner"}
    assert_lawful(run, steps=8)
    assert_nothing_remains(run)
    with RunStore.open(run.store_path) as store:
        steps = [row.values for row in store.metrics.values("step")]
    assert all(row["episodes"] == 2 and row["updated"] for row in steps)
    assert steps[0]["algorithm"]["value_mean"] == 0, "a new critic says 0"
    assert all(row["algorithm"]["value_mean"] != 0 for row in steps[1:]), "one from a checkpoint does not"
    assert (run.checkpoints / "step-00000008" / "critic" / "critic.safetensors").is_file()


@pytest.mark.long
def test_the_learner_uses_what_a_reward_source_says_also_after_the_worker_that_asks_it_has_died(tmp_path: Path) -> None:
    file = run_file(tmp_path, f"{ENVS}:Vowels", train={"steps": 8, "checkpoint_every": 4}, eval={"sets": []})
    source = {"source": "place", "kind": "callable", "call": f"{ENVS}:place", "weight": 0.5}
    with file.open("a") as lines:
        lines.write("[[rewards]]\n" + "".join(f"{key} = {_toml(value)}\n" for key, value in source.items()))
    run, gate = RunDir(tmp_path / "run"), Gate(tmp_path, at=8)
    with started("train", file, "--out", run.path, *gate.arguments) as process:
        wait_for_step(run.path, 1, process)
        os.kill(child(run, "worker", process), signal.SIGKILL)
        gate.open()
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert set(json.loads(run.summary.read_text())["restarts"]) == {"worker-0"}
    assert_lawful(run, steps=8)
    with RunStore.open(run.store_path) as store:
        said = {one.turn_id: one.value for one in store.scores.recorded("place") if one.counts}
        for step in store.metrics.values("step"):
            trained = [store.reads.trajectory(episode) for episode in store.lineage.episodes_of(step.step)]
            assert all(said[turn.id] == turn.index + 1 for one in trained for turn in one.turns)
            process_sums = [0.5 * sum(said[turn.id] for turn in one.turns) for one in trained]
            assert step.values["process_mean"] == pytest.approx(fmean(process_sums)) and min(process_sums) > 0
    shown = subprocess.run(command("rewards", run.path), capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert "place" in shown.stdout and "1.000" in shown.stdout and str(len(said)) in shown.stdout


@pytest.mark.long
def test_a_task_that_kills_its_worker_ends_no_run_and_is_named(tmp_path: Path) -> None:
    """Every member of its group does; a death at the same place spends nothing of the worker's budget of five."""
    file = run_file(tmp_path, f"{ENVS}:Poison", train={"steps": 4}, eval={"sets": []})
    run = RunDir(tmp_path / "run")
    with started("train", file, "--out", run.path) as process:
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    summary = json.loads(run.summary.read_text())
    (named,) = summary["quarantined"]
    assert (named["seed"], summary["drops"]) == (3, {"env_failed": 1})
    assert summary["restarts"]["worker-0"] >= 5
    assert f"not played again: {named['reason']}" in " ".join(out.split())
    assert_lawful(run, steps=4)
    assert_nothing_remains(run)


@pytest.mark.slow
@pytest.mark.long
def test_a_task_that_blocks_its_workers_loop_does_not_take_every_worker_and_is_named(tmp_path: Path) -> None:
    rollout = {"workers": 2, "lease_s": 16.0, "group_size": 2}
    file = run_file(tmp_path, f"{ENVS}:Blocking", rollout=rollout, train={"steps": 4}, eval={"sets": []})
    run = RunDir(tmp_path / "run")
    with started("train", file, "--out", run.path) as process:
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    summary = json.loads(run.summary.read_text())
    (named,) = summary["quarantined"]
    assert (named["seed"], summary["drops"]) == (3, {"env_failed": 1})
    logs = [(run.logs / f"worker-{index}.log").read_text() for index in range(2)]
    assert any("envs.py" in log and "in step" in log for log in logs), "the log says where it stood"
    assert_lawful(run, steps=4)
    assert_nothing_remains(run)


@pytest.mark.long
def test_a_supervisor_that_is_killed_and_one_that_is_stopped_are_started_again(tmp_path: Path) -> None:
    train = {"steps": 8, "checkpoint_every": 2, "liveness_deadline_s": 8.0}
    file = run_file(tmp_path, f"{ENVS}:Vowels", train=train)
    run, gate = RunDir(tmp_path / "run"), Gate(tmp_path, at=14)
    with started("train", file, "--out", run.path, "--keep-alive", *gate.arguments) as process:
        hurt = 0
        for step, number in ((2, signal.SIGKILL), (5, signal.SIGSTOP)):
            wait_for_step(run.path, step, process)
            wait_until(lambda: supervisor_of(run) not in (hurt, 0), process)
            os.kill(hurt := supervisor_of(run), number)
        wait_until(lambda: supervisor_of(run) not in (hurt, 0), process)
        gate.open()
        out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert "ended with signal SIGKILL; it is started again" in err
    assert "for 8 s (train.liveness_deadline_s); it is started again" in err
    assert "8 steps" in out
    assert_lawful(run, steps=8)
    assert_nothing_remains(run)


def supervisor_of(run: RunDir) -> int:
    """Its process id; 0 while nobody holds the run."""
    return int((run.path / "run.lock").read_text().split(".")[0] or 0)


def engines_of(run: RunDir) -> dict[str, int]:
    """Process ids of the embedded engines by the name of their child."""
    found = {pid: command_line(pid) for pid in children(run)}
    names = {pid: re.search(r"(engine-\d+)\.ready", words) for pid, words in found.items()}
    return {name[1]: pid for pid, name in names.items() if name is not None}


@pytest.mark.slow
@pytest.mark.long
def test_one_of_two_engines_hangs_and_is_killed_again_while_it_starts_and_the_run_goes_on(tmp_path: Path) -> None:
    engine = {"replicas": 2, "liveness_deadline_s": 30.0}  # one that is only slow is well
    file = run_file(tmp_path, f"{ENVS}:Vowels", train={"steps": 16, "checkpoint_every": 50}, engine=engine)
    run, gate = RunDir(tmp_path / "run"), Gate(tmp_path, at=20)
    with started("train", file, "--out", run.path, *gate.arguments) as process:
        wait_for_step(run.path, 2, process)
        hung = engines_of(run)["engine-0"]
        os.kill(hung, signal.SIGSTOP)
        wait_until(lambda: engines_of(run).get("engine-0", hung) != hung, process)
        os.kill(killed := engines_of(run)["engine-0"], signal.SIGKILL)
        wait_until(lambda: engines_of(run).get("engine-0", killed) != killed, process)
        wait_until((run.scratch / "engine-0.ready").exists, process)
        gate.open()
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert json.loads(run.summary.read_text())["restarts"] == {"engine-0": 2}
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    behind = [row["engines_behind"] for row in rows if "engines_behind" in row]
    assert len(behind) == 16 and max(behind) == 1 and behind[-1] == 0
    assert_lawful(run, steps=16)
    assert_nothing_remains(run)


@pytest.mark.slow
def test_law_4_ctrl_c_ends_everything_in_order(tmp_path: Path) -> None:
    file = run_file(tmp_path, f"{ENVS}:Vowels", train={"steps": 500})
    run = RunDir(tmp_path / "run")
    with started("train", file, "--out", run.path) as process:
        wait_for_step(run.path, 1, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert err.strip().splitlines()[-1] == f"agentrl: stopped by SIGINT; go on with agentrl train --resume {run.path}"
    assert_nothing_remains(run)


@pytest.mark.slow
def test_an_environment_that_raises_fails_the_run_in_one_line_and_keeps_the_journal(tmp_path: Path) -> None:
    file = run_file(tmp_path, f"{ENVS}:Raising", eval={"sets": []})
    run = RunDir(tmp_path / "run")
    with started("train", file, "--out", run.path) as process:
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert "step raised KeyError: 'no such tool'" in err.strip().splitlines()[-1]
    with RunStore.open(run.store_path) as store:
        assert store.metrics.failures().failed > 8
        assert any(trajectory.turns for trajectory in store.reads.trajectories("train"))
    assert_nothing_remains(run)


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    import socket

    from agentrl.models.resolve import model_dir

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = [
            sys.executable,
            "-m",
            "agentrl.engine.embedded",
            "--no-key",
            "--model",
            model_dir(SMALL["model"]),
            "--port",
            port,
        ]
        done = subprocess.run(
            list(map(str, argv)), capture_output=True, text=True, timeout=DEADLINE_S, stdin=subprocess.DEVNULL
        )
    assert done.returncode == 2
    assert str(port) in done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_run_that_stands_still_fails_by_its_deadline(tmp_path: Path) -> None:
    stuck = {**SMALL, "rollout": {**SMALL["rollout"], "workers": 1}, "train": {"steps": 1, "stall_deadline_s": 1.0}}
    stuck["rollout"]["step_deadline_s"] = 10.0
    with pytest.raises(RunFailed, match=r"no turn, score or step for 1 s"):
        Trainer(env=f"{ENVS}:Hanging", config=stuck, out=tmp_path / "run").train()
