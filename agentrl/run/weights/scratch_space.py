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
    files = KEPT + config.transport.files
    # Checked from the shapes in the files' headers, before anything starts. A write into full shared memory is no error
    # but SIGBUS, and ends whoever touches the page.
    need, free = files * sum(_file_bytes(config, model) for model in models), shutil.disk_usage(scratch).free
    if need > free:
        raise ConfigError(
            "scratch_dir",
            config.scratch_dir,
            f"{scratch.parent} has {free >> 20} MiB left, and {files} weight files on their way to engines take "
            f"{-(-need >> 20)} MiB: name a folder with more room (a disk will do), or give the container more shared "
            f"memory (docker run --shm-size={-(-2 * need >> 20)}m)",
        )


def _file_bytes(config: RunConfig, model: Path) -> int:
    """The size of one weight file, or one adapter, of a run with `model`; accurate to a few kilobytes."""
    tensors = [place for part in weight_file.parts(model) for place in weight_file.places(weight_file.open_bytes(part))]
    if config.sends_adapters:
        adapters = 1 + len(config.adapted_roles)
        return adapters * sum(
            4 * config.train.lora_rank * sum(place.shape) for place in tensors if len(place.shape) == 2
        )
    width = 4 if engine_dtype(config.engine, model) == "float32" else 2
    return sum(place.numel * (width if len(place.shape) > 1 else 4) for place in tensors)
