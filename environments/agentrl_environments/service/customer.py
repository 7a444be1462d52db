"""The scripted customer: a state machine that has a goal, and answers what the agent writes.

Its words come from the task alone. What the agent writes only moves it from one state to the next, by words and numbers
that stand in it: it is never repeated, run or searched for calls. So an agent cannot learn more from a customer than
the customer would say, and no text makes it fail. Knows neither tools nor the database.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from agentrl_environments.service.facts import Facts, plain_text, read_facts


class Ending(StrEnum):
    """The end of a wish, for the customer."""

    MONEY = "money"
    """An amount was stated."""
    DAY = "day"
    """A day was stated."""
    CHANGE = "change"
    """The customer agreed to a stated amount, and the agent says that it is done."""
    SECOND_THOUGHTS = "second thoughts"
    """An amount was stated, and is too high: the customer wishes something else."""
    REFUSAL = "refusal"
    """The agent refused as often as the customer insisted."""


@dataclass(frozen=True, slots=True)
class Wish:
    """One thing that the customer wants: how it says so, what ends it, how it insists when it is refused, and what it
    knows about it, by topic."""

    text: str
    ends_by: Ending
    pleas: tuple[str, ...] = ()
    answers: Mapping[str, str] = field(default_factory=dict[str, str])


TOPICS: Final[Mapping[str, re.Pattern[str]]] = {
    "customer": re.compile(r"\b(?:customer|client|account|membership) ?(?:number|id|no\b)|who (?:are you|am i)"),
    "postcode": re.compile(r"\bpost ?code|\bpostal code|\bzip\b"),
    "booking": re.compile(r"\bbooking ?(?:number|id|no\b)|\bwhich booking|\bnumber of (?:your|the) booking"),
    "bike": re.compile(r"\b(?:which|what) (?:bike|bicycle|kind|type|model)|\b(?:kind|type) of (?:bike|bicycle)"),
    "day": re.compile(r"\b(?:which|what) (?:\w+ )?(?:day|date)\b|\bwhen (?:would|do|should|will)\b"),
    "days": re.compile(r"\bhow (?:long|many days)|\bnumber of days"),
}
"""Words by which a question of the agent is known to ask for a fact of the customer."""

_REFUSES: Final = re.compile(
    r"\b(?:can ?not|can't|unable|won't|decline|refuse|impossible|unavailable|fully booked|no exceptions?"
    r"|against (?:the|our|a) (?:rule|polic)\w*|no (?:\w+ )?(?:bikes?|tandems?) (?:is|are))\b"
    r"|(?:\bnot|n't) (?:be )?(?:able|allow(?:ed)?|possible|permit(?:ted)?|eligible|available|free)\b"
)
_PROPOSES: Final = re.compile(
    r"\b(?:shall i|should i|may i|confirm(?!ed|ation)|go ahead|proceed(?!ed)|agree(?!d)"
    r"|(?:would you like|do you want)(?! (?:\w+ ){0,6}(?:any|some)thing else)"
    r"|is (?:this|that) (?:ok|fine)|okay\?|ok\?)"
)
_DONE: Final = re.compile(
    r"\b(?:done|booked|reserved|changed|moved|extended|shortened|cancell?ed|credited|updated|refunded|completed?"
    r"|confirmed|all set|(?:any|some)thing else|goodbye)\b"
)
_PROMISES: Final = re.compile(r"\b(?:i'll|i will|i am going to|i'm going to|let me)\b")
_SENTENCE_END: Final = re.compile(r"[.!?:;] ")
_REQUESTS: Final = re.compile(r"\b(?:please|need|tell me|give me|provide|let me know|send me)\b")
PATIENCE: Final = 4
"""Answers in a row that bring the customer no further, after which it leaves."""
_YES: Final = ("Yes, please do that.", "Yes, go ahead.", "That is fine, please do it.", "Agreed, please go on.")
_BYES: Final = (
    "Thank you, that is all. Goodbye.",
    "Thanks, I need nothing else. Goodbye.",
    "Good. That was everything, goodbye.",
)
_HOW_MUCH: Final = "How much money is that?"
_HELLO: Final = "Hello? Are you still there?"
_CANNOT_TELL: Final = "That I cannot tell you."
_ACCEPTS: Final = "Then I have to accept that. Goodbye."
_GIVES_UP: Final = "Then I have to leave it at that. Goodbye."
_LOST: Final = ("I am not sure what you mean.", "Sorry, I do not follow.", "That does not help me yet.")
_LEAVES: Final = "This leads nowhere. I will try again another day. Goodbye."


@dataclass(slots=True)
class ScriptedCustomer:
    """Says its wishes one after the other. `knows` are its answers by topic, whatever it wishes; `remark` stands at the
    end of all that it says; `variant` chooses among phrases of the same meaning."""

    wishes: Sequence[Wish]
    knows: Mapping[str, str]
    greeting: str = ""
    remark: str = ""
    variant: int = 0
    wish_index: int = 0
    agrees: bool = False
    """Whether its latest words agreed to what the agent proposed."""
    is_over: bool = False
    is_content: bool = False
    """Whether it left because each of its wishes came to its end."""
    _pleas_used: int = 0
    _has_agreed: bool = False
    _fruitless: int = 0
    _answered: set[str] = field(default_factory=set[str])

    def opening(self) -> str:
        """Its first words."""
        return self._say(f"{self.greeting} {self._wish.text}".strip())

    def answer(self, message: str) -> str:
        """Its next words. `is_over` is true after its last ones; a customer that left says nothing more."""
        self.agrees = False
        if self.is_over:
            return ""
        text = plain_text(message).strip()
        if not text:
            return self._say(self._bring_back(_HELLO))
        topics = [topic for topic, pattern in TOPICS.items() if pattern.search(text)]
        if topics and ("?" in text or _REQUESTS.search(text)) and not self._brings_news(message, text):
            facts = " ".join(self._fact(topic) for topic in topics)
            is_repeated = self._answered.issuperset(topics)
            self._answered.update(topics)
            return self._say(self._bring_back(facts) if is_repeated else facts)
        return self._say(self._react(message, text))

    @property
    def _wish(self) -> Wish:
        return self.wishes[self.wish_index]

    def _fact(self, topic: str) -> str:
        return self._wish.answers.get(topic) or self.knows.get(topic) or _CANNOT_TELL

    def _react(self, message: str, text: str) -> str:
        """The answer to a message that is no question about what the customer knows."""
        facts, wish = read_facts(message), self._wish
        refuses, proposes = _REFUSES.search(text) is not None, _PROPOSES.search(text) is not None
        is_done = self._is_done(text)
        match wish.ends_by:
            case Ending.MONEY | Ending.DAY:
                if facts.cents if wish.ends_by is Ending.MONEY else facts.days:
                    return self._next_wish()
            case Ending.REFUSAL:
                if refuses:
                    return self._insist(wish)
                if is_done:
                    return self._give_up()
                if facts.cents or proposes:
                    return self._consider(facts)
            case Ending.SECOND_THOUGHTS:
                if facts.cents:
                    return self._next_wish()
                if is_done:
                    return self._give_up()
            case Ending.CHANGE:
                if is_done:
                    return self._next_wish()
                if facts.cents or proposes:
                    return self._consider(facts)
        if refuses:
            return self._insist(wish)
        return self._bring_back(f"{self._phrase(_LOST)} {wish.text}")

    def _consider(self, facts: Facts) -> str:
        """The answer to a proposal: agreement if it states an amount."""
        if not facts.cents:
            return self._bring_back(_HOW_MUCH)
        self.agrees = self._has_agreed = True
        # Not counted as progress: an agent that proposes for ever would otherwise be agreed with for ever.
        return self._bring_back(self._phrase(_YES))

    def _insist(self, wish: Wish) -> str:
        """Repeat a refused wish in other words, or give it up. A customer that was refused wrongly is not content, so
        that a refusal is no way out."""
        if self._pleas_used < len(wish.pleas):
            self._pleas_used += 1
            return wish.pleas[self._pleas_used - 1]
        return self._next_wish() if wish.ends_by is Ending.REFUSAL else self._give_up()

    def _next_wish(self) -> str:
        self.wish_index += 1
        self._pleas_used = self._fruitless = 0
        self._has_agreed = False
        self._answered.difference_update(("bike", "day", "days", "booking"))
        if self.wish_index < len(self.wishes):
            return self._wish.text
        self.wish_index -= 1
        self.is_over = self.is_content = True
        return _ACCEPTS if self._wish.ends_by is Ending.REFUSAL else self._phrase(_BYES)

    def _give_up(self) -> str:
        self.is_over = True
        return _GIVES_UP

    def _bring_back(self, words: str) -> str:
        """Words that lead nowhere by themselves; after too many of them in a row the customer leaves."""
        self._fruitless += 1
        if self._fruitless <= PATIENCE:
            return words
        self.is_over, self.agrees = True, False
        return _LEAVES

    def _is_done(self, text: str) -> bool:
        # Nothing can be done before the customer has agreed. Until then the same words belong to a promise or a
        # question ("I can get that booked for you. May I have your number?"), and the customer must not leave at them.
        if not self._has_agreed or _PROPOSES.search(text):
            return False
        # Afterwards too, sentence by sentence: "I will get it booked now" is not news, and "It is booked" is.
        return any(_DONE.search(sentence) and not _PROMISES.search(sentence) for sentence in _SENTENCE_END.split(text))

    def _brings_news(self, message: str, text: str) -> bool:
        """Whether a message proposes something with its amount, or says that something is done. It may name the
        booking's number and end with a question, and is answered as the news that it is."""
        return self._is_done(text) or (_PROPOSES.search(text) is not None and bool(read_facts(message).cents))

    def _phrase(self, phrases: Sequence[str]) -> str:
        return phrases[(self.variant + self.wish_index) % len(phrases)]

    def _say(self, words: str) -> str:
        return f"{words} {self.remark}".strip()
