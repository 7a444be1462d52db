"""A book that is longer than a context, with a question at the end about one of its pages."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agentrl.env import EpisodeLimits, ToolEnv
from agentrl.env.checks.oracles import Oracle, say, script
from agentrl.errors import UsageError
from agentrl.records import Message

LETTERS: Final = string.ascii_uppercase
_TEXT: Final = "the ship sails far over calm water while old stars light its long way home from sea"
WORDS: Final = tuple(_TEXT.split())
OPENING: Final = "read on to the last page"


class Reading(ToolEnv):
    """`agentrl/Reading-v0`: a book of `pages`, one a turn, of `words` words each; on `facts` of them, evenly spread, a
    letter and a digit stand among the words. Whatever the policy writes turns the page; behind the last one comes
    a question: the digit of one letter.

    Outcome: 1 if the answer is right, else 0. The book does not fit in a small context, so the policy needs notes
    (`[rollout] compaction`). Reset options: `digits`, one a fact; `asked`, the index of the fact in question."""

    blocking = False
    replayable = True

    def __init__(self, *, pages: int = 24, facts: int = 8, words: int = 8, **settings: Any) -> None:
        if not 1 <= facts <= len(LETTERS):
            raise UsageError(f"facts = {facts}: give 1 to {len(LETTERS)}")
        if pages < facts:
            raise UsageError(f"pages = {pages}: give {facts} or more, one a fact")
        if words < 0:
            raise UsageError(f"words = {words}: give 0 or more")
        self._pages, self._facts, self._words = pages, facts, words
        super().__init__(**{"limits": EpisodeLimits(turns=pages + 2), **settings})

    def make_task(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        digits = options.get("digits", self.np_random.integers(0, 10, size=self._facts).tolist())
        if len(digits) != self._facts:
            raise UsageError(f"digits has {len(digits)} entries: give {self._facts}, one a fact")
        question_fact = int(options.get("asked", self.np_random.integers(0, self._facts)))
        if not 0 <= question_fact < self._facts:
            raise UsageError(f"asked = {question_fact}: give 0 to {self._facts - 1}")
        return {"digits": digits, "asked": question_fact, "words": self.np_random.integers(0, 1 << 30)}

    def prompt(self, task: Mapping[str, Any]) -> str:
        self._digits, self._question_fact = [int(digit) for digit in task["digits"]], int(task["asked"])
        self._book = book(self._digits, self._pages, self._words, int(task["words"]))
        self._read, self._right = 0, False
        return OPENING

    def on_text(self, text: str) -> str | None:
        page_index, self._read = self._read, self._read + 1
        if page_index < self._pages:
            return self._book[page_index]
        if page_index == self._pages:
            return question(self._question_fact)
        self._right = text.strip() == str(self._digits[self._question_fact])
        self.finish()
        return None

    def grade(self) -> bool:
        return self._right

    def oracles(self) -> list[Oracle]:
        right_digit = str(self._digits[self._question_fact])
        next_turns = ["next"] * (self._pages + 1)
        return [
            Oracle("gold", 1.0, script(*next_turns, right_digit)),
            Oracle("another digit", 0.0, script(*next_turns, str((int(right_digit) + 1) % 10))),
            Oracle("no-op", 0.0, say("")),
        ]


def book(digits: Sequence[int], pages: int, words: int, seed: int) -> list[str]:
    """The pages: each fact stands among words on a page of its own."""
    generator = random.Random(seed)
    page_words: list[list[str]] = [generator.choices(WORDS, k=words) for _ in range(pages)]
    for fact_index, digit in enumerate(digits):
        page_words[place(fact_index, len(digits), pages)].insert(
            generator.randrange(words + 1), fact(fact_index, digit)
        )
    return [" ".join(words_of_page) for words_of_page in page_words]


def place(at: int, facts: int, pages: int) -> int:
    """The page of fact `at`."""
    return at * pages // facts


def fact(at: int, digit: int) -> str:
    """A note of the fact on a page."""
    return f"{LETTERS[at]}{digit}"


def question(at: int) -> str:
    """The message behind the last page."""
    return f"what is {LETTERS[at]}"


def last_pages(messages: Sequence[Message], keep: int = 4) -> list[Message]:
    """The opening without its page, and the last messages: `[rollout] compaction = { how =
    "agentrl_environments.reading:last_pages" }` goes on without notes, from what was read last."""
    if len(messages) <= 2 * keep:
        return list(messages)
    last_messages = messages[-2 * keep + 1 :]
    return [{**last_messages[0], "content": f"{OPENING}\n{last_messages[0]['content']}"}, *last_messages[1:]]
