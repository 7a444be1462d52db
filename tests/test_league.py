"""Past selves as opponents: how probable each is, and who is drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from each_case import each_case

from agentrl import config
from agentrl.config.league import FIRST, LeagueSettings, Member, draw, from_json, past_self_roles, shares, to_json
from agentrl.errors import ConfigError

MEMBERS = [
    FIRST,
    Member(version=4, step=20, played=8, won=8.0),  # beaten in 9 of 10
    Member(version=9, step=40, played=0),  # nothing is known: one half
    Member(version=13, step=60, played=8, won=0.5),  # 1.5 of 10
]


def newest_half(members: Sequence[Member]) -> list[float]:
    return [0.0, 0.0, 1.0, 1.0]


def nobody(members: Sequence[Member]) -> list[float]:
    return [0.0 for _ in members]


@pytest.mark.medium
@each_case(
    ("settings", "expected"),
    [
        ({"rule": "latest"}, {0: 0, 4: 0, 9: 0, 13: 1}),
        ({"rule": "uniform"}, {0: 1 / 4, 4: 1 / 4, 9: 1 / 4, 13: 1 / 4}),
        ({"rule": "uniform", "newest": 2}, {0: 1 / 3, 9: 1 / 3, 13: 1 / 3}),
        ({"rule": "pfsp"}, {0: 0.25 / 1.2325, 4: 0.01 / 1.2325, 9: 0.25 / 1.2325, 13: 0.7225 / 1.2325}),
        ({"rule": f"{__name__}:newest_half"}, {0: 0, 4: 0, 9: 1 / 2, 13: 1 / 2}),
    ],
)
def test_each_rule_gives_each_member_its_share(settings: dict[str, Any], expected: dict[int, float]) -> None:
    """By hand; and over many groups, members are drawn so often, the same ones under the same seed."""
    league = LeagueSettings.model_validate(settings)
    assert shares(MEMBERS, league) == pytest.approx(expected)
    groups, told = 4000, []
    for _ in range(2):
        told.append([draw(MEMBERS, league, seed=7, group_id=group, role="second") for group in range(groups)])
    assert told[0] == told[1]
    drawn = Counter(told[0])
    for version, share in expected.items():
        assert abs(drawn[version] / groups - share) <= 4 * (share * (1 - share) / groups) ** 0.5
    others = [draw(MEMBERS, league, seed=8, group_id=group, role="second") for group in range(groups)]
    assert (others != told[0]) == (max(expected.values()) < 1)


def test_one_more_member_changes_the_draw_of_its_own_share_alone() -> None:
    """Siblings that begin before and after it joined meet the same one, unless it is the new one."""
    league, groups = LeagueSettings(), range(1000)
    before, after = (
        [draw(members, league, seed=7, group_id=group, role="second") for group in groups]
        for members in (MEMBERS[:3], MEMBERS)
    )
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {13} and abs(len(moved) / 1000 - 1 / 4) < 0.06


def test_who_plays_is_drawn_by_the_group() -> None:
    """`either`: all but one are past selves, each role as often; the share says in how many groups there are any."""
    tables = {"a": "either", "b": "either", "c": "league"}
    league, groups = LeagueSettings(share=0.75), 4000
    found = Counter(past_self_roles(tables, league, seed=3, group_id=group) for group in range(groups))
    assert found.keys() == {frozenset(), frozenset({"a", "c"}), frozenset({"b", "c"})}
    assert abs(found[frozenset()] / groups - 0.25) < 0.03
    assert abs(found[frozenset({"a", "c"})] - found[frozenset({"b", "c"})]) / groups < 0.05
    assert {past_self_roles({"c": "league"}, LeagueSettings(), seed=3, group_id=group) for group in range(20)} == {
        frozenset({"c"})
    }


def test_a_league_without_checkpoints_is_the_model_that_the_run_began_with() -> None:
    assert from_json(None) == [FIRST] and from_json(to_json(MEMBERS)) == MEMBERS
    for rule in ("latest", "uniform", "pfsp"):
        assert draw([FIRST], LeagueSettings(rule=rule), seed=0, group_id=3, role="a") == 0


@pytest.mark.parametrize(
    ("rule", "wrong"),
    [
        ("strongest", r"league\.rule = 'strongest': give 'latest', 'uniform', 'pfsp' or module:function"),
        (f"{__name__}:nobody", r"must give each of 4 members a weight from 0, not all of them 0; it gave \[0\.0, "),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused(rule: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        shares(MEMBERS, LeagueSettings(rule=rule))


@each_case(
    ("role", "sections", "wrong"),
    [
        ({}, {"train": {}}, r"roles\.0\.plays = 'league': past selves are adapters .*train\.lora_rank = 16"),
        ({"adapter": True}, {}, r"roles\.0\.adapter = True: .*gives the role to past selves, so it learns nothing"),
        ({"algo": {"kind": "ppo"}}, {}, r"roles\.0\.algo = .*gives the role to past selves"),
        ({}, {"engine": {"sync": "full"}}, r"engine\.sync = 'full': .*give 'auto'"),
        ({}, {"rollout": {"roles": {"b": "frozen"}}}, r"roles\.0\.plays = 'league': rollout\.roles gives b to another"),
        ({"plays": "either"}, {}, r"roles\.0\.plays = 'either': give it to two roles or more"),
        ({"plays": "legue"}, {}, r"roles\.0\.plays = 'legue'"),
    ],
)
def test_a_role_that_past_selves_cannot_play_is_refused(
    role: dict[str, Any], sections: dict[str, Any], wrong: str
) -> None:
    document = {"model": "m", "env": {"id": "test/one"}, "train": {"lora_rank": 4}, **sections}
    with pytest.raises(ConfigError, match=wrong):
        config.parse({**document, "roles": [{"name": "b", "plays": "league", **role}]})
