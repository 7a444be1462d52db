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
            for model in self._log.waiting_models():
                self.came(model)
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
        until = None  # when the calls that wait for one that has not come stop waiting
        while True:
            came = self._driven[model] = trio.Event()
            if (call := await trio.to_thread.run_sync(self._log.next_of, model)) is not None:
                until = None
                tokens = max(_BESIDE, len(call.body) / _BYTES_PER_TOKEN)
                # By tokens and not by calls: a session of long rows would otherwise get as many calls as one of short
                # rows, and most of the time.
                async with self._turns.turn(call.session, tokens):
                    await self._computed(call)
                self._answered(call.id)
            elif (gap := await trio.to_thread.run_sync(self._log.first_waiting, model)) is not None:
                until = trio.current_time() + self._patience_s if until is None else until
                # A client numbers its calls, and the network may bring number 5 before number 4. Computed as they come,
                # a step could be made before the gradients it was meant for.
                with trio.move_on_at(until) as waited:
                    await came.wait()
                if waited.cancelled_caught:
                    until = None
                    await self._give_up(model, *gap)
            elif not came.is_set():
                del self._driven[model]
                return

    async def _give_up(self, model: str, missing: int, first: int) -> None:
        hint = "a client numbers its calls from 1, without a gap; make a new training client"
        error = f"call {first} waited {self._patience_s:g} s for call {missing} of {model}, which never came: {hint}"
        space = SpaceWait(self._folder)
        while True:
            try:
                ids = await trio.to_thread.run_sync(self._log.give_up, model, failed_answer(error, "user"))
                break
            except DiskFull as full:
                await space.after(full)
        for id in ids:
            self._answered(id)

    async def _computed(self, call: Call) -> None:
        """Compute a call and write its answer; on a full disk again, as if it had not been computed."""
        space = SpaceWait(self._folder)
        while True:
            try:
                return await trio.to_thread.run_sync(self._compute, call, limiter=self._thread)
            except DiskFull as error:
                await space.after(error)

    # --- in the learner's thread ----------------------------------------------------------------------------------

    def _compute(self, call: Call) -> None:
        """Raises DiskFull, and then all is as before, but that the adapter is read back from its file."""
        record = self._log.clients.model(call.owner)
        assert record is not None
        effects, after = CallEffects(), None
        try:
            if self._log.clients.session_is(call.session) == "ended":
                raise UsageError(SESSION_ENDED)
            answer, effects, after = self._kinds[call.kind](call, record)
        except UsageError as error:
            answer = failed_answer(str(error), "user")
        except Exception as error:
            # What the failed call has left in memory is unknown: half of a backward pass, or a step without its file.
            # The next call reads the adapter back as the log has it.
            self._adapters.forget(record)
            if is_full(error):
                raise DiskFull(f"call {call.id} cannot be written: {error}") from error
            _log.exception("call %s failed", call.id)
            answer = failed_answer(f"the server failed ({type(error).__name__}); its log says why", "server")
        try:
            # The answer and its effects in one transaction, after the file is written: a kill in between leaves a file
            # that no row names, and the call is computed again from the one that a row does name.
            self._log.answer(call, answer, effects)
        except DiskFull:
            self._adapters.forget(record)  # it is a call ahead of what is on disk
            raise
        # Old files go last, when the log no longer names them: removed before, a kill would leave a model whose state
        # is nowhere.
        if after is not None:
            after()

    def _create(self, call: Call, record: ModelRecord) -> _Done:
        request: CreateModel = parse(CreateModel, call.body)
        lora = request.lora_config
        if lora is None:
            raise ConfigError("lora_config", None, "this server trains adapters: give a rank")
        _check_optimizer(request.optimizer_config.type)
        check_rank("lora_config.rank", lora.rank, lora.rank, self._most_rank)
        if not (lora.train_attn or lora.train_mlp):
            hint = "this server does not train the unembedding: set train_attn or train_mlp"
            raise ConfigError("lora_config.train_unembed", True, hint)
        shape = AdapterShape(lora.rank, attention=lora.train_attn, mlp=lora.train_mlp)
        seed = secrets.randbelow(_SEEDS) if lora.seed is None else lora.seed
        self._adapters.create(record, shape, seed=seed)
        answer = json_answer(model_id=record.id, type="create_model")
        return answer, self._made(call, record, shape), None

    def _made(self, call: Call, record: ModelRecord, shape: AdapterShape) -> CallEffects:
        self._adapters.save_state(record, call.place)
        return CallEffects(shape=(shape.rank, shape.attention, shape.mlp), wrote_state=True)

    def _forward_backward(self, call: Call, record: ModelRecord) -> _Done:
        rows, loss = self._adapters.rows(call)
        name = self._adapters.ensure(record)
        compute = self._learner.forward_backward if call.kind == FORWARD_BACKWARD else self._learner.forward
        return forward_backward_answer(*compute(name, rows, loss.compute)), CallEffects(), None

    def _optim_step(self, call: Call, record: ModelRecord) -> _Done:
        request: OptimStep = parse(OptimStep, call.body)
        adam = request.adam_params
        if adam is None:
            raise ConfigError(
                "optim_params", request.optimizer_params and request.optimizer_params.type, "give AdamParams"
            )
        step = AdamStep(
            lr=adam.learning_rate,
            beta1=adam.beta1,
            beta2=adam.beta2,
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            grad_clip=adam.grad_clip_norm,
        )
        name = self._adapters.ensure(record)
        try:
            answer = json_answer(metrics=self._learner.step(name, step))
        except UsageError as error:  # the gradients are gone as after a step
            answer = failed_answer(str(error), "user")
        self._adapters.save_state(record, call.place)
        return answer, CallEffects(wrote_state=True), lambda: self._adapters.drop_states(record, call.place)

    def _save_weights(self, call: Call, record: ModelRecord) -> _Done:
        request: SaveWeights = parse(SaveWeights, call.body)
        weights = _weights_record(call, record, "weights", request.path)
        old = self._log.clients.weights(weights.path)
        if old is not None and not request.overwrite:
            raise ConfigError(
                "path", request.path, "there is a checkpoint of this name: give overwrite=True, or another"
            )
        self._adapters.save_weights(record, call.number)
        answer = json_answer(path=weights.path, type="save_weights")
        return answer, CallEffects(weights=weights), lambda: old and self._adapters.remove_weights(old.number)

    def _save_for_sampler(self, call: Call, record: ModelRecord) -> _Done:
        request: SaveWeights = parse(SaveWeights, call.body)
        weights = _weights_record(call, record, "sampler_weights", request.path)
        old = self._log.clients.weights(weights.path)
        self._adapters.export_weights(record, call.number)
        sampler = None
        if request.path is None:
            if request.sampling_session_seq_id is None:
                raise ConfigError("path", None, "give a name, or sampling_session_seq_id for a sampling client")
            id = sampler_id(record.session, request.sampling_session_seq_id)
            sampler = SamplerRecord(id, record.session, weights.path)
        answer = json_answer(
            path=None if sampler else weights.path,
            sampling_session_id=sampler and sampler.id,
            type="save_weights_for_sampler",
        )
        effects = CallEffects(weights=weights, sampler=sampler)
        return answer, effects, lambda: old and self._adapters.remove_weights(old.number)

    def _load_weights(self, call: Call, record: ModelRecord) -> _Done:
        request: LoadWeights = parse(LoadWeights, call.body)
        weights = self._log.clients.weights(request.path)
        if weights is None or weights.kind != "weights":
            raise ConfigError("path", request.path, "this server has no such checkpoint of save_state")
        if request.optimizer_config is not None:
            _check_optimizer(request.optimizer_config.type)
        check_rank("path", request.path, weights.rank, self._most_rank)
        shape = AdapterShape(weights.rank, attention=weights.attention, mlp=weights.mlp)
        if record.state is None:
            self._adapters.create(record, shape, seed=0)
        else:
            self._adapters.ensure(record)
        self._adapters.load_weights(record, weights.number, optimizer=request.optimizer)
        answer = json_answer(path=request.path, model_id=record.id, type="load_weights")
        return answer, self._made(call, record, shape), lambda: self._adapters.drop_states(record, call.place)

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
    path = f"tinker://{record.id}/{kind}/{f'unnamed-{call.place}' if name is None else name}"
    return WeightsRecord(
        call.number, path, record.id, kind, record.rank, record.attention, record.mlp, name is not None
    )


def _check_optimizer(kind: str) -> None:
    if kind != "adamw":
        raise ConfigError("optimizer_config.type", kind, "this server has adamw")


def check_rank(field: str, value: object, rank: int, most: int) -> None:
    """Raises ConfigError, naming the field of the request, for an adapter that the engine has no room for."""
    if rank > most:
        hint = f"its adapter has rank {rank}, the engine has room for {most}: start the server with --lora-rank {rank}"
        raise ConfigError(field, value, hint)
