"""An episode that came in from another run goes on from the tokens that it had (laws 1 and 5)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.records import StopReason
from agentrl.rollout.episode import play
from agentrl.store import Claim, RunStore
from agentrl.store.asynchronous import AsyncStore
from agentrl.store.audit import audit
from agentrl.testing.engine import FakeEngine

from .test_partial_turns import Killed, Mortal
from .test_snapshots import ANSWERS, Saving


async def test_law_1_a_turn_under_way_goes_on_in_another_run_from_the_tokens_it_had(
    store: RunStore, claim_one: Callable[..., Claim], context: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    origin, engine = claim_one(), FakeEngine(version=1)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        dying = Mortal(engine, store, patch, at=1)
        await play(origin, context(Saving(ANSWERS), dying, checkpoint_tokens=1))
    (group,) = store.movable()
    moved = store.move_out(group)
    assert moved is not None and moved.members[0].partial is not None
    had = moved.members[0].partial.token_ids
    assert had

    with RunStore.create(tmp_path / "second.sqlite", "{}") as second:
        for step in range(3):
            second.confirm_version(second.mint_version(step))
        second.move_in(store.run_id(), moved, {1: 2})
        claim = second.claim("other", 1, lease_s=10)[0]
        place, own = context(Saving(ANSWERS)), FakeEngine(version=3)
        for name, value in (("store", AsyncStore(second, inline=True)), ("engine", own)):
            object.__setattr__(place, name, value)
        assert (await play(claim, place)).stop_reason is StopReason.DONE
        first = second.trajectory(claim.episode_id).turns[0]
        assert own.requests[0].sampled == len(had) and first.token_ids[: len(had)] == had
        assert [second.is_undone(version) for version in first.versions] == [True] * len(had) + [False] * (
            len(first.token_ids) - len(had)
        )
        assert audit(second).violations == []
