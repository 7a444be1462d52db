"""A reward model: a classification head whose number is the reward. Knows no transport, no environment, no run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import trio

from agentrl.engine.scoring_client import ScoringClient
from agentrl.errors import ScoreError
from agentrl.records import Message, Trajectory
from agentrl.rewards.transcripts import ask_shortened, defused_messages, messages_of, shortened


class RewardModel:
    """Scores by one output of a classification model that a server offers (`vllm serve MODEL --runner pooling`).

    `label` says which output, of a model with several. It is the head's own number, unbounded, unless `activation` asks
    for a sigmoid's (one label) or softmax's (several).

    A conversation that the server refuses (it is too long for the model) is scored in part: its longest messages lose
    their middle. One of which it takes no part, or gives no number, is worth `refused` if another gets one."""

    def __init__(
        self, client: ScoringClient, *, label: int = 0, activation: bool = False, refused: float = 0.0
    ) -> None:
        self._client, self._label, self._activation, self._refused = client, label, activation, refused

    async def score(self, messages: Sequence[Message]) -> float:
        """The reward of a conversation, which the server's chat template renders; nothing in it is a control token.
        Takes no longer than the client's `deadline_s` in all.

        Raises ScoreError for a model without this label or numbers, EngineError as the client does."""
        deadline_at_s = trio.current_time() + self._client.deadline_s

        async def ask(messages: Sequence[Message], most: int | None) -> float:
            # No boundary here: a classification head has no instructions that a text could imitate, and the chat
            # template puts the speakers' marks. What remains are control tokens.
            shown_messages = defused_messages(messages if most is None else shortened(messages, most))
            remaining_s = max(deadline_at_s - trio.current_time(), 0.0)
            return self._read(
                await self._client.classify_chat(shown_messages, activation=self._activation, deadline_s=remaining_s)
            )

        return await ask_shortened(ask, messages, self._refused)

    async def score_raw(self, content: str | Sequence[int]) -> float:
        """The reward of a text or of token ids, unchanged: any control token in them counts as one. Raises as `score`
        does."""
        return self._read(await self._client.classify(content, activation=self._activation))

    async def __call__(self, trajectory: Trajectory) -> float:
        """Score the whole conversation as a rewarder."""
        return await self.score(messages_of(trajectory))

    def _read(self, outputs: Sequence[float]) -> float:
        if self._label >= len(outputs):
            raise ScoreError(f"{self._client.url}: no label {self._label}, the model has {len(outputs)}")
        # A head in half precision can overflow for strange texts. The infinity would pass through a group's mean into
        # every advantage of the group.
        if not math.isfinite(label_score := outputs[self._label]):
            raise ScoreError(f"{self._client.url}: the score is {label_score}")
        return label_score
