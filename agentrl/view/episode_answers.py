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
from agentrl.store import Scored
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
    sort_order, offset = _one_of(query, "sort", get_args(EpisodeOrder), "episode"), _whole(query, "offset") or 0
    row_limit = min(_whole(query, "limit") or 50, _MOST_ROWS)
    descending = query.get("order", "desc") == "desc"
    with opened.store() as run_store:
        searched_back_to = None
        if search_text := query.get("q", "").strip():
            before = _whole(query, "before")
            searched = run_store.search.search_texts(
                search_text, purpose=episode_filter.purpose, limit=_MOST_MATCHES, budget_s=_SEARCH_S, before=before
            )
            episode_filter, searched_back_to = replace(episode_filter, ids=searched.ids), searched.back_to
        # The histogram is where the bounds are chosen, so they must not cut it. One query then gives both: the total
        # within the bounds is a sum over its values.
        outcomes = run_store.search.outcomes(replace(episode_filter, least=None, most=None))
        episode_rows = run_store.search.find_episodes(
            episode_filter, by=sort_order, descending=descending, offset=offset, limit=row_limit
        )
    low, high = episode_filter.least, episode_filter.most
    is_bounded = low is not None or high is not None
    total_count = sum(
        n
        for value, n in outcomes.items()
        if not is_bounded or (value is not None and (low is None or value >= low) and (high is None or value <= high))
    )
    return {
        "total": total_count,
        "offset": offset,
        "rows": [row_of(row) for row in episode_rows],
        "histogram": histogram(outcomes),
        "searched_back_to": searched_back_to,
    }


def histogram(outcomes: Mapping[float | None, int]) -> Json:
    """Counts of outcome rewards: by value if there are few, else in equal bins. A bin includes both of its bounds."""
    counts_by_value = {value: episode_count for value, episode_count in outcomes.items() if value is not None}
    sorted_values = sorted(counts_by_value)
    # Rewards are often a handful of values (0 and 1, shares of tests): bins of equal width would put two of them into
    # one bar or draw empty ones between.
    if len(sorted_values) <= _BINS:
        outcome_bins = [{"low": value, "high": value, "n": counts_by_value[value]} for value in sorted_values]
    else:
        bin_width = (sorted_values[-1] - sorted_values[0]) / _BINS
        values_of_bins: list[list[float]] = [[] for _ in range(_BINS)]
        for value in sorted_values:
            # The largest value lies on the upper edge of the last bin, and rounding can put others there.
            values_of_bins[min(_BINS - 1, int((value - sorted_values[0]) / bin_width))].append(value)
        outcome_bins = [
            {"low": bin_values[0], "high": bin_values[-1], "n": sum(counts_by_value[value] for value in bin_values)}
            for bin_values in values_of_bins
            if bin_values
        ]
    return {"bins": outcome_bins, "without": outcomes.get(None, 0)}


def detail(opened: OpenedRun, id: int, query: Mapping[str, str]) -> Json:
    """One episode turn by turn, with the members of its group. Raises StoreError for an unknown id."""
    text_limit = None if query.get("whole") == "yes" else _CUT
    with opened.store() as store:
        trajectory = store.reads.trajectory(id)
        group_rows = store.reads.episodes(group_id=trajectory.group_id)
        played_group = store.reads.group(trajectory.group_id)
        restarts = store.reads.restarts(id)
        sizes_by_turn = {turn_size.index: turn_size for turn_size in store.search.turn_sizes(id)}
        group_family = store.search.family(id)
        reasons = _reasons(store.scores.recorded(episode=id), text_limit)
        # Of turns that learn alone: the versions of a frozen role's model are none of the policy's steps.
        learned_versions = {
            version for turn in trajectory.turns if turn.learns for version in sizes_by_turn[turn.index].versions
        }
        step_of_version = {
            version: store.versions.step_of(version)
            for version in sorted(learned_versions)
            if store.versions.knows_version(version)
        }
    episode_row = next(episode_row for episode_row in group_rows if episode_row.id == id)
    dumped_columns = {} if episode_row.taken_step is None else _dumped(opened, episode_row.taken_step, id)
    member_advantages = _advantages(opened, played_group)
    frozen_roles = opened.config.rollout.frozen_roles()
    learning_roles = {turn.role for turn in trajectory.turns} - {*frozen_roles}
    # Those of several roles come role by role, and not turn by turn.
    turn_advantages = iter(member_advantages.get(trajectory.member, ()) if len(learning_roles) == 1 else ())
    return {
        **row_of(episode_row),
        "detail": episode_row.detail[:_CUT],
        "group_state": _group_state(episode_row),
        "start": _messages(trajectory.start, text_limit),
        "turns": [
            _turn(opened.tokenizer, turn, sizes_by_turn[turn.index], text_limit)
            | {"advantage": next(turn_advantages, None) if turn.role in learning_roles else None}
            | {"reasons": reasons.get(turn.id, {})}
            | {"columns": _columns(turn, dumped_columns.get(turn.index, {}), text_limit)}
            for turn in trajectory.turns
        ],
        "weight_steps": step_of_version,
        "task": {"kwargs": dict(trajectory.task.kwargs), "options": dict(trajectory.task.options)},
        "siblings": _members(played_group, member_advantages, group_rows),
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
            for entry in group_family
        ],
    }


def group(opened: OpenedRun, id: int, query: Mapping[str, str]) -> Json:
    """The members of a group with their conversations, side by side. Raises StoreError for an unknown id."""
    with opened.store() as run_store:
        played_group = run_store.reads.group(id)
        group_rows = run_store.reads.episodes(group_id=id)
    # Shorter than in an episode's own answer, since a group has a dozen of them.
    text_limit = None if query.get("whole") == "yes" else _CUT // 5
    members = _members(played_group, _advantages(opened, played_group), group_rows)
    for member, trajectory in zip(members, played_group.trajectories, strict=True):
        member["turns"] = [
            {"text": _text(turn.text, text_limit), "role": turn.role, "reward": turn.reward}
            for turn in trajectory.turns
        ]
    return {
        "id": id,
        "state": played_group.state.value,
        "size": played_group.size,
        "task": {"env": played_group.task.env, "seed": played_group.task.seed, "index": played_group.task.index},
        "started_step": played_group.started_step,
        "taken_step": played_group.taken_step,
        "start": _messages(played_group.trajectories[0].start if played_group.trajectories else (), text_limit),
        "members": members,
    }


def step(opened: OpenedRun, number: int, _query: Mapping[str, str]) -> Json:
    """Return what an optimizer step measured and which episodes it trained. Raises UsageError for a step that was not
    made."""
    step_row = next((step_row for step_row in opened.steps() if step_row.step == number), None)
    if step_row is None:
        raise UsageError(f"step {number}: it has not been made yet, or was undone")
    with opened.store() as run_store:
        episode_ids = run_store.lineage.episodes_of(number)
        episodes = run_store.search.find_episodes(
            EpisodeFilter(purpose=None, ids=tuple(episode_ids)), by="group", limit=len(episode_ids) or 1
        )
    return {
        "step": number,
        "time_s": step_row.time_s,
        "attempt": step_row.attempt,
        "values": opened.values()[opened.steps().index(step_row)],
        "alarms": [str(alarm) for alarm in cast("list[object]", step_row.values.get("alarms") or [])],
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
    is_lost = row.group_state in (GroupState.EXPIRED, GroupState.FAILED) and not row.late
    return row.dropped or ((row.group_reason or row.group_state.value) if is_lost else None)


def _turn(tokenizer: Tokenizer | None, turn: Turn, size: TurnSize, cut: int | None) -> Json:
    shown_count = len(turn.token_ids) if cut is None else _MOST_TOKENS
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
            {"id": token_id, "text": token_text, "logprob": logprob, "version": version}
            for token_id, token_text, logprob, version in zip(
                turn.token_ids[:shown_count],
                _pieces(tokenizer, turn.token_ids[:shown_count]),
                turn.logprobs[:shown_count],
                turn.versions[:shown_count],
                strict=True,
            )
        ],
        "observation": None if turn.step is None else _messages(turn.step.observation, cut),
        "terminated": turn.step is not None and turn.step.terminated,
        "truncated": turn.step is not None and turn.step.truncated,
    }


def _reasons(scores: Sequence[Scored], cut: int | None) -> dict[str, dict[str, Json]]:
    """The reasons that sources gave for their values that count, by the id of the turn."""
    by_turn = dict[str, dict[str, Json]]()
    for score in scores:
        if score.counts and score.reason:
            by_turn.setdefault(score.turn_id, {})[score.source] = _text(score.reason, cut)
    return by_turn


def _columns(turn: Turn, dumped: Mapping[str, Sequence[Any]], cut: int | None) -> dict[str, list[float | None]]:
    """Return, by name, a number of each token that is shown: what the engine reported of it, and what the step did to
    it."""
    token_count = len(turn.token_ids)
    shown = token_count if cut is None else min(token_count, _MOST_TOKENS)
    # A column of another length is not of these tokens, and would be drawn beside the wrong ones.
    turn_columns = {name: values for name, values in turn.columns.items() if len(values) == token_count}
    return {name: [_number(value) for value in values[:shown]] for name, values in {**turn_columns, **dumped}.items()}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _dumped(opened: OpenedRun, step: int, episode: int) -> dict[int, dict[str, list[Any]]]:
    """Read what `agentrl retrain RUN --step N --dump RUN/tokens/N.jsonl` has written about an episode, by turn."""
    dump_path, by_turn = opened.run.token_dump(step), dict[int, dict[str, list[Any]]]()
    try:
        with dump_path.open(encoding="utf-8") as dump_file:
            for dump_line in dump_file:
                line_head = _DUMPED.match(dump_line)
                # Read with an expression over the first characters, and only a line that is wanted is parsed: a dump
                # has all tokens of a step, and JSON of hundreds of megabytes would be read for one episode.
                if line_head is None or int(line_head[1]) != 0 or int(line_head[2]) != episode:  # of the first pass
                    continue
                dump_row: Json = json.loads(dump_line)
                dumped_columns = {column: dump_row[column] for column in _DUMPED_COLUMNS if column in dump_row}
                if "logprob" in dump_row and "behaviour" in dump_row:
                    dumped_columns["ratio"] = [
                        # Capped, since `exp` of a difference beyond 709 raises OverflowError, and such a ratio is
                        # just what a page is opened for. e^50 says as much.
                        None if logprob is None or behaviour is None else math.exp(min(50.0, logprob - behaviour))
                        for logprob, behaviour in zip(dump_row["logprob"], dump_row["behaviour"], strict=True)
                    ]
                by_turn[int(line_head[3])] = dumped_columns
    # Nearly every run has no dump, and one that is being written ends in half a line. The episode is shown without.
    except (OSError, ValueError):
        return {}
    return by_turn


def _pieces(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[str | None]:
    """The text of each token by itself; None if nobody knows. A token may be part of a character."""
    if tokenizer is None:
        return [None] * len(ids)
    token_texts = [tokenizer.decode([token_id], skip_special_tokens=False) for token_id in ids]
    return [
        # A token that is a part of a character has no text of its own and decodes to a replacement mark. Its name in
        # the vocabulary at least tells it from another one.
        (tokenizer.id_to_token(token_id) or token_text) if "\ufffd" in token_text or not token_text else token_text
        for token_id, token_text in zip(ids, token_texts, strict=True)
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
    late_records = {
        trajectory.member: trajectory.record
        for trajectory in group.trajectories
        if trajectory.member not in group.record and trajectory.scored
    }
    return advantages(group.record, returns_of(opened.config).for_env(group.task.env), late_records)


def _members(group: Group, judged: Mapping[int, Sequence[float]], rows: Sequence[EpisodeRow]) -> list[Json]:
    token_counts = {episode_row.id: episode_row.tokens for episode_row in rows}
    return [
        _member(trajectory, judged.get(trajectory.member, ()), token_counts[trajectory.episode_id])
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
    stop_reason = _one_of(query, "stop", [reason.value for reason in StopReason], None)
    return EpisodeFilter(
        purpose=None if purpose == "all" else purpose,
        env=query.get("env") or None,
        group=_whole(query, "group"),
        step=_whole(query, "step"),
        state=_one_of(query, "state", ("waiting", "running", "finished", "expired"), None),
        stop_reason=None if stop_reason is None else StopReason(stop_reason),
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
    query_value = query.get(key) or unset
    if query_value is not None and query_value not in known:
        raise UsageError(f"{key} = {query_value!r}: give one of {', '.join(known)}")
    return query_value


def _whole(query: Mapping[str, str], key: str) -> int | None:
    query_value = query.get(key)
    if not query_value:
        return None
    # `isdigit` holds for other scripts, too, and `int` would read them; 15 digits fit in an integer of SQLite and in
    # a number of JavaScript.
    if not query_value.isascii() or not query_value.isdigit() or len(query_value) > 15:
        raise UsageError(f"{key} = {query_value[:50]!r}: give a whole number from 0 on")
    return int(query_value)


def _decimal(query: Mapping[str, str], key: str) -> float | None:
    query_value = query.get(key)
    try:
        return float(query_value) if query_value else None
    except ValueError:
        raise UsageError(f"{key} = {str(query_value)[:50]!r}: give a number") from None
