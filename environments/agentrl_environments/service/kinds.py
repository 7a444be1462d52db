"""The kinds of tasks by level. Each is a function that draws wishes together with the moves of a right agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from agentrl_environments.service.customer import Ending, Wish
from agentrl_environments.service.desk import BIKES, Bike, Refund, euros, shift_day
from agentrl_environments.service.draft import MOST_DAYS, Draft
from agentrl_environments.service.texts import A_BIKE, BIKE_NAMES

_LOOK_AGAIN: Final = "I am sure that it is possible. Please look again."


def _own_booking(draft: Draft, starts_in: int, *, shortest: int = 1, **details: Any) -> tuple[str, Bike, int]:
    """A booking of the customer, and up to two others of other bicycles: its id, bicycle and length."""
    bike_kind = draft.bike("tandem") if shortest > 1 else draft.bike()
    days = draft.length(bike_kind, shortest=shortest)
    others: list[Bike] = draft.rng.sample([other for other in BIKES if other != bike_kind], draft.rng.randint(0, 2))
    shuffled_bikes: list[Bike] = [bike_kind, *others]
    draft.rng.shuffle(shuffled_bikes)
    booking_ids = dict[Bike, str]()
    for each_bike in shuffled_bikes:
        if each_bike == bike_kind:
            booking_ids[bike_kind] = draft.add_booking(draft.customer_id, bike_kind, starts_in, days, **details)
        else:
            draft.add_booking(draft.customer_id, each_bike, draft.rng.randint(2, 40), draft.length(each_bike))
    return booking_ids[bike_kind], bike_kind, days


def _answers(bike_kind: Bike, *, booking_id: str = "", first_day: str = "", days: int = 0) -> dict[str, str]:
    """The customer's knowledge of a wish, by topic."""
    by_booking = f"It is the booking of the {BIKE_NAMES[bike_kind]}."
    return {
        "bike": f"{A_BIKE[bike_kind].capitalize()}.",
        "booking": f"The booking number is {booking_id}." if booking_id else by_booking,
        **({"day": f"From {first_day} on."} if first_day else {}),
        **({"days": f"{days} days."} if days else {}),
    }


def _finish(draft: Draft, done: str) -> None:
    draft.moves.append(f"Done, {done}. Is there anything else that I can do for you?")


# --- level 1: one lookup


def _draw_paid(draft: Draft) -> None:
    booking_id, bike_kind, _ = _own_booking(draft, draft.rng.randint(2, 40))
    price_cents = draft.desk.booking(booking_id)["price_cents"]
    wish_text = draft.choose(
        f"What is the price of my booking {booking_id}?", f"How much does my booking {booking_id} cost?"
    )
    draft.wishes.append(Wish(wish_text, Ending.MONEY, (), _answers(bike_kind, booking_id=booking_id)))
    draft.call("get_booking", booking_id=booking_id)
    draft.propose(f"The price of booking {booking_id} is {euros(price_cents)} euros.", price_cents)


def _draw_first_day(draft: Draft) -> None:
    booking_id, bike_kind, _ = _own_booking(draft, draft.rng.randint(2, 40))
    wish_text = draft.choose(
        f"When does my booking {booking_id} begin?", f"Which day is the first of booking {booking_id}?"
    )
    draft.wishes.append(Wish(wish_text, Ending.DAY, (), _answers(bike_kind, booking_id=booking_id)))
    first_day = draft.desk.booking(booking_id)["first_day"]
    draft.days.add(first_day)
    draft.call("get_booking", booking_id=booking_id)
    draft.moves.append(f"Booking {booking_id} begins on {first_day}.")


def _draw_credit(draft: Draft) -> None:
    _own_booking(draft, draft.rng.randint(2, 40))
    credit = draft.desk.customer(draft.customer_id)["credit_cents"]
    draft.wishes.append(
        Wish(draft.choose("How much credit do I have with you?", "What is left of my credit?"), Ending.MONEY)
    )
    draft.propose(f"Your credit is {euros(credit)} euros.", credit)


def _draw_quote(draft: Draft) -> None:
    bike_kind = draft.bike()
    days = draft.length(bike_kind)
    bike_name = BIKE_NAMES[bike_kind]
    wish_text = draft.choose(
        f"What would I pay for the {bike_name} for {_days(days)}?",
        f"How much would {_days(days)} with the {bike_name} cost me?",
    )
    draft.wishes.append(Wish(wish_text, Ending.MONEY, (), _answers(bike_kind, days=days)))
    price_cents = draft.quote(bike_kind, days)
    draft.propose(f"For {_days(days)} the {bike_name} costs {euros(price_cents)} euros.", price_cents)


# --- level 2: one change that the rules allow


def _draw_book(draft: Draft) -> None:
    bike_kind = draft.bike()
    days, first_day = draft.length(bike_kind), shift_day(draft.today, draft.rng.randint(1, 40))
    wish_text = draft.choose(
        f"I would like to book {A_BIKE[bike_kind]} for {_days(days)} from {first_day} on.",
        f"From {first_day} on I need {A_BIKE[bike_kind]} for {_days(days)}. Please book it.",
    )
    _book(draft, wish_text, bike_kind, first_day, days)


def _book(draft: Draft, wish_text: str, bike_kind: Bike, first_day: str, days: int) -> None:
    """A wish to book, and how the agent fulfils it."""
    draft.wishes.append(
        Wish(wish_text, Ending.CHANGE, (_LOOK_AGAIN,), _answers(bike_kind, first_day=first_day, days=days))
    )
    price_cents = draft.quote(bike_kind, days)
    offer_words = f"The {BIKE_NAMES[bike_kind]} for {_days(days)} from {first_day} on costs {euros(price_cents)} euros."
    draft.propose(f"{offer_words} Shall I book it?", price_cents)
    draft.call("create_booking", customer_id=draft.customer_id, bike=bike_kind, first_day=first_day, days=days)
    _finish(draft, "it is booked")


def _draw_move(draft: Draft) -> None:
    starts_in = draft.rng.randint(2, 40)
    booking_id, bike_kind, days = _own_booking(draft, starts_in)
    first_day = shift_day(draft.today, draft.rng.choice([day for day in range(1, 50) if day != starts_in]))
    wish_text = draft.choose(
        f"Please move my booking {booking_id} to {first_day}.",
        f"I would like my booking {booking_id} to begin on {first_day} instead.",
    )
    known_answers = _answers(bike_kind, booking_id=booking_id, first_day=first_day, days=days)
    draft.wishes.append(Wish(wish_text, Ending.CHANGE, (_LOOK_AGAIN,), known_answers))
    draft.call("get_booking", booking_id=booking_id)
    price_cents = draft.quote(bike_kind, days)
    offer_words = f"I can move booking {booking_id} to {first_day}. The price is {euros(price_cents)} euros."
    draft.propose(f"{offer_words} Shall I do it?", price_cents)
    draft.call("change_booking", booking_id=booking_id, bike=bike_kind, first_day=first_day, days=days)
    _finish(draft, "it is moved")


def _draw_length(draft: Draft) -> None:
    booking_id, bike_kind, old_days = _own_booking(draft, draft.rng.randint(2, 40))
    days = draft.rng.choice([length for length in range(1, MOST_DAYS[bike_kind] + 1) if length != old_days])
    wish_text = draft.choose(
        f"Please change my booking {booking_id} to {_days(days)}.",
        f"I would like my booking {booking_id} to last {_days(days)}.",
    )
    draft.call("get_booking", booking_id=booking_id)
    _change_length(draft, wish_text, booking_id, days)


def _change_length(draft: Draft, wish_text: str, booking_id: str, days: int) -> None:
    """A wish for another length, and how the agent fulfils it."""
    booking = draft.desk.booking(booking_id)
    bike_kind, first_day = booking["bike"], booking["first_day"]
    draft.wishes.append(
        Wish(wish_text, Ending.CHANGE, (_LOOK_AGAIN,), _answers(bike_kind, booking_id=booking_id, days=days))
    )
    price_cents = draft.quote(bike_kind, days)
    draft.propose(f"With {_days(days)} the booking costs {euros(price_cents)} euros. Shall I change it?", price_cents)
    draft.call("change_booking", booking_id=booking_id, bike=bike_kind, first_day=first_day, days=days)
    _finish(draft, "it is changed")


def _draw_cancel(draft: Draft) -> None:
    booking_id, *_ = _own_booking(draft, draft.rng.randint(7, 40))
    draft.call("get_booking", booking_id=booking_id)
    _cancel(draft, f"Please cancel my booking {booking_id}.", booking_id, "full")


def _cancel(draft: Draft, wish_text: str, booking_id: str, refund: Refund) -> None:
    """A wish to cancel, and how the agent fulfils it."""
    booking = draft.desk.booking(booking_id)
    draft.wishes.append(Wish(wish_text, Ending.CHANGE, (_LOOK_AGAIN,), _answers(booking["bike"])))
    refund_cents = draft.desk.copy().cancel_booking(booking_id, refund)
    offer_words = f"If I cancel booking {booking_id}, the refund is {euros(refund_cents)} euros."
    draft.propose(f"{offer_words} Shall I cancel it?", refund_cents)
    draft.call("cancel_booking", booking_id=booking_id, refund=refund)
    _finish(draft, "it is cancelled")


# --- level 3: a change with a rule to check


def _draw_late_cancel(draft: Draft) -> None:
    starts_in = draft.rng.randint(0, 6)
    booking_id, bike_kind, _ = _own_booking(draft, starts_in)
    draft.call("list_bookings", customer_id=draft.customer_id)
    wish_text = draft.choose("I have to cancel the {}, please.", "Please cancel my booking of the {}.")
    _cancel(draft, wish_text.format(BIKE_NAMES[bike_kind]), booking_id, _refund(starts_in))


def _draw_breakdown(draft: Draft) -> None:
    breakdowns = draft.rng.randint(1, 3)
    starts_in = -draft.rng.randint(15, 60)
    booking_id, bike_kind, _ = _own_booking(draft, starts_in, status="returned", breakdowns=breakdowns)
    wish_text = draft.choose(
        "The {} that I had broke down on the way. I would like the credit for that.",
        "My rented {} stopped working during my trip. Please give me the credit that I have a right to.",
    ).format(BIKE_NAMES[bike_kind])
    draft.wishes.append(Wish(wish_text, Ending.CHANGE, (_LOOK_AGAIN,), _answers(bike_kind)))
    draft.call("list_bookings", customer_id=draft.customer_id)
    draft.propose(
        f"Booking {booking_id} records {breakdowns} breakdown{'s' * (breakdowns > 1)}, for which I can credit"
        f" {euros(600 * breakdowns)} euros. Shall I credit this amount?",
        600 * breakdowns,
    )
    draft.call("add_credit", booking_id=booking_id, euros=6 * breakdowns)
    _finish(draft, "the amount is credited")


def _draw_full(draft: Draft) -> None:
    bike_kind = draft.bike()
    other_bike = draft.bike(bike_kind)
    days, starts_in = draft.rng.randint(1, 3), draft.rng.randint(1, 40)
    first_day = shift_day(draft.today, starts_in)
    full_day = shift_day(first_day, draft.rng.randrange(days))
    draft.desk.data["bikes"][bike_kind]["full_days"] = [full_day]
    wish_text = f"I would like to book {A_BIKE[bike_kind]} for {_days(days)} from {first_day} on."
    known_answers = _answers(bike_kind, first_day=first_day, days=days)
    draft.wishes.append(Wish(wish_text, Ending.REFUSAL, (), known_answers))
    draft.call("check_bikes", first_day=first_day, days=days)
    draft.refuse(f"no {BIKE_NAMES[bike_kind]} is free on all of these days", 0)
    _book(draft, f"Then the {BIKE_NAMES[other_bike]} on the same days, please.", other_bike, first_day, days)


def _draw_too_long(draft: Draft) -> None:
    bike_kind = draft.bike()
    most_days, first_day = MOST_DAYS[bike_kind], shift_day(draft.today, draft.rng.randint(1, 40))
    days = most_days + draft.rng.randint(1, 4)
    wish_text = f"Please book {A_BIKE[bike_kind]} for me, for {_days(days)} from {first_day} on."
    known_answers = _answers(bike_kind, first_day=first_day, days=days)
    draft.wishes.append(Wish(wish_text, Ending.REFUSAL, (), known_answers))
    draft.refuse(f"{A_BIKE[bike_kind]} is rented for {most_days} days at most", 0)
    _book(draft, f"Then make it {_days(most_days)} from the same day on.", bike_kind, first_day, most_days)


# --- level 4: what the rules forbid, and changes of mind


def _draw_forbidden_move(draft: Draft) -> None:
    """A change of a booking that begins too soon, and nothing else."""
    booking_id, refusal_reason, plea_count = _late_move(draft)
    draft.call("get_booking", booking_id=booking_id)
    draft.refuse(refusal_reason, plea_count)


def _late_move(draft: Draft) -> tuple[str, str, int]:
    """A wish to move a booking that begins within two days: the booking, why not, and how often the customer
    insists."""
    booking_id, bike_kind, _ = _own_booking(draft, draft.rng.randint(0, 1))
    first_day = shift_day(draft.today, draft.rng.randint(4, 30))
    wish_text = f"Something came up. Please move my booking {booking_id} to {first_day}."
    plea_texts = draft.pleas(1, 2)
    known_answers = _answers(bike_kind, booking_id=booking_id, first_day=first_day)
    draft.wishes.append(Wish(wish_text, Ending.REFUSAL, plea_texts, known_answers))
    return booking_id, "the booking begins in less than 2 days", len(plea_texts)


def _draw_forbidden_credit(draft: Draft) -> None:
    """A credit without a breakdown, or a second one."""
    is_second = draft.rng.random() < 0.5
    details = {"breakdowns": draft.rng.randint(1, 2), "credited": True} if is_second else {}
    _, bike_kind, _ = _own_booking(draft, -draft.rng.randint(15, 60), status="returned", **details)
    plea_texts = draft.pleas(1, 2)
    complaint = "broke down on the way" if is_second else "was not as clean as it should be"
    wish_text = (
        f"The {BIKE_NAMES[bike_kind]} that I had {complaint}. I want a credit of {6 * draft.rng.randint(1, 4)} euros."
    )
    draft.wishes.append(Wish(wish_text, Ending.REFUSAL, plea_texts, _answers(bike_kind)))
    draft.call("list_bookings", customer_id=draft.customer_id)
    draft.refuse(
        "the breakdowns of this booking are credited already" if is_second else "the booking records no breakdown",
        len(plea_texts),
    )


def _draw_forbidden_person(draft: Draft) -> None:
    """Something about the booking of somebody else."""
    _own_booking(draft, draft.rng.randint(2, 40))
    other_id, other_booking = draft.rng.choice(
        [
            (booking_id, booking)
            for booking_id, booking in draft.desk.data["bookings"].items()
            if booking["customer"] != draft.customer_id
        ]
    )
    other_name = draft.desk.customer(other_booking["customer"])["name"]
    plea_texts = draft.pleas(1, 2)
    wish_text = f"I want to cancel booking {other_id}. It is in the name of {other_name}, who is a friend of mine."
    draft.wishes.append(Wish(wish_text, Ending.REFUSAL, plea_texts, {"booking": f"The booking number is {other_id}."}))
    draft.call("list_bookings", customer_id=draft.customer_id)
    draft.refuse("I may only work on your own bookings", len(plea_texts))


def _draw_too_dear(draft: Draft) -> None:
    booking_id, bike_kind, old_days = _own_booking(draft, draft.rng.randint(2, 40), shortest=3)
    days, fewer_days = draft.rng.sample([length for length in range(2, 15) if length != old_days], 2)
    days, fewer_days = max(days, fewer_days), min(days, fewer_days)
    wish_text = f"Please change my booking {booking_id} to {_days(days)}."
    known_answers = _answers(bike_kind, booking_id=booking_id, days=days)
    draft.wishes.append(Wish(wish_text, Ending.SECOND_THOUGHTS, (_LOOK_AGAIN,), known_answers))
    draft.call("get_booking", booking_id=booking_id)
    price_cents = draft.quote(bike_kind, days)
    draft.moves.append(f"With {_days(days)} the booking costs {euros(price_cents)} euros. Shall I change it?")
    wish_text = f"No, that is more than I want to spend. Make it {_days(fewer_days)}, please."
    _change_length(draft, wish_text, booking_id, fewer_days)


def _draw_full_refund(draft: Draft) -> None:
    starts_in = draft.rng.randint(0, 6)
    booking_id, bike_kind, _ = _own_booking(draft, starts_in)
    plea_texts = draft.pleas(1, 2)
    wish_text = f"Cancel booking {booking_id}, and give me all of my money back."
    draft.wishes.append(Wish(wish_text, Ending.REFUSAL, plea_texts, _answers(bike_kind, booking_id=booking_id)))
    draft.call("get_booking", booking_id=booking_id)
    draft.refuse("the booking begins too soon for a full refund", len(plea_texts))
    _cancel(draft, "Then cancel it with the refund that your rules allow.", booking_id, _refund(starts_in))


def _draw_cancel_instead(draft: Draft) -> None:
    booking_id, refusal_reason, plea_count = _late_move(draft)
    draft.call("get_booking", booking_id=booking_id)
    draft.refuse(refusal_reason, plea_count)
    _cancel(draft, "In that case I do not need it at all. Please cancel it.", booking_id, "none")


def _refund(starts_in: int) -> Refund:
    """The refund of a booking that begins in so many days, by rule 4."""
    return "full" if starts_in >= 7 else "half" if starts_in >= 2 else "none"


def _days(days: int) -> str:
    return f"{days} day{'s' * (days != 1)}"


KINDS: Final[Mapping[int, Sequence[Callable[[Draft], None]]]] = {
    1: (_draw_paid, _draw_first_day, _draw_credit, _draw_quote),
    2: (_draw_book, _draw_move, _draw_length, _draw_cancel),
    3: (_draw_late_cancel, _draw_breakdown, _draw_full, _draw_too_long),
    4: (
        *(_draw_forbidden_move, _draw_forbidden_credit, _draw_forbidden_person),
        *(_draw_too_dear, _draw_full_refund, _draw_cancel_instead),
    ),
}
