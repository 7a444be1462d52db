"""A teacher that an engine serves: how probable it finds each token that the policy sampled (on-policy distillation).

Owns the tokens that the teacher reads: those of the episode as they were sampled, never tokenized again, after a prompt
of its own if it has one. What it says is a column of the turn's tokens, so that the journal keeps it. Knows neither the
run nor the loss.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from agentrl.engine.rendering.renderer import Renderer
from agentrl.engine.scoring_client import ScoringClient
from agentrl.errors import ModelError, ScoreError
from agentrl.records import Message, Trajectory, context_ids
from agentrl.rewards.verdict import Verdict
from agentrl.tokens.columns import TEACHER, Columns

_LEAST = -9999.0  # what vLLM writes for a NaN


@dataclass(slots=True)
class Teacher:
    """Scores the last turn of an episode. `clients` finds the servers of now, which share the turns. Of an environment
    that is not among `envs`, it says nothing (no `envs`: it teaches all)."""

    clients: Callable[[], Awaitable[Sequence[ScoringClient]]]
    prefix: tuple[int, ...] = ()
    envs: frozenset[str] = frozenset()

    async def __call__(self, seen: Trajectory) -> Verdict:
        """The mean of log teacher - log policy over the turn's tokens, and the teacher's log-prob of each. Raises
        EngineError if a server refuses or is gone, ScoreError if what it says is no log-prob."""
        last_turn = seen.turns[-1]
        # Zero without a column, not a failure: the teacher has nothing to say here, and a turn without a score would
        # leave the loss.
        if not last_turn.token_ids or (self.envs and seen.task.env not in self.envs):
            return Verdict(0.0)
        clients = await self.clients()
        if not clients:
            raise ScoreError("no engine of the policy is known yet")
        token_ids = (*self.prefix, *context_ids(seen.turns, last_turn.index), *last_turn.token_ids)
        # All turns of an episode go to the same server, whose prefix cache then has the turns before. Chosen anew at
        # each turn, each would be computed from its first token.
        teacher_logprobs = (await clients[seen.episode_id % len(clients)].logprobs(token_ids))[
            -len(last_turn.token_ids) :
        ]
        # One such number would be a gradient of its own size. The turn has no score instead, and the source tries
        # again.
        if not all(math.isfinite(teacher_logprob) and teacher_logprob > _LEAST for teacher_logprob in teacher_logprobs):
            raise ScoreError("the teacher gave a log-prob that is none")
        logprob_gaps = [
            teacher_logprob - policy_logprob
            for teacher_logprob, policy_logprob in zip(teacher_logprobs, last_turn.logprobs, strict=True)
        ]
        token_columns: Columns = {TEACHER.name: teacher_logprobs}
        return Verdict(fmean(logprob_gaps), token_columns)


def prefix_of(renderer: Renderer, prompt: str | None) -> tuple[int, ...]:
    """The tokens of a system message before any conversation. Raises ModelError if the chat template writes a
    conversation otherwise after one."""
    if prompt is None:
        return ()
    # Some templates write a system message of their own where there is none, or put the given one into the user's
    # turn. In front of the sampled tokens there is only room for a prefix, so that is tried once before a run begins:
    # `tests/rewards/test_teacher.py::test_a_prompt_of_the_teachers_own_comes_before_the_conversation`.
    user_message: Message = {"role": "user", "content": "."}
    question_ids = renderer.start([user_message])
    prompted_ids = renderer.start([{"role": "system", "content": prompt}, user_message])
    if len(prompted_ids) <= len(question_ids) or prompted_ids[-len(question_ids) :] != question_ids:
        raise ModelError("the chat template does not put a system message before a conversation that is without one")
    return prompted_ids[: -len(question_ids)]
