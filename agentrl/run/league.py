"""The league of a run: checkpoints that joined it, on disk and at the engines, and how the policy did against each.

Owns the folder of past selves and the members as the store knows them. The learner's process has the only one: it lets
a checkpoint join, and makes a member known once every engine serves it, so that no turn asks for one in vain. What was
won is in the metrics of each step, so a restart counts what its lineage counts.

    league/7/       the adapters of version 7, as a checkpoint holds them
"""

from __future__ import annotations

import math
import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import trio

from agentrl.config import RunConfig
from agentrl.config.league import FIRST, Member, draw, from_json, past_self_roles, to_json
from agentrl.engine.client import EngineClient
from agentrl.engine.weight_sync import adapters
from agentrl.errors import EngineError
from agentrl.host.disk_space import wait_for_space
from agentrl.records import Group, Json, Trajectory, WeightVersion
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.run_values import LEAGUE


def folders(run: RunDir) -> dict[int, Path]:
    """The folders of past selves by version."""
    league_paths = (run.path / "league").glob("*")
    return {int(member_folder.name): member_folder for member_folder in league_paths if member_folder.name.isdecimal()}


class League:
    """Invariant: all members that the store names have a folder, and every engine has confirmed them."""

    def __init__(self, config: RunConfig, run: RunDir, store: RunStore) -> None:
        self._config, self._store, self._root = config, store, run.path / "league"
        # A member that a restart undid stays at the engines: an episode may have begun against it.
        self._joined = {
            version: member_folder for version, member_folder in folders(run).items() if _stands(store, version)
        }
        announced = {member.version for member in from_json(LEAGUE.of(store.meta))}
        # Members that were on disk before a kill and that nobody announced wait again: they are made known with the
        # next push, so a crash between the two only delays them.
        self._waiting = {
            version: member_folder for version, member_folder in self._joined.items() if version not in announced
        }
        self._table: dict[int, list[float]] = defaultdict(lambda: [0, 0.0])
        for step_row in store.metrics.values("step"):
            self._count(step_row.values.get("league") or {})
        LEAGUE.set(store, to_json(self.members))

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of this step joins."""
        return step > 0 and step % self._config.league.every == 0

    def join(self, version: WeightVersion, checkpoint: Path) -> None:
        """Have a saved checkpoint join, whole or not at all. A later `announce` makes it known."""
        member_folder = self._root / str(version.version)
        if version.version in self._joined or any(
            self._store.versions.step_of(joined_version) == version.step for joined_version in self._joined
        ):
            return
        draft_folder = self._root / f".draft-{os.getpid()}"
        shutil.rmtree(draft_folder, ignore_errors=True)
        shutil.copytree(checkpoint / "adapter", draft_folder)
        # Whole or not at all: `folders` takes every folder with a number for a name, also one that a killed copy has
        # left half done.
        draft_folder.rename(member_folder)
        self._joined[version.version] = self._waiting[version.version] = member_folder

    async def announce(self, urls: Sequence[str]) -> None:
        """Have all engines load the members that wait, and make known those that all have confirmed, with what is won.
        If an engine does not answer, its members wait for the next call."""
        engine_settings = self._config.engine
        for member_version, member_folder in list(self._waiting.items()):
            try:
                for engine_url in urls:
                    async with aclosing(
                        EngineClient(engine_url, api_key=engine_settings.key_of(engine_url), kind=engine_settings.kind)
                    ) as engine_client:
                        await adapters.load(
                            [engine_client],
                            member_folder,
                            member_version,
                            kept=True,
                            deadline_s=engine_settings.admin_deadline_s,
                        )
            # Not an error of the run: a member that one engine lacks is not made known, so no turn asks for it, and the
            # next push tries again.
            except EngineError:
                break
            del self._waiting[member_version]
        outgrown = self._outgrown()
        await self._write_members()
        for member_version, member_folder in outgrown.items():
            with suppress(EngineError):  # one that does not answer has it until it is started again
                for engine_url in urls:
                    async with aclosing(
                        EngineClient(engine_url, api_key=engine_settings.key_of(engine_url), kind=engine_settings.kind)
                    ) as engine_client:
                        await adapters.forget(
                            [engine_client], member_version, deadline_s=engine_settings.admin_deadline_s
                        )
            # Known to nobody by now, since the list of members was written first: a turn that drew it in between would
            # ask engines for an adapter that is gone.
            shutil.rmtree(member_folder)

    async def _write_members(self) -> None:
        write_row = partial(LEAGUE.set, self._store, to_json(self.members))
        await wait_for_space(
            partial(trio.to_thread.run_sync, write_row), deadline_s=self._config.train.stall_deadline_s
        )

    def _outgrown(self) -> dict[int, Path]:
        """Leave out the members that no group can meet any more, and return their folders. A group that meets older
        ones than the newest was admitted before these joined, but not longer ago than its tokens may be sampled."""
        member_limit = (
            self._config.league.newest + math.ceil(self._config.buffer.steps_ahead / self._config.league.every) + 1
        )
        outgrown = sorted(version for version in self._joined if version not in self._waiting)[:-member_limit]
        return {version: self._joined.pop(version) for version in outgrown}

    @property
    def members(self) -> list[Member]:
        """Oldest first: the model that the run began with, and all that engines have."""
        joined_versions = sorted(version for version in self._joined if version not in self._waiting)
        league_members = [
            FIRST,
            *(Member(version=version, step=self._store.versions.step_of(version)) for version in joined_versions),
        ]
        game_counts = self._table
        return [
            replace(member, played=int(game_counts[member.version][0]), won=game_counts[member.version][1])
            if member.version in game_counts
            else member
            for member in league_members
        ]

    def count(self, groups: Iterable[Group]) -> dict[str, Json]:
        """Add a step's games to the members' counts. Returns its metrics: games and wins of the policy, by version, and
        the share of all games that it won."""
        by_member: dict[str, list[float]] = {}
        for step_group in groups:
            scored_members = (
                [] if step_group.skipped else [member for member in step_group.trajectories if member.scored]
            )
            if not scored_members or not (past_roles := self._played_by_past_selves(step_group)):
                continue
            # Who was met is read from the turns, not drawn again: the rule may look at results, which have changed
            # since the group drew.
            met_versions = [
                version for member in scored_members if (version := opponent_of(member, past_roles)) is not None
            ]
            version = met_versions[0] if met_versions else self._drawn(step_group, past_roles)
            for member in scored_members:
                opponent, won_games = game(member, past_roles, version)
                game_count, win_count = by_member.get(str(opponent), (0, 0.0))
                by_member[str(opponent)] = [game_count + 1, win_count + won_games]
        self._count(by_member)
        game_count = sum(game_count for game_count, _ in by_member.values())
        win_rate = sum(won_games for _, won_games in by_member.values()) / game_count if game_count else None
        return {"league": dict(by_member), "league_win_rate": win_rate}

    def _played_by_past_selves(self, group: Group) -> frozenset[str]:
        run_config = self._config
        return past_self_roles(run_config.league_roles, run_config.league, seed=run_config.seed, group_id=group.id)

    def _drawn(self, group: Group, roles: Collection[str]) -> int:
        """The member that a group was to meet of which no episode came so far. The workers may have drawn another one
        where the rule looks at games that were played since."""
        league_members, run_config, past_role = self.members, self._config, min(roles)
        league_members = league_members[:1] + [
            member for member in league_members[1:] if member.step < group.started_step
        ]
        return draw(league_members, run_config.league, seed=run_config.seed, group_id=group.id, role=past_role)

    def _count(self, results: Mapping[str, Sequence[float]]) -> None:
        for member_version, (game_count, win_count) in results.items():
            self._table[int(member_version)][0] += game_count
            self._table[int(member_version)][1] += win_count


def opponent_of(episode: Trajectory, roles: Collection[str]) -> int | None:
    """The member that an episode was played against, of several the one that acted first; None if none acted in
    `roles`, which past selves play."""
    acted_turns = (
        acted_turn
        for acted_turn in episode.turns
        if acted_turn.role in roles and not acted_turn.learns and acted_turn.spans
    )
    return next((acted_turn.spans[0].version for acted_turn in acted_turns), None)


def game(episode: Trajectory, roles: Collection[str], version: int) -> tuple[int, float]:
    """The member that an episode was played against, and what the policy won: 1, 0, or one half of a draw. The policy
    has won if its roles have the higher outcome on average. Past selves play `roles`; where none of them acted before
    the end, the member is `version`, which the episode was to meet. A side that did not act has won or lost as well:
    the other one may have broken a rule first."""
    own_roles, opposing_roles = (
        {played_turn.role for played_turn in episode.turns if played_turn.learns == is_learning}
        for is_learning in (True, False)
    )
    with_outcome = set(episode.record.outcomes)
    # Without an outcome of its own a role has the episode's.
    own_roles = own_roles - set(roles) or with_outcome - set(roles) or {""}
    opposing_roles = opposing_roles & set(roles) or set(roles)
    own_mean, opposing_mean = (
        sum(episode.record.outcome_of(side_role) for side_role in side_roles) / len(side_roles)
        for side_roles in (own_roles, opposing_roles)
    )
    met_version = opponent_of(episode, roles)
    return version if met_version is None else met_version, 0.5 if own_mean == opposing_mean else float(
        own_mean > opposing_mean
    )


def _stands(store: RunStore, version: int) -> bool:
    return store.versions.knows_version(version) and not store.versions.is_undone(version)
