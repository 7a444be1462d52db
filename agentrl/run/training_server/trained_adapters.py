"""The adapters under training: in the learner's memory as their calls left them, and in files.

Owns the folders of a training server. A file has an adapter as one of its calls left it; the gradients of the calls
after that are computed again. All is called in the learner's thread.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from agentrl.errors import UsageError
from agentrl.learner.adapter_learner import AdapterLearner, AdapterShape, TargetRow
from agentrl.run.training_server.call_log import Call, CallLog
from agentrl.run.training_server.client_records import ModelRecord
from agentrl.run.training_server.target_losses import TargetLoss, target_loss
from agentrl.run.training_server.tinker_messages import ForwardBackwardRequest

FORWARD_BACKWARD = "forward_backward"
_LIVE = 32  # adapters in memory at most
_STATE = "state.safetensors"


class TrainedAdapters:
    """Adapters by the records of their models. At most `_LIVE` are in memory; the longest unused one leaves first."""

    def __init__(self, log: CallLog, learner: AdapterLearner, folder: Path, *, most_tokens: int) -> None:
        self._log, self._learner, self._folder, self._most_tokens = log, learner, folder, most_tokens
        self._recent = dict[str, None]()  # the adapters in memory, the longest unused first

    def create(self, record: ModelRecord, shape: AdapterShape, *, seed: int) -> None:
        """Make an adapter in memory, in the place of one that a failed call has left."""
        self._learner.forget(_name(record))
        self._learner.create(_name(record), shape, seed=seed)

    def ensure(self, record: ModelRecord) -> str:
        """Have an adapter in memory as its calls up to now left it; returns its name in the learner."""
        if record.state is None:
            raise UsageError(f"the training client {record.id} was not made: its first call failed")
        adapter_name = _name(record)
        if adapter_name not in self._learner:
            adapter_shape = AdapterShape(record.rank, attention=record.attention, mlp=record.mlp)
            self._learner.create(adapter_name, adapter_shape, seed=0)
            try:
                self._learner.load(adapter_name, self._state(record, record.state))
                # The file holds weights and moments, not gradients. Those since the file was written are computed again
                # from the journaled calls; to write them with each backward pass would be a file of the adapter's size
                # for each call.
                for earlier_call in self._log.since_state(record, FORWARD_BACKWARD):
                    target_rows, loss = self.rows(earlier_call)
                    self._learner.forward_backward(adapter_name, target_rows, loss.compute)
            except BaseException:
                self._learner.forget(adapter_name)
                raise
        self._use(adapter_name)
        return adapter_name

    def rows(self, call: Call) -> tuple[list[TargetRow], TargetLoss]:
        """The rows and the loss of a forward or backward pass. Raises UsageError."""
        request = ForwardBackwardRequest.read(call.body)
        row_loss = target_loss(*request.loss)
        return request.rows(row_loss, vocab=self._learner.vocab, most_tokens=self._most_tokens), row_loss

    def save_state(self, record: ModelRecord, place: int) -> None:
        """Write an adapter as call `place` left it."""
        self._use(_name(record))
        self._state_folder(record).mkdir(parents=True, exist_ok=True)
        self._learner.save(_name(record), self._state(record, place))

    def drop_states(self, record: ModelRecord, place: int) -> None:
        """Remove the files of earlier calls, once the log has the answer of call `place`."""
        for state_file in self._state_folder(record).glob("*.safetensors"):
            if state_file != self._state(record, place):
                state_file.unlink(missing_ok=True)

    def save_weights(self, record: ModelRecord, number: int) -> None:
        """Write an adapter and its optimizer under the number of saved weights."""
        adapter_name, saved_folder = self.ensure(record), weights_folder(self._folder, number)
        saved_folder.mkdir(parents=True, exist_ok=True)
        self._learner.save(adapter_name, saved_folder / _STATE)

    def export_weights(self, record: ModelRecord, number: int) -> None:
        """Write an adapter for an engine under the number of saved weights."""
        self._learner.export(self.ensure(record), weights_folder(self._folder, number))

    def load_weights(self, record: ModelRecord, number: int, *, optimizer: bool) -> None:
        """Read saved weights into an adapter, with `optimizer` also the state of their optimizer."""
        state_file = weights_folder(self._folder, number) / _STATE
        self._learner.load(_name(record), state_file, optimizer=optimizer)

    def remove_weights(self, number: int) -> None:
        """Remove saved weights."""
        shutil.rmtree(weights_folder(self._folder, number), ignore_errors=True)

    def forget(self, record: ModelRecord) -> None:
        """Drop an adapter from memory: the next call reads it from its file."""
        self._recent.pop(_name(record), None)
        self._learner.forget(_name(record))

    def end(self, session: str) -> None:
        """Remove the adapters of a session that has ended, but what was saved under a name."""
        for model_record in self._log.clients.models_of(session):
            self.forget(model_record)
            shutil.rmtree(self._state_folder(model_record), ignore_errors=True)
        for weights_number in self._log.clients.drop_unnamed(session):
            self.remove_weights(weights_number)

    def _use(self, name: str) -> None:
        self._recent.pop(name, None)
        self._recent[name] = None
        while len(self._recent) > _LIVE:
            oldest_name = next(iter(self._recent))
            del self._recent[oldest_name]
            self._learner.forget(oldest_name)

    def _state_folder(self, record: ModelRecord) -> Path:
        return self._folder / "models" / str(record.number)

    def _state(self, record: ModelRecord, place: int) -> Path:
        return self._state_folder(record) / f"{place}.safetensors"


def _name(record: ModelRecord) -> str:
    """The name of a model's adapter in the learner."""
    return f"m{record.number}"


def weights_folder(folder: Path, number: int) -> Path:
    """Where saved weights lie."""
    return folder / "weights" / str(number)
