"""A group that no worker of the run journaled comes in whole, or not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from agentrl.errors import StoreError
from agentrl.records import StopReason, Turn
from agentrl.store import PlayedMember, RunStore
from agentrl.store.audit import audit
from agentrl.store.episodes.endings import Ending

from .play import START, answer, serve, task, turn

FIRST, LAST = turn(0, 1, step=answer(0)), turn(1, 1, step=answer(1, last=True))


def member(*turns: Turn, outcome: float = 1.0) -> PlayedMember:
    return PlayedMember(start=START, turns=turns, ending=Ending(stop_reason=StopReason.DONE, outcome=outcome))


def test_a_played_group_is_taken_with_every_turn_that_it_had(store: RunStore) -> None:
    group = store.played.put_group(task(0), [member(FIRST, LAST), member(FIRST, LAST, outcome=0.0)])
    (taken,) = store.buffer.take(1, 1, max_lag=0) or []
    assert (taken.id, [one.outcome for one in taken.trajectories]) == (group, [1.0, 0.0])
    assert [one.turns for one in taken.trajectories] == [(FIRST, LAST)] * 2
    assert taken.record is not None and list(taken.record) == [0, 1]
    assert audit(store).violations == []


@pytest.mark.parametrize(
    "fault",
    [
        replace(member(FIRST), start=None),
        member(LAST),
        member(FIRST, replace(LAST, parent=1)),
        member(replace(FIRST, step=None), LAST),
        member(replace(FIRST, step=answer(0, last=True)), LAST),
        member(turn(0, 99, step=answer(0, last=True))),
    ],
    ids=["not begun", "a gap", "its own parent", "no answer", "after its end", "an unknown version"],
)
def test_what_cannot_be_a_group_leaves_nothing(store: RunStore, fault: PlayedMember) -> None:
    serve(store, 1)
    with pytest.raises(StoreError):
        store.played.put_group(task(0), [member(FIRST, LAST), fault])
    assert store.groups.counts() == {} and audit(store).violations == []
