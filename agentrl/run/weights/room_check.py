"""Checks, before anything of a run starts, that its scratch folder can hold the weight files on their way to engines.

A container's shared memory is 64 MiB by default. A file that overflows it kills its writer or its reader in the middle
of a run.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.engine.weight_sync import weight_file
from agentrl.engine.weight_sync.publisher import KEPT
from agentrl.errors import ConfigError
from agentrl.models.resolve import engine_dtype


def check_room(config: RunConfig, models: Sequence[Path], scratch: Path) -> None:
    """Raises ConfigError if `scratch` cannot hold all files of the models that lie there at the same time: those that
    are kept, the next one, and a delta if there are deltas."""
    if config.syncs_memory:
        return
    file_count = KEPT + config.transport.files
    # Checked from the shapes in the files' headers, before anything starts. A write into full shared memory is no error
    # but SIGBUS, and ends whoever touches the page.
    needed_bytes, free_bytes = (
        file_count * sum(_file_bytes(config, model_folder) for model_folder in models),
        shutil.disk_usage(scratch).free,
    )
    if needed_bytes > free_bytes:
        raise ConfigError(
            "scratch_dir",
            config.scratch_dir,
            f"{scratch.parent} has {free_bytes >> 20} MiB left, and {file_count} weight files on their way to engines"
            f" take {-(-needed_bytes >> 20)} MiB: name a folder with more room (a disk will do), or give the container"
            f" more shared memory (docker run --shm-size={-(-2 * needed_bytes >> 20)}m)",
        )


def _file_bytes(config: RunConfig, model: Path) -> int:
    """The size of one weight file, or one adapter, of a run with `model`; accurate to a few kilobytes."""
    tensor_places = [
        tensor_place
        for weights_part in weight_file.parts(model)
        for tensor_place in weight_file.places(weight_file.open_bytes(weights_part))
    ]
    if config.sends_adapters:
        adapters = 1 + len(config.adapted_roles)
        return adapters * sum(
            4 * config.train.lora_rank * sum(tensor_place.shape)
            for tensor_place in tensor_places
            if len(tensor_place.shape) == 2
        )
    value_bytes = 4 if engine_dtype(config.engine, model) == "float32" else 2
    return sum(
        tensor_place.numel * (value_bytes if len(tensor_place.shape) > 1 else 4) for tensor_place in tensor_places
    )
