"""Checks the laws on the raw rows of a store: lost data, episodes trained twice, episodes trained against the rules.

Shares no code with the writers of the rows: it has its own SQL, its own reader of token blobs and its own computation
of lag, so that the checker does not repeat a bug of a writer. Reads everything once, in one transaction.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import zstandard

from agentrl.store import RunStore
from agentrl.store.databases.database import Database

_SHOWN = 1000  # violations listed at most; the counts are always complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One breach: the law it breaks (0: the store's own bookkeeping), its kind, and one line that says where."""

    law: int
    kind: str
    detail: str


@dataclass(slots=True)
class AuditReport:
    """Result of an audit. `breaches` counts all violations by kind; `violations` lists at most the first 1000."""

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
        document["breaches"] = {breach_kind: self.breaches.get(breach_kind, 0) for breach_kind in KINDS}
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
    "checkpoint_damaged": 2,  # a file of a checkpoint does not hold the bytes that were written
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


__all__ = ["KINDS", "AuditReport", "Violation", "audit"]

# Literals, not `StopReason.by_policy`: with that property the audit would agree with whatever the property says, and a
# reason that was put on the wrong side (law 3) would show nowhere.
_NOT_BY_POLICY = {"engine_failed", "sandbox_failed", "env_failed", "expired"}
_ENV_ENDED = {"done", "truncated"}


def audit(store: RunStore, checkpoints: Path | None = None) -> AuditReport:
    """Check every law that the store's rows can show, and the checkpoint folders that still exist: those that the store
    knows and those in `checkpoints`. Raises StoreError only if the store cannot be read."""
    database, report = store._db, AuditReport()  # pyright: ignore[reportPrivateUsage]
    law_checks: Iterable[Callable[[Database, AuditReport], None]] = (
        _count,
        _check_owners,
        _check_turns,
        _check_ends,
        _check_forks,
        _check_lineage,
        _check_records,
        _check_skipped,
        _check_lag,
        _check_file,
    )
    # One transaction for all checks. With one for each, an episode that ends between two of them would look like a
    # count that disagrees with its rows, and a live run could never be audited.
    with database.read():
        for check_law in law_checks:
            check_law(database, report)
        _check_checkpoints(database, report, checkpoints)
    return report


def _count(db: Database, report: AuditReport) -> None:
    counts_by_purpose: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for purpose, group_state, row_count in db.rows("SELECT purpose, state, COUNT(*) FROM groups GROUP BY 1, 2"):
        counts_by_purpose[purpose][group_state] = row_count
    counters_by_purpose: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for purpose, group_state, row_count in db.rows("SELECT purpose, state, n FROM group_counts WHERE n <> 0"):
        counters_by_purpose[purpose][group_state] = row_count
    ending_rows = db.rows(
        "SELECT evaluation, stop_reason, COUNT(*) FROM episodes WHERE stop_reason IS NOT NULL GROUP BY 1, 2"
    )
    counted_endings = db.rows("SELECT evaluation, stop_reason, SUM(n) FROM ending_counts WHERE n <> 0 GROUP BY 1, 2")
    if sorted(ending_rows) != sorted(counted_endings):
        report.breach("bookkeeping", f"episodes ended as {ending_rows}, counted as {counted_endings}")
    if counts_by_purpose != counters_by_purpose:
        report.breach(
            "bookkeeping", f"groups by state are {dict(counts_by_purpose)}, counted as {dict(counters_by_purpose)}"
        )
    report.groups = dict(counts_by_purpose)
    report.episodes = dict(db.rows("SELECT state, COUNT(*) FROM episodes GROUP BY 1"))
    report.drops = {
        str(drop_reason): row_count
        for drop_reason, row_count in db.rows(
            "SELECT reason, COUNT(*) FROM groups WHERE purpose = 'train' AND state IN ('expired', 'failed') GROUP BY 1"
        )
    }
    report.attempt = int(db.rows("SELECT value FROM meta WHERE key = 'attempt'")[0][0])
    for (group_id,) in db.rows("SELECT id FROM groups WHERE state IN ('expired', 'failed') AND reason IS NULL"):
        report.breach("drop_without_reason", f"group {group_id}")


# Not SQLite's own check of foreign keys: the audit reads PostgreSQL by the same statements, and a copy that a user made
# with another tool may have been written with the checks switched off.
_OWNERS = (
    ("episodes", "group_id", "groups"),
    ("turns", "episode_id", "episodes"),
    ("tokens", "turn_id", "turns"),
    ("steps", "turn_id", "turns"),
    ("rewards", "turn_id", "turns"),
    ("unscored", "turn_id", "turns"),
    ("endings", "episode_id", "episodes"),
    ("restarts", "episode_id", "episodes"),
    ("partials", "episode_id", "episodes"),
    ("snapshots", "episode_id", "episodes"),
    ("unsaved", "episode_id", "episodes"),
    ("lineage", "episode_id", "episodes"),
)


def _check_owners(db: Database, report: AuditReport) -> None:
    for table, column, owner in _OWNERS:
        for (missing_id,) in db.rows(
            f"SELECT DISTINCT c.{column} FROM {table} c LEFT JOIN {owner} o ON o.id = c.{column} WHERE o.id IS NULL"
        ):
            report.breach("orphan_row", f"{table}: {column} {missing_id} is no row of {owner}")
    for group_id, group_size, episode_count, member_count in db.rows(
        "SELECT g.id, g.size, COUNT(e.id), COUNT(DISTINCT e.member) FROM groups g"
        " LEFT JOIN episodes e ON e.group_id = g.id GROUP BY g.id HAVING COUNT(e.id) <> g.size"
        " OR COUNT(DISTINCT e.member) <> g.size OR MIN(e.member) <> 0 OR MAX(e.member) <> g.size - 1"
    ):
        report.breach(
            "orphan_row", f"group {group_id} of {group_size} has {episode_count} episodes, {member_count} members"
        )


def _check_turns(db: Database, report: AuditReport) -> None:
    """Check that a trial's turns have no gaps, that all but its last are answered, and that every token is complete."""
    steps_of: dict[int, int] = dict(db.rows("SELECT version, step FROM versions"))
    # Streamed in the order of the turns, so that a run of millions of turns is audited in constant memory. That order
    # is also what lets a gap, or an answer that is missing, show as a difference from the row before.
    turn_rows = db.execute(
        "SELECT t.episode_id, t.trial, t.idx, t.parent, t.n_prompt, t.n_tokens, t.spans, t.oldest_step, t.learns,"
        " k.data, s.turn_id IS NOT NULL, e.trial, g.tokens_dropped"
        " FROM turns t LEFT JOIN tokens k ON k.turn_id = t.id LEFT JOIN steps s ON s.turn_id = t.id"
        " LEFT JOIN episodes e ON e.id = t.episode_id LEFT JOIN groups g ON g.id = e.group_id"
        " ORDER BY t.episode_id, t.trial, t.idx"
    )
    trial_under_check: tuple[int, int] | None = None
    expected_index, is_answered = 0, True
    for episode, trial, index, parent, n_prompt, n_tokens, spans, oldest, learns, blob, *others in turn_rows:
        has_step, last_trial, tokens_dropped = others
        turn_label = f"episode {episode}, trial {trial}, turn {index}"
        if (episode, trial) != trial_under_check:
            trial_under_check, expected_index, is_answered = (episode, trial), 0, True
        if index != expected_index:
            report.breach("turns_lost", f"{turn_label}: turn {expected_index} is missing")
        if not is_answered:
            report.breach("turns_lost", f"{turn_label}: the turn before it has no answer of the environment")
        if parent is not None and not 0 <= parent < index:
            report.breach("turns_lost", f"{turn_label}: extends turn {parent}")
        if last_trial is not None and trial > last_trial:
            report.breach("turns_lost", f"{turn_label}: the episode has only come to trial {last_trial}")
        expected_index, is_answered = index + 1, bool(has_step)
        report.turns += 1
        report.tokens += n_tokens
        report.turns_set_aside += last_trial is not None and trial < last_trial
        oldest_step = _check_spans(report, turn_label, json.loads(spans), n_tokens, steps_of if learns else None)
        if oldest_step != oldest:
            report.breach(
                "bookkeeping", f"{turn_label}: oldest token is of step {oldest_step}, written down as {oldest}"
            )
        if blob is None and not tokens_dropped:
            report.breach("tokens_incomplete", f"{turn_label}: token ids and log-probs are missing")
        if blob is not None:
            fault = _fault_of(blob, n_prompt, n_tokens)
            if fault:
                report.breach("tokens_incomplete", f"{turn_label}: {fault}")


def _check_spans(
    report: AuditReport, where: str, spans: list[list[int]], n_tokens: int, steps_of: dict[int, int] | None
) -> int | None:
    """Check that each token of a turn has one known version; return the step of the oldest one. `steps_of` is None for
    a turn of a frozen policy, whose versions are not the run's."""
    # Token by token, not by the sum of lengths: two spans that overlap beside a gap of the same length would add up.
    covered_positions = [
        token_position for _, span_start, span_end, *_ in spans for token_position in range(span_start, span_end)
    ]
    if covered_positions != list(range(n_tokens)):
        report.breach("tokens_incomplete", f"{where}: versions {spans} do not cover its {n_tokens} tokens once")
    if steps_of is None:
        return None
    unknown_versions = sorted({version for version, *_ in spans if version not in steps_of})
    if unknown_versions:
        report.breach("tokens_incomplete", f"{where}: versions {unknown_versions} were never minted")
    return min((steps_of[version] for version, *_ in spans if version in steps_of), default=None)


def _fault_of(blob: bytes, n_prompt: int, n_tokens: int) -> str | None:
    """The fault of a token blob (for its layout see `codec`); None if it has none."""
    try:
        # The layout is read here a second time, on purpose. `codec.unpack_tokens` would read a wrong offset back
        # exactly as `codec.pack_tokens` wrote it.
        unpacked_blob = zstandard.ZstdDecompressor().decompress(blob)
        logprob_bytes, prompt_count, token_count = struct.unpack_from("<BII", unpacked_blob)
        if (prompt_count, token_count) != (n_prompt, n_tokens):
            return (
                f"holds {prompt_count} prompt and {token_count} sampled tokens, should hold {n_prompt} and {n_tokens}"
            )
        logprobs = struct.unpack_from(
            f"<{token_count}{'f' if logprob_bytes == 4 else 'd'}", unpacked_blob, 9 + 4 * (prompt_count + token_count)
        )
        column_end = 9 + 4 * (prompt_count + token_count) + logprob_bytes * token_count
        while column_end < len(unpacked_blob):  # named columns
            column_end += 1 + unpacked_blob[column_end]
            column_end += 5 + struct.unpack_from("<BI", unpacked_blob, column_end)[1]
    except (zstandard.ZstdError, struct.error) as error:
        return f"cannot be unpacked: {error}"
    if column_end != len(unpacked_blob):
        return f"is {len(unpacked_blob)} bytes long, should be {column_end}"
    return None if all(map(math.isfinite, logprobs)) else "has a log-prob that is not finite"


def _check_ends(db: Database, report: AuditReport) -> None:
    """Check that an ended episode's recorded length is that of its rows, and that groups end with their members."""
    ended_rows = db.rows(
        "SELECT e.id, e.stop_reason, e.n_turns, e.n_tokens, COUNT(t.id), COALESCE(SUM(t.n_tokens), 0),"
        " COUNT(t.id) - COUNT(s.turn_id) FROM episodes e"
        " LEFT JOIN turns t ON t.episode_id = e.id AND t.trial = e.trial LEFT JOIN steps s ON s.turn_id = t.id"
        " WHERE e.state IN ('finished', 'expired') GROUP BY e.id"
    )
    for episode_id, stop_reason, ended_turns, ended_tokens, turn_count, token_count, unanswered in ended_rows:
        if (ended_turns, ended_tokens) != (turn_count, token_count):
            recorded_length = f"episode {episode_id} ended with {ended_turns} turns, {ended_tokens} tokens"
            report.breach("turns_lost", f"{recorded_length}; {turn_count}, {token_count} are there")
        if stop_reason is None:
            report.breach("bookkeeping", f"episode {episode_id} ended without a stop reason")
        if stop_reason in _ENV_ENDED and unanswered:
            report.breach("turns_lost", f"episode {episode_id}: {stop_reason} without its environment's last answer")
    # Rows that an ending should have deleted do no harm to training. They are reported since they show an ending that
    # was not one transaction, and since snapshots are large: a leak of them fills the disk of a long run.
    for table_name, leftover in (("partials", "a turn under way"), ("snapshots", "a snapshot"), ("unsaved", "a note")):
        episodes_query = f"SELECT DISTINCT episode_id FROM {table_name}"
        for (episode_id,) in db.rows(f"SELECT id FROM episodes WHERE ended_s IS NOT NULL AND id IN ({episodes_query})"):
            report.breach("bookkeeping", f"episode {episode_id} ended with {leftover}")
    for (episode_id,) in db.rows(
        "SELECT h.episode_id FROM endings h JOIN episodes e ON e.id = h.episode_id"
        " WHERE e.state IN ('finished', 'expired')"
        " OR NOT EXISTS (SELECT 1 FROM unscored u WHERE u.episode_id = h.episode_id)"
    ):
        report.breach("episode_held", f"episode {episode_id} has ended or waits for no source, and is held")
    for episode_id, source_name in db.rows(
        "SELECT DISTINCT t.episode_id, r.source FROM rewards r JOIN turns t ON t.id = r.turn_id"
        " JOIN unscored u ON u.turn_id = r.turn_id AND u.source = r.source WHERE r.counts = 1"
    ):
        report.breach("bookkeeping", f"episode {episode_id}: {source_name} has scored a turn that still waits for it")
    group_rows = db.rows(
        "SELECT g.id, g.state, COUNT(*) FILTER (WHERE e.late = 0 AND e.state IN ('waiting', 'running')),"
        " COUNT(*) FILTER (WHERE e.state = 'running'),"
        " SUM(e.late) FROM groups g JOIN episodes e ON e.group_id = g.id GROUP BY g.id"
    )
    for group_id, group_state, unfinished, running_count, late_count in group_rows:
        group_open = group_state in ("waiting", "running")
        if group_open != bool(unfinished) or (group_state == "waiting" and running_count):
            report.breach("group_stuck", f"group {group_id} is {group_state} with {unfinished} members not ended")
        if group_open and late_count:
            report.breach("group_stuck", f"group {group_id} is {group_state}, and {late_count} of its members are late")


def _check_forks(db: Database, report: AuditReport) -> None:
    """Check that the turns of a fork before its own are those of its origin, and are context only."""
    for episode_id, trial, fork_turn, trained_turn, turn_count, differing_turn in db.rows(
        "SELECT e.id, e.trial, g.fork_turn, MIN(iif(t.learns = 1, t.idx, NULL)), COUNT(t.id),"
        " MIN(iif(g.fork_of IS NOT NULL AND (o.id IS NULL"
        " OR (t.text, t.spans, t.n_prompt, t.n_tokens) IS DISTINCT FROM (o.text, o.spans, o.n_prompt, o.n_tokens)"
        " OR (g.tokens_dropped = 0 AND k.data <> l.data)), t.idx, NULL)) FROM groups g"
        " JOIN episodes e ON e.group_id = g.id"
        " LEFT JOIN turns t ON t.episode_id = e.id AND t.trial = 0 AND t.idx < g.fork_turn"
        " LEFT JOIN turns o ON o.episode_id = g.fork_of AND o.trial = g.fork_trial AND o.idx = t.idx"
        " LEFT JOIN tokens k ON k.turn_id = t.id LEFT JOIN tokens l ON l.turn_id = o.id"
        " WHERE g.fork_turn IS NOT NULL GROUP BY e.id, g.id"
    ):
        fork_label = f"episode {episode_id}, a fork"
        if trained_turn is not None:
            report.breach("fork_broken", f"{fork_label}, trains turn {trained_turn} of its origin")
        if differing_turn is not None:
            report.breach("fork_broken", f"{fork_label}: its turn {differing_turn} is not that of its origin")
        if trial or turn_count != fork_turn:
            report.breach(
                "fork_broken",
                f"{fork_label} at turn {fork_turn}, has {turn_count} turns of its origin or was begun anew",
            )


def _check_lineage(db: Database, report: AuditReport) -> None:
    steps_by_episode: defaultdict[int, list[int]] = defaultdict(list)
    for episode, step in db.rows("SELECT episode_id, step FROM lineage WHERE undone_attempt IS NULL"):
        steps_by_episode[episode].append(step)
    for episode, trained_steps in steps_by_episode.items():
        if len(trained_steps) > 1:
            report.breach("trained_twice", f"episode {episode}: in the loss of steps {sorted(trained_steps)}")
    saved_step = db.rows("SELECT COALESCE(MAX(step), 0) FROM checkpoints WHERE undone_attempt IS NULL")[0][0]
    trained_of: defaultdict[int, set[int]] = defaultdict(set)  # group -> steps that trained a member of it
    for episode, group, state, stop_reason, outcome, late, taken_step, dropped, group_state, group_step in db.rows(
        "SELECT e.id, e.group_id, e.state, e.stop_reason, e.outcome, e.late, e.taken_step, e.dropped, g.state,"
        " g.taken_step FROM episodes e JOIN groups g ON g.id = e.group_id ORDER BY e.id"
    ):
        member_label = f"episode {episode} of group {group}"
        if (taken_step is not None and dropped is None) != (episode in steps_by_episode):
            report.breach(
                "lineage_broken",
                f"{member_label} left in step {taken_step} ({dropped}), lineage: {steps_by_episode[episode]}",
            )
        if episode not in steps_by_episode:
            continue
        trained_of[group] |= set(steps_by_episode[episode])
        if taken_step not in steps_by_episode[episode]:
            report.breach(
                "lineage_broken",
                f"{member_label} was taken in step {taken_step}, its lineage says {steps_by_episode[episode]}",
            )
        if not late and taken_step != group_step:
            report.breach(
                "lineage_broken", f"{member_label} was taken in step {taken_step}, its group in step {group_step}"
            )
        if group_state not in ("taken", "trained") and not (late and group_state == "expired"):
            report.breach("lineage_broken", f"{member_label} is in the lineage, and its group is {group_state}")
        if state != "finished":
            report.breach("trained_unfinished", f"{member_label} is in the lineage and {state}")
        if not _in_loss(stop_reason, outcome):
            report.breach("trained_unscored", f"{member_label} ended as {stop_reason} with outcome {outcome}")
    # The same law read from the other side: the loop above begins with lineage rows and would miss a group that says
    # "taken" and has no row at all.
    for group, purpose, state, step in db.rows("SELECT id, purpose, state, taken_step FROM groups"):
        is_taken = state in ("taken", "trained")
        if is_taken != (step is not None) or (is_taken and step not in trained_of[group]):
            report.breach("lineage_broken", f"group {group} is {state} at step {step}, trained in {trained_of[group]}")
        if (is_taken or trained_of[group]) and purpose != "train":
            report.breach("lineage_broken", f"group {group} of {purpose} is {state}")
        if is_taken and (state == "trained") != (step <= saved_step):
            report.breach(
                "lineage_broken", f"group {group}, step {step}, is {state}; last checkpoint is step {saved_step}"
            )


def _check_records(db: Database, report: AuditReport) -> None:
    """Check that a closed group's record is that of its scored members that were not late, at least min(2, size)."""
    scored_members: defaultdict[int, dict[str, tuple[float, int]]] = defaultdict(dict)
    for group_id, member_index, stop_reason, outcome, turn_count in db.rows(
        "SELECT group_id, member, stop_reason, outcome, n_turns FROM episodes"
        " WHERE late = 0 AND stop_reason IS NOT NULL"
    ):
        if _in_loss(stop_reason, outcome):
            scored_members[group_id][str(member_index)] = (outcome, turn_count)
    for group_id, group_state, group_size, packed_record in db.rows(
        "SELECT id, state, size, record FROM groups WHERE purpose = 'train'"
    ):
        if group_state in ("taken", "trained") and len(scored_members[group_id]) < min(2, group_size):
            report.breach("trained_unscored", f"group {group_id} has fewer than two members to compare")
        if packed_record is None or group_state in ("waiting", "running"):
            continue
        recorded_members = {
            member_index: (member_record["outcome"], sum(map(len, member_record["rewards"].values())))
            for member_index, member_record in json.loads(packed_record).items()
        }
        if recorded_members != scored_members[group_id]:
            report.breach(
                "record_disagrees",
                f"group {group_id} recorded {recorded_members}, its members are {scored_members[group_id]}",
            )


def _check_skipped(db: Database, report: AuditReport) -> None:
    """Check that a group that left without signal is gone, and that no turn in its record has an advantage: the return
    at each turn is the mean of the siblings' (of one that had stopped, its outcome)."""
    config = json.loads(db.rows("SELECT value FROM meta WHERE key = 'config'")[0][0])
    role_kinds = config.get("rollout", {}).get("roles", {})
    algo_of_env = {
        config_table.get("id") or config["env"]["id"]: config_table["algo"]
        for config_table in config.get("tasks", [])
        if config_table.get("algo")
    }
    algo_of_role = {
        config_table["name"]: config_table["algo"]
        for config_table in config.get("roles", [])
        if config_table.get("algo")
    }
    for group_id, group_state, drop_reason, packed_record, packed_task in db.rows(
        "SELECT id, state, reason, record, task FROM groups WHERE skipped_step IS NOT NULL OR reason = 'no_signal'"
    ):
        group_label = f"group {group_id} left as without signal"
        algo_table = algo_of_env.get(json.loads(packed_task)["env"], config.get("algo", {}))
        if any(
            learning_table.get("distil_weight") or learning_table.get("observation_weight")
            for learning_table in (algo_table, *algo_of_role.values())
        ):
            report.breach("skipped_with_signal", f"{group_label}, and its algorithm learns from equal returns")
        if (group_state, drop_reason) != ("expired", "no_signal"):
            report.breach("skipped_with_signal", f"{group_label} and is {group_state} ({drop_reason})")
        member_records = list(json.loads(packed_record or "{}").values())
        for role_name in {
            role_name
            for member_record in member_records
            for role_name in member_record["rewards"]
            if role_kinds.get(role_name, "trained") == "trained"
        }:
            process_weight, discount = (
                algo_of_role.get(role_name, algo_table).get(field_name, 1.0)
                for field_name in ("process_weight", "discount")
            )
            role_outcomes = [
                member_record["outcomes"].get(role_name, member_record["outcome"]) for member_record in member_records
            ]
            role_rewards = [member_record["rewards"].get(role_name, []) for member_record in member_records]
            for turn_index in range(max(map(len, role_rewards))):
                returns = [
                    discount ** max(len(turn_rewards) - 1 - turn_index, 0) * of_episode
                    + process_weight
                    * math.fsum(
                        discount**turns_later * reward for turns_later, reward in enumerate(turn_rewards[turn_index:])
                    )
                    for of_episode, turn_rewards in zip(role_outcomes, role_rewards, strict=True)
                ]
                mean_return = math.fsum(returns) / len(returns)
                judged_returns = [
                    turn_return
                    for turn_return, turn_rewards in zip(returns, role_rewards, strict=True)
                    if turn_index < len(turn_rewards)
                ]
                # The store decides that returns are equal with sums in another order, so equal returns may differ here
                # in their last bits. A signal this small would not move a weight.
                if any(abs(turn_return - mean_return) > 1e-6 for turn_return in judged_returns):
                    report.breach(
                        "skipped_with_signal", f"{group_label}: turn {turn_index} of {role_name!r} returned {returns}"
                    )
                    break


def _check_checkpoints(db: Database, report: AuditReport, folder: Path | None) -> None:
    """Check that each folder lists the episodes that the lineage has for its steps."""
    checkpoint_paths = {
        Path(checkpoint_path)
        for (checkpoint_path,) in db.rows("SELECT path FROM checkpoints WHERE undone_attempt IS NULL")
    }
    checkpoint_paths |= set() if folder is None else set(folder.glob(f"step-{'[0-9]' * 8}"))
    lost_episodes = {episode_id for (episode_id,) in db.rows("SELECT episode_id FROM lost_members")}
    step_by_episode: dict[int, int] = dict(db.rows("SELECT episode_id, step FROM lineage WHERE undone_attempt IS NULL"))
    for episode_id in sorted(lost_episodes & step_by_episode.keys()):
        report.breach(
            "trained_twice", f"episode {episode_id}: trained by a checkpoint that the store had lost, and again"
        )
    # Paths that are no folder were removed.
    for checkpoint_path in sorted(path for path in checkpoint_paths if path.is_dir()):
        if changed_files := _changed_files(checkpoint_path):
            report.breach("checkpoint_damaged", f"{checkpoint_path}: {', '.join(changed_files)}")
            continue  # what it lists may be wrong too
        try:
            checkpoint_state = json.loads((checkpoint_path / "state.json").read_text())
        except OSError:
            continue  # removed meanwhile
        if "episodes" not in checkpoint_state:
            continue  # a copy of another run's: it trained nothing of this one
        listed_episodes = {episode_id for trained_step in checkpoint_state["episodes"] for episode_id in trained_step}
        first_step, last_step = checkpoint_state["previous_step"] + 1, checkpoint_state["step"]
        recorded_episodes = {
            episode_id
            for episode_id, trained_step in step_by_episode.items()
            if first_step <= trained_step <= last_step
        }
        for episode_id in sorted(listed_episodes - recorded_episodes - lost_episodes):
            report.breach(
                "checkpoint_disagrees",
                f"{checkpoint_path} trained episode {episode_id}: not in steps {first_step} to {last_step}",
            )
        for episode_id in sorted(recorded_episodes - listed_episodes):
            report.breach(
                "checkpoint_disagrees",
                f"{checkpoint_path}: episode {episode_id} of step {step_by_episode[episode_id]} is not in it",
            )


def _changed_files(path: Path) -> list[str]:
    """The files of a checkpoint that are missing or differ from their digest in its SHA256SUMS."""
    try:
        lines = (path / "SHA256SUMS").read_text(errors="replace").splitlines()
    except OSError:
        return ["SHA256SUMS"] if (path / "state.json").is_file() else []  # the folder was removed meanwhile
    wrong = list[str]()
    for line in lines:
        try:
            with (path / line[66:]).open("rb") as file:
                same = hashlib.file_digest(file, "sha256").hexdigest() == line[:64]
        except (OSError, ValueError):
            same = not path.is_dir()
        wrong += [] if same else [line[66:]]
    return wrong if lines else ["SHA256SUMS"]


def _in_loss(stop_reason: str | None, outcome: float | None) -> bool:
    return stop_reason is not None and stop_reason not in _NOT_BY_POLICY and outcome is not None


def _check_lag(db: Database, report: AuditReport) -> None:
    """Check that each episode in the lineage has a token within the lag bound of its take, if it sampled any."""
    steps_of: dict[int, int] = dict(db.rows("SELECT version, step FROM versions"))
    rows = db.execute(
        "SELECT l.episode_id, l.step, l.max_lag, t.spans FROM lineage l JOIN episodes e ON e.id = l.episode_id"
        " JOIN turns t ON t.episode_id = e.id AND t.trial = e.trial WHERE l.undone_attempt IS NULL AND t.learns = 1"
        " ORDER BY l.id"
    )
    lags: defaultdict[tuple[int, int, int], list[int]] = defaultdict(list)
    for episode, step, bound, spans in rows:
        for version, start, end, *_ in json.loads(spans):
            # After a rollback a token may come from weights of a step that this lineage has not reached again. Such a
            # token is off-policy and not old: its lag is 0, never negative. An unknown version is reported by
            # `_check_spans`.
            behind = max(0, step - 1 - steps_of.get(version, step - 1))
            lags[episode, step, bound].append(behind)
            if behind > bound:
                report.tokens_stale += end - start
            else:
                report.tokens_trained += end - start
                report.max_lag_seen = max(report.max_lag_seen, behind)
    for (episode, step, bound), behind in lags.items():
        if min(behind) > bound:
            where = f"episode {episode} in step {step}"
            report.breach("trained_stale", f"{where}: its youngest token is of lag {min(behind)}, bound {bound}")


def _check_file(db: Database, report: AuditReport) -> None:
    for fault in db.upkeep.faults():
        report.breach("file_damaged", fault)
