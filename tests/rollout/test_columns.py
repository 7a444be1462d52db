"""A per-token column is registered once, and comes from the engine's chunks to the learner's pack by itself."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from each_case import each_case

from agentrl import registry
from agentrl.algos.grpo import GRPO
from agentrl.engine.generation import Stitcher
from agentrl.engine.vllm_api import ChunkParser
from agentrl.errors import EngineError, StoreError, UsageError
from agentrl.learner.data.batch import group_rows
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.data.rows import BUILT_IN
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import SamplingParams, StopReason, Turn, VersionSpan
from agentrl.rollout.episode import play
from agentrl.store import Claim, RunStore
from agentrl.store.audit import audit
from agentrl.store.codec import pack_tokens, unpack_tokens
from agentrl.tokens import columns
from agentrl.tokens.columns import Column
from tests.parts.fake_engine import FakeEngine
from tests.parts.outside_audit import OutsideAuditor

from .conftest import ScriptedEnv, done, going

ODDS = Column(name="odds", dtype="float64", default=-1.0)
PAIR = Column(name="pair", dtype="int32", shape=(2,), default=0)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    for column in (ODDS, PAIR):
        columns.register(column)


class Telling(FakeEngine):
    """Says of the token with id k: `odds` k / 3 and `pair` (k, -k)."""

    def _chunk(self, start: int, tokens: Sequence[int]) -> Chunk:
        said = {"odds": tuple(token / 3 for token in tokens), "pair": tuple(n for t in tokens for n in (t, -t))}
        return replace(super()._chunk(start, tokens), columns=said)


async def test_a_registered_column_is_in_the_pack_after_a_round_trip_through_the_journal(
    store: RunStore, claim_one: Callable[..., Claim], context: Any
) -> None:
    for engine in (Telling(version=1), FakeEngine(version=1)):  # the second says nothing of its tokens
        env = ScriptedEnv([going("more"), done()])
        await play(claim_one(), context(env, engine, checkpoint_tokens=4))
    (row, *_) = store.reads.episodes("train")
    group = store.reads.group(row.group_id)
    rows = group_rows(group, GRPO(baseline="none"), step_of=store.versions.step_of, step_now=0, max_lag=0).rows
    (pack,) = packs([rows], 4096)
    told, untold = (sum(len(turn.token_ids) for turn in member.turns) for member in group.trajectories)
    ids_K = pack.target_K
    assert pack.columns["odds"].dtype == torch.float64
    assert torch.equal(pack.columns["odds"][:told], ids_K[:told].double() / 3)
    assert torch.equal(pack.columns["pair"][:told], torch.stack([ids_K, -ids_K], 1)[:told].int())
    assert pack.columns["odds"][told:].tolist() == [-1.0] * untold
    assert pack.columns["pair"][told:].tolist() == [[0, 0]] * untold
    assert audit(store).violations == []
    assert not OutsideAuditor(store.path).look()


async def test_a_turn_that_goes_on_elsewhere_keeps_its_columns(
    store: RunStore, claim_one: Callable[..., Claim], context: Any
) -> None:
    class Killed(BaseException):
        pass

    class Mortal(Telling):
        """Its caller dies after the second chunk."""

        def _chunk(self, start: int, tokens: Sequence[int]) -> Chunk:
            if start >= 8:
                raise Killed
            return super()._chunk(start, tokens)

    def place(engine: FakeEngine) -> Any:
        return context(ScriptedEnv([done()]), engine, checkpoint_tokens=4, max_tokens_per_turn=12)

    long = [10 + i for i in range(12)]
    first = claim_one("first", now=0.0)
    with pytest.raises(Killed):
        await play(first, place(Mortal(lambda _: long, version=1)))
    second = next(c for c in store.leases.claim("second", 2, lease_s=10, now=999.0) if c.episode_id == first.episode_id)
    assert second.partial is not None and second.partial.columns["odds"] == tuple(k / 3 for k in long[:8])
    assert (await play(second, place(FakeEngine(lambda _: long, version=1)))).stop_reason is StopReason.DONE
    (turn,) = store.reads.trajectory(first.episode_id).turns
    assert turn.columns["odds"] == (*(k / 3 for k in long[:8]), *[-1.0] * 4)


def turn_with(**named: tuple[float, ...]) -> Turn:
    return Turn(
        index=0,
        parent=None,
        prompt_ids=(1,),
        token_ids=(5, 6),
        logprobs=(-1.0, -0.1),
        spans=(VersionSpan(1, 0, 2),),
        finish="stop",
        text="",
        columns=named,
    )


def test_a_store_is_read_where_its_columns_are_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    blob = pack_tokens(turn_with(odds=(0.1, 0.2), kept=(2, 5, 9, -1, 64), pair=(1, 2, 3, 4)))
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    assert unpack_tokens(blob)[3] == {"odds": (0.1, 0.2), "kept": (2, 5, 9, -1, 64), "pair": (1, 2, 3, 4)}


def test_a_blob_of_an_older_store_has_no_columns() -> None:
    import zstandard

    older = struct.pack("<BII3I2f", 4, 1, 2, 1, 5, 6, -1.0, -0.5)  # as written before there were columns
    assert unpack_tokens(zstandard.compress(older)) == ((1,), (5, 6), (-1.0, -0.5), {})


@each_case(
    ("named", "wrong"),
    [
        ({"odds": (0.1,)}, "column 'odds' has 1 numbers for 2 tokens, should have 2"),
        ({"pair": (1, 2)}, "column 'pair' has 2 numbers for 2 tokens, should have 4"),
        ({"kept": (2, 5, 9)}, "column 'kept' has 3 numbers for 2 tokens, should have 4"),
        ({"kept": (-3, 5)}, "column 'kept' has 2 numbers for 2 tokens, should have 5"),
        ({"kept": (1, 5, 1, 6, 0)}, "column 'kept' has 5 numbers for 2 tokens, should have 4"),
        ({"evens": (0.1, 0.2)}, "no columns id 'evens' is registered; known: odds, pair"),
        ({"pair": (1, 2, 3, 2**40)}, "cannot be written"),
    ],
)
def test_a_column_that_does_not_fit_is_refused(named: dict[str, tuple[float, ...]], wrong: str) -> None:
    with pytest.raises(StoreError, match=wrong):
        pack_tokens(turn_with(**named))


def test_a_chunk_whose_column_misses_a_token_is_the_engines_fault() -> None:
    with pytest.raises(EngineError, match="a chunk's columns do not fit: column 'odds' has 1 numbers for 2 tokens"):
        Stitcher().add(Chunk(token_ids=(1, 2), logprobs=(-1.0, -1.0), spans=(), columns={"odds": (1.0,)}))


def test_a_server_adds_columns_to_the_entries_of_its_log_probs() -> None:
    asked = GenerateRequest(request_id="r", session="s", token_ids=(1,), sampling=SamplingParams(max_tokens=4))
    content = [{"logprob": -0.5, "odds": 0.25, "pair": [3, 4]}, {"logprob": -0.25, "odds": 1, "pair": [5, 6], "x": 9}]
    answer = {"choices": [{"token_ids": [7, 8], "logprobs": {"content": content}, "finish_reason": None}]}
    chunk = ChunkParser(1, asked).parse(answer)
    assert chunk is not None and chunk.columns == {"odds": (0.25, 1), "pair": (3, 4, 5, 6)}


def test_a_column_that_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="letters, digits and underscores"):
        Column(name="a b")
    with pytest.raises(UsageError, match="int32 has no nan: give it a whole default"):
        Column(name="marks", dtype="int32")
    for wrong in ({"dtype": "float32"}, {"shape": (2,)}, {"default": 1}):
        with pytest.raises(UsageError, match="a ragged one holds whole numbers, with default 0 and no shape"):
            Column(name="bag", ragged=True, **{"dtype": "int32", "default": 0, **wrong})
    for taken in (
        *BUILT_IN,
        "proximal",
        "values",
        "kept",
    ):  # a second column of that name would stand for the learner's
        with pytest.raises(UsageError, match=f"^column '{taken}': .* give it another name"):
            Column(name=taken, default=0)


def test_a_package_offers_a_column_by_an_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_columns.py").write_text(
        "from agentrl.tokens.columns import Column\nTEACHER = Column(name='teacher_logprobs', default=0.0)\n"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[agentrl.columns]\nteacher_logprobs = their_columns:TEACHER\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._offered.cache_clear()
    try:
        assert columns.column("teacher_logprobs") == Column(name="teacher_logprobs", default=0.0)
        assert columns.known().keys() == {"odds", "pair", "teacher", "teacher_logprobs"}
    finally:
        registry._offered.cache_clear()
