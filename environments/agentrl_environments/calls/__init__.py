"""Calls: requests in words, functions that nobody has seen before, and the calls that answer them.

functions       skeletons of functions   vocabulary   the words that fill requests
train_domains   held_out_domains         tasks        a seed makes a task
scoring         which calls are right    environment  `Calls`
"""

from agentrl_environments.calls.environment import Calls
from agentrl_environments.calls.scoring import Call, is_right, share_of
from agentrl_environments.calls.tasks import KINDS, CallsTask, make_task

__all__ = ["KINDS", "Call", "Calls", "CallsTask", "is_right", "make_task", "share_of"]
