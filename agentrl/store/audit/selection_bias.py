"""Whether what was trained is like what was played: lengths, and the gradient as far as rewards show it (law 5).

Owns the comparison of two sets of training episodes: all that left the buffer, and those of them that entered the loss.
Never knows which rule made the difference: orders of groups, close policies and deadlines all show here.

Groups without signal that were skipped are in neither set: their gradient is 0. Episodes that may still be trained are
in neither. One that was cut off while it ran counts with the length it had.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from agentrl.records import MemberRecord
from agentrl.store.buffer.no_signal import Returns, advantages
from agentrl.store.codec import unpack_record, unpack_task
from agentrl.store.databases.database import StorePart
from agentrl.store.episodes.groups import TRAIN, record_of, scored

_QUANTILES = {"p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two sets. `turns`, `tokens` (sampled) and `seconds` (first claim to end) describe its episodes'
    lengths: `mean`, `p25`, `p50`, `p75`, `p95`.

    An episode's advantage is the mean over its turns, before any scale; an episode that was not judged has none.
    `weighted_tokens` is the mean length weighted by |advantage|: tokens as the gradient counts them.
    `advantage_by_quartile` is the mean advantage of the shortest quarter of all episodes (in tokens), and so on to the
    longest. Equal numbers on both sides say that dropping did not turn the gradient towards a length. Everywhere nan
    for want of episodes."""

    episodes: int
    turns: Mapping[str, float]
    tokens: Mapping[str, float]
    seconds: Mapping[str, float]
    weighted_tokens: float
    advantage_by_quartile: tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBias:
    """All training episodes that left the buffer, and those of them that were trained."""

    admitted: Side
    trained: Side


class _Episode(NamedTuple):
    id: int
    group_id: int
    member: int
    turns: int
    tokens: int
    seconds: float
    trained: bool


class Bias(StorePart):
    """Compare what was played with what was trained."""

    def training_bias(self, returns: Returns) -> TrainingBias:
        """The comparison; `returns` says what an advantage is made of. Reads every ended episode: call it at the end
        of a run."""
        with self._db.read():
            rows = self._db.rows(
                "SELECT e.id, e.group_id, e.member, e.n_turns, e.n_tokens, e.ended_s - e.started_s,"
                " e.taken_step IS NOT NULL AND e.dropped IS NULL, e.late, e.stop_reason, e.outcome, e.outcomes,"
                " e.late = 1 AND e.dropped IS NULL AND e.taken_step IS NULL"
                " FROM episodes e JOIN groups g ON g.id = e.group_id WHERE g.purpose = ? AND e.stop_reason IS NOT NULL"
                " AND g.state IN ('taken', 'trained', 'expired', 'failed') AND (g.skipped_step IS NULL OR e.late = 1)"
                " ORDER BY e.group_id, e.member",
                (TRAIN,),
            )
            episodes: list[_Episode] = []
            late: defaultdict[int, dict[int, MemberRecord]] = defaultdict(dict)
            for *row, seconds, trained, is_late, stop_reason, outcome, outcomes, open_yet in rows:
                judged = scored(stop_reason, outcome)
                if open_yet and judged:
                    continue  # it may still be trained
                episodes.append(_Episode(*row, seconds=seconds or 0.0, trained=bool(trained)))
                if is_late and judged:
                    late[row[1]][row[2]] = record_of(self._db, row[0], outcome, outcomes)
            advantage = self._advantages({one.group_id for one in episodes}, late, returns)
        cuts = _quantiles([float(one.tokens) for one in episodes])
        borders = [cuts["p25"], cuts["p50"], cuts["p75"]]
        return TrainingBias(
            admitted=_side(episodes, advantage, borders),
            trained=_side([one for one in episodes if one.trained], advantage, borders),
        )

    def _advantages(
        self, groups: set[int], late: Mapping[int, Mapping[int, MemberRecord]], returns: Returns
    ) -> dict[tuple[int, int], tuple[float, float]]:
        """The mean advantage and mean |advantage| of each judged member, by group and member."""
        found: dict[tuple[int, int], tuple[float, float]] = {}
        for id, packed, task in self._db.execute("SELECT id, record, task FROM groups WHERE record IS NOT NULL"):
            if id in groups:
                of_env = returns.of(unpack_task(task).env)
                for member, own in advantages(unpack_record(packed), of_env, late.get(id)).items():
                    if own:
                        found[id, member] = fmean(own), fmean(map(abs, own))
        return found


def _side(
    episodes: Sequence[_Episode], advantage: Mapping[tuple[int, int], tuple[float, float]], borders: Sequence[float]
) -> Side:
    judged = [(one.tokens, *advantage[key]) for one in episodes if (key := (one.group_id, one.member)) in advantage]
    total = math.fsum(size for _, _, size in judged)
    quarters: list[list[float]] = [[], [], [], []]
    for tokens, mean, _ in judged:
        quarters[sum(tokens > border for border in borders)].append(mean)
    first, second, third, fourth = (fmean(own) if own else math.nan for own in quarters)
    return Side(
        episodes=len(episodes),
        turns=_quantiles([float(one.turns) for one in episodes]),
        tokens=_quantiles([float(one.tokens) for one in episodes]),
        seconds=_quantiles([one.seconds for one in episodes]),
        weighted_tokens=math.fsum(tokens * size for tokens, _, size in judged) / total if total else math.nan,
        advantage_by_quartile=(first, second, third, fourth),
    )


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    """The mean, and the smallest values that so many of all do not exceed."""
    if not values:
        return dict.fromkeys(("mean", *_QUANTILES), math.nan)
    ranked = sorted(values)
    return {"mean": fmean(ranked)} | {
        name: ranked[max(0, math.ceil(share * len(ranked)) - 1)] for name, share in _QUANTILES.items()
    }
