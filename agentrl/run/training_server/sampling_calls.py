"""The calls of sampling clients: samples and log-probs by an engine, each with the adapter of its client.

Owns which adapters the engine holds. A call that a killed server had accepted, or whose engine ended, is sampled again:
nobody has seen a token of it.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from agentrl.engine.client import EngineClient
from agentrl.errors import AgentRLError, ConfigError, EngineRefusal, EngineUnavailable, UsageError
from agentrl.protocols import GenerateRequest
from agentrl.records import Generation, SamplingParams
from agentrl.run.training_server.call_log import Call, CallAnswer, CallLog
from agentrl.run.training_server.fair_turns import FairTurns
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
from agentrl.run.training_server.training_calls import weights_folder

SAMPLE = "sample"
_DEADLINE_S = 1800.0  # of one sequence, and of scoring a prompt
_ADMIN_S = 120.0
_HELD = 8  # adapters in the engine at once
_ENGINES = 3  # that may end while they compute a call
_UNSUPPORTED = ("topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs", "prompt_alt_tokens_k")

_log = logging.getLogger(__name__)


class SamplingCalls:
    """`ends` are the tokens that end a turn if a client names no others; `answered` is told of each call that has its
    answer."""

    def __init__(
        self,
        log: CallLog,
        engine: KeptEngine,
        folder: Path,
        *,
        max_context: int,
        places: int,
        ends: Sequence[int],
        answered: Callable[[str], None],
    ) -> None:
        self._log, self._engine, self._folder, self._answered = log, engine, folder, answered
        self._max_context, self._ends = max_context, tuple(ends)
        self._turns = FairTurns(places)
        self._adapters: _Adapters | None = None
        self._nursery: trio.Nursery | None = None

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Answer calls for ever, those first that a life before had accepted."""
        async with trio.open_nursery() as self._nursery:
            for call in self._log.unanswered(SAMPLE):
                self.came(call)
            task_status.started()
            await trio.sleep_forever()

    def came(self, call: Call) -> None:
        """A call is in the log."""
        assert self._nursery is not None
        self._nursery.start_soon(self._sample, call)

    async def _sample(self, call: Call) -> None:
        try:
            answer = await self._by_engine(call)
        except (UsageError, EngineRefusal) as error:
            answer = failed_answer(str(error), "user")
        except AgentRLError as error:
            _log.warning("call %s failed: %s", call.id, error)
            answer = failed_answer(str(error), "server")
        await trio.to_thread.run_sync(self._log.answer, call, answer)
        self._answered(call.id)

    async def _by_engine(self, call: Call) -> CallAnswer:
        """The answer by the engine that runs; if that ends meanwhile, by the next one."""
        if self._log.session_is(call.session) == "ended":
            raise UsageError(SESSION_ENDED)
        for _ in range(_ENGINES):
            client = await self._engine.client()
            if self._adapters is None or self._adapters.client is not client:
                self._adapters = _Adapters(client)
            try:
                return await self._answer(call, self._adapters)
            except EngineUnavailable:
                if not await self._engine.has_ended(client):
                    raise
        raise EngineUnavailable(f"{_ENGINES} engines ended while they computed it: the server's log says how")

    async def _answer(self, call: Call, adapters: _Adapters) -> CallAnswer:
        asked: SampleRequest = parse(SampleRequest, call.body)
        for name in _UNSUPPORTED:
            if value := getattr(asked, name):
                raise ConfigError(name, value, "this server does not have it: leave it out")
        tokens = prompt_tokens(asked.prompt)
        room = self._max_context - len(tokens)
        if not tokens or room < 1:
            hint = f"give 1 to {self._max_context - 1}: the server was started with --max-context {self._max_context}"
            raise ConfigError("prompt", f"{len(tokens)} tokens", hint)
        sampling = self._sampling(asked.sampling_params, room)
        sampler = self._log.sampler(call.owner)
        assert sampler is not None
        async with adapters.held(self._weights(sampler.path)) as name:
            samples = await self._samples(call, asked.num_samples, tokens, sampling, adapters.client, name)
            scores = None
            if asked.prompt_logprobs:
                async with self._turns.turn(call.session, len(tokens)):
                    scores = await adapters.client.score(tokens, deadline_s=_DEADLINE_S, model=name)
        return sample_answer(samples, scores)

    async def _samples(
        self,
        call: Call,
        number: int,
        tokens: tuple[int, ...],
        sampling: SamplingParams,
        engine: EngineClient,
        name: str | None,
    ) -> list[Generation]:
        found = dict[int, Generation]()
        failures = list[AgentRLError]()

        async def one(at: int) -> None:
            request = GenerateRequest(
                request_id=f"{call.id}:{at}",
                session=call.id,
                token_ids=tokens,
                sampling=sampling,
                deadline_s=_DEADLINE_S,
                model=name,
            )
            try:
                async with self._turns.turn(call.session, len(tokens) + sampling.max_tokens):
                    found[at] = await engine.generate(request)
            except AgentRLError as error:
                failures.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for at in range(number):
                nursery.start_soon(one, at)
        if failures:
            raise failures[0]
        return [found[at] for at in range(number)]

    def _sampling(self, asked: SamplingFields, room: int) -> SamplingParams:
        if asked.seed is not None:
            raise ConfigError("sampling_params.seed", asked.seed, "the engine has no seeds: leave it out")
        stops: list[int] | list[str] = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
        ids = tuple(stop for stop in stops if isinstance(stop, int))
        texts = tuple(stop for stop in stops if isinstance(stop, str))
        return SamplingParams(
            max_tokens=room if asked.max_tokens is None else min(asked.max_tokens, room),
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            stop_token_ids=self._ends if asked.stop is None or texts else ids,
            stop=texts,
        )

    def _weights(self, path: str | None) -> tuple[str, Path] | None:
        """Name and folder of the adapter at a path; None for the base model."""
        if path is None:
            return None
        weights = self._log.weights(path)
        if weights is None:
            raise ConfigError("model_path", path, "its weights are gone: unnamed weights go with their session")
        return f"w{weights.number}", weights_folder(self._folder, weights.number)


class _Adapters:
    """The adapters that an engine has."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._users = dict[str, int]()  # by name, the longest unused first
        self._loading = trio.Lock()

    @asynccontextmanager
    async def held(self, adapter: tuple[str, Path] | None) -> AsyncGenerator[str | None]:
        """Inside, the engine has an adapter of this name and folder, and its name is what it is asked for."""
        if adapter is None:
            yield None
            return
        name, folder = adapter
        async with self._loading:
            users = self._users.pop(name, None)
            if users is None:
                await self._call("load", lora_name=name, lora_path=str(folder))
            self._users[name] = (users or 0) + 1
        try:
            async with self._loading:
                for other in [one for one, of in self._users.items() if not of][: max(0, len(self._users) - _HELD)]:
                    del self._users[other]
                    await self._call("unload", lora_name=other)
            yield name
        finally:
            self._users[name] -= 1

    async def _call(self, what: str, **asked: str) -> None:
        await self.client.call("POST", f"/v1/{what}_lora_adapter", json=asked, deadline_s=_ADMIN_S)
