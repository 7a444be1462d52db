"""`agentrl.load_run`: tables of a run, from a store that goes on meanwhile."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store.play import admit, play, serve
from store.server import running

import agentrl
from agentrl.config import parse
from agentrl.errors import UsageError
from agentrl.records import Task
from agentrl.run.reporting.load_run import Table
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore

MADE = {"model": "m", "env": {"id": "e"}}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", parse(MADE))


@pytest.fixture
def store(run: RunDir) -> Iterator[RunStore]:
    with RunStore.open(run.store_path) as found:
        yield found


def fill(store: RunStore) -> int:
    """Two training episodes, of which one has ended, one of an evaluation, and two steps; the ended one's number."""
    serve(store, 0)
    admit(store, limit=1)
    done, _ = store.leases.claim("worker", 2, lease_s=30.0)
    play(store, done, turns=2, outcome=1.0)
    store.groups.add_groups([Task(index=0, env="e", seed=5)], size=1, purpose="eval:tasks:before")
    (held_out,) = store.leases.claim("worker", 1, lease_s=30.0)
    play(store, held_out, turns=1, outcome=0.0)
    for step in (1, 2):
        store.metrics.record("step", step, {"loss": 1.0 / step, "alarms": []})
    return done.episode_id


def test_the_tables_of_a_run_that_goes_on(run: RunDir, store: RunStore) -> None:
    episode = fill(store)
    found = agentrl.load_run(run.path)
    assert found.steps().columns()["loss"] == [1.0, 0.5]
    ended, open_ = found.episodes()
    assert (ended["episode"], ended["outcome"], ended["stop_reason"], ended["seed"]) == (episode, 1.0, "done", 100)
    assert (open_["state"], open_["stop_reason"]) == ("running", None)
    assert [row["purpose"] for row in found.episodes(None)] == ["train", "train", "eval:tasks:before"]
    turns = found.turns(episode=episode)
    assert [(row["turn"], row["reward"], row["tokens"]) for row in turns] == [(0, 0.0, 3), (1, 0.25, 3)]
    assert turns[1]["observation"] == [{"role": "tool", "content": "seen 1"}]
    assert [(row["source"], row["value"]) for row in found.rewards()] == [("env", 0.0), ("env", 0.25)]
    assert found.summary() is None and found.config().model == "m"
    assert found.status()["step"] == 2
    store.metrics.record("step", 3, {"loss": 0.1})
    assert len(found.steps()) == 3, "each call looks anew"


def test_nothing_is_written_and_no_writer_waits(run: RunDir, store: RunStore) -> None:
    fill(store)
    before = run.store_path.stat().st_mtime_ns
    found = agentrl.load_run(run.path)
    tables = [found.steps(), found.episodes(None), found.turns(None), found.rewards(None)]
    assert all(tables) and run.store_path.stat().st_mtime_ns == before


def test_there_has_to_be_a_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing"):
        agentrl.load_run(tmp_path / "nothing")


def test_a_table_is_a_list_of_rows() -> None:
    table = Table([{"a": 1}, {"a": 2, "b": [1]}])
    assert (table[0], len(table), table[1:][0], list(table)[1]) == ({"a": 1}, 2, {"a": 2, "b": [1]}, {"a": 2, "b": [1]})
    assert repr(table) == "Table of 2 rows: a, b"


@pytest.mark.parametrize("name", ["pandas", "polars"])
def test_without_the_package_one_line_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match=rf"pip install '.*\[{name}\]'; or use columns\(\)"):
        getattr(Table([]), f"to_{name}")()


@pytest.mark.adapters
def test_as_data_frames(run: RunDir, store: RunStore) -> None:
    fill(store)
    found = agentrl.load_run(run.path)
    frame: Any = found.steps().to_pandas()
    assert list(frame["loss"]) == [1.0, 0.5] and list(frame["step"]) == [1, 2]
    other: Any = found.turns().to_polars()
    assert other["reward"].to_list() == [0.0, 0.25]
    assert json.loads(other["observation"][1]) == [{"role": "tool", "content": "seen 1"}]
    mixed: Any = Table([{"x": {"a": 1}}, {"x": None}, {"x": {"b": 2.5}}]).to_polars()
    assert mixed["x"].to_list() == ['{"a": 1}', None, '{"b": 2.5}']


@pytest.mark.postgres
def test_the_tables_of_a_store_on_a_server(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="agentrl-pg-") as folder, running(Path(folder)) as server:
        run = RunDir.create(tmp_path / "run", parse({**MADE, "cluster": {"store": server.url}}))
        check_tables(run)


def check_tables(run: RunDir) -> None:
    with RunStore.open(run.store_path) as store:
        episode = fill(store)
        found = agentrl.load_run(run.path)
        assert [row["step"] for row in found.steps()] == [1, 2]
        assert found.episodes()[0]["episode"] == episode
        assert [row["value"] for row in found.rewards()] == [0.0, 0.25]
