"""A league of past selves: its settings, its members, and the rules by which an opponent is drawn.

A member is a weight version of the run that a checkpoint holds; version 0 is the model that the run began with, and
always one. Owns the draw, which is a function of the run's seed, the group and the members. Never knows a store, an
engine or a token.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from agentrl import registry
from agentrl.config.sections import Count, Section
from agentrl.errors import ConfigError, UsageError


class LeagueSettings(Section):
    """The past selves that play the roles which `[[roles]] plays` gives to them, and how often they play."""

    every: Count = 20
    """Optimizer steps between two members: after each, a checkpoint is saved and joins the league."""

    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the training groups that meet past selves; in the others the policy plays and learns all roles.
    Evaluation always meets past selves."""

    rule: str = "uniform"
    """Rule that draws a past self for a group: "latest", "uniform", "pfsp" (the members that the policy beats least),
    or `module:function` of yours."""

    newest: Count = 32
    """Number of newest members to draw from, besides the model that the run began with."""

    measured: Literal["first", "latest", "drawn"] = "first"
    """Opponent in evaluation: the model that the run began with ("first"), the newest member ("latest"), or one drawn
    as in training ("drawn")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """`version` was made by optimizer step `step`. It `played` so many scored episodes against the policy, which won
    `won` of them: a draw counts one half."""

    version: int
    step: int
    played: int = 0
    won: float = 0.0

    @property
    def beaten(self) -> float:
        """The share of games that the policy wins against it, as if one more had been won and one lost."""
        # Laplace's rule. With the plain share, a member that lost its first game would never be drawn again, as its
        # weight under "pfsp" were 0.
        return (self.won + 1) / (self.played + 2)


Rule = Callable[[Sequence[Member]], Sequence[float]]
"""Weights of members, oldest first: each is drawn in proportion to its own. A rule of yours is such a function."""

_PFSP_POWER: Final = 2.0  # AlphaStar's f_hard
FIRST: Final = Member(version=0, step=0)


def rule(settings: LeagueSettings) -> Rule:
    """The rule that the settings name. Raises ConfigError.

    `pfsp` is prioritised fictitious self-play (Vinyals et al. 2019, AlphaStar): (1 - P[the policy wins])^power."""
    if settings.rule == "latest":
        return lambda members: [float(member is members[-1]) for member in members]
    if settings.rule == "uniform":
        return lambda members: [1.0] * len(members)
    if settings.rule == "pfsp":
        return lambda members: [(1 - member.beaten) ** _PFSP_POWER for member in members]
    try:
        return registry.load_reference(settings.rule)
    except UsageError as reference_error:
        hint = f"give 'latest', 'uniform', 'pfsp' or module:function ({reference_error})"
        raise ConfigError("league.rule", settings.rule, hint) from None


def shares(members: Sequence[Member], settings: LeagueSettings) -> dict[int, float]:
    """How probable each member is to be drawn, by version. Raises ConfigError for a rule that gives no such weights."""
    # The first one always: it is the fixed point against which progress shows, and a run that only meets its newest
    # selves may go round in circles without noticing.
    candidates = [*members[:1], *members[1:][-settings.newest :]]
    member_weights = [float(member_weight) for member_weight in rule(settings)(candidates)]
    weight_sum = sum(member_weights)
    if len(member_weights) != len(candidates) or min(member_weights) < 0 or not 0 < weight_sum < float("inf"):
        rule_contract = f"it must give each of {len(candidates)} members a weight from 0, not all of them 0"
        hint = f"{rule_contract}; it gave {member_weights}"
        raise ConfigError("league.rule", settings.rule, hint)
    return {
        member.version: member_weight / weight_sum
        for member, member_weight in zip(candidates, member_weights, strict=True)
    }


def past_self_roles(tables: Mapping[str, str], settings: LeagueSettings, *, seed: int, group_id: int) -> frozenset[str]:
    """The roles that past selves play in a group, of those in `tables` (role to "league" or "either"). Of the roles
    that either plays, one is drawn for the policy."""
    # A generator from the group's number, not one that goes on from group to group: a restarted run, or another worker,
    # draws the same for the same group.
    generator = random.Random(f"{seed}/{group_id}")
    if generator.random() >= settings.share:
        return frozenset()
    either_roles = sorted(role_name for role_name, plays in tables.items() if plays == "either")
    return frozenset(tables) - ({generator.choice(either_roles)} if either_roles else frozenset())


def draw(members: Sequence[Member], settings: LeagueSettings, *, seed: int, group_id: int, role: str) -> int:
    """The version that plays a role in a group. It depends on the members, so pass the same ones for all episodes of a
    group: then all meet the same version.

    Each member's clock rings after a time of its own, at a rate of its share; the first wins. So one more member, or
    other shares, change few draws."""
    share_of = shares(members, settings)
    clock_by_version = {
        version: -math.log(1 - random.Random(f"{seed}/{group_id}/{role}/{version}").random()) / member_share
        for version, member_share in share_of.items()
        if member_share
    }
    return min(clock_by_version, key=clock_by_version.__getitem__)


def to_json(members: Sequence[Member]) -> str:
    """The members as the store keeps them."""
    return json.dumps([asdict(member) for member in members])


def from_json(text: str | None) -> list[Member]:
    """Read what `to_json` wrote, oldest first; the first member alone if nothing is written yet."""
    member_tables: list[dict[str, Any]] = json.loads(text) if text else []
    return [Member(**member_fields) for member_fields in member_tables] or [FIRST]
