"""Kept sets: asked for where training cuts, kept through journal and interruptions, and never missing unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from each_case import each_case

from agentrl.algos.grpo import GRPO
from agentrl.engine.vllm_api import ChunkParser
from agentrl.errors import EngineError
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import packs
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import SamplingParams, StopReason, Task, VersionSpan
from agentrl.rollout.episode import play
from agentrl.store import TRAIN, Claim, RunStore
from agentrl.store.audit import audit
from agentrl.tokens import sampling_mask
from tests.parts.fake_engine import FakeEngine
from tests.parts.outside_audit import OutsideAuditor

from .conftest import ScriptedEnv, done, going


def set_of(token: int) -> list[int]:
    """Short for an even token, a bitmap for an odd one."""
    return [token, token + 500] if token % 2 == 0 else list(range(max(0, token - 40), token + 1))


class Cutting(FakeEngine):
    """Tells the set of each token."""

    def _chunk(self, start: int, tokens: Sequence[int]) -> Chunk:
        return replace(super()._chunk(start, tokens), columns={"kept": sampling_mask.encode(map(set_of, tokens))})


async def test_the_sets_of_a_turn_are_in_the_pack_after_a_round_trip_through_the_journal(
    store: RunStore, claim_one: Callable[..., Claim], context: Any
) -> None:
    engines = Cutting(version=1), FakeEngine(version=1)
    for engine, cuts in zip(engines, ({"top_p": 0.9, "min_p": 0.01}, {}), strict=True):
        await play(claim_one(), context(ScriptedEnv([going("more"), done()]), engine, checkpoint_tokens=4, **cuts))
        assert {request.kept for request in engine.requests} == {bool(cuts)}
    assert (engines[0].requests[0].sampling.top_p, engines[0].requests[0].sampling.min_p) == (0.9, 0.01)
    (row, *_) = store.reads.episodes("train")
    group = store.reads.group(row.group_id)
    rows = group_rows(group, GRPO(baseline="none"), step_of=store.versions.step_of, step_now=0, max_lag=0).rows
    (pack,) = packs([rows], 4096)
    of_M, ids_M = pack.ragged["kept"].sets()
    told = sum(len(turn.token_ids) for turn in group.trajectories[0].turns)
    found = [ids_M[of_M == k].tolist() for k in range(len(pack.target_K))]
    assert found[:told] == [set_of(token) for token in pack.target_K[:told].tolist()]
    assert not any(found[told:])  # drawn from all
    assert audit(store).violations == []
    assert not OutsideAuditor(store.path).look()


async def test_a_turn_that_goes_on_elsewhere_keeps_the_sets_it_has(
    store: RunStore, claim_one: Callable[..., Claim], context: Any
) -> None:
    class Killed(BaseException):
        pass

    class Mortal(Cutting):
        """Its caller dies after the second chunk."""

        def _chunk(self, start: int, tokens: Sequence[int]) -> Chunk:
            if start >= 8:
                raise Killed
            return super()._chunk(start, tokens)

    def place(engine: FakeEngine) -> Any:
        return context(ScriptedEnv([done()]), engine, checkpoint_tokens=4, max_tokens_per_turn=12, top_k=5)

    long = [100 + i for i in range(12)]
    first = claim_one("first", now=0.0)
    with pytest.raises(Killed):
        await play(first, place(Mortal(lambda _: long, version=1)))
    second = next(c for c in store.leases.claim("second", 2, lease_s=10, now=999.0) if c.episode_id == first.episode_id)
    assert second.partial is not None and sampling_mask.decode(second.partial.columns["kept"]) == [
        tuple(set_of(token)) for token in long[:8]
    ]
    assert (await play(second, place(Cutting(lambda _: long, version=1)))).stop_reason is StopReason.DONE
    (turn,) = store.reads.trajectory(first.episode_id).turns
    assert sampling_mask.decode(turn.columns["kept"]) == [tuple(set_of(token)) for token in long]


async def test_an_engine_that_keeps_the_sets_to_itself_trains_nothing(
    claim_one: Callable[..., Claim], context: Any
) -> None:
    ending = await play(claim_one(), context(ScriptedEnv([done()]), FakeEngine(version=1), top_p=0.9))
    assert ending.stop_reason is StopReason.ENGINE_FAILED
    assert ending.detail == ("the engine does not say which set each token was drawn from: sample without cuts from it")


async def test_an_evaluation_is_sampled_its_own_way_and_needs_no_sets(
    store: RunStore, claim_one: Callable[..., Claim], context: Any
) -> None:
    store.groups.add_groups([Task(index=0, env="test/scripted", seed=0)], size=1, purpose="eval:x:before")
    (measured,) = store.leases.claim("w", 1, lease_s=10, now=0.0)
    assert measured.purpose != TRAIN
    engine = FakeEngine(version=1)
    place = context(ScriptedEnv([done()]), engine, top_p=0.9, stop=["END"])
    greedy = replace(place.settings.sampling, temperature=0.0)
    assert (await play(measured, replace(place, eval_sampling=greedy))).stop_reason is StopReason.DONE
    (request,) = engine.requests
    assert (request.sampling.temperature, request.sampling.stop, request.kept) == (0.0, ("END",), False)


ASKED = GenerateRequest(
    request_id="r", session="s", token_ids=(1,), sampling=SamplingParams(max_tokens=9, top_p=0.5), kept=True
)


def answer(tokens: list[int], sets: object, logprobs: list[float] | None = None) -> dict[str, Any]:
    content = [{"logprob": logprob} for logprob in logprobs or [-0.5] * len(tokens)]
    choice = {"token_ids": tokens, "logprobs": {"content": content}, "finish_reason": None, "sampling_mask": sets}
    return {"choices": [choice]}


def test_a_servers_sets_become_a_column() -> None:
    chunk = ChunkParser(1, ASKED, 64).parse(answer([7, 40], [[7, 40], [40]]))
    assert chunk is not None and sampling_mask.decode(chunk.columns["kept"]) == [(7, 40), (40,)]
    unasked = ChunkParser(1, replace(ASKED, kept=False), 64).parse(answer([7], [[7]]))
    assert unasked is not None and not unasked.columns


def test_sets_go_with_the_tokens_before_a_log_prob_that_cannot_be() -> None:
    chunk = ChunkParser(1, ASKED, 64).parse(answer([7, 8], [[7, 9], []], [-0.5, -9999.0]))
    assert chunk is not None and chunk.token_ids == (7,) and sampling_mask.decode(chunk.columns["kept"]) == [(7, 9)]


@each_case(
    ("sets", "wrong"),
    [
        (None, "sent 2 tokens with no sets that they were drawn from"),
        ([[7]], "sent 2 tokens with 1 sets that they were drawn from"),
        ([[7], [9]], "drew token 8 from a set that does not hold it"),
        ([[7], []], "drew token 8 from a set that does not hold it"),
        ([[7], [8, 64]], "drew from a set with token 64: the model has 64"),
        ([[7], [8, 8]], "names a token twice"),
        ([[7], [8, -1]], "not one of token ids"),
        ([[7], [8, 9.5]], "not one of token ids"),
        ([[7], [8, None]], "unknown shape"),
        ([[7], 8], "unknown shape"),
    ],
)
def test_a_set_that_cannot_be_is_the_engines_fault(sets: object, wrong: str) -> None:
    with pytest.raises(EngineError, match=wrong):
        ChunkParser(1, ASKED, 64).parse(answer([7, 8], sets))


def test_a_set_costs_a_bit_for_each_token_of_the_vocabulary_at_most() -> None:
    for count in (1, 2, 40, 3000, 100_000):
        ids = list(range(0, 100_000, 100_000 // count))
        numbers = sampling_mask.encode([ids])
        assert sampling_mask.decode(numbers) == [tuple(ids)]
        assert len(numbers) <= min(len(ids), 100_000 // 32) + 1


def test_an_engines_chunk_is_cut_with_its_sets() -> None:
    """A stop text that began at another engine ends the turn within a chunk."""
    from agentrl.engine.router.turn_request import TurnRequest

    request = replace(ASKED, sampling=SamplingParams(max_tokens=9, top_p=0.5, stop=("bc",)))
    turn = TurnRequest(request, decode=lambda ids: "".join(chr(97 + id) for id in ids))
    sets = [list(range(70)), [2, 99], [3]]
    turn.rest()
    turn.take(Chunk(token_ids=(1,), logprobs=(-1.0,), spans=(VersionSpan(1, 0, 1),), columns={"kept": (1, 1)}))
    turn.rest()
    whole = Chunk(token_ids=(2, 3), logprobs=(-1.0, -1.0), spans=(VersionSpan(1, 0, 2),))
    taken = turn.take(replace(whole, columns={"kept": sampling_mask.encode(sets[:2])}))
    assert taken.token_ids == (2,) and sampling_mask.decode(taken.columns["kept"]) == [tuple(range(70))]
