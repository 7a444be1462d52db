"""Each kind of corruption, cut into a copy of a whole store, is named by the auditor that shares no code with it."""

from __future__ import annotations

import json
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.records import StopReason, turn_id
from agentrl.store import Claim, Ending, Quorum, RunStore, Source
from tests.parts.outside_audit import OutsideAuditor

from .play import START, Clock, admit, answer, part, play, serve, turn


def played(store: RunStore, claim: Claim, versions: tuple[int, int], *, masked: bool = False) -> None:
    """Two turns of three tokens each, the first of them perhaps masked, scored by both sources, and ended."""
    store.journal.begin(claim.episode_id, claim.fence, START)
    for index, version in enumerate(versions):
        step = replace(answer(index), masked=masked and index == 0)
        store.journal.journal_turn(claim.episode_id, claim.fence, turn(index, version, step=step))
        for source in ("prm", "judge"):
            assert store.scores.score(turn_id(claim.episode_id, 0, index), source, 0.5 + index + claim.member)
    outcome = float(claim.member)
    store.journal.finish(
        claim.episode_id, claim.fence, Ending(stop_reason=StopReason.DONE, outcome=outcome, success=True)
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a store after step 3, whose bound of lag is 1. In group 1 episode 1 has a turn that is too old, all
    of episode 2 is, and the first turn of 3 is masked; in group 2 episode 6 is late; group 3 was lost, and is played
    again as group 4, in which 10 waits for a source and 11 is in the middle of its second turn."""
    folder = tmp_path_factory.mktemp("whole")
    clock = Clock()
    with RunStore.create(folder / "store.sqlite", "{}", clock=clock) as store:
        serve(store, 0)
        store.scores.declare_sources([Source(name="prm", weight=0.5), Source(name="judge")])
        admit(store, limit=3, max_lag=9, group_size=3)
        claims = store.leases.claim("a", 9, lease_s=1e6)
        old, middle, new = 1, serve(store, 1), serve(store, 2)
        played(store, claims[0], (old, new))
        played(store, claims[1], (old, old))
        played(store, claims[2], (new, new), masked=True)
        played(store, claims[3], (middle, new))
        played(store, claims[4], (new, new))
        store.journal.begin(6, 1, START)
        for claim in claims[6:]:
            play(store, claim, stop=StopReason.ENGINE_FAILED, outcome=None)
        store.buffer.expire(clock(), 600.0, close_policy=Quorum(2, 0.0))
        assert [len(group.trajectories) for group in store.buffer.take(3, 2, max_lag=1) or []] == [2, 2]
        store.metrics.record("step", 3, {"tokens_scored": 3 + 3 + 6 + 6, "tokens_stale": 3 + 6, "lag_max": 1})
        trained = {"step": 3, "previous_step": 0, "episodes": [[], [], [1, 3, 4, 5]]}
        (folder / "state.json").write_text(json.dumps(trained))
        store.lineage.checkpoint(3, serve(store, 3), folder)
        admit(store, limit=1, max_lag=9, group_size=3, max_replays=1)
        waits, runs, _ = store.leases.claim("a", 3, lease_s=1e6)
        play(store, waits, version=new)
        store.journal.begin(runs.episode_id, runs.fence, START)
        store.journal.journal_turn(runs.episode_id, runs.fence, turn(0, new, step=answer(0)))
        store.journal.journal_partial(runs.episode_id, runs.fence, part(turn(1, new, 5), 0, 2))
        store.journal.journal_partial(runs.episode_id, runs.fence, part(turn(1, new, 5), 2))
    return folder


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(whole / "store.sqlite", tmp_path / "store.sqlite"))


def cut(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        for statement in statements:
            assert db.execute(statement).rowcount, f"changes nothing: {statement}"


def test_the_whole_store_is_clean(path: Path) -> None:
    auditor = OutsideAuditor(path)
    assert auditor.look(ended=True) == []
    assert auditor.look(ended=True) == []


BREACHES = {
    # law 1
    "under way: gap at token 0": "DELETE FROM partials WHERE at = 0",
    "under way: gap at token 2": "UPDATE partials SET at = 3 WHERE at = 2",
    "under way: gap at token": "UPDATE partials SET turn = 4",
    "under way: a blob of another length": "UPDATE partials SET data = substr(data, 1, 20) WHERE at = 0",
    "a turn under way of an ended episode": "UPDATE partials SET episode_id = 1",
    # law 2
    "checkpoint 3 and the lineage differ by episodes {4}": "DELETE FROM lineage WHERE episode_id = 4",
    "tokens dropped, and yet to be trained: group: 4": "UPDATE groups SET tokens_dropped = 1 WHERE id = 4",
    "played again that was not lost": "UPDATE groups SET reason = NULL, state = 'scored' WHERE id = 3",
    "or twice for one loss": "UPDATE groups SET replays = 2 WHERE id = 4",
    # law 3
    "group 1 recorded": "UPDATE episodes SET outcome = 7.0 WHERE id = 1",
    "group 2 recorded": "UPDATE steps SET reward = 1.0 WHERE turn_id = 7",
    "its rows say {('0'": "UPDATE rewards SET counts = 0 WHERE turn_id = 1 AND source = 'prm'",
    "group 1 recorded {('0', '', 0)": "UPDATE episodes SET late = 1 WHERE id = 3",
    "fewer than two members to compare: group: 2": "UPDATE groups SET record = json_remove(record, '$.0') WHERE id = 2",
    "a score that is not finite: turn: 1": "UPDATE rewards SET value = 9e999 WHERE turn_id = 1",
    "scored, and still waited for: turn: 1": "INSERT INTO unscored VALUES ('prm', 1, 10)",
    "a score counts that nobody could wait for": "UPDATE turns SET learns = 0 WHERE id = 1",
    # law 4
    "waits for a source although it has ended: episode: 1": "UPDATE unscored SET episode_id = 1",
    "held, and waits for no source: episode: 10": "DELETE FROM unscored WHERE episode_id = 10",
    # law 5
    "step 3 says tokens_scored = 18, its rows say 15": "UPDATE turns SET spans = '[[1,0,3]]' WHERE id = 6",
    "step 3 says tokens_stale = 9, its rows say 12": "UPDATE lineage SET max_lag = 0",
    "step 3 says tokens_stale = 9, its rows say 3": "UPDATE episodes SET taken_step = NULL WHERE id = 2",
    "step 3 trained a token of lag 2": "UPDATE metrics SET data = json_set(data, '$.lag_max', 2)",
}


def test_every_corruption_is_named(path: Path, tmp_path: Path) -> None:
    missed = dict[str, list[str]]()
    for n, (what, statement) in enumerate(BREACHES.items()):
        copy = Path(shutil.copy(path, tmp_path / f"{n}.sqlite"))
        cut(copy, statement)
        found = OutsideAuditor(copy).look(ended=True)
        if not any(what in line for line in found):
            missed[what] = found
    assert missed == {}


REMEMBERED = {
    "turn 1 of episode 11 lost tokens that it had": "DELETE FROM partials",
    "turn 1 of episode 11 lost tokens": "DELETE FROM partials WHERE at = 2",
    "law 1: turn 1 was changed": "UPDATE turns SET spans = '[[2,0,3]]' WHERE id = 1",
    "the score of turn 1 by prm 1 was changed": "UPDATE rewards SET value = 9 WHERE turn_id = 1 AND source = 'prm'",
    "the score of turn 2 by judge 1 was changed or lost": "DELETE FROM rewards WHERE turn_id = 2 AND source = 'judge'",
    "the record of group 2 was changed": "UPDATE groups SET record = NULL WHERE id = 2",
    "fence of episode 11 fell": "UPDATE episodes SET fence = 0 WHERE id = 11",
}


def test_every_change_of_what_was_there_at_the_last_look_is_named(path: Path, tmp_path: Path) -> None:
    missed = dict[str, list[str]]()
    for n, (what, statement) in enumerate(REMEMBERED.items()):
        copy = Path(shutil.copy(path, tmp_path / f"{n}.sqlite"))
        auditor = OutsideAuditor(copy)
        assert auditor.look() == []
        cut(copy, statement)
        found = auditor.look()
        if not any(what in line for line in found):
            missed[what] = found
    assert missed == {}


@pytest.mark.parametrize(("n", "first", "clean"), [(5, 1, True), (3, 1, True), (2, 1, False), (5, 9, False)])
def test_a_turn_that_was_under_way_is_journaled_with_the_tokens_that_it_had(
    path: Path, n: int, first: int, clean: bool
) -> None:
    auditor = OutsideAuditor(path)
    auditor.look()
    whole = turn(1, 3, n)
    with RunStore.open(path) as store:
        store.journal.journal_turn(11, 1, replace(whole, token_ids=tuple(range(first, first + n))))
    found = auditor.look()
    assert found == ([] if clean else ["law 1: turn 1 of episode 11 lost tokens that it had"])


def test_a_turn_under_way_may_end_with_its_episode_or_start_anew(path: Path) -> None:
    auditor = OutsideAuditor(path)
    auditor.look()
    with RunStore.open(path) as store:
        store.journal.restart_episode(11, 1, "its box is gone")
    assert auditor.look() == []
