"""The benchmark of compaction: its episodes are longer than their context, and its page says what its rows do."""

from __future__ import annotations

from pathlib import Path

import _reading_model
import compaction
import pytest


@pytest.mark.slow
def test_episodes_are_four_times_their_context_and_compacted_in_both_ways(tmp_path: Path) -> None:
    _reading_model.make(tmp_path, steps=0)
    assert compaction.length(tmp_path) >= 4 * compaction.CONTEXT
    for way in compaction.WAYS:
        (group,) = compaction.played(compaction.LocalEngine(tmp_path, 1), tmp_path, way, range(1), 2)
        assert len(group.trajectories) == 2
        for member in group.trajectories:
            assert all(len(turn.prompt_ids) + len(turn.token_ids) <= compaction.CONTEXT for turn in member.turns)
            assert any(turn.step and turn.step.compaction for turn in member.turns)
