"""The rules in memory are those of the run store: on random schedules both admit, close, take and drop the same."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from agentrl.planning.simulate.memory import MemoryBuffer, SimulatedMember, ids
from agentrl.records import GroupState, StopReason, Task, Turn, VersionSpan
from agentrl.store import FULL, Claim, ClosePolicy, Ending, Quorum, RunStore
from agentrl.store.buffer.admission import AdmissionBounds
from agentrl.store.buffer.group_order import OLDEST

DEADLINE_S = 50.0


class Pair:
    """A real store and the rules in memory, driven side by side; every answer is compared."""

    def __init__(
        self,
        folder: str,
        policy: ClosePolicy,
        chance: random.Random,
        seen: Counter[str],
        bounds: AdmissionBounds,
    ) -> None:
        self.now = 1000.0
        self.store = RunStore.create(Path(folder) / "store.sqlite", "{}", clock=lambda: self.now)
        self.memory = MemoryBuffer()
        self.policy, self.bounds = policy, bounds
        self.step = 0
        self.playing: list[tuple[Claim, SimulatedMember, int]] = []
        self.acted: dict[int, int] = {}  # by member whose environment has yet to answer: the step of its tokens
        self.chance, self.skipped = chance, list[int]()  # groups that the next step has skipped so far
        self.seen = seen
        self.serve()

    def serve(self) -> None:
        version = self.store.versions.mint_version(self.step)
        self.store.versions.confirm_version(version)
        self.memory.step = self.step

    def admit(self) -> None:
        first = self.store.groups.tasks_started()
        tasks = [Task(index=first + ahead, env="t", seed=0) for ahead in range(50)]
        n = self.store.groups.admit(tasks, first=first, bounds=self.bounds, limit=50)
        groups = self.memory.admit(self.bounds)
        assert n == len(groups)
        for group in groups:  # a member without siblings is judged by nobody
            group.silent = len(group.members) == 1 or self.chance.random() < 0.3

    def claim(self, limit: int) -> None:
        claims = self.store.leases.claim("worker", limit, lease_s=1e9, now=self.now)
        members = self.memory.claim(limit, self.now)
        assert [claim.episode_id for claim in claims] == ids(members)
        self.playing += [(claim, member, self.step) for claim, member in zip(claims, members, strict=True)]
        for claim in claims:
            self.store.journal.begin(claim.episode_id, claim.fence, ({"role": "user", "content": ""},))

    def act(self, at: int) -> None:
        """A member samples its tokens, and its environment does not answer yet."""
        claim, member, _ = self.playing[at % len(self.playing)]
        if not member.ended and member.id not in self.acted:
            self.acted[member.id] = self.step
            self.sample(claim, self.step, self.step)

    def sample(self, claim: Claim, oldest: int, newest: int) -> None:
        made = {self.store.versions.step_of(version): version for version in range(1, self.step + 2)}
        spans = (VersionSpan(made[oldest], 0, 1), VersionSpan(made[newest], 1, 2))
        turn = Turn(
            index=0,
            parent=None,
            prompt_ids=(1,),
            token_ids=(2, 2),
            logprobs=(-1.0, -1.0),
            spans=spans if newest != oldest else (VersionSpan(made[oldest], 0, 2),),
            finish="stop",
            text="",
        )
        self.store.journal.journal_turn(claim.episode_id, claim.fence, turn)

    def finish(self, at: int, scored: bool, old: bool) -> None:
        claim, member, oldest = self.playing.pop(at % len(self.playing))
        acted = self.acted.pop(member.id, None)
        if member.ended:  # it expired
            return
        newest = oldest if old else self.step
        if acted is None:
            self.sample(claim, oldest, newest)
        else:
            oldest = newest = acted
        reason = StopReason.DONE if scored else StopReason.ENV_FAILED
        group = member.group
        outcome = (1.0 if group.silent else 1.0 + group.members.index(member)) if scored else None
        self.store.journal.finish(
            claim.episode_id, claim.fence, Ending(stop_reason=reason, outcome=outcome, success=None)
        )
        self.memory.finish(member, self.now, newest=newest, oldest=oldest, scored=scored)
        if scored and group.running and len(group.scored_s) == self.policy.at_least:
            self.memory.quorate(group)

    def expire(self) -> None:
        wanted = self.store.buffer.expire(self.now, DEADLINE_S, close_policy=self.policy)
        assert self.memory.expire(self.now, DEADLINE_S, close_policy=self.policy) == wanted
        for what, found in zip(("closed early", "group expired", "member expired"), wanted, strict=True):
            self.seen[what] += len(found)

    def at_bound(self) -> None:
        step, max_lag = self.step + 1, self.bounds.max_lag
        quorum = None if self.policy == FULL else self.policy.at_least
        wanted = self.store.buffer.at_bound(step, max_lag=max_lag, quorum=quorum)
        found = self.memory.at_bound(step, max_lag=max_lag, quorum=quorum, acts=lambda one: self.acted.get(one.id))
        assert (found.episodes > 0, found.closable) == (wanted.episodes > 0, wanted.closable)
        self.seen["waited for"] += wanted.episodes > 0
        self.seen["closable"] += wanted.closable

    def take(self, n: int, least: int | None, skips: int) -> None:
        expired, running = self.memory.counts[GroupState.EXPIRED], self.memory.counts[GroupState.RUNNING]
        step, max_lag = self.step + 1, self.bounds.max_lag
        wanted = self.store.buffer.take(
            step, n, max_lag=max_lag, order=OLDEST, close_at_bound=least, skip_at_most=skips
        )
        found = self.memory.take(step, n, max_lag=max_lag, close_at_bound=least, skip_at_most=skips)
        self.skipped += [group.id for group in self.memory.skipped]
        self.seen["closed at the bound"] += running - self.memory.counts[GroupState.RUNNING]
        assert (found is None) == (wanted is None)
        self.seen["skipped"] += len(self.memory.skipped)
        self.seen["group stale"] += self.memory.counts[GroupState.EXPIRED] - expired - len(self.memory.skipped)
        for ours, theirs in zip(found or [], [one for one in wanted or [] if not one.skipped], strict=True):
            assert ours.group.id == theirs.id
            assert ids(ours.trained) == [one.episode_id for one in theirs.trajectories]
            assert ids(ours.left_out) == [one.episode_id for one in theirs.left_out]
            assert theirs.record is not None
            record = {member.id for place, member in enumerate(ours.group.members) if place in theirs.record}
            assert record == ours.group.recorded
            self.seen["trained"] += len(ours.trained)
            self.seen["trained late"] += sum(member.late for member in ours.trained)
            self.seen["left out"] += len(ours.left_out)
        if wanted is not None:
            assert [one.id for one in wanted if one.skipped] == sorted(self.skipped)
            self.skipped = []
            self.step += 1
            self.serve()

    def compare(self) -> None:
        assert {state: n for state, n in self.memory.counts.items() if n} == self.store.groups.counts()


def play(seed: int, seen: Counter[str]) -> None:
    chance = random.Random(seed)
    size = chance.randint(1, 4)
    quorums = [Quorum(k, chance.choice([0.0, 5.0])) for k in range(2, size + 1)]
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(
            folder,
            chance.choice([FULL, *quorums]),
            chance,
            seen,
            AdmissionBounds(
                group_size=size,
                groups_per_step=chance.randint(1, 3),
                max_lag=chance.randint(0, 2),
                max_running=chance.randint(size, 12),
                steps_total=chance.randint(3, 30),
            ),
        )
        for _ in range(chance.randint(20, 80)):
            pair.now += chance.choice([0.0, 1.0, 7.0, 60.0])
            match chance.choice(["admit", "claim", "act", "finish", "finish", "finish", "expire", "take"]):
                case "admit":
                    pair.admit()
                case "claim":
                    pair.claim(chance.randint(1, 12))
                case "finish" if pair.playing:
                    pair.finish(chance.randrange(99), scored=chance.random() < 0.8, old=chance.random() < 0.5)
                case "take":
                    pair.at_bound()
                    n, least = chance.randint(0, pair.bounds.groups_per_step), chance.choice([None, 0, 3])
                    pair.take(n, least, chance.choice([0, 0, 1, 9]))
                case "act" if pair.playing:
                    pair.act(chance.randrange(99))
                case _:
                    pair.expire()
            pair.compare()
        pair.store.close()


@pytest.mark.medium
def test_on_any_schedule_the_rules_in_memory_decide_as_the_store_does() -> None:
    seen = Counter[str]()
    for seed in range(100):
        play(seed, seen)
    met = {"trained", "trained late", "left out", "closed early", "group expired", "member expired", "group stale"}
    met |= {"waited for", "closable", "skipped"}
    assert met <= {what for what, n in seen.items() if n >= 5}, seen
    assert seen["closed at the bound"]
