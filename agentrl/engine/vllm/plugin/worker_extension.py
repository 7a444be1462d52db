"""Methods of ours on vLLM's worker, called over `POST /collective_rpc`: staging, facts, and a switch for our fixes.

vLLM mixes this class into its worker (`--worker-extension-cls`) and passes strings only; every answer is JSON-safe.
Importing it registers the plugin, for a vLLM that did not find our entry point.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import importlib.metadata
import json
import os
from typing import Any

from vllm.platforms import current_platform

from agentrl.engine.vllm import plugin
from agentrl.engine.vllm.plugin import cpu_fixes, read_weights, sampling_masks, version_stamps
from agentrl.engine.vllm.plugin.file_transfer import Update, tensors

plugin.register()
if current_platform.is_cpu():
    cpu_fixes.install()
    sampling_masks.install()


class WorkerExtension:
    """Every method begins with `agentrl_`: vLLM refuses an extension whose names clash with its own."""

    weight_transfer_engine: Any
    model_runner: Any
    _weight_update_active: bool
    start_weight_update: Any
    update_weights: Any
    finish_weight_update: Any

    def agentrl_facts(self) -> dict[str, Any]:
        """Report the parts of the plugin that are in place in this worker, and so in vLLM's other processes: they share
        its environment, in which vLLM looks for the entry point."""
        entry_points = importlib.metadata.entry_points(group="vllm.general_plugins", name="agentrl")
        allowed_plugins = os.environ.get("VLLM_PLUGINS")  # vLLM loads all, or those that are named here
        has_entry_point = bool(entry_points) and (allowed_plugins is None or "agentrl" in allowed_plugins.split(","))
        return {
            "mending": cpu_fixes.enabled,
            "missing": [*version_stamps.missing, *([] if has_entry_point else ["the entry point"])],
            "dtype": str(self.model_runner.model_config.dtype).removeprefix("torch."),
            "pickles": os.environ.get("VLLM_ALLOW_INSECURE_SERIALIZATION") == "1",
        }

    def agentrl_set_fixes(self, on: str) -> dict[str, Any]:
        """Switch the fixes of the CPU build's silent bugs on or off (`"1"` or `"0"`)."""
        cpu_fixes.enabled = on != "0"
        return {"mending": cpu_fixes.enabled}

    def agentrl_stage(self, update_info: str, second: bool = False, keep_s: float = 600.0) -> dict[str, Any]:
        """Begin to make an update ready while generation goes on. `update_info` is JSON; see `transfer.Stage`."""
        staged_update = Update(**json.loads(update_info))
        self.weight_transfer_engine.stage.begin(staged_update, second=second, keep_s=keep_s)
        return self.weight_transfer_engine.stage.state()

    def agentrl_staged(self) -> dict[str, Any]:
        """How far the staging is."""
        return self.weight_transfer_engine.stage.state()

    def agentrl_swap(self, update_info: str) -> dict[str, Any]:
        """Compute with the second copy of an update's weights from the next pass on; between two passes only. Not
        `swapped` if it has none: then nothing was touched."""
        update_fields = json.loads(update_info)
        if not self.weight_transfer_engine.stage.has_second(Update(**update_fields)):
            return {"swapped": False}
        if self._weight_update_active:  # of a trainer that died half-way
            self.finish_weight_update()
        self.start_weight_update()
        self.update_weights(update_fields)
        self.finish_weight_update()
        return {"swapped": True}

    def agentrl_publish(self, update_info: str, version: str, clear_cache: bool) -> dict[str, Any]:
        """Reaches a worker only where the engine core does not know it (see `publish`)."""
        return {"swapped": False}

    def agentrl_receive(self, message: str) -> dict[str, Any]:
        """A part of a folder that comes over HTTP; see `agentrl.engine.weight_sync.uploads`."""
        return read_weights.inbox().receive(message)

    def agentrl_fingerprints(self) -> dict[str, Any]:
        """Fingerprints of the weights that layers compute with, by names of the checkpoint format; and their dtype."""
        from agentrl.engine.vllm.plugin.layer_diagnosis import fingerprints

        model_dtype = self.model_runner.model_config.dtype
        by_source = fingerprints(self.model_runner.model, model_dtype)
        return {"dtype": str(model_dtype).removeprefix("torch."), "fingerprints": by_source}

    def agentrl_untaken(self, update_info: str) -> dict[str, Any]:
        """Which weights of a file the layers do not compute with; see `diagnosis.untaken`."""
        from agentrl.engine.vllm.plugin.layer_diagnosis import untaken

        transfer_engine = self.weight_transfer_engine
        weight_bytes = Update(**json.loads(update_info)).bytes_again(transfer_engine.base)
        return untaken(transfer_engine.model, dict(tensors(weight_bytes)))
