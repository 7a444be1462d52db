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
    all_faults: list[str] = []
    if in_json is not None:
        try:
            json_document: Any = json.loads(in_json, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            all_faults.append(f"reward.json is not JSON ({error}), so reward.txt counts"[:200])
        else:
            json_parts = _parts(json_document, weighted or {}, all_faults)
            text_reward = None if in_text is None else _number(_text(in_text), "reward.txt", all_faults)
            if (
                json_parts
                and text_reward is not None
                and (json_reward := total(json_parts, weighted or {})) != text_reward
            ):
                all_faults.append(
                    f"reward.json says {json_reward:g} and reward.txt {text_reward:g}: reward.json counts"
                )
            return VerifierRewards(json_parts, tuple(all_faults))
    if in_text is None:
        return VerifierRewards({}, (*all_faults, "the verifier left no reward file"))
    sole_reward = _number(_text(in_text), "reward.txt", all_faults)
    return VerifierRewards({} if sole_reward is None else {"reward": sole_reward}, tuple(all_faults))


def total(parts: Mapping[str, float], weighted: Mapping[str, float]) -> float:
    """The one number of several parts: their weighted sum if a task gives weights, else `reward`, else their mean."""
    if weighted:
        return sum(part_weight * parts.get(part_name, 0.0) for part_name, part_weight in weighted.items())
    return parts.get("reward", math.fsum(parts.values()) / max(len(parts), 1))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values_by_key = dict(pairs)
    if len(values_by_key) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return values_by_key


def _parts(document: Any, weighted: Mapping[str, float], faults: list[str]) -> dict[str, float]:
    if not isinstance(document, dict):
        part_reward = _number(document, "reward.json", faults)
        return {} if part_reward is None else {"reward": part_reward}
    document_parts = cast("dict[str, Any]", document)
    if len(document_parts) > _PARTS:
        faults.append(f"reward.json has {len(document_parts)} parts: at most {_PARTS} are read, so there is no reward")
        return {}
    reward_parts: dict[str, float] = {}
    missing_parts: list[str] = []
    for part_name, part_value in document_parts.items():
        part_reward = _number(part_value, f"the part {part_name[:_NAME]!r} of reward.json", faults)
        if part_reward is None:
            missing_parts.append(part_name)
        else:
            reward_parts[part_name[:_NAME]] = part_reward
    deciding_parts = (
        weighted.keys() if weighted else {"reward"} if "reward" in document_parts else document_parts.keys()
    )
    if not document_parts:
        faults.append("reward.json has no parts")
    if any(part_name in deciding_parts for part_name in missing_parts):
        faults.append("a part that decides is no number, so there is no reward")
        return {}
    return reward_parts


def _number(value: Any, where: str, faults: list[str]) -> float | None:
    """A finite number; None, and a fault, for anything else."""
    if isinstance(value, str):
        if (percent_match := _PERCENT.fullmatch(value)) is not None:
            faults.append(f"{where} is the text {value.strip()!r}: it counts as {float(percent_match[1]) / 100:g}")
            return float(percent_match[1]) / 100
        try:
            finite_number = float(value)
        except ValueError:
            finite_number = math.nan
        if math.isfinite(finite_number) and where != "reward.txt":
            faults.append(f"{where} is the text {value.strip()!r}: it counts as {finite_number:g}"[:200])
    elif isinstance(value, int | float):
        try:
            finite_number = float(value)
        except OverflowError:
            finite_number = math.inf
    else:
        finite_number = math.nan
    if math.isfinite(finite_number):
        return finite_number
    shown_value = value.strip() if isinstance(value, str) else value
    faults.append(f"{where} is {str(shown_value)[:80]!r} and no finite number")
    return None


def _text(data: bytes) -> str:
    return data.decode("utf-8-sig", "replace")
