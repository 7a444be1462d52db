"""What people ask of a run under way, and what they are told. No process but this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.config import parse
from agentrl.errors import UsageError
from agentrl.run.reporting import status
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.run_values import PAUSED


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", parse({"model": "m", "env": {"id": "e"}, "train": {"steps": 80}}))


def typed(*words: object) -> str:
    """What a command says. Raises as it does."""
    done = CliRunner().invoke(app, [*map(str, words)], catch_exceptions=True)
    if done.exception is not None:
        raise done.exception
    return done.output.strip()


def paused(run: RunDir) -> dict[str, Any]:
    with RunStore.read(run.store_path) as store:
        return PAUSED.of(store.meta)


def test_a_run_under_way_is_paused_and_goes_on(run: RunDir) -> None:
    with run.lock():
        first = f"{run.path} is paused: turns and a step under way end first; agentrl resume {run.path} lets it go on"
        assert typed("pause", run.path) == first
        since_s = paused(run)["since_s"]
        assert typed("pause", run.path, "--now").startswith(f"{run.path} is paused: turns under way stop, and keep")
        assert typed("pause", run.path).startswith(f"{run.path} is paused: turns under way stop"), "who asked for more"
        assert paused(run) == {"since_s": since_s, "now": True}
        told = list(status.lines(status.status(run, lambda: since_s + 61)))
        assert f"paused    for 61 s: agentrl resume {run.path} lets it go on" in told
        assert told[-1] == f"next      agentrl resume {run.path}; agentrl stop {run.path}"
        assert typed("resume", run.path).startswith(f"{run.path} goes on; it was paused for ")
        assert paused(run) == {}
        assert typed("resume", run.path) == f"{run.path} is under way, and was not paused"


def test_a_run_that_is_not_under_way_says_what_to_type(run: RunDir) -> None:
    with pytest.raises(UsageError, match="is not under way: there is nothing to pause"):
        typed("pause", run.path)
    with pytest.raises(UsageError, match=f"is not under way: agentrl train --resume {run.path}$"):
        typed("resume", run.path)
    with RunStore.open(run.store_path) as store:
        PAUSED.set(store, {"since_s": 0.0, "now": True})
    with pytest.raises(UsageError, match=f"under way; its pause is over: agentrl train --resume {run.path}$"):
        typed("resume", run.path)
    assert paused(run) == {}
