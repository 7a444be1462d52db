"""Who judges whom: the panel of a member, by hand and as the promises that make a baseline fair to any length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentrl.algos.judging import panel


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
