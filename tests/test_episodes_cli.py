"""The commands on single episodes: what they print can be typed, and typing it works."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.errors import StoreError, UsageError
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from tests.store.play import play, serve, task

CONFIG = {"format": 1, "model": "agentrl/tiny-coder", "env": {"id": "test/Env-v0"}}


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
        store.groups.add_groups([task(0)], size=2, purpose="train")
        for claim in store.leases.claim("w", 2, lease_s=10):
            play(store, claim, turns=3)
        said = typed("fork", path, claim.episode_id, "--turn", 2, "--k", 3)
        assert said.splitlines() == [
            f"group 2: 3 continuations of episode {claim.episode_id} from turn 2 on, played as soon as the run goes on",
            f"if it does not run now: agentrl train --resume {path}",
        ]
        assert [len(one.turns) for one in store.leases.claim("v", 9, lease_s=10)] == [2, 2, 2]
    with pytest.raises(UsageError, match="a fork starts at turn 1 to 2"):
        typed("fork", path, claim.episode_id, "--turn", 3)
    with pytest.raises(StoreError, match="no episode 77"):
        typed("fork", path, 77, "--turn", 1)


def test_forking_in_a_run_that_is_over_asks_for_another_step(run: Callable[[str], Path]) -> None:
    path = run("a")
    with RunStore.open(RunDir.open(path).store_path) as store:
        store.groups.add_groups([task(0)], size=1, purpose="train")
        play(store, store.leases.claim("w", 1, lease_s=10)[0], turns=2)
        serve(store, RunDir.open(path).config().train.steps)
    steps = RunDir.open(path).config().train.steps
    said = typed("fork", path, 1, "--turn", 1).splitlines()
    assert said[1] == f"if it does not run now: agentrl train --resume {path} --set train.steps={steps + 1}"


def test_an_export_that_cannot_be_written_is_one_line(run: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        typed("export-episodes", run("a"), "--out", tmp_path / "no" / "folder" / "x.jsonl")
