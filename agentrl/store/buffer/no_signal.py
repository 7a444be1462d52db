"""Which groups carry signal: those in which some turn of a member has an advantage.

Owns the advantages of a closed group as its record gives them, in plain Python (the learner computes its own, in
torch). Never knows a token, nor what becomes of a group without signal.

Such a group adds exactly 0 to the policy gradient, so leaving it out changes no expected direction. The groups that
take its place make the step longer, by one over the share of groups with signal (dynamic sampling, DAPO: Yu et al.
2025, section 3.2). A KL or entropy term would have had a gradient; it is then over the other groups alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.records import MemberRecord

_ROUNDING = 1e-9  # as in the learner: sums of equal rewards in another order differ by less


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns:
    """How a return is computed: the weight of process rewards beside the outcome, the discount of both per turn, and
    the roles that do not learn. With a `quorum` of k, everyone is judged by the k - 1 others that ended first.
    `skips` says whether a group whose returns are equal trains nothing. Some environments (`apart`) have other returns,
    and some roles (`by_role`) another weight and discount, in every environment."""

    process_weight: float = 1.0
    discount: float = 1.0
    frozen: frozenset[str] = frozenset()
    quorum: int | None = None
    skips: bool = True
    apart: tuple[tuple[str, Returns], ...] = ()
    by_role: tuple[tuple[str, float, float], ...] = ()

    def of(self, env: str) -> Returns:
        """How the returns of an environment are computed."""
        return next((own for name, own in self.apart if name == env), self)

    def made_of(self, role: str) -> tuple[float, float]:
        """The weight of process rewards and the discount of a role."""
        of_role = ((weight, discount) for name, weight, discount in self.by_role if name == role)
        return next(of_role, (self.process_weight, self.discount))


def advantages(
    record: Mapping[int, MemberRecord], returns: Returns, late: Mapping[int, MemberRecord] | None = None
) -> dict[int, list[float]]:
    """The advantages of each member's learning turns, role by role, before any scale. Members of the record, which are
    in the order in which they ended, are judged by the others in it (leave-one-out), `late` members by all of them; or
    all by as many, see `Returns`. Without a judge, all are 0."""
    everyone = {**record, **(late or {})}
    judges, most = list(record), len(record)
    if returns.quorum is not None and len(record) >= returns.quorum:
        judges, most = judges[: returns.quorum], returns.quorum - 1
    found: dict[int, list[float]] = {member: [] for member in everyone}
    for role in {role for member_record in record.values() for role in member_record.rewards} - returns.frozen:
        own = {member: _to_go(member_record, role, returns) for member, member_record in everyone.items()}
        for member, values in own.items():
            others = [other for other in judges if other != member][:most]
            found[member] += _above(values, [(record[other].outcome_of(role), own[other]) for other in others])
    return found


def strength(record: Mapping[int, MemberRecord], returns: Returns) -> float:
    """The mean of |advantage| over the turns of a group's members. 0: its returns are equal from each turn on."""
    sizes = [abs(advantage) for own in advantages(record, returns).values() for advantage in own]
    return 0.0 if max(sizes, default=0.0) <= _ROUNDING else sum(sizes) / len(sizes)


def silent(record: Mapping[int, MemberRecord], returns: Returns) -> bool:
    """Whether a group trains nothing."""
    return returns.skips and not strength(record, returns)


def _to_go(member: MemberRecord, role: str, returns: Returns) -> list[float]:
    """The return of a role from each of its turns on: its outcome, and the weighted rewards still to come."""
    total, found = member.outcome_of(role), list[float]()
    weight, discount = returns.made_of(role)
    for reward in reversed(member.rewards.get(role, ())):
        total = (discount * total if found else total) + weight * reward
        found.append(total)
    return found[::-1]


def _above(values: list[float], judges: list[tuple[float, list[float]]]) -> list[float]:
    """Each value less the mean of the judges' at the same turn; one that had stopped has its outcome there."""
    if not judges:
        return [0.0] * len(values)
    return [
        value - sum(own[at] if at < len(own) else outcome for outcome, own in judges) / len(judges)
        for at, value in enumerate(values)
    ]
