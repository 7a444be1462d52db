"""Which answer a client gets, whose turn it is, and whose fault an unread answer is: times and answers by hand."""

from __future__ import annotations

import pytest
from each_case import each_case

from agentrl.env.agent_programs.model_apis import Conversation, Reply
from agentrl.env.agent_programs.open_requests import MOST_QUEUED, OpenRequests

PATH = "/v1/chat/completions"


def conversation(text: str) -> Conversation:
    return Conversation(({"role": "user", "content": text},))


A, B = conversation("a"), conversation("b")


def read_one(requests: OpenRequests, took_s: float) -> float:
    """A conversation of its own is asked, answered after `took_s`, and read. Returns the time then."""
    opened = requests.open(PATH, conversation("first"), 0.0)
    assert opened is not None and requests.next(0.0) is opened
    requests.answer(Reply("0", "x"))
    requests.leave(opened, took_s, delivered=True)
    return took_s


def test_a_conversation_that_is_asked_again_after_its_client_left_is_one_turn() -> None:
    requests = OpenRequests(shares_box=False)
    first = requests.open(PATH, A, 0.0)
    assert first is not None and requests.next(0.0) is first
    assert not requests.is_repeated_by(PATH, A, is_retry=False) and requests.is_repeated_by(PATH, A, is_retry=True)
    requests.leave(first, 1.0, delivered=False)
    assert requests.is_repeated_by(PATH, A, is_retry=False) and not requests.is_repeated_by(PATH, B, is_retry=True)
    assert requests.open(PATH, A, 1.5) is first
    requests.leave(first, 2.0, delivered=False)
    requests.answer(Reply("1", "late"))
    third = requests.open(PATH, A, 3.0)
    assert third is first and first.answered.is_set(), "the answer is there already"
    requests.leave(first, 3.0, delivered=True)
    assert requests.next(4.0) is None
    requests.end(4.0)
    assert not requests.is_unread and requests.lost(failed=True) is None


def test_a_conversation_whose_answer_was_read_or_that_is_asked_side_by_side_is_sampled_again() -> None:
    requests = OpenRequests(shares_box=False)
    first, second = requests.open(PATH, A, 0.0), requests.open(PATH, A, 0.0)
    assert first is not None and second is not None and first is not second
    assert requests.next(0.0) is first
    requests.answer(Reply("1", "x"))
    assert requests.next(0.5) is None, "the first answer is on its way"
    requests.leave(first, 1.0, delivered=True)
    third = requests.open(PATH, A, 1.0)
    assert third is not None and third is not second
    assert requests.next(1.0) is second


def test_a_retry_that_comes_before_the_old_connection_closes_takes_its_place() -> None:
    marked = OpenRequests(shares_box=False)
    first = marked.open(PATH, A, 0.0)
    assert first is not None and marked.next(0.0) is first
    assert marked.open(PATH, A, 1.0, is_retry=True) is first, "the client says that it has no answer"

    unmarked = OpenRequests(shares_box=False)
    old = unmarked.open(PATH, A, 0.0)
    assert old is not None and unmarked.next(0.0) is old
    new = unmarked.open(PATH, A, 1.0)
    assert new is not None and new is not old
    unmarked.leave(old, 1.1, delivered=False)
    unmarked.answer(Reply("1", "x"))
    assert new.answered.is_set() and new.reply is not None and new.reply.text == "x"
    unmarked.leave(new, 1.2, delivered=True)
    assert unmarked.next(2.0) is None, "nothing else is asked"


def test_a_request_that_was_left_in_the_queue_is_no_turn() -> None:
    requests = OpenRequests(shares_box=False)
    first, other = requests.open(PATH, A, 0.0), requests.open(PATH, B, 0.0)
    assert first is not None and other is not None and requests.next(0.0) is first
    requests.leave(other, 1.0, delivered=False)
    requests.answer(Reply("1", "x"))
    requests.leave(first, 2.0, delivered=True)
    assert requests.next(2.0) is None


def test_requests_side_by_side_are_bounded() -> None:
    requests = OpenRequests(shares_box=False)
    opened = [requests.open(PATH, conversation(str(at)), 0.0) for at in range(MOST_QUEUED + 1)]
    assert None not in opened[:-1] and opened[-1] is None


@each_case(
    ("shares_box", "took_s", "waited_s", "ours"),
    [
        (False, 2.0, 0.01, True),  # nothing else was waited for: we were too slow for it
        (True, 2.0, 1.0, False),  # in a box it may have been killed by the policy
        (True, 2.0, 1e6, False),  # which can wait for an answer that takes longer than all before
        (True, None, 0.01, True),  # before any answer nothing is the policy's doing
    ],
)
def test_law_3_a_client_that_left_was_driven_away_by_us_or_not(
    shares_box: bool, took_s: float | None, waited_s: float, ours: bool
) -> None:
    requests = OpenRequests(shares_box=shares_box)
    now = 0.0 if took_s is None else read_one(requests, took_s)
    left = requests.open(PATH, A, now)
    assert left is not None and requests.next(now) is left
    requests.leave(left, now + waited_s, delivered=False)
    requests.answer(Reply("1", "x"))
    requests.end(now + waited_s + 1)
    assert requests.is_unread
    for failed in (True, False):
        lost = requests.lost(failed=failed)
        assert lost is not None and lost.waited_s == pytest.approx(waited_s), "it is at least counted"
        assert lost.is_ours == ours


@each_case(
    ("left_s", "ours"),
    [
        (2.1, False),  # at once after the first answer, which was wrong: the program failed of it
        (9.0, True),  # long after: its client has a deadline
    ],
)
@each_case("has_begun", [True, False])
def test_law_3_of_two_requests_at_once_one_is_given_up_for_the_others_answer_or_for_our_queue(
    left_s: float, ours: bool, has_begun: bool
) -> None:
    requests = OpenRequests(shares_box=False)
    first, other = requests.open(PATH, A, 0.0), requests.open(PATH, B, 0.0)
    third = requests.open(PATH, conversation("c"), 0.0)
    assert first is not None and other is not None and third is not None and requests.next(0.0) is first
    requests.answer(Reply("1", "x"))
    requests.leave(first, 2.0, delivered=True)
    assert requests.next(2.0) is other
    requests.leave(other if has_begun else third, left_s, delivered=False)
    if not has_begun:
        requests.answer(Reply("2", "y"))
        requests.leave(other, left_s + 1, delivered=True)
    requests.end(left_s + 1)
    assert (requests.lost(failed=True) is not None) == ours


def test_an_answer_that_was_lost_and_asked_for_later_explains_nothing() -> None:
    requests = OpenRequests(shares_box=False)
    left, other = requests.open(PATH, A, 0.0), requests.open(PATH, B, 0.0)
    assert left is not None and other is not None and requests.next(0.0) is left
    requests.leave(left, 1.0, delivered=False)
    requests.answer(Reply("1", "x"))
    assert requests.next(1.0) is other and requests.is_unread
    requests.answer(Reply("2", "y"))
    requests.leave(other, 2.0, delivered=True)
    assert requests.lost(failed=True) is not None and requests.lost(failed=False) is None
    again = requests.open(PATH, A, 3.0)
    assert again is not None and again is not left and requests.next(3.0) is again and not requests.is_unread
    requests.answer(Reply("3", "z"))
    requests.leave(again, 4.0, delivered=True)
    requests.end(4.0)
    assert requests.lost(failed=True) is None
