"""One run in virtual time: episodes take drawn times on so many slots, the learner takes drawn times for its steps.

Owns the clock, the slots and the weights of each moment, and counts what came of every token. The rules on groups are
those of `memory`; never knows how a time is drawn.

    admit ─► claim (a free slot) ─► drawn episode ─► finish ─► close ─► take ─► drawn step ─► weights served ─► admit
"""

from __future__ import annotations

import heapq
import math
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from agentrl.planning.simulate.memory import MemoryBuffer, SimulatedMember, Taken
from agentrl.planning.simulate.policies import Policy
from agentrl.planning.simulate.service import Episodes, Play, Steps
from agentrl.records import GroupState
from agentrl.store.buffer.admission import AdmissionBounds
from agentrl.store.buffer.closing import Patience

_ALMOST = 1e-6  # seconds that a timer comes late, so that rounding never makes it early
Spans = list[tuple[int, int]]  # step of the weights that sampled, number of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedWorld:
    """Conditions of a simulated run. `slots`: episodes at once; `push_s`: from the end of a step until its weights are
    served; `between_s`: what the learner does between two steps that is neither step nor waiting; `skip_at_most`: times
    `groups_per_step`, the groups without signal that leave for a step."""

    episodes: Episodes
    learner: Steps
    slots: int
    group_size: int
    groups_per_step: int
    group_deadline_s: float = math.inf
    push_s: float = 0.0
    between_s: float = 0.0
    skip_at_most: float = 0.0


class Share(NamedTuple):
    """Trained shares of a set of episodes, which end in the loss if nothing makes them too old: how many were trained,
    and how many of their tokens. `least` is the share of episodes that were too old already when they ended, at the
    pace of this run."""

    episodes: float
    tokens: float
    least: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """Result of a simulated run. Shares are in [0, 1], times in seconds, ages in optimizer steps.

    Throughput and idle share are of the steps after the start-up. All else is of the groups that were admitted for
    these steps, whatever became of them: tokens and episodes played, and which of them were trained. A group that left
    without signal is neither trained nor discarded; it counts in the bound and in `played_s`. A token is unavoidable if
    it was too old for the next step already when its own episode ended. An outcome is discarded if its episode is
    neither trained nor judges its siblings. `held`: the share of the learner's time in which it could go on and waits
    at the lag bound. `by_length`: what was trained of each quarter of the episodes, the shortest in seconds first;
    `longest`: of the longest hundredth."""

    seconds: float
    episodes_s: float  # trained episodes a second
    bound_s: float  # episodes a second that slots or learner allow, whichever is less
    idle: float
    age_mean: float
    age_p99: int
    tokens_discarded: float
    tokens_unavoidable: float
    episodes_discarded: float
    outcomes_discarded: float
    played_s: float
    trained_s: float
    held: float
    by_length: tuple[Share, Share, Share, Share]
    longest: Share

    @property
    def of_bound(self) -> float:
        return self.episodes_s / self.bound_s

    @property
    def useful(self) -> float:
        """Tokens trained in a second, in units of an episode's."""
        return self.episodes_s * (1 - self.tokens_discarded) / max(1e-9, 1 - self.episodes_discarded)


class _Length(NamedTuple):
    """A scored member: tokens that were sampled, that were not too old when it ended, and that were trained."""

    seconds: float
    tokens: int
    fresh: int = 0
    trained: int = 0


@dataclass(slots=True)
class _Tally:
    """Sums over the members of the groups that are measured."""

    episodes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    unavoidable: int = 0
    skipped: int = 0
    trained: int = 0
    trained_tokens: int = 0
    trained_s: float = 0.0
    scored: int = 0
    outcomes: int = 0
    ages: Counter[int] = field(default_factory=Counter[int])
    members: dict[int, _Length] = field(default_factory=dict[int, _Length])


class Simulation:
    """A run of `steps` steps, of which the first `start_up` are not measured. Runs once."""

    def __init__(self, world: SimulatedWorld, policy: Policy, *, steps: int, start_up: int, seed: int = 0) -> None:
        self._world, self._policy = world, policy
        self._steps, self._start_up = steps, start_up
        # Two generators, so that all policies of a sweep see the same episodes: with one, a policy that steps more
        # often would draw other plays, and differences between rows would be chance.
        self._plays, self._learner_chance = Random(seed), Random(seed + 1)
        self._buffer = MemoryBuffer()
        self._bounds = AdmissionBounds(
            group_size=world.group_size,
            groups_per_step=world.groups_per_step,
            max_lag=policy.max_lag,
            max_running=world.slots,
            steps_total=1 << 40,  # the run's end changes nothing that is measured
        )
        self._now = 0.0
        self._free = world.slots
        self._events: list[tuple[float, int, SimulatedMember | str]] = []
        self._order = 0
        self._play: dict[int, Play] = {}
        self._began: dict[int, float] = {}
        self._spans: dict[int, Spans] = {}
        self._too_old: dict[int, int] = {}  # tokens of members that are measured, when they ended
        self._skip_at_most = math.ceil(world.skip_at_most * world.groups_per_step)
        self._served = [0.0]  # when the weights of each step were served first
        self._step = 0  # the last one that was taken
        self._busy = False
        self._waits_since = self._pushed_at = 0.0
        self._patience = None if policy.wait is None else Patience(policy.wait)
        self._held_before_s = 0.0  # of the start-up
        self._idle_s = self._busy_s = self._measured_from = 0.0
        self._trained = 0
        first = start_up * world.groups_per_step
        # Counted by admission and not by step: a group that is dropped never meets a step, and would be missing in
        # exactly the number that a policy is judged by.
        self._cohort = range(first + 1, max(first + 2, (steps - policy.max_lag - 1) * world.groups_per_step + 1))
        self._sums = _Tally()

    def run(self) -> SimulationResult:
        """Play until the last step has ended."""
        self._fill()
        while self._step < self._steps or self._busy:
            if not self._events:  # nothing runs, and nothing may start
                # A deadlock of the rules, which a real run would meet too: it is a fault to be seen, and not a case
                # to be ended quietly.
                raise RuntimeError("a simulated run stands still")
            self._now, _, event = heapq.heappop(self._events)
            if isinstance(event, SimulatedMember):
                self._end(event)
            elif event == "step":
                self._end_step()
            elif event == "served":
                self._buffer.step = len(self._served)
                self._served.append(self._now)
            else:
                self._expire()
            self._fill()
            if not self._busy and self._step < self._steps:
                self._take()
                if self._buffer.skipped:  # others take their place
                    self._fill()
        return self._result()

    def _at(self, time_s: float, what: SimulatedMember | str) -> None:
        self._order += 1
        # The order breaks ties, so that events at one time come as they were put in: members do not compare, and a
        # run must repeat itself.
        heapq.heappush(self._events, (time_s, self._order, what))

    # --- episodes

    def _fill(self) -> None:
        if self._free <= 0:
            return
        for group in self._buffer.admit(self._bounds):
            plays = self._world.episodes.group(len(group.members), self._plays)
            self._play.update(zip((member.id for member in group.members), plays, strict=True))
            group.silent = plays[0].silent
            if group.id in self._cohort:
                self._sums.episodes += len(plays)
                self._sums.tokens += sum(play.tokens for play in plays)
                self._sums.seconds += sum(play.duration_s for play in plays)
                self._sums.scored += sum(play.scored for play in plays)
                for member, play in zip(group.members, plays, strict=True):
                    if play.scored:
                        self._sums.members[member.id] = _Length(play.duration_s, play.tokens)
        self._claim()

    def _claim(self) -> None:
        deadline_s = self._world.group_deadline_s
        for member in self._buffer.claim(self._free, self._now):
            self._free -= 1
            self._began[member.id] = self._now
            self._at(self._now + self._play[member.id].duration_s, member)
            if member is member.group.members[0] and deadline_s < math.inf:
                self._at(self._now + deadline_s + _ALMOST, "timer")
                self._at(self._now + 2 * deadline_s + _ALMOST, "timer")

    def _end(self, member: SimulatedMember) -> None:
        if member.ended:  # it expired, or was cancelled
            return
        self._free += 1
        play, group = self._play[member.id], member.group
        spans = self._sampled(member)
        self._spans[member.id] = spans
        newest, oldest = (spans[-1][0], spans[0][0]) if spans else (None, None)
        self._buffer.finish(member, self._now, newest=newest, oldest=oldest, scored=play.scored)
        if group.id in self._cohort:
            fresh = sum(n for sampled_step, n in spans if self._step - sampled_step <= self._policy.max_lag)
            self._too_old[member.id] = play.tokens - fresh
            self._sums.unavoidable += play.tokens - fresh
            if play.scored:
                self._sums.members[member.id] = _Length(play.duration_s, play.tokens, fresh)
        policy = self._policy.close
        if play.scored and group.running and len(group.scored_s) == policy.at_least:
            self._buffer.quorate(group)
            after_s: float = getattr(policy, "after_s", 0.0)
            if after_s:
                self._at(self._now + after_s + _ALMOST, "timer")
            else:
                self._expire()

    def _expire(self) -> None:
        running = self._buffer.running_episodes
        self._buffer.expire(self._now, self._world.group_deadline_s, close_policy=self._policy.close)
        self._free += running - self._buffer.running_episodes

    def _sampled(self, member: SimulatedMember) -> Spans:
        """Return the weights that sampled the tokens of an episode: each token the ones that were served when it
        began."""
        served, began, play = self._served, self._began[member.id], self._play[member.id]
        spans: Spans = []
        for start_s, end_s, n in play.turns:
            start, end = began + start_s, began + end_s
            # Weights that arrive in the moment a token begins count for it; those that arrive as the last one ends do
            # not.
            first, last = bisect_right(served, start) - 1, bisect_left(served, end) - 1
            if last <= first:  # its weights never changed
                spans.append((first, n))
                continue
            done = 0
            for version in range(first + 1, last + 1):
                # Tokens are spread evenly over a turn: one that has begun is finished under the old weights, hence
                # `ceil`.
                cut = min(n, math.ceil((served[version] - start) / (end - start) * n))
                if cut > done:
                    spans.append((version - 1, cut - done))
                done = cut
            if n > done:
                spans.append((last, n - done))
        return spans

    # --- the learner

    def _take(self) -> None:
        step, n, policy = self._step + 1, self._world.groups_per_step, self._policy
        least = self._least(step)
        if least == -1:
            return
        taken = self._buffer.take(
            step, n, max_lag=policy.max_lag, close_at_bound=least, skip_at_most=self._skip_at_most
        )
        self._note_skipped()
        if taken is None:
            return
        self._step += 1
        tokens, episodes = self._note_taken(taken)
        busy_s = self._world.learner.seconds(tokens, self._learner_chance)
        # A push overlaps the step that follows it, and that step's end waits for it: two pushes are never under way
        # at once.
        ends = max(self._now + busy_s, self._pushed_at)  # a push under way is waited for
        if self._patience is not None:
            self._patience.worked(busy_s)
        if self._step > self._start_up:
            self._idle_s += ends - busy_s - self._waits_since
            self._busy_s += busy_s
            self._trained += episodes
        self._busy = True
        self._at(ends + self._world.between_s, "step")

    def _least(self, step: int) -> int | None:
        """Return the number of scored members with which a group at the lag bound closes for `step`; -1: the learner
        waits there."""
        policy, patience = self._policy, self._patience
        if patience is None:
            return None
        buffer, waits = self._buffer, False
        if buffer.counts[GroupState.SCORED] + buffer.quorate_groups >= self._world.groups_per_step:
            bound = buffer.at_bound(step, max_lag=policy.max_lag, quorum=policy.quorum, acts=self._newest_of_waiting)
            ready = buffer.counts[GroupState.SCORED] + bound.closable >= self._world.groups_per_step
            waits = ready and bound.episodes > 0
        waited = patience.ends_s
        if patience.holds(waits, self._now):
            if waited == math.inf > patience.ends_s:
                self._at(patience.ends_s + _ALMOST, "timer")
            return -1
        return 0 if waits else policy.quorum

    def _newest_of_waiting(self, member: SimulatedMember) -> int | None:
        """The step of a member's newest token, if it has some and samples none now."""
        began = self._began.get(member.id)
        if began is None:
            return None
        ends: float | None = None
        for start_s, end_s, _ in self._play[member.id].turns:
            if began + start_s <= self._now < began + end_s:
                return None
            if began + end_s <= self._now:
                ends = began + end_s
        return None if ends is None else bisect_left(self._served, ends) - 1

    def _end_step(self) -> None:
        self._busy = False
        self._waits_since = self._now
        if self._step == self._start_up:
            self._measured_from = self._now
            self._held_before_s = 0.0 if self._patience is None else self._patience.held_s
        self._pushed_at = self._now + self._world.push_s
        self._at(self._pushed_at, "served")

    def _note_skipped(self) -> None:
        """Leave out of the sums what a step has just skipped. Late members are still trained, as in a run."""
        sums = self._sums
        for member in (
            groups_member for group in self._buffer.skipped for groups_member in group.members if not groups_member.late
        ):
            play = self._play.pop(member.id)
            if member.group.id in self._cohort:
                sums.skipped += 1
                sums.tokens -= play.tokens
                sums.scored -= play.scored
                sums.unavoidable -= self._too_old[member.id]
                sums.members.pop(member.id, None)
            for each in (self._began, self._spans, self._too_old):
                each.pop(member.id, None)

    def _note_taken(self, taken: Iterable[Taken]) -> tuple[int, int]:
        """Count what a step takes; returns how many tokens and episodes it trains."""
        tokens = episodes = 0
        for group, trained, left_out in taken:
            counts = group.id in self._cohort
            episodes += len(trained)
            for member in trained:
                fresh = 0
                for sampled_step, n in self._spans[member.id]:
                    if (age := self._step - 1 - sampled_step) <= self._policy.max_lag:
                        fresh += n
                        if counts:
                            self._sums.ages[age] += n
                tokens += fresh
                if counts:
                    self._sums.trained += 1
                    self._sums.trained_tokens += fresh
                    self._sums.members[member.id] = self._sums.members[member.id]._replace(trained=fresh)
                    self._sums.trained_s += self._play[member.id].duration_s
            if counts:
                self._sums.outcomes += len(trained) + sum(member.id in group.recorded for member in left_out)
            for member in (*trained, *left_out):
                for each in (self._play, self._began, self._spans, self._too_old):
                    each.pop(member.id, None)
        return tokens, episodes

    def _run_out(self, step_s: float) -> None:
        """Play what was admitted to its end, at one step each `step_s`: also the slowest episode is counted."""
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            # The learner has ended, and the clock of versions goes on at the pace of the run: an episode that is
            # slower than the rest must still become too old, or long ones would look trained.
            while self._served[-1] + step_s < self._now:
                self._served.append(self._served[-1] + step_s)
            self._step = max(self._step, len(self._served))
            if isinstance(event, SimulatedMember):
                self._end(event)
            else:
                self._expire()
            self._claim()
            for _ in range(2):  # the first call expires what is too old, and what has no signal
                scored = self._buffer.counts[GroupState.SCORED]
                skips = sys.maxsize if self._skip_at_most else 0
                step, lag = self._step + 1, self._policy.max_lag
                taken = self._buffer.take(step, scored, max_lag=lag, skip_at_most=skips)
                self._note_skipped()
                self._note_taken(taken or ())

    def _result(self) -> SimulationResult:
        seconds, steps, sums = self._now - self._measured_from, self._steps - self._start_up, self._sums
        world = self._world
        step_s = self._busy_s / steps + world.between_s
        trained = self._trained / seconds
        idle = self._idle_s / (self._idle_s + self._busy_s)
        self._run_out(seconds / steps)
        played_s, signal = sums.seconds / sums.episodes, 1 - sums.skipped / sums.episodes
        held_s = 0.0 if self._patience is None else self._patience.held_s - self._held_before_s
        lengths = sorted(sums.members.values())
        quarters = [_share(lengths[place * len(lengths) // 4 : (place + 1) * len(lengths) // 4]) for place in range(4)]
        return SimulationResult(
            seconds=seconds,
            episodes_s=trained,
            # What slots play at most, and what steps take at most: no schedule exceeds the smaller one.
            bound_s=min(signal * world.slots / played_s, world.groups_per_step * world.group_size / step_s),
            idle=idle,
            age_mean=sum(age * n for age, n in sums.ages.items()) / max(1, sums.ages.total()),
            age_p99=_quantile(sums.ages, 0.99),
            tokens_discarded=1 - sums.trained_tokens / sums.tokens,
            tokens_unavoidable=sums.unavoidable / sums.tokens,
            episodes_discarded=1 - sums.trained / sums.scored,
            outcomes_discarded=1 - sums.outcomes / sums.scored,
            played_s=played_s,
            trained_s=sums.trained_s / max(1, sums.trained),
            held=held_s / (self._idle_s + self._busy_s),
            by_length=(quarters[0], quarters[1], quarters[2], quarters[3]),
            longest=_share(lengths[-max(1, len(lengths) // 100) :]),
        )


def _share(members: Sequence[_Length]) -> Share:
    if not members:
        return Share(math.nan, math.nan, math.nan)
    return Share(
        episodes=sum(member.trained > 0 for member in members) / len(members),
        tokens=sum(member.trained for member in members) / max(1, sum(member.tokens for member in members)),
        least=sum(not member.fresh for member in members) / len(members),
    )


def _quantile(counts: Counter[int], share: float) -> int:
    seen = 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= share * counts.total():
            return value
    return 0
