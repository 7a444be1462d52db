"""Rewards that other models give: `Judge` asks a chat model to score by a rubric, `RewardModel` a classification head.
`Rubric` makes one reward of several.

An environment's `grade` calls them, or they are the run's rewarder (`env.reward`). The policy wrote the text that they
score, so it is hostile: see `transcripts`. If there is no score, they raise `EngineError`, which takes the episode out
of loss and baseline (law 3). No torch, no environment, no run.
"""

from agentrl.engine.scoring_client import ScoringClient
from agentrl.rewards.judge import Judge, Judgement
from agentrl.rewards.reward_model import RewardModel
from agentrl.rewards.rubric import Part, Rubric, Scores
from agentrl.rewards.transcripts import messages_of

__all__ = ["Judge", "Judgement", "Part", "RewardModel", "Rubric", "Scores", "ScoringClient", "messages_of"]
