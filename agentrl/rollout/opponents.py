"""Who plays the roles that past selves play, episode by episode.

Owns the choice for a running episode. Never knows the engines that serve past selves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.config.league import LeagueSettings, draw, from_json, past_self_roles
from agentrl.records import Turn
from agentrl.store import Claim, Partial
from agentrl.store.episodes.groups import TRAIN
from agentrl.store.interfaces import EpisodeStore
from agentrl.store.run_values import LEAGUE


@dataclass(frozen=True, slots=True, kw_only=True)
class Opponents:
    """`plays` says of roles whether past selves always play them ("league"), or all of them but one that the group
    draws ("either")."""

    settings: LeagueSettings = field(default_factory=LeagueSettings)
    plays: Mapping[str, str] = field(default_factory=dict[str, str])
    seed: int = 0

    def roles(self, claim: Claim) -> frozenset[str]:
        """The roles that past selves play in an episode, and so do not learn. Evaluation always meets past selves."""
        settings = self.settings if claim.purpose == TRAIN else self.settings.model_copy(update={"share": 1.0})
        return past_self_roles(self.plays, settings, seed=self.seed, group_id=claim.group_id)

    async def version(
        self, store: EpisodeStore, claim: Claim, role: str, turns: Sequence[Turn], begun: Partial | None
    ) -> int | None:
        """The weight version that plays `role` in an episode; None if the policy that learns does.

        A group draws from the members that there were when it was admitted, so all its episodes meet the same one. An
        episode that has begun keeps its own. Evaluation meets the member that the settings say."""
        if role not in self.roles(claim):
            return None
        version_spans = [version_span for turn in turns if turn.role == role for version_span in turn.spans]
        if begun is not None and begun.role == role:
            version_spans += begun.spans
        # What the journal says comes first: the league may have dropped or renumbered members since the episode began,
        # and an opponent that changes in the middle of a game is not the one that the group's baseline is of.
        if version_spans:
            return version_spans[0].version
        league_members, measured_by = from_json(await LEAGUE.awaited(store.meta)), self.settings.measured
        if claim.purpose != TRAIN and measured_by != "drawn":
            return league_members[0 if measured_by == "first" else -1].version
        # Members that joined later are left out, although they are at hand: the siblings that began before them cannot
        # have met them, and a group is only comparable if all its members met the same opponent.
        league_members = league_members[:1] + [
            member for member in league_members[1:] if member.step < claim.started_step
        ]
        return draw(league_members, self.settings, seed=self.seed, group_id=claim.group_id, role=role)
