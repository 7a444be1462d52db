"""The notice board: each kind is named once with its count and place, and refused under --strict."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from agentrl import notices as board
from agentrl.errors import StrictInputError
from agentrl.notices import STRICT_VARIABLE, NoticeBoard
from agentrl.run.reporting import notice_counts, status
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> NoticeBoard:
    monkeypatch.delenv(STRICT_VARIABLE, raising=False)
    return NoticeBoard()


def test_the_first_case_is_logged_and_later_ones_are_counted(
    notices: NoticeBoard, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for n in (3, 5, 8):
            notices.note("data rows", "the key 'a' is not used here", place=f"rows.jsonl, line {n}")
    assert caplog.messages == ["data rows: the key 'a' is not used here (rows.jsonl, line 3)"]
    tally = notices.totals()["data rows", "the key 'a' is not used here"]
    assert (tally.count, tally.place) == (3, "rows.jsonl, line 3")


def test_gathered_cases_are_one_line_with_their_count(notices: NoticeBoard, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        with notices.gathered():
            for n in (3, 5):
                notices.note("data rows", "the key 'a' is not used here", place=f"line {n}")
            assert caplog.messages == []
        notices.note("data rows", "the key 'a' is not used here", place="line 9")
    assert caplog.messages == ["data rows: the key 'a' is not used here (2 times, first: line 3)"]


def test_new_cases_are_handed_out_once_and_can_be_put_back(notices: NoticeBoard) -> None:
    notices.note("test logs", "an unknown word", place="here")
    first = notices.take_new()
    assert first == [("test logs", "an unknown word", 1, "here")]
    assert notices.take_new() == []
    notices.put_back(first)
    notices.note("test logs", "an unknown word", place="there")
    assert notices.take_new() == [("test logs", "an unknown word", 2, "here")]
    for _ in range(3):  # two are recorded: two more are due, and the last one only at the end
        notices.note("test logs", "an unknown word")
    assert notices.take_new() == [("test logs", "an unknown word", 3, "here")]
    notices.note("test logs", "an unknown word")
    assert notices.take_new() == []
    assert notices.take_new(last=True) == [("test logs", "an unknown word", 1, "here")]


def test_the_counts_of_all_processes_are_added_up_in_status_and_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STRICT_VARIABLE, raising=False)
    (tmp_path / "run").mkdir()
    config = json.dumps({"format": 1, "model": "agentrl/tiny-coder", "env": {"id": "test/Env-v0"}})
    with RunStore.create(tmp_path / "run/store.sqlite", config) as store:
        for process in range(2):
            board.OF_PROCESS.forget()
            for row in range(process + 1):
                board.note("rows", "the key 'a' is not used", place=f"line {row + 5 * process}")
            notice_counts.record(store.metrics, step=0, last=True)
        assert notice_counts.totals(store.metrics) == [
            {"boundary": "rows", "case": "the key 'a' is not used", "count": 3, "place": "line 0"}
        ]
        notice_counts.record(store.metrics, step=1, last=True)  # nothing is new
        assert len(store.metrics.values(notice_counts.KIND)) == 2
    now = status.status(RunDir(tmp_path / "run"))
    assert "not used  rows: the key 'a' is not used (3 times, first: line 0)" in list(status.lines(now))


def test_strict_refuses_the_users_data_and_never_what_a_policy_sent(
    notices: NoticeBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STRICT_VARIABLE, "1")
    with pytest.raises(StrictInputError, match=r"rows: the key 'a' is not used \(line 1\)"):
        notices.note("rows", "the key 'a' is not used", place="line 1")
    notices.note("requests", "the key 'a' is not used", by_policy=True)
    assert [count for _, _, count, _ in notices.take_new()] == [1]


def test_input_with_ever_new_keys_does_not_fill_the_memory(notices: NoticeBoard) -> None:
    for n in range(5000):
        notices.note("rows", f"the key {n} is not used")
    totals = notices.totals()
    assert len(totals) <= 201
    assert sum(tally.count for tally in totals.values()) == 5000
