"""A record of another run's episode is data that nobody vouches for: what no episode can have used is refused."""

from __future__ import annotations

import json

import pytest
from each_case import each_case

from agentrl.env.snapshots import Past, read_past
from agentrl.errors import EnvError
from agentrl.sandbox.recording import Tape, result_of_json

MEBIBYTE = 1 << 20


def test_a_record_comes_back_with_what_was_used() -> None:
    assert read_past(Past(Tape(MEBIBYTE)).written((3.0, 0.5, 0.0)), MEBIBYTE).meter == (3.0, 0.5, 0.0)


@each_case("used", [float("nan"), float("inf"), -1e9, 10**400])
def test_no_record_gives_an_episode_more_than_its_limits(used: float) -> None:
    """Comparisons with a NaN never hold, and seconds below 0 are time that no other episode has."""
    for meter in ((used, 0.0, 0.0), (0.0, used, 0.0), (0.0, 0.0, used)):
        with pytest.raises(EnvError, match="the snapshot is damaged"):
            read_past(Past(Tape(MEBIBYTE)).written(meter), MEBIBYTE)


def test_numbers_without_end_are_damage() -> None:
    with pytest.raises(EnvError, match="the snapshot is damaged"):
        read_past(Past(Tape(MEBIBYTE), seed=float("inf")).written((0.0, 0.0, 0.0)), MEBIBYTE)  # type: ignore[arg-type]
    with pytest.raises(EnvError, match="the snapshot is damaged"):
        result_of_json(json.loads('[Infinity, "", "", false, false, false, 0.0]'))
