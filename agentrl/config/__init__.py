"""The run file: one module a table, with its defaults and checks. Imports no torch."""

from typing import TYPE_CHECKING

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
    apply_override,
    from_json,
    load,
    parse,
    to_json,
)
from agentrl.host.renamed_modules import renamed_names

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

if not TYPE_CHECKING:
    __getattr__ = renamed_names(__name__, {"Buffer": "BufferSettings"})
