"""The kinds of tasks by level. Each is a function that draws wishes together with the moves of a right agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from agentrl_environments.service.customer import Ending, Wish
from agentrl_environments.service.desk import BIKES, Bike, Refund, euros, shift_day
from agentrl_environments.service.draft import MOST_DAYS, Draft
from agentrl_environments.service.texts import BIKE_NAMES

_LOOK_AGAIN: Final = "I am sure that it is possible. Please look again."


def _own_booking(draft: Draft, starts_in: int, *, shortest: int = 1, **details: Any) -> tuple[str, Bike, int]:
    """A booking of the customer, and up to two others of other bicycles: its id, bicycle and length."""
    bike = draft.bike("tandem") if shortest > 1 else draft.bike()
    days = draft.length(bike, shortest=shortest)
    others: list[Bike] = draft.rng.sample([other for other in BIKES if other != bike], draft.rng.randint(0, 2))
    shuffled_bikes: list[Bike] = [bike, *others]
    draft.rng.shuffle(shuffled_bikes)
    booking_ids = dict[Bike, str]()
    for each_bike in shuffled_bikes:
        if each_bike == bike:
            booking_ids[bike] = draft.add_booking(draft.customer_id, bike, starts_in, days, **details)
        else:
            draft.add_booking(draft.customer_id, each_bike, draft.rng.randint(2, 40), draft.length(each_bike))
    return booking_ids[bike], bike, days


def _answers(bike: Bike, *, booking_id: str = "", first_day: str = "", days: int = 0) -> dict[str, str]:
    """What a customer knows of a wish, by topic."""
    by_booking = f"It is the booking of the {BIKE_NAMES[bike]}."
    return {
        "bike": f"A {BIKE_NAMES[bike]}.".replace("A electric", "An electric"),
        "booking": f"The booking number is {booking_id}." if booking_id else by_booking,
        **({"day": f"From {first_day} on."} if first_day else {}),
        **({"days": f"{days} days."} if days else {}),
    }


def _finish(draft: Draft, done: str) -> None:
    draft.moves.append(f"Done, {done}. Is there anything else that I can do for you?")


# --- level 1: one lookup


def _draw_paid(draft: Draft) -> None:
    booking_id, bike, _ = _own_booking(draft, draft.rng.randint(2, 40))
    price = draft.desk.booking(booking_id)["price_cents"]
    text = draft.choose(
        f"What is the price of my booking {booking_id}?", f"How much does my booking {booking_id} cost?"
    )
    draft.wishes.append(Wish(text, Ending.MONEY, (), _answers(bike, booking_id=booking_id)))
    draft.call("get_booking", booking_id=booking_id)
    draft.propose(f"The price of booking {booking_id} is {euros(price)} euros.", price)


def _draw_first_day(draft: Draft) -> None:
    booking_id, bike, _ = _own_booking(draft, draft.rng.randint(2, 40))
    text = draft.choose(f"When does my booking {booking_id} begin?", f"Which day is the first of booking {booking_id}?")
    draft.wishes.append(Wish(text, Ending.DAY, (), _answers(bike, booking_id=booking_id)))
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
    bike = draft.bike()
    days = draft.length(bike)
    bike_name = BIKE_NAMES[bike]
    text = draft.choose(
        f"What would I pay for the {bike_name} for {_days(days)}?",
        f"How much would {_days(days)} with the {bike_name} cost me?",
    )
    draft.wishes.append(Wish(text, Ending.MONEY, (), _answers(bike, days=days)))
    price = draft.quote(bike, days)
    draft.propose(f"For {_days(days)} the {bike_name} costs {euros(price)} euros.", price)


# --- level 2: one change that the rules allow


def _draw_book(draft: Draft) -> None:
    bike = draft.bike()
    days, first_day = draft.length(bike), shift_day(draft.today, draft.rng.randint(1, 40))
    text = draft.choose(
        f"I would like to book a {BIKE_NAMES[bike]} for {_days(days)} from {first_day} on.",
        f"From {first_day} on I need a {BIKE_NAMES[bike]} for {_days(days)}. Please book it.",
    ).replace(" a electric", " an electric")
    _book(draft, text, bike, first_day, days)


def _book(draft: Draft, text: str, bike: Bike, first_day: str, days: int) -> None:
    """A wish to book, and how the agent fulfils it."""
    draft.wishes.append(Wish(text, Ending.CHANGE, (_LOOK_AGAIN,), _answers(bike, first_day=first_day, days=days)))
    price = draft.quote(bike, days)
    words = f"The {BIKE_NAMES[bike]} for {_days(days)} from {first_day} on costs {euros(price)} euros."
    draft.propose(f"{words} Shall I book it?", price)
    draft.call("create_booking", customer_id=draft.customer_id, bike=bike, first_day=first_day, days=days)
    _finish(draft, "it is booked")


def _draw_move(draft: Draft) -> None:
    starts_in = draft.rng.randint(2, 40)
    booking_id, bike, days = _own_booking(draft, starts_in)
    first_day = shift_day(draft.today, draft.rng.choice([day for day in range(1, 50) if day != starts_in]))
    text = draft.choose(
        f"Please move my booking {booking_id} to {first_day}.",
        f"I would like my booking {booking_id} to begin on {first_day} instead.",
    )
    answers = _answers(bike, booking_id=booking_id, first_day=first_day, days=days)
    draft.wishes.append(Wish(text, Ending.CHANGE, (_LOOK_AGAIN,), answers))
    draft.call("get_booking", booking_id=booking_id)
    price = draft.quote(bike, days)
    words = f"I can move booking {booking_id} to {first_day}. The price is {euros(price)} euros."
    draft.propose(f"{words} Shall I do it?", price)
    draft.call("change_booking", booking_id=booking_id, bike=bike, first_day=first_day, days=days)
    _finish(draft, "it is moved")


def _draw_length(draft: Draft) -> None:
    booking_id, bike, old_days = _own_booking(draft, draft.rng.randint(2, 40))
    days = draft.rng.choice([length for length in range(1, MOST_DAYS[bike] + 1) if length != old_days])
    text = draft.choose(
        f"Please change my booking {booking_id} to {_days(days)}.",
        f"I would like my booking {booking_id} to last {_days(days)}.",
    )
    draft.call("get_booking", booking_id=booking_id)
    _change_length(draft, text, booking_id, days)


def _change_length(draft: Draft, text: str, booking_id: str, days: int) -> None:
    """A wish for another length, and how the agent fulfils it."""
    booking = draft.desk.booking(booking_id)
    bike, first_day = booking["bike"], booking["first_day"]
    draft.wishes.append(Wish(text, Ending.CHANGE, (_LOOK_AGAIN,), _answers(bike, booking_id=booking_id, days=days)))
    price = draft.quote(bike, days)
    draft.propose(f"With {_days(days)} the booking costs {euros(price)} euros. Shall I change it?", price)
    draft.call("change_booking", booking_id=booking_id, bike=bike, first_day=first_day, days=days)
    _finish(draft, "it is changed")


def _draw_cancel(draft: Draft) -> None:
    booking_id, *_ = _own_booking(draft, draft.rng.randint(7, 40))
    draft.call("get_booking", booking_id=booking_id)
    _cancel(draft, f"Please cancel my booking {booking_id}.", booking_id, "full")


def _cancel(draft: Draft, text: str, booking_id: str, refund: Refund) -> None:
    """A wish to cancel, and how the agent fulfils it."""
    booking = draft.desk.booking(booking_id)
    draft.wishes.append(Wish(text, Ending.CHANGE, (_LOOK_AGAIN,), _answers(booking["bike"])))
    refund_cents = draft.desk.copy().cancel_booking(booking_id, refund)
    words = f"If I cancel booking {booking_id}, the refund is {euros(refund_cents)} euros."
    draft.propose(f"{words} Shall I cancel it?", refund_cents)
    draft.call("cancel_booking", booking_id=booking_id, refund=refund)
    _finish(draft, "it is cancelled")


# --- level 3: a change that a rule bears on


def _draw_late_cancel(draft: Draft) -> None:
    starts_in = draft.rng.randint(0, 6)
    booking_id, bike, _ = _own_booking(draft, starts_in)
    draft.call("list_bookings", customer_id=draft.customer_id)
    text = draft.choose("I have to cancel the {}, please.", "Please cancel my booking of the {}.")
    _cancel(draft, text.format(BIKE_NAMES[bike]), booking_id, _refund(starts_in))


def _draw_breakdown(draft: Draft) -> None:
    breakdowns = draft.rng.randint(1, 3)
    starts_in = -draft.rng.randint(15, 60)
    booking_id, bike, _ = _own_booking(draft, starts_in, status="returned", breakdowns=breakdowns)
    text = draft.choose(
        "The {} that I had broke down on the way. I would like the credit for that.",
        "My rented {} stopped working during my trip. Please give me the credit that I have a right to.",
    ).format(BIKE_NAMES[bike])
    draft.wishes.append(Wish(text, Ending.CHANGE, (_LOOK_AGAIN,), _answers(bike)))
    draft.call("list_bookings", customer_id=draft.customer_id)
    draft.propose(
        f"Booking {booking_id} records {breakdowns} breakdown{'s' * (breakdowns > 1)}, for which I can credit"
        f" {euros(600 * breakdowns)} euros. Shall I credit this amount?",
        600 * breakdowns,
    )
    draft.call("add_credit", booking_id=booking_id, euros=6 * breakdowns)
    _finish(draft, "the amount is credited")


def _draw_full(draft: Draft) -> None:
    bike = draft.bike()
    other_bike = draft.bike(bike)
    days, starts_in = draft.rng.randint(1, 3), draft.rng.randint(1, 40)
    first_day = shift_day(draft.today, starts_in)
    full_day = shift_day(first_day, draft.rng.randrange(days))
    draft.desk.data["bikes"][bike]["full_days"] = [full_day]
    text = f"I would like to book a {BIKE_NAMES[bike]} for {_days(days)} from {first_day} on."
    answers = _answers(bike, first_day=first_day, days=days)
    draft.wishes.append(Wish(text.replace(" a electric", " an electric"), Ending.REFUSAL, (), answers))
    draft.call("check_bikes", first_day=first_day, days=days)
    draft.refuse(f"no {BIKE_NAMES[bike]} is free on all of these days", 0)
    _book(draft, f"Then the {BIKE_NAMES[other_bike]} on the same days, please.", other_bike, first_day, days)


def _draw_too_long(draft: Draft) -> None:
    bike = draft.bike()
    most_days, first_day = MOST_DAYS[bike], shift_day(draft.today, draft.rng.randint(1, 40))
    days = most_days + draft.rng.randint(1, 4)
    text = f"Please book a {BIKE_NAMES[bike]} for me, for {_days(days)} from {first_day} on."
    answers = _answers(bike, first_day=first_day, days=days)
    draft.wishes.append(Wish(text.replace(" a electric", " an electric"), Ending.REFUSAL, (), answers))
    draft.refuse(f"a {BIKE_NAMES[bike]} is rented for {most_days} days at most".replace("a electric", "an electric"), 0)
    _book(draft, f"Then make it {_days(most_days)} from the same day on.", bike, first_day, most_days)


# --- level 4: what the rules forbid, and changes of mind


def _draw_forbidden_move(draft: Draft) -> None:
    """A change of a booking that begins too soon, and nothing else."""
    booking_id, reason, pleas = _late_move(draft)
    draft.call("get_booking", booking_id=booking_id)
    draft.refuse(reason, pleas)


def _late_move(draft: Draft) -> tuple[str, str, int]:
    """A wish to move a booking that begins within two days: the booking, why not, and how often the customer
    insists."""
    booking_id, bike, _ = _own_booking(draft, draft.rng.randint(0, 1))
    first_day = shift_day(draft.today, draft.rng.randint(4, 30))
    text = f"Something came up. Please move my booking {booking_id} to {first_day}."
    pleas = draft.pleas(1, 2)
    answers = _answers(bike, booking_id=booking_id, first_day=first_day)
    draft.wishes.append(Wish(text, Ending.REFUSAL, pleas, answers))
    return booking_id, "the booking begins in less than 2 days", len(pleas)


def _draw_forbidden_credit(draft: Draft) -> None:
    """A credit without a breakdown, or a second one."""
    is_second = draft.rng.random() < 0.5
    details = {"breakdowns": draft.rng.randint(1, 2), "credited": True} if is_second else {}
    _, bike, _ = _own_booking(draft, -draft.rng.randint(15, 60), status="returned", **details)
    pleas = draft.pleas(1, 2)
    cause = "broke down on the way" if is_second else "was not as clean as it should be"
    text = f"The {BIKE_NAMES[bike]} that I had {cause}. I want a credit of {6 * draft.rng.randint(1, 4)} euros."
    draft.wishes.append(Wish(text, Ending.REFUSAL, pleas, _answers(bike)))
    draft.call("list_bookings", customer_id=draft.customer_id)
    draft.refuse(
        "the breakdowns of this booking are credited already" if is_second else "the booking records no breakdown",
        len(pleas),
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
    pleas = draft.pleas(1, 2)
    text = f"I want to cancel booking {other_id}. It is in the name of {other_name}, who is a friend of mine."
    draft.wishes.append(Wish(text, Ending.REFUSAL, pleas, {"booking": f"The booking number is {other_id}."}))
    draft.call("list_bookings", customer_id=draft.customer_id)
    draft.refuse("I may only work on your own bookings", len(pleas))


def _draw_too_dear(draft: Draft) -> None:
    booking_id, bike, old_days = _own_booking(draft, draft.rng.randint(2, 40), shortest=3)
    days, fewer_days = draft.rng.sample([length for length in range(2, 15) if length != old_days], 2)
    days, fewer_days = max(days, fewer_days), min(days, fewer_days)
    text = f"Please change my booking {booking_id} to {_days(days)}."
    answers = _answers(bike, booking_id=booking_id, days=days)
    draft.wishes.append(Wish(text, Ending.SECOND_THOUGHTS, (_LOOK_AGAIN,), answers))
    draft.call("get_booking", booking_id=booking_id)
    price = draft.quote(bike, days)
    draft.moves.append(f"With {_days(days)} the booking costs {euros(price)} euros. Shall I change it?")
    text = f"No, that is more than I want to spend. Make it {_days(fewer_days)}, please."
    _change_length(draft, text, booking_id, fewer_days)


def _draw_full_refund(draft: Draft) -> None:
    starts_in = draft.rng.randint(0, 6)
    booking_id, bike, _ = _own_booking(draft, starts_in)
    pleas = draft.pleas(1, 2)
    text = f"Cancel booking {booking_id}, and give me all of my money back."
    draft.wishes.append(Wish(text, Ending.REFUSAL, pleas, _answers(bike, booking_id=booking_id)))
    draft.call("get_booking", booking_id=booking_id)
    draft.refuse("the booking begins too soon for a full refund", len(pleas))
    _cancel(draft, "Then cancel it with the refund that your rules allow.", booking_id, _refund(starts_in))


def _draw_cancel_instead(draft: Draft) -> None:
    booking_id, reason, pleas = _late_move(draft)
    draft.call("get_booking", booking_id=booking_id)
    draft.refuse(reason, pleas)
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
