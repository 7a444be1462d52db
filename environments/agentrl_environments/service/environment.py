"""`Service`: a desk of a bicycle rental that a customer writes to. Scores the database, the rules and the words.

The customer is a state machine (`agentrl_environments.service.customer`), or a role of the episode that a model plays
(`agentrl_environments.service.model_customer`). Its words are text of a user message, and the agent's words are text
for it: a tool runs only where the tool format reads a call. The goal is not in the database that the tools read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from agentrl.env import EpisodeLimits, Grade, ToolEnv, tool
from agentrl.env.checks.oracles import Oracle, say, script
from agentrl.env.core import ResetResult, StepResult
from agentrl.env.tools.parsers import ToolFormat, format_of
from agentrl.errors import ConfigError
from agentrl.records import POLICY as AGENT
from agentrl.records import Json, Message
from agentrl_environments.service.desk import BIKES, Bike, Desk, Refund, euros, shift_day
from agentrl_environments.service.draft import SPLITS, Move, Split
from agentrl_environments.service.facts import read_facts
from agentrl_environments.service.model_customer import CUSTOMER, WORDS_ONLY, ModelCustomer
from agentrl_environments.service.tasks import LEVELS, check_levels, make_task
from agentrl_environments.service.texts import POLICY

User = Literal["scripted", "model"]
_TEXTS = ("name", "note", "remark")


class Service(ToolEnv):
    """`agentrl/Service-v0`: serve one customer by the rules of the house, with tools that read and change a database.

    `levels`: which of 1 (a lookup), 2 (a change), 3 (a change with a rule to check) and 4 (what a rule forbids, changes
    of mind) are drawn. `split`: `train` or `held_out`, whose customers have other names. Outcome: 1 if the database is
    the goal's, no rule was broken, the customer heard what it had to, and left content; else 0. `user`: `scripted`, or
    `model`: the role `customer` speaks, and `[rollout.roles]` says which model plays it. Reset options, for tests:
    `name` of the customer, `note` of its bookings, and a `remark` that ends each message of a scripted one."""

    system = POLICY
    limits = EpisodeLimits(turns=30)
    blocking = False
    replayable = True
    roles: tuple[str, ...] = ()
    """The roles of the episode, for `[rollout.roles]`; none where the customer is scripted."""

    def __init__(
        self,
        *,
        levels: Sequence[int] = LEVELS,
        split: Split = "train",
        user: User = "scripted",
        **settings: Any,
    ) -> None:
        if split not in SPLITS:
            raise ConfigError("split", split, f"choose one of {', '.join(SPLITS)}")
        if user not in ("scripted", "model"):
            raise ConfigError("user", user, "choose one of scripted, model")
        self._is_modelled, self._is_customers_turn = user == "model", False
        if self._is_modelled:
            self.roles = (AGENT, CUSTOMER)
            settings = {"limits": EpisodeLimits(turns=60), **settings}  # of both roles
        self._levels = check_levels(levels)
        self._split: Split = split
        super().__init__(**settings)

    def make_task(self, options: Mapping[str, Json]) -> Mapping[str, Json]:
        texts = {option_name: str(options[option_name]) for option_name in _TEXTS if option_name in options}
        return {"seed": self.task_seed(), **texts}

    def prompt(self, task: Mapping[str, Json]) -> str:
        name, note = task.get("name"), str(task.get("note", ""))
        drawn_task = self._drawn = make_task(task["seed"], self._split, self._levels, name=name, note=note)
        self._desk = Desk(drawn_task.database).copy()
        self._customer = ModelCustomer() if self._is_modelled else drawn_task.customer(str(task.get("remark", "")))
        self._identified = ""
        self._has_consent = False
        self._broken_rules: list[str] = []
        self._cents, self._days, self._cents_before_write = set[int](), set[str](), set[int]()
        self._latest_cents = frozenset[int]()
        self.note(level=drawn_task.level, kind=drawn_task.kind)
        return "" if isinstance(self._customer, ModelCustomer) else self._customer.opening()

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Json] | None = None) -> ResetResult:
        self._is_customers_turn = False
        messages, info = await super().areset(seed=seed, options=options)
        if not isinstance(self._customer, ModelCustomer):
            return messages, info
        # The customer speaks first, as the scripted one does; the agent's first messages wait until it has.
        self._customer.agent_begins = messages[:-1]
        self._is_customers_turn = True
        return self._customer.brief(self._drawn), {**info, "role": CUSTOMER}

    async def astep(self, action: str) -> StepResult:
        observation, reward, terminated, truncated, info = await super().astep(action)
        if self._is_customers_turn and not (terminated or truncated):
            info = {**info, "role": CUSTOMER}
        return observation, reward, terminated, truncated, info

    def tool_schemas(self) -> list[Mapping[str, Json]]:
        return [] if self._is_customers_turn else super().tool_schemas()

    @property
    def _format(self) -> ToolFormat:
        # Whatever a model writes as the customer is words: a call in it must never reach a tool.
        return WORDS_ONLY if self._is_customers_turn else super()._format

    def on_text(self, text: str) -> str | Sequence[Message]:
        if self._is_customers_turn and isinstance(self._customer, ModelCustomer):
            return self._hear_customer(self._customer, text)
        # Thoughts are not said aloud: a customer that heard them would hear amounts that the agent only considered.
        words = self._format.parse(text, self.schemas).text
        facts = read_facts(words)
        self._cents |= facts.cents
        self._latest_cents = facts.cents or self._latest_cents
        self._days |= facts.days
        if isinstance(self._customer, ModelCustomer):
            self._is_customers_turn, self._has_consent = True, False
            return words.strip() or "(The desk writes nothing.)"
        reply = self._customer.answer(words)
        self._has_consent = self._customer.agrees
        if self._customer.is_over:
            self.finish()
        return reply

    def _hear_customer(self, customer: ModelCustomer, text: str) -> str | Sequence[Message]:
        """The messages for the agent, of words that a model wrote as the customer."""
        self._is_customers_turn = False
        words = text[len(format_of(self).parse(text).head) :].strip()
        agent_reads = customer.hear(words)
        self._has_consent = customer.agrees
        if customer.is_over:
            self.finish()
        return agent_reads

    # --- tools that read

    @tool
    def identify_customer(self, customer_id: str, postcode: str) -> dict[str, Json]:
        """Identify the customer of this chat. Gives the customer's record and the day of today.

        Args:
            customer_id: the customer number, such as C1234
            postcode: the customer's postcode
        """
        record = self._desk.data["customers"].get(customer_id)
        if record is None or record["postcode"] != postcode.strip():
            return {"identified": False}
        self._identified = customer_id
        return {
            "identified": True,
            "name": record["name"],
            "plan": record["plan"],
            "credit": euros(record["credit_cents"]),
            "today": self._desk.data["today"],
        }

    @tool
    def list_bookings(self, customer_id: str) -> list[dict[str, Json]]:
        """List the bookings of a customer.

        Args:
            customer_id: the customer number
        """
        shown_bookings = [self._shown(booking_id) for booking_id in self._desk.bookings_of(customer_id)]
        self._check_identified(customer_id)
        return shown_bookings

    @tool
    def get_booking(self, booking_id: str) -> dict[str, Json]:
        """Look up a booking.

        Args:
            booking_id: the booking number, such as B12345
        """
        shown_booking = self._shown(booking_id)
        self._check_identified(shown_booking["customer_id"])
        return shown_booking

    @tool
    def check_bikes(self, first_day: str, days: int) -> list[dict[str, Json]]:
        """See which kinds of bicycles are free on all days of a period.

        Args:
            first_day: the first day, such as 2031-05-12
            days: how many days
        """
        return [{"bike": bike, "free": self._desk.is_free(bike, first_day, days)} for bike in BIKES]

    @tool
    def quote(self, customer_id: str, bike: Bike, days: int) -> str:
        """Work out the price of a booking for a customer, with all discounts.

        Args:
            customer_id: the customer number
            bike: the kind of bicycle
            days: how many days
        """
        price_cents = self._desk.price(customer_id, bike, days)
        self._check_identified(customer_id)
        return f"{euros(price_cents)} euros"

    # --- tools that write

    @tool
    def create_booking(self, customer_id: str, bike: Bike, first_day: str, days: int) -> dict[str, Json]:
        """Book a bicycle.

        Args:
            customer_id: the customer number
            bike: the kind of bicycle
            first_day: the first day, such as 2031-05-12
            days: how many days
        """
        booking_id = self._desk.create_booking(customer_id, bike, first_day, days)
        self._check_write(customer_id)
        return self._shown(booking_id)

    @tool
    def change_booking(self, booking_id: str, bike: Bike, first_day: str, days: int) -> dict[str, Json]:
        """Change a booking. Give all of its details, also those that stay.

        Args:
            booking_id: the booking number
            bike: the kind of bicycle
            first_day: the first day, such as 2031-05-12
            days: how many days
        """
        self._desk.change_booking(booking_id, bike, first_day, days)
        self._check_write(self._desk.booking(booking_id)["customer"])
        return self._shown(booking_id)

    @tool
    def cancel_booking(self, booking_id: str, refund: Refund) -> str:
        """Cancel a booking, and pay back all, half or nothing of its price.

        Args:
            booking_id: the booking number
            refund: how much is paid back
        """
        refund_cents = self._desk.cancel_booking(booking_id, refund)
        self._check_write(self._desk.booking(booking_id)["customer"])
        return f"cancelled; {euros(refund_cents)} euros are paid back"

    @tool
    def add_credit(self, booking_id: str, euros: int) -> str:
        """Credit an amount to the customer of a booking, for the breakdowns that the booking records.

        Args:
            booking_id: the booking number
            euros: whole euros in all
        """
        self._desk.add_credit(booking_id, euros)
        self._check_write(self._desk.booking(booking_id)["customer"])
        return f"{euros}.00 euros are credited"

    # --- scoring

    def grade(self) -> Grade:
        drawn_task = self._drawn
        if self._identified != drawn_task.customer_id:
            self._break_rule("did not identify the customer")
        has_goal = self._desk.data == drawn_task.goal
        heard_cents = self._cents_before_write if drawn_task.is_change else self._cents
        is_informed = drawn_task.cents <= heard_cents and drawn_task.days <= self._days
        is_success = has_goal and is_informed and not self._broken_rules and self._customer.is_content
        checks: dict[str, Json] = {
            "database": has_goal,
            "informed": is_informed,
            "content": self._customer.is_content,
            "broken_rules": [*self._broken_rules],
        }
        return Grade(outcome=float(is_success), success=is_success, info=checks)

    def oracles(self) -> list[Oracle]:
        if self._is_modelled:
            return []
        gold_actions = [self._written(move) for move in self._drawn.gold]
        unidentified = [action for action in gold_actions if "identify_customer" not in action]
        return [
            Oracle("gold", 1.0, script(*gold_actions)),
            Oracle("nobody identified", 0.0, script(*unidentified)),
            Oracle("empty promises", 0.0, say("Done, for 1.00 euros. It is booked and cancelled."), cheats=True),
            Oracle("no-op", 0.0, say("")),
        ]

    def _written(self, move: Move) -> str:
        return move if isinstance(move, str) else self.call(move.name, **move.arguments)

    # --- inside

    def _shown(self, booking_id: str) -> dict[str, Any]:
        """A booking as the tools show it."""
        booking = self._desk.booking(booking_id)
        return {
            "booking_id": booking_id,
            "customer_id": booking["customer"],
            "bike": booking["bike"],
            "first_day": booking["first_day"],
            "last_day": shift_day(booking["first_day"], booking["days"] - 1),
            "days": booking["days"],
            "begins_in_days": self._desk.days_until(booking_id),
            "status": booking["status"],
            "price": euros(booking["price_cents"]),
            "breakdowns": booking["breakdowns"],
            "breakdowns_credited": booking["credited"],
            "note": booking["note"],
        }

    def _check_identified(self, customer_id: str) -> None:
        if customer_id != self._identified:
            self._break_rule("served somebody who was not identified")

    def _check_write(self, customer_id: str) -> None:
        """The rules of any write that the desk has just made."""
        self._check_identified(customer_id)
        if not self._has_consent:
            self._break_rule("changed something without the customer's consent")
        # One consent is for one write. An agent that changes two things has to ask twice.
        self._has_consent = False
        # Of the latest amounts alone: those before them are not what the customer agreed to, and over many messages an
        # agent could name every price there is.
        self._cents_before_write |= self._latest_cents

    def _break_rule(self, rule: str) -> None:
        if rule not in self._broken_rules:
            self._broken_rules.append(rule)
