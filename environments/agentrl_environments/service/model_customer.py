"""The customer as a role of the episode, which a model plays.

It reads who it is, what it knows and what it wants, and never the rules of the house, a tool or the goal's database. Of
what it writes the environment reads two things: whether it agrees, and whether it says goodbye.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from agentrl.env.tools.parsers import Hermes
from agentrl.env.tools.tool_format import Span, ToolFormat
from agentrl.env.tools.tools import clean_text
from agentrl.records import Message, Messages
from agentrl_environments.service.customer import Ending, Wish
from agentrl_environments.service.facts import plain_text
from agentrl_environments.service.tasks import ServiceTask

CUSTOMER: Final = "customer"
"""The role's name."""

_AGREES: Final = re.compile(r"\b(?:yes|agreed?|go ahead|please do|fine|ok|okay|sounds good)\b")
_DISAGREES: Final = re.compile(r"\b(?:no|not|don't|cannot|can't|but|too (?:much|dear|expensive))\b")
_LEAVES: Final = re.compile(r"\bgood ?bye\b")
_BRIEF: Final = """\
You play a customer of Millrace Cycles, a house that rents out bicycles, in a chat with its desk. Write only what the \
customer says, one short message at a time, and stay the customer whatever the desk writes.

{facts}

What you want, one after the other:
{wishes}

Say what you want in words of your own, and only what comes next. Answer questions by what stands here, and say that \
you do not know the rest. Agree to something only if the desk has stated the amount of money. Write Goodbye once \
everything came to its end, or if it leads nowhere."""
_ENDINGS: Final[Mapping[Ending, str]] = {
    Ending.MONEY: "It ends when the desk states the amount.",
    Ending.DAY: "It ends when the desk states the day.",
    Ending.CHANGE: "Agree when the desk states the amount. It ends when the desk says that it is done.",
    Ending.SECOND_THOUGHTS: "When the desk states the amount, do not agree: go on to what comes next.",
    Ending.REFUSAL: "It ends when the desk refuses.",
}


class _WordsOnly(Hermes):
    """Reads no calls at all."""

    name = "words only"

    def spans(self, text: str, start: int) -> Iterator[Span]:
        return iter(())


WORDS_ONLY: Final[ToolFormat] = _WordsOnly()


class ModelCustomer:
    """Where a chat with a customer stands that a model plays. `agent_begins` are the messages before the customer's
    first words."""

    def __init__(self) -> None:
        self.agent_begins: Messages = ()
        self.agrees = False
        self.is_over = False

    @property
    def is_content(self) -> bool:
        """Whether the customer left by itself. Nobody can tell more of a model's customer without a judge."""
        return self.is_over

    def brief(self, task: ServiceTask) -> Messages:
        """The first messages of the role."""
        facts = " ".join([task.greeting, *(fact for fact in task.knows.values() if fact not in task.greeting)])
        wishes = "\n".join(f"{number}. {_described(wish)}" for number, wish in enumerate(task.wishes, 1))
        return (
            Message(role="system", content=clean_text(_BRIEF.format(facts=facts, wishes=wishes))),
            Message(role="user", content="Good day, this is the desk of Millrace Cycles. What can I do for you?"),
        )

    def hear(self, words: str) -> str | Messages:
        """Take the customer's next words; what the agent reads of them."""
        text = plain_text(words)
        self.is_over = _LEAVES.search(text) is not None
        self.agrees = _AGREES.search(text) is not None and _DISAGREES.search(text) is None
        words = words or "(The customer writes nothing.)"
        begins, self.agent_begins = self.agent_begins, ()
        return (*begins, Message(role="user", content=clean_text(words))) if begins else words


def _described(wish: Wish) -> str:
    """A wish, what ends it, and all that belongs to it."""
    insisting = f" If it refuses, first insist: {' '.join(wish.pleas)}" if wish.pleas else ""
    return " ".join([f'"{wish.text}" {_ENDINGS[wish.ends_by]}{insisting}', *wish.answers.values()])
