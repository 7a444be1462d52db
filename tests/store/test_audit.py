"""The auditor finds each kind of breach, shown on a whole store into which one is cut by hand."""

from __future__ import annotations

import json
import shutil
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

import pytest
import zstandard

from agentrl.records import StopReason
from agentrl.store import RunStore
from agentrl.store.audit import KINDS, AuditReport, audit

from .play import START, admit, answer, play, play_all, serve, task, turn


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with something in every state: groups 1-2 trained, 3-4 taken, 5 scored, 6 stale, 7 failed, 8 running (one
    member restarted, one waiting), 9 an evaluation. Episodes 2g-1 and 2g belong to group g; turn 1 is episode 1's."""
    path = tmp_path_factory.mktemp("audit") / "store.sqlite"
    with RunStore.create(path, "{}") as store:
        serve(store, 0)
        admit(store, limit=4, max_lag=9)
        play_all(store)
        store.buffer.take(1, 2, max_lag=1)
        store.lineage.checkpoint(1, serve(store, 1), "/checkpoints/1")
        store.buffer.take(2, 2, max_lag=1)
        two = serve(store, 2)
        admit(store, limit=4, max_lag=9)
        claims = store.leases.claim("a", 7, lease_s=1e6)
        for claim in claims[:2]:
            play(store, claim, version=two)
        for claim in claims[2:4]:
            play(store, claim, version=1)
        for claim in claims[4:6]:
            play(store, claim, stop=StopReason.ENGINE_FAILED, outcome=None)
        store.journal.begin(claims[6].episode_id, claims[6].fence, START)
        store.journal.journal_turn(claims[6].episode_id, claims[6].fence, turn(0, two, step=answer(0)))
        store.journal.restart_episode(claims[6].episode_id, claims[6].fence, "cannot replay")
        store.journal.begin(claims[6].episode_id, claims[6].fence, START)
        store.journal.journal_turn(claims[6].episode_id, claims[6].fence, turn(0, two, step=answer(0)))
        store.journal.journal_turn(claims[6].episode_id, claims[6].fence, turn(1, two))
        assert store.buffer.take(4, 9, max_lag=1) is None  # expires group 6
        store.groups.add_groups([task(0)], size=1, purpose="eval@2")
        for claim in store.leases.claim("a", 1, lease_s=1e6):
            play(store, claim)
    return path


def test_a_store_in_which_nothing_is_wrong_is_clean(whole: Path) -> None:
    with RunStore.open(whole) as store:
        report = audit(store)
    assert report.ok
    assert report.violations == []
    assert report.groups == {
        "train": {"trained": 2, "taken": 2, "scored": 1, "expired": 1, "failed": 1, "running": 1},
        "eval@2": {"scored": 1},
    }
    assert report.episodes == {"finished": 15, "running": 1, "waiting": 1}
    assert report.turns == 15 * 2 + 3
    assert report.tokens == report.turns * 3
    assert report.turns_set_aside == 1
    assert report.tokens_trained == 4 * 2 * 2 * 3  # groups, members, turns, tokens
    assert report.max_lag_seen == 1  # groups 3 and 4: weights 0, trained in step 2 from weights 1
    assert report.drops == {"stale": 1, "engine_failed": 1}
    assert json.loads(report.to_json())["breaches"] == dict.fromkeys(KINDS, 0)


def blob(n_prompt: int, n_tokens: int, logprobs: list[float]) -> bytes:
    """A token blob as its layout is documented, made without the codec."""
    ids = [1] * (n_prompt + n_tokens)
    return zstandard.compress(struct.pack(f"<BII{len(ids)}I{len(logprobs)}d", 8, n_prompt, n_tokens, *ids, *logprobs))


BREACHES = {
    # law 1
    "token blob gone": ("tokens_incomplete", "DELETE FROM tokens WHERE turn_id = 1", ()),
    "token blob cut": ("tokens_incomplete", "UPDATE tokens SET data = substr(data, 1, 20) WHERE turn_id = 1", ()),
    "a log-prob too few": (
        "tokens_incomplete",
        "UPDATE tokens SET data = ? WHERE turn_id = 1",
        (blob(3, 3, [-1, -1]),),
    ),
    "a log-prob too many": (
        "tokens_incomplete",
        "UPDATE tokens SET data = ? WHERE turn_id = 1",
        (blob(3, 3, [-1] * 4),),
    ),
    "a log-prob not finite": (
        "tokens_incomplete",
        "UPDATE tokens SET data = ? WHERE turn_id = 1",
        (blob(3, 3, [-1, float("nan"), -1]),),
    ),
    "a token too few": ("tokens_incomplete", "UPDATE tokens SET data = ? WHERE turn_id = 1", (blob(3, 2, [-1, -1]),)),
    "a version unknown": ("tokens_incomplete", "UPDATE turns SET spans = '[[99,0,3]]' WHERE id = 1", ()),
    "a token without version": ("tokens_incomplete", "UPDATE turns SET spans = '[[1,0,2]]' WHERE id = 1", ()),
    "a token of two versions": ("tokens_incomplete", "UPDATE turns SET spans = '[[1,0,2],[2,1,3]]' WHERE id = 1", ()),
    # law 2
    "first turn gone": ("turns_lost", "DELETE FROM turns WHERE episode_id = 1 AND idx = 0", ()),
    "last turn gone": ("turns_lost", "DELETE FROM turns WHERE episode_id = 1 AND idx = 1", ()),
    "an answer gone": ("turns_lost", "DELETE FROM steps WHERE turn_id = 1", ()),
    "the last answer gone": ("turns_lost", "DELETE FROM steps WHERE turn_id = 2", ()),
    "a trial too many": ("turns_lost", "UPDATE turns SET trial = 1 WHERE episode_id = 1", ()),
    "a parent that is no earlier turn": ("turns_lost", "UPDATE turns SET parent = 1 WHERE id = 2", ()),
    "taken twice": (
        "trained_twice",
        "INSERT INTO lineage (episode_id, step, attempt, max_lag, taken_s) VALUES (1, 2, 1, 1, 0.0)",
        (),
    ),
    "trained without lineage": ("lineage_broken", "DELETE FROM lineage WHERE episode_id = 1", ()),
    "lineage of a scored group": (
        "lineage_broken",
        "INSERT INTO lineage (episode_id, step, attempt, max_lag, taken_s) VALUES (9, 2, 1, 1, 0.0)",
        (),
    ),
    "another step in the lineage": ("lineage_broken", "UPDATE lineage SET step = 2 WHERE episode_id = 1", ()),
    "trained without checkpoint": ("lineage_broken", "DELETE FROM checkpoints", ()),
    "the group taken in another step": ("lineage_broken", "UPDATE groups SET taken_step = 2 WHERE id = 1", ()),
    "in the lineage and dropped": ("lineage_broken", "UPDATE episodes SET dropped = 'stale' WHERE id = 1", ()),
    "taken before the checkpoint": ("lineage_broken", "UPDATE groups SET state = 'taken' WHERE id = 1", ()),
    "evaluation trained": ("lineage_broken", "UPDATE groups SET state = 'taken', taken_step = 2 WHERE id = 9", ()),
    "trained unfinished": ("trained_unfinished", "UPDATE episodes SET state = 'running' WHERE id = 1", ()),
    "a fork that trains its origin's turns": (
        "fork_broken",
        "UPDATE groups SET fork_of = 3, fork_trial = 0, fork_turn = 1 WHERE id = 1",
        (),
    ),
    "skipped with signal": (
        "skipped_with_signal",
        "UPDATE groups SET state = 'expired', reason = 'no_signal', skipped_step = 1, record = ? WHERE id = 5",
        (json.dumps({m: {"outcome": m, "outcomes": {}, "rewards": {"policy": [0.0]}} for m in (0, 1)}),),
    ),
    "skipped, and still there": ("skipped_with_signal", "UPDATE groups SET skipped_step = 1 WHERE id = 5", ()),
    # law 3
    "trained of what infrastructure ended": (
        "trained_unscored",
        "UPDATE episodes SET stop_reason = 'env_failed' WHERE id = 1",
        (),
    ),
    "trained without outcome": ("trained_unscored", "UPDATE episodes SET outcome = NULL WHERE id = 1", ()),
    "judged by another outcome": ("record_disagrees", "UPDATE episodes SET outcome = 7.0 WHERE id = 1", ()),
    "judged by one that was late": ("record_disagrees", "UPDATE episodes SET late = 1 WHERE id = 9", ()),
    "a reward too few in the record": (
        "record_disagrees",
        "UPDATE groups SET record = replace(record, '[0.0, 0.25]', '[0.25]') WHERE id = 1",
        (),
    ),
    # law 4
    "all ended, group open": ("group_stuck", "UPDATE groups SET state = 'running' WHERE id = 5", ()),
    "group ended, member open": ("group_stuck", "UPDATE episodes SET state = 'waiting' WHERE id = 9", ()),
    "a late member of an open group": ("group_stuck", "UPDATE episodes SET late = 1 WHERE id = 16", ()),
    "member runs, group waits": ("group_stuck", "UPDATE groups SET state = 'waiting' WHERE id = 8", ()),
    "held although it has ended": (
        "episode_held",
        "INSERT INTO endings VALUES (1, 0.0, 'done', 1.0, 1, '{}', '')",
        (),
    ),
    # law 5
    "too old": ("trained_stale", "UPDATE lineage SET max_lag = 0 WHERE episode_id = 5", ()),
    "older than was thought": ("trained_stale", "UPDATE versions SET step = -5 WHERE version = 1", ()),
    "a drop without reason": ("drop_without_reason", "UPDATE groups SET reason = NULL WHERE id = 6", ()),
    # bookkeeping
    "episode without group": ("orphan_row", "DELETE FROM groups WHERE id = 5", ()),
    "turn without episode": ("orphan_row", "DELETE FROM episodes WHERE id = 9", ()),
    "lineage without episode": (
        "orphan_row",
        "INSERT INTO lineage (episode_id, step, attempt, max_lag, taken_s) VALUES (99, 2, 1, 1, 0.0)",
        (),
    ),
    "member twice": ("orphan_row", "UPDATE episodes SET member = 5 WHERE id = 2", ()),
    "count wrong": ("bookkeeping", "UPDATE group_counts SET n = n + 1 WHERE state = 'scored'", ()),
    "ending count wrong": ("bookkeeping", "UPDATE ending_counts SET n = n + 1", ()),
    "oldest step wrong": ("bookkeeping", "UPDATE turns SET oldest_step = 7 WHERE id = 1", ()),
}


@pytest.mark.medium
def test_every_breach_is_found_by_its_kind(whole: Path, tmp_path: Path) -> None:
    missed = list[str]()
    for name, (kind, sql, parameters) in BREACHES.items():
        path = tmp_path / f"{name}.sqlite"
        shutil.copy(whole, path)
        with closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("DROP INDEX trained_exactly_once")  # the schema itself forbids some of these
            assert connection.execute(sql, parameters).rowcount > 0, name
        with RunStore.open(path) as store:
            report = audit(store)
        if report.ok or not any(one.kind == kind and one.law == KINDS[kind] for one in report.violations):
            missed.append(name)
        assert json.loads(report.to_json())["breaches"][kind] == report.breaches[kind]
    assert missed == []


def test_every_kind_of_breach_is_tried() -> None:
    """Here, but for those that take more than a row: see below and `test_power_loss`."""
    assert {kind for kind, *_ in BREACHES.values()} == KINDS.keys() - {
        "file_damaged",
        "checkpoint_disagrees",
        "checkpoint_damaged",
    }


def test_a_damaged_file_is_found(whole: Path, tmp_path: Path) -> None:
    """The header counts free pages that are not there."""
    path = tmp_path / "store.sqlite"
    shutil.copy(whole, path)
    data = bytearray(path.read_bytes())
    data[36:40] = struct.pack(">I", 7)  # header: total number of freelist pages
    path.write_bytes(bytes(data))
    with RunStore.open(path) as store:
        report = audit(store)
    assert report.breaches["file_damaged"] >= 1


def test_many_violations_are_counted_and_the_first_are_shown() -> None:
    report = AuditReport()
    for number in range(1500):
        report.breach("turns_lost", str(number))
    assert report.breaches["turns_lost"] == 1500
    assert [one.detail for one in report.violations] == [str(number) for number in range(1000)]


def test_the_schema_itself_refuses_a_second_lineage_row(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "store.sqlite"
    shutil.copy(whole, path)
    connection = sqlite3.connect(path)
    with pytest.raises(sqlite3.IntegrityError, match=r"UNIQUE constraint failed: lineage\.episode_id"):
        connection.execute(BREACHES["taken twice"][1])
