"""The reward files of a Harbor verifier: `reward.json`, else `reward.txt`, and the rules without one plain number.

    reward.json there, and JSON           it decides; a reward.txt that says another number is named
    reward.json not readable              named, and reward.txt decides
    {"reward": 1, "why": "fine"}          `reward` decides; a value that is no number is a remark, and is named
    {"correct": 1, "style": null}         without `reward` the parts decide, and one that is no number leaves no reward
    {"reward": 0, "reward": 1}            not readable: nobody can tell which of the two is meant
    "0.8", "80%"                          a text that is a number counts as it, a percentage as its share; both named
    true, false                           1 and 0
    NaN, Infinity, none of the above      no reward

No reward is 0 and never a win. The package `harbor` (0.26) reads `reward.json` first, too, and fails a trial whose file
holds anything but finite numbers. It is not used as the reader of tasks: it needs Python 3.12 and some thirty packages,
among them a web server, a client of a cloud database and litellm, to parse a TOML file, and what has to be decided
here (which box gets what, what a policy may forge) is not its question.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, cast

_PARTS: Final = 64  # keys of one reward.json
_NAME: Final = 100  # characters of a part's name
_PERCENT: Final = re.compile(r"\s*(\d{1,9}(?:\.\d{0,9})?)\s*%\s*")


@dataclass(frozen=True, slots=True)
class VerifierRewards:
    """The numbers by part, `reward` among them or not, and what was decided where the files were not plain."""

    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    faults: tuple[str, ...] = ()


def rewards_of(
    in_json: bytes | None, in_text: bytes | None, *, weighted: Mapping[str, float] | None = None
) -> VerifierRewards:
    """The rewards of the two files, None for one that is not there. `weighted` are the parts that decide if a task
    gives weights; then all others are remarks."""
    faults: list[str] = []
    if in_json is not None:
        try:
            document: Any = json.loads(in_json, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            faults.append(f"reward.json is not JSON ({error}), so reward.txt counts"[:200])
        else:
            parts = _parts(document, weighted or {}, faults)
            other = None if in_text is None else _number(_text(in_text), "reward.txt", faults)
            if parts and other is not None and (reward := total(parts, weighted or {})) != other:
                faults.append(f"reward.json says {reward:g} and reward.txt {other:g}: reward.json counts")
            return VerifierRewards(parts, tuple(faults))
    if in_text is None:
        return VerifierRewards({}, (*faults, "the verifier left no reward file"))
    number = _number(_text(in_text), "reward.txt", faults)
    return VerifierRewards({} if number is None else {"reward": number}, tuple(faults))


def total(parts: Mapping[str, float], weighted: Mapping[str, float]) -> float:
    """The one number of several parts: their weighted sum if a task gives weights, else `reward`, else their mean."""
    if weighted:
        return sum(weight * parts.get(name, 0.0) for name, weight in weighted.items())
    return parts.get("reward", math.fsum(parts.values()) / max(len(parts), 1))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return values


def _parts(document: Any, weighted: Mapping[str, float], faults: list[str]) -> dict[str, float]:
    if not isinstance(document, dict):
        number = _number(document, "reward.json", faults)
        return {} if number is None else {"reward": number}
    values = cast("dict[str, Any]", document)
    if len(values) > _PARTS:
        faults.append(f"reward.json has {len(values)} parts: at most {_PARTS} are read, so there is no reward")
        return {}
    numbers: dict[str, float] = {}
    missing: list[str] = []
    for name, value in values.items():
        number = _number(value, f"the part {name[:_NAME]!r} of reward.json", faults)
        if number is None:
            missing.append(name)
        else:
            numbers[name[:_NAME]] = number
    decide = weighted.keys() if weighted else {"reward"} if "reward" in values else values.keys()
    if not values:
        faults.append("reward.json has no parts")
    if any(name in decide for name in missing):
        faults.append("a part that decides is no number, so there is no reward")
        return {}
    return numbers


def _number(value: Any, where: str, faults: list[str]) -> float | None:
    """A finite number; None, and a fault, for anything else."""
    if isinstance(value, str):
        if (percent := _PERCENT.fullmatch(value)) is not None:
            faults.append(f"{where} is the text {value.strip()!r}: it counts as {float(percent[1]) / 100:g}")
            return float(percent[1]) / 100
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number) and where != "reward.txt":
            faults.append(f"{where} is the text {value.strip()!r}: it counts as {number:g}"[:200])
    elif isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
    else:
        number = math.nan
    if math.isfinite(number):
        return number
    shown = value.strip() if isinstance(value, str) else value
    faults.append(f"{where} is {str(shown)[:80]!r} and no finite number")
    return None


def _text(data: bytes) -> str:
    return data.decode("utf-8-sig", "replace")
