"""A teacher that a real server holds: what it says of sampled tokens is transformers' own, and reaches the journal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from agentrl import config as configuration
from agentrl.records import context_ids
from agentrl.rewards.scorer import Scorer
from agentrl.run import reward_services
from agentrl.run.reward_services import teacher_of
from agentrl.store import RunStore
from tests.rewards.test_sources import desk, eventually
from tests.store.play import admit, play_all, serve

from .conftest import Server
from .policy import Policy

pytestmark = pytest.mark.vllm


def run_file(server: Server, policy: Policy) -> configuration.RunConfig:
    """Of a student that has the tokenizer of `policy`."""
    source: dict[str, Any] = {"source": "big", "kind": "teacher", "url": server.url, "late": "partial"}
    document = {"model": str(policy.folder), "env": {"id": "test/Env-v0"}, "algo": {"kind": "distil"}}
    return configuration.parse({**document, "rewards": [source]})


async def test_what_a_real_teacher_says_of_each_token_is_journaled(
    tmp_path: Path, server: Server, policy: Policy
) -> None:
    config = run_file(server, policy)
    (settings,) = config.rewards
    store = RunStore.create(tmp_path / "store.sqlite", "{}")
    serve(store, 0)
    admit(store, limit=1)
    reward_services.declare(config, store)

    async def nobody(_: str) -> None:
        return None

    play_all(store, turns=2)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(Scorer(settings, desk(store), teacher_of(config, nobody, settings)).serve)
        await eventually(lambda: store.buffer.ready_count() == 1)
        nursery.cancel_scope.cancel()
    seen = 0
    for trajectory in store.reads.trajectories("train"):
        for turn in trajectory.turns:
            before = context_ids(trajectory.turns, turn.index)
            expected = policy.logprobs(before, turn.token_ids, max(policy.files, default=1))
            assert turn.columns["teacher"] == pytest.approx(expected, abs=1e-3)
            seen += len(turn.token_ids)
    assert seen >= 8
    store.close()
