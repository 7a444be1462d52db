"""The class that vLLM's weight-transfer factory makes for the backend `shm`; `transfer` does the work."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from agentrl.engine.vllm.plugin import cpu_fixes, read_weights, staging
from agentrl.engine.vllm.plugin.file_transfer import Base, Stage, Superseded, Update, load
from agentrl.engine.weight_sync import fingerprints, weight_file
from agentrl.errors import WeightSyncError

logger = logging.getLogger("vllm.agentrl")


@dataclass
class FileInitInfo(WeightTransferInitInfo):
    """`keep_base`: from now on keep (or no longer) the bytes of the last weights, so that deltas against them can be
    loaded. Left out, it stays as it is: every push initialises, only one that starts deltas says so."""

    keep_base: bool | None = None


@dataclass
class FileUpdateInfo(WeightTransferUpdateInfo):
    """See `transfer.Update`."""

    path: str
    sha256: str
    base_sha256: str | None = None
    deadline_s: float = 30.0
    version: int | None = None


class FileTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Loads weight files. A file that is not what it should be is refused before any weight is touched, and the engine
    goes on with the old ones; one that fails in the midst of loading leaves a mixture that only another push fixes."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        read_weights.serves(str(self.vllm_config.model_config.model))
        self.base = Base()
        self.stage = Stage(self.base, self._second)
        self._open = False  # the model's layers stand ready to be loaded and cannot run

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        if init_info.keep_base is not None:
            self.base.keep = init_info.keep_base

    def start_weight_update(self) -> None:
        """Nothing yet: layers are taken apart only when the file is known to be good."""

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        update = Update(**{name: getattr(update_info, name) for name in Update.__slots__})
        staged_update = self.stage.take(update)
        # A second copy is of the main model. An update of another one, or one that a dead trainer left open with its
        # layers in parts, is loaded the long way.
        if staged_update.second is not None and self.model is self._default_model and not self._open:
            replaced = staged_update.second.swap(by_pointer=staging.by_pointer(self.vllm_config, self.model))
            # Copies on a GPU are only queued: the engine's next pass must not begin on half of them.
            torch.accelerator.synchronize()
        else:
            self._load(staged_update.data)
            replaced = []
        self.base.now(update, staged_update.kept)
        replaced += [staged_update.data, staged_update.second]
        # Unmapping a gigabyte takes as long as a few passes: not in the pause.
        threading.Thread(target=_free, args=(replaced,), name="free-weights", daemon=True).start()

    def _load(self, data: weight_file.Bytes) -> None:
        """Load into the live model while generation is paused; the layers are taken apart by the first call of an
        update."""
        if not self._open:
            initialize_layerwise_reload(self.model)
            self._open = True
        try:
            with set_current_vllm_config(self.vllm_config):  # a thread that staged may have taken it away
                load(self.model, data)
        except BaseException:
            self._close()  # a model left in parts would kill the worker at its next step
            raise

    def _second(self, data: weight_file.Bytes, waited_for: Callable[[], None]) -> tuple[Any, str | None]:
        """A second copy of the layers' weights, or why there is none: then the file is loaded in the pause."""
        main_model = self._default_model
        if (obstacle := staging.obstacle(main_model, self.device)) is None:
            try:
                with set_current_vllm_config(self.vllm_config):
                    second_copy = staging.build(
                        main_model,
                        self._default_model_config,
                        self.device,
                        lambda twin: load(twin, data, waited_for),
                        cpu_fixes.after_update,
                        fingerprints.of_file(data, str(self._default_model_config.dtype).removeprefix("torch.")),
                    )
                return second_copy, None
            # The file is wrong, or nobody waits: both are answers. Anything else is a layer that vLLM reloads in a
            # way we do not know, and the pause still works for it.
            except (WeightSyncError, Superseded):
                raise
            except Exception as error:  # a layer that vLLM reloads otherwise: the live model is as it was
                logger.exception("agentrl: cannot stage a second copy of the weights")
                obstacle = f"{type(error).__name__}: {error}"
        logger.warning("agentrl: weights are loaded in the pause: %s", obstacle)
        return None, obstacle

    def finish_weight_update(self) -> None:
        self._close()

    def shutdown(self) -> None:
        self.stage.drop()
        self.base.data = None

    def _close(self) -> None:
        if self._open:
            self._open = False
            finalize_layerwise_reload(self.model, self.model_config)
            cpu_fixes.after_update(self.model)


def _free(replaced: list[Any]) -> None:
    """Layers and their loaders name each other, and Python would look for such rings only after many more objects."""
    replaced.clear()
    gc.collect()
