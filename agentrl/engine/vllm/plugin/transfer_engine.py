"""The class that vLLM's weight-transfer factory makes for the backend `shm`; `transfer` does the work."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from agentrl.engine.vllm.plugin import mending
from agentrl.engine.vllm.plugin.transfer import Base, Stage, Update, load


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


class FileTransferEngine(WeightTransferEngine[FileInitInfo, FileUpdateInfo]):
    """Loads weight files. A file that is not what it should be is refused before any weight is touched, and the engine
    goes on with the old ones; one that fails in the midst of loading leaves a mixture that only another push fixes."""

    init_info_cls = FileInitInfo
    update_info_cls = FileUpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.base = Base()
        self.stage = Stage(self.base)
        self._open = False  # the model's layers stand ready to be loaded and cannot run

    def init_transfer_engine(self, init_info: FileInitInfo) -> None:
        if init_info.keep_base is not None:
            self.base.keep = init_info.keep_base

    def start_weight_update(self) -> None:
        """Nothing yet: layers are taken apart only when the file is known to be good."""

    def receive_weights(self, update_info: FileUpdateInfo) -> None:
        update = Update(path=update_info.path, sha256=update_info.sha256, base_sha256=update_info.base_sha256)
        data = self.stage.take(update)
        if not self._open:
            initialize_layerwise_reload(self.model)
            self._open = True
        try:
            load(self.model, data)
        except BaseException:
            self._close()  # a model left in parts would kill the worker at its next step
            raise
        self.base.now(update, data)

    def finish_weight_update(self) -> None:
        self._close()

    def shutdown(self) -> None:
        self.base.data = None

    def _close(self) -> None:
        if self._open:
            self._open = False
            finalize_layerwise_reload(self.model, self.model_config)
            mending.after_update(self.model)
