-- The tables of a run store, as PostgreSQL reads them: those of `schema.sql`, which says what they are for, with the
-- same columns, constraints, indexes and triggers. A test holds the two texts together. What is different here:
--
-- - Texts sort byte by byte, as SQLite's do (COLLATE "C"). Numbers of rows come from sequences.
-- - References are DEFERRABLE, since a copy of a store writes rows in any order. Those of the journal (`turns`, `steps`
--   and the large arrays) are left out: to check one the server locks the row that it names, and the journal has just
--   looked at that row under its fence.
-- - The large arrays are in parts (`partitions.py`), and not compressed: they are packed already.
-- - The tables at the end, and functions that SQLite has of its own.

-- Functions that our statements call, and that only SQLite has
CREATE FUNCTION iif(boolean, anycompatible, anycompatible) RETURNS anycompatible LANGUAGE sql IMMUTABLE
    AS 'SELECT CASE WHEN $1 THEN $2 ELSE $3 END';
CREATE AGGREGATE total(double precision) (sfunc = float8pl, stype = double precision, initcond = '0');
CREATE FUNCTION json_extract(text, text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
    SELECT NULLIF((CASE WHEN $2 LIKE '$[%' THEN $1::json -> trim('$[]' FROM $2)::integer
                   ELSE $1::json -> substr($2, 3) END)::text, 'null') $$;
CREATE FUNCTION json_each(text) RETURNS TABLE (value text) LANGUAGE sql IMMUTABLE
    AS 'SELECT value::text FROM json_array_elements($1::json)';

-- The run
CREATE TABLE meta (key TEXT COLLATE "C" PRIMARY KEY, value TEXT COLLATE "C" NOT NULL);

CREATE TABLE versions (
    version BIGSERIAL PRIMARY KEY,
    step BIGINT NOT NULL,
    path TEXT COLLATE "C",
    attempt BIGINT NOT NULL,
    minted_s DOUBLE PRECISION NOT NULL,
    confirmed_s DOUBLE PRECISION,
    undone_attempt BIGINT
);
CREATE INDEX versions_by_step ON versions (step);

CREATE TABLE metrics (
    id BIGSERIAL PRIMARY KEY,
    kind TEXT COLLATE "C" NOT NULL,
    step BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    time_s DOUBLE PRECISION NOT NULL,
    data TEXT COLLATE "C" NOT NULL,
    undone_attempt BIGINT
);
CREATE INDEX metrics_by_kind ON metrics (kind, step);
CREATE INDEX metrics_by_step ON metrics (step);

-- Groups and episodes
CREATE TABLE groups (
    id BIGSERIAL PRIMARY KEY,
    purpose TEXT COLLATE "C" NOT NULL,
    task TEXT COLLATE "C" NOT NULL,
    size BIGINT NOT NULL CHECK (size > 0),
    state TEXT COLLATE "C" NOT NULL CHECK (state IN
        ('waiting', 'running', 'scored', 'taken', 'trained', 'expired', 'failed')),
    reason TEXT COLLATE "C",
    started_step BIGINT NOT NULL,
    admitted_s DOUBLE PRECISION NOT NULL,
    started_s DOUBLE PRECISION,
    closed_s DOUBLE PRECISION,
    taken_step BIGINT,
    skipped_step BIGINT,
    record TEXT COLLATE "C",
    n_scored BIGINT NOT NULL DEFAULT 0,
    tokens_dropped BIGINT NOT NULL DEFAULT 0,
    replay_of BIGINT REFERENCES groups DEFERRABLE,
    replays BIGINT NOT NULL DEFAULT 0,
    played_again BIGINT NOT NULL DEFAULT 0,
    fork_of BIGINT,
    fork_trial BIGINT,
    fork_turn BIGINT
);
CREATE INDEX groups_by_state ON groups (purpose, state, id);
CREATE INDEX groups_running ON groups (started_s) WHERE state = 'running';
CREATE INDEX groups_closable ON groups (n_scored) WHERE state = 'running' AND purpose = 'train';
CREATE INDEX groups_taken ON groups (taken_step) WHERE taken_step IS NOT NULL;
CREATE INDEX groups_skipped ON groups (skipped_step) WHERE skipped_step IS NOT NULL;
CREATE INDEX groups_evaluating ON groups (started_step) WHERE purpose <> 'train';
CREATE INDEX groups_with_tokens ON groups (taken_step) WHERE tokens_dropped = 0;
CREATE INDEX groups_lost ON groups (replays, id) WHERE purpose = 'train' AND state IN ('expired', 'failed')
    AND reason IN ('engine_failed', 'sandbox_failed', 'env_failed', 'deadline') AND played_again = 0;
CREATE UNIQUE INDEX played_again_once ON groups (replay_of) WHERE replay_of IS NOT NULL;
CREATE FUNCTION note_replay() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    UPDATE groups SET played_again = 1 WHERE id = new.replay_of;
    RETURN NULL;
END $$;
CREATE TRIGGER note_replay AFTER UPDATE OF replay_of ON groups FOR EACH ROW EXECUTE FUNCTION note_replay();

CREATE TABLE group_counts (
    purpose TEXT COLLATE "C" NOT NULL, state TEXT COLLATE "C" NOT NULL, n BIGINT NOT NULL, PRIMARY KEY (purpose, state)
);
CREATE FUNCTION count_new_group() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO group_counts VALUES (new.purpose, new.state, 1)
        ON CONFLICT (purpose, state) DO UPDATE SET n = group_counts.n + 1;
    RETURN NULL;
END $$;
CREATE TRIGGER count_new_group AFTER INSERT ON groups FOR EACH ROW EXECUTE FUNCTION count_new_group();
CREATE FUNCTION count_group_state() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    UPDATE group_counts SET n = n - 1 WHERE purpose = old.purpose AND state = old.state;
    INSERT INTO group_counts VALUES (new.purpose, new.state, 1)
        ON CONFLICT (purpose, state) DO UPDATE SET n = group_counts.n + 1;
    RETURN NULL;
END $$;
CREATE TRIGGER count_group_state AFTER UPDATE OF state, purpose ON groups FOR EACH ROW
    WHEN (old.state <> new.state OR old.purpose <> new.purpose) EXECUTE FUNCTION count_group_state();

CREATE TABLE leases (
    holder TEXT COLLATE "C" PRIMARY KEY, worker TEXT COLLATE "C" NOT NULL, until_s DOUBLE PRECISION NOT NULL
);

CREATE TABLE episodes (
    id BIGSERIAL PRIMARY KEY,
    group_id BIGINT NOT NULL REFERENCES groups DEFERRABLE,
    member BIGINT NOT NULL,
    evaluation BIGINT NOT NULL,
    state TEXT COLLATE "C" NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'running', 'finished', 'expired')),
    holder TEXT COLLATE "C",
    fence BIGINT NOT NULL DEFAULT 0,
    trial BIGINT NOT NULL DEFAULT 0,
    start TEXT COLLATE "C",
    tools TEXT COLLATE "C",
    stop_reason TEXT COLLATE "C",
    outcome DOUBLE PRECISION,
    outcomes TEXT COLLATE "C" NOT NULL DEFAULT '{}',
    success BIGINT,
    detail TEXT COLLATE "C" NOT NULL DEFAULT '',
    started_s DOUBLE PRECISION,
    ended_s DOUBLE PRECISION,
    n_turns BIGINT NOT NULL DEFAULT 0,
    n_tokens BIGINT NOT NULL DEFAULT 0,
    newest_step BIGINT,
    late BIGINT NOT NULL DEFAULT 0,
    taken_step BIGINT,
    dropped TEXT COLLATE "C",
    deaths BIGINT NOT NULL DEFAULT 0,
    died_at BIGINT,
    UNIQUE (group_id, member)
);
ALTER TABLE groups ADD FOREIGN KEY (fork_of) REFERENCES episodes DEFERRABLE;
CREATE INDEX episodes_waiting ON episodes (evaluation DESC, id) WHERE state = 'waiting';
CREATE INDEX episodes_suspected ON episodes (id) WHERE state = 'waiting' AND deaths > 0;
CREATE INDEX episodes_running ON episodes (holder, evaluation, id) WHERE state = 'running';
CREATE INDEX episodes_late ON episodes (group_id) WHERE late = 1 AND taken_step IS NULL AND dropped IS NULL;
CREATE INDEX episodes_taken ON episodes (taken_step) WHERE taken_step IS NOT NULL;
CREATE INDEX episodes_failed ON episodes (id)
    WHERE stop_reason IN ('engine_failed', 'sandbox_failed', 'env_failed');

CREATE TABLE ending_counts (
    attempt BIGINT NOT NULL, evaluation BIGINT NOT NULL, stop_reason TEXT COLLATE "C" NOT NULL, n BIGINT NOT NULL,
    PRIMARY KEY (attempt, evaluation, stop_reason)
);
CREATE FUNCTION count_ending() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO ending_counts
        SELECT CAST(value AS BIGINT), new.evaluation, new.stop_reason, 1 FROM meta WHERE key = 'attempt'
        ON CONFLICT (attempt, evaluation, stop_reason) DO UPDATE SET n = ending_counts.n + 1;
    RETURN NULL;
END $$;
CREATE TRIGGER count_ending AFTER UPDATE OF stop_reason ON episodes FOR EACH ROW
    WHEN (old.stop_reason IS NULL) EXECUTE FUNCTION count_ending();

CREATE TABLE tool_sets (digest TEXT COLLATE "C" NOT NULL PRIMARY KEY, data TEXT COLLATE "C" NOT NULL);

CREATE TABLE restarts (
    episode_id BIGINT NOT NULL REFERENCES episodes DEFERRABLE,
    trial BIGINT NOT NULL,
    start TEXT COLLATE "C",
    reason TEXT COLLATE "C" NOT NULL,
    time_s DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (episode_id, trial)
);

-- The journal
CREATE TABLE turns (
    id BIGSERIAL PRIMARY KEY,
    episode_id BIGINT NOT NULL,
    trial BIGINT NOT NULL,
    idx BIGINT NOT NULL,
    parent BIGINT,
    role TEXT COLLATE "C" NOT NULL,
    learns BIGINT NOT NULL,
    finish TEXT COLLATE "C" NOT NULL,
    text BYTEA NOT NULL,
    spans TEXT COLLATE "C" NOT NULL,
    n_prompt BIGINT NOT NULL,
    n_tokens BIGINT NOT NULL,
    oldest_step BIGINT,
    state BIGINT,
    started_s DOUBLE PRECISION NOT NULL,
    ended_s DOUBLE PRECISION NOT NULL,
    UNIQUE (episode_id, trial, idx)
);
CREATE INDEX turns_of_roles ON turns (role, episode_id, trial) WHERE role <> 'policy';

CREATE TABLE tokens (turn_id BIGINT PRIMARY KEY, data BYTEA NOT NULL) PARTITION BY RANGE (turn_id);
ALTER TABLE tokens ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE TABLE experts (turn_id BIGINT PRIMARY KEY, data BYTEA NOT NULL) PARTITION BY RANGE (turn_id);
ALTER TABLE experts ALTER COLUMN data SET STORAGE EXTERNAL;
CREATE TABLE artifacts (turn_id BIGINT PRIMARY KEY, data BYTEA NOT NULL) PARTITION BY RANGE (turn_id);
ALTER TABLE artifacts ALTER COLUMN data SET STORAGE EXTERNAL;

CREATE TABLE steps (
    turn_id BIGINT PRIMARY KEY,
    observation TEXT COLLATE "C" NOT NULL,
    reward DOUBLE PRECISION NOT NULL,
    terminated BIGINT NOT NULL,
    truncated BIGINT NOT NULL,
    info TEXT COLLATE "C" NOT NULL
);

CREATE TABLE images (digest TEXT COLLATE "C" NOT NULL PRIMARY KEY, data BYTEA NOT NULL);

CREATE TABLE partials (
    episode_id BIGINT NOT NULL REFERENCES episodes DEFERRABLE,
    at BIGINT NOT NULL,
    n BIGINT NOT NULL,
    turn BIGINT NOT NULL,
    parent BIGINT,
    role TEXT COLLATE "C" NOT NULL,
    spans TEXT COLLATE "C" NOT NULL,
    started_s DOUBLE PRECISION NOT NULL,
    spent_s DOUBLE PRECISION NOT NULL,
    data BYTEA NOT NULL,
    PRIMARY KEY (episode_id, at)
);

CREATE TABLE discarded (
    episode_id BIGINT NOT NULL REFERENCES episodes DEFERRABLE, trial BIGINT NOT NULL, turn BIGINT NOT NULL,
    tokens BIGINT NOT NULL, time_s DOUBLE PRECISION NOT NULL
);

CREATE TABLE snapshots (
    episode_id BIGINT PRIMARY KEY REFERENCES episodes DEFERRABLE,
    turn BIGINT NOT NULL,
    seconds DOUBLE PRECISION NOT NULL,
    data BYTEA NOT NULL
);

CREATE TABLE unsaved (
    episode_id BIGINT PRIMARY KEY REFERENCES episodes DEFERRABLE, turn BIGINT NOT NULL, reason TEXT COLLATE "C" NOT NULL
);

-- Rewards
CREATE TABLE sources (
    source TEXT COLLATE "C" PRIMARY KEY,
    version BIGINT NOT NULL,
    weight DOUBLE PRECISION NOT NULL,
    deadline_s DOUBLE PRECISION NOT NULL,
    late TEXT COLLATE "C" NOT NULL CHECK (late IN ('drop', 'neutral', 'partial'))
);

CREATE TABLE rewards (
    turn_id BIGINT NOT NULL REFERENCES turns DEFERRABLE,
    source TEXT COLLATE "C" NOT NULL,
    version BIGINT NOT NULL,
    value DOUBLE PRECISION NOT NULL,
    counts BIGINT NOT NULL,
    time_s DOUBLE PRECISION NOT NULL,
    took_s DOUBLE PRECISION NOT NULL,
    cost DOUBLE PRECISION NOT NULL,
    reason TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (turn_id, source, version)
);

CREATE TABLE score_counts (source TEXT COLLATE "C" PRIMARY KEY, n BIGINT NOT NULL);
CREATE FUNCTION count_score() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO score_counts VALUES (new.source, 1) ON CONFLICT (source) DO UPDATE SET n = score_counts.n + 1;
    RETURN NULL;
END $$;
CREATE TRIGGER count_score AFTER INSERT ON rewards FOR EACH ROW
    WHEN (new.counts = 1) EXECUTE FUNCTION count_score();

CREATE TABLE unscored (
    source TEXT COLLATE "C" NOT NULL,
    turn_id BIGINT NOT NULL REFERENCES turns DEFERRABLE,
    episode_id BIGINT NOT NULL REFERENCES episodes DEFERRABLE,
    PRIMARY KEY (source, turn_id)
);
CREATE INDEX unscored_of_episode ON unscored (episode_id);
CREATE FUNCTION tell() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    PERFORM pg_notify(TG_TABLE_SCHEMA, '');
    RETURN NULL;
END $$;
CREATE TRIGGER tell AFTER INSERT ON unscored FOR EACH ROW EXECUTE FUNCTION tell();  -- see `postgres._commit`

CREATE TABLE endings (
    episode_id BIGINT PRIMARY KEY REFERENCES episodes DEFERRABLE,
    time_s DOUBLE PRECISION NOT NULL,
    stop_reason TEXT COLLATE "C" NOT NULL,
    outcome DOUBLE PRECISION,
    success BIGINT,
    outcomes TEXT COLLATE "C" NOT NULL,
    detail TEXT COLLATE "C" NOT NULL
);

-- Training
CREATE TABLE lineage (
    id BIGSERIAL PRIMARY KEY,
    episode_id BIGINT NOT NULL REFERENCES episodes DEFERRABLE,
    step BIGINT NOT NULL,
    attempt BIGINT NOT NULL,
    max_lag BIGINT NOT NULL,
    taken_s DOUBLE PRECISION NOT NULL,
    undone_attempt BIGINT
);
CREATE UNIQUE INDEX trained_exactly_once ON lineage (episode_id) WHERE undone_attempt IS NULL;
CREATE INDEX lineage_by_step ON lineage (step);

CREATE TABLE checkpoints (
    id BIGSERIAL PRIMARY KEY,
    step BIGINT NOT NULL,
    version BIGINT NOT NULL REFERENCES versions DEFERRABLE,
    path TEXT COLLATE "C" NOT NULL,
    attempt BIGINT NOT NULL,
    saved_s DOUBLE PRECISION NOT NULL,
    undone_attempt BIGINT
);
CREATE INDEX checkpoints_by_step ON checkpoints (step);

CREATE TABLE lost_members (episode_id BIGINT PRIMARY KEY, step BIGINT NOT NULL, found_s DOUBLE PRECISION NOT NULL);

-- Failures
CREATE TABLE outages (
    id BIGSERIAL PRIMARY KEY,
    attempt BIGINT NOT NULL,
    cause TEXT COLLATE "C" NOT NULL,
    began_s DOUBLE PRECISION NOT NULL,
    episodes BIGINT NOT NULL,
    well BIGINT NOT NULL
);
CREATE INDEX outages_by_attempt ON outages (attempt, cause, id);

CREATE TABLE quarantine (
    task TEXT COLLATE "C" PRIMARY KEY,
    episode_id BIGINT NOT NULL REFERENCES episodes DEFERRABLE,
    reason TEXT COLLATE "C" NOT NULL,
    time_s DOUBLE PRECISION NOT NULL
);

-- Only here: the version of these tables, one row
CREATE TABLE schema_version (version BIGINT NOT NULL);

-- The number of each connection's newest write: says whether a transaction was committed whose end nobody heard
CREATE TABLE last_writes (writer TEXT PRIMARY KEY, number BIGINT NOT NULL);

-- The parts of the large arrays: the turns from `start` to `until`, exclusive, how many rows, how many no longer kept
CREATE TABLE parts (start BIGINT PRIMARY KEY, until BIGINT NOT NULL, rows BIGINT NOT NULL, gone BIGINT NOT NULL);
