"""The commands on single episodes: what they print can be typed, and typing it works."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.errors import AgentRLError, StoreError, UsageError
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from tests.store.play import play, serve, task

CONFIG = {"model": "agentrl/tiny-coder", "env": {"id": "test/Env-v0"}}


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], Path]:
    """A run directory with a store that serves weights of step 0."""

    def make(name: str) -> Path:
        path = tmp_path / name
        path.mkdir()
        with RunStore.create(path / "store.sqlite", json.dumps(CONFIG)) as store:
            serve(store, 0)
        return path

    return make


def typed(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_fork_starts_a_group_and_says_what_to_type_next(run: Callable[[str], Path]) -> None:
    path = run("a")
    with RunStore.open(RunDir.open(path).store_path) as store:
        store.add_groups([task(0)], size=2, purpose="train")
        for claim in store.claim("w", 2, lease_s=10):
            play(store, claim, turns=3)
        said = typed("fork", path, claim.episode_id, "--turn", 2, "--k", 3)
        assert said.splitlines() == [
            f"group 2: 3 continuations of episode {claim.episode_id} from turn 2 on, played as soon as the run goes on",
            f"if it does not run now: agentrl train --resume {path}",
        ]
        assert [len(one.turns) for one in store.claim("v", 9, lease_s=10)] == [2, 2, 2]
    with pytest.raises(UsageError, match="a fork starts at turn 1 to 2"):
        typed("fork", path, claim.episode_id, "--turn", 3)
    with pytest.raises(StoreError, match="no episode 77"):
        typed("fork", path, 77, "--turn", 1)


def test_forking_in_a_run_that_is_over_asks_for_another_step(run: Callable[[str], Path]) -> None:
    path = run("a")
    with RunStore.open(RunDir.open(path).store_path) as store:
        store.add_groups([task(0)], size=1, purpose="train")
        play(store, store.claim("w", 1, lease_s=10)[0], turns=2)
        serve(store, RunDir.open(path).config().train.steps)
    steps = RunDir.open(path).config().train.steps
    said = typed("fork", path, 1, "--turn", 1).splitlines()
    assert said[1] == f"if it does not run now: agentrl train --resume {path} --set train.steps={steps + 1}"


def test_episodes_come_into_a_run_that_has_not_begun(run: Callable[[str], Path], tmp_path: Path) -> None:
    first, second, file = run("a"), tmp_path / "b", tmp_path / "episodes.zst"
    with RunStore.open(RunDir.open(first).store_path) as store:
        store.add_groups([task(0)], size=2, purpose="train")
    typed("export-episodes", first, "--out", file)
    second.mkdir()
    RunStore.create(second / "store.sqlite", json.dumps(CONFIG)).close()
    said = typed("import-episodes", second, file)
    assert said.splitlines()[1] == f"if the run does not go on by itself now: agentrl train --resume {second}"


def test_an_empty_file_is_no_export(run: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(UsageError, match="empty: this is no file of agentrl export-episodes"):
        typed("import-episodes", run("a"), tmp_path / "empty")


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
        typed("chaos", *words, "--out", "hurt")
    assert not Path("hurt").exists()


def test_episodes_of_one_run_go_on_in_another(run: Callable[[str], Path], tmp_path: Path) -> None:
    first, second, file = run("a"), run("b"), tmp_path / "episodes.zst"
    with RunStore.open(RunDir.open(first).store_path) as store:
        store.add_groups([task(0)], size=2, purpose="train")
        play(store, store.claim("w", 1, lease_s=10)[0])
    assert typed("export-episodes", first, "--out", file).splitlines() == [
        f"1 groups with 2 episodes, 1 of them unfinished, in {file}",
        f"take them into another run: agentrl import-episodes OTHER_RUN {file}",
    ]
    assert typed("import-episodes", second, file).splitlines() == [
        "1 groups with 2 episodes came in, 1 of them unfinished",
        f"if the run does not go on by itself now: agentrl train --resume {second}",
    ]
    assert "0 groups with 0 episodes came in, 0 of them unfinished; 1 had come in before" in typed(
        "import-episodes", second, file, "--without-snapshots"
    )
    with RunStore.open(RunDir.open(second).store_path) as store:
        play(store, store.claim("v", 9, lease_s=10)[0])
        assert store.ready_count() == 1
    with pytest.raises(UsageError, match="cannot be read"):
        typed("import-episodes", second, tmp_path / "none.zst")
    with pytest.raises(UsageError, match="cannot be written"):
        typed("export-episodes", first, "--out", tmp_path / "no" / "folder" / "x.zst")
