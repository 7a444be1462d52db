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
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.config.league import FIRST, Member, from_json, to_json
from agentrl.engine.client import EngineClient
from agentrl.engine.weight_sync import adapters
from agentrl.errors import EngineError
from agentrl.records import Group, Json, Trajectory, WeightVersion
from agentrl.run.run_folder import RunDir
from agentrl.store.interfaces import LearnerStore
from agentrl.store.run_values import LEAGUE


def folders(run: RunDir) -> dict[int, Path]:
    """The folders of past selves by version."""
    found = (run.path / "league").glob("*")
    return {int(folder.name): folder for folder in found if folder.name.isdecimal()}


class League:
    """Invariant: all members that the store names have a folder, and every engine has confirmed them."""

    def __init__(self, config: RunConfig, run: RunDir, store: LearnerStore) -> None:
        self._config, self._store, self._root = config, store, run.path / "league"
        # A member that a restart undid stays at the engines: an episode may have begun against it.
        self._joined = {version: folder for version, folder in folders(run).items() if _stands(store, version)}
        named = {member.version for member in from_json(LEAGUE.of(store.meta))}
        self._waiting = {version: folder for version, folder in self._joined.items() if version not in named}
        self._table: dict[int, list[float]] = defaultdict(lambda: [0, 0.0])
        for row in store.metrics("step"):
            self._count(row.values.get("league") or {})
        LEAGUE.set(store, to_json(self.members))

    def is_due(self, step: int) -> bool:
        """Whether the checkpoint of this step joins."""
        return step > 0 and step % self._config.league.every == 0

    def join(self, version: WeightVersion, checkpoint: Path) -> None:
        """Have a saved checkpoint join, whole or not at all. A later `announce` makes it known."""
        folder = self._root / str(version.version)
        if version.version in self._joined or any(
            self._store.step_of(joined) == version.step for joined in self._joined
        ):
            return
        draft = self._root / f".draft-{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(checkpoint / "adapter", draft)
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
            except EngineError:
                break
            del self._waiting[version]
        old = self._outgrown()
        LEAGUE.set(self._store, to_json(self.members))
        for version, folder in old.items():
            with suppress(EngineError):  # one that does not answer has it until it is started again
                for url in urls:
                    async with aclosing(EngineClient(url, api_key=engine.key_of(url), kind=engine.kind)) as client:
                        await adapters.forget([client], version, deadline_s=engine.admin_deadline_s)
            shutil.rmtree(folder)

    def _outgrown(self) -> dict[int, Path]:
        """Leave out the members that no group can meet any more, and return their folders. A group that meets older
        ones than the newest was admitted before these joined, but not longer ago than its tokens may be sampled."""
        kept = self._config.league.newest + math.ceil(self._config.buffer.steps_ahead / self._config.league.every) + 1
        old = sorted(version for version in self._joined if version not in self._waiting)[:-kept]
        return {version: self._joined.pop(version) for version in old}

    @property
    def members(self) -> list[Member]:
        """Oldest first: the model that the run began with, and all that engines have."""
        known = sorted(version for version in self._joined if version not in self._waiting)
        found = [FIRST, *(Member(version=version, step=self._store.step_of(version)) for version in known)]
        table = self._table
        return [
            replace(member, played=int(table[member.version][0]), won=table[member.version][1])
            if member.version in table
            else member
            for member in found
        ]

    def count(self, groups: Iterable[Group]) -> dict[str, Json]:
        """What a step's episodes say of the members, for its metrics: games and wins of the policy, by version, and the
        share of all games that it won."""
        found: dict[str, list[float]] = {}
        for member in (
            trajectory
            for group in groups
            if not group.skipped
            for trajectory in group.trajectories
            if trajectory.scored
        ):
            if (played := game(member, self._config.league_roles)) is not None:
                version, won = played
                games, wins = found.get(str(version), (0, 0.0))
                found[str(version)] = [games + 1, wins + won]
        self._count(found)
        games = sum(games for games, _ in found.values())
        rate = sum(won for _, won in found.values()) / games if games else None
        return {"league": dict(found), "league_win_rate": rate}

    def _count(self, found: Mapping[str, Sequence[float]]) -> None:
        for version, (games, wins) in found.items():
            self._table[int(version)][0] += games
            self._table[int(version)][1] += wins


def game(episode: Trajectory, roles: Collection[str]) -> tuple[int, float] | None:
    """The member that an episode was played against (of several, the one that acted first), and what the policy won: 1,
    0, or one half of a draw. It has won if its roles have the higher outcome on average. None if no past self acted."""
    theirs = [turn for turn in episode.turns if turn.role in roles and not turn.learns and turn.spans]
    ours = {turn.role for turn in episode.turns if turn.learns}
    if not theirs or not ours:
        return None
    mean = sum(episode.record.outcome_of(role) for role in ours) / len(ours)
    acted = {turn.role for turn in theirs}
    against = sum(episode.record.outcome_of(role) for role in acted) / len(acted)
    return theirs[0].spans[0].version, 0.5 if mean == against else float(mean > against)


def _stands(store: LearnerStore, version: int) -> bool:
    return store.knows_version(version) and not store.is_undone(version)
