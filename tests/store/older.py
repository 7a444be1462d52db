"""Stores as older schemas left them, written row by row: no code of the store makes them."""

from __future__ import annotations

import json
import sqlite3
import struct
from pathlib import Path

import zstandard

from agentrl.store import schema

TOKENS = zstandard.compress(struct.pack("<BII3I2d", 8, 1, 2, 1, 2, 3, -1.0, -2.0))  # one of a prompt, two sampled


def older_store(path: Path, version: int, rows: str) -> None:
    """A store as the first `version` migrations leave it, holding `rows`, and whole tokens for their turns."""
    connection = sqlite3.connect(path)
    connection.executescript("".join(schema.MIGRATIONS[:version]))
    connection.executescript(
        f"PRAGMA user_version = {version}; PRAGMA application_id = {schema.APPLICATION_ID};"
        "INSERT INTO meta VALUES ('config', '{}'), ('attempt', '1'), ('next_task', '0');"
        "INSERT INTO versions VALUES (1, 0, NULL, 1, 0, 0, NULL), (2, 1, NULL, 1, 0, 0, NULL);" + rows
    )
    connection.execute("INSERT INTO tokens SELECT id, ? FROM turns", (TOKENS,))
    connection.commit()
    connection.close()


def old_group(id: int, state: str, taken_step: int | None, members: str) -> str:
    """Rows of a training group before the seventh schema: `members` has a letter for each, d(one) after one turn of two
    tokens, of steps 0 and 1, f(ailed) after the same, r(uns), w(aits). Member m of group g is episode 10 g + m."""
    taken = "NULL" if taken_step is None else str(taken_step)
    task = json.dumps({"index": 0, "env": "e", "seed": 0})
    sql = (
        "INSERT INTO groups (id, purpose, task, size, state, started_step, admitted_s, started_s, closed_s,"
        " oldest_step, taken_step)"
        f" VALUES ({id}, 'train', '{task}', {len(members)}, '{state}', 0, 0, 0, 0, 0, {taken});"
    )
    for member, how in enumerate(members):
        episode = 10 * id + member
        state = {"w": "waiting", "r": "running"}.get(how, "finished")
        row = f"({episode}, {id}, {member}, 0, '{state}')"
        sql += f"INSERT INTO episodes (id, group_id, member, evaluation, state) VALUES {row};"
        if how in "df":
            stop, outcome = ("done", str(member)) if how == "d" else ("env_failed", "NULL")
            sql += (
                f"UPDATE episodes SET stop_reason = '{stop}', outcome = {outcome}, n_turns = 1, n_tokens = 2"
                f" WHERE id = {episode};"
                "INSERT INTO turns (id, episode_id, trial, idx, role, finish, text, spans, n_prompt, n_tokens,"
                f" oldest_step, started_s, ended_s) VALUES ({episode}, {episode}, 0, 0, 'policy', 'stop', 'x',"
                " '[[1,0,1],[2,1,2]]', 1, 2, 0, 0, 0);"
                f"INSERT INTO steps VALUES ({episode}, '[]', 0.5, 1, 0, '{{}}');"
            )
    return sql
