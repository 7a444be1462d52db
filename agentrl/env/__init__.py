"""Gymnasium-style environments for language agents.

core         Env: the contract, sync and async            spaces      Text, Messages
tool_env     ToolEnv: prompt, @tool methods, grade        tools       @tool, schemas, results
tool_calls   parsers of tool calls, one per dialect       limits      when an episode is truncated
registration make, register; gymnasium knows our ids      bridge      threads between sync and async
plugged      tools that are named, their box and servers  answers     what an environment answered, looked at
"""

from agentrl.env.core import Env, as_async, as_messages
from agentrl.env.limits import EpisodeLimits
from agentrl.env.tool_env import CallResult, Grade, ParsePolicy, ToolEnv
from agentrl.env.tools.tools import FunctionTool, tool

__all__ = [
    "CallResult",
    "Env",
    "EpisodeLimits",
    "FunctionTool",
    "Grade",
    "ParsePolicy",
    "ToolEnv",
    "as_async",
    "as_messages",
    "tool",
]
