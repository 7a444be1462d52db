"""Trains language-model agents with reinforcement learning.

Names are imported when first used: `import agentrl` loads neither torch nor transformers. It registers the installed
environments with gymnasium, so that `gymnasium.make("agentrl/Calculator-v0")` works afterwards. In the process of the
`agentrl` command `agentrl.env` does that: most commands play nothing, and gymnasium with numpy is half of their start.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from agentrl.host.installation import other_project
from agentrl.host.user_warnings import show_as_lines

if TYPE_CHECKING:
    from agentrl.env import Env as Env
    from agentrl.env import EpisodeLimits as EpisodeLimits
    from agentrl.env import Grade as Grade
    from agentrl.env import ToolEnv as ToolEnv
    from agentrl.env import tool as tool
    from agentrl.env.checks.check_env import check_env as check_env
    from agentrl.registration import make as make
    from agentrl.registration import make_vec as make_vec
    from agentrl.registration import register as register
    from agentrl.run.callbacks.callback import Callback as Callback
    from agentrl.run.callbacks.callback import EpisodeEnded as EpisodeEnded
    from agentrl.run.callbacks.callback import EvalEnded as EvalEnded
    from agentrl.run.callbacks.callback import RunEnded as RunEnded
    from agentrl.run.callbacks.callback import RunStarted as RunStarted
    from agentrl.run.callbacks.callback import StepEnded as StepEnded
    from agentrl.run.callbacks.callback import StopTraining as StopTraining
    from agentrl.run.callbacks.callback import WeightsServed as WeightsServed
    from agentrl.run.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from agentrl.run.callbacks.file_tracker import FileTracker as FileTracker
    from agentrl.run.evaluation.evaluate import evaluate as evaluate
    from agentrl.run.reporting.load_run import load_run as load_run
    from agentrl.run.trainer import Trainer as Trainer

_CALLBACKS = "agentrl.run.callbacks"
_WHERE = {
    "Callback": f"{_CALLBACKS}.callback",
    "EarlyStopping": f"{_CALLBACKS}.early_stopping",
    "Env": "agentrl.env",
    "EpisodeEnded": f"{_CALLBACKS}.callback",
    "EpisodeLimits": "agentrl.env",
    "EvalEnded": f"{_CALLBACKS}.callback",
    "FileTracker": f"{_CALLBACKS}.file_tracker",
    "Grade": "agentrl.env",
    "RunEnded": f"{_CALLBACKS}.callback",
    "RunStarted": f"{_CALLBACKS}.callback",
    "StepEnded": f"{_CALLBACKS}.callback",
    "StopTraining": f"{_CALLBACKS}.callback",
    "ToolEnv": "agentrl.env",
    "Trainer": "agentrl.run.trainer",
    "WeightsServed": f"{_CALLBACKS}.callback",
    "check_env": "agentrl.env.checks.check_env",
    "evaluate": "agentrl.run.evaluation.evaluate",
    "load_run": "agentrl.run.reporting.load_run",
    "make": "agentrl.registration",
    "make_vec": "agentrl.registration",
    "register": "agentrl.registration",
    "tool": "agentrl.env",
}

__all__ = [
    "Callback",
    "EarlyStopping",
    "Env",
    "EpisodeEnded",
    "EpisodeLimits",
    "EvalEnded",
    "FileTracker",
    "Grade",
    "RunEnded",
    "RunStarted",
    "StepEnded",
    "StopTraining",
    "ToolEnv",
    "Trainer",
    "WeightsServed",
    "check_env",
    "evaluate",
    "load_run",
    "make",
    "make_vec",
    "register",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    exported_object = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = exported_object
    return exported_object


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# At the import, since nothing later would say it: files of the other project take the place of some of ours, and the
# first symptom would be a missing attribute somewhere.
if foreign := other_project():
    hint = "pip uninstall agentrl, then install this one from its checkout or its wheel file"
    raise ImportError(f"files of another project named agentrl are installed here ({foreign}): {hint}")
show_as_lines()
if "agentrl_command" not in sys.modules:
    importlib.import_module("agentrl.registration")
