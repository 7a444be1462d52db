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
    paths = (run.path / "league").glob("*")
    return {int(folder.name): folder for folder in paths if folder.name.isdecimal()}


class League:
    """Invariant: all members that the store names have a folder, and every engine has confirmed them."""

    def __init__(self, config: RunConfig, run: RunDir, store: RunStore) -> None:
        self._config, self._store, self._root = config, store, run.path / "league"
        # A member that a restart undid stays at the engines: an episode may have begun against it.
        self._joined = {version: folder for version, folder in folders(run).items() if _stands(store, version)}
        announced = {member.version for member in from_json(LEAGUE.of(store.meta))}
        # Members that were on disk before a kill and that nobody announced wait again: they are made known with the
        # next push, so a crash between the two only delays them.
        self._waiting = {version: folder for version, folder in self._joined.items() if version not in announced}
        self._table: dict[int, list[float]] = defaultdict(lambda: [0, 0.0])
        for row in store.metrics.values("step"):
            self._count(row.values.get("league") or {})
        LEAGUE.set(store, to_json(self.members))

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of this step joins."""
        return step > 0 and step % self._config.league.every == 0

    def join(self, version: WeightVersion, checkpoint: Path) -> None:
        """Have a saved checkpoint join, whole or not at all. A later `announce` makes it known."""
        folder = self._root / str(version.version)
        if version.version in self._joined or any(
            self._store.versions.step_of(joined) == version.step for joined in self._joined
        ):
            return
        draft = self._root / f".draft-{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(checkpoint / "adapter", draft)
        # Whole or not at all: `folders` takes every folder with a number for a name, also one that a killed copy has
        # left half done.
        draft.rename(folder)
        self._joined[version.version] = self._waiting[version.version] = folder

    async def announce(self, urls: Sequence[str]) -> None:
        """Have all engines load the members that wait, and make known those that all have confirmed, with what is won.
        If an engine does not answer, its members wait for the next call."""
        engine = self._config.engine
        for version, folder in list(self._waiting.items()):
            try:
                for url in urls:
                    async with aclosing(EngineClient(url, api_key=engine.key_of(url), kind=engine.kind)) as client:
                        await adapters.load([client], folder, version, kept=True, deadline_s=engine.admin_deadline_s)
            # Not an error of the run: a member that one engine lacks is not made known, so no turn asks for it, and the
            # next push tries again.
            except EngineError:
                break
            del self._waiting[version]
        old = self._outgrown()
        await self._write_members()
        for version, folder in old.items():
            with suppress(EngineError):  # one that does not answer has it until it is started again
                for url in urls:
                    async with aclosing(EngineClient(url, api_key=engine.key_of(url), kind=engine.kind)) as client:
                        await adapters.forget([client], version, deadline_s=engine.admin_deadline_s)
            # Known to nobody by now, since the list of members was written first: a turn that drew it in between would
            # ask engines for an adapter that is gone.
            shutil.rmtree(folder)

    async def _write_members(self) -> None:
        write = partial(LEAGUE.set, self._store, to_json(self.members))
        await wait_for_space(partial(trio.to_thread.run_sync, write), deadline_s=self._config.train.stall_deadline_s)

    def _outgrown(self) -> dict[int, Path]:
        """Leave out the members that no group can meet any more, and return their folders. A group that meets older
        ones than the newest was admitted before these joined, but not longer ago than its tokens may be sampled."""
        most = self._config.league.newest + math.ceil(self._config.buffer.steps_ahead / self._config.league.every) + 1
        old = sorted(version for version in self._joined if version not in self._waiting)[:-most]
        return {version: self._joined.pop(version) for version in old}

    @property
    def members(self) -> list[Member]:
        """Oldest first: the model that the run began with, and all that engines have."""
        joined = sorted(version for version in self._joined if version not in self._waiting)
        members = [FIRST, *(Member(version=version, step=self._store.versions.step_of(version)) for version in joined)]
        table = self._table
        return [
            replace(member, played=int(table[member.version][0]), won=table[member.version][1])
            if member.version in table
            else member
            for member in members
        ]

    def count(self, groups: Iterable[Group]) -> dict[str, Json]:
        """Add a step's games to the members' counts. Returns its metrics: games and wins of the policy, by version, and
        the share of all games that it won."""
        by_member: dict[str, list[float]] = {}
        for group in groups:
            scored = [] if group.skipped else [member for member in group.trajectories if member.scored]
            if not scored or not (roles := self._played_by_past_selves(group)):
                continue
            # Who was met is read from the turns, not drawn again: the rule may look at results, which have changed
            # since the group drew.
            met = [version for member in scored if (version := opponent_of(member, roles)) is not None]
            version = met[0] if met else self._drawn(group, roles)
            for member in scored:
                against, won = game(member, roles, version)
                games, wins = by_member.get(str(against), (0, 0.0))
                by_member[str(against)] = [games + 1, wins + won]
        self._count(by_member)
        games = sum(games for games, _ in by_member.values())
        rate = sum(won for _, won in by_member.values()) / games if games else None
        return {"league": dict(by_member), "league_win_rate": rate}

    def _played_by_past_selves(self, group: Group) -> frozenset[str]:
        config = self._config
        return past_self_roles(config.league_roles, config.league, seed=config.seed, group_id=group.id)

    def _drawn(self, group: Group, roles: Collection[str]) -> int:
        """The member that a group was to meet of which no episode came so far. The workers may have drawn another one
        where the rule looks at games that were played since."""
        members, config, role = self.members, self._config, min(roles)
        members = members[:1] + [member for member in members[1:] if member.step < group.started_step]
        return draw(members, config.league, seed=config.seed, group_id=group.id, role=role)

    def _count(self, results: Mapping[str, Sequence[float]]) -> None:
        for version, (games, wins) in results.items():
            self._table[int(version)][0] += games
            self._table[int(version)][1] += wins


def opponent_of(episode: Trajectory, roles: Collection[str]) -> int | None:
    """The member that an episode was played against, of several the one that acted first; None if none acted in
    `roles`, which past selves play."""
    acted = (turn for turn in episode.turns if turn.role in roles and not turn.learns and turn.spans)
    return next((turn.spans[0].version for turn in acted), None)


def game(episode: Trajectory, roles: Collection[str], version: int) -> tuple[int, float]:
    """The member that an episode was played against, and what the policy won: 1, 0, or one half of a draw. The policy
    has won if its roles have the higher outcome on average. Past selves play `roles`; where none of them acted before
    the end, the member is `version`, which the episode was to meet. A side that did not act has won or lost as well:
    the other one may have broken a rule first."""
    ours, theirs = ({turn.role for turn in episode.turns if turn.learns == learns} for learns in (True, False))
    with_outcome = set(episode.record.outcomes)
    # Without an outcome of its own a role has the episode's.
    ours = ours - set(roles) or with_outcome - set(roles) or {""}
    theirs = theirs & set(roles) or set(roles)
    mean, against = (sum(episode.record.outcome_of(role) for role in side) / len(side) for side in (ours, theirs))
    met = opponent_of(episode, roles)
    return version if met is None else met, 0.5 if mean == against else float(mean > against)


def _stands(store: RunStore, version: int) -> bool:
    return store.versions.knows_version(version) and not store.versions.is_undone(version)
