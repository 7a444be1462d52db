"""Rewards that other models give: `Judge` asks a chat model to score by a rubric, `AgentJudge` one with
tools over the work's files, `RewardModel` a classification head.
`Rubric` makes one reward of several.

An environment's `grade` calls them, or they are the run's rewarder (`env.reward`). The policy wrote the text that they
score, so it is hostile: see `transcripts`. If there is no score, they raise `EngineError`, which takes the episode out
of loss and baseline (law 3). No torch, no environment, no run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.engine.scoring_client import ScoringClient as ScoringClient
    from agentrl.rewards.agent_judge import AgentJudge as AgentJudge
    from agentrl.rewards.judge import Judge as Judge
    from agentrl.rewards.judge import Judgement as Judgement
    from agentrl.rewards.reward_model import RewardModel as RewardModel
    from agentrl.rewards.rubric import Part as Part
    from agentrl.rewards.rubric import Rubric as Rubric
    from agentrl.rewards.rubric import Scores as Scores
    from agentrl.rewards.transcripts import messages_of as messages_of

# Imported when first used: commands that count a run's failed scores need one light module of this room.
_WHERE = {
    "AgentJudge": "agentrl.rewards.agent_judge",
    "Judge": "agentrl.rewards.judge",
    "Judgement": "agentrl.rewards.judge",
    "Part": "agentrl.rewards.rubric",
    "RewardModel": "agentrl.rewards.reward_model",
    "Rubric": "agentrl.rewards.rubric",
    "Scores": "agentrl.rewards.rubric",
    "ScoringClient": "agentrl.engine.scoring_client",
    "messages_of": "agentrl.rewards.transcripts",
}

__all__ = [
    "AgentJudge",
    "Judge",
    "Judgement",
    "Part",
    "RewardModel",
    "Rubric",
    "Scores",
    "ScoringClient",
    "messages_of",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'agentrl.rewards' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)
