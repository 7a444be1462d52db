"""All checks of a run, and which advice explains another: a cause hides what follows from it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from agentrl.host.terminal_text import printable
from agentrl.run.health import episode_checks, flow_checks, learning_checks, reward_checks, task_checks, weight_checks
from agentrl.run.health.advice import Advice
from agentrl.run.health.run_facts import RECENT, RunFacts

Check = Callable[[RunFacts], Advice | None]

_OF_WEIGHTS = ("moves_too_far", "sampling_differs", "entropy_collapse")
_OF_SILENCE = ("tasks_too_hard", "reward_alike", "groups_alike", "weights_stand_still", "length_drift")
_OF_FAILURES = ("learner_starves", "evaluation_fails", "evaluation_late", "workers_die", "groups_expire")
_WHOLE_TURN = ("calls_not_read", "tasks_too_hard", "length_drift")

# A table and not scores: a full disk starves the learner, stalls the steps and delays evaluations, and a person who is
# told four things fixes the wrong one first. Each check names what it explains; what is explained is not shown. The
# order is that of the output, causes first.
CHECKS: Final[dict[Check, tuple[str, ...]]] = {
    flow_checks.disk_full: ("stalled", "learner_starves", *_OF_FAILURES),
    learning_checks.keeps_going_back: ("stalled", "learner_starves", "rollouts_wait"),
    weight_checks.engine_left_behind: ("weights_not_served", "tokens_too_old", *_OF_WEIGHTS),
    weight_checks.weights_not_served: ("weights_not_applied", "tokens_too_old", *_OF_WEIGHTS),
    weight_checks.weights_not_applied: _OF_WEIGHTS,
    weight_checks.sampling_differs: ("moves_too_far",),
    learning_checks.rate_is_zero: ("weights_stand_still",),
    learning_checks.gradient_not_finite: ("gradient_spikes",),
    learning_checks.moves_too_far: ("gradient_spikes",),
    learning_checks.reference_far: (),
    learning_checks.gradient_spikes: (),
    reward_checks.sampled_cold: ("entropy_collapse", "one_text", *_OF_SILENCE),
    reward_checks.reward_hacking: ("length_drift", "entropy_collapse"),
    reward_checks.one_text: ("wins_without_work", "entropy_collapse", "length_drift", *_OF_SILENCE),
    learning_checks.entropy_collapse: _OF_SILENCE,
    learning_checks.weights_stand_still: (),
    episode_checks.host_fails: ("engine_fails", "sandbox_fails", "env_fails", *_OF_FAILURES),
    episode_checks.engine_fails: _OF_FAILURES,
    episode_checks.sandbox_fails: _OF_FAILURES,
    episode_checks.env_fails: _OF_FAILURES,
    episode_checks.workers_die: (),
    episode_checks.turns_cut: _WHOLE_TURN,
    episode_checks.context_full: ("tasks_too_hard", "length_drift"),
    episode_checks.time_runs_out: ("tasks_too_hard", "learner_starves"),
    episode_checks.calls_not_read: ("tasks_too_hard", "tool_fails"),
    episode_checks.tool_fails: ("tasks_too_hard",),
    reward_checks.source_fails: ("groups_expire",),
    reward_checks.source_alike: ("reward_alike",),
    task_checks.wins_without_work: ("tasks_solved", "length_drift"),
    task_checks.equal_actions_differ: ("outcome_follows_seconds",),
    task_checks.outcome_follows_seconds: (),
    reward_checks.tasks_too_hard: ("tasks_never_vary",),
    reward_checks.tasks_solved: ("tasks_never_vary",),
    reward_checks.reward_alike: ("tasks_never_vary",),
    reward_checks.groups_alike: ("tasks_never_vary",),
    task_checks.tasks_never_vary: (),
    reward_checks.length_drift: (),
    flow_checks.long_episodes_lost: ("tokens_too_old", "groups_expire"),
    flow_checks.tokens_too_old: (),
    flow_checks.groups_expire: (),
    flow_checks.stalled: ("evaluation_late",),
    flow_checks.learner_starves: (),
    flow_checks.rollouts_wait: (),
    flow_checks.evaluation_fails: ("evaluation_late",),
    flow_checks.evaluation_late: (),
}
"""By check: the names of the advice that it explains."""


def examine(facts: RunFacts) -> list[Advice]:
    """The advice on a run, causes first. Empty for a healthy one."""
    findings = [
        (advice, explained_names)
        for run_check, explained_names in CHECKS.items()
        if (advice := run_check(facts)) is not None
    ]
    hidden_names = {explained_name for _, explained_names in findings for explained_name in explained_names}
    return [advice for advice, _ in findings if advice.name not in hidden_names]


_COST = 50  # times as long as a look took, until the next one: looking takes 2% of the time at most
_ELSEWHERE = ("stalled", "disk_full", "source_fails", "tasks_too_hard", "groups_alike", "weights_stand_still")
"""Advice on which the live view has lines of its own."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class HealthLines:
    """The advice on a run in progress, line by line: each when it is new, and again if it went and came back."""

    path: object
    now: Callable[[], float] = time.monotonic
    _shown: set[str] = field(default_factory=set[str])
    _step: int = 0
    _next: float = float("-inf")

    def lines(self, step: int, read: Callable[[], RunFacts]) -> Iterator[str]:
        """Yield the advice that is new since the last call, at optimizer step `step`."""
        look_began_s = self.now()
        if step == self._step or step < RECENT or look_began_s < self._next:
            return
        self._step = step
        try:
            findings = [advice for advice in examine(read()) if advice.name not in _ELSEWHERE]
        except Exception:  # who looks on never ends a run
            log.exception("agentrl health %s is broken, and says nothing more of this run", self.path)
            self._next = float("inf")
            return
        # Paced by what a look costs, not by a fixed time: on a store on a slow disk a look may take seconds, and
        # watching must never become a part of the load.
        self._next = self.now() + _COST * (self.now() - look_began_s)
        new_advice = [advice for advice in findings if advice.name not in self._shown]
        self._shown = {advice.name for advice in findings}
        for advice in new_advice:
            yield printable(f"health: {advice.cause} ({advice.evidence}): agentrl health {self.path}")
