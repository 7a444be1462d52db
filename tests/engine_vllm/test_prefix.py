"""Long episodes find what they have computed: the share of reusable prefix tokens that a real server has cached."""

from __future__ import annotations

import random

import pytest
import trio

from agentrl.engine.client import EngineClient

from .conftest import Server
from .policy import VOCAB
from .test_weights import Progress, turn

pytestmark = pytest.mark.vllm

HITS = "vllm:prefix_cache_hits_total"


async def test_twenty_turn_episodes_keep_nine_tenths_of_their_prefix(server: Server) -> None:
    """Reusable is all of a turn's context that the turn before it had computed. It is cached in whole blocks of 32
    tokens: of 400 and more that leaves less than a tenth over, wherever the turns happen to end."""
    client = EngineClient(server.url)
    before, reusable = (await client.metrics())[HITS], 0

    async def play(seed: int) -> None:
        nonlocal reusable
        rng = random.Random(seed)
        context = [rng.randrange(3, VOCAB) for _ in range(400)]
        known = 0
        for _ in range(20):
            reusable += known
            generation = await turn(client, context, 30, Progress())
            known = len(context) + len(generation.token_ids) - 1  # the last token was sampled, never computed
            context += [*generation.token_ids, *(rng.randrange(3, VOCAB) for _ in range(8))]

    async with trio.open_nursery() as nursery:
        for seed in range(2):
            nursery.start_soon(play, 1000 + seed)
    hits = (await client.metrics())[HITS] - before
    assert hits >= 0.9 * reusable, f"{hits:.0f} of {reusable} reusable tokens were cached"
    await client.aclose()
