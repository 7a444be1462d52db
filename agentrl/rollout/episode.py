"""One episode, as a state machine over the journal:

    begin ─► render ─► generate ─► journal the action ─► env.step ─► journal the answer ─► … ─► score ─► finish

Every arrow that costs something has a deadline. The policy pays for the work that it asks of the environment: its
tools, its code and their judging may take `step_deadline_s` in a step and `episode_deadline_s` in all steps together.
If either runs out, the episode ends with a time limit, and is scored. Neither counts the model's generation or waiting
for the host's shared resources (see `agentrl.host.clocks`). The environment's own code has `step_deadline_s` of its own
per call; past it the environment has failed.

The parts of an episode, each of which knows the ones above it at most:

    journal.py         all writes to the store, and the law that rests on each
    live_env.py        the environment, each call under its deadline
    players.py         who samples the turns of each role
    prompts.py         the tokens before each turn
    turn_sampler.py    a prompt becomes a turn
    compactor.py       a turn gets its answer, and the conversation perhaps less to go on from
    take_snapshots.py  what the environment gives to be kept
    restore.py         the environment of an unfinished episode, back where it stood
    scoring.py         the outcome

With several roles, the environment decides which one acts next: `Step.role` of the reset and of every answer. An
episode owns its environment and ends it; it never decides which episode comes next.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

from agentrl.env import step_results
from agentrl.errors import ContextFull, InfrastructureError, PolicyFault, StoreError
from agentrl.host import json_log
from agentrl.records import NO_TOOLS, Step, StopReason
from agentrl.rollout import compaction, restore
from agentrl.rollout.compactor import Compactor
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.env_calls import TimeUp, one_line
from agentrl.rollout.journal import EpisodeJournal
from agentrl.rollout.live_env import LiveEnv
from agentrl.rollout.players import Players
from agentrl.rollout.prompts import Prompts
from agentrl.rollout.resume_modes import resumed
from agentrl.rollout.scoring import Scoring
from agentrl.rollout.stop_cause import StopCause, failure
from agentrl.rollout.take_snapshots import Snapshots, keep_artifacts
from agentrl.rollout.turn_sampler import TurnSampler, request_id
from agentrl.store import Claim

log = logging.getLogger(__name__)


async def play(claim: Claim, context: RolloutContext) -> StopCause:
    """Play a claimed episode to its end and finish it in the store.

    Failures of engine, sandbox, environment and rewarder end the episode with a reason that keeps it out of the loss
    (law 3); a PolicyFault that the environment does not answer ends it, and it is scored.
    Raises LeaseLost when another worker has the episode by now, or its group starts anew; StoreError when the journal
    cannot be written; HandedBack once the worker is leaving."""
    with json_log.about(episode=claim.episode_id, group=claim.group_id, task=claim.task.index):
        return await resumed(claim, context.store, context.settings, partial(_play, context))


async def _play(context: RolloutContext, claim: Claim, unbroken: bool) -> StopCause:
    episode = _Episode(claim, context, unbroken)
    try:
        try:
            cause = await episode.run()
        finally:
            await episode.env.close()
    # Before the line below, of which it is a subclass: if the journal cannot be written, no ending can be written
    # either. The episode stays with its lease, and goes on when somebody claims it again.
    except StoreError:
        raise
    except InfrastructureError as error:
        cause = failure(error, claim, context.tracebacks)
    # After the environment was closed: a rewarder may take minutes, and a box that idles meanwhile is one that another
    # episode waits for. The verdict and the files that it needs are in the journal by now.
    cause, ending = await episode.scoring.ending(cause)
    await episode.journal.finish(ending)  # law 2: the episode may be trained from here on, once; law 3: or never
    log.info("the episode ended: %s%s", cause.stop_reason.value, f" ({cause.detail})" if cause.detail else "")
    return cause


class _Episode:
    """The loop over turns. A method that returns None has not ended the episode."""

    def __init__(self, claim: Claim, context: RolloutContext, unbroken: bool) -> None:
        players = Players(claim, context)
        self._context, self._settings = context, context.settings
        self.journal = EpisodeJournal(claim, context.store)
        self.env = LiveEnv(claim.task, context)
        self._prompts = Prompts(self.journal, self.env, context.renderer)
        self._sampler = TurnSampler(context, self.journal, players, unbroken)
        self._compactor = Compactor(context.settings, self.journal, self.env, self._prompts)
        self._snapshots = Snapshots(context.settings)
        self.scoring = Scoring(context, self.journal, self.env, players)

    async def run(self) -> StopCause:
        cause = self._end()  # not None: the episode had ended, and only its end was not written
        if cause is None:
            cause = await self._begin()
        while cause is None:
            # Between two turns and nowhere else: here the journal is complete and the environment answered, so nothing
            # is lost when an episode is handed over. To stop amid a step would leave an effect that no answer records.
            await self._context.gate.passed()
            with self._log_ids(len(self.journal.turns)):
                cause = await self._turn()
        return cause

    async def _begin(self) -> StopCause | None:
        """Start the episode, or go on where the journal stands: there the last action may have no answer yet."""
        journal, env = self.journal, self.env
        if await restore.open_at(env, journal, self._compactor.answer):
            with self._log_ids(len(journal.turns) - 1):
                return await self._answer() if journal.awaits_answer else None
        schemas = await env.tool_schemas(again=True)
        tools = env.shown(schemas) if schemas else NO_TOOLS
        await journal.begin(env.latest.observation, tools)  # a replay has to get the same observation (law 2)
        return None

    async def _turn(self) -> StopCause | None:
        """Sample one action, and have it answered."""
        settings = self._settings
        try:
            prompt = await self._prompts.next()
        except PolicyFault as fault:  # of a journal that another chat template rendered
            return StopCause(StopReason.POLICY_FAULT, one_line(fault))
        room = settings.max_context - len(prompt.context)
        if room < 1:  # even the first prompt does not fit, or the run was resumed with less room
            return await self._no_room(self._why_no_room(len(prompt.context)))
        try:
            # Tokens are written while they come, so that an interrupted turn goes on from them (law 1).
            turn = await self._sampler.sample(prompt, min(settings.max_tokens_per_turn, room))
        except ContextFull as error:
            return await self._no_room(one_line(error))
        await self.journal.write_turn(turn)  # law 1: a crash from here on repeats the step, and never the sampling
        log.info("the turn has %d tokens (%s)", len(turn.token_ids), turn.finish)
        return await self._answer()

    async def _answer(self) -> StopCause | None:
        """Have the last turn answered, and journal the answer. If a limit of the run or a fault ends the episode here,
        the answer holds the stop reason and, at a limit, the environment's verdict."""
        journal, env, turn = self.journal, self.env, self.journal.turns[-1]
        step, reason, detail = Step(observation=()), None, ""
        try:
            step = await self._compactor.answer(turn)
            journal.answer(step)
            if not (step.terminated or step.truncated):
                reason = await self._limit()
        except TimeUp as up:
            reason, detail = StopReason.TIME_LIMIT, str(up)
        except PolicyFault as fault:  # of the action, or of the chat template: it refuses what the action led to
            reason, detail = StopReason.POLICY_FAULT, one_line(fault)
        if reason is not None:
            step, why_unjudged = await self._cut(step, reason)
            detail = detail or why_unjudged
        if self._context.artifacts and turn.learns:  # before the answer: tests judge the work of this very turn
            await keep_artifacts(env.env, env.calls, journal, self._settings.step_deadline_s)
        await journal.write_answer(step)  # law 2: whoever goes on from here repeats the action, and compares the answer
        log.info("the environment answered: reward %g", step.reward)
        cause = self._end(detail)
        if cause is None:
            await self._snapshots.keep(env.env, env.calls, journal)  # law 2: a restart goes on from it, without replay
        return cause

    async def _limit(self) -> StopReason | None:
        """The limit of the run that is reached with the last turn, if any."""
        settings = self._settings
        if settings.max_turns is not None and compaction.acts(self.journal.turns) >= settings.max_turns:
            return StopReason.TURN_LIMIT
        if self.env.calls.seconds >= settings.episode_deadline_s:
            return StopReason.TIME_LIMIT
        prompt = await self._prompts.ahead()
        return StopReason.CONTEXT_LIMIT if len(prompt.context) >= settings.max_context else None

    async def _cut(self, step: Step, reason: StopReason) -> tuple[Step, str]:
        """The last answer of an episode that the environment did not end, and why the work could not be judged if it
        could not. The reward that the environment had not settled yet is added."""
        unsettled, why_unjudged = self.env.latest.unsettled, ""
        if reason is not StopReason.POLICY_FAULT:
            verdict, why_unjudged = await self.env.end(reason)
            step = step_results.joined(step, verdict)
        return replace(step, reward=step.reward + unsettled, truncated=True, stop_reason=reason), why_unjudged

    async def _no_room(self, detail: str) -> StopCause:
        """End the episode before a turn for which the context has no room."""
        verdict, _ = await self.env.end(StopReason.CONTEXT_LIMIT)
        self.env.latest = step_results.joined(self.env.latest, verdict)
        return StopCause(StopReason.CONTEXT_LIMIT, detail)

    def _why_no_room(self, tokens: int) -> str:
        turns, most = len(self.journal.turns), self._settings.max_context
        prompt = f"the prompt of turn {turns}" if turns else "the first prompt"
        fix = f"raise it to {tokens + 1} or more, or shorten the prompt"
        return f"{prompt} has {tokens} tokens, and rollout.max_context = {most}: {fix}"

    def _end(self, detail: str = "") -> StopCause | None:
        """The cause by which the last answer ended the episode; None if it did not. That answer is then the verdict."""
        turns = self.journal.turns
        step = turns[-1].step if turns else None
        if step is None or not (step.terminated or step.truncated):
            return None
        self.env.latest = step
        if step.stop_reason is not None:
            return StopCause(step.stop_reason, detail)
        return StopCause(StopReason.DONE if step.terminated else StopReason.TRUNCATED)

    def _log_ids(self, index: int) -> json_log.about:
        """Adds the ids of a turn to all lines that are logged inside."""
        return json_log.about(turn=index, request=request_id(self.journal.claim, index))
