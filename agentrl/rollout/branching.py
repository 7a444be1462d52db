"""Pivot resampling (`[rollout.pivot]`): groups that play an episode on from one of its turns, as a run goes on.

Owns which groups get such a fork, and the rules that choose its turn. A rule may use everything that is known of the
played episode. Tokens sampled after the fork are independent of it: so a rule changes how often a state is visited, and
not the expected return from there. Never knows how a fork is made or restored (see `agentrl.store.episodes.groups`).
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Final, NamedTuple, cast

from agentrl import registry
from agentrl.config import RunConfig
from agentrl.config.sections import PIVOT_RULES
from agentrl.errors import UsageError
from agentrl.records import Group, GroupState, Trajectory, Turn
from agentrl.store.episodes.groups import Groups
from agentrl.store.reads import Readers

_TRIED: Final = 4  # forks that fail one after the other before no more are made


class Pivot(NamedTuple):
    """Place to fork: the turn that is played anew, 1 or later."""

    episode_id: int
    turn: int


PivotRule = Callable[[Group, random.Random], Pivot | None]
"""Chooses the fork of a closed group, None if there should be none. `module:name` in `rollout.pivot.rule` names one."""


def choices(group: Group) -> Iterator[tuple[Trajectory, Turn]]:
    """The turns from which a group's episodes may be played on: of episodes that the policy ended, those that the
    learning policy sampled, without the first one."""
    for trajectory in group.trajectories:
        if trajectory.stop_reason is not None and trajectory.stop_reason.by_policy:
            for turn in trajectory.turns[1:]:
                if turn.learns and turn.logprobs:
                    yield trajectory, turn


def uniform(group: Group, chance: random.Random) -> Pivot | None:
    """Any turn of any episode, each as likely."""
    possible_pivots = [Pivot(trajectory.episode_id, turn.index) for trajectory, turn in choices(group)]
    return chance.choice(possible_pivots) if possible_pivots else None


def entropy(group: Group, chance: random.Random) -> Pivot | None:
    """The turn whose tokens were least expected: their mean -log p, which is the policy's entropy in expectation."""
    ranked_turns = [(-fmean(turn.logprobs), trajectory.episode_id, turn.index) for trajectory, turn in choices(group)]
    return Pivot(*max(ranked_turns)[1:]) if ranked_turns else None


@dataclass(frozen=True, slots=True)
class LowReward:
    """The first turn whose process reward is less than `below`, in one of the episodes that have such a turn."""

    below: float

    def __call__(self, group: Group, chance: random.Random) -> Pivot | None:
        first_by_episode: dict[int, Pivot] = {}
        for trajectory, turn in choices(group):
            if turn.reward < self.below:
                first_by_episode.setdefault(trajectory.episode_id, Pivot(trajectory.episode_id, turn.index))
        return chance.choice(list(first_by_episode.values())) if first_by_episode else None


class Pivots:
    """Forks a share of the run's closed groups, once each; after a restart, the same ones."""

    def __init__(self, groups: Groups, reads: Readers, rule: PivotRule, *, share: float, k: int, seed: int) -> None:
        self._groups, self._reads, self._rule = groups, reads, rule
        self._share, self._k, self._seed = share, k, seed
        self._done = groups.forked()
        self._seen = 0
        self._due: deque[int] = deque()

    @classmethod
    def of(cls, config: RunConfig, groups: Groups, reads: Readers) -> Pivots | None:
        """Return the pivots of a run file, None without `[rollout.pivot]`. Raises UsageError for a rule that cannot be
        imported."""
        pivot_settings = config.rollout.pivot
        if pivot_settings is None:
            return None
        built_in_rules: dict[str, PivotRule] = dict(zip(PIVOT_RULES, (uniform, entropy, LowReward(0.0)), strict=True))
        pivot_rule = built_in_rules.get(pivot_settings.rule) or cast(
            PivotRule, registry.load_reference(pivot_settings.rule)
        )
        return cls(groups, reads, pivot_rule, share=pivot_settings.share, k=pivot_settings.k, seed=config.seed)

    def fork(self) -> bool:
        """Start the next fork that is due. Returns whether there was one."""
        for group_result in self._reads.results(self._seen):
            self._seen = group_result.id
            if self._chance(group_result.id, "lot").random() < self._share and group_result.id not in self._done:
                self._due.append(group_result.id)
        while self._due and not self._hopeless():
            closed_group = self._reads.group(self._due[0])
            chosen_pivot = self._rule(closed_group, self._chance(closed_group.id, "turn"))
            try:
                if chosen_pivot is not None:
                    self._groups.fork(chosen_pivot.episode_id, turn=chosen_pivot.turn, k=self._k)
            except UsageError:  # its tokens are gone, or a rule of the user's chose a turn that is none
                chosen_pivot = None
            # Only after the fork is in the store: on a full disk the call above raises, and the group is still due at
            # the next try.
            self._due.popleft()
            if chosen_pivot is not None:
                return True
        return False

    def _chance(self, group_id: int, what: str) -> random.Random:
        # A generator of its own for each group and question: the lot of a group does not depend on which groups closed
        # before it, so a restart draws the same ones. One generator that goes on would draw by the order of ends.
        return random.Random(f"{self._seed}/pivot/{group_id}/{what}")

    def _hopeless(self) -> bool:
        """Whether no environment of the latest forks could be brought to its turn: then no more are made."""
        # A fork that cannot be brought to its turn has taken the place of a group that would have trained. A few
        # failures in a row are taken for a property of the environment, and the run goes on without forks instead of
        # ending.
        latest_states = self._groups.fork_states(_TRIED)
        if len(latest_states) < _TRIED or set(latest_states) != {GroupState.FAILED}:
            return False
        if self._share:
            correction = "environments must be replayable or offer snapshots (docs/explanation/partial-rollouts.md)"
            print(
                f"agentrl: the last {_TRIED} forks failed, so rollout.pivot makes no more: {correction}",
                file=sys.stderr,
            )
        self._share = 0.0
        self._due.clear()
        return True
