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
        cohort_start = start_up * world.groups_per_step
        # Counted by admission and not by step: a group that is dropped never meets a step, and would be missing in
        # exactly the number that a policy is judged by.
        cohort_end = (steps - policy.max_lag - 1) * world.groups_per_step
        self._cohort = range(cohort_start + 1, max(cohort_start + 2, cohort_end + 1))
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
            group_plays = self._world.episodes.group(len(group.members), self._plays)
            self._play.update(zip((member.id for member in group.members), group_plays, strict=True))
            group.silent = group_plays[0].silent
            if group.id in self._cohort:
                self._sums.episodes += len(group_plays)
                self._sums.tokens += sum(play.tokens for play in group_plays)
                self._sums.seconds += sum(play.duration_s for play in group_plays)
                self._sums.scored += sum(play.scored for play in group_plays)
                for member, play in zip(group.members, group_plays, strict=True):
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
        member_play, group = self._play[member.id], member.group
        member_spans = self._sampled(member)
        self._spans[member.id] = member_spans
        newest_step, oldest_step = (member_spans[-1][0], member_spans[0][0]) if member_spans else (None, None)
        self._buffer.finish(member, self._now, newest=newest_step, oldest=oldest_step, scored=member_play.scored)
        if group.id in self._cohort:
            oldest_fresh = self._step - self._policy.max_lag
            fresh_tokens = sum(count for sampled_step, count in member_spans if sampled_step >= oldest_fresh)
            self._too_old[member.id] = member_play.tokens - fresh_tokens
            self._sums.unavoidable += member_play.tokens - fresh_tokens
            if member_play.scored:
                self._sums.members[member.id] = _Length(member_play.duration_s, member_play.tokens, fresh_tokens)
        close_policy = self._policy.close
        if member_play.scored and group.running and len(group.scored_s) == close_policy.at_least:
            self._buffer.quorate(group)
            after_s: float = getattr(close_policy, "after_s", 0.0)
            if after_s:
                self._at(self._now + after_s + _ALMOST, "timer")
            else:
                self._expire()

    def _expire(self) -> None:
        running_before = self._buffer.running_episodes
        self._buffer.expire(self._now, self._world.group_deadline_s, close_policy=self._policy.close)
        self._free += running_before - self._buffer.running_episodes

    def _sampled(self, member: SimulatedMember) -> Spans:
        """Return the weights that sampled the tokens of an episode: each token the ones that were served when it
        began."""
        served_at, began_at, member_play = self._served, self._began[member.id], self._play[member.id]
        member_spans: Spans = []
        for start_s, end_s, token_count in member_play.turns:
            turn_start, turn_end = began_at + start_s, began_at + end_s
            # Weights that arrive in the moment a token begins count for it; those that arrive as the last one ends do
            # not.
            first_version, last_version = bisect_right(served_at, turn_start) - 1, bisect_left(served_at, turn_end) - 1
            if last_version <= first_version:  # its weights never changed
                member_spans.append((first_version, token_count))
                continue
            done_tokens = 0
            for version in range(first_version + 1, last_version + 1):
                # Tokens are spread evenly over a turn: one that has begun is finished under the old weights, hence
                # `ceil`.
                turn_share = (served_at[version] - turn_start) / (turn_end - turn_start)
                tokens_before = min(token_count, math.ceil(turn_share * token_count))
                if tokens_before > done_tokens:
                    member_spans.append((version - 1, tokens_before - done_tokens))
                done_tokens = tokens_before
            if token_count > done_tokens:
                member_spans.append((last_version, token_count - done_tokens))
        return member_spans

    # --- the learner

    def _take(self) -> None:
        next_step, group_count, policy = self._step + 1, self._world.groups_per_step, self._policy
        least_members = self._least(next_step)
        if least_members == -1:
            return
        taken_groups = self._buffer.take(
            next_step,
            group_count,
            max_lag=policy.max_lag,
            close_at_bound=least_members,
            skip_at_most=self._skip_at_most,
        )
        self._note_skipped()
        if taken_groups is None:
            return
        self._step += 1
        token_count, episode_count = self._note_taken(taken_groups)
        busy_s = self._world.learner.seconds(token_count, self._learner_chance)
        # A push overlaps the step that follows it, and that step's end waits for it: two pushes are never under way
        # at once.
        ends_at = max(self._now + busy_s, self._pushed_at)  # a push under way is waited for
        if self._patience is not None:
            self._patience.worked(busy_s)
        if self._step > self._start_up:
            self._idle_s += ends_at - busy_s - self._waits_since
            self._busy_s += busy_s
            self._trained += episode_count
        self._busy = True
        self._at(ends_at + self._world.between_s, "step")

    def _least(self, step: int) -> int | None:
        """Return the number of scored members with which a group at the lag bound closes for `step`; -1: the learner
        waits there."""
        policy, patience = self._policy, self._patience
        if patience is None:
            return None
        buffer, must_wait = self._buffer, False
        if buffer.counts[GroupState.SCORED] + buffer.quorate_groups >= self._world.groups_per_step:
            bound_work = buffer.at_bound(
                step, max_lag=policy.max_lag, quorum=policy.quorum, acts=self._newest_of_waiting
            )
            has_enough = buffer.counts[GroupState.SCORED] + bound_work.closable >= self._world.groups_per_step
            must_wait = has_enough and bound_work.episodes > 0
        waited_until = patience.ends_s
        if patience.holds(must_wait, self._now):
            if waited_until == math.inf > patience.ends_s:
                self._at(patience.ends_s + _ALMOST, "timer")
            return -1
        return 0 if must_wait else policy.quorum

    def _newest_of_waiting(self, member: SimulatedMember) -> int | None:
        """The step of a member's newest token, if it has some and samples none now."""
        began_at = self._began.get(member.id)
        if began_at is None:
            return None
        last_end: float | None = None
        for start_s, end_s, _ in self._play[member.id].turns:
            if began_at + start_s <= self._now < began_at + end_s:
                return None
            if began_at + end_s <= self._now:
                last_end = began_at + end_s
        return None if last_end is None else bisect_left(self._served, last_end) - 1

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
        tally = self._sums
        for member in (
            groups_member for group in self._buffer.skipped for groups_member in group.members if not groups_member.late
        ):
            member_play = self._play.pop(member.id)
            if member.group.id in self._cohort:
                tally.skipped += 1
                tally.tokens -= member_play.tokens
                tally.scored -= member_play.scored
                tally.unavoidable -= self._too_old[member.id]
                tally.members.pop(member.id, None)
            for member_table in (self._began, self._spans, self._too_old):
                member_table.pop(member.id, None)

    def _note_taken(self, taken: Iterable[Taken]) -> tuple[int, int]:
        """Count what a step takes; returns how many tokens and episodes it trains."""
        trained_tokens = trained_episodes = 0
        for group, trained, left_out in taken:
            is_measured = group.id in self._cohort
            trained_episodes += len(trained)
            for member in trained:
                fresh_tokens = 0
                for sampled_step, token_count in self._spans[member.id]:
                    if (token_age := self._step - 1 - sampled_step) <= self._policy.max_lag:
                        fresh_tokens += token_count
                        if is_measured:
                            self._sums.ages[token_age] += token_count
                trained_tokens += fresh_tokens
                if is_measured:
                    self._sums.trained += 1
                    self._sums.trained_tokens += fresh_tokens
                    self._sums.members[member.id] = self._sums.members[member.id]._replace(trained=fresh_tokens)
                    self._sums.trained_s += self._play[member.id].duration_s
            if is_measured:
                self._sums.outcomes += len(trained) + sum(member.id in group.recorded for member in left_out)
            for member in (*trained, *left_out):
                for member_table in (self._play, self._began, self._spans, self._too_old):
                    member_table.pop(member.id, None)
        return trained_tokens, trained_episodes

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
                scored_count = self._buffer.counts[GroupState.SCORED]
                skip_at_most = sys.maxsize if self._skip_at_most else 0
                next_step, max_lag = self._step + 1, self._policy.max_lag
                taken_groups = self._buffer.take(next_step, scored_count, max_lag=max_lag, skip_at_most=skip_at_most)
                self._note_skipped()
                self._note_taken(taken_groups or ())

    def _result(self) -> SimulationResult:
        """The numbers of the measured steps, once the last one is taken; plays what was admitted to its end first, or
        slow episodes would be missing."""
        seconds, step_count, tally = self._now - self._measured_from, self._steps - self._start_up, self._sums
        world = self._world
        step_s = self._busy_s / step_count + world.between_s
        trained_per_s = self._trained / seconds
        idle_share = self._idle_s / (self._idle_s + self._busy_s)
        self._run_out(seconds / step_count)
        played_s, signal_share = tally.seconds / tally.episodes, 1 - tally.skipped / tally.episodes
        held_s = 0.0 if self._patience is None else self._patience.held_s - self._held_before_s
        lengths = sorted(tally.members.values())
        quarters = [_share(lengths[place * len(lengths) // 4 : (place + 1) * len(lengths) // 4]) for place in range(4)]
        return SimulationResult(
            seconds=seconds,
            episodes_s=trained_per_s,
            # What slots play at most, and what steps take at most: no schedule exceeds the smaller one.
            bound_s=min(signal_share * world.slots / played_s, world.groups_per_step * world.group_size / step_s),
            idle=idle_share,
            age_mean=sum(age * n for age, n in tally.ages.items()) / max(1, tally.ages.total()),
            age_p99=_quantile(tally.ages, 0.99),
            tokens_discarded=1 - tally.trained_tokens / tally.tokens,
            tokens_unavoidable=tally.unavoidable / tally.tokens,
            episodes_discarded=1 - tally.trained / tally.scored,
            outcomes_discarded=1 - tally.outcomes / tally.scored,
            played_s=played_s,
            trained_s=tally.trained_s / max(1, tally.trained),
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
    cumulative = 0
    for value in sorted(counts):
        cumulative += counts[value]
        if cumulative >= share * counts.total():
            return value
    return 0
