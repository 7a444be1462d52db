"""The database of a bicycle rental, and the reads and writes that its desk has.

A write keeps the database whole: no unknown booking, no bicycle that is not free. The rules of the house are the
agent's to keep, and no write checks them. Money is whole cents, and a day is a text such as 2031-05-12. Knows neither
the wishes of customers nor goals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from typing import Any, Final, Literal

from agentrl.errors import ToolError

Bike = Literal["city", "cargo", "electric", "tandem"]
Refund = Literal["full", "half", "none"]

BIKES: Final[tuple[Bike, ...]] = ("city", "cargo", "electric", "tandem")
REFUND_SHARES: Final[Mapping[Refund, int]] = {"full": 2, "half": 1, "none": 0}  # halves of the price
MOST_DAYS: Final = 60
"""Days that the database can hold in one booking; the rules of the house allow fewer."""
_DAY: Final = re.compile(r"20\d\d-\d\d-\d\d", re.ASCII)
_LONG: Final = 7  # days from which a booking is cheaper


@dataclass(slots=True)
class Desk:
    """A rental's database. `data` is JSON: `today`, `bikes`, `customers` and `bookings`, each by its id."""

    data: dict[str, Any]

    def copy(self) -> Desk:
        """A desk with the same database, whose writes do not reach this one."""
        return Desk(json.loads(json.dumps(self.data)))

    # --- reads

    def customer(self, customer_id: str) -> dict[str, Any]:
        """The record of a customer. Raises ToolError for an unknown one."""
        return self._record("customers", "customer", customer_id)

    def booking(self, booking_id: str) -> dict[str, Any]:
        """The record of a booking. Raises ToolError for an unknown one."""
        return self._record("bookings", "booking", booking_id)

    def bookings_of(self, customer_id: str) -> list[str]:
        """The ids of a customer's bookings, in the order of the database."""
        self.customer(customer_id)
        return [
            booking_id for booking_id, booking in self.data["bookings"].items() if booking["customer"] == customer_id
        ]

    def days_until(self, booking_id: str) -> int:
        """Days from today to the booking's first day; negative once it has begun."""
        return (parse_day(self.booking(booking_id)["first_day"]) - parse_day(self.data["today"])).days

    def is_free(self, bike: Bike, first_day: str, days: int) -> bool:
        """Whether a bicycle of the kind is left on each of the days."""
        return not set(self.data["bikes"][bike]["full_days"]).intersection(day_range(first_day, days))

    def price(self, customer_id: str, bike: Bike, days: int) -> int:
        """Cents of a booking: a tenth less from 7 days on, and a fifth less of the rest on the plan `plus`."""
        day_range(self.data["today"], days)
        cents: int = self.data["bikes"][bike]["cents_per_day"] * days
        if days >= _LONG:
            cents = cents * 9 // 10
        return cents * 4 // 5 if self.customer(customer_id)["plan"] == "plus" else cents

    # --- writes

    def create_booking(self, customer_id: str, bike: Bike, first_day: str, days: int) -> str:
        """Reserve a bicycle; the id of the new booking."""
        price_cents = self.price(customer_id, bike, days)
        self._require_free(bike, first_day, days)
        highest_number = max((int(booking_id[1:]) for booking_id in self.data["bookings"]), default=10_000)
        booking_id = f"B{highest_number + 1}"
        self.data["bookings"][booking_id] = {
            "customer": customer_id,
            "bike": bike,
            "first_day": parse_day(first_day).isoformat(),
            "days": days,
            "status": "reserved",
            "price_cents": price_cents,
            "breakdowns": 0,
            "credited": False,
            "note": "",
        }
        return booking_id

    def change_booking(self, booking_id: str, bike: Bike, first_day: str, days: int) -> None:
        """Give a booking another bicycle, first day or length, at the price of today."""
        booking = self._open_booking(booking_id)
        price_cents = self.price(booking["customer"], bike, days)
        self._require_free(bike, first_day, days)
        booking.update(bike=bike, first_day=parse_day(first_day).isoformat(), days=days, price_cents=price_cents)

    def cancel_booking(self, booking_id: str, refund: Refund) -> int:
        """Cancel a booking; the cents that go back to the customer."""
        booking = self._open_booking(booking_id)
        refund_cents: int = booking["price_cents"] * REFUND_SHARES[refund] // 2
        booking.update(status="cancelled", refund_cents=refund_cents)
        return refund_cents

    def add_credit(self, booking_id: str, euros: int) -> None:
        """Credit whole euros to the customer of a booking."""
        booking = self.booking(booking_id)
        if not 1 <= euros <= 1_000:
            raise ToolError(f"{_short(euros)} euros cannot be credited: give 1 to 1000")
        booking["credited"] = True
        self.customer(booking["customer"])["credit_cents"] += 100 * euros

    # --- inside

    def _record(self, table: str, record_name: str, record_id: str) -> dict[str, Any]:
        if record_id not in self.data[table]:
            raise ToolError(f"there is no {record_name} {_short(record_id)}")
        return self.data[table][record_id]

    def _open_booking(self, booking_id: str) -> dict[str, Any]:
        booking = self.booking(booking_id)
        if booking["status"] not in ("reserved", "running"):
            raise ToolError(f"booking {booking_id} is {booking['status']}: nothing of it can be changed")
        return booking

    def _require_free(self, bike: Bike, first_day: str, days: int) -> None:
        if not self.is_free(bike, first_day, days):
            raise ToolError(f"no {bike} bike is free on all of these days")


def parse_day(day: str) -> date:
    """A day as a date. Raises ToolError for any other text."""
    try:
        if _DAY.fullmatch(day):
            return date.fromisoformat(day)
    except ValueError:
        pass
    raise ToolError(f"{_short(day)} is no day: write it like 2031-05-12")


def day_range(first_day: str, days: int) -> list[str]:
    """The days of a booking, the first one included. Raises ToolError for a length that no booking has."""
    if not 1 <= days <= MOST_DAYS:
        raise ToolError(f"{_short(days)} days are no length of a booking: give 1 to {MOST_DAYS}")
    return [shift_day(first_day, offset) for offset in range(days)]


def shift_day(day: str, offset: int) -> str:
    """The day `offset` days later."""
    return (parse_day(day) + timedelta(days=offset)).isoformat()


def euros(cents: int) -> str:
    """Cents as the desk writes money."""
    return f"{cents // 100}.{cents % 100:02d}"


def _short(value: str | int) -> str:
    """A value of the policy's in an error; a number of thousands of digits cannot even be written."""
    return "so many" if isinstance(value, int) and value.bit_length() > 64 else f"{value!r:.40}"
