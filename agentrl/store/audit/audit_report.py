"""The report of an audit: what was counted, and each breach of a law. Knows no store."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, dataclass, field

_SHOWN = 1000  # violations listed at most; the counts are always complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One breach: the law it breaks (0: the store's own bookkeeping), its kind, and one line that says where."""

    law: int
    kind: str
    detail: str


@dataclass(slots=True)
class AuditReport:
    """What the audit found. `breaches` counts all violations by kind; `violations` lists at most the first 1000."""

    groups: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])  # purpose -> state -> groups
    episodes: dict[str, int] = field(default_factory=dict[str, int])  # state -> episodes
    turns: int = 0
    tokens: int = 0  # sampled, all trials and purposes
    turns_set_aside: int = 0  # of trials before a restart of their episode
    tokens_trained: int = 0  # sampled tokens of members in the lineage, within the lag bound of their take
    tokens_stale: int = 0  # of the same members, beyond the lag bound: left out of the loss
    max_lag_seen: int = 0  # among trained tokens
    attempt: int = 1
    drops: dict[str, int] = field(default_factory=dict[str, int])  # reason -> training groups
    breaches: Counter[str] = field(default_factory=Counter[str])
    violations: list[Violation] = field(default_factory=list[Violation])

    @property
    def ok(self) -> bool:
        """Whether no law is broken."""
        return not self.breaches

    def to_json(self) -> str:
        """The whole report as JSON. It lists every kind of breach, also those with count 0."""
        document = {"ok": self.ok, **asdict(self)}
        document["breaches"] = {kind: self.breaches.get(kind, 0) for kind in KINDS}
        return json.dumps(document, indent=2)

    def breach(self, kind: str, detail: str) -> None:
        """Note one violation of a kind named in `KINDS`."""
        self.breaches[kind] += 1
        if len(self.violations) < _SHOWN:
            self.violations.append(Violation(law=KINDS[kind], kind=kind, detail=detail))


KINDS = {
    "tokens_incomplete": 1,  # a sampled token without its id, version or log-prob
    "turns_lost": 2,  # a journaled turn, or the environment's answer to it, is missing
    "trained_twice": 2,  # more than one live lineage row for an episode
    "lineage_broken": 2,  # taken or trained without a lineage row, or the reverse; trained without a checkpoint
    "checkpoint_disagrees": 2,  # a checkpoint's folder lists other episodes than the lineage of its steps
    "fork_broken": 2,  # a fork that trains turns of its origin, has others than it, or began anew
    "trained_unfinished": 2,  # an episode in the lineage that had not ended
    "trained_unscored": 3,  # an episode in the lineage that is not scored, or has too few siblings to compare with
    "record_disagrees": 3,  # a group's record differs from its scored members (late ones left out)
    "episode_held": 4,  # an episode is held although it has ended or waits for no reward source
    "group_stuck": 4,  # an open group without open members, or a closed one with an open member that is not late
    "trained_stale": 5,  # an episode in the lineage with no token within the lag bound of its take
    "skipped_with_signal": 2,  # a group left as without signal that had some, or is not gone
    "drop_without_reason": 5,  # an expired or failed group without a reason
    "orphan_row": 0,  # a row whose owner does not exist
    "bookkeeping": 0,  # counters or summaries that disagree with the rows
    "file_damaged": 0,  # SQLite's own check of the file
}
"""Kind of breach -> the law it breaks."""
