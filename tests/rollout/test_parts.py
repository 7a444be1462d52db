"""Tokens on their way to a store that takes its time: none is lost or written twice, and one part is under way."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import trio
from each_case import each_case
from trio.testing import MockClock

from agentrl.errors import DiskFull, LeaseLost
from agentrl.protocols import Chunk, GenerateRequest
from agentrl.records import Generation, SamplingParams, VersionSpan
from agentrl.rollout.generate_turn import sample
from agentrl.store import Partial
from agentrl.store.databases.calls_together import Result

TOKENS = 12


@dataclass
class Part:
    part: Partial
    result: Result | None = None


@dataclass
class Slow:
    """Notes each part; `outcomes[k]` becomes of part k once chunk number `when` of the turn comes."""

    outcomes: dict[int, Exception | None] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)

    def __call__(self, part: Partial) -> Part:
        assert all(one.result is not None for one in self.parts), "one part at a time"
        self.parts.append(Part(part))
        return self.parts[-1]

    def settle(self) -> None:
        for number, one in enumerate(self.parts):
            one.result = one.result or Result(error=self.outcomes.get(number))

    @property
    def written(self) -> dict[int, int]:
        """The token at each place that is written."""
        return {
            one.part.at + at: token
            for one in self.parts
            if one.result is not None and one.result.error is None
            for at, token in enumerate(one.part.token_ids)
        }


class Engine:
    """Sends one token a chunk; the store settles after every `settles` chunks. Stops for ever at chunk `halts`."""

    def __init__(self, keep: Slow, settles: int, halts: int = TOKENS) -> None:
        self.keep, self.settles, self.halts, self.sent = keep, settles, halts, 0

    async def generate(self, request: GenerateRequest) -> Generation:
        assert request.on_chunk is not None
        for at in range(self.halts):
            self.sent += 1
            request.on_chunk(Chunk(token_ids=(100 + at,), logprobs=(-1.0,), spans=(VersionSpan(1, 0, 1),)))
            if (at + 1) % self.settles == 0:
                self.keep.settle()
        if self.halts < TOKENS:
            await trio.sleep_forever()
        tokens = tuple(range(100, 100 + TOKENS))
        return Generation(
            token_ids=tokens, logprobs=(-1.0,) * TOKENS, spans=(VersionSpan(1, 0, TOKENS),), finish="length"
        )


async def play(engine: Engine, keep: Slow, every: int = 2) -> Generation:
    request = GenerateRequest(
        request_id="r", session="s", token_ids=(1,), sampling=SamplingParams(max_tokens=TOKENS), deadline_s=60.0
    )
    begun = Partial(index=0, parent=None, prompt_ids=(1,))
    return await sample(engine, request, begun, decode=lambda _: "", keep=keep, every=every)  # type: ignore[arg-type]


@each_case("settles", [1, 2, 3, 5])
async def test_while_a_part_is_written_the_tokens_that_come_wait_for_the_next_one(settles: int) -> None:
    keep = Slow()
    await play(Engine(keep, settles), keep)
    keep.settle()
    assert [keep.written[at] for at in range(len(keep.written))] == [100 + at for at in range(len(keep.written))]
    assert len(keep.written) >= TOKENS - settles - 2
    assert sum(len(one.part.token_ids) for one in keep.parts) == len(keep.written), "none is written twice"


async def test_tokens_that_a_full_disk_refused_go_with_the_next_part() -> None:
    keep = Slow({0: DiskFull("full"), 1: DiskFull("full")})
    await play(Engine(keep, 2), keep)
    keep.settle()
    assert [one.part.at for one in keep.parts[:3]] == [0, 0, 0]
    assert [len(one.part.token_ids) for one in keep.parts[:3]] == [1, 3, 5]
    assert keep.written[0] == 100
    assert sorted(keep.written) == list(range(len(keep.written)))


async def test_a_turn_whose_episode_was_lost_ends_at_the_next_chunk() -> None:
    keep = Slow({1: LeaseLost("claimed anew")})
    engine = Engine(keep, 1)
    with pytest.raises(LeaseLost, match="claimed anew"):
        await play(engine, keep)
    assert engine.sent <= 4


async def test_an_interrupted_turn_gives_the_rest_also_while_a_part_is_under_way(autojump_clock: MockClock) -> None:
    keep = Slow()
    engine = Engine(keep, TOKENS + 1, halts=6)
    with trio.move_on_after(0.01):
        await play(engine, Late(keep))
    keep.settle()
    assert [keep.written[at] for at in range(6)] == [100, 101, 102, 103, 104, 105]
    assert [one.part.at for one in keep.parts] == [0, 1]


class Late(Slow):
    """Passes parts on, without asking whether the last one is settled."""

    def __init__(self, keep: Slow) -> None:
        self.keep = keep

    def __call__(self, part: Partial) -> Part:
        self.keep.parts.append(Part(part))
        return self.keep.parts[-1]
