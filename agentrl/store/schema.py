"""The run store's tables, and the migrations of older stores. Knows SQL, never what the rows are used for.

`PRAGMA user_version` holds the schema's number; migration k of `MIGRATIONS` (counted from 0) takes a store from version
k to k + 1, so a new store runs all of them. A store is made in one transaction: either it is whole or it is empty.

    meta         keys and values that the processes agree on: `run_values` has them all
    versions     every weight version ever minted, and the optimizer step that made it
    groups       one row per group of sibling episodes: task, purpose, state, reason; counted by triggers; `record`,
                 which its members are judged against, is written once when it closes; `replay_of` names the lost
                 group whose task this group plays again, as replay number `replays` of the task; a trigger notes
                 there that it was `played_again`; `skipped_step` is the step for which a group left without signal
    leases       which process holds a lease, and until when
    episodes     one row per member: its worker (holder, fence), how it ended, whether its group closed before it did
                 (late), the step in which it left the buffer, and why it left untrained (dropped)
    turns        one row per action of the policy, written before the environment sees it; `state` tells what it answers
    tokens       a turn's token ids and log-probs, packed; a table of their own, so that retention frees whole pages
    images       the images of messages, by digest: a message names them
    experts      the experts that a mixture of experts chose for a turn's tokens, packed, if the run keeps them
    steps        the environment's answer to a turn
    sources      the reward sources that a run declares: weight, deadline, rule for late scores
    rewards      scores of a turn, the first of each source's version; the environment's own reward is in steps
    score_counts how many values of a source count, kept by a trigger
    unscored     which turns a source has yet to score
    endings      the ending of an episode that waits for sources: it counts as running until they have scored it
    partials     the turn under way of a running episode, one row per write of new tokens
    snapshots    the newest state of a running episode's environment, if it gives one
    artifacts    the declared files of an agent's work after a turn, if a reward source tests them
    unsaved      since which turn, and why, a running episode's environment gives no snapshot
    imports      which group of another run came in as which group of this one
    imported_versions  the version of this run that stands for one of another's, whose tokens came in
    restarts     why and when an episode started anew; its earlier trial's turns stay, never trained
    discarded    how many tokens of an unfinished turn were given up, because the run does not go on from tokens
    outages      failures of one cause at one time, and how many episodes had ended well before
    quarantine   tasks that killed their workers, and are not admitted again
    lineage      which optimizer step trained which episode; at most one row per episode that is not undone
    checkpoints  the steps that the run can go back to
    lost_members episodes that a checkpoint trained, and that a loss of power or an older copy took from the store
    lost         the same for whole groups, from checkpoints of an older agentrl that trained groups
    metrics      measured values by kind and step; those that a rollback undid are flagged
"""

from __future__ import annotations

import sqlite3

from agentrl.errors import StoreError, StoreVersionError

FIRST_META = "INSERT INTO meta VALUES ('config', ?), ('attempt', '1'), ('next_task', '0')"
SET_META = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"

APPLICATION_ID = 0x6152_4C31  # "aRL1": tells our file from any other SQLite database

BYTES = ("tokens", "experts", "artifacts")
"""The tables of large arrays, by turn: what retention drops."""

_FIRST = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;

CREATE TABLE versions (
    version INTEGER PRIMARY KEY AUTOINCREMENT,
    step INTEGER NOT NULL,
    path TEXT,
    attempt INTEGER NOT NULL,
    minted_s REAL NOT NULL,
    confirmed_s REAL,
    undone_attempt INTEGER
) STRICT;

CREATE TABLE groups (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    purpose TEXT NOT NULL,
    task TEXT NOT NULL,
    size INTEGER NOT NULL CHECK (size > 0),
    state TEXT NOT NULL CHECK (state IN
        ('waiting', 'running', 'finished', 'scored', 'taken', 'trained', 'expired', 'failed')),
    reason TEXT,
    started_step INTEGER NOT NULL,
    admitted_s REAL NOT NULL,
    started_s REAL,
    closed_s REAL,
    oldest_step INTEGER,
    taken_step INTEGER,
    tokens_dropped INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX groups_by_state ON groups (purpose, state, id);
CREATE INDEX groups_with_tokens ON groups (taken_step) WHERE tokens_dropped = 0;

CREATE TABLE group_counts (
    purpose TEXT NOT NULL, state TEXT NOT NULL, n INTEGER NOT NULL, PRIMARY KEY (purpose, state)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER count_new_group AFTER INSERT ON groups BEGIN
    INSERT INTO group_counts VALUES (new.purpose, new.state, 1)
        ON CONFLICT (purpose, state) DO UPDATE SET n = group_counts.n + 1;
END;
CREATE TRIGGER count_group_state AFTER UPDATE OF state, purpose ON groups
WHEN old.state <> new.state OR old.purpose <> new.purpose BEGIN
    UPDATE group_counts SET n = n - 1 WHERE purpose = old.purpose AND state = old.state;
    INSERT INTO group_counts VALUES (new.purpose, new.state, 1)
        ON CONFLICT (purpose, state) DO UPDATE SET n = group_counts.n + 1;
END;

CREATE TABLE leases (
    holder TEXT PRIMARY KEY, worker TEXT NOT NULL, until_s REAL NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE episodes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    group_id INTEGER NOT NULL REFERENCES groups,
    member INTEGER NOT NULL,
    evaluation INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'running', 'finished', 'expired')),
    holder TEXT,
    fence INTEGER NOT NULL DEFAULT 0,
    trial INTEGER NOT NULL DEFAULT 0,
    start TEXT,
    stop_reason TEXT,
    outcome REAL,
    success INTEGER,
    detail TEXT NOT NULL DEFAULT '',
    started_s REAL,
    ended_s REAL,
    n_turns INTEGER NOT NULL DEFAULT 0,
    n_tokens INTEGER NOT NULL DEFAULT 0,
    oldest_step INTEGER,
    UNIQUE (group_id, member)
) STRICT;
CREATE INDEX episodes_waiting ON episodes (evaluation DESC, id) WHERE state = 'waiting';
CREATE INDEX episodes_running ON episodes (holder, evaluation, id) WHERE state = 'running';

CREATE INDEX episodes_failed ON episodes (id)
    WHERE stop_reason IN ('engine_failed', 'sandbox_failed', 'env_failed');
CREATE TABLE ending_counts (
    attempt INTEGER NOT NULL, evaluation INTEGER NOT NULL, stop_reason TEXT NOT NULL, n INTEGER NOT NULL,
    PRIMARY KEY (attempt, evaluation, stop_reason)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER count_ending AFTER UPDATE OF stop_reason ON episodes WHEN old.stop_reason IS NULL BEGIN
    INSERT INTO ending_counts
        SELECT CAST(value AS INTEGER), new.evaluation, new.stop_reason, 1 FROM meta WHERE key = 'attempt'
        ON CONFLICT (attempt, evaluation, stop_reason) DO UPDATE SET n = ending_counts.n + 1;
END;

CREATE TABLE turns (
    id INTEGER PRIMARY KEY,
    episode_id INTEGER NOT NULL REFERENCES episodes,
    trial INTEGER NOT NULL,
    idx INTEGER NOT NULL,
    parent INTEGER,
    role TEXT NOT NULL,
    finish TEXT NOT NULL,
    text ANY NOT NULL,
    spans TEXT NOT NULL,
    n_prompt INTEGER NOT NULL,
    n_tokens INTEGER NOT NULL,
    oldest_step INTEGER,
    started_s REAL NOT NULL,
    ended_s REAL NOT NULL,
    UNIQUE (episode_id, trial, idx)
) STRICT;

CREATE TABLE tokens (turn_id INTEGER PRIMARY KEY REFERENCES turns, data BLOB NOT NULL) STRICT;

CREATE TABLE steps (
    turn_id INTEGER PRIMARY KEY REFERENCES turns,
    observation TEXT NOT NULL,
    reward REAL NOT NULL,
    terminated INTEGER NOT NULL,
    truncated INTEGER NOT NULL,
    info TEXT NOT NULL
) STRICT;

CREATE TABLE restarts (
    episode_id INTEGER NOT NULL REFERENCES episodes,
    trial INTEGER NOT NULL,
    start TEXT,
    reason TEXT NOT NULL,
    time_s REAL NOT NULL,
    PRIMARY KEY (episode_id, trial)
) STRICT, WITHOUT ROWID;

CREATE TABLE lineage (
    id INTEGER PRIMARY KEY,
    group_id INTEGER NOT NULL REFERENCES groups,
    step INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    max_lag INTEGER NOT NULL,
    taken_s REAL NOT NULL,
    undone_attempt INTEGER
) STRICT;
CREATE UNIQUE INDEX trained_exactly_once ON lineage (group_id) WHERE undone_attempt IS NULL;
CREATE INDEX lineage_by_step ON lineage (step);

CREATE TABLE checkpoints (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    step INTEGER NOT NULL,
    version INTEGER NOT NULL REFERENCES versions,
    path TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    saved_s REAL NOT NULL,
    undone_attempt INTEGER
) STRICT;

CREATE TABLE metrics (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,
    step INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    time_s REAL NOT NULL,
    data TEXT NOT NULL,
    undone_attempt INTEGER
) STRICT;
CREATE INDEX metrics_by_kind ON metrics (kind, step);
"""

_ROLES = """
ALTER TABLE turns ADD COLUMN learns INTEGER NOT NULL DEFAULT 1;
ALTER TABLE episodes ADD COLUMN outcomes TEXT NOT NULL DEFAULT '{}';
"""

_EXPERTS = """
CREATE TABLE experts (turn_id INTEGER PRIMARY KEY REFERENCES turns, data BLOB NOT NULL) STRICT;
"""

_LOST = """
CREATE TABLE lost (group_id INTEGER PRIMARY KEY, step INTEGER NOT NULL, found_s REAL NOT NULL) STRICT;
"""

_DEATHS = """
ALTER TABLE episodes ADD COLUMN deaths INTEGER NOT NULL DEFAULT 0;
ALTER TABLE episodes ADD COLUMN died_at INTEGER;
CREATE INDEX episodes_suspected ON episodes (id) WHERE state = 'waiting' AND deaths > 0;
CREATE TABLE quarantine (
    task TEXT PRIMARY KEY, episode_id INTEGER NOT NULL REFERENCES episodes, reason TEXT NOT NULL, time_s REAL NOT NULL
) STRICT;
"""

_OUTAGES = """
CREATE TABLE outages (
    id INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL,
    cause TEXT NOT NULL,
    began_s REAL NOT NULL,
    episodes INTEGER NOT NULL,
    well INTEGER NOT NULL
) STRICT;
CREATE INDEX outages_by_attempt ON outages (attempt, cause, id);
"""

_PARTIALS = """
CREATE TABLE partials (
    episode_id INTEGER NOT NULL REFERENCES episodes,
    at INTEGER NOT NULL,
    n INTEGER NOT NULL,
    turn INTEGER NOT NULL,
    parent INTEGER,
    role TEXT NOT NULL,
    spans TEXT NOT NULL,
    started_s REAL NOT NULL,
    spent_s REAL NOT NULL,
    data BLOB NOT NULL,
    PRIMARY KEY (episode_id, at)
) STRICT, WITHOUT ROWID;
"""

_SNAPSHOTS = """
CREATE TABLE snapshots (
    episode_id INTEGER PRIMARY KEY REFERENCES episodes, turn INTEGER NOT NULL, seconds REAL NOT NULL, data BLOB NOT NULL
) STRICT;
"""

_SCORED = "outcome IS NOT NULL AND stop_reason NOT IN ('engine_failed', 'sandbox_failed', 'env_failed', 'expired')"

_MEMBERS = f"""
ALTER TABLE lineage RENAME TO lineage_of_groups;
DROP INDEX trained_exactly_once;
DROP INDEX lineage_by_step;
CREATE TABLE lineage (
    id INTEGER PRIMARY KEY,
    episode_id INTEGER NOT NULL REFERENCES episodes,
    step INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    max_lag INTEGER NOT NULL,
    taken_s REAL NOT NULL,
    undone_attempt INTEGER
) STRICT;
INSERT INTO lineage (episode_id, step, attempt, max_lag, taken_s, undone_attempt)
    SELECT e.id, l.step, l.attempt, l.max_lag, l.taken_s, l.undone_attempt
    FROM lineage_of_groups l JOIN episodes e ON e.group_id = l.group_id WHERE {_SCORED} ORDER BY l.id, e.id;
DROP TABLE lineage_of_groups;
CREATE UNIQUE INDEX trained_exactly_once ON lineage (episode_id) WHERE undone_attempt IS NULL;
CREATE INDEX lineage_by_step ON lineage (step);

ALTER TABLE episodes DROP COLUMN oldest_step;
ALTER TABLE episodes ADD COLUMN newest_step INTEGER;
ALTER TABLE episodes ADD COLUMN late INTEGER NOT NULL DEFAULT 0;
ALTER TABLE episodes ADD COLUMN taken_step INTEGER;
ALTER TABLE episodes ADD COLUMN dropped TEXT;
UPDATE episodes SET taken_step = (SELECT step FROM lineage WHERE episode_id = episodes.id AND undone_attempt IS NULL);
UPDATE episodes SET newest_step = (SELECT MAX(v.step) FROM turns t JOIN json_each(t.spans) s
    JOIN versions v ON v.version = json_extract(s.value, '$[0]')
    WHERE t.episode_id = episodes.id AND t.trial = episodes.trial AND t.learns) WHERE stop_reason IS NOT NULL;
CREATE INDEX episodes_late ON episodes (group_id) WHERE late = 1 AND taken_step IS NULL AND dropped IS NULL;

ALTER TABLE groups DROP COLUMN oldest_step;
ALTER TABLE groups ADD COLUMN record TEXT;
ALTER TABLE groups ADD COLUMN n_scored INTEGER NOT NULL DEFAULT 0;
UPDATE groups SET n_scored = (SELECT COUNT(*) FROM episodes WHERE group_id = groups.id AND {_SCORED});
CREATE INDEX groups_closable ON groups (n_scored) WHERE state = 'running' AND purpose = 'train';

CREATE TABLE lost_members (episode_id INTEGER PRIMARY KEY, step INTEGER NOT NULL, found_s REAL NOT NULL) STRICT;
"""

_REWARDS = """
CREATE TABLE sources (
    source TEXT PRIMARY KEY,
    version INTEGER NOT NULL,
    weight REAL NOT NULL,
    deadline_s REAL NOT NULL,
    late TEXT NOT NULL CHECK (late IN ('drop', 'neutral', 'partial'))
) STRICT, WITHOUT ROWID;
CREATE TABLE rewards (
    turn_id INTEGER NOT NULL REFERENCES turns,
    source TEXT NOT NULL,
    version INTEGER NOT NULL,
    value REAL NOT NULL,
    counts INTEGER NOT NULL,
    time_s REAL NOT NULL,
    took_s REAL NOT NULL,
    cost REAL NOT NULL,
    PRIMARY KEY (turn_id, source, version)
) STRICT, WITHOUT ROWID;
CREATE TABLE unscored (
    source TEXT NOT NULL,
    turn_id INTEGER NOT NULL REFERENCES turns,
    episode_id INTEGER NOT NULL REFERENCES episodes,
    PRIMARY KEY (source, turn_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX unscored_of_episode ON unscored (episode_id);
CREATE TABLE endings (
    episode_id INTEGER PRIMARY KEY REFERENCES episodes,
    time_s REAL NOT NULL,
    stop_reason TEXT NOT NULL,
    outcome REAL,
    success INTEGER,
    outcomes TEXT NOT NULL,
    detail TEXT NOT NULL
) STRICT;
"""

_SCORE_COUNTS = """
CREATE TABLE score_counts (source TEXT PRIMARY KEY, n INTEGER NOT NULL) STRICT, WITHOUT ROWID;
INSERT INTO score_counts SELECT source, COUNT(*) FROM rewards WHERE counts = 1 GROUP BY source;
CREATE TRIGGER count_score AFTER INSERT ON rewards WHEN new.counts = 1 BEGIN
    INSERT INTO score_counts VALUES (new.source, 1) ON CONFLICT (source) DO UPDATE SET n = score_counts.n + 1;
END;
"""

_REPLAYS = """
ALTER TABLE groups ADD COLUMN replays INTEGER NOT NULL DEFAULT 0;
ALTER TABLE groups ADD COLUMN replay_of INTEGER REFERENCES groups;
CREATE UNIQUE INDEX played_again_once ON groups (replay_of) WHERE replay_of IS NOT NULL;
CREATE INDEX groups_lost ON groups (id) WHERE purpose = 'train' AND state IN ('expired', 'failed')
    AND reason IN ('engine_failed', 'sandbox_failed', 'env_failed', 'deadline');
"""

# Every call of a running run stays as quick with a million ended episodes as with none: each of its look-ups has an
# index that holds only what is open, or begins with the step that it asks for.
_LOOKUPS = """
CREATE INDEX groups_running ON groups (started_s) WHERE state = 'running';
CREATE INDEX groups_taken ON groups (taken_step) WHERE taken_step IS NOT NULL;
CREATE INDEX groups_evaluating ON groups (started_step) WHERE purpose <> 'train';
CREATE INDEX episodes_taken ON episodes (taken_step) WHERE taken_step IS NOT NULL;
CREATE INDEX versions_by_step ON versions (step);
CREATE INDEX checkpoints_by_step ON checkpoints (step);
CREATE INDEX metrics_by_step ON metrics (step);
ALTER TABLE groups ADD COLUMN played_again INTEGER NOT NULL DEFAULT 0;
UPDATE groups SET played_again = 1 WHERE id IN (SELECT replay_of FROM groups WHERE replay_of IS NOT NULL);
CREATE TRIGGER note_replay AFTER UPDATE OF replay_of ON groups BEGIN
    UPDATE groups SET played_again = 1 WHERE id = new.replay_of;
END;
DROP INDEX groups_lost;
CREATE INDEX groups_lost ON groups (replays, id) WHERE purpose = 'train' AND state IN ('expired', 'failed')
    AND reason IN ('engine_failed', 'sandbox_failed', 'env_failed', 'deadline') AND played_again = 0;
"""

_SKIPPED = """
ALTER TABLE groups ADD COLUMN skipped_step INTEGER;
CREATE INDEX groups_skipped ON groups (skipped_step) WHERE skipped_step IS NOT NULL;
"""

_UNSAVED = """
CREATE TABLE unsaved (
    episode_id INTEGER PRIMARY KEY REFERENCES episodes, turn INTEGER NOT NULL, reason TEXT NOT NULL
) STRICT;
"""

_FORKS = """
ALTER TABLE groups ADD COLUMN fork_of INTEGER REFERENCES episodes;
ALTER TABLE groups ADD COLUMN fork_trial INTEGER;
ALTER TABLE groups ADD COLUMN fork_turn INTEGER;
"""

_IMPORTS = """
CREATE TABLE imports (
    run TEXT NOT NULL, group_there INTEGER NOT NULL, group_id INTEGER NOT NULL REFERENCES groups, time_s REAL NOT NULL,
    PRIMARY KEY (run, group_there)
) STRICT, WITHOUT ROWID;
CREATE TABLE imported_versions (
    run TEXT NOT NULL, version_there INTEGER NOT NULL, version INTEGER NOT NULL REFERENCES versions,
    PRIMARY KEY (run, version_there)
) STRICT, WITHOUT ROWID;
"""

_ARTIFACTS = """
CREATE TABLE artifacts (turn_id INTEGER PRIMARY KEY REFERENCES turns, data BLOB NOT NULL) STRICT;
"""

_DISCARDED = """
CREATE TABLE discarded (
    episode_id INTEGER NOT NULL REFERENCES episodes, trial INTEGER NOT NULL, turn INTEGER NOT NULL,
    tokens INTEGER NOT NULL, time_s REAL NOT NULL
) STRICT;
"""

_STATES = """
ALTER TABLE turns ADD COLUMN state INTEGER;
"""

# Only turns of a run with several roles are in it.
_ROLE_LOOKUP = """
CREATE INDEX turns_of_roles ON turns (role, episode_id, trial) WHERE role <> 'policy';
"""

# Images of messages, by the SHA-256 of their bytes: a message has `sha256:` and the digest in the place of the data.
_IMAGES = """
CREATE TABLE images (digest TEXT NOT NULL PRIMARY KEY, data BLOB NOT NULL) STRICT, WITHOUT ROWID;
"""

MIGRATIONS: tuple[str, ...] = (
    _FIRST,
    _ROLES,
    _EXPERTS,
    _LOST,
    _DEATHS,
    _OUTAGES,
    _PARTIALS,
    _SNAPSHOTS,
    _MEMBERS,
    _REWARDS,
    _SCORE_COUNTS,
    _REPLAYS,
    _LOOKUPS,
    _SKIPPED,
    _UNSAVED,
    _FORKS,
    _IMPORTS,
    _ARTIFACTS,
    _DISCARDED,
    _STATES,
    _ROLE_LOOKUP,
    _IMAGES,
)
SCHEMA_VERSION = len(MIGRATIONS)


def read_version(connection: sqlite3.Connection, path: str) -> int:
    """The schema version of an open database, 0 if it holds no store yet.

    Raises StoreVersionError if a newer agentrl wrote it, StoreError if it is not a run store at all."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    application = int(connection.execute("PRAGMA application_id").fetchone()[0])
    empty = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0] == 0
    if application != APPLICATION_ID and not empty:
        raise StoreError(f"{path} is an SQLite database, but not a run store of agentrl")
    if version > SCHEMA_VERSION:
        raise StoreVersionError(
            f"{path} has store schema {version}, this agentrl reads up to {SCHEMA_VERSION}: upgrade agentrl"
        )
    return version


def migrate(connection: sqlite3.Connection, version: int) -> None:
    """Bring a store from schema `version` to the newest. The caller holds a write transaction and commits it."""
    for statement in statements(version):
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def statements(version: int) -> list[str]:
    """What takes a store from schema `version` to the newest, statement by statement. `executescript` would do, but it
    commits the transaction it is called in."""
    statements: list[str] = []
    lines: list[str] = []
    for line in "\n".join(MIGRATIONS[version:]).splitlines():
        lines.append(line)
        text = "\n".join(lines).strip()
        if text and sqlite3.complete_statement(text):
            statements.append(text)
            lines = []
    return statements
