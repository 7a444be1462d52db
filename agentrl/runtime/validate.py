"""`agentrl validate`: plays an environment's oracles for real and says whether each got its expected outcome.

Owns the count over seeds. `agentrl.env.oracles` defines an oracle and plays one episode of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import trio

from agentrl.env import as_async
from agentrl.env.oracles import Verdict, judge
from agentrl.errors import EnvError, UsageError, boundary
from agentrl.protocols import AsyncEnv
from agentrl.records import Json
from agentrl.registration import make


@dataclass(slots=True)
class Tally:
    """An oracle over all tasks: its expected outcome, how many episodes it played, and how many of them `held`, so had
    this outcome. `missed` has the actual outcome of the others by seed; `turns` is the sum over all episodes."""

    name: str
    expected: float
    episodes: int = 0
    held: int = 0
    turns: int = 0
    missed: dict[int, float | None] = field(default_factory=dict[int, "float | None"])

    def count(self, seed: int, verdict: Verdict) -> None:
        self.episodes += 1
        self.turns += verdict.turns
        if verdict.holds:
            self.held += 1
        else:
            self.missed[seed] = verdict.got


def validate(env_id: str, *, seeds: Sequence[int], kwargs: Mapping[str, Json]) -> list[Tally]:
    """Play all oracles of the task of each seed, some seeds at the same time. Raises UnknownIdError, UsageError if the
    environment offers no oracles, InfrastructureError if its host fails."""
    return trio.run(_validate, lambda: as_async(make(env_id, **kwargs)), env_id, seeds)


async def _validate(new: Callable[[], AsyncEnv], env_id: str, seeds: Sequence[int]) -> list[Tally]:
    verdicts: dict[int, list[Verdict]] = {}
    broken: list[Exception] = []
    slots = trio.CapacityLimiter(os.cpu_count() or 1)

    async def play(seed: int) -> None:
        async with slots:
            try:
                with boundary(EnvError, f"{env_id}, seed {seed}: raised", place=True):
                    verdicts[seed] = await judge(new, seed)
            except Exception as error:  # raised below, without its group: the first failure is enough
                broken.append(error)
                nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for seed in seeds:
            nursery.start_soon(play, seed)
    if broken:
        raise broken[0]
    tallies: dict[tuple[str, float], Tally] = {}
    for seed in seeds:
        if not verdicts[seed]:
            raise UsageError(
                f"{env_id} offers no oracles: write a method oracles() as agentrl.env.oracles describes it"
            )
        for verdict in verdicts[seed]:
            key = verdict.name, verdict.expected
            tallies.setdefault(key, Tally(*key)).count(seed, verdict)
    return list(tallies.values())
