"""Episodes as JSON: lists with filters, one turn by turn, the members of a group, what a step trained.

Texts that a policy or its tools wrote go out as they are, as strings of JSON; long ones are cut unless the request is
for all. Knows nothing of HTTP.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Final, cast, get_args

from tokenizers import Tokenizer

from agentrl.algos.judging import advantages
from agentrl.errors import UsageError
from agentrl.records import Group, GroupState, Messages, StopReason, Trajectory, Turn
from agentrl.run.take_orders import returns_of
from agentrl.store.episode_search import EpisodeFilter, EpisodeOrder, TurnSize
from agentrl.store.reads import EpisodeRow
from agentrl.tokens import images
from agentrl.view.file_edits import edits_of
from agentrl.view.opened_runs import OpenedRun

Json = dict[str, Any]
_MOST_ROWS = 200  # of one answer
_MOST_MATCHES = 2000  # episodes with a text
# A search reads texts from the newest on and stops after this time; `searched_back_to` lets the page go on from
# there. An index of all texts would cost the run at each turn, for a page that is seldom open.
_SEARCH_S = 0.7  # for texts; the rest of a second is for the list
_BINS = 20
_CUT = 20_000  # characters of a text
_MOST_TOKENS = 4000  # shown of a turn
_DUMPED = re.compile(r'\{"pass": (\d{1,9}), "episode": (\d{1,15}), "turn": (\d{1,9}),')
_DUMPED_COLUMNS = ("entropy", "advantage", "gradient", "loss")


def listed(opened: OpenedRun, query: Mapping[str, str]) -> Json:
    """A page of the episodes that a query asks for, how many there are, and a histogram of their outcome rewards, in
    which the bounds on the outcome do not count. Raises UsageError for a query that says nothing."""
    episode_filter = _filter(query)
    by, offset = _one_of(query, "sort", get_args(EpisodeOrder), "episode"), _whole(query, "offset") or 0
    limit = min(_whole(query, "limit") or 50, _MOST_ROWS)
    descending = query.get("order", "desc") == "desc"
    with opened.store() as store:
        back_to = None
        if text := query.get("q", "").strip():
            before = _whole(query, "before")
            searched = store.search.search_texts(
                text, purpose=episode_filter.purpose, limit=_MOST_MATCHES, budget_s=_SEARCH_S, before=before
            )
            episode_filter, back_to = replace(episode_filter, ids=searched.ids), searched.back_to
        # The histogram is where the bounds are chosen, so they must not cut it. One query then gives both: the total
        # within the bounds is a sum over its values.
        outcomes = store.search.outcomes(replace(episode_filter, least=None, most=None))
        rows = store.search.find_episodes(episode_filter, by=by, descending=descending, offset=offset, limit=limit)
    low, high = episode_filter.least, episode_filter.most
    bounded = low is not None or high is not None
    total = sum(
        n
        for value, n in outcomes.items()
        if not bounded or (value is not None and (low is None or value >= low) and (high is None or value <= high))
    )
    return {
        "total": total,
        "offset": offset,
        "rows": [row_of(row) for row in rows],
        "histogram": histogram(outcomes),
        "searched_back_to": back_to,
    }


def histogram(outcomes: Mapping[float | None, int]) -> Json:
    """Counts of outcome rewards: by value if there are few, else in equal bins. A bin includes both of its bounds."""
    counts = {value: n for value, n in outcomes.items() if value is not None}
    values = sorted(counts)
    # Rewards are often a handful of values (0 and 1, shares of tests): bins of equal width would put two of them into
    # one bar or draw empty ones between.
    if len(values) <= _BINS:
        bins = [{"low": value, "high": value, "n": counts[value]} for value in values]
    else:
        width = (values[-1] - values[0]) / _BINS
        values_of_bins: list[list[float]] = [[] for _ in range(_BINS)]
        for value in values:
            # The largest value lies on the upper edge of the last bin, and rounding can put others there.
            values_of_bins[min(_BINS - 1, int((value - values[0]) / width))].append(value)
        bins = [
            {"low": bin_values[0], "high": bin_values[-1], "n": sum(counts[value] for value in bin_values)}
            for bin_values in values_of_bins
            if bin_values
        ]
    return {"bins": bins, "without": outcomes.get(None, 0)}


def detail(opened: OpenedRun, id: int, query: Mapping[str, str]) -> Json:
    """One episode turn by turn, with the members of its group. Raises StoreError for an unknown id."""
    with opened.store() as store:
        trajectory = store.reads.trajectory(id)
        rows = store.reads.episodes(group_id=trajectory.group_id)
        group = store.reads.group(trajectory.group_id)
        restarts = store.reads.restarts(id)
        sizes = {size.index: size for size in store.search.turn_sizes(id)}
        family = store.search.family(id)
        # Of turns that learn alone: the versions of a frozen role's model are none of the policy's steps.
        learned = {version for turn in trajectory.turns if turn.learns for version in sizes[turn.index].versions}
        made_at = {
            version: store.versions.step_of(version)
            for version in sorted(learned)
            if store.versions.knows_version(version)
        }
    row = next(row for row in rows if row.id == id)
    dumped = {} if row.taken_step is None else _dumped(opened, row.taken_step, id)
    judged = _advantages(opened, group)
    cut = None if query.get("whole") == "yes" else _CUT
    frozen = opened.config.rollout.frozen_roles()
    roles = {turn.role for turn in trajectory.turns} - {*frozen}
    of_turns = iter(judged.get(trajectory.member, ()) if len(roles) == 1 else ())  # those of several come role by role
    return {
        **row_of(row),
        "detail": row.detail[:_CUT],
        "group_state": _group_state(row),
        "start": _messages(trajectory.start, cut),
        "turns": [
            _turn(opened.tokenizer, turn, sizes[turn.index], cut)
            | {"advantage": next(of_turns, None) if turn.role in roles else None}
            | {"columns": _columns(turn, dumped.get(turn.index, {}), cut)}
            for turn in trajectory.turns
        ],
        "weight_steps": made_at,
        "task": {"kwargs": dict(trajectory.task.kwargs), "options": dict(trajectory.task.options)},
        "siblings": _members(group, judged, rows),
        "outcomes": dict(trajectory.outcomes),
        "weights": dict(trajectory.weights),
        "restarts": [
            {
                "trial": entry.trial,
                "reason": entry.reason[:_CUT],
                "turns": [{"index": turn.index, "text": _text(turn.text, _CUT // 10)} for turn in entry.turns],
            }
            for entry in restarts
        ],
        "family": [
            {"group": entry.group_id, "of": entry.of, "turn": entry.turn, "members": list(entry.members)}
            for entry in family
        ],
    }


def group(opened: OpenedRun, id: int, query: Mapping[str, str]) -> Json:
    """The members of a group with their conversations, side by side. Raises StoreError for an unknown id."""
    with opened.store() as store:
        played_group = store.reads.group(id)
        rows = store.reads.episodes(group_id=id)
    # Shorter than in an episode's own answer, since a group has a dozen of them.
    cut = None if query.get("whole") == "yes" else _CUT // 5
    members = _members(played_group, _advantages(opened, played_group), rows)
    for member, trajectory in zip(members, played_group.trajectories, strict=True):
        member["turns"] = [
            {"text": _text(turn.text, cut), "role": turn.role, "reward": turn.reward} for turn in trajectory.turns
        ]
    return {
        "id": id,
        "state": played_group.state.value,
        "size": played_group.size,
        "task": {"env": played_group.task.env, "seed": played_group.task.seed, "index": played_group.task.index},
        "started_step": played_group.started_step,
        "taken_step": played_group.taken_step,
        "start": _messages(played_group.trajectories[0].start if played_group.trajectories else (), cut),
        "members": members,
    }


def step(opened: OpenedRun, number: int, _query: Mapping[str, str]) -> Json:
    """Return what an optimizer step measured and which episodes it trained. Raises UsageError for a step that was not
    made."""
    row = next((row for row in opened.steps() if row.step == number), None)
    if row is None:
        raise UsageError(f"step {number}: it has not been made yet, or was undone")
    with opened.store() as store:
        ids = store.lineage.episodes_of(number)
        episodes = store.search.find_episodes(
            EpisodeFilter(purpose=None, ids=tuple(ids)), by="group", limit=len(ids) or 1
        )
    return {
        "step": number,
        "time_s": row.time_s,
        "attempt": row.attempt,
        "values": opened.values()[opened.steps().index(row)],
        "alarms": [str(alarm) for alarm in cast("list[object]", row.values.get("alarms") or [])],
        "episodes": [row_of(episode) for episode in episodes],
    }


def row_of(row: EpisodeRow) -> Json:
    """One episode, for a list."""
    return {
        "id": row.id,
        "group": row.group_id,
        "member": row.member,
        "size": row.size,
        "purpose": row.purpose,
        "env": row.task.env,
        "seed": row.task.seed,
        "state": row.state,
        "stop_reason": None if row.stop_reason is None else row.stop_reason.value,
        "outcome": row.outcome,
        "success": row.success,
        "turns": row.turns,
        "tokens": row.tokens,
        "seconds": None if row.ended_s is None or row.started_s is None else row.ended_s - row.started_s,
        "late": row.late,
        "step": row.taken_step if row.dropped is None else None,
        "dropped": _dropped(row),
        "trial": row.trial,
        "admitted_s": row.admitted_s,
        "started_s": row.started_s,
        "ended_s": row.ended_s,
    }


def _group_state(row: EpisodeRow) -> str:
    """The state of an episode's group; of one that left the buffer untrained the reason, which the state hides: a group
    whose members earned the same has not expired."""
    is_left_out = row.group_state in (GroupState.EXPIRED, GroupState.FAILED)
    return (
        f"left out: {(row.group_reason or row.group_state.value).replace('_', ' ')}"
        if is_left_out
        else row.group_state.value
    )


def _dropped(row: EpisodeRow) -> str | None:
    """Why an episode left the buffer untrained: its own reason, or its group's."""
    lost = row.group_state in (GroupState.EXPIRED, GroupState.FAILED) and not row.late
    return row.dropped or ((row.group_reason or row.group_state.value) if lost else None)


def _turn(tokenizer: Tokenizer | None, turn: Turn, size: TurnSize, cut: int | None) -> Json:
    shown = len(turn.token_ids) if cut is None else _MOST_TOKENS
    return {
        "id": turn.id,
        "index": turn.index,
        "parent": turn.parent,
        "role": turn.role,
        "learns": turn.learns,
        "finish": turn.finish,
        "text": _text(turn.text, cut),
        "reward": turn.reward,
        "rewards": turn.rewards,
        "seconds": turn.ended_s - turn.started_s,
        "started_s": turn.started_s,
        "edits": edits_of(turn.text[:_CUT]),
        "prompt_tokens": size.prompt_tokens,
        "n_tokens": size.tokens,
        "versions": list(size.versions),
        "tokens": [
            {"id": id, "text": text, "logprob": logprob, "version": version}
            for id, text, logprob, version in zip(
                turn.token_ids[:shown],
                _pieces(tokenizer, turn.token_ids[:shown]),
                turn.logprobs[:shown],
                turn.versions[:shown],
                strict=True,
            )
        ],
        "observation": None if turn.step is None else _messages(turn.step.observation, cut),
        "terminated": turn.step is not None and turn.step.terminated,
        "truncated": turn.step is not None and turn.step.truncated,
    }


def _columns(turn: Turn, dumped: Mapping[str, Sequence[Any]], cut: int | None) -> dict[str, list[float | None]]:
    """Return, by name, a number of each token that is shown: what the engine reported of it, and what the step did to
    it."""
    n = len(turn.token_ids)
    shown = n if cut is None else min(n, _MOST_TOKENS)
    # A column of another length is not of these tokens, and would be drawn beside the wrong ones.
    columns = {name: values for name, values in turn.columns.items() if len(values) == n}
    return {name: [_number(value) for value in values[:shown]] for name, values in {**columns, **dumped}.items()}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _dumped(opened: OpenedRun, step: int, episode: int) -> dict[int, dict[str, list[Any]]]:
    """Read what `agentrl retrain RUN --step N --dump RUN/tokens/N.jsonl` has written about an episode, by turn."""
    path, by_turn = opened.run.token_dump(step), dict[int, dict[str, list[Any]]]()
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                head = _DUMPED.match(line)
                # Read with an expression over the first characters, and only a line that is wanted is parsed: a dump
                # has all tokens of a step, and JSON of hundreds of megabytes would be read for one episode.
                if head is None or int(head[1]) != 0 or int(head[2]) != episode:  # of the first pass
                    continue
                row: Json = json.loads(line)
                dumped = {name: row[name] for name in _DUMPED_COLUMNS if name in row}
                if "logprob" in row and "behaviour" in row:
                    dumped["ratio"] = [
                        # Capped, since `exp` of a difference beyond 709 raises OverflowError, and such a ratio is
                        # just what a page is opened for. e^50 says as much.
                        None if a is None or b is None else math.exp(min(50.0, a - b))
                        for a, b in zip(row["logprob"], row["behaviour"], strict=True)
                    ]
                by_turn[int(head[3])] = dumped
    # Nearly every run has no dump, and one that is being written ends in half a line. The episode is shown without.
    except (OSError, ValueError):
        return {}
    return by_turn


def _pieces(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str | None]:
    """The text of each token by itself; None if nobody knows. A token may be part of a character."""
    if tokenizer is None:
        return [None] * len(ids)
    pieces = [tokenizer.decode([id], skip_special_tokens=False) for id in ids]
    return [
        # A token that is a part of a character has no text of its own and decodes to a replacement mark. Its name in
        # the vocabulary at least tells it from another one.
        (tokenizer.id_to_token(id) or piece) if "\ufffd" in piece or not piece else piece
        for id, piece in zip(ids, pieces, strict=True)
    ]


def _messages(messages: Messages, cut: int | None) -> list[Json]:
    return [
        {
            "role": str(message["role"]),
            "content": _text(str(message["content"]), cut),
            "images": [
                {"digest": image.digest, "type": image.media_type, "width": image.width, "height": image.height}
                for image in images.of_messages([message])
            ],
            "calls": [
                {"name": str(call["function"].get("name", "")), "arguments": str(call["function"].get("arguments", ""))}
                for call in message.get("tool_calls", ())
            ],
        }
        for message in messages
    ]


def _text(text: str, cut: int | None) -> Json:
    """A text with its length, cut at so many characters."""
    return {"text": text if cut is None else text[:cut], "length": len(text)}


def _advantages(opened: OpenedRun, group: Group) -> dict[int, list[float]]:
    """Return, by member, the advantage of each turn that learns, over the others of its group, before any scale.
    Members that ended after the group closed are judged by its record. Nothing for a group that is still open."""
    if group.record is None:
        return {}
    # Members that came after the group closed have no part in its baseline, but are trained against it: the record as
    # it was at the close is the one that the learner used.
    late = {
        trajectory.member: trajectory.record
        for trajectory in group.trajectories
        if trajectory.member not in group.record and trajectory.scored
    }
    return advantages(group.record, returns_of(opened.config).for_env(group.task.env), late)


def _members(group: Group, judged: Mapping[int, Sequence[float]], rows: Sequence[EpisodeRow]) -> list[Json]:
    tokens = {row.id: row.tokens for row in rows}
    return [
        _member(trajectory, judged.get(trajectory.member, ()), tokens[trajectory.episode_id])
        for trajectory in group.trajectories
    ]


def _member(one: Trajectory, judged: Sequence[float], tokens: int) -> Json:
    return {
        "id": one.episode_id,
        "member": one.member,
        "outcome": one.outcome,
        "success": one.success,
        "stop_reason": None if one.stop_reason is None else one.stop_reason.value,
        "n_turns": len(one.turns),
        "tokens": tokens,
        "reward": (one.outcome or 0.0) + sum(one.rewards),
        "advantage": fmean(judged) if judged else None,
    }


_YES_NO: Final = {"yes": True, "no": False}


def _filter(query: Mapping[str, str]) -> EpisodeFilter:
    purpose = query.get("purpose") or "train"
    stop = _one_of(query, "stop", [reason.value for reason in StopReason], None)
    return EpisodeFilter(
        purpose=None if purpose == "all" else purpose,
        env=query.get("env") or None,
        group=_whole(query, "group"),
        step=_whole(query, "step"),
        state=_one_of(query, "state", ("waiting", "running", "finished", "expired"), None),
        stop_reason=None if stop is None else StopReason(stop),
        success=_YES_NO.get(query.get("success", "")),
        late=_YES_NO.get(query.get("late", "")),
        dropped=_YES_NO.get(query.get("dropped", "")),
        least=_decimal(query, "min"),
        most=_decimal(query, "max"),
        least_turns=_whole(query, "min_turns"),
        most_turns=_whole(query, "max_turns"),
        role=query.get("role") or None,
        from_weights=_whole(query, "from_weights"),
        to_weights=_whole(query, "to_weights"),
    )


def _one_of(query: Mapping[str, str], key: str, known: Sequence[str], unset: Any) -> Any:
    value = query.get(key) or unset
    if value is not None and value not in known:
        raise UsageError(f"{key} = {value!r}: give one of {', '.join(known)}")
    return value


def _whole(query: Mapping[str, str], key: str) -> int | None:
    value = query.get(key)
    if not value:
        return None
    # `isdigit` holds for other scripts, too, and `int` would read them; 15 digits fit in an integer of SQLite and in
    # a number of JavaScript.
    if not value.isascii() or not value.isdigit() or len(value) > 15:
        raise UsageError(f"{key} = {value[:50]!r}: give a whole number from 0 on")
    return int(value)


def _decimal(query: Mapping[str, str], key: str) -> float | None:
    value = query.get(key)
    try:
        return float(value) if value else None
    except ValueError:
        raise UsageError(f"{key} = {str(value)[:50]!r}: give a number") from None
