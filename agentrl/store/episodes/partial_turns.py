"""The turn under way of a running episode: its tokens so far, kept until the turn is journaled or the episode ends.

A row holds the tokens that came since the row before it, so a turn takes space by its length, however often it is
written. The caller checks the fence and holds the transaction. Never decides when to write.

The blob of a row is, little-endian: u32 P · u32[P] prompt ids · u32[n] sampled ids · f64[n] log-probs, then
named columns as in `codec`. Only the first row of a turn has the prompt.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import StoreError
from agentrl.records import POLICY, VersionSpan, spans_of
from agentrl.store.codec import pack_columns, pack_spans, unpack_columns, unpack_spans
from agentrl.store.databases.database import Database
from agentrl.store.databases.driver import Row
from agentrl.tokens.columns import Columns, joined


# Why the tokens of the turn under way have a table of their own.
#
# An unfinished turn could be a row of `turns` that grows. Then each reader of turns would have to know that the last
# one may be unfinished: the learner that makes rows of them, the sources that score them, a replay that repeats them,
# the audit. Now a row of `turns` is an action that the environment may see, and is written whole. A turn under way
# changes every few tokens, and its parts are deleted in the transaction that journals it.
#
# Parts are only appended, so a part that is lost would leave a gap: whoever goes on would put later tokens behind
# earlier ones that they never followed (law 1). So each part says how many tokens came before it (`at`), and the store
# refuses one that does not begin where the written parts end. The writer sends the tokens of a failed write again.
#
# A version may become known after its token: a span with a negative start corrects tokens of an earlier part. So the
# parts are joined over one list of versions, an entry for each token, and spans are made of that list at the end.
#
# The prompt is written once, with the first part, and a turn that goes on is sampled behind these very tokens. To
# render it again could give another prompt if the template or the tools have changed meanwhile.
#
# The price is a second place that a claim has to read. `tests/store/test_partials.py` writes parts, refuses those that
# do not follow, and counts the bytes; `tests/rollout/test_partial_turns.py` goes on from them.
@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Tokens of the unfinished turn `index`, in the form of `Turn`: `token_ids` [T] after `prompt_ids`, with log-probs
    [T]. `at` tokens of the turn came before these; it is 0 in a claim.

    `spans` count from the first of these tokens; a span with a negative start corrects earlier tokens. `spent_s` is how
    much of the turn's deadline is used, `started_s` when the turn began."""

    index: int
    parent: int | None
    role: str = POLICY
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    spans: tuple[VersionSpan, ...] = ()
    at: int = 0
    started_s: float = 0.0
    spent_s: float = 0.0
    columns: Columns = field(default_factory=dict[str, tuple[float, ...]])


def pack_part(episode_id: int, part: Partial) -> tuple[Any, ...]:
    """The row of a part. Raises StoreError for an id that is no 32-bit unsigned integer (law 1)."""
    prompt_ids = part.prompt_ids if part.at == 0 else ()
    token_count = len(part.token_ids)
    try:
        # Log-probs are float64, so a token of an interrupted turn keeps the very number that its engine sent (law 1).
        packed_part = struct.pack(
            f"<I{len(prompt_ids) + token_count}I{token_count}d",
            len(prompt_ids),
            *prompt_ids,
            *part.token_ids,
            *part.logprobs,
        )
    except struct.error as error:
        raise StoreError(f"turn {part.index}: its tokens so far cannot be written: {error}") from error
    # Unlike a turn, a part is not compressed: it lives until its turn is journaled.
    packed_part += pack_columns(part.columns, token_count, f"turn {part.index}")
    packed_spans, times_s = pack_spans(part.spans), (part.started_s, part.spent_s)
    return (episode_id, part.at, token_count, part.index, part.parent, part.role, packed_spans, *times_s, packed_part)


def load_partials(db: Database, episodes: Sequence[int]) -> list[Partial | None]:
    """The turn under way of each episode, as far as it was written; None if there is none. Inside a transaction."""
    parts_query = (
        "SELECT at, n, turn, parent, role, spans, started_s, spent_s, data FROM partials WHERE episode_id = ?"
        " ORDER BY at"
    )
    return [
        _joined(part_rows) if part_rows else None
        for part_rows in db.all_rows(*((parts_query, (episode_id,)) for episode_id in episodes))
    ]


def _joined(rows: Sequence[Row]) -> Partial:
    """A turn from its parts."""
    prompt_ids, token_ids, logprobs, versions = tuple[int, ...](), list[int](), list[float](), list[int]()
    recomputed = set[int]()
    columns_of_parts = list[tuple[int, Columns]]()
    for first_token, token_count, *_, packed_spans, _, _, packed_part in rows:
        (prompt_count,) = struct.unpack_from("<I", packed_part)
        unpacked_numbers = struct.unpack_from(f"<{prompt_count + token_count}I{token_count}d", packed_part, 4)
        prompt_ids += unpacked_numbers[:prompt_count]
        token_ids += unpacked_numbers[prompt_count : prompt_count + token_count]
        logprobs += unpacked_numbers[prompt_count + token_count :]
        columns_of_parts.append(
            (token_count, unpack_columns(packed_part[4 + 4 * (prompt_count + token_count) + 8 * token_count :]))
        )
        versions += [-1] * token_count
        for span in unpack_spans(packed_spans):
            versions[first_token + span.start : first_token + span.end] = [span.version] * (span.end - span.start)
            if span.recomputed:
                recomputed.add(first_token + span.start)
    *_, (_, _, turn_index, parent_index, role, _, started_s, spent_s, _) = rows
    return Partial(
        index=turn_index,
        parent=parent_index,
        role=role,
        prompt_ids=prompt_ids,
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        spans=spans_of(versions, recomputed),
        started_s=started_s,
        spent_s=spent_s,
        columns=joined(columns_of_parts),
    )


def discard_partial(db: Database, episode_id: int) -> None:
    """Forget the turn under way although its episode could go on from it, and note how many tokens that cost."""
    db.execute(
        "INSERT INTO discarded SELECT p.episode_id, e.trial, p.turn, SUM(p.n), ? FROM partials p"
        " JOIN episodes e ON e.id = p.episode_id WHERE p.episode_id = ? GROUP BY p.episode_id",
        (db.clock(), episode_id),
    )
    drop_partial(db, episode_id)


def drop_partial(db: Database, episode_id: int) -> None:
    """Forget the turn under way: it is journaled, or its episode begins anew or is over."""
    db.execute("DELETE FROM partials WHERE episode_id = ?", (episode_id,))
