"""What the page tells of an episode and of the last minutes, against hand computations."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from each_case import each_case
from store.play import START, serve, turn

from agentrl.records import Task
from agentrl.store import EpisodeFilter, RunStore
from agentrl.store.metrics import Metric, Metrics
from agentrl.store.versions import Versions
from agentrl.view import episode_answers, run_answers
from agentrl.view.file_edits import edits_of
from agentrl.view.lanes import lanes
from agentrl.view.opened_runs import OpenedRun

from .made_run import FILE, make_run

Call = Callable[..., str]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenedRun]:
    found = OpenedRun("made", make_run(tmp_path / "made"))
    yield found
    found.close()


def call(name: str, **arguments: Any) -> str:
    return f"<think>hm</think>\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_edits_are_read_from_the_arguments_of_calls() -> None:
    (edit,) = edits_of(call("edit", file_path="a.py", old_string="x", new_string="y"))
    assert edit == {"name": "edit", "path": "a.py", "place": None, "old": "x", "new": "y"}
    two = edits_of(call("multi", path="b.py", edits=[{"old": "1", "new": "2"}, {"search": "3", "replace": "4"}, 5]))
    assert [(one["path"], one["old"], one["new"]) for one in two] == [("b.py", "1", "2"), ("b.py", "3", "4")]
    (made,) = edits_of(call("create", path="c.py", file_text="whole"))
    assert (made["old"], made["new"]) == (None, "whole")
    (line,) = edits_of(call("replace_line", line=4, text="    return 1"))
    assert (line["place"], line["path"], line["new"]) == ("4", None, "    return 1")
    (patch,) = edits_of(call("apply_patch", input="*** Begin Patch\n-a\n+b"))
    assert patch["patch"] == "*** Begin Patch\n-a\n+b"


@each_case(
    "text",
    [
        "",
        "no call",
        call("run_tests"),
        call("read", path="a.py"),
        call("bash", command="patch -p1", input="no patch"),
        '<tool_call>{"name": "edit", "arguments": {"old": "x", "new": ',
        "<tool_call>" * 500,
        "{" * 10_000,
        call("edit", path=["a"], old=1, new={"x": 2}),
    ],
)
def test_a_turn_that_edits_nothing_has_no_edits(text: str) -> None:
    assert edits_of(text) == []


def test_an_episode_keeps_its_lengths_and_versions_when_its_tokens_are_gone(opened: OpenedRun) -> None:
    before = episode_answers.detail(opened, 2, {})
    assert [(turn["n_tokens"], turn["prompt_tokens"], turn["versions"]) for turn in before["turns"]] == [
        (3, 3, [1])
    ] * 2
    assert before["weight_steps"] == {1: 0}
    (edit,) = before["turns"][0]["edits"]
    assert (edit["path"], edit["old"]) == (FILE, "a\n<b>b</b>\nc")
    with RunStore.open(opened.run.store_path) as store:
        assert store.lineage.retain(1, keep_steps=0, keep_sample=0.0)
    after = episode_answers.detail(opened, 2, {})
    assert [turn["tokens"] for turn in after["turns"]] == [[], []], "the tokens are gone"
    for answer in (before, after):
        assert [turn["n_tokens"] for turn in answer["turns"]] == [3, 3]
        assert [member["tokens"] for member in answer["siblings"]] == [3, 6]


def test_a_list_of_the_newest_looks_at_no_others(tmp_path: Path) -> None:
    def work(episodes: int) -> int:
        """The instructions of SQLite, by the hundred."""
        done = 0

        def count() -> int:
            nonlocal done
            done += 1
            return 0

        with RunStore.create(tmp_path / f"{episodes}.sqlite", "{}") as store:
            serve(store, 0)
            tasks = [Task(index=0, env="e", seed=seed) for seed in range(episodes)]
            store.groups.add_groups(tasks, size=1, purpose="train")
            store._db.driver.connection.set_progress_handler(count, 100)  # pyright: ignore
            rows = store.search.find_episodes(EpisodeFilter(), descending=True, limit=5)
        assert [row.id for row in rows] == list(range(episodes, episodes - 5, -1))
        return done

    assert work(400) <= work(40) + 2


def test_what_a_step_did_to_each_token_is_read_from_its_dump(opened: OpenedRun) -> None:
    assert episode_answers.detail(opened, 1, {})["turns"][0]["columns"] == {}
    path = opened.run.token_dump(1)
    path.parent.mkdir()
    row = {
        "token_ids": [0, 1, 2],
        "logprob": [-0.5, None, -1.0],
        "behaviour": [-0.5, -1.0, -1.5],
        "entropy": [0.1, 0, 2],
    }
    others = [{"pass": 0, "episode": 11, "turn": 0}, {"pass": 1, "episode": 1, "turn": 0, "entropy": [9, 9, 9]}]
    lines = [*others, {"pass": 0, "episode": 1, "turn": 0, **row}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    columns = episode_answers.detail(opened, 1, {})["turns"][0]["columns"]
    assert columns["entropy"] == [0.1, 0.0, 2.0]
    assert columns["ratio"] == [1.0, None, pytest.approx(math.exp(0.5))]
    assert episode_answers.detail(opened, 2, {})["turns"][0]["columns"] == {}
    path.write_text('{"pass": 0, "episode": 1, "turn": 0, "entropy": [0.1')
    assert episode_answers.detail(opened, 1, {})["turns"][0]["columns"] == {}, "it is being written"


def test_earlier_trials_and_relatives_of_an_episode(opened: OpenedRun) -> None:
    with RunStore.open(opened.run.store_path) as store:
        group = store.groups.fork(2, turn=1, k=2)
        claims = store.leases.claim("other", 99, lease_s=1e6)
        forked = next(claim for claim in claims if claim.group_id == group)
        anew = next(claim for claim in claims if claim.group_id != group)
        store.journal.begin(anew.episode_id, anew.fence, START)
        store.journal.journal_turn(anew.episode_id, anew.fence, turn(0, 1))
        store.journal.restart_episode(anew.episode_id, anew.fence, "its box died")
    (fork,) = episode_answers.detail(opened, forked.episode_id, {})["family"]
    assert (fork["group"], fork["of"], fork["turn"]) == (group, 2, 1) and forked.episode_id in fork["members"]
    (trial,) = episode_answers.detail(opened, anew.episode_id, {})["restarts"]
    assert (trial["trial"], trial["reason"]) == (0, "its box died")
    assert [one["text"]["text"] for one in trial["turns"]] == ["action 0"]
    assert episode_answers.detail(opened, 3, {})["family"] == []


def test_lanes_say_who_did_something_when(opened: OpenedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns of half a second at 10 and 11 s, six tokens a second; nothing else is on this clock."""
    monkeypatch.setattr(Metrics, "activity", lambda *_: ([(11.0, 11.5, 3), (10.0, 10.5, 3)], [(9.0, 12.0), (8.0, 9.0)]))
    monkeypatch.setattr(Versions, "served_versions", lambda *_: [])
    monkeypatch.setattr(opened, "steps", list)
    found = lanes(opened)
    assert found is not None
    assert (found["since_s"], found["until_s"]) == (8.0, 11.5)
    assert found["engine"]["idle"] == pytest.approx(1 - 1.0 / 3.5) and found["worker"]["idle"] == 0.0
    width = 3.5 / 60
    assert sum(found["engine"]["tokens_per_s"]) * width == pytest.approx(6.0, abs=0.01), "all tokens are in it"
    assert sum(found["engine"]["turns"]) * width == pytest.approx(1.0, abs=0.01)
    assert sum(found["worker"]["episodes"]) * width == pytest.approx(3.5, abs=0.01)
    assert sum(found["worker"]["environment"]) * width == pytest.approx(2.5, abs=0.01)
    assert found["learner"]["idle"] is None and found["marks"] == []


def test_an_episode_is_not_under_way_while_nobody_runs(opened: OpenedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers report at 0, 5 and 10 s, are stopped, and report from 70 s on: an episode from 5 to 80 s plays for 15."""
    reports = [Metric(kind="fleet", step=0, attempt=1, time_s=at, values={}, undone=False) for at in (0, 5, 10, 70, 75)]
    monkeypatch.setattr(Metrics, "activity", lambda *_: ([(5.0, 6.0, 3), (79.0, 80.0, 3)], [(5.0, 80.0)]))
    monkeypatch.setattr(Versions, "served_versions", lambda *_: [])
    monkeypatch.setattr(Metrics, "values", lambda *_, **__: reports)
    monkeypatch.setattr(opened, "steps", list)
    found = lanes(opened)
    assert found is not None and (found["since_s"], found["until_s"]) == (5.0, 80.0)
    assert sum(found["worker"]["episodes"]) * 75 / 60 == pytest.approx(15.0, abs=0.01)
    assert found["worker"]["idle"] == pytest.approx(60 / 75)


def test_the_rows_of_steps_are_read_once(opened: OpenedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    real = Metrics.values

    def metrics(self: Metrics, kind: str, *, undone: bool = False, after: int = -1) -> Any:
        asked.append((kind, after))
        return real(self, kind, undone=undone, after=after)

    monkeypatch.setattr(Metrics, "values", metrics)
    for _ in range(2):
        opened.look_anew()
        assert run_answers.summary(opened)["step"] == 3 and run_answers.health(opened) == []
    assert [after for kind, after in asked if kind == "step"].count(-1) == 1


def test_the_learners_lane_is_of_its_steps(opened: OpenedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    last = opened.steps()[-1].time_s
    monkeypatch.setattr(Metrics, "activity", lambda *_: ([(last - 100, last - 99, 1)], []))
    found = lanes(opened, now=lambda: 0.0)
    assert found is not None
    # three steps, all recorded at once: each worked for 3 s after it had waited for 1
    assert found["learner"]["idle"] == pytest.approx(0.25)
    assert sum(found["learner"]["busy"]) * 100 / 60 == pytest.approx(9.0, abs=0.2)
    assert {mark["kind"] for mark in found["marks"]} == {"weights", "checkpoint"}
