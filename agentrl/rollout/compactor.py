"""Compaction within one episode: decides when a conversation is made shorter, and has it done.

It stands between the episode and its environment: it answers the policy's notes itself, and adds to other answers. The
messages that a conversation goes on from are those of `agentrl.rollout.compaction`. Writes nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from agentrl.config import Rollout
from agentrl.config.sections import CompactionSettings
from agentrl.errors import EnvError
from agentrl.records import POLICY, Step, Turn
from agentrl.rollout import compaction
from agentrl.rollout.journal import EpisodeJournal
from agentrl.rollout.live_env import LiveEnv
from agentrl.rollout.prompts import Prompts


# Why notes are a turn of the policy, and why less context is always a new beginning.
#
# A conversation that outgrows its context could be cut where its prompt is rendered: the oldest messages just leave.
# Then the engine would sample a turn after a shorter context than the row of the episode has, and the learner would
# compute its log-probabilities after tokens that the engine did not read for it (law 1). So the turn after a compaction
# begins a conversation of its own, without a parent. The learner makes a second row of it, and both rows have the
# outcome of the one episode.
#
# The notes decide what the later turns know, so they are an action of the policy like any other: sampled by it,
# journaled, and trained with what came of them. Written by another model, or left out of the loss, the choice of what
# to note could not be learned. But the environment must not see them, since it would take them for an action. So this
# class answers them itself, and they do not count against `rollout.max_turns`.
#
# Where a conversation was compacted is written with the answer. An episode that goes on elsewhere does the same again,
# also if somebody has changed the settings meanwhile: otherwise its replay would not get the answers of the journal.
#
# The price is a turn of sampling for the notes, a new start whose prompt shares less with the turns before and has to
# be computed again, and, for a compaction that makes nothing shorter, the work to find that out.
#
# `tests/rollout/test_compaction.py` kills the episode after each write around its notes;
# `tests/rollout/test_compaction_oracle.py` compares the expected gradient with the exact one.
class Compactor:
    """Answers turns: by the environment, and with a shorter conversation behind its answer where one is due."""

    __slots__ = ("_env", "_journal", "_max_context", "_prompts", "_settings")

    def __init__(self, settings: Rollout, journal: EpisodeJournal, env: LiveEnv, prompts: Prompts) -> None:
        self._settings, self._max_context = settings.compaction, settings.max_context
        self._journal, self._env, self._prompts = journal, env, prompts

    async def answer(self, turn: Turn) -> Step:
        """The answer to a turn; one of notes never reaches the environment. If `turn` has an answer in the journal, its
        compaction is repeated, whatever the settings are now. Raises TimeUp, PolicyFault."""
        journaled_turns = self._journal.turns
        if compaction.writes_notes(journaled_turns, turn.index):
            previous_answer = journaled_turns[turn.index - 1].step
            assert previous_answer is not None
            self._env.charge(turn)  # notes are sampled tokens too
            return compaction.noted(self._journal.start, previous_answer, turn.text)
        env_answer = await self._env.step(turn)
        # A replay: whether and how the conversation was made shorter stands in the journal, with the recorded answer.
        if turn.step is not None:
            return compaction.as_before(env_answer, turn.step)
        if self._settings is None or env_answer.terminated or env_answer.truncated or env_answer.history is not None:
            return env_answer
        return await self._compacted(self._settings, turn, env_answer)

    async def _compacted(self, settings: CompactionSettings, turn: Turn, step: Step) -> Step:
        """Return the answer `step` to `turn` as it is, or, if the context after it reaches `settings.at` of the room,
        with a request for a summary or with a shortened conversation. Raises EnvError in an environment of several
        roles."""
        journal, prompts = self._journal, self._prompts
        if step.role is not None or turn.role != POLICY:
            env_name = journal.claim.task.env
            raise EnvError(f"{env_name}: rollout.compaction is for environments of one role: leave it out")
        by_policy = settings.how == compaction.SUMMARY
        with_request = compaction.ask(step, settings.request) if by_policy else step
        tokens_before = len(journal.context_after(turn.index))
        token_limit = settings.at * self._max_context
        # A cheap upper bound first: only an answer that may reach the limit is rendered here, and it is rendered again
        # for the next turn.
        if tokens_before + compaction.most_tokens(with_request.observation) < token_limit:
            return step
        token_count = tokens_before + len(await prompts.extension(turn, with_request.observation))
        if token_count < token_limit or by_policy:
            return step if token_count < token_limit else with_request
        function_label = f"rollout.compaction.how = {settings.how!r}"
        messages = compaction.conversation(journal.start, journal.turns, step)
        short_messages = await self._env.calls(
            function_label, partial(compaction.shortened, settings, messages, function_label)
        )
        # A conversation that is no shorter would make a second row and gain no room, so it goes on as it is.
        if len(await prompts.start(short_messages)) >= token_count:
            return replace(step, compaction=compaction.NO_SHORTER)
        return replace(step, history=short_messages, compaction=compaction.SHORTENED)
