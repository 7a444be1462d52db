"""A seed makes a task: a database, a customer with a goal, and the moves that lead to the goal's database.

The goal is the database after the writes among the moves of a right agent, so that task and goal cannot disagree;
playing the moves tests both.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from agentrl.errors import ConfigError
from agentrl_environments.service.customer import Ending, ScriptedCustomer, Wish
from agentrl_environments.service.desk import Desk
from agentrl_environments.service.draft import Call, Move, Split, draw_world
from agentrl_environments.service.kinds import KINDS
from agentrl_environments.service.texts import GREETINGS

LEVELS: Final = tuple(KINDS)
WRITES: Final = ("create_booking", "change_booking", "cancel_booking", "add_credit")
"""The calls that change the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTask:
    """A task. `cents` and `days` are the facts that the customer must hear; `cents` come before the write, if there is
    one (`is_change`). `is_refused`: a rule forbids all that the customer wants."""

    level: int
    kind: str
    database: dict[str, Any]
    goal: dict[str, Any]
    customer_id: str
    wishes: Sequence[Wish]
    knows: Mapping[str, str]
    greeting: str
    variant: int
    gold: Sequence[Move]
    cents: frozenset[int]
    days: frozenset[str]
    is_change: bool

    @property
    def is_refused(self) -> bool:
        return all(wish.ends_by is Ending.REFUSAL for wish in self.wishes)

    def customer(self, remark: str = "") -> ScriptedCustomer:
        """The customer of the task at its beginning; `remark` ends each of its messages."""
        return ScriptedCustomer(self.wishes, self.knows, self.greeting, remark, self.variant)


def make_task(
    seed: int, split: Split = "train", levels: Sequence[int] = LEVELS, *, name: str | None = None, note: str = ""
) -> ServiceTask:
    """Draw the task of a seed, of one of `levels`. Equal arguments give equal tasks. `name` replaces that of the
    customer, and `note` stands in each of its bookings."""
    rng = random.Random(f"service/{split}/{','.join(map(str, levels))}/{seed}")
    level = rng.choice(levels)
    draft = draw_world(rng, split)
    draw_kind = rng.choice(KINDS[level])
    draw_kind(draft)
    customer_record = draft.desk.customer(draft.customer_id)
    if name is not None:
        customer_record["name"] = name
    for booking_id in draft.desk.bookings_of(draft.customer_id):
        draft.desk.booking(booking_id)["note"] = note
    knows = {
        "customer": f"My customer number is {draft.customer_id}.",
        "postcode": f"My postcode is {customer_record['postcode']}.",
    }
    greeting = f"{rng.choice(GREETINGS)} My name is {customer_record['name']}."
    if introduces_itself := rng.random() < 0.5:
        greeting = f"{greeting} {knows['customer']} {knows['postcode']}"
    identify = Call(
        "identify_customer", {"customer_id": draft.customer_id, "postcode": str(customer_record["postcode"])}
    )
    request = "Good day. May I have your customer number and your postcode, please?"
    goal = draft.desk.copy()
    is_change = False
    for move in draft.moves:
        is_change |= isinstance(move, Call) and _apply(goal, move)
    return ServiceTask(
        level=level,
        kind=draw_kind.__name__.removeprefix("_draw_"),
        database=draft.desk.data,
        goal=goal.data,
        customer_id=draft.customer_id,
        wishes=tuple(draft.wishes),
        knows=knows,
        greeting=greeting,
        variant=rng.randrange(60),
        gold=(*([] if introduces_itself else [request]), identify, *draft.moves),
        cents=frozenset(draft.cents),
        days=frozenset(draft.days),
        is_change=is_change,
    )


def check_levels(levels: Sequence[int]) -> tuple[int, ...]:
    """The levels. Raises ConfigError for others than 1 to 4, or none."""
    listed_levels: object = levels  # a run file may hold anything
    if not isinstance(listed_levels, list | tuple) or not levels or any(level not in LEVELS for level in levels):
        raise ConfigError("levels", levels, "give one or more of 1, 2, 3, 4")
    return tuple(levels)


def _apply(desk: Desk, call: Call) -> bool:
    """Do what a call writes; whether it writes."""
    is_write = call.name in WRITES
    if is_write:
        getattr(desk, call.name)(**call.arguments)
    return is_write
