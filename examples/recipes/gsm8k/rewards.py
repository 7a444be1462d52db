"""What an answer to a word problem is worth: a number behind `####`, right or wrong."""

from __future__ import annotations

import re


def correct(prompt, completion: str, row) -> float:
    """1 if the last number behind `####` is the row's, else 0. A row's `answer` ends as GSM8K's do: `#### 72`."""
    found = re.findall(r"####\s*(-?\d[\d,]*(?:\.\d+)?)", completion)
    return float(bool(found) and number(found[-1]) == number(row["answer"].rpartition("####")[2]))


def shaped(prompt, completion: str, row) -> float:
    """1 if there is a number behind `####` at all: gives a model that never writes one something to learn from."""
    return float(re.search(r"####\s*-?\d", completion) is not None)


def number(text: str) -> float:
    return float(text.strip().replace(",", ""))
