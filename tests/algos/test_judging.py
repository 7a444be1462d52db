"""Who judges whom: the panel of a member, by hand and as the promises that make a baseline fair to any length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from agentrl.algos.judging import Returns, advantages, panel


def test_panels_by_hand() -> None:
    assert panel((4, 0, 2), 0) == (4, 0, 2)
    assert panel((4, 0, 2), 7) == (4, 0, 2)
    assert panel((4, 0, 2), 4, quorum=2) == (4, 0)
    assert panel((4, 0, 2), 2, quorum=2) == panel((4, 0, 2), 7, quorum=2) == (4,)
    assert panel((4, 0, 2), 0, quorum=4) == (4, 0, 2), "it closed at its deadline, below the quorum"


@given(
    recorded=st.lists(st.integers(0, 20), unique=True, min_size=1, max_size=8),
    member=st.integers(0, 20),
    quorum=st.integers(2, 9),
)
def test_with_a_quorum_everyone_has_as_many_judges_and_ones_that_ended_first(
    recorded: list[int], member: int, quorum: int
) -> None:
    judges = [judge for judge in panel(recorded, member, quorum) if judge != member]
    if len(recorded) < quorum:
        assert judges == [other for other in recorded if other != member]
    else:
        assert judges == [other for other in recorded if other != member][: quorum - 1]


@dataclass(frozen=True)
class Record:
    """A member that took one turn in each of its roles and earned only outcomes."""

    outcomes: Mapping[str, float]

    @property
    def rewards(self) -> Mapping[str, Sequence[float]]:
        return dict.fromkeys(self.outcomes, (0.0,))

    def outcome_of(self, role: str) -> float:
        return self.outcomes[role]


def test_advantages_go_through_the_roles_by_name() -> None:
    """The hash seed of a process must not decide the order of a sum, nor so the last bits of a recorded strength."""
    won = {name: float(number) for number, name in enumerate("hgfedcba")}
    record = {0: Record(won), 1: Record(dict.fromkeys(won, 0.0))}
    assert advantages(record, Returns()) == {0: [7, 6, 5, 4, 3, 2, 1, 0], 1: [-7, -6, -5, -4, -3, -2, -1, 0]}
    assert advantages(record, Returns(frozen=frozenset("bcg")))[0] == [7, 4, 3, 2, 0]
