"""Samples the turns of one episode: a prompt becomes a request, and its generation a turn.

A turn that was interrupted goes on from the tokens that the journal has (law 1). Knows no environment.
"""

from __future__ import annotations

import time
from dataclasses import replace

from agentrl.protocols import GenerateRequest
from agentrl.records import Generation, Turn, turn_id
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.drain import TurnPaused
from agentrl.rollout.generate_turn import sample
from agentrl.rollout.journal import EpisodeJournal
from agentrl.rollout.players import Players
from agentrl.rollout.prompts import Prompt
from agentrl.rollout.routed_experts import first_without_experts
from agentrl.rollout.shown_images import ShownImages
from agentrl.store import Claim, Partial


def request_id(claim: Claim, index: int) -> str:
    """The id of the request for the turn `index`: engines know the turn by it alone."""
    return f"{claim.episode_id}-{claim.fence}-{index}"


# Why the tokens of a turn are written while they come.
#
# A turn of some thousand tokens may take minutes, and its worker may be killed, drained or paused in the middle. To
# write the turn once it is whole would be simpler. Then a death costs all its tokens, and a turn that is sampled again
# is another turn. A long turn meets a death more often than a short one, so the run would prefer short turns.
#
# So about `rollout.checkpoint_tokens` tokens of a turn at most are in memory alone (`generate_turn.py` decides when it
# writes), and each is written with its log-probability and its version (law 1). Whoever goes on sends the prompt with
# these tokens behind it, and samples only the rest. The seconds that they took count against the same deadline, so an
# interrupted turn has no more time than another one (law 3).
#
# A write is posted and not awaited: it is made by a plain call amid the engine's stream, and tokens go on to come while
# the disk syncs. Its error is raised at a later chunk. So after a pause the tokens are read from the store and not from
# memory: a write that failed because the disk was full has left fewer there, and the next part has to begin where the
# written parts end.
#
# The price is a small write for every 64 tokens (the default) of each running turn, in transactions that all turns
# share (`journal_writer.py`), and the prompt is computed again when a turn goes on. Tokens that an engine has sampled
# and not yet sent are lost in any case.
#
# `tests/rollout/test_partial_turns.py` ends a worker at any chunk, `tests/run/test_broken_turn.py` kills a real one,
# and `tests/rollout/test_pausing.py` pauses it.
class TurnSampler:
    """Samples turns. With `unbroken` each comes from one engine alone, and BrokenOff is raised if it cannot."""

    __slots__ = ("_context", "_images", "_journal", "_pauses", "_players", "_unbroken")

    def __init__(self, context: RolloutContext, journal: EpisodeJournal, players: Players, unbroken: bool) -> None:
        self._context, self._journal, self._players, self._unbroken = context, journal, players, unbroken
        self._images = ShownImages(journal)
        self._pauses = 0  # that broke a turn off

    async def sample(self, prompt: Prompt, max_tokens: int) -> Turn:
        """Sample the turn after `prompt`. If a pause breaks it off, wait for the end of the pause, and go on. Raises
        the errors of the engine; HandedBack once the worker is leaving."""
        context, journal = self._context, self._journal
        while True:
            turn_request = await self._request(prompt, max_tokens)
            begun_part = journal.partial or self._begun(prompt)
            try:
                generation = await self._generate(prompt.role, turn_request, begun_part)
            except TurnPaused:
                journal.partial = await journal.reload_partial() or begun_part
                self._pauses += 1
                await context.gate.passed()
                continue
            turn_index = len(journal.turns)
            return Turn(
                id=turn_id(journal.claim.episode_id, journal.trial, turn_index),
                index=turn_index,
                parent=prompt.parent,
                prompt_ids=prompt.prompt_ids,
                token_ids=generation.token_ids,
                logprobs=generation.logprobs,
                spans=generation.spans,
                finish=generation.finish,
                text=context.renderer.decode(generation.token_ids),
                role=prompt.role,
                learns=self._players.learns(prompt.role),
                experts=generation.experts,
                columns=generation.columns,
                # The turn began with its first part, perhaps in another process.
                started_s=begun_part.started_s,
                ended_s=time.time(),
            )

    def _begun(self, prompt: Prompt) -> Partial:
        """The next turn before its first token."""
        return Partial(
            index=len(self._journal.turns),
            parent=prompt.parent,
            role=prompt.role,
            prompt_ids=prompt.prompt_ids,
            started_s=time.time(),
        )

    async def _request(self, prompt: Prompt, max_tokens: int) -> GenerateRequest:
        context, journal, players = self._context, self._journal, self._players
        role_learns, sampling = players.learns(prompt.role), players.sampling
        # The engine may not know yet that the request before the pause is over, so the next one needs another id.
        attempt_suffix = f"-{self._pauses}" if self._pauses else ""
        return GenerateRequest(
            request_id=request_id(journal.claim, len(journal.turns)) + attempt_suffix,
            # The group, not the episode: siblings begin with the same prompt, so one engine should have it in its
            # cache.
            session=str(journal.claim.group_id),
            token_ids=prompt.context,
            sampling=replace(sampling, max_tokens=max_tokens, stop_token_ids=context.renderer.stop_token_ids),
            deadline_s=context.settings.turn_deadline_s,
            policy=players.adapter(prompt.role),
            version=await players.version(prompt.role, journal),
            experts_from=first_without_experts(journal.turns, prompt.parent)
            if context.experts and role_learns
            else None,
            # Only where a token is trained: the sets cost bandwidth, and an evaluation or a frozen role has no use for
            # them.
            kept=players.trains and role_learns and sampling.cuts,
            images=self._images.of(prompt),
        )

    async def _generate(self, role: str, request: GenerateRequest, begun: Partial) -> Generation:
        context, checkpoint_tokens = self._context, self._context.settings.checkpoint_tokens
        generation = sample(
            self._players.engine(role),
            request,
            begun,
            decode=context.renderer.decode,
            keep=self._journal.keep_tokens,
            every=checkpoint_tokens,
            unbroken=self._unbroken,
        )
        # Without checkpoints nobody could go on from the tokens so far: such a turn is never broken off.
        return await (
            context.gate.during(generation, breakable=not self._unbroken) if checkpoint_tokens else generation
        )
