"""Episodes in the formats of others: ATIF of Harbor, logs of Inspect, traces of verifiers, Parquet.

The first three are plain JSON, written without these packages, an episode at a time; Parquet needs pyarrow. Texts are
those of the journal, but a lone surrogate, which none of their readers takes, is a question mark. An episode whose
tokens retention dropped has none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal, TextIO, get_args

from agentrl import notices
from agentrl.config import RunConfig
from agentrl.env.tools.calls import dump
from agentrl.errors import UsageError
from agentrl.host.installation import DISTRIBUTION, install_command
from agentrl.offline.conversations import calls_of, conversation, turn_message
from agentrl.records import Message, ShownTools, Trajectory, Turn
from agentrl.store.reads import Readers

ForeignFormat = Literal["atif", "inspect", "verifiers", "parquet"]
FOREIGN: Final[tuple[str, ...]] = get_args(ForeignFormat)
# A row group is what a reader of Parquet has in memory at once, and what it can skip; 64 episodes with all their
# tokens are some tens of megabytes at most.
_ROWS: Final = 64  # episodes in a row group of Parquet
_SOURCES: Final = {"system": "system", "assistant": "agent"}


def write_episodes(reads: Readers, ids: Iterable[int], form: ForeignFormat, out: Path, config: RunConfig) -> int:
    """Write episodes to `out`, one after the other; returns how many. ATIF has a file `episode-N.json` each, in the
    folder `out`; verifiers is the folder of a file `traces.jsonl`; Inspect's is one log, whose name ends with `.json`.

    Raises UsageError if it cannot be written, for another ending, and if pyarrow is missing."""
    if form == "inspect" and out.suffix != ".json":
        raise UsageError(f"{out}: Inspect knows a log by its ending: give --out {out.with_suffix('.json')}")
    episodes = (_named(reads.trajectory(episode_id)) for episode_id in ids)
    writers: dict[ForeignFormat, Callable[[Iterator[Trajectory], Path, RunConfig], int]] = {
        "atif": _write_atif,
        "inspect": _write_inspect,
        "verifiers": _write_verifiers,
        "parquet": _write_parquet,
    }
    try:
        with notices.gathered():
            return writers[form](episodes, out, config)
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}): give another --out") from error


def _named(trajectory: Trajectory) -> Trajectory:
    """The episode. Pictures in it are named: none of these formats has them."""
    observed = (
        message
        for played_turn in trajectory.turns
        if played_turn.step is not None
        for message in played_turn.step.observation
    )
    for _ in (picture for message in (*trajectory.start, *observed) for picture in message.get("images", ())):
        case_text = "pictures are left out of this format, --format messages has them"
        notices.note("episodes", case_text, place=f"episode {trajectory.episode_id}")
    return trajectory


@contextmanager
def _whole(out: Path) -> Generator[TextIO]:
    """A file that is there when the block has ended well, and not before."""
    # A log of Inspect or a Parquet file without its end is unreadable, and one JSON line too few goes unnoticed. So a
    # file has its name only once it is whole.
    part_path = out.with_name(f"{out.name}.part")
    try:
        with part_path.open("w", encoding="utf-8") as part_file:
            yield part_file
        part_path.replace(out)
    finally:
        part_path.unlink(missing_ok=True)


def _text(text: str) -> str:
    """Text that UTF-8 can hold."""
    # JSON escapes a lone surrogate and Python reads it back; the readers here are in other languages or in pydantic,
    # which refuse the whole file for it. A byte-level model does sample such texts.
    return text.encode(errors="replace").decode()


def _facts(trajectory: Trajectory) -> dict[str, Any]:
    played_task = trajectory.task
    return {
        "episode": trajectory.episode_id,
        "group": trajectory.group_id,
        "env": played_task.env,
        "seed": played_task.seed,
        "outcome": trajectory.outcome,
        "success": trajectory.success,
        "stop_reason": None if trajectory.stop_reason is None else trajectory.stop_reason.value,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


# --- ATIF -----------------------------------------------------------------------------------------------------------


def _write_atif(episodes: Iterator[Trajectory], out: Path, config: RunConfig) -> int:
    out.mkdir(parents=True, exist_ok=True)
    episode_count = 0
    for trajectory in episodes:
        episode_path = out / f"episode-{trajectory.episode_id}.json"
        episode_path.write_text(json.dumps(_atif(trajectory, config), indent=1), encoding="utf-8")
        episode_count += 1
    return episode_count


def _atif(trajectory: Trajectory, config: RunConfig) -> dict[str, Any]:
    atif_steps = [_atif_step(message) for message in trajectory.start]
    for played_turn in trajectory.turns:
        atif_steps += _atif_turn(played_turn, trajectory.tools)
    tool_field = {"tool_definitions": list(trajectory.tools.schemas)} if trajectory.tools.schemas else {}
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": config.name,
        "trajectory_id": f"{config.name}-{trajectory.episode_id}",
        "agent": {"name": "agentrl", "version": version(DISTRIBUTION), "model_name": config.model, **tool_field},
        "steps": [{"step_id": step_number, **atif_step} for step_number, atif_step in enumerate(atif_steps, 1)],
        "final_metrics": {
            "total_completion_tokens": sum(len(played_turn.token_ids) for played_turn in trajectory.turns),
            "total_steps": len(atif_steps),
        },
        "extra": _facts(trajectory),
    }


def _atif_step(message: Message) -> dict[str, Any]:
    """A message that is no turn of the policy. A tool's message before the first turn counts as the user's."""
    return {"source": _SOURCES.get(message["role"], "user"), "message": _text(message["content"])}


def _atif_turn(turn: Turn, tools: ShownTools) -> Iterator[dict[str, Any]]:
    """The turn with its calls and the answers of tools, then the other words of the environment. The message is the
    text as it was sampled, calls included."""
    observed = () if turn.step is None else turn.step.observation
    tool_calls = calls_of(turn, tools)
    call_ids = {tool_call["id"] for tool_call in tool_calls}
    tool_results: list[dict[str, Any]] = []
    for message in (message for message in observed if message["role"] == "tool"):
        # ATIF checks that an answer names a call of its own step. An answer to a call that was broken, and is
        # therefore text, names none.
        source_call_id = message.get("tool_call_id")
        tool_results.append(
            {
                "content": _text(message["content"]),
                **({"source_call_id": source_call_id} if source_call_id in call_ids else {}),
            }
        )
    measured: dict[str, Any] = {}
    if turn.token_ids:
        measured = {
            "completion_tokens": len(turn.token_ids),
            "completion_token_ids": list(turn.token_ids),
            "logprobs": list(turn.logprobs),
        }
    atif_step: dict[str, Any] = {
        "source": "agent",
        # The calls are repeated in `tool_calls`; the text stays as sampled because a reader who debugs a policy wants
        # to see what it wrote, marks included, not what a parser made of it.
        "message": _text(turn.text),
        "timestamp": _time(turn.ended_s),
        "llm_call_count": 1,
        "extra": {"turn": turn.id, "role": turn.role, "reward": turn.reward, "finish": turn.finish},
    }
    if tool_calls:
        atif_step["tool_calls"] = [
            {
                "tool_call_id": tool_call["id"],
                "function_name": tool_call["function"]["name"],
                "arguments": tool_call["function"]["arguments"],
            }
            for tool_call in tool_calls
        ]
    if measured:
        atif_step["metrics"] = measured
    if tool_results:
        atif_step["observation"] = {"results": tool_results}
    yield atif_step
    yield from (_atif_step(message) for message in observed if message["role"] != "tool")


# --- Inspect --------------------------------------------------------------------------------------------------------


def _write_inspect(episodes: Iterator[Trajectory], out: Path, config: RunConfig) -> int:
    # Inspect wants the times of its own evaluation; the log is made now. When an episode was played is in its sample.
    sample_count, export_time = 0, _time(datetime.now(UTC).timestamp())
    log_head = {
        "version": 2,
        "status": "success",
        "eval": {
            "created": export_time,
            "task": config.name,
            "dataset": {"name": "agentrl"},
            "model": f"agentrl/{config.model}",
            "config": {},
            "metadata": {"agentrl": version(DISTRIBUTION)},
        },
        "stats": {"started_at": export_time, "completed_at": export_time},
    }
    with _whole(out) as log_file:
        # The head without its closing brace, then the samples as they come: a log is one JSON object, and a run's
        # episodes are more than should be in memory at once.
        log_file.write(json.dumps(log_head)[:-1] + ', "samples": [')
        for trajectory in episodes:
            log_file.write((",\n" if sample_count else "\n") + json.dumps(_inspect_sample(trajectory, config)))
            sample_count += 1
        log_file.write("\n]}\n")
    return sample_count


def _inspect_sample(trajectory: Trajectory, config: RunConfig) -> dict[str, Any]:
    played_turns = trajectory.turns
    sample_scores = {
        score_name: {"value": score_value}
        for score_name, score_value in (("outcome", trajectory.outcome), ("success", trajectory.success))
        if score_value is not None
    }
    token_usage = {
        "input_tokens": sum(len(played_turn.prompt_ids) for played_turn in played_turns),
        "output_tokens": sum(len(played_turn.token_ids) for played_turn in played_turns),
    }
    inspect_sample: dict[str, Any] = {
        "id": trajectory.episode_id,
        "epoch": 1,
        "input": [_message(message) for message in trajectory.start],
        # Required by the format. Rewards here are computed, not compared with a target text.
        "target": "",
        "messages": [_message(message) for message in conversation(trajectory)],
        "scores": sample_scores,
        "metadata": _facts(trajectory),
        "model_usage": {config.model: {**token_usage, "total_tokens": sum(token_usage.values())}},
    }
    if played_turns:
        stop_reason = "max_tokens" if played_turns[-1].finish == "length" else "stop"
        last_choice = {
            "message": {"role": "assistant", "content": _text(played_turns[-1].text)},
            "stop_reason": stop_reason,
        }
        inspect_sample["output"] = {"model": config.model, "choices": [last_choice]}
        inspect_sample["started_at"], inspect_sample["completed_at"] = (
            _time(played_turns[0].started_s),
            _time(played_turns[-1].ended_s),
        )
        inspect_sample["total_time"] = max(0.0, played_turns[-1].ended_s - played_turns[0].started_s)
    return inspect_sample


def _calls(message: Message) -> list[dict[str, Any]]:
    """The calls of a message, in OpenAI's envelope."""
    return list(message.get("tool_calls", []))


def _message(message: Message) -> dict[str, Any]:
    """A message of Inspect's: calls have the function's name and its arguments beside each other."""
    shown_message: dict[str, Any] = {"role": message["role"], "content": _text(message["content"])}
    if tool_calls := _calls(message):
        shown_message["tool_calls"] = [
            {
                "id": tool_call["id"],
                "function": tool_call["function"]["name"],
                "arguments": tool_call["function"]["arguments"],
                "type": "function",
            }
            for tool_call in tool_calls
        ]
    if message["role"] == "tool":
        shown_message |= {"tool_call_id": message.get("tool_call_id"), "function": message.get("name")}
    return shown_message


# --- verifiers ------------------------------------------------------------------------------------------------------


def _write_verifiers(episodes: Iterator[Trajectory], out: Path, config: RunConfig) -> int:
    out.mkdir(parents=True, exist_ok=True)
    episode_count = 0
    with _whole(out / "traces.jsonl") as trace_file:
        for trajectory in episodes:
            trace_file.write(json.dumps(_verifiers_episode(trajectory, config)) + "\n")
            episode_count += 1
    return episode_count


def _verifiers_episode(trajectory: Trajectory, config: RunConfig) -> dict[str, Any]:
    """An episode with one trace. The tokens of a turn, those of its prompt that are new included, are its node's."""
    trace_id, played_task = f"{config.name}-{trajectory.episode_id}", trajectory.task
    task_fields = {
        "type": played_task.env,
        "data": {"idx": played_task.index, "id": f"{played_task.env}/{played_task.seed}", "seed": played_task.seed},
    }
    trace: dict[str, Any] = {
        "id": trace_id,
        "task": task_fields,
        "agent": {"config": {"model": config.model}},
        "nodes": _nodes(trajectory),
        "rewards": {"outcome": None if trajectory.outcome is None else {"score": trajectory.outcome}},
        "metrics": {"success": None if trajectory.success is None else float(trajectory.success)},
        "info": _facts(trajectory),
        "is_completed": trajectory.stop_reason is not None,
        "ok": trajectory.scored,
        "stop_condition": None if trajectory.stop_reason is None else trajectory.stop_reason.value,
    }
    episode_fields = {
        "id": trace_id,
        "env": {"id": played_task.env},
        "group": {"id": str(trajectory.group_id)},
        "task": task_fields,
    }
    return {**episode_fields, "traces": [trace], "ok": trajectory.scored}


def _nodes(trajectory: Trajectory) -> list[dict[str, Any]]:
    message_nodes: list[dict[str, Any]] = []
    turn_nodes: list[int] = []
    end_nodes: list[int] = []  # the node that each turn ends with, its answer included

    def add(messages: Iterable[Message], parent: int | None, at_s: float) -> int | None:
        for message in messages:
            shown_message: dict[str, Any] = {"role": message["role"], "content": _text(message["content"])}
            if message["role"] == "tool":
                shown_message["tool_call_id"] = message.get("tool_call_id", "")
            message_nodes.append({"message": shown_message, "parent": parent, "timestamp": at_s})
            parent = len(message_nodes) - 1
        return parent

    first_start_s = trajectory.turns[0].started_s if trajectory.turns else 0.0
    root_node = add(trajectory.start, None, first_start_s)
    for played_turn in trajectory.turns:
        parent_node = root_node if played_turn.parent is None else end_nodes[played_turn.parent]
        # A turn whose parent is not the turn before begins a context of its own (its environment rewrote the
        # history). In a tree of messages that is another root, with the messages that the environment put there.
        previous_step = trajectory.turns[played_turn.index - 1].step if played_turn.index else None
        if previous_step is not None and previous_step.history is not None:
            if played_turn.parent is None:
                parent_node = add(previous_step.history, None, played_turn.started_s)
            else:  # other conversations took turns in between
                new_messages = previous_step.observation
                parent_node = add(new_messages, turn_nodes[played_turn.parent], played_turn.started_s)
        token_count = len(played_turn.token_ids)
        message_nodes.append(
            {
                "message": _verifiers_message(played_turn, trajectory.tools),
                "parent": parent_node,
                "sampled": True,
                "timestamp": played_turn.ended_s,
                # A turn's `prompt_ids` are only those that are new behind its parent, so the path from the root has
                # each token once, and the mask says which of them were sampled.
                "token_ids": [*played_turn.prompt_ids, *played_turn.token_ids] if token_count else [],
                "mask": [False] * len(played_turn.prompt_ids) + [True] * token_count if token_count else [],
                "logprobs": list(played_turn.logprobs),
            }
        )
        turn_nodes.append(len(message_nodes) - 1)
        next_step = played_turn.step
        end_node = add(
            next_step.observation if next_step is not None and next_step.history is None else (),
            len(message_nodes) - 1,
            played_turn.ended_s,
        )
        assert end_node is not None
        end_nodes.append(end_node)
    return message_nodes


def _verifiers_message(turn: Turn, tools: ShownTools) -> dict[str, Any]:
    """A turn as verifiers has an assistant's message: arguments are JSON text."""
    message = turn_message(turn, tools)
    shown_message: dict[str, Any] = {"role": "assistant", "content": _text(message["content"])}
    if tool_calls := _calls(message):
        shown_message["tool_calls"] = [
            {
                "id": tool_call["id"],
                "name": tool_call["function"]["name"],
                "arguments": dump(tool_call["function"]["arguments"]),
            }
            for tool_call in tool_calls
        ]
    return shown_message


# --- Parquet --------------------------------------------------------------------------------------------------------


def _write_parquet(episodes: Iterator[Trajectory], out: Path, config: RunConfig) -> int:
    try:
        arrow_module: Any = import_module("pyarrow")
        parquet_module: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError(f"pyarrow is not installed ({error}): {install_command('parquet')}") from None
    table_schema, episode_count, part_path = _schema(arrow_module), 0, out.with_name(f"{out.name}.part")
    try:
        with parquet_module.ParquetWriter(part_path, table_schema) as parquet_writer:
            table_rows: list[dict[str, Any]] = []
            for trajectory in episodes:
                table_rows.append(_parquet_row(trajectory, config))
                episode_count += 1
                if len(table_rows) == _ROWS:
                    parquet_writer.write_table(arrow_module.Table.from_pylist(table_rows, schema=table_schema))
                    table_rows.clear()
            parquet_writer.write_table(arrow_module.Table.from_pylist(table_rows, schema=table_schema))
        part_path.replace(out)
    finally:
        part_path.unlink(missing_ok=True)
    return episode_count


def _schema(arrow: Any) -> Any:
    function_type = arrow.struct([("name", arrow.string()), ("arguments", arrow.string())])
    call_type = arrow.struct([("id", arrow.string()), ("type", arrow.string()), ("function", function_type)])
    message_type = arrow.struct(
        [
            *((field_name, arrow.string()) for field_name in ("role", "content", "name", "tool_call_id")),
            ("tool_calls", arrow.list_(call_type)),
        ]
    )
    turn_type = arrow.struct(
        [
            ("id", arrow.string()),
            ("role", arrow.string()),
            ("text", arrow.string()),
            ("finish", arrow.string()),
            ("reward", arrow.float64()),
            ("parent", arrow.int32()),
            ("started_s", arrow.float64()),
            ("ended_s", arrow.float64()),
            ("prompt_ids", arrow.list_(arrow.int32())),
            ("token_ids", arrow.list_(arrow.int32())),
            # Engines return log-probs in float32; float64 would double the largest column for digits that nobody
            # measured.
            ("logprobs", arrow.list_(arrow.float32())),
            ("versions", arrow.list_(arrow.int64())),
        ]
    )
    return arrow.schema(
        [
            ("episode", arrow.int64()),
            ("group", arrow.int64()),
            ("env", arrow.string()),
            ("seed", arrow.int64()),
            ("outcome", arrow.float64()),
            ("success", arrow.bool_()),
            ("stop_reason", arrow.string()),
            ("model", arrow.string()),
            ("messages", arrow.list_(message_type)),
            ("tools", arrow.string()),
            ("turns", arrow.list_(turn_type)),
        ]
    )


def _arrow_message(message: Message) -> dict[str, Any]:
    """A message in OpenAI's shape, with arguments as JSON text: each tool has others, and a column has one schema."""
    shown_message: dict[str, Any] = {**message, "content": _text(message["content"])}
    if tool_calls := _calls(message):
        shown_message["tool_calls"] = [
            {**tool_call, "function": {**tool_call["function"], "arguments": dump(tool_call["function"]["arguments"])}}
            for tool_call in tool_calls
        ]
    return shown_message


def _parquet_row(trajectory: Trajectory, config: RunConfig) -> dict[str, Any]:
    return {
        **_facts(trajectory),
        "model": config.model,
        "messages": [_arrow_message(message) for message in conversation(trajectory)],
        "tools": dump(list(trajectory.tools.schemas)) if trajectory.tools.schemas else None,
        "turns": [
            {
                "id": played_turn.id,
                "role": played_turn.role,
                "text": _text(played_turn.text),
                "finish": played_turn.finish,
                "reward": played_turn.reward,
                "parent": played_turn.parent,
                "started_s": played_turn.started_s,
                "ended_s": played_turn.ended_s,
                "prompt_ids": list(played_turn.prompt_ids),
                "token_ids": list(played_turn.token_ids),
                "logprobs": list(played_turn.logprobs),
                "versions": list(played_turn.versions),
            }
            for played_turn in trajectory.turns
        ],
    }
