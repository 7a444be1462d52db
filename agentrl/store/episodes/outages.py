"""Failures of one cause at one time are one outage: an engine that hangs fails a hundred episodes, and counts once.

A failure belongs to the latest outage of its cause (its stop reason) if its episode's last sign of life was before that
outage began, or if the outage began less than `OUTAGE_S` ago. The second rule holds only after an episode of this
attempt ended well: a run that never worked is not in an outage, and its user should soon read why.

A failure that names the place in somebody's code which raised it is no outage: it counts by itself, as RAISED.
"""

from __future__ import annotations

from agentrl.errors import split_place
from agentrl.records import StopReason
from agentrl.store.databases.database import Database

OUTAGE_S = 30.0
RAISED = "raised"
FAILURES = (StopReason.ENGINE_FAILED, StopReason.SANDBOX_FAILED, StopReason.ENV_FAILED)


def note_failure(db: Database, episode_id: int, cause: StopReason, detail: str, now: float) -> None:
    """Count an episode that failed by `cause`, with its `detail` in one line: in its outage, in a new one, or by
    itself. Inside a transaction."""
    attempt, well = ended_well(db)
    insert = "INSERT INTO outages (attempt, cause, began_s, episodes, well) VALUES (?, ?, ?, 1, ?)"
    if split_place(detail)[1]:
        db.execute(insert, (attempt, RAISED, now, well))
        return
    latest = db.row(
        "SELECT id, began_s FROM outages WHERE attempt = ? AND cause = ? ORDER BY id DESC LIMIT 1", (attempt, cause)
    )
    alive = db.row(
        "SELECT e.started_s, MAX(t.ended_s) FROM episodes e"
        " LEFT JOIN turns t ON t.episode_id = e.id AND t.trial = e.trial WHERE e.id = ? GROUP BY e.id",
        (episode_id,),
    )
    assert alive is not None
    started_s, turned_s = alive
    alive_s = max(now if started_s is None else started_s, turned_s or 0.0)
    if latest is not None and (alive_s < latest[1] or (well and now - latest[1] < OUTAGE_S)):
        db.execute("UPDATE outages SET episodes = episodes + 1 WHERE id = ?", (latest[0],))
    else:
        db.execute(insert, (attempt, cause, now, well))


def ended_well(db: Database) -> tuple[int, int]:
    """The current attempt, and how many of its episodes the policy or its environment ended."""
    rows = db.rows(
        "SELECT m.value, c.stop_reason, c.n FROM meta m LEFT JOIN ending_counts c ON c.attempt = CAST(m.value AS"
        " INTEGER) WHERE m.key = 'attempt'"
    )
    return int(rows[0][0]), sum(n for _, reason, n in rows if reason is not None and StopReason(reason).by_policy)
