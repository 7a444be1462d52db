"""The rows of a long run, written into a run store by SQL: a million episodes in a minute instead of a day.

The rows are those that the store's own calls leave: groups of eight, two turns an episode, 16 groups a step, a
checkpoint every ten steps, one group in 100 lost to infrastructure and played again, two evaluations every hundred
steps. The last `KEPT_STEPS` steps still have their tokens.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable

from agentrl.records import MemberRecord, Task, Turn, VersionSpan
from agentrl.store import RunStore
from agentrl.store.codec import pack_record, pack_task, pack_tokens

SIZE, TURNS, GROUPS_PER_STEP, CHECKPOINT_EVERY, KEPT_STEPS = 8, 2, 16, 10, 8
TEXT = "I read the failing test first, then the function that it calls, and change the comparison in line 40. " * 3
ANSWER = json.dumps([{"role": "tool", "content": "3 passed, 1 failed: expected 12 but the function returned 11 " * 4}])
START = json.dumps([{"role": "user", "content": "Mend the function so that its tests pass. " * 6}])
TASK = pack_task(Task(index=0, env="agentrl/CodeRepair-v0", seed=0))
TOKENS = pack_tokens(
    Turn(
        index=0,
        parent=None,
        prompt_ids=tuple(range(100, 180)),
        token_ids=tuple(range(1000, 1064)),
        logprobs=tuple(-0.01 * n for n in range(64)),
        spans=(VersionSpan(1, 0, 64),),
        finish="stop",
        text=TEXT,
    )
)

_COUNT = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {})"
# Of group i: which step took it, whether infrastructure failed it, and whether an evaluation played it.
_STEP, _LOST, _EVALUATED = f"(i / {GROUPS_PER_STEP} + 1)", "(i % 100 = 50)", "(i % 1600 >= 1584)"


def write_history(store: RunStore, episodes: int, turns: int = TURNS) -> int:
    """Write ended training and evaluation into a new store, `episodes` episodes of so many turns in all; returns the
    last step, whose weights are confirmed. The caller plays on with the store's own calls."""
    steps = episodes // (SIZE * GROUPS_PER_STEP)
    groups = steps * GROUPS_PER_STEP
    connection = sqlite3.connect(store.path, isolation_level=None)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("BEGIN IMMEDIATE")
    run: Callable[..., sqlite3.Cursor] = connection.execute
    for step in range(steps + 1):
        run("INSERT INTO versions (step, attempt, minted_s, confirmed_s) VALUES (?, 1, ?, ?)", (step, step, step))
    run(
        f"{_COUNT.format(groups)} INSERT INTO groups (id, purpose, task, size, state, reason, started_step, admitted_s,"
        " started_s, closed_s, taken_step, record, n_scored, tokens_dropped)"
        f" SELECT i + 1, iif({_EVALUATED}, 'eval:held_out@' || {_STEP}, 'train'), ?1, {SIZE}, CASE WHEN {_EVALUATED}"
        f" THEN 'scored' WHEN {_LOST} THEN 'failed' WHEN {_STEP} <= ?2 THEN 'trained' ELSE 'taken' END,"
        f" iif({_LOST} AND NOT {_EVALUATED}, 'engine_failed', NULL), {_STEP} - 1, i, i, i + 1,"
        f" iif({_LOST} OR {_EVALUATED}, NULL, {_STEP}), ?3, {SIZE}, {_STEP} <= ?4 FROM n",
        (TASK, steps - steps % CHECKPOINT_EVERY, _record(turns), steps - KEPT_STEPS),
    )
    run("UPDATE groups SET replay_of = id - 1, replays = 1 WHERE purpose = 'train' AND id % 100 = 52")
    run(
        f"{_COUNT.format(groups * SIZE)}, e AS (SELECT i AS e, i / {SIZE} AS i FROM n) INSERT INTO episodes (id,"
        " group_id, member, evaluation, state, fence, start, stop_reason, outcome, success, started_s, ended_s,"
        f" n_turns, n_tokens, newest_step, taken_step) SELECT e + 1, i + 1, e % {SIZE}, {_EVALUATED}, 'finished', 1,"
        f" ?, iif({_LOST}, 'engine_failed', 'done'), iif({_LOST}, NULL, 1.0), 1, i, i + 1, {turns}, {64 * turns},"
        f" {_STEP} - 1, iif({_LOST} OR {_EVALUATED}, NULL, {_STEP}) FROM e",
        (START,),
    )
    run(
        "INSERT INTO turns (id, episode_id, trial, idx, parent, role, learns, finish, text, spans, n_prompt, n_tokens,"
        " oldest_step, started_s, ended_s)"
        f" SELECT (e.id - 1) * {turns} + k + 1, e.id, 0, k, iif(k, k - 1, NULL), 'policy', 1, 'stop', ?,"
        " '[[' || (newest_step + 1) || ',0,64]]', 80, 64, newest_step, started_s, ended_s"
        f" FROM episodes e CROSS JOIN ({_COUNT.format(turns)} SELECT i AS k FROM n)",
        (TEXT,),
    )
    run(f"INSERT INTO steps SELECT id, ?, 0.0, idx = {turns - 1}, 0, '{{}}' FROM turns", (ANSWER,))
    run(
        "INSERT INTO tokens SELECT t.id, ? FROM groups g JOIN episodes e ON e.group_id = g.id"
        " JOIN turns t ON t.episode_id = e.id WHERE g.tokens_dropped = 0 ORDER BY t.id",
        (TOKENS,),
    )
    run(
        "INSERT INTO lineage (episode_id, step, attempt, max_lag, taken_s)"
        " SELECT id, taken_step, 1, 4, ended_s FROM episodes WHERE taken_step IS NOT NULL"
    )
    run(
        f"{_COUNT.format(steps // CHECKPOINT_EVERY)} INSERT INTO checkpoints (step, version, path, attempt, saved_s)"
        f" SELECT (i + 1) * {CHECKPOINT_EVERY}, (i + 1) * {CHECKPOINT_EVERY} + 1, 'checkpoints', 1, i FROM n"
    )
    for kind in ("step", "engine", "worker"):
        run(
            f"{_COUNT.format(steps)} INSERT INTO metrics (kind, step, attempt, time_s, data) SELECT ?, i + 1, 1, i, ?"
            " FROM n",
            (kind, json.dumps({f"value_{k}": 0.125 * k for k in range(40)})),
        )
    run("INSERT INTO ending_counts SELECT 1, evaluation, stop_reason, COUNT(*) FROM episodes GROUP BY 2, 3")
    run("INSERT INTO outages (attempt, cause, began_s, episodes, well) VALUES (1, 'engine_failed', 0, 8, 1)")
    run("UPDATE meta SET value = ? WHERE key = 'next_task'", (str(groups),))
    connection.execute("COMMIT")
    connection.close()
    return steps


def _record(turns: int) -> str:
    """What the members of a closed group are judged against."""
    member = MemberRecord(outcome=1.0, outcomes={}, rewards={"policy": (0.0,) * turns})
    return pack_record(dict.fromkeys(range(SIZE), member))
