"""Untrained groups out of a run over several databases, and into one: whole, once, and as old as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import parse
from agentrl.errors import StoreError, UsageError
from agentrl.offline.episode_export import Moved, export_episodes, import_episodes
from agentrl.store import RunStore
from agentrl.store.audit.audit import audit
from agentrl.store.copy_database import move
from agentrl.store.databases.open_store import ADDRESS, STORE
from agentrl.store.sharded.placement import home
from agentrl.testing.outside_audit import OutsideAuditor

from .play import START, admit, answer, part, play, serve, turn
from .server import Server

sharded = pytest.importorskip("agentrl.store.sharded.store")  # its driver is an extra

pytestmark = pytest.mark.postgres

CONFIG = parse({"model": "agentrl/tiny-coder", "env": {"id": "test/Env-v0"}})
GROUPS = 4
ALL = Moved(groups=GROUPS, episodes=2 * GROUPS, unfinished=GROUPS)


@contextlib.contextmanager
def made(folder: Path, urls: list[str]) -> Generator[RunStore]:
    folder.mkdir()
    with RunStore.create(folder / (ADDRESS if urls else STORE), "{}", url=urls or None) as store:
        serve(store, 0)
        yield store


def begin(store: RunStore) -> None:
    """Two groups are trained; of each other one a member has ended, and the other is in its second turn."""
    store.lead()
    admit(store, group_size=2, groups_per_step=2, max_lag=9, limit=2 + GROUPS)
    claims = store.claim("w", 99, lease_s=30.0)
    for claim in claims[:4]:
        play(store, claim)
    assert len(store.take(1, 2, max_lag=9) or []) == 2
    store.checkpoint(1, one := serve(store, 1), "/nowhere")
    for claim in claims[4:]:
        if claim.member == 0:
            play(store, claim, version=one)
            continue
        id, fence = claim.episode_id, claim.fence
        store.begin(id, fence, START)
        store.journal_turn(id, fence, turn(0, 1))
        store.journal_step(id, fence, 0, answer(0))
        store.journal_partial(id, fence, part(turn(1, one), 0, 2))


def clean(*stores: RunStore) -> None:
    for store in stores:
        assert audit(store).violations == [] and OutsideAuditor(store.path).look() == []


def turns(store: RunStore, taken: bool) -> dict[int, Any]:
    """By task and member: what was sampled, of the groups that a step has taken, or of the others."""
    rows = [row for row in store.episodes("train") if (row.group_state.value in ("taken", "trained")) == taken]
    return {
        (row.task.index, row.member): [(one.token_ids, one.logprobs) for one in store.trajectory(row.id).turns]
        for row in rows
    }


@pytest.mark.parametrize(("out_of", "into"), [(3, 2), (0, 3)])
def test_law_2_groups_move_once_between_several_databases_and_a_file(
    out_of: int, into: int, server: Server, tmp_path: Path
) -> None:
    file = tmp_path / "episodes.zst"
    urls = [server.url] * 3
    with made(tmp_path / "there", urls[:out_of]) as there, made(tmp_path / "here", urls[:into]) as here:
        begin(there)
        for step in (1, 2):
            serve(here, step)
        current = here.current_version()
        assert export_episodes(CONFIG, there, file) == ALL
        assert import_episodes(CONFIG, here, file) == ALL
        assert import_episodes(CONFIG, here, file) == Moved(known=GROUPS)
        assert turns(here, taken=False) == turns(there, taken=False)
        claims = here.claim("v", 99, lease_s=30.0)
        assert len(claims) == GROUPS and all(claim.partial and len(claim.turns) == 1 for claim in claims)
        ids = {span.version for claim in claims for span in claim.turns[0].spans}
        assert [(here.step_of(id), here.is_undone(id)) for id in ids] == [(1, True)], "one step behind, here as there"
        assert here.current_version() == current
        admit(here, group_size=2, groups_per_step=2, max_lag=9, limit=1)  # its numbers go on beyond those that came
        for claim in (*claims, *here.claim("v", 99, lease_s=30.0)):
            play(here, claim, version=current.version)
        groups = here.take(3, GROUPS + 1, max_lag=9) or []
        assert len(groups) == GROUPS + 1 and len(here.lineage(3)) == 2 * GROUPS + 2
        with pytest.raises(UsageError, match="of this very run"):
            import_episodes(CONFIG, there, file)
        clean(there, here)


def test_law_2_an_import_that_is_cut_off_between_two_databases_is_whole_at_the_next_try(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    file, run = tmp_path / "episodes.zst", tmp_path / "here"
    with made(tmp_path / "there", []) as there, made(run, [server.url] * 3) as here:
        begin(there)
        export_episodes(CONFIG, there, file)
        keep_pace, calls = sharded.ShardedStore._keep_pace, list[int]()

        def killed(store: Any, shard: int) -> None:
            calls.append(shard)
            if len(calls) in (1, 3):  # the versions are there, and the group is not
                raise Killed
            keep_pace(store, shard)

        monkeypatch.setattr(sharded.ShardedStore, "_keep_pace", killed)
        for known in (0, 1):
            with pytest.raises(Killed):
                import_episodes(CONFIG, here, file)
            assert sum(here.counts().values()) == known
        assert import_episodes(CONFIG, here, file) == Moved(groups=3, episodes=6, unfinished=3, known=1)
        newest = [shard._db.rows("SELECT MAX(version) FROM versions") for shard in here.shards]  # pyright: ignore[reportPrivateUsage]
        assert newest == [[(3,)]] * 3, "two versions there have one each here, however often it was tried"
        assert {home(row.group_id, 3) for row in here.episodes("train")} > {0}
        clean(here)
        clock = here._db.clock  # pyright: ignore[reportPrivateUsage]
    move(run, None, clock)
    with RunStore.open(run / STORE) as gathered:
        assert import_episodes(CONFIG, gathered, file) == Moved(known=GROUPS)
        clean(gathered)


def test_a_group_that_no_run_can_have_leaves_no_version_behind(server: Server, tmp_path: Path) -> None:
    with made(tmp_path / "there", []) as there, made(tmp_path / "here", [server.url] * 2) as here:
        begin(there)
        group = there.move_out(there.movable()[0])
        assert group is not None
        for member in group.members:
            object.__setattr__(member, "start", None)
        with pytest.raises(StoreError, match="has not begun, and has turns"):
            here.move_in(there.run_id(), group, {1: 0, 2: 0})
        assert not here.knows_version(2)
