"""The rule of who judges whom in a group, and by how much a member's return exceeds that of its judges.

Owns the rule for members, quorums, late members and roles; the learner, the store and the page all ask here. Plain
Python on plain records, so that processes without torch can ask too. The estimators compute the same
baseline for many turns at once (`advantages.centred`), over the judges that `panel` names.

A baseline must not depend on the action that it judges (Williams 1992), and the length of an episode is an action too:
how early a member ended decides whether its group's record has it. Three cases follow from that.

    full group    everyone in the record is judged by the others in it (leave-one-out: Kool et al. 2019).
    late member   it ended after the record was made, and is judged by all in it. It never joins the record: the
                  baseline of those that were trained before would change afterwards.
    quorum of k   the record has k members, or more that ended while the quorum was waited for. Judging by all would
                  give short episodes another number of judges than long ones, so everyone has the k - 1 others that
                  ended first.

Roles of one episode are judged apart, each against the same role of the siblings.

A group in which no turn has an advantage adds exactly 0 to the policy gradient, so leaving it out changes no expected
direction. The groups that take its place make the step longer, by one over the share of groups with signal (dynamic
sampling, DAPO: Yu et al. 2025, section 3.2). A KL or entropy term would have had a gradient; it is then over the other
groups alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

_ROUNDING = 1e-9  # sums of equal rewards in another order differ by less


class JudgedRecord(Protocol):
    """The rewards of a scored member: an outcome, and one process reward for each turn of a role, in order."""

    @property
    def rewards(self) -> Mapping[str, Sequence[float]]:
        """Process rewards by role."""
        ...

    def outcome_of(self, role: str) -> float:
        """The outcome reward of a role."""
        ...


# Why nobody waits for the last member of a group, and why the late ones are trained all the same.
#
# The episodes of a group take different times. If the group closed with its last member, the learner would wait for the
# slowest episode of each group (law 6). To close it earlier and drop the members that still run is simple, and it is
# wrong: how long an episode takes is a choice of the policy as well, so the loss would see the short episodes alone. So
# a group may close with a quorum, and a later step trains the members that end afterwards.
#
# Then the question is what a late member is compared with. If it joined the record, members that were trained before
# would have been compared with another baseline than their group has now. If it were compared with the whole record of
# a group that a quorum of k closed, it would have k judges where an early member has k - 1, and its speed would choose
# its baseline. The k - 1 others that ended first are the same whenever it ends itself, so they judge it, early or late,
# and the leave-one-out estimate stays unbiased.
#
# The price is that a member of the record beyond the first k judges nobody, and that the learner has to prepare such a
# group twice, because the first k members have another panel than the rest (`agentrl/learner/data/siblings.py`).
#
# Store and learner have to agree on this rule to the last member, since a group in which the store sees no signal is
# skipped. `tests/algos/test_judging.py` has the rule by hand, `tests/algos/test_oracle.py` the exact gradient of late
# members, and `tests/learner/test_skipped.py` compares the store's advantages with the learner's.
def panel(recorded: Sequence[int], member: int, quorum: int | None = None) -> tuple[int, ...]:
    """The members whose returns form the baseline of `member`, itself among them if it is one of them (leave-one-out
    then leaves it out).

    `recorded` are the members of the group's record in the order in which they ended; `quorum` is the number of scored
    members that closes groups (None: all). A record smaller than the quorum closed at its deadline: all of it judges.

        panel((4, 0, 2), 0)            (4, 0, 2)    judged by 4 and 2
        panel((4, 0, 2), 7)            (4, 0, 2)    late: judged by all three
        panel((4, 0, 2), 4, quorum=2)  (4, 0)       judged by the other one that ended first
        panel((4, 0, 2), 2, quorum=2)  (4,)         judged by as many as those
    """
    if quorum is None or len(recorded) < quorum:
        return tuple(recorded)
    first_members = tuple(recorded[:quorum])
    # All others are judged by one member less, so that everyone has k - 1 judges.
    return first_members if member in first_members else first_members[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns:
    """How a run computes returns: the weight of process rewards beside the outcome, and the discount of both per turn.

    Roles in `frozen` do not learn and have no advantage. `quorum` is that of `panel`. `skips` is True if a group whose
    returns are equal trains nothing. `by_env` has other returns for some environments, `by_role` another process weight
    and discount for some roles, in every environment."""

    process_weight: float = 1.0
    discount: float = 1.0
    frozen: frozenset[str] = frozenset()
    quorum: int | None = None
    skips: bool = True
    by_env: tuple[tuple[str, Returns], ...] = ()
    by_role: tuple[tuple[str, float, float], ...] = ()

    def for_env(self, env: str) -> Returns:
        """How the returns of an environment are computed."""
        return dict(self.by_env).get(env, self)

    def weight_and_discount(self, role: str) -> tuple[float, float]:
        """The weight of process rewards and the discount of a role."""
        pair_by_role = {role_name: (weight, discount) for role_name, weight, discount in self.by_role}
        return pair_by_role.get(role, (self.process_weight, self.discount))


def advantages(
    record: Mapping[int, JudgedRecord], returns: Returns, late: Mapping[int, JudgedRecord] | None = None
) -> dict[int, list[float]]:
    """The leave-one-out advantages of each member's learning turns, role by role, before any scale.

    `record` has the members of the group's record in the order in which they ended, `late` those that ended after it
    was made. A member without a judge has advantages of 0; a role of a late member that no recorded member played has
    none. A member's list goes through its roles by name, so that sums over it are the same in every process."""
    all_records = {**record, **(late or {})}
    advantages_by_member: dict[int, list[float]] = {member: [] for member in all_records}
    # Sorted, so that sums over roles are added in one order in every process: the store and the learner decide by
    # them.
    for role in sorted({role for member_record in record.values() for role in member_record.rewards} - returns.frozen):
        returns_of = {
            member: _returns_to_go(member_record, role, returns) for member, member_record in all_records.items()
        }
        for member, member_returns in returns_of.items():
            judges = [judge for judge in panel(list(record), member, returns.quorum) if judge != member]
            judged_by = [(record[judge].outcome_of(role), returns_of[judge]) for judge in judges]
            advantages_by_member[member] += _above(member_returns, judged_by)
    return advantages_by_member


def strength(record: Mapping[int, JudgedRecord], returns: Returns) -> float:
    """The mean of |advantage| over the turns of a group's members. 0: its returns are equal from each turn on."""
    # The largest one decides: the mean of a group in which few turns have an advantage may be small and is no rounding.
    magnitudes = [
        abs(advantage) for turn_advantages in advantages(record, returns).values() for advantage in turn_advantages
    ]
    return 0.0 if max(magnitudes, default=0.0) <= _ROUNDING else sum(magnitudes) / len(magnitudes)


def is_silent(record: Mapping[int, JudgedRecord], returns: Returns) -> bool:
    """Whether a group trains nothing."""
    return returns.skips and not strength(record, returns)


def _returns_to_go(record: JudgedRecord, role: str, returns: Returns) -> list[float]:
    """The return of a role from each of its turns on: its outcome, and the weighted rewards still to come."""
    weight, discount = returns.weight_and_discount(role)
    total, returns_back = record.outcome_of(role), list[float]()
    for reward in reversed(record.rewards.get(role, ())):
        total = (discount * total if returns_back else total) + weight * reward  # the last turn earns the whole outcome
        returns_back.append(total)
    return returns_back[::-1]


def _above(returns: list[float], judges: list[tuple[float, list[float]]]) -> list[float]:
    """Each return less the mean of the judges' at the same turn; a judge that had stopped has its outcome there."""
    if not judges:
        return [0.0] * len(returns)
    return [
        value - sum(others[turn] if turn < len(others) else outcome for outcome, others in judges) / len(judges)
        for turn, value in enumerate(returns)
    ]
