"""Which files a request may name to this vLLM, and where adapters that come over HTTP are put.

The first process of a server decides both, once, and its other processes inherit that in the environment: the workers
of one host must find an adapter under one path. See `agentrl.engine.weight_sync.weight_sources` and
`agentrl.engine.weight_sync.uploads`.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import json
import logging
import os
from pathlib import Path

from agentrl.engine.vllm.plugin import INBOX_VARIABLE, SOURCES_VARIABLE, version_stamps
from agentrl.engine.weight_sync.uploads import Inbox, new_place
from agentrl.engine.weight_sync.weight_sources import Sources, everyday
from agentrl.errors import WeightSyncError

logger = logging.getLogger("vllm.agentrl")


def decide() -> None:
    """Decide for this process and those that it starts. Safe to call again."""
    # `setdefault` in the first process and inheritance in all others: vLLM's workers are started by it, and have no
    # other way to agree on a random name.
    os.environ.setdefault(INBOX_VARIABLE, new_place())
    os.environ.setdefault(SOURCES_VARIABLE, json.dumps(everyday()))


def serves(model: str) -> None:
    """The folder of the model that this process serves may be read from too: a run sends the weights it starts from."""
    decide()
    allowed_places = json.loads(os.environ[SOURCES_VARIABLE])
    if Path(model).is_dir() and model not in allowed_places:
        os.environ[SOURCES_VARIABLE] = json.dumps([*allowed_places, model])
        sources.cache_clear()


@functools.cache
def sources() -> Sources:
    """Where this server reads weights and adapters from."""
    decide()
    return Sources(json.loads(os.environ[SOURCES_VARIABLE]))


@functools.cache
def inbox() -> Inbox:
    """The adapters that came to this worker."""
    decide()
    return Inbox(os.environ[INBOX_VARIABLE])


@functools.cache
def _adapters() -> Sources:
    decide()
    return Sources([*json.loads(os.environ[SOURCES_VARIABLE]), os.environ[INBOX_VARIABLE]])


@functools.cache
def install() -> None:
    """Have this process's HTTP server load adapters from these places alone: vLLM itself takes any path, and what is no
    path it looks up at the Hugging Face hub."""
    if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0").lower() not in ("1", "true"):
        return  # it has no such route
    try:
        from vllm.entrypoints.openai.models.serving import OpenAIServingModels
        from vllm.entrypoints.serve import create_error_response

        original = OpenAIServingModels._check_load_lora_adapter_request
    except (ImportError, AttributeError) as error:
        version_stamps.missing.append("check_adapter_folders")
        logger.warning("agentrl: this vLLM does not allow %s: %s", version_stamps.missing[-1], error)
        return

    @functools.wraps(original)
    async def checked(self, request):
        refused = await original(self, request)
        static_paths = {module.path for module in self.static_lora_modules or ()}  # on the command line
        if refused is not None or request.lora_path in static_paths:
            return refused
        config = getattr(self.engine_client, "vllm_config", None)
        if config is not None and config.lora_config is None:  # vLLM would find that out after a look at the path
            hint = "LoRA is not enabled: start the server with --enable-lora"
            return create_error_response(message=hint, err_type="InvalidUserInput")
        try:
            _adapters().adapter(request.lora_path)
        except WeightSyncError as error:
            return create_error_response(message=str(error), err_type="InvalidUserInput")
        return None

    # vLLM's own check is kept and called first; ours can only refuse more.
    OpenAIServingModels._check_load_lora_adapter_request = checked
