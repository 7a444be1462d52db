"""Trains language-model agents with reinforcement learning.

Names are imported when first used: `import agentrl` loads neither torch nor transformers. It registers the installed
environments with gymnasium, so that `gymnasium.make("agentrl/Calculator-v0")` works afterwards.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from agentrl.host import renamed_modules
from agentrl.registration import make, make_vec, register, register_all

if TYPE_CHECKING:
    from agentrl.env import Env as Env
    from agentrl.env import EpisodeLimits as EpisodeLimits
    from agentrl.env import Grade as Grade
    from agentrl.env import ToolEnv as ToolEnv
    from agentrl.env import tool as tool
    from agentrl.env.checks.check_env import check_env as check_env
    from agentrl.run.trainer import Trainer as Trainer

_WHERE = {
    "Env": "agentrl.env",
    "EpisodeLimits": "agentrl.env",
    "Grade": "agentrl.env",
    "ToolEnv": "agentrl.env",
    "Trainer": "agentrl.run.trainer",
    "check_env": "agentrl.env.checks.check_env",
    "tool": "agentrl.env",
}

__all__ = ["Env", "EpisodeLimits", "Grade", "ToolEnv", "Trainer", "check_env", "make", "make_vec", "register", "tool"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_all()
renamed_modules.install()
