"""The run file: one module a table, with its defaults and checks. Imports no torch."""

from agentrl.config.overrides import apply_override
from agentrl.config.run_config import (
    MAX_LORA_RANK,
    BufferSettings,
    EngineSettings,
    EnvSource,
    Rollout,
    RunConfig,
    TaskTable,
    Train,
    algorithm,
    from_json,
    load,
    parse,
    to_json,
)

__all__ = [
    "MAX_LORA_RANK",
    "BufferSettings",
    "EngineSettings",
    "EnvSource",
    "Rollout",
    "RunConfig",
    "TaskTable",
    "Train",
    "algorithm",
    "apply_override",
    "from_json",
    "load",
    "parse",
    "to_json",
]
