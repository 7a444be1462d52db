"""The embedded engine without its routes: when passes run, and a client's request on its way to tokens.

Owns the pause, the sleep and the queues between the batcher and the connections, all in one asyncio loop. Forward
passes run in that loop between two looks at the sockets: one thread, so nothing contends for the interpreter. Only a
weight file is read on another, while the old weights go on. Knows no dialect.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from starlette.types import Receive

from agentrl.engine.embedded.batching import Batcher, BatchRequest, Emission, ShownImages
from agentrl.engine.embedded.chat import Chat
from agentrl.engine.embedded.metrics_text import Histograms
from agentrl.engine.embedded.requests import BadRequest, SamplingRequest, UnknownModel, parse_generate
from agentrl.engine.embedded.weight_updates import Adapters, WeightUpdates, give_back_memory
from agentrl.engine.weight_sync.weight_sources import Sources
from agentrl.host import json_log
from agentrl.host.spare_cores import SpareCores
from agentrl.tokens import images

log = logging.getLogger(__name__)
PREFIX = "generate-tokens-"  # vLLM puts it before a request's id, and `/abort_requests` wants it there
# Each pass through asyncio's loop reads what lies at the sockets, and a request takes several: accept, head, body,
# parse. With one look a new request would wait several whole passes for its start.
_POLLS = 8  # looks at the sockets between two passes; a request needs several to be read, parsed and queued


class PassLoop:
    """Decides when the next forward pass runs: while there is work, and the engine is neither paused nor asleep."""

    def __init__(self, batcher: Batcher, spare: SpareCores | None = None) -> None:
        """With `spare`, a pass has as many threads as it allows."""
        self._batcher, self._spare = batcher, spare
        self._wake, self._idle = asyncio.Event(), asyncio.Event()
        self.paused = False
        self.asleep = set[str]()  # the parts that sleep, of "weights" and "kv_cache"
        self.awake = asyncio.Event()
        self.awake.set()

    async def drive(self) -> None:
        """Run passes until cancelled."""
        while True:
            if self.paused or not self._batcher.busy:
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            self._idle.clear()
            # Looked at before each pass: cores are idle while the learner waits for a batch, and taken while it
            # steps. A fixed number is wrong in one of the two.
            if self._spare is not None and (thread_count := self._spare.threads()) != torch.get_num_threads():
                torch.set_num_threads(thread_count)
            # In the loop itself, and not on a thread: the pass would hold the interpreter for most of its time
            # anyway, and both would slow each other down. Requests that come meanwhile lie in the socket's buffers.
            self._batcher.step()
            for _ in range(_POLLS):
                await asyncio.sleep(0)

    def submit(self, request: BatchRequest) -> None:
        """Queue a request."""
        self._batcher.submit(request)
        self._wake.set()

    async def wait_until_idle(self) -> None:
        """Return once no request runs; at once if the engine is paused."""
        if not self.paused:
            await self._idle.wait()

    def resume(self) -> None:
        """End a pause. Raises BadRequest while a part sleeps."""
        if self.asleep:
            raise BadRequest(f"the engine sleeps ({', '.join(sorted(self.asleep))}): call /wake_up")
        self.paused = False
        self._wake.set()

    def sleep(self, *, drop_weights: bool) -> None:
        """Free the memory of keys and values, with `drop_weights` also that of the weights. The engine must be
        paused."""
        self.awake.clear()
        self.asleep = {"weights", "kv_cache"}
        self._batcher.rest(weights=drop_weights)
        give_back_memory()

    def wake(self, tags: Sequence[str]) -> None:
        """Wake parts. With the last one the engine goes on; not before it has weights: it raises BadRequest."""
        sleeping_parts = self.asleep - set(tags)
        if not sleeping_parts and not self._batcher.model.loaded:
            raise BadRequest("sleep level 2 dropped the weights: wake the tag weights, and send an update first")
        if "kv_cache" in self.asleep - sleeping_parts:
            self._batcher.wake()
        self.asleep = sleeping_parts
        if not sleeping_parts:
            self.awake.set()
            self.resume()


class Generation:
    """A checked request, and the queue that its tokens come to."""

    def __init__(self, engine: Engine, sampling_request: SamplingRequest) -> None:
        """Raises BadRequest for an unknown model, or an image that cannot be decoded."""
        self._engine, self._emissions = engine, asyncio.Queue[Emission]()
        self.sampling_request = sampling_request
        self.request = BatchRequest(
            id=PREFIX + sampling_request.request_id,
            # An image's token is a large number made of its content, so that prefixes with different images differ.
            # Mirrored below zero it fits the int32 of the slots.
            tokens=[
                token if token < images.FIRST else images.FIRST - 1 - token for token in sampling_request.token_ids
            ],
            sampling=sampling_request.sampling,
            sink=self._emissions.put_nowait,
            adapter=engine.adapters.of(sampling_request.model),
            shown=engine.shown(sampling_request),
        )

    @contextmanager
    def running(self, receive: Receive) -> Generator[None]:
        """Compute the request, until its client has left."""
        request, batcher = self.request, self._engine.batcher
        self._engine.loop.submit(request)
        # ASGI's next message after a whole body is the disconnect. Without somebody listening for it an engine would
        # go on sampling a turn that left for another engine.
        disconnect = asyncio.ensure_future(receive())  # resolves when the client has left
        disconnect.add_done_callback(lambda done: done.cancelled() or batcher.abort(request.id))
        try:
            yield
        finally:
            disconnect.cancel()
            # The name that the client gave, without vLLM's prefix: it is the one that the journal and the worker's
            # log have.
            with json_log.about(request=request.id.removeprefix(PREFIX)):
                log.info("%d tokens, after a prompt of %d", request.sampled, request.prompt_length)

    def scores(self) -> list[float]:
        """Log-probabilities of the prompt's tokens after the first."""
        return self._engine.batcher.score(self.request.tokens[: self.request.prompt_length], self.request.adapter)

    async def emissions(self) -> AsyncIterator[Emission]:
        """The chunks as they come."""
        started_at = last_at = time.perf_counter()
        finish = None
        while finish is None:
            emission = await self._emissions.get()
            finish, now = emission.finish, time.perf_counter()
            self._engine.histograms.observe(emission, now - started_at, now - last_at, first=last_at is started_at)
            last_at = now
            yield emission

    async def whole(self) -> Emission:
        """All chunks as one, once the last has come."""
        started_at = time.perf_counter()
        emissions = [await self._emissions.get()]
        while emissions[-1].finish is None:
            emissions.append(await self._emissions.get())
        emission, elapsed_s = self.joined(emissions), time.perf_counter() - started_at
        self._engine.histograms.observe(emission, elapsed_s, elapsed_s, first=True)
        return emission

    def joined(self, parts: Sequence[Emission]) -> Emission:
        """All chunks of the generation as one."""
        return Emission(
            [token_id for part in parts for token_id in part.token_ids],
            [logprob for part in parts for logprob in part.logprobs],
            self.request.spans(0, self.request.sampled),
            parts[-1].finish,
            [kept_ids for part in parts for kept_ids in part.kept],
        )


class Engine:
    """One model with all that its dialects share: `VllmServer` and `SGLangServer` translate to these parts."""

    def __init__(
        self,
        batcher: Batcher,
        *,
        name: str,
        sources: Sources,
        chat: Chat | None = None,
        spare: SpareCores | None = None,
        unknown_model: Callable[[str], BadRequest] = UnknownModel,
    ) -> None:
        """New weights are read from `sources`; `unknown_model` makes the error for a model that is not served."""
        self.batcher, self.name, self.chat = batcher, name, chat
        self.loop, self.histograms = PassLoop(batcher, spare), Histograms()
        self.updates = WeightUpdates(batcher, sources)
        self.adapters = Adapters(batcher.model.architecture, sources, model=name, missing=unknown_model)
        self._requests = 0

    def accept(self, body: bytes) -> Generation:
        """Check a request for tokens, in vLLM's words. Raises BadRequest."""
        batcher = self.batcher
        self._requests += 1
        sampling_request = parse_generate(
            body,
            vocab=batcher.model.architecture.vocab,
            length=batcher.slots.length,
            default_id=f"unnamed-{self._requests}",
            vision=batcher.model.architecture.vision,
        )
        # A retry that overlaps its first attempt would run under one id twice, and an abort would end only one of
        # them.
        if batcher.knows(PREFIX + sampling_request.request_id):
            raise BadRequest(f"request_id: {sampling_request.request_id!r} is already running")
        if sampling_request.sampling.stop and batcher.decode is None:
            raise BadRequest("sampling_params.stop: the model's folder has no tokenizer.json to read text with")
        return Generation(self, sampling_request)

    def shown(self, sampling_request: SamplingRequest) -> ShownImages | None:
        """The images of a request. Raises BadRequest for an image that cannot be decoded."""
        model = self.batcher.model
        if not sampling_request.images or model.architecture.vision is None or model.tower is None:
            return None
        for image in sampling_request.images.values():
            try:
                model.tower.try_decoding(image)
            except ValueError as error:
                raise BadRequest(f"images: {error}") from None
        return ShownImages(sampling_request.token_ids, sampling_request.images, model.architecture.vision)
