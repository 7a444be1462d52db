"""An engine fleet of your own: engines that serve one model, started here or attached to.

Owns the engines that it starts: they end with the block, or with this process, however that ends. Never knows an
environment, a buffer or a learner.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import trio

from agentrl.config import EngineSettings
from agentrl.config.sections import read_section
from agentrl.engine.client import EngineClient
from agentrl.engine.rendering.renderer import Renderer
from agentrl.engine.router.router import Fleet
from agentrl.engine.running_engine import Door, running_engine
from agentrl.engine.weight_sync.canary import Dtype
from agentrl.engine.weight_sync.publisher import WeightPublisher
from agentrl.engine.weight_sync.transport import Parcel
from agentrl.errors import ConfigError, EngineTimeout, EngineUnavailable
from agentrl.models.resolve import engine_dtype, model_dir, vocabulary
from agentrl.protocols import GenerateRequest
from agentrl.records import Finish, Json, Message, SamplingParams

_MOST_CONTEXT = 4096  # tokens of a conversation, unless the caller wants more
_CLOSE_S = 2.0  # for connections to close

Prompt = str | Sequence[Message] | Sequence[int]
"""A user's message, a conversation, or tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Tokens that a fleet sampled: T of them, the stop token included. `logprobs` [T] are in nats, under the
    distribution that the sampling settings define; `versions` [T] are the weight versions that sampled them. `text` is
    without the token that ends the turn. `prompt_ids` are the tokens before."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    text: str
    finish: Finish


class EngineFleet:
    """Engines that serve one model, as one. Make it with `start` or `attach`, which are contexts of a trio program;
    `agentrl.blocks.sync` has it for notebooks.

        async with EngineFleet.start("agentrl/tiny-coder") as fleet:
            sample = await fleet.sample("What is 1 + 1?", max_tokens=16)
    """

    def __init__(
        self,
        model: Path,
        urls: Sequence[str],
        settings: EngineSettings,
        *,
        max_context: int | None,
        nursery: trio.Nursery,
    ) -> None:
        """For `start` and `attach`."""
        self.model, self.urls, self.settings, self.max_context = model, tuple(urls), settings, max_context
        self.renderer = Renderer(model)
        self.vocabulary = vocabulary(model)
        self.nursery = nursery
        engine_clients = [
            EngineClient(url, api_key=settings.key_of(url), kind=settings.kind, vocabulary=self.vocabulary)
            for url in urls
        ]
        self._clients = engine_clients
        self.engine = Fleet.configured(
            engine_clients, settings, decode=self.renderer.decode, preempt=settings.at_update == "leave"
        )
        self.publisher = WeightPublisher(settings)
        self._requests, self._published = count(1), 0

    @classmethod
    @asynccontextmanager
    async def start(
        cls,
        model: str | Path,
        *,
        settings: EngineSettings | Mapping[str, Any] | None = None,
        max_context: int | None = None,
    ) -> AsyncGenerator[EngineFleet]:
        """Start `settings.replicas` engines for the time of the block. `settings` are those of the run file's table
        `[engine]`; `max_context` is the most tokens of a conversation (default: those that the model has positions for,
        at most 4096). They listen on sockets that only this user can reach.

        Raises ConfigError for a bad setting, ModelError for a model that is not there, UsageError, RunFailed or
        EngineUnavailable if an engine does not start."""
        engine_settings, model_folder = read_section(EngineSettings, settings, "engine"), model_dir(str(model))
        if engine_settings.urls:
            raise ConfigError(
                "engine.urls", engine_settings.urls, "these engines run already: EngineFleet.attach takes them"
            )
        position_count = _positions(model_folder)
        if max_context is None:
            max_context = min(_MOST_CONTEXT, position_count or _MOST_CONTEXT)
        if max_context < 2 or (position_count is not None and max_context > position_count):
            raise ConfigError("max_context", max_context, f"give 2 to {position_count or 'any number of'} tokens")
        async with AsyncExitStack() as exit_stack:
            engine_urls: list[str] = []
            # One after the other: two engines that start side by side on one GPU each measure the other's memory as
            # taken, or as free.
            for engine_gpus in engine_settings.places:
                placement = [engine_gpus] if engine_gpus else 1
                replica_settings = engine_settings.model_copy(update={"replicas": placement})
                starting_engine = running_engine(model_folder, replica_settings, door=Door(), max_context=max_context)
                engine_url, _ = await exit_stack.enter_async_context(starting_engine)
                engine_urls.append(engine_url)
            fleet = await exit_stack.enter_async_context(
                cls._over(model_folder, engine_urls, engine_settings, max_context)
            )
            yield fleet

    @classmethod
    @asynccontextmanager
    async def attach(
        cls,
        urls: str | Sequence[str],
        model: str | Path,
        *,
        settings: EngineSettings | Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[EngineFleet]:
        """Use engines that run already, such as those of `agentrl serve`, and leave them running. `model` is the one
        that they serve: its tokenizer and chat template render conversations. `settings.api_key_env` names the variable
        with their key; `settings.kind` says which engines they are.

        Raises ConfigError for a bad setting, EngineUnavailable for an engine that does not answer within
        half of `engine.liveness_deadline_s`."""
        addresses = [urls] if isinstance(urls, str) else list(urls)
        if not addresses:
            raise ConfigError("urls", urls, "give the URL of an engine at least")
        fields = (
            settings.model_dump(exclude_unset=True) if isinstance(settings, EngineSettings) else dict(settings or {})
        )
        engine_settings = read_section(EngineSettings, {**fields, "urls": addresses}, "engine")
        async with cls._over(model_dir(str(model)), engine_settings.urls, engine_settings, None) as fleet:
            yield fleet

    @classmethod
    @asynccontextmanager
    async def _over(
        cls, model: Path, urls: Sequence[str], settings: EngineSettings, max_context: int | None
    ) -> AsyncGenerator[EngineFleet]:
        block_failure: Exception | None = None
        async with trio.open_nursery() as nursery:
            fleet = cls(model, urls, settings, max_context=max_context, nursery=nursery)
            try:
                await fleet._reach()
                nursery.start_soon(fleet.engine.control)
                yield fleet
            except Exception as error:  # raised below, outside the nursery, which would wrap it in a group
                block_failure = error
            finally:
                nursery.cancel_scope.cancel()
                # The block may have ended by a cancellation, in which no connection could be closed in order.
                with trio.move_on_after(_CLOSE_S, shield=True):
                    await fleet.engine.aclose()
        if block_failure is not None:
            raise block_failure

    async def _reach(self) -> None:
        for engine_client in self._clients:
            try:
                await engine_client.served_version(deadline_s=self.settings.admin_deadline_s)
            except (EngineUnavailable, EngineTimeout) as error:
                raise EngineUnavailable(f"no engine answers at {engine_client.url} ({error}): start it") from error

    @property
    def version(self) -> int:
        """The newest weight version that an engine of the fleet is known to serve."""
        return max(self._published, *(engine_client.version for engine_client in self._clients))

    @property
    def dtype(self) -> Dtype:
        """The dtype in which its engines take weights."""
        return engine_dtype(self.settings, self.model)

    async def take(self, parcel: Parcel) -> None:
        """Have the engines serve the weights of a parcel: `publish` calls it. Raises as `WeightPublisher.deliver`."""
        delivery_cost = await self.publisher.deliver(self.urls, parcel)
        self._published = parcel.version
        if not delivery_cost["engines_behind"]:  # else the fleet asks each which one it has
            for engine_url in self.urls:
                self.engine.mark_refit(engine_url, parcel.version)
        await self.publisher.tidy(self.urls)

    async def sample(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        stop: Sequence[str] = (),
        tools: Sequence[Mapping[str, Json]] = (),
        deadline_s: float = 120.0,
    ) -> Sample:
        """Sample a turn after `prompt`: a text is a user's message, messages are rendered with the model's chat
        template and `tools` (OpenAI-style schemas), tokens are taken as they are. At `deadline_s` it is cut, and
        `finish` is "length".

        Raises ConfigError for what no engine could sample, EngineError if no engine of the fleet can."""
        token_ids = self._rendered(prompt, tools)
        if max_tokens < 1:
            raise ConfigError("max_tokens", max_tokens, "give 1 or more")
        if self.max_context is not None and len(token_ids) + 1 > self.max_context:
            hint = f"the fleet was started with max_context = {self.max_context}: shorten it, or raise that"
            raise ConfigError("prompt", f"{len(token_ids)} tokens", hint)
        token_budget = max_tokens if self.max_context is None else min(max_tokens, self.max_context - len(token_ids))
        request_number = next(self._requests)
        generation = await self.engine.generate(
            GenerateRequest(
                request_id=f"sample-{id(self):x}-{request_number}",
                # A session for each call: prompts of a notebook have nothing in common, so they may go to any engine,
                # and no engine keeps their beginnings for the next turn.
                session=f"sample-{request_number}",
                token_ids=token_ids,
                sampling=SamplingParams(
                    max_tokens=token_budget,
                    temperature=temperature,
                    top_p=top_p,
                    top_k=top_k,
                    min_p=min_p,
                    stop=tuple(stop),
                    stop_token_ids=self.renderer.stop_token_ids,
                ),
                deadline_s=deadline_s,
            )
        )
        return Sample(
            prompt_ids=token_ids,
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            versions=tuple(span.version for span in generation.spans for _ in range(span.start, span.end)),
            text=self.renderer.decode(generation.token_ids),
            finish=generation.finish,
        )

    def _rendered(self, prompt: Prompt, tools: Sequence[Mapping[str, Json]]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self.renderer.start([Message(role="user", content=prompt)], tools)
        if not prompt:
            raise ConfigError("prompt", prompt, "give a text, messages, or tokens")
        if not isinstance(prompt[0], int):
            return self.renderer.start(cast("Sequence[Message]", prompt), tools)
        token_ids = tuple(cast("Sequence[int]", prompt))
        # An index beyond the embeddings is an error deep inside an engine, where it may end the requests of others that
        # it was batched with.
        unknown_token_ids = [
            token_id
            for token_id in token_ids
            if token_id < 0 or (self.vocabulary is not None and token_id >= self.vocabulary)
        ]
        if unknown_token_ids:
            raise ConfigError(
                "prompt", unknown_token_ids[0], f"the model has the tokens 0 to {(self.vocabulary or 0) - 1}"
            )
        return token_ids


def _positions(folder: Path) -> int | None:
    """How many tokens the model of a folder has positions for; None if its config.json does not say."""
    model_config: Any = json.loads((folder / "config.json").read_text())
    position_count: Any = (model_config.get("text_config") or model_config).get("max_position_embeddings")
    return position_count if isinstance(position_count, int) else None
