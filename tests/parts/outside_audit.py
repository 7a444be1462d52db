"""An auditor of a run's store that shares no code with the store: it uses sqlite3, struct, zstandard and its own SQL;
for a store in PostgreSQL, on a copy of its tables in SQLite's memory.

It audits one run again and again, also while it goes on, and remembers: a token of one audit must be there unchanged
at the next, also if its turn was still under way; a score and a group's record must not change, and a fence must not
decrease. It computes from the raw rows what a step may have trained, and what a group's members are judged against.
Reads only; of `agentrl` it imports only who opens the store's rows, which imports nothing of it.
"""

from __future__ import annotations

import json
import math
import sqlite3
import struct
import zlib
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zstandard

from tests.parts import store_rows

_Place = tuple[int, int, int]  # episode, trial, index of a turn
_Tokens = tuple[tuple[int, ...], tuple[float, ...]]  # ids, log-probs
_Told = dict[tuple[str, str, int], float]  # member, role, number of its turn, 0 for the outcome -> reward
_NOT_ITS_DOING = "('engine_failed', 'sandbox_failed', 'env_failed', 'expired')"


@dataclass(slots=True)
class OutsideAuditor:
    """Audits the store at `path`. `turns` and `tokens` are the counts at the last look; `abandoned` counts the sampled
    tokens of trials that a restart of their episode left behind, of training episodes that expired, of groups that were
    restarted, and of turns that were given up amid their tokens; `at_stake` those of training groups that are not
    closed."""

    path: Path
    turns: int = 0
    tokens: int = 0
    abandoned: int = 0
    at_stake: int = 0
    _sums: dict[int, int] = field(default_factory=dict[int, int])  # turn -> checksum of its row
    _under_way: dict[_Place, _Tokens] = field(default_factory=dict["_Place", "_Tokens"])
    _scores: dict[tuple[int, str, int], float] = field(default_factory=dict[tuple[int, str, int], float])
    _records: dict[int, str] = field(default_factory=dict[int, str])  # group -> record
    _fences: dict[int, int] = field(default_factory=dict[int, int])  # episode -> fence
    _found: list[str] = field(default_factory=list[str])

    def look(self, *, ended: bool = False) -> list[str]:
        """The violations of laws, one line each. `ended`: the run is over, no episode may still run without a lease."""
        self._found = []
        with closing(store_rows.opened(self.path)) as db:
            self._law_1(db)
            self._turns_under_way(db)
            self._law_2(db)
            self._checkpoints(db)
            self._law_3(db)
            self._records_of_groups(db)
            self._reward_sources(db)
            self._law_5(db)
            self._law_5_of_tokens(db)
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
            " JOIN groups g ON g.id = e.group_id WHERE t.trial < e.trial"
            " OR (e.stop_reason = 'expired' AND NOT e.evaluation) OR g.reason = 'restarted'"
        ).fetchone()
        self.abandoned += sum(tokens for *_, tokens in _discarded(db))
        (self.at_stake,) = db.execute(
            "SELECT COALESCE(SUM(t.n_tokens), 0) FROM turns t JOIN episodes e ON e.id = t.episode_id"
            " AND e.trial = t.trial JOIN groups g ON g.id = e.group_id"
            " WHERE g.purpose = 'train' AND g.state IN ('waiting', 'running')"
        ).fetchone()
        self._none(
            db,
            "law 1: turns of an episode's trial are missing",
            "SELECT episode_id FROM turns GROUP BY episode_id, trial HAVING COUNT(*) <> MAX(idx) + 1",
        )

    def _turns_under_way(self, db: sqlite3.Connection) -> None:
        """The tokens of a turn under way have no gap, and are the beginning of the turn once it is journaled."""
        ended = "SELECT DISTINCT p.episode_id FROM partials p JOIN episodes e ON e.id = p.episode_id"
        self._none(db, "law 1: a turn under way of an ended episode", f"{ended} WHERE e.stop_reason IS NOT NULL")
        found: dict[_Place, _Tokens] = {}
        for episode, trial, index, at, n, data, turns in db.execute(
            "SELECT p.episode_id, e.trial, p.turn, p.at, p.n, p.data, (SELECT COUNT(*) FROM turns t WHERE t.episode_id"
            " = e.id AND t.trial = e.trial) FROM partials p JOIN episodes e ON e.id = p.episode_id ORDER BY 1, 4"
        ):
            place, (prompt,) = (episode, trial, index), struct.unpack_from("<I", data)
            ids, logprobs = found.get(place, ((), ()))
            if len(data) != 4 + 4 * (prompt + n) + 8 * n:
                self._found.append(f"law 1: turn {index} of episode {episode} under way: a blob of another length")
                continue
            values = struct.unpack_from(f"<{prompt + n}I{n}d", data, 4)
            if at != len(ids) or index != turns:
                self._found.append(f"law 1: turn {index} of episode {episode} under way: gap at token {len(ids)}")
            found[place] = (ids + values[prompt : prompt + n], logprobs + values[prompt + n :])
        now = dict(db.execute("SELECT id, trial FROM episodes WHERE stop_reason IS NULL"))
        given_up = {(episode, trial, turn) for episode, trial, turn, _ in _discarded(db)}
        for place, before in self._under_way.items():
            if place in given_up:
                continue  # said so, and counted
            after = found.get(place) or _journaled(db, place)
            if after is None and now.get(place[0]) != place[1]:
                continue  # the episode ended in the turn, or started anew
            if after is None or any(new[: len(old)] != old for old, new in zip(before, after, strict=True)):
                self._found.append(f"law 1: turn {place[2]} of episode {place[0]} lost tokens that it had")
        self._under_way = found

    def _law_2(self, db: sqlite3.Connection) -> None:
        """Each trained item is in the lineage once, and each item in the lineage was taken."""
        self._none(
            db,
            "law 2: episode trained twice",
            "SELECT episode_id FROM lineage WHERE undone_attempt IS NULL GROUP BY episode_id HAVING COUNT(*) > 1",
        )
        self._none(
            db,
            "law 2: episode in the lineage and not taken",
            "SELECT e.id FROM lineage l JOIN episodes e ON e.id = l.episode_id"
            " WHERE l.undone_attempt IS NULL AND e.taken_step IS NULL",
        )
        self._none(
            db,
            "law 2: a task is played again that was not lost, or twice for one loss: group",
            "SELECT r.id FROM groups r JOIN groups g ON g.id = r.replay_of WHERE r.id <= g.id OR r.task <> g.task"
            " OR g.state NOT IN ('expired', 'failed') OR r.replays <> g.replays + 1"
            " OR (SELECT COUNT(*) FROM groups s WHERE s.replay_of = g.id) > 1",
        )
        self._none(
            db,
            "law 2: a fork learns from turns of its origin: episode",
            "SELECT DISTINCT e.id FROM groups g JOIN episodes e ON e.group_id = g.id JOIN turns t"
            " ON t.episode_id = e.id WHERE t.idx < g.fork_turn AND (t.learns OR e.trial > 0)",
        )
        self._none(
            db,
            "law 2: skipped, and has not left: group",
            "SELECT id FROM groups WHERE skipped_step IS NOT NULL"
            " AND (state <> 'expired' OR reason IS NOT 'no_signal' OR record IS NULL)",
        )
        self._none(
            db,
            "law 2: trained, and had not ended: episode",
            "SELECT e.id FROM lineage l JOIN episodes e ON e.id = l.episode_id"
            " WHERE l.undone_attempt IS NULL AND e.stop_reason IS NULL",
        )

    def _checkpoints(self, db: sqlite3.Connection) -> None:
        """A checkpoint's folder lists the episodes of the lineage, and no group whose tokens are dropped may train."""
        self._none(
            db,
            "law 2: tokens dropped, and yet to be trained: group",
            "SELECT id FROM groups WHERE tokens_dropped AND purpose = 'train' AND state IN"
            " ('waiting', 'running', 'scored', 'taken')",
        )
        lost = {id for (id,) in db.execute("SELECT episode_id FROM lost_members")}
        for path, step in db.execute("SELECT path, step FROM checkpoints WHERE undone_attempt IS NULL"):
            try:
                state = json.loads((Path(path) / "state.json").read_text())
            except OSError:
                continue  # removed since
            listed = {id for ids in state["episodes"] for id in ids} - lost
            rows = db.execute(
                "SELECT episode_id FROM lineage WHERE undone_attempt IS NULL AND step > ? AND step <= ?",
                (state["previous_step"], step),
            )
            if listed != (live := {id for (id,) in rows}):
                self._found.append(f"law 2: checkpoint {step} and the lineage differ by episodes {listed ^ live}")

    def _law_3(self, db: sqlite3.Connection) -> None:
        """No failure that the policy could not have caused is in the loss."""
        scored = f"e.outcome IS NOT NULL AND e.stop_reason NOT IN {_NOT_ITS_DOING}"
        sql = f"SELECT e.id FROM lineage l JOIN episodes e ON e.id = l.episode_id WHERE NOT ({scored})"
        self._none(db, "law 3: trained, and not the policy's doing: episode", sql)

    def _records_of_groups(self, db: sqlite3.Connection) -> None:
        """A group's record has the outcomes and rewards of its scored members that were not late, and stays as it is;
        so the baseline of each trained member can be computed from raw rows."""
        records = dict(db.execute("SELECT id, record FROM groups WHERE record IS NOT NULL"))
        for id, before in self._records.items():
            if records.get(id) != before:
                self._found.append(f"law 3: the record of group {id} was changed")
        self._records = records
        self._none(
            db,
            "law 3: trained with fewer than two members to compare: group",
            "SELECT id FROM groups g WHERE state IN ('taken', 'trained') AND record IS NOT NULL"
            " AND (SELECT COUNT(*) FROM json_each(g.record)) < MIN(2, g.size)",
        )
        told = _told(db)
        for id, record in records.items():
            if not _same(recorded := _recorded(record), told.get(id, {})):
                self._found.append(f"law 3: group {id} recorded {recorded}, its rows say {told.get(id, {})}")

    def _reward_sources(self, db: sqlite3.Connection) -> None:
        """The first score of a source's version stays; who waits for a source has not ended and is held by nobody."""
        scores = {
            (t, s, v): value for t, s, v, value in db.execute("SELECT turn_id, source, version, value FROM rewards")
        }
        for (turn, source, version), value in self._scores.items():
            if scores.get((turn, source, version)) != value:
                self._found.append(f"law 3: the score of turn {turn} by {source} {version} was changed or lost")
        self._scores = scores
        self._none(
            db,
            "law 3: a score that is not finite: turn",
            "SELECT turn_id FROM rewards WHERE NOT (value BETWEEN -1e308 AND 1e308)",
        )
        self._none(
            db,
            "law 3: scored, and still waited for: turn",
            "SELECT u.turn_id FROM unscored u JOIN rewards r ON r.turn_id = u.turn_id AND r.source = u.source"
            " WHERE r.counts",
        )
        self._none(
            db,
            "law 3: a score counts that nobody could wait for: turn",
            "SELECT t.id FROM rewards r JOIN turns t ON t.id = r.turn_id JOIN episodes e ON e.id = t.episode_id"
            " WHERE r.counts AND (NOT t.learns OR e.evaluation)",
        )
        self._none(
            db,
            "law 4: waits for a source although it has ended: episode",
            "SELECT id FROM episodes WHERE stop_reason IS NOT NULL AND (id IN (SELECT episode_id FROM unscored)"
            " OR id IN (SELECT episode_id FROM endings))",
        )
        self._none(
            db,
            "law 4: held, and waits for no source: episode",
            "SELECT episode_id FROM endings WHERE episode_id NOT IN (SELECT episode_id FROM unscored)",
        )

    def _law_5(self, db: sqlite3.Connection) -> None:
        """No member is taken without any token young enough."""
        steps = dict(db.execute("SELECT version, step FROM versions"))
        found: dict[int, list[tuple[int, int, int]]] = {}
        for id, step, max_lag, spans in db.execute(
            "SELECT l.id, l.step, l.max_lag, t.spans FROM lineage l JOIN episodes e ON e.id = l.episode_id"
            " JOIN turns t ON t.episode_id = e.id AND t.trial = e.trial AND t.learns WHERE l.undone_attempt IS NULL"
            f" AND e.outcome IS NOT NULL AND e.stop_reason NOT IN {_NOT_ITS_DOING}"
        ):
            found.setdefault(id, []).extend(
                (step, max_lag, steps[version]) for version, *_ in json.loads(spans) if version in steps
            )
        for id, tokens in found.items():
            lags = [step - 1 - of - max_lag for step, max_lag, of in tokens]
            if lags and min(lags) > 0:
                self._found.append(f"law 5: lineage row {id} was taken beyond its lag")

    def _law_5_of_tokens(self, db: sqlite3.Connection) -> None:
        """A step trained exactly the tokens that its raw rows have within the lag bound, and counted the others."""
        steps = dict(db.execute("SELECT version, step FROM versions"))
        young, stale, oldest = Counter[int](), Counter[int](), dict[int, int]()
        for step, max_lag, trained, masked, spans in db.execute(
            "SELECT e.taken_step, l.max_lag, l.id IS NOT NULL, json_extract(s.info, '$.masked'), t.spans"
            " FROM episodes e LEFT JOIN lineage l ON l.episode_id = e.id AND l.undone_attempt IS NULL"
            " JOIN turns t ON t.episode_id = e.id AND t.trial = e.trial AND t.learns"
            " LEFT JOIN steps s ON s.turn_id = t.id WHERE e.taken_step IS NOT NULL"
        ):
            for version, start, end, *_ in json.loads(spans):
                lag = max(0, step - 1 - steps.get(version, step - 1))
                if trained and masked:
                    continue
                if not trained or lag > max_lag:  # not trained: it had no token young enough
                    stale[step] += end - start
                else:
                    young[step] += end - start
                    oldest[step] = max(oldest.get(step, 0), lag)
        whole = {step for (step,) in db.execute("SELECT step FROM lost_members")}
        for step, data in db.execute("SELECT step, data FROM metrics WHERE kind = 'step' AND undone_attempt IS NULL"):
            said = json.loads(data)
            if step in whole or "tokens_scored" not in said or "tokens_stale" not in said:
                continue
            for name, rows in (("tokens_scored", young), ("tokens_stale", stale)):
                if said[name] != rows[step]:
                    self._found.append(f"law 5: step {step} says {name} = {said[name]}, its rows say {rows[step]}")
            if said.get("lag_max", 0) > oldest.get(step, 0):
                self._found.append(f"law 5: step {step} trained a token of lag {said['lag_max']}, none is that old")

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


def _discarded(db: sqlite3.Connection) -> list[tuple[int, int, int, int]]:
    """Turns that were given up amid their tokens, and how many: episode, trial, turn, tokens."""
    return db.execute("SELECT episode_id, trial, turn, tokens FROM discarded").fetchall()


def _journaled(db: sqlite3.Connection, place: _Place) -> _Tokens | None:
    """The sampled tokens of a turn, None if it is not there or retention dropped them."""
    row = db.execute(
        "SELECT k.data FROM turns t JOIN tokens k ON k.turn_id = t.id WHERE t.episode_id = ? AND t.trial = ?"
        " AND t.idx = ?",
        place,
    ).fetchone()
    if row is None:
        return None
    whole = zstandard.ZstdDecompressor().decompress(row[0])
    width, prompt, n = struct.unpack_from("<BII", whole)
    values = struct.unpack_from(f"<{n}I{n}{'f' if width == 4 else 'd'}", whole, 9 + 4 * prompt)
    return values[:n], values[n:]


def _told(db: sqlite3.Connection) -> dict[int, _Told]:
    """The members of each closed group that judge, from raw rows. A number that cannot be known any more, since its
    source is not declared now, is nan."""
    told: dict[int, _Told] = {}
    places: dict[int, tuple[int, str]] = {}
    for id, group, member, outcome, outcomes in db.execute(
        "SELECT e.id, e.group_id, e.member, e.outcome, e.outcomes FROM episodes e JOIN groups g ON g.id = e.group_id"
        " WHERE g.record IS NOT NULL AND NOT e.late AND e.outcome IS NOT NULL"
        f" AND e.stop_reason NOT IN {_NOT_ITS_DOING}"
    ):
        places[id] = (group, str(member))
        told.setdefault(group, {})[str(member), "", 0] = outcome
        told[group] |= {(str(member), role, 0): own for role, own in json.loads(outcomes).items()}
    weights = dict(db.execute("SELECT source, weight FROM sources"))
    scored: dict[int, float] = {}
    for turn, source, value in db.execute("SELECT turn_id, source, value FROM rewards WHERE counts"):
        scored[turn] = scored.get(turn, 0.0) + weights.get(source, math.nan) * value
    acted: dict[tuple[int, str], int] = {}  # turns so far, of an episode and role
    for episode, turn, role, reward, others in db.execute(
        "SELECT t.episode_id, t.id, t.role, COALESCE(s.reward, 0.0), COALESCE(json_extract(s.info, '$.rewards'), '{}')"
        " FROM turns t JOIN episodes e ON e.id = t.episode_id AND e.trial = t.trial"
        " LEFT JOIN steps s ON s.turn_id = t.id ORDER BY t.episode_id, t.idx"
    ):
        if episode not in places:
            continue
        group, member = places[episode]
        for other, value in json.loads(others).items():
            if other != role and (n := acted.get((episode, other), 0)):
                told[group][member, other, n] += value
        n = acted[episode, role] = acted.get((episode, role), 0) + 1
        told[group][member, role, n] = reward + scored.get(turn, 0.0)
    return told


def _recorded(record: str) -> _Told:
    told: _Told = {}
    for member, recorded in json.loads(record).items():
        told[member, "", 0] = recorded["outcome"]
        told |= {(member, role, 0): own for role, own in recorded["outcomes"].items()}
        for role, rewards in recorded["rewards"].items():
            told |= {(member, role, n): reward for n, reward in enumerate(rewards, 1)}
    return told


def _same(one: _Told, other: _Told) -> bool:
    return one.keys() == other.keys() and all(
        math.isnan(number) or math.isclose(one[key], number, rel_tol=1e-9, abs_tol=1e-9)
        for key, number in other.items()
    )


def _tokens_wrong(data: bytes, n_prompt: int, n_tokens: int) -> str | None:
    """A blob has one byte (width of a log-prob), two counts, prompt ids, sampled ids, log-probs; little-endian. Named
    columns may follow: a name with its length before it, one byte of type, the number of bytes, the bytes."""
    whole = zstandard.ZstdDecompressor().decompress(data)
    width, prompt, sampled = struct.unpack_from("<BII", whole)
    if (prompt, sampled) != (n_prompt, n_tokens):
        return f"its row says {n_prompt} + {n_tokens} tokens, its blob {prompt} + {sampled}"
    end = 9 + 4 * (prompt + sampled) + width * sampled
    try:
        while end < len(whole):
            end += 1 + whole[end]
            end += 5 + int(struct.unpack_from("<I", whole, end + 1)[0])
    except struct.error:
        end = -1
    if len(whole) != end:
        return "its blob has another length than its counts say"
    logprobs = struct.unpack_from(f"<{sampled}{'f' if width == 4 else 'd'}", whole, 9 + 4 * (prompt + sampled))
    return None if all(map(math.isfinite, logprobs)) else "a log-prob is not finite"


def _spans_wrong(spans: list[list[Any]], n_tokens: int, versions: set[int] | None) -> str | None:
    """`versions` are the minted versions; None for a turn of a model that does not learn."""
    at = 0
    for version, start, end, *_ in spans:
        if start != at or end <= start:
            return f"its spans leave a gap or overlap at token {at}"
        if versions is not None and version not in versions:
            return f"version {version} was never minted"
        at = end
    return None if at == n_tokens else f"its spans cover {at} of {n_tokens} tokens"
