"""Reads the amounts of money and the days that a message states, each as one normal value.

A value is compared exactly, so that no model has to judge whether a customer heard it. Every reader takes time linear
in the text, which a policy writes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from typing import Final

READ_CHARACTERS: Final = 4_000
"""Characters of a message that are read; a customer reads no further."""
MOST_FACTS: Final = 3
"""Different amounts, or days, that one message may state. A message with more states none: otherwise a list of all
prices would hold the right one."""

_MONTHS: Final = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
_MONTH: Final = "|".join(f"{month_name}|{month_name[:3]}" for month_name in _MONTHS)
_NUMBER: Final = r"(?<![\w.,-])(\d{1,5})(?:[.,](\d{1,2}))?(?![\d-])(?![.,]\d)"
_AMOUNTS: Final = (
    re.compile(rf"{_NUMBER}\s{{0,3}}(?:€|euros?\b|eur\b)", re.ASCII),
    re.compile(r"(?:€|\beuros?|\beur)\s{0,3}(\d{1,5})(?:[.,](\d{1,2}))?(?![\d-])(?![.,]\d)", re.ASCII),
    re.compile(r"(?<![\w.,-])(\d{1,5})[.,](\d{2})(?![\w-])(?![.,]\d)", re.ASCII),
)
_ISO_DAY: Final = re.compile(r"(?<![\d-])(\d{4})-(\d{1,2})-(\d{1,2})(?![\d-])", re.ASCII)
_WORD_DAYS: Final = (
    re.compile(
        rf"(?<!\d)(?P<day>\d{{1,2}})(?:st|nd|rd|th)?\s(?:of\s)?(?P<month>{_MONTH})\b,?\s(?P<year>\d{{4}})\b", re.ASCII
    ),
    re.compile(rf"\b(?P<month>{_MONTH})\s(?P<day>\d{{1,2}})(?:st|nd|rd|th)?,?\s(?P<year>\d{{4}})\b", re.ASCII),
)


@dataclass(frozen=True, slots=True)
class Facts:
    """The cents and the days (as 2031-05-12) that a text states."""

    cents: frozenset[int] = frozenset()
    days: frozenset[str] = frozenset()


def plain_text(message: str) -> str:
    """A message in lower case with plain apostrophes and single spaces, cut where a customer stops reading."""
    return re.sub(r"\s+", " ", message[:READ_CHARACTERS].replace("\N{RIGHT SINGLE QUOTATION MARK}", "'").lower())


def read_facts(message: str) -> Facts:
    """The facts of a message; none of a kind of which it states more than `MOST_FACTS`."""
    text = plain_text(message)
    stated_days = {_iso(*map(int, day_match.groups())) for day_match in _ISO_DAY.finditer(text)}
    for pattern in _WORD_DAYS:
        stated_days |= {
            _iso(int(day_match["year"]), _month(day_match["month"]), int(day_match["day"]))
            for day_match in pattern.finditer(text)
        }
    stated_days.discard("")
    stated_cents = {
        100 * int(amount_match[1]) + int((amount_match[2] or "0").ljust(2, "0"))
        for pattern in _AMOUNTS
        for amount_match in pattern.finditer(text)
    }
    return Facts(
        frozenset(stated_cents if len(stated_cents) <= MOST_FACTS else ()),
        frozenset(stated_days if len(stated_days) <= MOST_FACTS else ()),
    )


def _month(month_name: str) -> int:
    return 1 + next(index for index, full_name in enumerate(_MONTHS) if full_name.startswith(month_name))


def _iso(year: int, month: int, day: int) -> str:
    try:
        return date(year, month, day).isoformat()
    except ValueError:
        return ""
