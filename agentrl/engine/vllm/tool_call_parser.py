"""How a vLLM of ours reads the calls of tools in chats: by its own parser of the dialect of the model's template."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

PARSERS: Final[Mapping[str, str]] = {
    "hermes": "hermes",
    "llama": "llama3_json",
    "mistral": "mistral",
    "qwen3_coder": "qwen3_coder",
    "seed_oss": "seed_oss",
    "glm": "glm45",
    "minimax_m2": "minimax_m2",
    "muse": "muse_glimmer",
    "minicpm5": "minicpm5",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "kimi_k2": "kimi_k2",
    "granite": "granite",
    "gemma4": "gemma4",
    "lfm2": "lfm2",
    "pythonic": "pythonic",
}
"""vLLM's name of the parser of each dialect that both know, by ours (`agentrl.env.tools.parsers.FORMATS`)."""
