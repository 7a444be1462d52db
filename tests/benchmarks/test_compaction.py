"""The benchmark of compaction: its episodes are longer than their context, and its page says what its rows do."""

from __future__ import annotations

import json
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


def test_the_table_has_the_seeds_of_both_ways_and_of_these_settings_alone(tmp_path: Path) -> None:
    rows = [
        {"way": way, "seed": seed, "before": 0.25, "after": after, "success": [0.0, 1.0], "settings": said}
        for way, after in (("summary", 0.75), ("truncation", 0.5))
        for seed, said in ((1, compaction.said(way)), (2, json.dumps({"other": "settings"})))
    ]
    assert list(compaction.table(rows))[2:] == ["| 1 | 0.250 | 0.750 | 0.250 | 0.500 | +0.250 |"]
    page = tmp_path / "page.md"
    page.write_text(f"above\n{compaction.BEGIN}\nold\n{compaction.END}\nbelow\n")
    compaction.publish_page(rows, page, tmp_path / "plot.svg")
    assert (
        "old" not in page.read_text() and page.read_text().startswith("above") and page.read_text().endswith("below\n")
    )
    assert compaction.smoothed([0.0, 1.0, 1.0]) == [0.0, 0.5, pytest.approx(2 / 3)]
