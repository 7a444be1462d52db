"""The calls of sampling clients: samples and log-probs by an engine, each with the adapter of its client.

A call that a killed server had accepted, or whose engine ended, is sampled again:
nobody has seen a token of it.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from agentrl.config.sections import check_temperatures
from agentrl.engine.client import EngineClient
from agentrl.errors import (
    AgentRLError,
    ConfigError,
    DiskFull,
    EngineRefusal,
    EngineTimeout,
    EngineUnavailable,
    UsageError,
)
from agentrl.protocols import GenerateRequest
from agentrl.records import Generation, SamplingParams
from agentrl.run.training_server.call_log import Call, CallAnswer, CallLog
from agentrl.run.training_server.disk_waits import SpaceWait
from agentrl.run.training_server.fair_turns import FairTurns
from agentrl.run.training_server.held_adapters import HeldAdapters
from agentrl.run.training_server.kept_engine import KeptEngine
from agentrl.run.training_server.sessions import SESSION_ENDED
from agentrl.run.training_server.tinker_messages import (
    SampleRequest,
    SamplingFields,
    failed_answer,
    parse,
    prompt_tokens,
    sample_answer,
)
from agentrl.run.training_server.trained_adapters import weights_folder
from agentrl.run.training_server.training_calls import check_rank

SAMPLE = "sample"
_DEADLINE_S = 1800.0  # of one sequence, and of scoring a prompt
HELD = 8  # adapters in the engine at once
_ENGINES = 3  # that may end while they compute a call
_UNSUPPORTED = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")

_log = logging.getLogger(__name__)


class SamplingCalls:
    """`kind` is the engine's, which has room for adapters of `most_rank` and knows the tokens below `vocab`; `ends` are
    those that end a turn if a client names no others. `answered` gets the id of each call that has its answer."""

    def __init__(
        self,
        log: CallLog,
        engine: KeptEngine,
        folder: Path,
        *,
        kind: str,
        most_rank: int,
        vocab: int,
        max_context: int,
        places: int,
        ends: Sequence[int],
        answered: Callable[[str], None],
    ) -> None:
        self._log, self._engine, self._folder, self._answered = log, engine, folder, answered
        self._kind, self._most_rank, self._vocab = kind, most_rank, vocab
        self._max_context, self._ends = max_context, tuple(ends)
        self._turns = FairTurns(places)
        self._adapters: HeldAdapters | None = None
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer calls for ever, those first that a life before had accepted."""
        async with trio.open_nursery() as self._nursery:
            for open_call in self._log.unanswered(SAMPLE):
                self.came(open_call)
            task_status.started()
            await trio.sleep_forever()

    def came(self, call: Call) -> None:
        """A call is in the log."""
        assert self._nursery is not None
        self._nursery.start_soon(self._sample, call)

    async def _sample(self, call: Call) -> None:
        space_wait, call_answer = SpaceWait(self._folder), None
        while True:
            try:
                # Sampled once and written as often as the disk needs: sampling again after a full disk would be another
                # answer, at another price.
                call_answer = await self._sampled(call) if call_answer is None else call_answer
                await trio.to_thread.run_sync(self._log.answer, call, call_answer)
                break
            except (OSError, DiskFull) as error:  # of the links to weights, or of the log
                await space_wait.after(error)
        self._answered(call.id)

    async def _sampled(self, call: Call) -> CallAnswer:
        try:
            return await self._by_engine(call)
        except (UsageError, EngineRefusal) as error:
            return failed_answer(str(error), "user")
        except DiskFull:
            raise
        except AgentRLError as error:
            _log.warning("call %s failed: %s", call.id, error)
            return failed_answer(str(error), "server")

    async def _by_engine(self, call: Call) -> CallAnswer:
        """The answer by the engine that runs; if that ends meanwhile, by the next one."""
        if self._log.clients.session_is(call.session) == "ended":
            raise UsageError(SESSION_ENDED)
        for _ in range(_ENGINES):
            engine_client = await self._engine.client()
            if self._adapters is None or self._adapters.client is not engine_client:
                links_folder = self._folder / "held"
                shutil.rmtree(links_folder, ignore_errors=True)  # those of an engine that has ended
                self._adapters = HeldAdapters(engine_client, links_folder / secrets.token_hex(4), most=HELD)
            try:
                return await self._answer(call, self._adapters)
            # Only an engine that has ended is replaced. One that lives and refuses would refuse at the next engine,
            # too.
            except (EngineUnavailable, EngineTimeout):
                if not await self._engine.has_ended(engine_client):
                    raise
        raise EngineUnavailable(f"{_ENGINES} engines ended while they computed it: the server's log says how")

    async def _answer(self, call: Call, adapters: HeldAdapters) -> CallAnswer:
        sample_request: SampleRequest = parse(SampleRequest, call.body)
        for field_name in _UNSUPPORTED:
            if field_value := getattr(sample_request, field_name):
                raise ConfigError(field_name, field_value, "this server does not have it: leave it out")
        prompt = prompt_tokens(sample_request.prompt)
        room_tokens = self._max_context - len(prompt)
        if not prompt or room_tokens < 1:
            correction = (
                f"give 1 to {self._max_context - 1}: the server was started with --max-context {self._max_context}"
            )
            raise ConfigError("prompt", f"{len(prompt)} tokens", correction)
        if unknown_tokens := [prompt_token for prompt_token in prompt if not 0 <= prompt_token < self._vocab]:
            raise ConfigError("prompt", unknown_tokens[0], f"the model has the tokens 0 to {self._vocab - 1}")
        sampling = self._sampling(sample_request.sampling_params, room_tokens)
        sampler_record = self._log.clients.sampler(call.owner)
        assert sampler_record is not None
        async with adapters.held(self._weights(sampler_record.path)) as field_name:
            generations = await self._samples(
                call, sample_request.num_samples, prompt, sampling, adapters.client, field_name
            )
            prompt_scores = None
            if sample_request.prompt_logprobs:
                async with self._turns.turn(call.session, len(prompt)):
                    prompt_scores = await adapters.client.score(prompt, deadline_s=_DEADLINE_S, model=field_name)
        return sample_answer(generations, prompt_scores)

    async def _samples(
        self,
        call: Call,
        number: int,
        tokens: tuple[int, ...],
        sampling: SamplingParams,
        engine: EngineClient,
        name: str | None,
    ) -> list[Generation]:
        generations = dict[int, Generation]()
        failures = list[AgentRLError]()

        async def draw(place: int) -> None:
            engine_request = GenerateRequest(
                request_id=f"{call.id}:{place}",
                session=call.id,
                token_ids=tokens,
                sampling=sampling,
                deadline_s=_DEADLINE_S,
                model=name,
                # The client names what ends its turns. An engine that stops at the model's own end tokens besides would
                # end a sequence that the client wants to go on.
                ignore_eos=True,
            )
            try:
                async with self._turns.turn(call.session, len(tokens) + sampling.max_tokens):
                    generations[place] = await engine.generate(engine_request)
            except AgentRLError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for place_index in range(number):
                nursery.start_soon(draw, place_index)
        if failures:
            raise failures[0]
        return [generations[place_index] for place_index in range(number)]

    def _sampling(self, fields: SamplingFields, room: int) -> SamplingParams:
        if fields.seed is not None:
            raise ConfigError("sampling_params.seed", fields.seed, "the engine has no seeds: leave it out")
        check_temperatures(self._kind, sampling_params=fields.temperature)
        stop_entries: list[int] | list[str] = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
        stop_ids = tuple(stop_entry for stop_entry in stop_entries if isinstance(stop_entry, int))
        stop_texts = tuple(stop_entry for stop_entry in stop_entries if isinstance(stop_entry, str))
        return SamplingParams(
            max_tokens=room if fields.max_tokens is None else min(fields.max_tokens, room),
            temperature=fields.temperature,
            top_k=fields.top_k,
            top_p=fields.top_p,
            stop_token_ids=self._ends if fields.stop is None or stop_texts else stop_ids,
            stop=stop_texts,
        )

    def _weights(self, path: str | None) -> tuple[str, Path] | None:
        """Name and folder of the adapter at a path; None for the base model."""
        if path is None:
            return None
        weights_record = self._log.clients.weights(path)
        if weights_record is None:
            raise ConfigError("model_path", path, "its weights are gone: unnamed weights go with their session")
        check_rank("model_path", path, weights_record.rank, self._most_rank)
        return f"w{weights_record.number}", weights_folder(self._folder, weights_record.number)
