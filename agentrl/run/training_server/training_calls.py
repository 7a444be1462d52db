"""The calls of training clients: each client's one after the other, in the order of their numbers; sessions in turns.

Owns the order of calls, and what each kind does. A call that fails leaves its adapter as it was, and says whose fault
it is; after a failure of the server's own the adapter is read back from its file and its journaled calls.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

import trio

from agentrl.errors import ConfigError, DiskFull, UsageError
from agentrl.host.disk_space import is_full
from agentrl.learner.adapter_learner import AdamStep, AdapterLearner, AdapterShape
from agentrl.run.training_server.call_log import Call, CallAnswer, CallEffects, CallLog
from agentrl.run.training_server.client_records import ModelRecord, SamplerRecord, WeightsKind, WeightsRecord
from agentrl.run.training_server.disk_waits import SpaceWait
from agentrl.run.training_server.fair_turns import FairTurns
from agentrl.run.training_server.sessions import SESSION_ENDED
from agentrl.run.training_server.tinker_messages import (
    MOST_RANK,
    CreateModel,
    LoadWeights,
    OptimStep,
    SaveWeights,
    failed_answer,
    forward_backward_answer,
    json_answer,
    parse,
)
from agentrl.run.training_server.trained_adapters import FORWARD_BACKWARD, TrainedAdapters

PATIENCE_S = 600.0  # the client itself tries for 300 to send a call
_BYTES_PER_TOKEN = 8  # of a body: a token, its target and its columns
_SEEDS = 1 << 31
_BESIDE = 256.0  # tokens of a turn that computes none

_log = logging.getLogger(__name__)


class TrainingCalls:
    """`most_rank` is that of the adapters which the engine has room for. `answered` gets the id of each call that has
    its answer. A call waits `patience_s` for the one before it to come."""

    def __init__(
        self,
        log: CallLog,
        learner: AdapterLearner,
        folder: Path,
        *,
        most_tokens: int,
        most_rank: int = MOST_RANK,
        answered: Callable[[str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._log, self._learner, self._folder, self._answered = log, learner, folder, answered
        self._most_rank, self._patience_s = most_rank, patience_s
        self._adapters = TrainedAdapters(log, learner, folder, most_tokens=most_tokens)
        # One thread for everything that touches the learner: torch's modules have no locks, and two adapters that
        # compute at once would share one model's gradients.
        self._turns, self._thread = FairTurns(1), trio.CapacityLimiter(1)
        self._driven = dict[str, trio.Event]()  # by model: set when a call came since its driver looked
        self._nursery: trio.Nursery | None = None
        self._kinds: dict[str, Callable[[Call, ModelRecord], _Done]] = {
            "create_model": self._create,
            FORWARD_BACKWARD: self._forward_backward,
            "forward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "unload_model": self._unload,
        }

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Compute calls for ever, those first that a life before had accepted."""
        async with trio.open_nursery() as self._nursery:
            for waiting_model in self._log.waiting_models():
                self.came(waiting_model)
            task_status.started()
            await trio.sleep_forever()

    def came(self, model: str) -> None:
        """A call of a model is in the log."""
        assert self._nursery is not None
        if model in self._driven:
            self._driven[model].set()
            return
        self._driven[model] = trio.Event()
        self._nursery.start_soon(self._drive, model)

    async def end(self, session: str) -> None:
        """Forget the adapters of a session that has ended. What was saved under a name stays."""
        await trio.to_thread.run_sync(self._adapters.end, session, limiter=self._thread)

    async def _drive(self, model: str) -> None:
        give_up_at_s = None  # when the calls that wait for one that has not come stop waiting
        while True:
            came_event = self._driven[model] = trio.Event()
            if (next_call := await trio.to_thread.run_sync(self._log.next_of, model)) is not None:
                give_up_at_s = None
                token_count = max(_BESIDE, len(next_call.body) / _BYTES_PER_TOKEN)
                # By tokens and not by calls: a session of long rows would otherwise get as many calls as one of short
                # rows, and most of the time.
                async with self._turns.turn(next_call.session, token_count):
                    await self._computed(next_call)
                self._answered(next_call.id)
            elif (call_numbers := await trio.to_thread.run_sync(self._log.first_waiting, model)) is not None:
                give_up_at_s = trio.current_time() + self._patience_s if give_up_at_s is None else give_up_at_s
                # A client numbers its calls, and the network may bring number 5 before number 4. Computed as they come,
                # a step could be made before the gradients it was meant for.
                with trio.move_on_at(give_up_at_s) as wait_scope:
                    await came_event.wait()
                if wait_scope.cancelled_caught:
                    give_up_at_s = None
                    await self._give_up(model, *call_numbers)
            elif not came_event.is_set():
                del self._driven[model]
                return

    async def _give_up(self, model: str, missing: int, first: int) -> None:
        correction = "a client numbers its calls from 1, without a gap; make a new training client"
        failure_text = (
            f"call {first} waited {self._patience_s:g} s for call {missing} of {model}, which never came: {correction}"
        )
        space_wait = SpaceWait(self._folder)
        while True:
            try:
                call_ids = await trio.to_thread.run_sync(self._log.give_up, model, failed_answer(failure_text, "user"))
                break
            except DiskFull as full:
                await space_wait.after(full)
        for call_id in call_ids:
            self._answered(call_id)

    async def _computed(self, call: Call) -> None:
        """Compute a call and write its answer; on a full disk again, as if it had not been computed."""
        space_wait = SpaceWait(self._folder)
        while True:
            try:
                return await trio.to_thread.run_sync(self._compute, call, limiter=self._thread)
            except DiskFull as error:
                await space_wait.after(error)

    # --- in the learner's thread ----------------------------------------------------------------------------------

    def _compute(self, call: Call) -> None:
        """Raises DiskFull, and then all is as before, but that the adapter is read back from its file."""
        model_record = self._log.clients.model(call.owner)
        assert model_record is not None
        effects, clean_up = CallEffects(), None
        try:
            if self._log.clients.session_is(call.session) == "ended":
                raise UsageError(SESSION_ENDED)
            call_answer, effects, clean_up = self._kinds[call.kind](call, model_record)
        except UsageError as error:
            call_answer = failed_answer(str(error), "user")
        except Exception as error:
            # What the failed call has left in memory is unknown: half of a backward pass, or a step without its file.
            # The next call reads the adapter back as the log has it.
            self._adapters.forget(model_record)
            if is_full(error):
                raise DiskFull(f"call {call.id} cannot be written: {error}") from error
            _log.exception("call %s failed", call.id)
            call_answer = failed_answer(f"the server failed ({type(error).__name__}); its log says why", "server")
        try:
            # The answer and its effects in one transaction, after the file is written: a kill in between leaves a file
            # that no row names, and the call is computed again from the one that a row does name.
            self._log.answer(call, call_answer, effects)
        except DiskFull:
            self._adapters.forget(model_record)  # it is a call ahead of what is on disk
            raise
        # Old files go last, when the log no longer names them: removed before, a kill would leave a model whose state
        # is nowhere.
        if clean_up is not None:
            clean_up()

    def _create(self, call: Call, record: ModelRecord) -> _Done:
        request: CreateModel = parse(CreateModel, call.body)
        lora_config = request.lora_config
        if lora_config is None:
            raise ConfigError("lora_config", None, "this server trains adapters: give a rank")
        _check_optimizer(request.optimizer_config.type)
        check_rank("lora_config.rank", lora_config.rank, lora_config.rank, self._most_rank)
        if not (lora_config.train_attn or lora_config.train_mlp):
            correction = "this server does not train the unembedding: set train_attn or train_mlp"
            raise ConfigError("lora_config.train_unembed", True, correction)
        adapter_shape = AdapterShape(lora_config.rank, attention=lora_config.train_attn, mlp=lora_config.train_mlp)
        adapter_seed = secrets.randbelow(_SEEDS) if lora_config.seed is None else lora_config.seed
        self._adapters.create(record, adapter_shape, seed=adapter_seed)
        call_answer = json_answer(model_id=record.id, type="create_model")
        return call_answer, self._made(call, record, adapter_shape), None

    def _made(self, call: Call, record: ModelRecord, shape: AdapterShape) -> CallEffects:
        self._adapters.save_state(record, call.place)
        return CallEffects(shape=(shape.rank, shape.attention, shape.mlp), wrote_state=True)

    def _forward_backward(self, call: Call, record: ModelRecord) -> _Done:
        target_rows, row_loss = self._adapters.rows(call)
        adapter_name = self._adapters.ensure(record)
        compute = self._learner.forward_backward if call.kind == FORWARD_BACKWARD else self._learner.forward
        return forward_backward_answer(*compute(adapter_name, target_rows, row_loss.compute)), CallEffects(), None

    def _optim_step(self, call: Call, record: ModelRecord) -> _Done:
        request: OptimStep = parse(OptimStep, call.body)
        adam_params = request.adam_params
        if adam_params is None:
            raise ConfigError(
                "optim_params", request.optimizer_params and request.optimizer_params.type, "give AdamParams"
            )
        adam_step = AdamStep(
            lr=adam_params.learning_rate,
            beta1=adam_params.beta1,
            beta2=adam_params.beta2,
            eps=adam_params.eps,
            weight_decay=adam_params.weight_decay,
            grad_clip=adam_params.grad_clip_norm,
        )
        adapter_name = self._adapters.ensure(record)
        try:
            call_answer = json_answer(metrics=self._learner.step(adapter_name, adam_step))
        except UsageError as error:  # the gradients are gone as after a step
            call_answer = failed_answer(str(error), "user")
        self._adapters.save_state(record, call.place)
        return call_answer, CallEffects(wrote_state=True), lambda: self._adapters.drop_states(record, call.place)

    def _save_weights(self, call: Call, record: ModelRecord) -> _Done:
        request: SaveWeights = parse(SaveWeights, call.body)
        new_record = _weights_record(call, record, "weights", request.path)
        old_record = self._log.clients.weights(new_record.path)
        if old_record is not None and not request.overwrite:
            raise ConfigError(
                "path", request.path, "there is a checkpoint of this name: give overwrite=True, or another"
            )
        self._adapters.save_weights(record, call.number)
        call_answer = json_answer(path=new_record.path, type="save_weights")
        return (
            call_answer,
            CallEffects(weights=new_record),
            lambda: old_record and self._adapters.remove_weights(old_record.number),
        )

    def _save_for_sampler(self, call: Call, record: ModelRecord) -> _Done:
        request: SaveWeights = parse(SaveWeights, call.body)
        new_record = _weights_record(call, record, "sampler_weights", request.path)
        old_record = self._log.clients.weights(new_record.path)
        self._adapters.export_weights(record, call.number)
        sampler_record = None
        if request.path is None:
            if request.sampling_session_seq_id is None:
                raise ConfigError("path", None, "give a name, or sampling_session_seq_id for a sampling client")
            new_sampler_id = sampler_id(record.session, request.sampling_session_seq_id)
            sampler_record = SamplerRecord(new_sampler_id, record.session, new_record.path)
        call_answer = json_answer(
            path=None if sampler_record else new_record.path,
            sampling_session_id=sampler_record and sampler_record.id,
            type="save_weights_for_sampler",
        )
        effects = CallEffects(weights=new_record, sampler=sampler_record)
        return call_answer, effects, lambda: old_record and self._adapters.remove_weights(old_record.number)

    def _load_weights(self, call: Call, record: ModelRecord) -> _Done:
        request: LoadWeights = parse(LoadWeights, call.body)
        weights_record = self._log.clients.weights(request.path)
        if weights_record is None or weights_record.kind != "weights":
            raise ConfigError("path", request.path, "this server has no such checkpoint of save_state")
        if request.optimizer_config is not None:
            _check_optimizer(request.optimizer_config.type)
        check_rank("path", request.path, weights_record.rank, self._most_rank)
        adapter_shape = AdapterShape(weights_record.rank, attention=weights_record.attention, mlp=weights_record.mlp)
        if record.state is None:
            self._adapters.create(record, adapter_shape, seed=0)
        else:
            self._adapters.ensure(record)
        self._adapters.load_weights(record, weights_record.number, optimizer=request.optimizer)
        call_answer = json_answer(path=request.path, model_id=record.id, type="load_weights")
        return (
            call_answer,
            self._made(call, record, adapter_shape),
            lambda: self._adapters.drop_states(record, call.place),
        )

    def _unload(self, call: Call, record: ModelRecord) -> _Done:
        self._adapters.forget(record)
        return json_answer(model_id=record.id, type="unload_model"), CallEffects(), None


_Done = tuple[CallAnswer, CallEffects, Callable[[], object] | None]
"""The answer of a call, what it changed, and what to do when both are written."""


def sampler_id(session: str, number: int) -> str:
    """The id of a session's sampling client."""
    return f"{session}:sample:{number}"


def model_id(session: str, number: int) -> str:
    """The id of a session's training client; the tinker client forms it too."""
    return f"{session}:train:{number}"


def _weights_record(call: Call, record: ModelRecord, kind: WeightsKind, name: str | None) -> WeightsRecord:
    # The name becomes a part of a path, and of a URL that clients take apart at its slashes.
    if name is not None and (not name or "/" in name or len(name) > 256):
        raise ConfigError("path", name, "give a name of at most 256 characters without '/'")
    weights_path = f"tinker://{record.id}/{kind}/{f'unnamed-{call.place}' if name is None else name}"
    return WeightsRecord(
        call.number, weights_path, record.id, kind, record.rank, record.attention, record.mlp, name is not None
    )


def _check_optimizer(kind: str) -> None:
    if kind != "adamw":
        raise ConfigError("optimizer_config.type", kind, "this server has adamw")


def check_rank(field: str, value: object, rank: int, most: int) -> None:
    """Raises ConfigError, naming the field of the request, for an adapter that the engine has no room for."""
    if rank > most:
        correction = (
            f"its adapter has rank {rank}, the engine has room for {most}: start the server with --lora-rank {rank}"
        )
        raise ConfigError(field, value, correction)
