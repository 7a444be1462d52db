"""Models that score, over HTTP: a classification head (`/classify`) and a chat model (`/v1/chat/completions`), as vLLM
and other servers offer them.

Owns the cost of a call: how many run at once, the attempts after failures that pass, and one deadline over all of it,
the wait for a place included. Knows neither rubrics nor the use of a score. The connection is `EngineClient`'s,
and so are the names of failures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import httpx
import trio
from trio.lowlevel import RunVar

from agentrl.engine.answer_content import text_of_answer
from agentrl.engine.client import EngineClient
from agentrl.engine.vllm_api import parse_json, prompt_logprobs, score_json
from agentrl.env.image_parts import with_parts
from agentrl.errors import EngineError, EngineTimeout, EngineUnavailable, ScoreError
from agentrl.host.clocks import granted
from agentrl.records import EngineKey, Json, Message

_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 8.0


@dataclass(frozen=True, slots=True)
class _Opened:
    """A client's connections and places in one trio loop; they cannot be shared with another loop."""

    http: EngineClient
    places: trio.CapacityLimiter


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletion:
    """One answer of a chat model: `message` as the server wrote it, why it ended (None if the server does not say), and
    how many tokens the model wrote (None if the server does not count them)."""

    message: Mapping[str, Json]
    finish_reason: str | None
    tokens: int | None


class ScoringClient:
    """One server, shared by any number of judges and reward models. Make it anywhere, at import as well: it connects at
    the first call, and its connections end with the trio loop that made them.

    `url` is the server's root (a `/v1` at its end is taken off), `model` the name by which the server knows the model
    (None: its only one). `concurrency` bounds the calls that run at once in this process, `deadline_s` each call with
    all its attempts: a call to an engine that is gone or overloaded is retried after 0.25 s, then after twice as long
    each time, up to 8 s."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | EngineKey | None = None,
        concurrency: int = 64,
        deadline_s: float = 45.0,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url, self.deadline_s = url.rstrip("/").removesuffix("/v1"), deadline_s
        self._model: dict[str, Json] = {} if model is None else {"model": model}
        self._api_key, self._concurrency, self._transport = api_key, concurrency, transport
        # A judge is often a module's constant, and one process may run several trio loops one after the other (tests,
        # a notebook). A socket belongs to the loop that opened it, so each loop gets connections of its own
        # (`test_one_client_serves_loop_after_loop_and_its_connections_end_with_each`).
        self._opened: RunVar[_Opened] = RunVar(f"agentrl scoring {self.url}")

    async def classify(self, content: str | Sequence[int], *, activation: bool = False) -> tuple[float, ...]:
        """A classification head's outputs for a text or token ids, one number a label; with `activation` after a
        sigmoid (one label) or softmax.

        Raises EngineTimeout at the deadline, EngineRefusal if the server refuses the input (a text too long for it,
        say), EngineError if it refuses for another reason, ScoreError if it answers otherwise."""
        return await self._classify({"input": content if isinstance(content, str) else list(content)}, activation)

    async def classify_chat(
        self, messages: Sequence[Message], *, activation: bool = False, deadline_s: float | None = None
    ) -> tuple[float, ...]:
        """Classify a conversation, rendered by the server's chat template; see `classify`."""
        return await self._classify({"messages": list(messages)}, activation, deadline_s)

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        schema: Mapping[str, Json] | None = None,
        deadline_s: float | None = None,
        **options: Json,
    ) -> str:
        """The model's answer, empty if it gave none. With a JSON `schema` the server lets it write nothing else.
        `options` go into the request as they are (`temperature`, `max_tokens`, `chat_template_kwargs`, …).

        Raises as `classify`."""
        request_options = dict(options)
        if schema is not None:
            answer_schema: dict[str, Json] = {"name": "answer", "strict": True, "schema": dict(schema)}
            request_options["response_format"] = {"type": "json_schema", "json_schema": answer_schema}
        answer_message = await self.message(messages, deadline_s=deadline_s, **request_options)
        return text_of_answer(answer_message.get("content"))[0]

    async def message(
        self, messages: Sequence[Message], *, deadline_s: float | None = None, **options: Json
    ) -> Mapping[str, Json]:
        """The model's whole answer as the API has it: `content`, `tool_calls`, and whatever else the server adds.
        Raises as `chat`."""
        return (await self.completion(messages, deadline_s=deadline_s, **options)).message

    async def completion(
        self, messages: Sequence[Message], *, deadline_s: float | None = None, **options: Json
    ) -> ChatCompletion:
        """The model's answer with what the server says of it. Raises as `chat`."""
        sent_messages: list[Json] = [with_parts(message) for message in messages]
        chat_request: dict[str, Json] = {**self._model, "messages": sent_messages, **options}
        answer = await self._post("/v1/chat/completions", chat_request, deadline_s)
        try:
            choice = answer["choices"][0]
            message, finish_reason = dict(choice["message"]), choice.get("finish_reason")
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ScoreError(f"{self.url} gave no chat completion: {str(answer)[:200]}") from error
        token_usage = answer.get("usage")
        usage_fields = cast("dict[str, Json]", token_usage) if isinstance(token_usage, dict) else {}
        written_tokens = usage_fields.get("completion_tokens")
        return ChatCompletion(
            message=message,
            finish_reason=finish_reason if isinstance(finish_reason, str | None) else json.dumps(finish_reason),
            tokens=written_tokens if isinstance(written_tokens, int) else None,
        )

    async def continuation(
        self, prompt: str, *, deadline_s: float | None = None, **options: Json
    ) -> tuple[str, str | None]:
        """The text with which the model goes on from `prompt`, without a chat template, and why it ended. Raises as
        `chat`."""
        answer = await self._post("/v1/completions", {**self._model, "prompt": prompt, **options}, deadline_s)
        try:
            choice = answer["choices"][0]
            text, finish_reason = choice["text"], choice.get("finish_reason")
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            raise ScoreError(f"{self.url} gave no completion: {str(answer)[:200]}") from error
        if not isinstance(text, str):
            raise ScoreError(f"{self.url} gave no completion: {str(answer)[:200]}")
        return text, finish_reason if isinstance(finish_reason, str | None) else json.dumps(finish_reason)

    async def reach(self, *, deadline_s: float = 10.0) -> None:
        """Connect once. Raises EngineUnavailable if nobody listens at the address; a server that answers anything, or
        nothing yet, is reachable."""
        try:
            await self._here().http.call("GET", "/v1/models", deadline_s=deadline_s)
        except EngineUnavailable as error:
            # The cause and not the message: a server that is overloaded is there, and a check at a run's start should
            # not end the run for that.
            if isinstance(error.__cause__, httpx.ConnectError):
                raise
        except EngineError:
            pass

    async def logprobs(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probs, in nats at temperature 1, of `token_ids[1:]`, each conditioned on the tokens before it, under the
        server's model. Raises EngineTimeout at the deadline, EngineError if the server refuses or does not score
        prompts."""
        answer = await self._post("/inference/v1/generate", score_json(token_ids, self._model.get("model")))
        return prompt_logprobs(answer, token_ids)

    async def tokens(self, text: str) -> tuple[int, ...]:
        """The server's tokens of a text, without any that open or close it. Raises as `logprobs`."""
        answer = await self._post("/tokenize", {**self._model, "prompt": text, "add_special_tokens": False})
        try:
            return tuple(int(token_id) for token_id in answer["tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise ScoreError(f"{self.url} gave no tokens: {str(answer)[:200]}") from error

    async def _classify(
        self, request: Mapping[str, Json], activation: bool, deadline_s: float | None = None
    ) -> tuple[float, ...]:
        answer = await self._post("/classify", {**self._model, **request, "use_activation": activation}, deadline_s)
        try:
            (class_entry,) = answer["data"]
            return tuple(float(probability) for probability in class_entry["probs"])
        except (KeyError, TypeError, ValueError) as error:
            raise ScoreError(f"{self.url} gave no classification: {str(answer)[:200]}") from error

    async def _post(self, path: str, body: Mapping[str, Json], deadline_s: float | None = None) -> dict[str, Json]:
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        last_failure: EngineUnavailable | None = None
        # Around the wait for a place too. A judge that is slow for all would otherwise get each episode's patience
        # only once its turn in the queue came (law 4).
        with trio.move_on_after(deadline_s):
            connections = self._here()
            async with granted(connections.places, f"a place at {self.url}"):
                for pause_s in _pauses():
                    try:
                        return parse_json(await connections.http.call("POST", path, json=body, deadline_s=math.inf))
                    # Only what passes by itself is tried again: a refusal is the input's fault, and a timeout has
                    # used up the deadline.
                    except EngineUnavailable as error:
                        last_failure = error
                    await trio.sleep(pause_s)
        last_attempt = f"; the last attempt: {last_failure}" if last_failure else ""
        raise EngineTimeout(f"{self.url} did not answer {path} within {deadline_s:g} s{last_attempt}") from last_failure

    def _here(self) -> _Opened:
        try:
            return self._opened.get()
        except LookupError:
            engine_client = EngineClient(self.url, api_key=self._api_key, transport=self._transport)
            opened = _Opened(engine_client, trio.CapacityLimiter(self._concurrency))
            self._opened.set(opened)
            # No nursery of ours is open here, and nobody calls `aclose` on a constant: a system task ends with its
            # loop.
            trio.lowlevel.spawn_system_task(_close_with_the_loop, engine_client)
            return opened


async def _close_with_the_loop(client: EngineClient) -> None:
    """A system task: trio cancels it when the loop's last other task has ended."""
    try:
        await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await client.aclose()


def _pauses() -> Iterator[float]:
    pause_s = _PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
