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
            stop_cause = await episode.run()
        finally:
            await episode.env.close()
    # Before the line below, of which it is a subclass: if the journal cannot be written, no ending can be written
    # either. The episode stays with its lease, and goes on when somebody claims it again.
    except StoreError:
        raise
    except InfrastructureError as error:
        stop_cause = failure(error, claim, context.tracebacks)
    # After the environment was closed: a rewarder may take minutes, and a box that idles meanwhile is one that another
    # episode waits for. The verdict and the files that it needs are in the journal by now.
    stop_cause, ending = await episode.scoring.ending(stop_cause)
    await episode.journal.finish(ending)  # law 2: the episode may be trained from here on, once; law 3: or never
    log.info(
        "the episode ended: %s%s", stop_cause.stop_reason.value, f" ({stop_cause.detail})" if stop_cause.detail else ""
    )
    return stop_cause


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
        stop_cause = self._end()  # not None: the episode had ended, and only its end was not written
        if stop_cause is None:
            stop_cause = await self._begin()
        while stop_cause is None:
            # Between two turns and nowhere else: here the journal is complete and the environment answered, so nothing
            # is lost when an episode is handed over. To stop amid a step would leave an effect that no answer records.
            await self._context.gate.passed()
            with self._log_ids(len(self.journal.turns)):
                stop_cause = await self._turn()
        return stop_cause

    async def _begin(self) -> StopCause | None:
        """Start the episode, or go on where the journal stands: there the last action may have no answer yet."""
        journal, env = self.journal, self.env
        if await restore.open_at(env, journal, self._compactor.answer):
            with self._log_ids(len(journal.turns) - 1):
                return await self._answer() if journal.awaits_answer else None
        tool_schemas = await env.tool_schemas(again=True)
        shown_tools = env.shown(tool_schemas) if tool_schemas else NO_TOOLS
        await journal.begin(env.latest.observation, shown_tools)  # a replay has to get the same observation (law 2)
        return None

    async def _turn(self) -> StopCause | None:
        """Sample one action, and have it answered."""
        settings = self._settings
        try:
            turn_prompt = await self._prompts.next()
        except PolicyFault as fault:  # of a journal that another chat template rendered
            return StopCause(StopReason.POLICY_FAULT, one_line(fault))
        remaining_tokens = settings.max_context - len(turn_prompt.context)
        if remaining_tokens < 1:  # even the first prompt does not fit, or the run was resumed with less room
            return await self._no_room(self._why_no_room(len(turn_prompt.context)))
        try:
            # Tokens are written while they come, so that an interrupted turn goes on from them (law 1).
            sampled_turn = await self._sampler.sample(turn_prompt, min(settings.max_tokens_per_turn, remaining_tokens))
        except ContextFull as error:
            return await self._no_room(one_line(error))
        await self.journal.write_turn(sampled_turn)  # law 1: a crash from here on repeats the step, never the sampling
        log.info("the turn has %d tokens (%s)", len(sampled_turn.token_ids), sampled_turn.finish)
        return await self._answer()

    async def _answer(self) -> StopCause | None:
        """Have the last turn answered, and journal the answer. If a limit of the run or a fault ends the episode here,
        the answer holds the stop reason and, at a limit, the environment's verdict."""
        journal, env, last_turn = self.journal, self.env, self.journal.turns[-1]
        env_answer, stop_reason, stop_detail = Step(observation=()), None, ""
        try:
            env_answer = await self._compactor.answer(last_turn)
            journal.answer(env_answer)
            if not (env_answer.terminated or env_answer.truncated):
                stop_reason = await self._limit()
        except TimeUp as time_up:
            stop_reason, stop_detail = StopReason.TIME_LIMIT, str(time_up)
        except PolicyFault as fault:  # of the action, or of the chat template: it refuses what the action led to
            stop_reason, stop_detail = StopReason.POLICY_FAULT, one_line(fault)
        if stop_reason is not None:
            env_answer, why_unjudged = await self._cut(env_answer, stop_reason)
            stop_detail = stop_detail or why_unjudged
        if self._context.artifacts and last_turn.learns:  # before the answer: tests judge the work of this very turn
            await keep_artifacts(env.env, env.calls, journal, self._settings.step_deadline_s)
        # Law 2: whoever goes on from here repeats the action, and compares the answer.
        await journal.write_answer(env_answer)
        log.info("the environment answered: reward %g", env_answer.reward)
        stop_cause = self._end(stop_detail)
        if stop_cause is None:
            await self._snapshots.keep(env.env, env.calls, journal)  # law 2: a restart goes on from it, without replay
        return stop_cause

    async def _limit(self) -> StopReason | None:
        """The limit of the run that is reached with the last turn, if any."""
        settings = self._settings
        if settings.max_turns is not None and compaction.acts(self.journal.turns) >= settings.max_turns:
            return StopReason.TURN_LIMIT
        if self.env.calls.seconds >= settings.episode_deadline_s:
            return StopReason.TIME_LIMIT
        next_prompt = await self._prompts.ahead()
        return StopReason.CONTEXT_LIMIT if len(next_prompt.context) >= settings.max_context else None

    async def _cut(self, step: Step, reason: StopReason) -> tuple[Step, str]:
        """The last answer of an episode that the environment did not end, and why the work could not be judged if it
        could not. The reward that the environment had not settled yet is added."""
        unsettled, why_unjudged = self.env.latest.unsettled, ""
        if reason is not StopReason.POLICY_FAULT:
            env_verdict, why_unjudged = await self.env.end(reason)
            step = step_results.joined(step, env_verdict)
        return replace(step, reward=step.reward + unsettled, truncated=True, stop_reason=reason), why_unjudged

    async def _no_room(self, detail: str) -> StopCause:
        """End the episode before a turn for which the context has no room."""
        env_verdict, _ = await self.env.end(StopReason.CONTEXT_LIMIT)
        self.env.latest = step_results.joined(self.env.latest, env_verdict)
        return StopCause(StopReason.CONTEXT_LIMIT, detail)

    def _why_no_room(self, tokens: int) -> str:
        turn_count, max_context = len(self.journal.turns), self._settings.max_context
        prompt_label = f"the prompt of turn {turn_count}" if turn_count else "the first prompt"
        correction = f"raise it to {tokens + 1} or more, or shorten the prompt"
        return f"{prompt_label} has {tokens} tokens, and rollout.max_context = {max_context}: {correction}"

    def _end(self, detail: str = "") -> StopCause | None:
        """The cause by which the last answer ended the episode; None if it did not. That answer is then the verdict."""
        journaled_turns = self.journal.turns
        last_answer = journaled_turns[-1].step if journaled_turns else None
        if last_answer is None or not (last_answer.terminated or last_answer.truncated):
            return None
        self.env.latest = last_answer
        if last_answer.stop_reason is not None:
            return StopCause(last_answer.stop_reason, detail)
        return StopCause(StopReason.DONE if last_answer.terminated else StopReason.TRUNCATED)

    def _log_ids(self, index: int) -> json_log.about:
        """Adds the ids of a turn to all lines that are logged inside."""
        return json_log.about(turn=index, request=request_id(self.journal.claim, index))
