"""The run store's rules on groups and members in memory, fast enough for a million simulated episodes.

Owns which groups start, close, are taken and expire. What can be shared with the store is: `admissible_groups`, the
close policies, `lag` and `enough` are its own functions. A property test plays random schedules on this and on a real
store, and both must admit, hand out, close, take and drop the same. Never knows a token, a duration or a learner's
time; nothing crashes here, so there are no fences, leases, rollbacks and replays.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from agentrl.records import GroupState
from agentrl.store.buffer.admission import AdmissionBounds, Load, admissible_groups
from agentrl.store.buffer.buffer import AtBound, Expired
from agentrl.store.buffer.closing import FULL, ClosePolicy
from agentrl.store.episodes.groups import enough
from agentrl.tokens.staleness import edge, lag_in_step, trains


@dataclass(slots=True, eq=False)
class SimulatedMember:
    """One episode. `newest` and `oldest` are the steps of the weights that sampled its newest and oldest token;
    `left`: it was taken or dropped."""

    id: int
    group: SimulatedGroup
    ended: bool = False
    scored: bool = False
    late: bool = False
    left: bool = False
    newest: int | None = None
    oldest: int | None = None

    def trains(self, step: int, max_lag: int) -> bool:
        """Whether optimizer step `step` may train a token of it."""
        return self.scored and trains(lag_in_step(step, self.newest), max_lag)


@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """Sibling episodes. `started_step`: of the weights when it was admitted; `scored_s`: when its scored members ended,
    earliest first; `open`: how many have not ended; `recorded`: ids of the members whose outcomes judge the others,
    once it has closed; `silent`: it gives no signal."""

    id: int
    members: list[SimulatedMember]
    started_step: int = 0
    state: GroupState = GroupState.WAITING
    started_s: float = 0.0
    open: int = 0
    scored_s: list[float] = field(default_factory=list[float])
    recorded: frozenset[int] = frozenset()
    silent: bool = False

    @property
    def running(self) -> bool:
        return self.state in (GroupState.WAITING, GroupState.RUNNING)


class Taken(NamedTuple):
    """Members of one group when a step takes it: `trained` ones, and `left_out` ones that leave without a token."""

    group: SimulatedGroup
    trained: list[SimulatedMember]
    left_out: list[SimulatedMember]


# Why the store's rules are written a second time. A sweep plays a million episodes, and would spend its time on the
# transactions of a database; a formula for "how often does a group wait" would be quick, and wrong in each corner
# that the rules have. So the decisions are the store's own functions where they are functions, and what is written
# anew is only which group is where. `tests/simulate/test_memory.py` plays random schedules on both and compares every
# answer, so that a change of a rule in the store fails there.
class MemoryBuffer:
    """Groups from admission to the learner. Seconds are those of the caller's clock, which never goes back."""

    def __init__(self) -> None:
        self.counts: Counter[GroupState] = Counter()
        self.step = 0  # of the weights that are served
        self.running_episodes = 0  # admitted and not ended
        self._groups = 0
        self._episodes = 0
        self._waiting: deque[SimulatedMember] = deque()
        self._started: deque[SimulatedGroup] = deque()  # oldest first; those that have closed are removed lazily
        self._quorate: deque[SimulatedGroup] = deque()  # in the order in which they reached `at_least`
        self._late: list[tuple[float, int, SimulatedMember]] = []  # a heap of open late members by their group's start
        self._late_open: dict[int, SimulatedMember] = {}
        self._late_ended: list[SimulatedMember] = []
        self._scored: dict[int, SimulatedGroup] = {}
        self._fresh: list[int] = []  # sorted ids of those in `_scored` that step `_checked` may take
        self._unchecked: list[int] = []
        self._checked = -1
        self._blocks: SimulatedMember | None = None  # the member that the learner waited for at the last look
        self.skipped: list[SimulatedGroup] = []  # those that the last `take` let go without signal
        self._skips = Counter[int]()  # how many left so for the step that is to come

    def admit(self, bounds: AdmissionBounds) -> list[SimulatedGroup]:
        """Start as many groups as admission allows, as `Groups.admit` does; returns them."""
        if self.running_episodes >= bounds.max_running:  # the usual answer, without the way to it
            return []
        counts = self.counts
        group_count = admissible_groups(
            Load(
                running_episodes=self.running_episodes,
                running_groups=counts[GroupState.WAITING] + counts[GroupState.RUNNING],
                accepted_groups=counts[GroupState.SCORED] + counts[GroupState.TAKEN],
            ),
            bounds,
            step=self.step,
        )
        return [self._start(bounds.group_size) for _ in range(group_count)]

    def _start(self, size: int) -> SimulatedGroup:
        self._groups += 1
        group = SimulatedGroup(self._groups, [], started_step=self.step, open=size)
        group.members = [SimulatedMember(self._episodes + position, group) for position in range(1, size + 1)]
        self._episodes += size
        self._waiting.extend(group.members)
        self.running_episodes += size
        self.counts[GroupState.WAITING] += 1
        return group

    def claim(self, limit: int, now: float) -> list[SimulatedMember]:
        """Claim up to `limit` members to play, oldest group first."""
        claimed_members: list[SimulatedMember] = []
        while self._waiting and len(claimed_members) < limit:
            member = self._waiting.popleft()
            if member.ended:
                continue
            claimed_members.append(member)
            if member.group.state is GroupState.WAITING:
                self._move(member.group, GroupState.RUNNING)
                member.group.started_s = now
                self._started.append(member.group)
        return claimed_members

    def finish(
        self, member: SimulatedMember, now: float, *, newest: int | None, oldest: int | None, scored: bool
    ) -> None:
        """End a member's episode. If it is the last open one of a running group, the group closes."""
        member.newest, member.oldest, member.scored = newest, oldest, scored
        self._end(member)
        group = member.group
        if scored and group.running:
            group.scored_s.append(now)
        if group.running and not group.open:
            self._close(group)
        # A late member of a scored group leaves with its group; of one that has left, it is offered by itself.
        elif member.late and group.state is not GroupState.SCORED:
            self._late_ended.append(member)

    @property
    def quorate_groups(self) -> int:
        """Lower bound of the number of running groups that have a quorum."""
        return len(self._quorate)

    def quorate(self, group: SimulatedGroup) -> None:
        """Have `expire` ask the close policy about a group that has reached the policy's `at_least`."""
        self._quorate.append(group)

    def expire(self, now: float, group_deadline_s: float, *, close_policy: ClosePolicy = FULL) -> Expired:
        """Close and expire as `GroupBuffer.expire` does. Groups are checked in the order in which they became quorate,
        up to the first that stays open: with every policy of ours those behind it do too."""
        closed_groups = {group.id: group for group in self._overdue(now - group_deadline_s) if _judged(group)}
        expired_groups = [group for group in self._overdue(now - 2 * group_deadline_s) if group.id not in closed_groups]
        while self._quorate:
            group = self._quorate[0]
            # The first one that stays open ends the look: they became quorate in this order, so each later one has
            # waited less.
            if group.running and not close_policy.closes(group.scored_s, now):
                break
            if group.running:
                closed_groups[group.id] = group
            self._quorate.popleft()
        late_members: list[SimulatedMember] = []
        while self._late and self._late[0][0] < now - 2 * group_deadline_s:
            member = heapq.heappop(self._late)[-1]
            if not member.ended:
                late_members.append(member)
        # In the order of ids, as the store's rows come: which group is closed first decides which is taken first.
        for group_id in sorted(closed_groups):
            self._close(closed_groups[group_id])
        for group in expired_groups:
            for member in group.members:
                if not member.ended:
                    self._end(member)
            self._move(group, GroupState.EXPIRED)
        for member in late_members:
            self._end(member)
            member.left = True
        return Expired(
            tuple(sorted(closed_groups)),
            tuple(group.id for group in expired_groups),
            tuple(sorted(member.id for member in late_members)),
        )

    def _oldest_open(self) -> SimulatedGroup | None:
        while self._started and not self._started[0].running:
            self._started.popleft()
        return self._started[0] if self._started else None

    def _overdue(self, before: float) -> list[SimulatedGroup]:
        self._oldest_open()
        overdue_groups: list[SimulatedGroup] = []
        for group in self._started:
            if group.started_s >= before:
                break
            if group.running:
                overdue_groups.append(group)
        return overdue_groups

    def at_bound(
        self, step: int, *, max_lag: int, quorum: int | None, acts: Callable[[SimulatedMember], int | None]
    ) -> AtBound:
        """The work at the lag bound, as `GroupBuffer.at_bound`, but `episodes` is 1 for any number. `acts`: the step of
        the newest token of an open member that samples none now; None of one that does, or has none."""
        oldest_step = edge(step, max_lag)
        bound_groups = list(self._groups_at_bound(oldest_step))

        def waits(member: SimulatedMember) -> bool:
            if member.ended:
                return False
            if member.group.running and _blocks_learner(member.group, oldest_step, quorum):
                return True
            made_at = acts(member)
            return made_at is not None and made_at <= oldest_step

        # The member that was waited for the last time mostly still is: without this memory each look would go over
        # all running groups.
        if self._blocks is None or not waits(self._blocks):
            open_members = (member for group in bound_groups for member in group.members)
            self._blocks = next(filter(waits, chain(open_members, self._late_open.values())), None)
        closable = sum(quorum is not None and len(group.scored_s) >= quorum for group in bound_groups)
        return AtBound(int(self._blocks is not None), closable)

    def _groups_at_bound(self, oldest: int) -> Iterator[SimulatedGroup]:
        """The running groups that were admitted under weights of step `oldest` or before."""
        self._oldest_open()
        for group in self._started:  # in the order of admission
            if group.started_step > oldest:
                break
            if group.running:
                yield group

    def take(
        self, step: int, n: int, *, max_lag: int, close_at_bound: int | None = None, skip_at_most: int = 0
    ) -> list[Taken] | None:
        """Take `n` groups for optimizer step `step`, and late members of older ones, as `GroupBuffer.take` does; with
        `n` = 0 late members alone. Returns None if there are too few: groups that are too stale have left all the same.
        Running groups at the lag bound close early if they have `close_at_bound` scored members each and make up the
        number."""
        if n and close_at_bound is not None:
            closable_groups = [
                group
                for group in self._groups_at_bound(edge(step, max_lag))
                if _judged(group) and len(group.scored_s) >= close_at_bound
            ]
            if closable_groups and self._ready(step, max_lag) + len(closable_groups) >= n:
                for group in closable_groups:
                    self._close(group)
        late_members, self._late_ended = self._late_ended, []
        stale_groups = self._check(step, max_lag)
        self.skipped = self._skip(step, skip_at_most)
        for group in stale_groups + self.skipped:  # what ended late in one of these is offered from the next call on
            del self._scored[group.id]
            self._move(group, GroupState.EXPIRED)
            self._late_ended += [member for member in group.members if member.late and member.ended and not member.left]
        enough_taken = len(self._fresh) >= n if n else any(member.trains(step, max_lag) for member in late_members)
        if not enough_taken:
            self._late_ended = late_members + self._late_ended
            return None
        taken_groups, self._fresh = [self._scored[group_id] for group_id in self._fresh[:n]], self._fresh[n:]
        late_by_group: dict[int, list[SimulatedMember]] = {}
        for member in sorted(late_members, key=lambda member: member.id):
            late_by_group.setdefault(member.group.id, []).append(member)
        for group in taken_groups:
            del self._scored[group.id]
            self._move(group, GroupState.TAKEN)
        ended_members = [[member for member in group.members if member.ended] for group in taken_groups]
        return [_leave(members, step, max_lag) for members in (*ended_members, *late_by_group.values())]

    def _ready(self, step: int, max_lag: int) -> int:
        """How many closed groups `step` may take."""
        if step != self._checked:
            return sum(self._trains(group, step, max_lag) for group in self._scored.values())
        return len(self._fresh) + sum(
            self._trains(self._scored[group_id], step, max_lag) for group_id in self._unchecked
        )

    def _check(self, step: int, max_lag: int) -> list[SimulatedGroup]:
        """The groups without a member that `step` may train; the others are in `_fresh` afterwards."""
        if step != self._checked:
            self._checked, self._unchecked, self._fresh = step, list(self._scored), []
        stale_groups: list[SimulatedGroup] = []
        for group_id in self._unchecked:
            group = self._scored[group_id]
            if self._trains(group, step, max_lag):
                # Sorted by id, which is the order of admission: the oldest leave first, as `buffer.order = "oldest"`
                # has it.
                insort(self._fresh, group_id)
            else:
                stale_groups.append(group)
        self._unchecked = []
        return stale_groups

    def _skip(self, step: int, at_most: int) -> list[SimulatedGroup]:
        """Remove the oldest groups without signal from the fresh ones, and return them. For one `step` all calls
        together remove `at_most`."""
        silent_ids = [group_id for group_id in self._fresh if self._scored[group_id].silent]
        silent_ids = silent_ids[: max(0, at_most - self._skips[step])]
        if silent_ids:
            self._skips = Counter({step: self._skips[step] + len(silent_ids)})
            self._fresh = [group_id for group_id in self._fresh if group_id not in silent_ids]
        return [self._scored[group_id] for group_id in silent_ids]

    def _trains(self, group: SimulatedGroup, step: int, max_lag: int) -> bool:
        return any(member.trains(step, max_lag) for member in group.members)

    def _close(self, group: SimulatedGroup) -> None:
        is_judged = _judged(group)
        self._move(group, GroupState.SCORED if is_judged else GroupState.FAILED)
        if is_judged:
            group.recorded = frozenset(member.id for member in group.members if member.scored)
            self._scored[group.id] = group
            self._unchecked.append(group.id)
        for member in group.members:
            if not member.ended:
                member.late = True
                heapq.heappush(self._late, (group.started_s, member.id, member))
                self._late_open[member.id] = member

    def _end(self, member: SimulatedMember) -> None:
        member.ended = True
        member.group.open -= 1
        self._late_open.pop(member.id, None)
        self.running_episodes -= 1

    def _move(self, group: SimulatedGroup, state: GroupState) -> None:
        self.counts[group.state] -= 1
        self.counts[state] += 1
        group.state = state


def _blocks_learner(group: SimulatedGroup, oldest: int, quorum: int | None) -> bool:
    """Whether the learner waits for the open members of a running group: too few are scored for it to close by
    `quorum`, and a scored one has no token of weights after step `oldest`, so the step after this one could not train
    it."""
    has_too_few = quorum is None or len(group.scored_s) < quorum
    return has_too_few and any(
        member.scored and member.newest is not None and member.newest <= oldest for member in group.members
    )


def _judged(group: SimulatedGroup) -> bool:
    return len(group.scored_s) >= enough(len(group.members))


def _leave(members: Iterable[SimulatedMember], step: int, max_lag: int) -> Taken:
    """Have ended members of one group, at least one, leave with optimizer step `step`: those that it trains, and those
    of which it may train no token."""
    trained_members: list[SimulatedMember] = []
    others_left_out: list[SimulatedMember] = []
    for member in members:
        (trained_members if member.trains(step, max_lag) else others_left_out).append(member)
        member.left = True
    group = (trained_members or others_left_out)[0].group
    return Taken(group, trained_members, others_left_out)


def ids(members: Sequence[SimulatedMember]) -> list[int]:
    """Return the members' ids, in order."""
    return [member.id for member in members]
