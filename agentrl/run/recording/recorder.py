"""Which conversation a request belongs to, and the life of each: it begins, sleeps, goes on and ends.

    request ─► session id, id of an earlier response, or the conversation itself ─► its conversation, or a new one
            ─► an episode plays it (`agentrl.rollout.episode`) ─► the answer, once its turn is journaled

A conversation sleeps if its client has been silent while others needed the room: then its episode is in the store
alone, and this process keeps two digests of it. All conversations of a recorder that was killed begin asleep. Knows
HTTP by requests and responses; never opens a socket, a folder or an engine.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import trio

from agentrl.env.agent_programs import transcripts
from agentrl.env.agent_programs.model_apis import Api, Conversation, Responses
from agentrl.env.agent_programs.model_endpoint import (
    ModelEndpoint,
    Request,
    RequestReader,
    Response,
    answer_of,
    apis,
    is_retry,
    written,
)
from agentrl.env.agent_programs.request_checks import UnservedRequest, shown
from agentrl.env.agent_programs.streamed_answer import StreamedAnswer
from agentrl.env.core import Info
from agentrl.env.tools.parsers import get_format
from agentrl.errors import EngineRefusal
from agentrl.http.http_server import Typed
from agentrl.records import StopReason, Task
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.drain import HandedBack, TurnGate
from agentrl.rollout.episode import play
from agentrl.run.recording.client_sampling import KEYS, check_sampling
from agentrl.run.recording.recorded_env import Exchanges, RecordedConversation, exchanges, request_facts
from agentrl.run.run_folder import RECORDED
from agentrl.store import Claim, Ending, Partial
from agentrl.store.journal_writer import JournalWriter

log = logging.getLogger(__name__)

SESSION_HEADER: Final = "x-session-id"
_SESSION: Final = re.compile(r"[\w.:-]{1,128}")
_SESSION_PATH: Final = re.compile(r"/session/([^/]*)(/.*)")
_RESPONSE: Final = re.compile(r"resp_(\d+)-\d+")
_AWAKE_BYTES: Final = 256 << 20  # of the last requests of all conversations that are awake
_AT_ONCE: Final = 256  # claims of one call
_SWEEP_S: Final = 30.0  # between two looks for conversations that sleep for too long
_END_S: Final = 10.0  # for conversations to end at the recorder's end
_ASK_AGAIN: Final = "ask again"


@dataclass(slots=True, eq=False)
class Recorded:
    """One conversation. `claim` has the episode's fence and task, and no turns. While it is awake it has an `env`, in
    a task that ends with `scope`."""

    claim: Claim
    session: str = ""
    request_place: bytes = b""
    answer_place: bytes | None = None
    """The places behind its last request, and behind the answer to it if there is one."""
    endpoint: ModelEndpoint = field(default_factory=ModelEndpoint)
    env: RecordedConversation | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    has_ended: trio.Event = field(default_factory=trio.Event)
    """Set when its task has ended."""
    used_s: float = 0.0
    content_bytes: int = 0
    """When its last request came, and the size of that, which has the whole conversation most often."""
    is_over: bool = False


# Why a recorder plays episodes, and is no proxy that writes down what passes.
#
# A proxy is the short way: pass each request on to the engine, copy the answer into a file. It has three faults. An
# engine that gets messages renders and encodes them anew, so the answers of earlier turns come back as other tokens
# than those that were sampled (law 1). What it has copied of an answer dies with it, or with the engine. And limits,
# deadlines, retries and the journal would exist a second time beside those of a run.
#
# So a conversation is an environment (`recorded_env`) that an ordinary episode plays. The prompt is made of the
# sampled tokens, tokens are written as they come, another request for the same answer waits for the same turn, and a
# restart goes on as a worker does with an episode that it has claimed.
#
# A restart does not go on by itself, though. A worker would sample the rest of a turn at once; here its client may
# never come back, and how it wants to have the turn sampled is in its request. So conversations sleep until a request
# wakes them, and the same rule bounds memory: a conversation that nobody asks for is two digests.
#
# A client is known by what it says, since few of them send a name for their conversation. Requests are compared as
# digests of their beginnings (`transcripts`), which needs no text of the conversations that sleep. The price: after a
# restart nobody knows whether the last answer was read. A client that asks the same again gets it once more, and
# would have got another sample if the recorder had lived.
#
# `tests/run/test_recorder_kills.py` kills real recorders amid a turn, `test_recorder_faults.py` has each fault of an
# engine with the clients of each API.
class Recorder:
    """Answers the requests of any number of clients. `contexts` gives the context of a conversation's episode, whose
    policy calls tools in `tool_format`; `gate` is the gate of all of them. `awake` bounds the conversations whose
    messages are in memory, `most` all of them; `idle_s` ends one after so many seconds without a request. `name` is the
    worker's in the store, `purpose` that of the groups. Clients that come back to a recorder that was killed begin anew
    if it `repeats`, and else where they were."""

    def __init__(
        self,
        store: JournalWriter,
        contexts: Callable[[RecordedConversation], RolloutContext],
        nursery: trio.Nursery,
        *,
        gate: TurnGate,
        lease_s: float,
        tool_format: str,
        name: str,
        model: str,
        purpose: str,
        idle_s: float,
        awake: int,
        most: int,
        repeats: bool = False,
    ) -> None:
        self._store, self._contexts, self._nursery = store, contexts, nursery
        self._gate, self._lease_s, self._form = gate, lease_s, get_format(tool_format)
        self._name, self._model, self._purpose = name, model, purpose
        self._idle_s, self._awake, self._most = idle_s, awake, most
        self._repeats = repeats
        self._apis = apis(KEYS)
        self._conversations: dict[int, Recorded] = {}  # by episode
        self._in_use: dict[Recorded, None] = {}  # those awake, the longest unused first
        self._by_session: dict[str, Recorded] = {}
        self._by_place: dict[bytes, dict[Recorded, None]] = {}  # those without a session
        self._changing = trio.Lock()
        self._number = 0  # of the next conversation
        self._is_ending = False
        store.on_part = self.note_written

    # --- requests

    async def answer(
        self, method: str, path: str, query: str, headers: Mapping[str, str], content: bytes
    ) -> tuple[int, Typed | StreamedAnswer]:
        """Answer a request; see `Handler` in `agentrl.http.http_server`."""
        session, path = self._session_of(path, headers)
        request = Request(method, path, headers, content)
        api = self._apis.get(path)
        if method == "GET" and path == "/v1/models":
            model_entries = [{"id": self._model, "object": "model", "created": 0, "owned_by": "agentrl"}]
            return written(Response(200, {"object": "list", "data": model_entries}))
        if api is None or method != "POST":
            return written(Response(404, {"error": {"message": f"{method} {shown(path)} is not served"}}))
        try:
            return answer_of(await self._answered(api, session, request))
        except UnservedRequest as error:
            return written(Response(400, api.error(str(error))))

    def _session_of(self, path: str, headers: Mapping[str, str]) -> tuple[str, str]:
        """The session that a request names, empty without one, and the path of its API."""
        session = headers.get(SESSION_HEADER, "")
        if (path_parts := _SESSION_PATH.fullmatch(path)) is not None:
            session, path = path_parts[1], path_parts[2]
        return session, path

    async def _answered(self, api: Api, session: str, request: Request) -> Response:
        if session and _SESSION.fullmatch(session) is None:
            raise UnservedRequest(f"session {shown(session)}: give at most 128 letters, digits and _ . : -")
        while not self._is_ending:
            recorded = self._by_session.get(session) if session else self._of_earlier(api, request.content)
            if recorded is not None:
                await self._wake(recorded)
            served_api = api if recorded is None else recorded.endpoint.apis[api.path]
            request_body, conversation = await RequestReader().read(served_api, request.content)
            check_sampling(conversation)
            async with self._changing:
                if recorded is None:
                    recorded = self._by_session.get(session) if session else self._continued(api, request, conversation)
                if recorded is None and len(self._conversations) >= self._most:
                    return Response(503, api.error(f"{self._most} conversations go on, the most that are recorded"))
                recorded = recorded or await self._begin(api, session, conversation)
            await self._wake(recorded)
            if recorded.is_over:  # it ended while the request was read
                continue
            self._use(recorded, len(request.content))
            endpoint = recorded.endpoint
            return await endpoint.answered(
                endpoint.apis[api.path], request_body, conversation, is_retry=is_retry(request)
            )
        return Response(503, api.error(f"the recorder ends: {_ASK_AGAIN} when it is back"))

    def _of_earlier(self, api: Api, content: bytes) -> Recorded | None:
        """The conversation of the earlier response that a request goes on from."""
        if not isinstance(api, Responses) or b'"previous_response_id"' not in content:
            return None
        with suppress(ValueError, RecursionError, AttributeError):  # the reader says what is wrong with the body
            response_match = _RESPONSE.fullmatch(str(json.loads(content).get("previous_response_id")))
            return None if response_match is None else self._conversations.get(int(response_match[1]))
        return None

    def _continued(self, api: Api, request: Request, conversation: Conversation) -> Recorded | None:
        """The conversation that a request repeats or goes on with, of two the newer; those that name a session are
        left out."""
        request_place = transcripts.places(conversation)[-1]
        for recorded in reversed(self._by_place.get(request_place, {})):
            requests = recorded.endpoint.requests
            is_repetition = requests.is_repeated_by(api.path, conversation, is_retry=is_retry(request))
            if recorded.request_place == request_place and (recorded.env is None or is_repetition):
                return recorded
        for prefix_place in transcripts.earlier(conversation, self._by_place):
            for recorded in reversed(self._by_place.get(prefix_place, {})):
                if recorded.answer_place == prefix_place:
                    return recorded
        return None

    def note_written(self, episode_id: int, part: Partial) -> None:
        """Note tokens of an episode that are in the store."""
        recorded = self._conversations.get(episode_id)
        if recorded is not None and recorded.env is not None:
            recorded.env.note_written(part)

    # --- the life of a conversation

    async def _begin(self, api: Api, session: str, conversation: Conversation) -> Recorded:
        task_index, self._number = self._number, self._number + 1
        session_option = {"session": session} if session else {}
        task_options = {"api": api.path, **session_option, **request_facts(conversation)}
        # A number of its own: episodes of one task compete in `agentrl export-episodes --best-of`, and nobody knows
        # whether two conversations had the same task.
        new_task = Task(index=task_index, env=RECORDED, seed=task_index, options=task_options)
        (group_id,) = await self._store.write(
            partial(self._store.store.groups.add_groups, [new_task], size=1, purpose=self._purpose)
        )
        while True:
            (new_claim,) = await self._store.claim(self._name, 1, lease_s=self._lease_s)
            if new_claim.group_id == group_id:
                break
            await self._give_up(new_claim, "a recorded conversation cannot be played by anybody but its client")
        recorded = Recorded(replace(new_claim, start=None), session)
        self._keep(recorded)
        self._move(recorded, transcripts.places(conversation)[-1], None)  # a repetition may come before it is read
        self._start(recorded, new_claim, [])
        return recorded

    async def restore(self) -> None:
        """Take over the conversations of the recorder that had the folder before: they sleep until their clients come
        back."""
        group_counts = await self._store.read(lambda store: store.groups.counts(self._purpose))
        self._number = sum(group_counts.values())
        lease_s = self._lease_s
        # Nobody else plays here, as the folder's lock says: the leases of a dead recorder are over, whatever they say.
        while expired_claims := await self._store.claim(
            self._name, _AT_ONCE, lease_s=lease_s, now=time.time() + 2 * lease_s
        ):
            for claim in expired_claims:
                await self._take_over(claim)

    async def _take_over(self, claim: Claim) -> None:
        if claim.start is None or claim.fork_turn is not None:
            await self._give_up(claim, "the recorder ended before its first request was written")
            return
        session = str(claim.task.options.get("session", ""))
        recorded = Recorded(replace(claim, start=None, turns=(), partial=None), session)
        recorded.used_s = trio.current_time()
        past_exchanges = self._exchanges(claim)
        last_request, last_reply = past_exchanges[-1]
        self._keep(recorded)
        self._move(
            recorded,
            transcripts.places(last_request)[-1],
            None if last_reply is None else transcripts.answered(last_request, last_reply),
        )
        last_step = claim.turns[-1].step if claim.turns else None
        if last_step is not None and (last_step.terminated or last_step.truncated):  # only its end is not written
            await self._wake(recorded)

    async def _give_up(self, claim: Claim, why: str) -> None:
        """End an episode that nobody goes on with; it is never scored."""
        await self._store.finish(claim.episode_id, claim.fence, Ending(stop_reason=StopReason.EXPIRED, detail=why))

    async def _wake(self, recorded: Recorded) -> None:
        """Have a conversation's episode played, unless it is."""
        async with self._changing:
            if recorded.scope.cancel_called:
                await recorded.has_ended.wait()
            if recorded.is_over or recorded.env is not None:
                return
            claim = await self._store.reload(recorded.claim)
            self._start(recorded, claim, self._exchanges(claim))

    def _exchanges(self, claim: Claim) -> Exchanges:
        return exchanges(claim, self._form)

    def _start(self, recorded: Recorded, claim: Claim, past: Exchanges) -> None:
        recorded.endpoint = endpoint = ModelEndpoint(served=apis(KEYS))
        for conversation, reply in past:
            if reply is not None:
                for api in endpoint.apis.values():
                    api.remember(conversation, reply)
        recorded.scope, recorded.has_ended = trio.CancelScope(), trio.Event()
        recorded.env = environment = RecordedConversation(
            claim,
            endpoint,
            idle_s=self._idle_s,
            moved=partial(self._move, recorded),
            restored=past,
            repeats=self._repeats,
        )
        self._nursery.start_soon(self._play, recorded, environment, claim)

    def _use(self, recorded: Recorded, content_bytes: int) -> None:
        """Note a request of a conversation, and have others sleep if too much is in memory."""
        recorded.used_s, recorded.content_bytes = trio.current_time(), content_bytes
        self._in_use.pop(recorded, None)
        self._in_use[recorded] = None
        awake_count, awake_bytes = len(self._in_use), sum(awake_one.content_bytes for awake_one in self._in_use)
        for unused_one in list(self._in_use):
            if awake_count <= self._awake and awake_bytes <= _AWAKE_BYTES:
                break
            # The longest unused first. One whose client waits stays awake.
            if (
                unused_one is not recorded
                and unused_one.env is not None
                and unused_one.env.is_idle
                and unused_one.answer_place is not None
            ):
                unused_one.scope.cancel()
                awake_count, awake_bytes = awake_count - 1, awake_bytes - unused_one.content_bytes

    async def _play(self, recorded: Recorded, env: RecordedConversation, claim: Claim) -> None:
        refusal: tuple[int, str] = (503, f"the conversation is over: {_ASK_AGAIN}")
        falls_asleep = False
        try:
            with recorded.scope:
                ending_cause = await play(claim, self._contexts(env))
                own_limits = (StopReason.CONTEXT_LIMIT, StopReason.POLICY_FAULT)
                # Refused for what it asks: to ask again would not help, and clients do not after a 400.
                if ending_cause.stop_reason in own_limits or isinstance(ending_cause.error, EngineRefusal):
                    refusal = (400, f"{ending_cause.stop_reason.value}: {ending_cause.detail}")
                elif ending_cause.detail:
                    refusal = (503, f"{ending_cause.detail}; {_ASK_AGAIN}")
            falls_asleep = recorded.scope.cancelled_caught
        except HandedBack:
            refusal = (503, f"the recorder ends: {_ASK_AGAIN} when it is back")
        finally:
            recorded.env = None
            self._in_use.pop(recorded, None)
            if not falls_asleep:
                recorded.is_over = True
                self._forget(recorded)
            recorded.endpoint.refusal = refusal
            recorded.endpoint.requests.close()
            recorded.has_ended.set()

    def _keep(self, recorded: Recorded) -> None:
        self._conversations[recorded.claim.episode_id] = recorded
        if recorded.session:
            self._by_session[recorded.session] = recorded

    def _forget(self, recorded: Recorded) -> None:
        self._conversations.pop(recorded.claim.episode_id, None)
        if self._by_session.get(recorded.session) is recorded:
            del self._by_session[recorded.session]
        self._unplace(recorded)

    def _move(self, recorded: Recorded, request_place: bytes, answer_place: bytes | None) -> None:
        """Note where a conversation stands."""
        self._unplace(recorded)
        recorded.request_place, recorded.answer_place = request_place, answer_place
        if not recorded.session:
            for current_place in (request_place, *([] if answer_place is None else [answer_place])):
                self._by_place.setdefault(current_place, {})[recorded] = None

    def _unplace(self, recorded: Recorded) -> None:
        for former_place in (recorded.request_place, recorded.answer_place or b""):
            if (recorded_there := self._by_place.get(former_place)) is not None:
                recorded_there.pop(recorded, None)
                if not recorded_there:
                    del self._by_place[former_place]

    # --- ends

    async def keep_leases(self) -> None:
        """Renew the leases of all conversations, for ever."""
        lease_s = self._lease_s
        while True:
            await trio.sleep(lease_s / 3)
            await self._store.renew(self._name, lease_s=lease_s)

    async def end_sleepers(self) -> None:
        """End the conversations that sleep for longer than `idle_s`, for ever; those awake end by themselves."""
        while True:
            await trio.sleep(min(_SWEEP_S, self._idle_s))
            idle_since_s = trio.current_time() - self._idle_s
            for recorded in list(self._conversations.values()):
                if recorded.env is None and recorded.used_s < idle_since_s:
                    await self._end(recorded, {})

    async def end_session(self, session: str, verdict: Info) -> None:
        """End the conversation of a session, if there is one; its last step has the keys of `verdict`. Returns when it
        has ended."""
        if (recorded := self._by_session.get(session)) is not None:
            await self._end(recorded, verdict)
            await recorded.has_ended.wait()

    async def _end(self, recorded: Recorded, verdict: Info) -> None:
        """End a conversation once nobody waits for an answer. One that sleeps amid a turn is abandoned: nobody would
        read the rest."""
        if recorded.env is None and recorded.answer_place is None and not recorded.is_over:
            await self._give_up(recorded.claim, "its client did not come back for the answer")
            recorded.is_over = True
            self._forget(recorded)
            recorded.has_ended.set()
            return
        await self._wake(recorded)
        if recorded.env is not None:
            recorded.env.finish(verdict)

    async def aclose(self) -> None:
        """End the conversations whose last answer is out; those amid a turn go on when a recorder has this folder
        again."""
        self._is_ending = True
        with trio.move_on_after(_END_S):
            for recorded in list(self._conversations.values()):
                if recorded.answer_place is not None:
                    await self._end(recorded, {})
            self._gate.break_off()
            for recorded in list(self._conversations.values()):
                if recorded.env is not None:
                    await recorded.has_ended.wait()
        await self._store.hand_back(self._name)
