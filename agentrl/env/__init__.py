"""Gymnasium-style environments for language agents.

core.py               Env: the contract, sync and async
tool_env.py           ToolEnv: prompt, @tool methods, grade
tools/                @tool, the calls that a model writes, one turn's calls
multi_agent.py        environments in which several roles act
limits.py             when an episode is truncated, what broken calls cost
spaces.py             Text, Messages
step_results.py       the answers of an environment, checked where they come in
tasks.py              the tasks of a run; dataset_env.py and datasets.py: tasks from rows of data
snapshots.py          an episode with a box as bytes, for another instance
sync_async.py         threads for code that blocks; asyncio_code.py: code that is written with asyncio
reward_functions.py   the reward functions of data sets: signatures, calls, numbers
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
