"""The steps that are over: which of them still have all that they trained, and their groups, taken again.

`agentrl retrain` and loops of one's own repeat a step from here. A step is whole as long as retention has kept
its tokens and no loss of power took its episodes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Literal

from agentrl.errors import StoreError
from agentrl.records import Group
from agentrl.store.buffer.buffer import skipped_for, taken_for
from agentrl.store.databases.database import StorePart, retried
from agentrl.store.episodes.groups import TRAIN, scored

Gone = Literal["", "tokens", "episodes"]
"""The part of a step that is missing: none; tokens, which retention dropped; or episodes, lost with the power."""


class TrainedSteps(StorePart):
    """Say which steps are still whole, and give their groups."""

    @retried
    def steps_trained(self) -> dict[int, Gone]:
        """All steps of the lineage, in order, and what each of them lacks."""
        with self._db.read():
            step_rows = self._db.rows(
                "SELECT l.step, MAX(g.tokens_dropped) FROM lineage l JOIN episodes e ON e.id = l.episode_id"
                " JOIN groups g ON g.id = e.group_id WHERE l.undone_attempt IS NULL GROUP BY l.step"
            )
            lost_steps = self._db.rows("SELECT DISTINCT step FROM lost_members")
        lacks_by_step: dict[int, Gone] = {
            trained_step: "tokens" if lacks_tokens else "" for trained_step, lacks_tokens in step_rows
        }
        for (trained_step,) in lost_steps:
            lacks_by_step[trained_step] = "episodes"
        return dict(sorted(lacks_by_step.items()))

    @retried
    def retake(self, step: int) -> list[Group]:
        """The groups that `take` gave for optimizer step `step`, in the order of its lineage; each `weight` is 1.

        Raises StoreError if the step is not in the lineage, or lacks something."""
        if (missing_kind := self.steps_trained().get(step, "episodes")) != "":
            raise StoreError(f"step {step} cannot be taken again: its {missing_kind} are gone")
        with self._db.read():
            lineage_rows = self._db.rows(
                "SELECT l.episode_id, e.group_id FROM lineage l JOIN episodes e ON e.id = l.episode_id"
                " WHERE l.step = ? AND l.undone_attempt IS NULL ORDER BY l.id",
                (step,),
            )
            trained_ids = {episode_id for episode_id, _ in lineage_rows}
            members_by_group: defaultdict[int, list[int]] = defaultdict(list)
            for episode_id, group_id in lineage_rows:
                members_by_group[group_id].append(episode_id)
            for episode_id, group_id in self._left_out(step):
                if episode_id not in trained_ids:
                    members_by_group[group_id].append(episode_id)
            taken_groups = [
                taken_for(self._db, group_id, episode_ids, trained_ids)
                for group_id, episode_ids in members_by_group.items()
            ]
            return taken_groups + skipped_for(self._db, step)

    def _left_out(self, step: int) -> list[tuple[int, int]]:
        """(episode, group) of the members that left with a step, untrained: too old, or not scored. A late one that is
        not scored leaves with its group, or with the first step after its end."""
        # A member that is not scored has no row in the lineage and no `taken_step`: no step trained it. Which step it
        # left with follows from the times alone. A column for it would be written at each take, for a question that
        # only a repeated step has.
        ((previous_taken_s, taken_s),) = self._db.rows(  # when the step before took its members, and when this one did
            "SELECT MAX(CASE WHEN step < ?1 THEN taken_s END), MAX(CASE WHEN step = ?1 THEN taken_s END)"
            " FROM lineage WHERE step <= ?1 AND undone_attempt IS NULL",
            (step,),
        )
        ended_rows = self._db.rows(
            "SELECT e.id, e.group_id, e.stop_reason, e.outcome FROM groups g JOIN episodes e ON e.group_id = g.id"
            " WHERE g.taken_step = ?1 AND g.purpose = ?2 AND e.stop_reason IS NOT NULL AND e.taken_step IS NULL"
            " AND e.ended_s <= ?3"
            " UNION SELECT e.id, e.group_id, e.stop_reason, e.outcome FROM episodes e"
            " JOIN groups g ON g.id = e.group_id WHERE e.late = 1 AND e.dropped = e.stop_reason"
            " AND e.ended_s > ?4 AND e.ended_s <= ?3 AND g.taken_step < ?1",
            (step, TRAIN, taken_s or 0.0, previous_taken_s or 0.0),
        )
        unscored_members = [
            (episode_id, group_id)
            for episode_id, group_id, stop_reason, outcome in ended_rows
            if not scored(stop_reason, outcome)
        ]
        stale_members = self._db.rows(
            "SELECT id, group_id FROM episodes WHERE taken_step = ? AND dropped = 'stale'", (step,)
        )
        return sorted([*unscored_members, *stale_members])
