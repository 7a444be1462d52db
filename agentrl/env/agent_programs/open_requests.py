"""The requests of one program that wait for an answer: which one is the policy's turn, and which answers were read.

    open ─► queued ─► next: the policy samples ─► answer ─► leave(delivered=True): read
                 └────────────────┴──────────────────┴────► leave(delivered=False): the client left

A client that leaves before it has its answer may have lost its patience with us, and may ask again: a request for the
same conversation takes the place of the one that was left, and gets its answer, so that one question costs one turn.
Only when the program asks for something else, or ends, is the answer lost: nobody read it. A conversation whose answer
was read is a new request, however often it comes.

Whose fault is a lost answer (law 3)? Ours, if the program waited for nothing else: no answer was read while it waited.
Otherwise only patience decides: a client that leaves sooner than an answer has taken before was not driven away by us.
A program that asks several things at once may give one up because of another's answer, and does so at once; a client
that waits longer, also behind others in our queue, has lost its patience. Before the first answer nothing is the
policy's doing. In a box everything after it may be: the policy's own code can fill our queue, wait as long as it likes
and kill the client, and a bad episode would leave the loss. Never knows sockets, programs or tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import trio

from agentrl.env.agent_programs.model_apis import Conversation, Reply
from agentrl.env.agent_programs.request_checks import note

MOST_QUEUED: Final = 256
"""Requests of one episode that may wait side by side."""

_LEAST_S: Final = 0.5
"""Patience that no answer has to prove: shorter waits of clients with a choice say nothing about us."""


@dataclass(slots=True, eq=False)
class Pending:
    """A request that waits for the policy, or has its reply. Times are the loop's."""

    path: str
    conversation: Conversation
    requested_s: float
    answers_before: int
    """How many answers were read when this request came."""
    clients: int = 0
    """Connections that wait for the reply."""
    reply: Reply | None = None
    is_read: bool = False
    answered: trio.Event = field(default_factory=trio.Event)
    begun: Reply | None = None
    """The reply as far as its clients may read it already."""
    moved: trio.Event = field(default_factory=trio.Event)
    """Set, and made anew, when there is more of the reply."""

    def begin(self, reply: Reply) -> None:
        """Give the clients that read a stream the reply so far."""
        self.begun = reply
        self.moved.set()
        self.moved = trio.Event()

    def answer(self, reply: Reply | None) -> None:
        """Give the reply to the clients that wait; None: there will be none."""
        self.reply = reply
        self.answered.set()
        self.moved.set()

    def repeats(self, path: str, conversation: Conversation) -> bool:
        return self.path == path and self.conversation == conversation


@dataclass(frozen=True, slots=True)
class LostAnswer:
    """An answer that no client waited for. `waited_s` is how long clients waited for it, `looks_slow` says whether that
    may have been too long for them, and `is_ours` whether the policy cannot have ended them instead."""

    conversation: Conversation
    waited_s: float
    answers_before: int
    looks_slow: bool
    is_ours: bool


# Why a retry is known by what it asks, and only until somebody has read the answer.
#
# A client of a model's API gives up after its own deadline and asks again. Most do not say that it is the same
# question: a header that counts retries is a habit of two vendors' clients (`session.py`), and few send a key that
# names the question. So the content has to decide.
#
# The simplest way is to sample for each request. A question then costs two turns. The first one was read by nobody:
# what the program does next cannot depend on it, and yet it would be trained with the reward of the episode. The
# opposite is a cache, which gives one conversation one answer for ever. It breaks programs that ask the same question
# several times on purpose, to choose among samples: they would get one sample many times.
#
# The difference is whether an answer was read. As long as a client waits, the same conversation from another
# client is a question of its own. Once the client has left without the answer, the next request takes its place if it
# has the same conversation, and gets its answer, even one that is sampled already. Once the answer was read, the
# conversation is a new question again. And we may see the new request before we see that the old connection has closed:
# then it is queued as a question of its own, and takes the place when the old client leaves (`_pass_on`).
#
# The price: if a program asks twice side by side and gives one of them up, the other one may get the answer that was
# meant for the first. Nobody would have read that answer, so no sample is lost. And in a box a program that does not
# ask again, though we were slow, is scored: no time that we measure tells it from one that the policy has killed, since
# the policy chooses how long its answers take. Such episodes are counted by a notice, so that a slow engine is seen.
# Most clients ask again, and are not scored for that.
#
# Law 3 rests on this: a turn that nobody read is masked, and a program that ends because we were slow is not scored.
# `tests/env/programs/test_open_requests.py` has each order of events, `test_lost_answers.py` beside it has real
# clients.
class OpenRequests:
    """The requests of one program in the order in which they came. `shares_box` says that the policy's own code may
    send some of them."""

    def __init__(self, *, shares_box: bool) -> None:
        self._shares_box = shares_box
        self._queue: list[Pending] = []
        self._current: Pending | None = None
        self._left: LostAnswer | None = None  # why the current request is lost, unless it is repeated
        self._lost: list[LostAnswer] = []
        self._answers = 0  # that were read
        self._longest_s = _LEAST_S  # the longest wait for an answer that was read
        self._read_s = 0.0  # when an answer was read last
        self._is_unread = False

    # --- the clients' side

    def open(self, path: str, conversation: Conversation, now: float, *, is_retry: bool = False) -> Pending | None:
        """The request that a client waits for from now on: a new one, or one that was left without its answer. None if
        too many wait.

        A client that says it `is_retry` has no answer, even if its old connection still looks alive."""
        if (pending := self._left_by(path, conversation, is_retry=is_retry)) is not None:
            pending.clients += 1
            self._answers -= pending.is_read
            pending.is_read = False
            self._left = None if pending is self._current else self._left
            note("a client left before its answer and repeated its request: it gets the same answer")
            return pending
        if len(self._queue) >= MOST_QUEUED:
            return None
        pending = Pending(path, conversation, now, self._answers, clients=1)
        self._queue.append(pending)
        return pending

    def is_repeated_by(self, path: str, conversation: Conversation, *, is_retry: bool) -> bool:
        """Whether `open` would take a request for the repetition of one that is here already."""
        return self._left_by(path, conversation, is_retry=is_retry) is not None

    def leave(self, pending: Pending, now: float, *, delivered: bool) -> None:
        """A client of `pending` has left: with the answer, if it was `delivered`."""
        pending.clients -= 1
        if delivered:
            pending.is_read = True
            self._answers += 1
            self._longest_s, self._read_s = max(self._longest_s, now - pending.requested_s), now
            # An answer to the same question was read after all, so its loss explains nothing that the program did.
            self._lost = [lost_answer for lost_answer in self._lost if lost_answer.conversation != pending.conversation]
            return
        if pending.clients or pending.is_read:
            return
        lost_answer = self._lost_by(pending, now)
        if pending in self._queue:
            self._queue.remove(pending)
            if not any(queued_request.conversation == pending.conversation for queued_request in self._queue):
                self._lost.append(lost_answer)
        elif pending is self._current:
            self._left = lost_answer
            self._pass_on(pending)

    # --- the policy's side

    def next(self, now: float) -> Pending | None:
        """The request that the policy answers now; None if none waits, or if the answer before it is on its way."""
        if not self._queue or self.is_open:
            return None
        self._settle(now)
        pending = self._current = self._queue.pop(0)
        return pending

    def begin(self, reply: Reply) -> None:
        """Give the request that `next` gave last the answer so far."""
        if self._current is not None and not self._current.answered.is_set():
            self._current.begin(reply)

    def answer(self, reply: Reply) -> None:
        """Answer the request that `next` gave last."""
        assert self._current is not None, "next was called before"
        self._current.answer(reply)

    @property
    def has_next(self) -> bool:
        """Whether a request waits for the policy."""
        return bool(self._queue)

    @property
    def is_open(self) -> bool:
        """Whether a client still waits for the request that `next` gave last."""
        return self._current is not None and self._current.clients > 0

    @property
    def is_lost_by_us(self) -> bool:
        """Whether the clients of the request that `next` gave last have left because we were slow."""
        return self._left is not None and self._left.is_ours

    @property
    def is_unread(self) -> bool:
        """Whether nobody has read the answer before the last `next` or `end`."""
        return self._is_unread

    def end(self, now: float) -> None:
        """The program is over: what it has not read is lost."""
        self._settle(now)

    def close(self) -> None:
        """Let every client go that still waits."""
        open_requests: Sequence[Pending] = [*self._queue, *([self._current] if self._current is not None else [])]
        for open_request in open_requests:
            if not open_request.answered.is_set():
                open_request.answer(None)

    def lost(self, *, failed: bool) -> LostAnswer | None:
        """The answer that may have come too late and have ended the program: the last one that nothing was read after,
        or any if the program `failed`."""
        for lost_answer in reversed(self._lost):
            if lost_answer.looks_slow and (failed or lost_answer.answers_before == self._answers):
                return lost_answer
        return None

    # --- inside

    def _left_by(self, path: str, conversation: Conversation, *, is_retry: bool) -> Pending | None:
        """The request that a client left and repeats now."""
        current_request = [self._current] if self._current is not None else []
        for pending in (*current_request, *self._queue):
            is_left = is_retry or (pending.clients == 0 and not pending.is_read)
            if is_left and pending.repeats(path, conversation):
                return pending
        return None

    def _lost_by(self, pending: Pending, now: float) -> LostAnswer:
        waited_s = now - pending.requested_s
        waits_for_us_alone = pending.answers_before == self._answers
        is_patient, is_reaction = waited_s >= self._longest_s, now - self._read_s < _LEAST_S
        is_first = self._answers == 0
        looks_slow = is_first or waits_for_us_alone or (is_patient and not is_reaction)
        is_ours = looks_slow and (is_first or not self._shares_box)
        return LostAnswer(pending.conversation, waited_s, pending.answers_before, looks_slow, is_ours)

    def _pass_on(self, pending: Pending) -> None:
        """Let a queued request for the same conversation take the place of one that was left: its client sent it again
        before the old connection was seen to close."""
        for queued_request in self._queue:
            if queued_request.repeats(pending.path, pending.conversation):
                self._queue.remove(queued_request)
                queued_request.requested_s = pending.requested_s
                self._current = queued_request
                if pending.reply is not None:
                    queued_request.answer(pending.reply)
                elif pending.begun is not None:
                    queued_request.begin(pending.begun)
                return

    def _settle(self, now: float) -> None:
        """Note whether the current request's answer was read."""
        current_request, self._current = self._current, None
        self._is_unread = current_request is not None and not current_request.is_read
        if current_request is not None and self._is_unread:
            note(
                "a client gave up before its answer and did not ask again: nobody read the turn, and it is not trained"
            )
            self._lost.append(self._left or self._lost_by(current_request, now))
        self._left = None
