"""The end of one episode: its outcome and success, from the environment's verdict or from the run's rewarder.

An episode that ended by a failure which the policy could not have caused gets no outcome (law 3). Writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from agentrl.env import step_results
from agentrl.errors import InfrastructureError, PolicyFault
from agentrl.records import StopReason, Trajectory
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.env_calls import TimeUp, rewarded
from agentrl.rollout.journal import EpisodeJournal
from agentrl.rollout.live_env import LiveEnv
from agentrl.rollout.players import Players
from agentrl.rollout.stop_cause import StopCause, failure
from agentrl.store import Ending


class Scoring:
    """Scores an episode that has ended; the environment's last answer holds its verdict."""

    __slots__ = ("_context", "_env", "_journal", "_players")

    def __init__(self, context: RolloutContext, journal: EpisodeJournal, env: LiveEnv, players: Players) -> None:
        self._context, self._journal, self._env, self._players = context, journal, env, players

    async def ending(self, cause: StopCause) -> tuple[StopCause, Ending]:
        """The end of an episode that `cause` ended. The rewarder may change the cause: if it fails, so has the episode;
        if it cannot judge the policy's work in time, the outcome is 0."""
        rewarder, rewarder_outcome = self._context.rewarder, None
        if rewarder is not None and cause.stop_reason.by_policy:
            try:
                rewarder_outcome = await rewarded(rewarder, self._trajectory(cause), self._env.calls)
            except TimeUp as time_up:
                rewarder_outcome, cause = 0.0, StopCause(StopReason.TIME_LIMIT, str(time_up))
            except InfrastructureError as error:
                culprit = error.__cause__ if isinstance(error.__cause__, PolicyFault) else None
                cause = failure(error, self._journal.claim, self._context.tracebacks, culprit)
        if not cause.stop_reason.by_policy:
            return cause, Ending(stop_reason=cause.stop_reason, detail=cause.detail)
        # With a rewarder all roles have the same outcome.
        outcomes = {} if rewarder is not None else dict(self._env.latest.outcomes)
        outcome, is_success = (
            self._outcome(outcomes) if rewarder_outcome is None else (rewarder_outcome, self._env.latest.success)
        )
        return cause, Ending(
            stop_reason=cause.stop_reason, outcome=outcome, success=is_success, outcomes=outcomes, detail=cause.detail
        )

    def _outcome(self, outcomes: Mapping[str, float]) -> tuple[float, bool | None]:
        """Outcome and success by the environment alone. The outcome is that of the one learning role, if there are
        `outcomes` by role and just one role learns; else the environment's, or 0 without any: step rewards are then the
        whole signal. Success is the environment's; if it gives none, the one role succeeds from 1.0 on."""
        env_verdict = self._env.latest
        learning_roles = [role_name for role_name in outcomes if self._players.learns(role_name)]
        # With several learning roles there is no one number for the episode; each role's own outcome trains it, and
        # this one is only shown.
        if len(learning_roles) != 1:
            return env_verdict.outcome or 0.0, env_verdict.success
        role_outcome = outcomes[learning_roles[0]]
        return role_outcome, role_outcome >= 1.0 if env_verdict.success is None else env_verdict.success

    def _trajectory(self, cause: StopCause) -> Trajectory:
        """The episode as a rewarder gets it: with the environment's own verdict, so that a reward may be "the outcome
        less a penalty"."""
        journal, claim, env_verdict = self._journal, self._journal.claim, self._env.latest
        journaled_turns, outcomes = list(journal.turns), dict(env_verdict.outcomes)
        outcome, success = self._outcome(outcomes)
        # The verdict at a full context is no turn's answer.
        if journaled_turns and (last_answer := journaled_turns[-1].step) is not None:
            journaled_turns[-1] = replace(journaled_turns[-1], step=step_results.joined(last_answer, env_verdict))
        return Trajectory(
            episode_id=claim.episode_id,
            group_id=claim.group_id,
            member=claim.member,
            task=claim.task,
            start=journal.start,
            turns=tuple(journaled_turns),
            stop_reason=cause.stop_reason,
            tools=journal.tools,
            outcome=outcome,
            success=success,
            outcomes=outcomes,
        )
