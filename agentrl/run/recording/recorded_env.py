"""One recorded conversation as an environment: a request is an observation, an action is the answer to it.

What an episode does for an environment, it so does for any client: limits, the journal turn by turn, tokens that are
written while they come. A conversation whose recorder was killed goes on from the journal, which has all that is needed
to know its next request. Never knows other conversations, the engine or the store.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import trio

from agentrl.env.agent_programs import transcripts
from agentrl.env.agent_programs.branches import Branches
from agentrl.env.agent_programs.model_apis import Conversation, Reply, reply_of
from agentrl.env.agent_programs.model_endpoint import ModelEndpoint
from agentrl.env.agent_programs.open_requests import Pending
from agentrl.env.core import Env, Info, ResetResult, StepResult
from agentrl.env.tools.parsers import ToolFormat, format_of
from agentrl.errors import EnvError
from agentrl.host.clocks import host_time
from agentrl.records import Json, Message, Messages, StopReason, Task, context_ids
from agentrl.run.recording.answer_stream import AnswerStream
from agentrl.store import Claim, Partial

_REQUEST: Final = "request"
"""Key of a task's options and of a step's info: what a request asks for beside its messages."""


Exchanges = list[tuple[Conversation, Reply | None]]
"""Requests and their answers, in order."""


def request_facts(conversation: Conversation, *, with_tools: bool = False) -> dict[str, Json]:
    """All that a request names beside its messages, to be journaled with them; empty if that is nothing."""
    named_facts: dict[str, Json] = {}
    if conversation.sampling:
        named_facts["sampling"] = dict(conversation.sampling)
    if conversation.stops:
        named_facts["stops"] = list(conversation.stops)
    if with_tools:
        named_facts["tools"] = [dict(tool_schema) for tool_schema in conversation.tools]
    return {_REQUEST: named_facts} if named_facts else {}


def exchanges(claim: Claim, form: ToolFormat) -> Exchanges:
    """The requests of a journaled conversation and their answers, in order; the last one may have none yet."""
    messages, tool_schemas, all_exchanges = claim.start or (), claim.tools.schemas, Exchanges()
    named_facts: Mapping[str, Any] = claim.task.options.get(_REQUEST, {})
    for journaled_turn in claim.turns:
        conversation = Conversation(messages, tuple(tool_schemas), tuple(named_facts.get("stops", ())))
        token_counts = (len(context_ids(claim.turns, journaled_turn.index)), len(journaled_turn.token_ids))
        turn_reply = _reply(
            form,
            journaled_turn.text,
            conversation,
            journaled_turn.index,
            claim.episode_id,
            journaled_turn.finish == "length",
            token_counts,
        )
        all_exchanges.append((conversation, turn_reply))
        if journaled_turn.step is None:
            return all_exchanges
        named_facts = journaled_turn.step.info.get(_REQUEST, {})
        if journaled_turn.step.history is None:
            messages = (*messages, turn_reply.message, *journaled_turn.step.observation)
        else:
            messages, tool_schemas = journaled_turn.step.history, named_facts.get("tools", tool_schemas)
    all_exchanges.append((Conversation(messages, tuple(tool_schemas), tuple(named_facts.get("stops", ()))), None))
    return all_exchanges


class RecordedConversation(Env):
    """The conversation of the client that asks at `endpoint`, journaled as `claim`. It ends after `idle_s` seconds
    without a request, or by `finish`. `moved` gets the places behind each request, and behind its answer once there is
    one.

    A conversation that is `restored` goes on behind the turns of its journal. Its client repeats the last request, or
    goes on from the answer; one that `repeats` begins at the first, as a program does that was started anew, and gets
    the journal's answers as long as it asks the same."""

    replayable = True
    policy_writes_prompts = True

    def __init__(
        self,
        claim: Claim,
        endpoint: ModelEndpoint,
        *,
        idle_s: float,
        moved: Callable[[bytes, bytes | None], None],
        restored: Sequence[tuple[Conversation, Reply | None]] = (),
        repeats: bool = False,
    ) -> None:
        self._claim, self._endpoint, self._idle_s, self._moved = claim, endpoint, idle_s, moved
        self._restored = restored
        self._repeated = restored if repeats else restored[-1:]
        self._past = (
            [journaled_turn.step for journaled_turn in claim.turns if journaled_turn.step is not None]
            if restored
            else []
        )
        past_exchanges = restored[: len(self._past)]
        self._branches = Branches.of((request, reply) for request, reply in past_exchanges if reply is not None)
        self._turn = 0  # the index of the next action
        self._conversation = restored[-1][0] if restored else Conversation(())
        self._request_place = _place(self._conversation)
        self._current: Pending | None = None  # it waits for the next action
        self._ahead: Pending | None = None  # it came after the next action, which the client has read before
        self._has_client = not restored  # whether `_find_current` has nothing more to wait for
        self._is_finishing = False
        self._verdict: Info = {}
        self._tokens = (0, 0)
        self.stream: AnswerStream | None = None
        """Finds the text that may be read before an answer is whole; without one none is."""

    # --- the recorder's side

    @property
    def is_idle(self) -> bool:
        """Whether no client waits, and nothing is sampled: it waits for the next request."""
        return self._current is None and not self._endpoint.requests.has_next and not self._endpoint.requests.is_open

    def finish(self, verdict: Info) -> None:
        """End the conversation once nobody waits for an answer; its last step has the keys of `verdict`."""
        self._verdict, self._is_finishing = verdict, True
        self._endpoint.announce()

    async def waiting(self) -> Conversation | None:
        """The conversation that the next action answers; None if its client has gone on."""
        await self._find_current()
        return None if self._current is None else self._current.conversation

    def note_prompt(self, tokens: int) -> None:
        """Note how many tokens the turn to come has before it."""
        self._tokens = (tokens, 0)

    def note_written(self, part: Partial) -> None:
        """Note tokens of the turn under way that are in the store; its client may read them."""
        if self.stream is None:
            return
        self.stream.add(part)
        pending = self._current
        if pending is not None and (text := self.stream.text(pending.conversation, self._turn)):
            begun = Reply(_reply_id(self._turn), text, prefix=_prefix(self._claim.episode_id), tokens=self._tokens)
            self._endpoint.requests.begin(begun)

    def made_for(self, task: Task) -> RecordedConversation:
        """The environment of the conversation's task: this one."""
        return self

    # --- the contract

    def tool_schemas(self) -> list[Mapping[str, Json]]:
        return [dict(tool_schema) for tool_schema in self._conversation.tools]

    def charge_tokens(self, count: int) -> None:
        self._tokens = (self._tokens[0], count)

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Json] | None = None) -> ResetResult:
        await super().areset(seed=seed)
        if self._restored:
            return self._claim.start or (), {}
        first_request = await self._next()
        if first_request is None:
            raise EnvError("no client asked for anything")
        self._take(first_request)
        return _copied(first_request.conversation.messages), {}

    async def astep(self, action: str) -> StepResult:
        turn_index, self._turn = self._turn, self._turn + 1
        if turn_index < len(self._past):
            past_step = self._past[turn_index]
            past_info: Info = {} if past_step.history is None else {"history": list(past_step.history)}
            if past_step.continues is not None:
                past_info["continues"] = past_step.continues
            return past_step.observation, 0.0, False, False, past_info
        await self._find_current()
        pending, self._current = self._current, None
        is_lost = pending is None
        conversation = self._conversation if pending is None else pending.conversation
        tool_format, episode_id = format_of(self), self._claim.episode_id
        reply = _reply(tool_format, action, conversation, turn_index, episode_id, self.action_cut, self._tokens)
        if pending is not None:
            self._endpoint.requests.answer(reply)
        self._branches.add(conversation, reply)
        self._moved(self._request_place, transcripts.answered(conversation, reply))
        pending = self._ahead or await self._next()
        self._ahead = None
        # Sampled to its end for a client that has gone elsewhere: nobody has read it.
        is_unread = self._endpoint.requests.is_unread or (is_lost and self._restored[-1][1] is None)
        info: Info = {"masked": True} if is_unread else {}
        if pending is None:
            return (), 0.0, True, False, {"stop_reason": StopReason.DONE.value, **info, **self._verdict}
        previous, current = self._conversation, pending.conversation
        self._take(pending)
        with_tools = current.tools != previous.tools
        info |= request_facts(current, with_tools=with_tools)
        observation, branch_info = self._branches.following(current)
        return observation, 0.0, False, False, {**info, **branch_info}

    # --- inside

    def _take(self, pending: Pending) -> None:
        self._current, self._conversation = pending, pending.conversation
        self._request_place = _place(pending.conversation)
        self._moved(self._request_place, None)

    async def _find_current(self) -> None:
        """In a restored conversation, wait for its client: it repeats the last request, or it goes on from the answer
        to that one, or elsewhere."""
        requests = self._endpoint.requests
        while not self._has_client:
            (conversation, next_reply), *later_exchanges = self._repeated
            pending = await self._next()
            is_repetition = pending is not None and _place(pending.conversation) == _place(conversation)
            if is_repetition and later_exchanges and next_reply is not None:
                # Answered from the journal, and not played again: the episode's turns are there already.
                requests.answer(next_reply)
                self._repeated = later_exchanges
                continue
            self._current, self._ahead = (pending, None) if is_repetition else (None, pending)
            self._has_client = True

    async def _next(self) -> Pending | None:
        """The next request; None if none came in time, or the conversation is to end."""
        requests = self._endpoint.requests
        # The client's time, which nobody pays for: it may be a person who thinks.
        with trio.move_on_after(self._idle_s), host_time("a client's request", deadline_s=math.inf):
            while not self._is_finishing or requests.is_open or requests.has_next:
                if (pending := requests.next(trio.current_time())) is not None:
                    return pending
                await self._endpoint.news()
        requests.end(trio.current_time())
        return None


def _reply(
    form: ToolFormat,
    action: str,
    conversation: Conversation,
    index: int,
    episode_id: int,
    is_cut: bool,
    tokens: tuple[int, int],
) -> Reply:
    reply = reply_of(form, action, conversation, id=_reply_id(index), is_cut=is_cut)
    return replace(reply, prefix=_prefix(episode_id), tokens=tokens)


def _reply_id(index: int) -> str:
    return f"{index + 1:04d}"


def _prefix(episode_id: int) -> str:
    return f"{episode_id}-"


def _place(conversation: Conversation) -> bytes:
    return transcripts.places(conversation)[-1]


def _copied(messages: Sequence[Message]) -> Messages:
    return tuple(cast(Message, json.loads(json.dumps(message))) for message in messages)
