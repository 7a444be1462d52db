-- The tables of a run store, as SQLite reads them. `schema.py` loads this text, and `schema.postgres.sql` has the same
-- tables in PostgreSQL's words: a test holds the two together. `docs/reference/store.md` explains them to users.
--
-- Conventions: `…_s` is a time in seconds since the epoch, by the store's clock, or a duration where the comment says
-- so. `step` is an optimizer step, `version` a set of weights, `attempt` the number of the run's attempt. A row with an
-- `undone_attempt` was undone by the rollback that began this attempt: it stays, and nothing counts it. Flags are 0 or
-- 1. "Packed" columns are written and read by `codec.py`.
--
-- Every call of a running run is as quick with a million ended episodes as with none: each of its look-ups has an
-- index that holds only what is open, or that begins with the step that the call asks for.


-- ---------------------------------------------------------------------------------------------------------------------
-- The run
-- ---------------------------------------------------------------------------------------------------------------------

-- Values that the processes of the run agree on. `run_values.py` lists every key with its type.
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;

-- Every weight version that was ever minted. AUTOINCREMENT: a number is never used twice (law 1).
CREATE TABLE versions (
    version INTEGER PRIMARY KEY AUTOINCREMENT,
    step INTEGER NOT NULL,               -- the optimizer step that made it; 0: the weights that the run began with
    path TEXT,                           -- its files, if it has any of its own
    attempt INTEGER NOT NULL,
    minted_s REAL NOT NULL,
    confirmed_s REAL,                    -- when an engine first served it
    undone_attempt INTEGER
) STRICT;
CREATE INDEX versions_by_step ON versions (step);  -- a rollback asks for the versions of later steps

-- Measured values.
CREATE TABLE metrics (
    id INTEGER PRIMARY KEY,
    kind TEXT NOT NULL,                  -- "step", "eval", "weights", …
    step INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    time_s REAL NOT NULL,
    data TEXT NOT NULL,                  -- JSON
    undone_attempt INTEGER
) STRICT;
CREATE INDEX metrics_by_kind ON metrics (kind, step);  -- the series of one kind
CREATE INDEX metrics_by_step ON metrics (step);        -- a rollback asks for those of later steps


-- ---------------------------------------------------------------------------------------------------------------------
-- Groups and episodes
-- ---------------------------------------------------------------------------------------------------------------------

-- A group: sibling episodes of one task.
CREATE TABLE groups (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used twice: a checkpoint may name a group that the store has lost
    purpose TEXT NOT NULL,                 -- "train", or which evaluation it is for
    task TEXT NOT NULL,                    -- JSON
    size INTEGER NOT NULL CHECK (size > 0),
    state TEXT NOT NULL CHECK (state IN
        ('waiting', 'running', 'scored', 'taken', 'trained', 'expired', 'failed')),
    reason TEXT,                           -- why it is expired or failed
    started_step INTEGER NOT NULL,         -- step of the weights that sampled when it was admitted
    admitted_s REAL NOT NULL,
    started_s REAL,                        -- the first claim of one of its members
    closed_s REAL,
    taken_step INTEGER,                    -- the step that took it out of the buffer
    skipped_step INTEGER,                  -- the step for which it left without signal
    record TEXT,                           -- packed: what its members are judged against; written once, at its closing
    n_scored INTEGER NOT NULL DEFAULT 0,   -- scored members so far
    tokens_dropped INTEGER NOT NULL DEFAULT 0,  -- flag: retention dropped its large arrays
    replay_of INTEGER REFERENCES groups,   -- the group that infrastructure ended, whose task this one plays again
    replays INTEGER NOT NULL DEFAULT 0,    -- the number of this replay of the task; 0: no replay
    played_again INTEGER NOT NULL DEFAULT 0,  -- flag: a group replays it, or none may, as it is a fork
    fork_of INTEGER REFERENCES episodes,   -- the episode whose first turns its members begin with,
    fork_trial INTEGER,                    -- in this trial of it,
    fork_turn INTEGER                      -- up to this turn, exclusive: these turns never learn
) STRICT;
CREATE INDEX groups_by_state ON groups (purpose, state, id);                        -- lists by state, oldest first
CREATE INDEX groups_running ON groups (started_s) WHERE state = 'running';          -- deadlines, closing at the bound
CREATE INDEX groups_closable ON groups (n_scored) WHERE state = 'running' AND purpose = 'train';  -- those at a quorum
CREATE INDEX groups_taken ON groups (taken_step) WHERE taken_step IS NOT NULL;      -- checkpoints and rollbacks
CREATE INDEX groups_skipped ON groups (skipped_step) WHERE skipped_step IS NOT NULL;  -- rollbacks
CREATE INDEX groups_evaluating ON groups (started_step) WHERE purpose <> 'train';   -- rollbacks of evaluations
CREATE INDEX groups_with_tokens ON groups (taken_step) WHERE tokens_dropped = 0;    -- what retention may drop
CREATE INDEX groups_lost ON groups (replays, id) WHERE purpose = 'train' AND state IN ('expired', 'failed')
    AND reason IN ('engine_failed', 'sandbox_failed', 'env_failed', 'deadline') AND played_again = 0;  -- to play again
CREATE UNIQUE INDEX played_again_once ON groups (replay_of) WHERE replay_of IS NOT NULL;
-- `groups_lost` cannot ask another row whether the group was played again, so the group itself carries a mark.
CREATE TRIGGER note_replay AFTER UPDATE OF replay_of ON groups BEGIN
    UPDATE groups SET played_again = 1 WHERE id = new.replay_of;
END;

-- How many groups are in each state: counting them would read all that ever ended.
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

-- Which process holds a lease, and until when. `holder` is new for each time that a worker registers.
CREATE TABLE leases (
    holder TEXT PRIMARY KEY, worker TEXT NOT NULL, until_s REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- An episode: one member of a group.
CREATE TABLE episodes (
    id INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used twice, as those of groups
    group_id INTEGER NOT NULL REFERENCES groups,
    member INTEGER NOT NULL,
    evaluation INTEGER NOT NULL,           -- flag: of a group that is not for training
    state TEXT NOT NULL DEFAULT 'waiting' CHECK (state IN ('waiting', 'running', 'finished', 'expired')),
    holder TEXT,                           -- the lease of its worker
    fence INTEGER NOT NULL DEFAULT 0,      -- rises with every claim: a write with an older one is refused
    trial INTEGER NOT NULL DEFAULT 0,      -- rises when it starts anew; turns of earlier trials are never trained
    start TEXT,                            -- packed messages of the environment's reset
    tools TEXT,                            -- digest in `tool_sets` of the tools that it was shown
    stop_reason TEXT,                      -- how it ended, and so the mark that it did
    outcome REAL,
    outcomes TEXT NOT NULL DEFAULT '{}',   -- JSON: outcomes by role, where they differ
    success INTEGER,
    detail TEXT NOT NULL DEFAULT '',
    started_s REAL,
    ended_s REAL,
    n_turns INTEGER NOT NULL DEFAULT 0,
    n_tokens INTEGER NOT NULL DEFAULT 0,
    newest_step INTEGER,                   -- step of the newest weights that sampled a token of it that learns
    late INTEGER NOT NULL DEFAULT 0,       -- flag: its group closed before it ended
    taken_step INTEGER,                    -- the step that trains it
    dropped TEXT,                          -- why it left its group's step, or the buffer, untrained
    deaths INTEGER NOT NULL DEFAULT 0,     -- workers that died with it since it last got on
    died_at INTEGER,                       -- turns that it had when the last of them died
    UNIQUE (group_id, member)
) STRICT;
CREATE INDEX episodes_waiting ON episodes (evaluation DESC, id) WHERE state = 'waiting';       -- the next to claim
CREATE INDEX episodes_suspected ON episodes (id) WHERE state = 'waiting' AND deaths > 0;       -- claimed last, alone
CREATE INDEX episodes_running ON episodes (holder, evaluation, id) WHERE state = 'running';    -- those of a dead holder
CREATE INDEX episodes_late ON episodes (group_id) WHERE late = 1 AND taken_step IS NULL AND dropped IS NULL;  -- open
CREATE INDEX episodes_taken ON episodes (taken_step) WHERE taken_step IS NOT NULL;             -- rollbacks
CREATE INDEX episodes_failed ON episodes (id)
    WHERE stop_reason IN ('engine_failed', 'sandbox_failed', 'env_failed');                    -- newest failures

-- How many episodes of an attempt ended in which way: counting them would read all that ever ended.
CREATE TABLE ending_counts (
    attempt INTEGER NOT NULL, evaluation INTEGER NOT NULL, stop_reason TEXT NOT NULL, n INTEGER NOT NULL,
    PRIMARY KEY (attempt, evaluation, stop_reason)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER count_ending AFTER UPDATE OF stop_reason ON episodes WHEN old.stop_reason IS NULL BEGIN
    INSERT INTO ending_counts
        SELECT CAST(value AS INTEGER), new.evaluation, new.stop_reason, 1 FROM meta WHERE key = 'attempt'
        ON CONFLICT (attempt, evaluation, stop_reason) DO UPDATE SET n = ending_counts.n + 1;
END;

-- The tools that episodes were shown: schemas and dialect of the calls. Each set is stored once.
CREATE TABLE tool_sets (digest TEXT NOT NULL PRIMARY KEY, data TEXT NOT NULL) STRICT, WITHOUT ROWID;

-- When and why an episode started anew. `start` was that of the trial that ended so.
CREATE TABLE restarts (
    episode_id INTEGER NOT NULL REFERENCES episodes,
    trial INTEGER NOT NULL,
    start TEXT,
    reason TEXT NOT NULL,
    time_s REAL NOT NULL,
    PRIMARY KEY (episode_id, trial)
) STRICT, WITHOUT ROWID;


-- ---------------------------------------------------------------------------------------------------------------------
-- The journal
-- ---------------------------------------------------------------------------------------------------------------------

-- A turn: one action of the policy, written before the environment sees it.
CREATE TABLE turns (
    id INTEGER PRIMARY KEY,
    episode_id INTEGER NOT NULL REFERENCES episodes,
    trial INTEGER NOT NULL,
    idx INTEGER NOT NULL,                -- its place among all turns of the trial
    parent INTEGER,                      -- the turn whose context it extends; NULL: none
    role TEXT NOT NULL,
    learns INTEGER NOT NULL,             -- flag: sampled by the policy that the run trains, and not copied by a fork
    finish TEXT NOT NULL,                -- why the engine stopped
    text ANY NOT NULL,                   -- bytes where UTF-8 cannot hold what the model wrote
    spans TEXT NOT NULL,                 -- packed: which version sampled which tokens
    n_prompt INTEGER NOT NULL,
    n_tokens INTEGER NOT NULL,
    oldest_step INTEGER,                 -- step of the oldest weights that sampled a token of it
    state INTEGER,                       -- `Turn.state`: a hash of the text that it answers
    started_s REAL NOT NULL,
    ended_s REAL NOT NULL,
    UNIQUE (episode_id, trial, idx)
) STRICT;
-- Only runs with several roles have rows in it.
CREATE INDEX turns_of_roles ON turns (role, episode_id, trial) WHERE role <> 'policy';

-- The large arrays of turns, packed. Tables of their own, so that retention frees whole pages: `schema.BYTES`.
-- `tokens`: token ids, log-probs and named columns. `experts`: those that a mixture of experts chose, if the run keeps
-- them. `artifacts`: the declared files of an agent's work after the turn, if a reward source tests them.
CREATE TABLE tokens (turn_id INTEGER PRIMARY KEY REFERENCES turns, data BLOB NOT NULL) STRICT;
CREATE TABLE experts (turn_id INTEGER PRIMARY KEY REFERENCES turns, data BLOB NOT NULL) STRICT;
CREATE TABLE artifacts (turn_id INTEGER PRIMARY KEY REFERENCES turns, data BLOB NOT NULL) STRICT;

-- The environment's answer to a turn.
CREATE TABLE steps (
    turn_id INTEGER PRIMARY KEY REFERENCES turns,
    observation TEXT NOT NULL,           -- packed messages
    reward REAL NOT NULL,
    terminated INTEGER NOT NULL,
    truncated INTEGER NOT NULL,
    info TEXT NOT NULL                   -- packed: info, and the fields of the answer that were set
) STRICT;

-- Images, by the SHA-256 of their bytes: a message has `sha256:` and the digest in the place of the data.
CREATE TABLE images (digest TEXT NOT NULL PRIMARY KEY, data BLOB NOT NULL) STRICT, WITHOUT ROWID;

-- The turn that a running episode samples now: one row per write of new tokens.
CREATE TABLE partials (
    episode_id INTEGER NOT NULL REFERENCES episodes,
    at INTEGER NOT NULL,                 -- tokens of the turn before these
    n INTEGER NOT NULL,                  -- tokens in `data`
    turn INTEGER NOT NULL,
    parent INTEGER,
    role TEXT NOT NULL,
    spans TEXT NOT NULL,
    started_s REAL NOT NULL,
    spent_s REAL NOT NULL,               -- duration that counts against the turn's deadline
    data BLOB NOT NULL,
    PRIMARY KEY (episode_id, at)
) STRICT, WITHOUT ROWID;

-- How many tokens of an unfinished turn were given up, because the run does not go on from tokens.
CREATE TABLE discarded (
    episode_id INTEGER NOT NULL REFERENCES episodes, trial INTEGER NOT NULL, turn INTEGER NOT NULL,
    tokens INTEGER NOT NULL, time_s REAL NOT NULL
) STRICT;

-- The newest snapshot of a running episode's environment, if it gives any: after `turn`, made in `seconds`.
CREATE TABLE snapshots (
    episode_id INTEGER PRIMARY KEY REFERENCES episodes, turn INTEGER NOT NULL, seconds REAL NOT NULL, data BLOB NOT NULL
) STRICT;

-- Since which turn, and why, a running episode's environment gives no snapshot.
CREATE TABLE unsaved (
    episode_id INTEGER PRIMARY KEY REFERENCES episodes, turn INTEGER NOT NULL, reason TEXT NOT NULL
) STRICT;


-- ---------------------------------------------------------------------------------------------------------------------
-- Rewards. The environment's own are in `steps`
-- ---------------------------------------------------------------------------------------------------------------------

-- The reward sources that the run declares.
CREATE TABLE sources (
    source TEXT PRIMARY KEY,
    version INTEGER NOT NULL,            -- of the source: a new one scores anew
    weight REAL NOT NULL,
    deadline_s REAL NOT NULL,            -- duration after the end of an episode
    late TEXT NOT NULL CHECK (late IN ('drop', 'neutral', 'partial'))
) STRICT, WITHOUT ROWID;

-- Scores of a turn: the first of each version of a source.
CREATE TABLE rewards (
    turn_id INTEGER NOT NULL REFERENCES turns,
    source TEXT NOT NULL,
    version INTEGER NOT NULL,
    value REAL NOT NULL,
    counts INTEGER NOT NULL,             -- flag: came in time, of the version that the run declares
    time_s REAL NOT NULL,
    took_s REAL NOT NULL,                -- duration
    cost REAL NOT NULL,
    reason TEXT NOT NULL,                -- what the source says of its value, for people
    PRIMARY KEY (turn_id, source, version)
) STRICT, WITHOUT ROWID;

-- How many values of a source count.
CREATE TABLE score_counts (source TEXT PRIMARY KEY, n INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TRIGGER count_score AFTER INSERT ON rewards WHEN new.counts = 1 BEGIN
    INSERT INTO score_counts VALUES (new.source, 1) ON CONFLICT (source) DO UPDATE SET n = score_counts.n + 1;
END;

-- Which turns a source has yet to score.
CREATE TABLE unscored (
    source TEXT NOT NULL,
    turn_id INTEGER NOT NULL REFERENCES turns,
    episode_id INTEGER NOT NULL REFERENCES episodes,
    PRIMARY KEY (source, turn_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX unscored_of_episode ON unscored (episode_id);  -- whether an episode still waits for its sources

-- The ending of an episode that waits for its sources: it counts as running until they have scored it.
CREATE TABLE endings (
    episode_id INTEGER PRIMARY KEY REFERENCES episodes,
    time_s REAL NOT NULL,
    stop_reason TEXT NOT NULL,
    outcome REAL,
    success INTEGER,
    outcomes TEXT NOT NULL,
    detail TEXT NOT NULL
) STRICT;


-- ---------------------------------------------------------------------------------------------------------------------
-- Training
-- ---------------------------------------------------------------------------------------------------------------------

-- Which optimizer step trained which episode.
CREATE TABLE lineage (
    id INTEGER PRIMARY KEY,              -- the order in which they were taken
    episode_id INTEGER NOT NULL REFERENCES episodes,
    step INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    max_lag INTEGER NOT NULL,            -- the bound of the take
    taken_s REAL NOT NULL,
    undone_attempt INTEGER
) STRICT;
CREATE UNIQUE INDEX trained_exactly_once ON lineage (episode_id) WHERE undone_attempt IS NULL;  -- law 2
CREATE INDEX lineage_by_step ON lineage (step);

-- The steps that the run can go back to.
CREATE TABLE checkpoints (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    step INTEGER NOT NULL,
    version INTEGER NOT NULL REFERENCES versions,
    path TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    saved_s REAL NOT NULL,
    undone_attempt INTEGER
) STRICT;
CREATE INDEX checkpoints_by_step ON checkpoints (step);  -- the latest one

-- Episodes that a checkpoint trained, and whose rows a loss of power, or a copy of the store put back, took away: the
-- checkpoint is trusted, so they are never trained again (law 2). No reference: the episode is not there.
CREATE TABLE lost_members (episode_id INTEGER PRIMARY KEY, step INTEGER NOT NULL, found_s REAL NOT NULL) STRICT;

-- ---------------------------------------------------------------------------------------------------------------------
-- Failures
-- ---------------------------------------------------------------------------------------------------------------------

-- Failures of one cause at one time: they count as one, however many episodes they took.
CREATE TABLE outages (
    id INTEGER PRIMARY KEY,
    attempt INTEGER NOT NULL,
    cause TEXT NOT NULL,
    began_s REAL NOT NULL,
    episodes INTEGER NOT NULL,           -- that it took
    well INTEGER NOT NULL                -- episodes of the attempt that had ended well before it
) STRICT;
CREATE INDEX outages_by_attempt ON outages (attempt, cause, id);  -- the latest of a cause

-- Tasks that killed their workers, and are not admitted again.
CREATE TABLE quarantine (
    task TEXT PRIMARY KEY, episode_id INTEGER NOT NULL REFERENCES episodes, reason TEXT NOT NULL, time_s REAL NOT NULL
) STRICT;
