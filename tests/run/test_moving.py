"""Untrained episodes go to another run as a file: no token is lost, and a hostile file is refused in one line."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zstandard

from agentrl.algos.grpo import GRPO
from agentrl.algos.importance import Origin
from agentrl.config import RunConfig, parse
from agentrl.errors import UsageError
from agentrl.learner.data.batch import group_rows
from agentrl.offline.episode_export import FORMAT, Moved, export_episodes, import_episodes
from agentrl.records import StopReason, VersionSpan
from agentrl.store import EnvSnapshot, RunStore, Source
from agentrl.store.audit import audit
from agentrl.testing.outside_audit import OutsideAuditor
from tests.store.play import START, answer, part, play, serve, task, turn

CONFIG = parse({"model": "agentrl/tiny-coder", "env": {"id": "test/Env-v0"}})
SURROGATE = "no text \ud800"


@pytest.fixture
def there(tmp_path: Path) -> Any:
    """A run with a trained group, and an open one: a member ended, one in turn 2, one that waits, one that failed."""
    with RunStore.create(tmp_path / "there.sqlite", "{}") as store:
        serve(store, 0)
        store.add_groups([task(7)], size=2, purpose="train")
        for claim in store.claim("w", 2, lease_s=10):
            play(store, claim)
        assert store.take(1, 1, max_lag=1)
        one = serve(store, 1)
        two = serve(store, 2)
        store.add_groups([task(0)], size=4, purpose="train")
        ended, under_way, failed = store.claim("w", 3, lease_s=10)
        play(store, ended, version=one)
        play(store, failed, version=one, stop=StopReason.ENGINE_FAILED, outcome=None)
        id, fence = under_way.episode_id, under_way.fence
        store.begin(id, fence, START)
        store.journal_turn(id, fence, replace(turn(0, 1), text=SURROGATE))
        store.journal_step(id, fence, 0, answer(0))
        store.journal_turn(
            id, fence, replace(turn(1, 1), spans=(VersionSpan(one, 0, 1), VersionSpan(two, 1, 3, recomputed=True)))
        )
        store.journal_step(id, fence, 1, answer(1))
        store.journal_partial(id, fence, part(turn(2, two), 0, 2))
        store.keep_snapshot(id, fence, EnvSnapshot(turn=1, data=b"\x00state", seconds=2.5))
        yield store


@pytest.fixture
def here(tmp_path: Path) -> Any:
    """A run at step 5."""
    with RunStore.create(tmp_path / "here.sqlite", "{}") as store:
        for step in range(6):
            serve(store, step)
        yield store


@pytest.fixture
def file(there: RunStore, tmp_path: Path) -> Path:
    path = tmp_path / "episodes.zst"
    assert export_episodes(CONFIG, there, path) == Moved(groups=1, episodes=4, unfinished=3)
    return path


def clean(*stores: RunStore) -> None:
    for store in stores:
        assert audit(store).violations == [] and OutsideAuditor(store.path).look() == []


def test_law_1_an_episode_goes_on_in_another_run_with_every_token_it_had(
    there: RunStore, here: RunStore, file: Path
) -> None:
    assert import_episodes(CONFIG, here, file) == Moved(groups=1, episodes=4, unfinished=3)
    clean(there, here)
    theirs = [there.trajectory(row.id) for row in there.episodes(group_id=2)]
    claims = {claim.member: claim for claim in here.claim("v", 9, lease_s=10)}
    assert sorted(claims) == [1, 2, 3], "all but the one that had ended"
    assert claims[1].task == theirs[1].task and claims[1].start == START
    for ours, other in zip(claims[1].turns, theirs[1].turns, strict=True):
        for field in ("token_ids", "logprobs", "prompt_ids", "parent", "text", "step", "experts", "role", "finish"):
            assert getattr(ours, field) == getattr(other, field)
    assert claims[1].turns[0].text == SURROGATE
    partial = claims[1].partial
    assert partial is not None and partial.token_ids == (2, 3) and partial.logprobs == (-0.5, -1.0)
    assert here.snapshot(claims[1].episode_id) == EnvSnapshot(turn=1, data=b"\x00state", seconds=2.5)
    assert claims[2].turns == () and claims[2].start is None, "what infrastructure ended is played anew"
    for claim in claims.values():
        play(here, claim, turns=3)
    group = here.take(6, 1, max_lag=3)
    assert group is not None and len(group[0].trajectories) == 4
    clean(here)


def test_law_5_tokens_are_as_old_as_they_were_and_count_as_of_other_weights(here: RunStore, file: Path) -> None:
    current = here.current_version()
    import_episodes(CONFIG, here, file)
    assert here.current_version() == current and here.version_at(5) == current, "no engine serves what came in"
    claims = {claim.member: claim for claim in here.claim("v", 9, lease_s=10)}
    spans = [span for one in claims[1].turns for span in one.spans]
    assert [here.step_of(span.version) for span in spans] == [3, 4, 5], (
        "two steps, one and none behind, as in step 2 there"
    )
    assert all(here.is_undone(span.version) for span in spans)
    for claim in claims.values():
        play(here, claim, turns=3)
    (group,) = here.take(6, 1, max_lag=1) or []
    rows = group_rows(group, GRPO(), step_of=here.step_of, step_now=5, max_lag=1, undone=here.is_undone)
    moved = next(row for row in rows.rows if row.episode_id == claims[1].episode_id)
    assert rows.stale == {2: 3}, "turn 0 is beyond the bound here, as it would have been there"
    assert moved.columns["lag"].tolist() == [1, 0, 0, 0, 0, 0]
    assert moved.columns["origin"].tolist() == [Origin.UNDONE] * 3 + [Origin.PLAIN] * 3


def test_law_5_episodes_that_are_too_old_leave_as_stale(there: RunStore, here: RunStore, tmp_path: Path) -> None:
    for step in range(3, 9):
        serve(there, step)
    export_episodes(CONFIG, there, tmp_path / "old.zst")
    import_episodes(CONFIG, here, tmp_path / "old.zst")
    for claim in here.claim("v", 9, lease_s=10):
        play(here, claim, turns=2)
    (group,) = here.take(6, 1, max_lag=1) or []
    assert len(group.left_out) == 2 and len(group.trajectories) == 2
    clean(here)


def test_law_2_what_came_in_once_does_not_come_in_again(
    there: RunStore, here: RunStore, file: Path, tmp_path: Path
) -> None:
    import_episodes(CONFIG, here, file)
    assert import_episodes(CONFIG, here, file) == Moved(known=1)
    there.add_groups([task(1)], size=2, purpose="train")
    export_episodes(CONFIG, there, tmp_path / "more.zst")
    assert import_episodes(CONFIG, here, tmp_path / "more.zst") == Moved(groups=1, episodes=2, unfinished=2, known=1)
    with pytest.raises(UsageError, match="of this very run"):
        import_episodes(CONFIG, there, file)
    clean(there, here)


def test_finished_groups_that_no_step_took_come_along_and_trained_ones_do_not(
    there: RunStore, here: RunStore, tmp_path: Path
) -> None:
    there.add_groups([task(1)], size=2, purpose="train")
    for claim in [one for one in there.claim("v", 9, lease_s=10) if one.group_id == 3]:
        play(there, claim)
    path = tmp_path / "all.zst"
    assert export_episodes(CONFIG, there, path) == Moved(groups=2, episodes=6, unfinished=3)
    import_episodes(CONFIG, here, path)
    assert here.ready_count() == 1 and len(here.take(6, 1, max_lag=3) or []) == 1
    clean(here)


def test_a_fork_comes_in_with_its_beginning_as_context(there: RunStore, here: RunStore, tmp_path: Path) -> None:
    there.fork(1, turn=1, k=2)
    there.claim("w", 9, lease_s=10)
    path = tmp_path / "forks.zst"
    export_episodes(CONFIG, there, path)
    import_episodes(CONFIG, here, path)
    forks = [one for one in here.claim("v", 9, lease_s=10) if one.fork_turn is not None]
    assert [(one.fork_turn, [turn.learns for turn in one.turns]) for one in forks] == [(1, [False])] * 2
    for claim in forks:
        play(here, claim, turns=2)
    clean(here)


def test_what_waits_for_reward_sources_waits_for_those_of_the_other_run(
    there: RunStore, here: RunStore, tmp_path: Path
) -> None:
    source = Source(name="prm", version=1, weight=1.0, deadline_s=60.0, late="drop")
    for store in (there, here):
        store.declare_sources([source])
    there.add_groups([task(1)], size=2, purpose="train")
    for claim in [one for one in there.claim("v", 9, lease_s=10) if one.group_id == 3]:
        play(there, claim)
    path = tmp_path / "held.zst"
    export_episodes(CONFIG, there, path)
    import_episodes(CONFIG, here, path)
    waiting = here.awaiting("prm", 99)
    assert len(waiting) == 8 and here.ready_count() == 0, "two turns of each of four that had begun or ended"
    clean(here)
    for one in waiting:
        here.score(one, "prm", 0.5)
    assert here.ready_count() == 1
    clean(here)


def test_snapshots_may_stay_behind(here: RunStore, file: Path) -> None:
    import_episodes(CONFIG, here, file, snapshots=False)
    assert [here.snapshot(row.id) for row in here.episodes()] == [None] * 4


def test_late_members_of_a_trained_group_are_named(there: RunStore, tmp_path: Path) -> None:
    first = there.claim("v", 1, lease_s=10)[0]
    play(there, first)
    there.expire(1e12, 1.0)
    assert there.take(2, 1, max_lag=2)
    assert export_episodes(CONFIG, there, tmp_path / "late.zst") == Moved(left=1)


def test_a_group_too_large_for_a_line_stays_and_the_others_can_be_taken_in(
    there: RunStore, here: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.add_groups([task(1)], size=2, purpose="train")
    monkeypatch.setattr("agentrl.offline.episode_export._LINE", 1000)
    path = tmp_path / "large.zst"
    assert export_episodes(CONFIG, there, path) == Moved(groups=1, episodes=2, unfinished=2, large=1)
    assert import_episodes(CONFIG, here, path) == Moved(groups=1, episodes=2, unfinished=2)


def test_a_group_too_large_for_memory_stays_and_no_reader_takes_one(
    there: RunStore, here: RunStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.add_groups([task(1)], size=2, purpose="train")
    path = tmp_path / "large.zst"
    assert export_episodes(CONFIG, there, path).groups == 2
    monkeypatch.setattr("agentrl.offline.episode_export._GROUP", 1000)
    with pytest.raises(UsageError, match=r"line \d+: its group is longer than 1000 bytes"):
        import_episodes(CONFIG, here, path)
    assert export_episodes(CONFIG, there, path) == Moved(groups=1, episodes=2, unfinished=2, large=1)
    assert import_episodes(CONFIG, here, path) == Moved(groups=1, episodes=2, unfinished=2)


# --- hostile files ------------------------------------------------------------------------------------------------


def rewritten(file: Path, change: Callable[[list[Any]], None]) -> None:
    lines = [json.loads(line) for line in zstandard.decompress(file.read_bytes(), 1 << 24).splitlines()]
    change(lines)
    file.write_bytes(zstandard.compress("".join(f"{json.dumps(line)}\n" for line in lines).encode()))


def put(*path: Any) -> Callable[[list[Any]], None]:
    *way, last, value = path

    def change(lines: list[Any]) -> None:
        at: Any = lines
        for key in way:
            at = at[key]
        at[last] = value

    return change


MEMBER = 3  # the line of the episode that is under way
EVIL = json.dumps({"index": 0, "env": "os:system", "seed": 1})
TOOLS = json.dumps({"index": 0, "env": "test/Env-v0", "seed": 1, "kwargs": {"tools": ["os:system"]}})


@pytest.mark.parametrize(
    ("change", "words"),
    {
        "another format": (
            put(0, "format", "agentrl episodes 9"),
            "line 1: format: Input should be 'agentrl episodes 1'",
        ),
        "a field too many": (put(0, "extra", 1), "line 1: extra: Extra inputs are not permitted"),
        "another tokenizer": (put(0, "tokenizer", "0"), "another tokenizer than 'agentrl/tiny-coder'"),
        "a code reference": (
            put(1, "task", EVIL),
            "line 2: a task of 'os:system' with arguments that this run does not",
        ),
        "tools of its own": (
            put(1, "task", TOOLS),
            "line 2: a task of 'test/Env-v0' with arguments that this run does",
        ),
        "no task": (put(1, "task", "[]"), "line 2: '[]' is no dict"),
        "a task with odd fields": (put(1, "task", '{"index": -1, "env": "test/Env-v0", "seed": 1}'), "odd fields"),
        "a number without end": (put(1, "group", 10**30), "line 2: group: Input should be less than"),
        "an outcome without end": (put(MEMBER, "turns", 0, "step", "answer", f'{{"outcome": {10**400}}}'), "line 4: "),
        "a log-prob above 0": (put(MEMBER, "turns", 0, "logprobs", 0, 1e300), "line 4: 1e+300 as a log-prob"),
        "endless members": (put(1, "size", 1 << 40), "line 2: size: Input should be less than or equal to 4096"),
        "members too few": (put(1, "size", 9), "line 7: the file ends before the group's 9 members"),
        "a version unknown": (put(1, "ages", {}), "has tokens of versions"),
        "an age below 0": (put(1, "ages", "2", -1), "line 2: ages.2: Input should be greater than or equal to 0"),
        "a token beyond": (put(MEMBER, "turns", 0, "token_ids", 0, 1 << 31), "line 4: a token beyond the model's"),
        "a token below": (put(MEMBER, "turns", 0, "token_ids", 0, -1), "turns.0.token_ids.0: Input should be greater"),
        "a token of text": (
            put(MEMBER, "turns", 0, "token_ids", 0, "7"),
            "turns.0.token_ids.0: Input should be a valid int",
        ),
        "a log-prob too few": (put(MEMBER, "turns", 0, "logprobs", [0.0]), "line 4: 3 tokens with 1 log-probs"),
        "a log-prob that is none": (put(MEMBER, "turns", 0, "logprobs", 0, float("nan")), "line 4: "),
        "versions with a gap": (put(MEMBER, "turns", 0, "spans", [[1, 0, 1], [1, 2, 3]]), "do not cover 3 tokens once"),
        "versions too long": (put(MEMBER, "turns", 0, "spans", [[1, 0, 1 << 19]]), "do not cover 3 tokens once"),
        "a parent to come": (put(MEMBER, "turns", 0, "parent", 1), "member has turn 0 after turn 1"),
        "a turn without answer": (put(MEMBER, "turns", 0, "step", None), "goes on after turn 0, which has no answer"),
        "a turn after the end": (put(MEMBER, "turns", 0, "step", "terminated", True), "goes on after turn 0"),
        "observations that are none": (put(MEMBER, "turns", 0, "step", "observation", '["x"]'), "line 4: message 0:"),
        "a text that is none": (put(MEMBER, "turns", 0, "text", "7"), "line 4: '7' is no str"),
        "a text without end": (put(MEMBER, "turns", 0, "text", "[" * 100_000), "line 4: "),
        "an answer of odd kind": (put(MEMBER, "turns", 0, "step", "answer", '{"outcome": []}'), "line 4: "),
        "an unregistered column": (
            put(MEMBER, "turns", 0, "columns", {"x": [1, 2, 3]}),
            "its columns cannot be written",
        ),
        "a part that learns nothing": (put(MEMBER, "partial", "spans", [[99, 0, 2]]), "has tokens of versions [99]"),
        "a part of no turn": (put(MEMBER, "turns", 1, "step", None), "has a turn 2 under way after 2 turns"),
        "a snapshot of no turn": (
            put(MEMBER, "snapshot", "turn", 7),
            "has a snapshot of turn 7, which was not answered",
        ),
        "a snapshot of no bytes": (put(MEMBER, "snapshot", "data", "%%%"), "line 4: "),
        "an end without beginning": (put(2, "start", None), "has not begun, and has turns or an end"),
        "an end of infrastructure": (put(2, "ending", "stop_reason", "expired"), "ended as expired is no finished one"),
        "an end of no kind": (put(2, "ending", "stop_reason", "won"), "line 3: 'won' is not a valid StopReason"),
        "experts of no layer": (
            put(MEMBER, "turns", 0, "experts", "layers", 0),
            "experts.layers: Input should be greater",
        ),
        "experts cut": (put(MEMBER, "turns", 0, "experts", "data", "AA=="), "line 4: 1 bytes are no whole tokens"),
        "a fork that learns": (put(1, "fork_turn", 2), "is a fork, and learns from turn 0 of its origin"),
    }.values(),
)
def test_a_hostile_file_is_refused_in_one_line_and_nothing_of_its_group_comes_in(
    here: RunStore, file: Path, change: Callable[[list[Any]], None], words: str
) -> None:
    rewritten(file, change)
    with pytest.raises(UsageError) as caught:
        import_episodes(CONFIG, here, file)
    assert words in str(caught.value) and "\n" not in str(caught.value) and str(caught.value).startswith(str(file))
    assert here.episodes() == [] and here.movable() == []
    clean(here)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04",
        b"\x80\x04cos\nsystem\n(S'true'\ntR.",
        zstandard.compress(b"\n" * 1000),
        zstandard.compress(b"null\n"),
        zstandard.compress(b"\xff\xfe\n"),
        zstandard.compress(b"[" * 1_000_000 + b"\n"),
        zstandard.compress(b"{}\n")[:-3],
    ],
)
def test_what_is_no_such_file_is_refused(here: RunStore, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    with pytest.raises(UsageError):
        import_episodes(CONFIG, here, path)
    with pytest.raises(UsageError, match="cannot be read"):
        import_episodes(CONFIG, here, tmp_path / "none")


def test_a_file_that_expands_without_end_costs_bounded_memory(here: RunStore, tmp_path: Path) -> None:
    path = tmp_path / "bomb"
    with path.open("wb") as raw, zstandard.ZstdCompressor().stream_writer(raw) as out:
        for _ in range(300):
            out.write(b" " * (1 << 20))
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(UsageError, match="longer than 67108864 bytes"):
            import_episodes(CONFIG, here, path)
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


def test_groups_before_a_broken_line_are_in_and_the_rest_follows_from_a_mended_file(
    there: RunStore, here: RunStore, tmp_path: Path
) -> None:
    there.add_groups([task(1)], size=2, purpose="train")
    path = tmp_path / "two.zst"
    export_episodes(CONFIG, there, path)
    whole = path.read_bytes()
    rewritten(path, put(6, "size", 99))
    with pytest.raises(UsageError, match="the file ends before"):
        import_episodes(CONFIG, here, path)
    assert len(here.movable()) == 1
    path.write_bytes(whole)
    assert import_episodes(CONFIG, here, path) == Moved(groups=1, episodes=2, unfinished=2, known=1)
    clean(here)


def test_the_format_is_named(file: Path) -> None:
    first = json.loads(zstandard.decompress(file.read_bytes(), 1 << 24).splitlines()[0])
    assert first["format"] == FORMAT and not file.with_name("episodes.zst.part").exists()


def test_a_run_of_other_arguments_does_not_take_it(here: RunStore, file: Path) -> None:
    other: RunConfig = parse({"model": "agentrl/tiny-coder", "env": {"id": "test/Env-v0", "kwargs": {"level": "hard"}}})
    with pytest.raises(UsageError, match="arguments that this run does not play"):
        import_episodes(other, here, file)
