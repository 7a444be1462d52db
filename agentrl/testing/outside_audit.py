"""An auditor of a run's store that shares no code with the store: it uses sqlite3, struct, zstandard and its own SQL.

It audits one run again and again, also while it goes on, and remembers: a token of one audit must be there unchanged
at the next, and a fence must not decrease. Reads only; never imports anything from `agentrl`.
"""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import zlib
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

_BUSY_S = 120.0
_NOT_ITS_DOING = "('engine_failed', 'sandbox_failed', 'env_failed', 'expired')"


@dataclass(slots=True)
class OutsideAuditor:
    """Audits the store at `path`. `turns` and `tokens` are the counts at the last look; `abandoned` counts the sampled
    tokens of trials that a restart of their episode left behind."""

    path: Path
    turns: int = 0
    tokens: int = 0
    abandoned: int = 0
    _sums: dict[int, int] = field(default_factory=dict[int, int])  # turn -> checksum of its row
    _fences: dict[int, int] = field(default_factory=dict[int, int])  # episode -> fence
    _found: list[str] = field(default_factory=list[str])

    def look(self, *, ended: bool = False) -> list[str]:
        """The violations of laws, one line each. `ended`: the run is over, no episode may still run without a lease."""
        self._found = []
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True, timeout=_BUSY_S)) as db:
            db.execute("BEGIN")
            self._law_1(db)
            self._law_2(db)
            self._law_3(db)
            self._law_5(db)
            self._fenced(db)
            if ended:
                self._ended(db)
        return self._found

    def _none(self, db: sqlite3.Connection, what: str, sql: str) -> None:
        """Report each row of `sql` as a violation."""
        self._found += [f"{what}: {row[0]}" for row in db.execute(sql)]

    def _law_1(self, db: sqlite3.Connection) -> None:
        """No sampled token is lost or changed; each has an id, a log-prob, and a version that was minted."""
        versions = {version for (version,) in db.execute("SELECT version FROM versions")}
        sums: dict[int, int] = {}
        self.turns = self.tokens = 0
        rows = db.execute(
            "SELECT t.id, t.text, t.spans, t.n_prompt, t.n_tokens, t.learns, k.data, g.tokens_dropped FROM turns t"
            " JOIN episodes e ON e.id = t.episode_id JOIN groups g ON g.id = e.group_id"
            " LEFT JOIN tokens k ON k.turn_id = t.id ORDER BY t.id"
        )
        for id, text, spans, n_prompt, n_tokens, learns, data, dropped in rows:
            self.turns, self.tokens = self.turns + 1, self.tokens + n_tokens
            sums[id] = zlib.crc32(repr((text, spans, n_prompt, n_tokens)).encode())
            if data is None:
                if not dropped:
                    self._found.append(f"law 1: turn {id} has no tokens, and retention dropped none of its group")
            elif wrong := _tokens_wrong(data, n_prompt, n_tokens):
                self._found.append(f"law 1: turn {id}: {wrong}")
            if wrong := _spans_wrong(json.loads(spans), n_tokens, versions if learns else None):
                self._found.append(f"law 1: turn {id}: {wrong}")
        for id, before in self._sums.items():
            if sums.get(id) != before:
                self._found.append(f"law 1: turn {id} was {'changed' if id in sums else 'lost'}")
        self._sums = sums
        (self.abandoned,) = db.execute(
            "SELECT COALESCE(SUM(t.n_tokens), 0) FROM turns t JOIN episodes e ON e.id = t.episode_id"
            " WHERE t.trial < e.trial"
        ).fetchone()
        self._none(
            db,
            "law 1: turns of an episode's trial are missing",
            "SELECT episode_id FROM turns GROUP BY episode_id, trial HAVING COUNT(*) <> MAX(idx) + 1",
        )

    def _law_2(self, db: sqlite3.Connection) -> None:
        """Each trained item is in the lineage once, and each item in the lineage was taken."""
        member = _has(db, "lineage", "episode_id")
        key, table = ("episode_id", "episodes") if member else ("group_id", "groups")
        self._none(
            db,
            f"law 2: {key} trained twice",
            f"SELECT {key} FROM lineage WHERE undone_attempt IS NULL GROUP BY {key} HAVING COUNT(*) > 1",
        )
        taken = "x.taken_step IS NOT NULL" if member else "x.state IN ('taken', 'trained')"
        self._none(
            db,
            f"law 2: {key} in the lineage and not taken",
            f"SELECT x.id FROM lineage l JOIN {table} x ON x.id = l.{key}"
            f" WHERE l.undone_attempt IS NULL AND NOT ({taken})",
        )
        if not member:
            self._none(
                db,
                "law 2: group taken, and not in the lineage",
                "SELECT id FROM groups x WHERE state IN ('taken', 'trained')"
                " AND NOT EXISTS (SELECT 1 FROM lineage WHERE group_id = x.id AND undone_attempt IS NULL)",
            )
        if _has(db, "groups", "replay_of"):
            self._none(
                db,
                "law 2: a task is played again that was not lost, or twice for one loss: group",
                "SELECT r.id FROM groups r JOIN groups g ON g.id = r.replay_of WHERE r.id <= g.id OR r.task <> g.task"
                " OR g.state NOT IN ('expired', 'failed') OR r.replays <> g.replays + 1"
                " OR (SELECT COUNT(*) FROM groups s WHERE s.replay_of = g.id) > 1",
            )
        unended = "e.id = l.episode_id" if member else "e.group_id = l.group_id"
        self._none(
            db,
            "law 2: trained, and had not ended: episode",
            f"SELECT e.id FROM lineage l JOIN episodes e ON {unended}"
            " WHERE l.undone_attempt IS NULL AND e.stop_reason IS NULL",
        )

    def _law_3(self, db: sqlite3.Connection) -> None:
        """No failure that the policy could not have caused is in the loss."""
        scored = f"e.outcome IS NOT NULL AND e.stop_reason NOT IN {_NOT_ITS_DOING}"
        if _has(db, "lineage", "episode_id"):
            sql = f"SELECT e.id FROM lineage l JOIN episodes e ON e.id = l.episode_id WHERE NOT ({scored})"
            self._none(db, "law 3: trained, and not the policy's doing: episode", sql)
            return
        self._none(
            db,
            "law 3: trained with fewer than two scored members: group",
            "SELECT l.group_id FROM lineage l JOIN episodes e ON e.group_id = l.group_id JOIN groups g ON g.id ="
            f" l.group_id GROUP BY l.id HAVING SUM({scored}) < MIN(2, g.size)",
        )

    def _law_5(self, db: sqlite3.Connection) -> None:
        """No group is taken whose oldest scored token is too old; if members are trained on their own and old tokens
        leave the loss alone, no member without any token young enough."""
        steps = dict(db.execute("SELECT version, step FROM versions"))
        member = _has(db, "lineage", "episode_id")
        on = "e.id = l.episode_id" if member else "e.group_id = l.group_id"
        found: dict[int, list[tuple[int, int, int]]] = {}
        for id, step, max_lag, spans in db.execute(
            f"SELECT l.id, l.step, l.max_lag, t.spans FROM lineage l JOIN episodes e ON {on} JOIN turns t ON"
            " t.episode_id = e.id AND t.trial = e.trial AND t.learns WHERE l.undone_attempt IS NULL"
            f" AND e.outcome IS NOT NULL AND e.stop_reason NOT IN {_NOT_ITS_DOING}"
        ):
            found.setdefault(id, []).extend(
                (step, max_lag, steps[version]) for version, _, _ in json.loads(spans) if version in steps
            )
        for id, tokens in found.items():
            lags = [step - 1 - of - max_lag for step, max_lag, of in tokens]
            if lags and (min(lags) if member else max(lags)) > 0:
                self._found.append(f"law 5: lineage row {id} was taken beyond its lag")

    def _fenced(self, db: sqlite3.Connection) -> None:
        fences = dict(db.execute("SELECT id, fence FROM episodes"))
        for id, before in self._fences.items():
            if fences.get(id, -1) < before:
                self._found.append(f"fence of episode {id} fell from {before} to {fences.get(id)}")
        self._fences = fences

    def _ended(self, db: sqlite3.Connection) -> None:
        """A supervisor that stops may leave episodes in the state `running`, which the next one frees, but only with
        their leases."""
        self._none(
            db,
            "law 4: running, and held by nobody: episode",
            "SELECT id FROM episodes WHERE state = 'running' AND holder NOT IN (SELECT holder FROM leases)",
        )


def _has(db: sqlite3.Connection, table: str, column: str) -> bool:
    return any(row[1] == column for row in db.execute(f"PRAGMA table_info({table})"))


def _tokens_wrong(data: bytes, n_prompt: int, n_tokens: int) -> str | None:
    """A blob has one byte (width of a log-prob), two counts, prompt ids, sampled ids, log-probs; little-endian."""
    whole = zstandard.ZstdDecompressor().decompress(data)
    width, prompt, sampled = struct.unpack_from("<BII", whole)
    if (prompt, sampled) != (n_prompt, n_tokens):
        return f"its row says {n_prompt} + {n_tokens} tokens, its blob {prompt} + {sampled}"
    if len(whole) != 9 + 4 * (prompt + sampled) + width * sampled:
        return "its blob has another length than its counts say"
    logprobs = struct.unpack_from(f"<{sampled}{'f' if width == 4 else 'd'}", whole, 9 + 4 * (prompt + sampled))
    return None if all(map(math.isfinite, logprobs)) else "a log-prob is not finite"


def _spans_wrong(spans: list[list[Any]], n_tokens: int, versions: set[int] | None) -> str | None:
    """`versions` are the minted versions; None for a turn of a model that does not learn."""
    at = 0
    for version, start, end in spans:
        if start != at or end <= start:
            return f"its spans leave a gap or overlap at token {at}"
        if versions is not None and version not in versions:
            return f"version {version} was never minted"
        at = end
    return None if at == n_tokens else f"its spans cover {at} of {n_tokens} tokens"
