"""A run's directory, its lock, its scratch space, and where a run goes on after a kill."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from agentrl.config import RunConfig, parse
from agentrl.errors import ConfigError, StoreError, UsageError
from agentrl.host.janitor import label
from agentrl.records import GroupState, StopReason, Task
from agentrl.run.run_folder import RunDir
from agentrl.run.scratch_space import ScratchSpace
from agentrl.run.start_point import start_point
from agentrl.run.supervisor import _say_what_it_cost  # pyright: ignore[reportPrivateUsage]
from agentrl.store import Ending, RunStore
from agentrl.store.async_calls import Looks
from agentrl.store.run_values import WENT_BACK
from agentrl.testing.sandbox.case import host_processes
from tests.parts.kill_sweep import REPOSITORY

CONFIG: RunConfig = parse({"model": "m", "env": {"id": "e"}})


def test_a_run_is_not_overwritten_unasked(tmp_path: Path) -> None:
    RunDir.create(tmp_path / "run", CONFIG)
    with pytest.raises(UsageError, match="holds a run"):
        RunDir.create(tmp_path / "run", CONFIG)
    assert RunDir.create(tmp_path / "run", CONFIG, overwrite=True).config() == CONFIG


def test_a_run_that_may_not_be_written_says_so(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.lock_path.mkdir()  # refused to anybody, the superuser too
    with pytest.raises(UsageError, match=r"run\.lock cannot be written \(Is a directory\): make it yours"), run.lock():
        pytest.fail("it has the lock")


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not empty"):
        RunDir.create(tmp_path, CONFIG, overwrite=True)
    assert (tmp_path / "thesis.tex").exists()


def test_what_is_no_run_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no run"):
        RunDir.open(tmp_path)


def test_one_supervisor_at_a_time(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    with run.lock(), pytest.raises(UsageError, match="another process is running"):
        run.lock().__enter__()
    with run.lock():
        pass


def test_scratch_lies_where_the_run_file_says_and_goes_with_the_run(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    run = RunDir.create(tmp_path / "run", CONFIG.model_copy(update={"scratch_dir": str(disk)}))
    with run.lock() as lock, pytest.raises(ConfigError, match=r"scratch_dir = .*disk'.*name one that is there"):
        ScratchSpace(run).owned(lock).__enter__()
    disk.mkdir()
    with run.lock() as lock, ScratchSpace(run).owned(lock):
        assert run.scratch.parent == disk
        assert sorted(path.name for path in run.scratch.iterdir()) == ["locks", "owner", "tmp", "weights"]
    assert not list(disk.iterdir())
    with pytest.raises(ConfigError, match="scratch_dir"):
        parse({"model": "m", "env": {"id": "e"}, "scratch_dir": "beside/it"})


def test_scratch_is_emptied_of_what_a_killed_start_left(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    try:
        ScratchSpace(run).make()
        (run.scratch / "weights" / "old.safetensors").write_bytes(b"x")
        ScratchSpace(run).make()
        assert not list((run.scratch / "weights").iterdir())
        assert run.scratch.stat().st_mode & 0o077 == 0, "other users must not read or plant weights"
    finally:
        ScratchSpace(run).clear()
    assert not run.scratch.exists()


EACH_CALL = """
import os, subprocess, sys
from pathlib import Path
from agentrl.run import scratch_space
from agentrl.run.run_folder import RunDir
from tests.parts.kill_sweep import killed_after_each_call
from agentrl.testing.sandbox.case import host_processes

scratch_space._PATIENCE_S = 0.2
run, marker = RunDir(Path(sys.argv[1])), os.environ["MARKER"]

def supervise():
    with run.lock() as lock:
        left = [*host_processes(marker), *run.scratch.parent.glob(run.scratch.name)]
        assert not left, left  # of the one before, which was killed
        with scratch_space.ScratchSpace(run).owned(lock) as mark:
            (run.scratch / "weights" / "1").mkdir()
            subprocess.Popen(["sleep", marker], env={**os.environ, **mark})
            subprocess.Popen(["sleep", marker], env={**os.environ, **mark}, start_new_session=True)

print(len(list(killed_after_each_call(supervise))))
"""


@pytest.mark.medium
def test_law_4_scratch_and_processes_go_with_a_killed_supervisor_and_the_next_one_waits_for_that(
    tmp_path: Path,
) -> None:
    """Killed after each folder and process that it made; those that see no end of their lifeline are killed too."""
    run = RunDir.create(tmp_path / "run", CONFIG)
    env = {**os.environ, "MARKER": f"4327.{os.getpid()}", "PYTHONPATH": str(REPOSITORY)}
    script = [sys.executable, "-c", EACH_CALL, str(run.path)]
    done = subprocess.run(script, env=env, stdout=subprocess.PIPE, timeout=500, check=True)
    assert int(done.stdout) >= 7
    with run.lock():
        assert not run.scratch.exists() and not host_processes(env["MARKER"])


KILLED_WITH_ITS_JANITOR = """
import os, signal, subprocess, sys
from pathlib import Path
from agentrl.run.run_folder import RunDir
from agentrl.run.scratch_space import ScratchSpace

run = RunDir(Path(sys.argv[1]))
with run.lock() as lock, ScratchSpace(run).owned(lock):
    (run.scratch / "weights" / "7.safetensors").write_bytes(b"of a model as large as memory")
    (janitor,) = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    os.kill(int(janitor), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def dead(tmp_path: Path) -> Iterator[RunDir]:
    """A run whose supervisor was killed together with its janitor: its scratch is still there."""
    run = RunDir.create(tmp_path / "dead", CONFIG)
    subprocess.run([sys.executable, "-c", KILLED_WITH_ITS_JANITOR, str(run.path)], timeout=500)
    assert (run.scratch / "weights" / "7.safetensors").exists()
    yield run
    ScratchSpace(run).clear()


def another_run_starts(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "another", CONFIG)
    with run.lock() as lock, ScratchSpace(run).owned(lock):
        assert run.scratch.exists()


def test_law_4_the_next_run_on_the_machine_removes_scratch_whose_supervisor_and_janitor_were_killed(
    tmp_path: Path, dead: RunDir
) -> None:
    another_run_starts(tmp_path)
    assert not dead.scratch.exists()


def test_the_scratch_of_a_run_whose_folder_is_gone_is_removed_too(tmp_path: Path, dead: RunDir) -> None:
    shutil.rmtree(dead.path)
    another_run_starts(tmp_path)
    assert not dead.scratch.exists()


def relabel(run: RunDir, *, pid: int, started: str) -> None:
    """Have the scratch's owner be another process."""
    owner = run.scratch / "owner"
    label, *rest = owner.read_text().split("\n")
    owner.write_text("\n".join([".".join([str(pid), started, *label.split(".")[2:]]), *rest]))


def test_a_process_that_has_the_number_of_a_dead_owner_is_not_taken_for_it(tmp_path: Path, dead: RunDir) -> None:
    relabel(dead, pid=os.getpid(), started="12")  # ours, but we started at another time
    another_run_starts(tmp_path)
    assert not dead.scratch.exists()


def test_the_scratch_of_a_live_owner_is_left_alone(tmp_path: Path, dead: RunDir) -> None:
    relabel(dead, pid=os.getpid(), started=label().split(".")[1])
    another_run_starts(tmp_path)
    assert (dead.scratch / "weights" / "7.safetensors").exists()


def test_scratch_is_left_to_whoever_holds_its_run(tmp_path: Path, dead: RunDir) -> None:
    """Such as the dead one's janitor, which is not done yet, or the next supervisor, which is about to take it over."""
    with dead.lock():
        another_run_starts(tmp_path)
    assert (dead.scratch / "weights" / "7.safetensors").exists()


def test_a_folder_that_only_looks_like_scratch_is_left_alone(tmp_path: Path, dead: RunDir) -> None:
    for take_away in (lambda: (dead.scratch / "owner").unlink(), lambda: dead.scratch.chmod(0o777)):
        take_away()
        another_run_starts(tmp_path)
        shutil.rmtree(tmp_path / "another")
        assert (dead.scratch / "weights" / "7.safetensors").exists()
        (dead.scratch / "owner").write_text("1.1.1.1\n")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def trained_group(store: RunStore, step: int) -> int:
    (group,) = store.groups.add_groups([Task(index=0, env="e", seed=0)], size=1, purpose="train")
    (claim,) = store.leases.claim("w", 1, lease_s=10, now=0)
    store.journal.begin(claim.episode_id, claim.fence, ())
    store.journal.finish(claim.episode_id, claim.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True))
    assert store.buffer.take(step, 1, max_lag=10) is not None
    return group


def checkpoint(run: RunDir, step: int) -> Path:
    folder = run.checkpoints / f"step-{step:08d}"
    folder.mkdir()
    (folder / "state.json").write_text(json.dumps({"format": 1, "step": step}))
    return folder


def test_law_2_a_kill_between_a_checkpoints_rename_and_its_record_trains_nothing_twice(
    tmp_path: Path, model: Path
) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG.model_copy(update={"model": str(model)}))
    with RunStore.open(run.store_path) as store:
        assert start_point(run, store).checkpoint is None
        before, after = trained_group(store, 1), trained_group(store, 2)
        for step in (1, 2):
            store.versions.confirm_version(store.versions.mint_version(step))
        folder = checkpoint(run, 1)
        (run.checkpoints / ".draft-00000002").mkdir()
        start = start_point(run, store)
        assert (start.checkpoint, start.model, start.version.step) == (folder, folder, 1)
        assert store.reads.group(before).state is GroupState.TRAINED
        assert store.reads.group(after).state is GroupState.SCORED, (
            "its step is not in the checkpoint: it is trained again"
        )
        assert store.versions.current_version() == start.version


async def test_a_return_to_a_checkpoint_says_what_it_costs(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG.model_copy(update={"model": str(model)}))
    with RunStore.open(run.store_path) as store:
        start_point(run, store)
        for step in (1, 2, 3):
            trained_group(store, step)
            store.versions.confirm_version(store.versions.mint_version(step))
            store.metrics.record("step", step, {"busy_s": 10.0 * step, "idle_s": 0.5, "tokens_scored": 100 * step})
        checkpoint(run, 1)
        start_point(run, store)
        told = store.meta(WENT_BACK.key)
        assert told == "went back to step 1: 2 steps (51 s, 500 tokens) are trained again (attempt 2)"
        start_point(run, store)
        assert store.meta(WENT_BACK.key) == told, "nothing was lost this time"
    with RunStore.read(run.store_path, away_s=0) as reader:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_say_what_it_cost, Looks[RunStore](reader), None)
            said = ""
            with trio.fail_after(60):
                while not said:
                    await trio.sleep(0.01)
                    said = capsys.readouterr().err
            nursery.cancel_scope.cancel()
    assert said == f"agentrl: {told}\n"


def test_a_start_that_undoes_nothing_leaves_the_lineage_alone(tmp_path: Path, model: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG.model_copy(update={"model": str(model)}))
    with RunStore.open(run.store_path) as store:
        first = start_point(run, store)
        assert start_point(run, store) == first
        assert store.lineage.attempt == 1


def test_a_model_that_is_nowhere_is_named(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    with RunStore.open(run.store_path) as store, pytest.raises(UsageError, match="model 'm'"):
        start_point(run, store)


def test_configuration_survives_the_round_trip(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        parse({"model": "m"})
    run = RunDir.create(tmp_path / "run", CONFIG)
    assert RunDir.open(run.path).config() == CONFIG


def test_a_lost_configuration_is_read_from_the_store_and_a_broken_one_is_named(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    (run.path / "config.json").unlink()
    assert run.config() == CONFIG
    for text in (b"{bad", b"\xff\xfe\x00"):
        (run.path / "config.json").write_bytes(text)
        with pytest.raises(UsageError, match=r"config\.json is no configuration .*: fix it, or remove it"):
            run.config()


def test_what_is_no_folder_cannot_be_a_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/dev/null")):
        with pytest.raises(UsageError, match="give another --out"):
            RunDir.create(path, CONFIG)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_run_that_never_began_leaves_logs_or_nothing_and_is_no_obstacle(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    (run.logs / "engine-0.log").write_text("")
    run.discard()
    assert not run.path.exists()
    run = RunDir.create(tmp_path / "run", CONFIG)
    (run.logs / "engine-0.log").write_text("why it failed")
    run.discard()
    assert list(run.path.rglob("*")) == [run.logs, run.logs / "engine-0.log"]
    RunDir.create(tmp_path / "run", CONFIG)


@pytest.mark.parametrize("store", ["postgresql://u:secret@h/a", "postgresql:///a?host=/nowhere"])
def test_a_store_that_cannot_be_made_leaves_no_folder_in_the_way_of_the_mended_command(
    tmp_path: Path, store: str
) -> None:
    wrong = parse({"model": "m", "env": {"id": "e"}, "cluster": {"store": store}})
    with pytest.raises((UsageError, StoreError)):
        RunDir.create(tmp_path / "run", wrong)
    assert not (tmp_path / "run").exists()
    RunDir.create(tmp_path / "run", CONFIG)
