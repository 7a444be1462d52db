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
    episodes = (_named(reads.trajectory(id)) for id in ids)
    write: dict[ForeignFormat, Callable[[Iterator[Trajectory], Path, RunConfig], int]] = {
        "atif": _write_atif,
        "inspect": _write_inspect,
        "verifiers": _write_verifiers,
        "parquet": _write_parquet,
    }
    try:
        with notices.gathered():
            return write[form](episodes, out, config)
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}): give another --out") from error


def _named(trajectory: Trajectory) -> Trajectory:
    """The episode. Pictures in it are named: none of these formats has them."""
    observed = (message for turn in trajectory.turns if turn.step is not None for message in turn.step.observation)
    for _ in (image for message in (*trajectory.start, *observed) for image in message.get("images", ())):
        case = "pictures are left out of this format, --format messages has them"
        notices.note("episodes", case, place=f"episode {trajectory.episode_id}")
    return trajectory


@contextmanager
def _whole(out: Path) -> Generator[TextIO]:
    """A file that is there when the block has ended well, and not before."""
    # A log of Inspect or a Parquet file without its end is unreadable, and one JSON line too few goes unnoticed. So a
    # file has its name only once it is whole.
    part = out.with_name(f"{out.name}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            yield file
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)


def _text(text: str) -> str:
    """Text that UTF-8 can hold."""
    # JSON escapes a lone surrogate and Python reads it back; the readers here are in other languages or in pydantic,
    # which refuse the whole file for it. A byte-level model does sample such texts.
    return text.encode(errors="replace").decode()


def _facts(trajectory: Trajectory) -> dict[str, Any]:
    task = trajectory.task
    return {
        "episode": trajectory.episode_id,
        "group": trajectory.group_id,
        "env": task.env,
        "seed": task.seed,
        "outcome": trajectory.outcome,
        "success": trajectory.success,
        "stop_reason": None if trajectory.stop_reason is None else trajectory.stop_reason.value,
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


# --- ATIF -----------------------------------------------------------------------------------------------------------


def _write_atif(episodes: Iterator[Trajectory], out: Path, config: RunConfig) -> int:
    out.mkdir(parents=True, exist_ok=True)
    written = 0
    for trajectory in episodes:
        file = out / f"episode-{trajectory.episode_id}.json"
        file.write_text(json.dumps(_atif(trajectory, config), indent=1), encoding="utf-8")
        written += 1
    return written


def _atif(trajectory: Trajectory, config: RunConfig) -> dict[str, Any]:
    steps = [_atif_step(message) for message in trajectory.start]
    for turn in trajectory.turns:
        steps += _atif_turn(turn, trajectory.tools)
    tools = {"tool_definitions": list(trajectory.tools.schemas)} if trajectory.tools.schemas else {}
    return {
        "schema_version": "ATIF-v1.7",
        "session_id": config.name,
        "trajectory_id": f"{config.name}-{trajectory.episode_id}",
        "agent": {"name": "agentrl", "version": version(DISTRIBUTION), "model_name": config.model, **tools},
        "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
        "final_metrics": {
            "total_completion_tokens": sum(len(turn.token_ids) for turn in trajectory.turns),
            "total_steps": len(steps),
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
    calls = calls_of(turn, tools)
    call_ids = {call["id"] for call in calls}
    results: list[dict[str, Any]] = []
    for message in (message for message in observed if message["role"] == "tool"):
        # ATIF checks that an answer names a call of its own step. An answer to a call that was broken, and is
        # therefore text, names none.
        source = message.get("tool_call_id")
        results.append(
            {"content": _text(message["content"]), **({"source_call_id": source} if source in call_ids else {})}
        )
    measured: dict[str, Any] = {}
    if turn.token_ids:
        measured = {
            "completion_tokens": len(turn.token_ids),
            "completion_token_ids": list(turn.token_ids),
            "logprobs": list(turn.logprobs),
        }
    step: dict[str, Any] = {
        "source": "agent",
        # The calls are repeated in `tool_calls`; the text stays as sampled because a reader who debugs a policy wants
        # to see what it wrote, marks included, not what a parser made of it.
        "message": _text(turn.text),
        "timestamp": _time(turn.ended_s),
        "llm_call_count": 1,
        "extra": {"turn": turn.id, "role": turn.role, "reward": turn.reward, "finish": turn.finish},
    }
    if calls:
        step["tool_calls"] = [
            {
                "tool_call_id": call["id"],
                "function_name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
            }
            for call in calls
        ]
    if measured:
        step["metrics"] = measured
    if results:
        step["observation"] = {"results": results}
    yield step
    yield from (_atif_step(message) for message in observed if message["role"] != "tool")


# --- Inspect --------------------------------------------------------------------------------------------------------


def _write_inspect(episodes: Iterator[Trajectory], out: Path, config: RunConfig) -> int:
    # Inspect wants the times of its own evaluation; the log is made now. When an episode was played is in its sample.
    written, now = 0, _time(datetime.now(UTC).timestamp())
    head = {
        "version": 2,
        "status": "success",
        "eval": {
            "created": now,
            "task": config.name,
            "dataset": {"name": "agentrl"},
            "model": f"agentrl/{config.model}",
            "config": {},
            "metadata": {"agentrl": version(DISTRIBUTION)},
        },
        "stats": {"started_at": now, "completed_at": now},
    }
    with _whole(out) as file:
        # The head without its closing brace, then the samples as they come: a log is one JSON object, and a run's
        # episodes are more than should be in memory at once.
        file.write(json.dumps(head)[:-1] + ', "samples": [')
        for trajectory in episodes:
            file.write((",\n" if written else "\n") + json.dumps(_inspect_sample(trajectory, config)))
            written += 1
        file.write("\n]}\n")
    return written


def _inspect_sample(trajectory: Trajectory, config: RunConfig) -> dict[str, Any]:
    turns = trajectory.turns
    scores = {
        name: {"value": value}
        for name, value in (("outcome", trajectory.outcome), ("success", trajectory.success))
        if value is not None
    }
    spent = {
        "input_tokens": sum(len(turn.prompt_ids) for turn in turns),
        "output_tokens": sum(len(turn.token_ids) for turn in turns),
    }
    sample: dict[str, Any] = {
        "id": trajectory.episode_id,
        "epoch": 1,
        "input": [_message(message) for message in trajectory.start],
        # Required by the format. Rewards here are computed, not compared with a target text.
        "target": "",
        "messages": [_message(message) for message in conversation(trajectory)],
        "scores": scores,
        "metadata": _facts(trajectory),
        "model_usage": {config.model: {**spent, "total_tokens": sum(spent.values())}},
    }
    if turns:
        reason = "max_tokens" if turns[-1].finish == "length" else "stop"
        last = {"message": {"role": "assistant", "content": _text(turns[-1].text)}, "stop_reason": reason}
        sample["output"] = {"model": config.model, "choices": [last]}
        sample["started_at"], sample["completed_at"] = _time(turns[0].started_s), _time(turns[-1].ended_s)
        sample["total_time"] = max(0.0, turns[-1].ended_s - turns[0].started_s)
    return sample


def _calls(message: Message) -> list[dict[str, Any]]:
    """The calls of a message, in OpenAI's envelope."""
    return list(message.get("tool_calls", []))


def _message(message: Message) -> dict[str, Any]:
    """A message of Inspect's: calls have the function's name and its arguments beside each other."""
    shown: dict[str, Any] = {"role": message["role"], "content": _text(message["content"])}
    if calls := _calls(message):
        shown["tool_calls"] = [
            {
                "id": call["id"],
                "function": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "type": "function",
            }
            for call in calls
        ]
    if message["role"] == "tool":
        shown |= {"tool_call_id": message.get("tool_call_id"), "function": message.get("name")}
    return shown


# --- verifiers ------------------------------------------------------------------------------------------------------


def _write_verifiers(episodes: Iterator[Trajectory], out: Path, config: RunConfig) -> int:
    out.mkdir(parents=True, exist_ok=True)
    written = 0
    with _whole(out / "traces.jsonl") as file:
        for trajectory in episodes:
            file.write(json.dumps(_verifiers_episode(trajectory, config)) + "\n")
            written += 1
    return written


def _verifiers_episode(trajectory: Trajectory, config: RunConfig) -> dict[str, Any]:
    """An episode with one trace. The tokens of a turn, those of its prompt that are new included, are its node's."""
    id, task = f"{config.name}-{trajectory.episode_id}", trajectory.task
    seen = {"type": task.env, "data": {"idx": task.index, "id": f"{task.env}/{task.seed}", "seed": task.seed}}
    trace: dict[str, Any] = {
        "id": id,
        "task": seen,
        "agent": {"config": {"model": config.model}},
        "nodes": _nodes(trajectory),
        "rewards": {"outcome": None if trajectory.outcome is None else {"score": trajectory.outcome}},
        "metrics": {"success": None if trajectory.success is None else float(trajectory.success)},
        "info": _facts(trajectory),
        "is_completed": trajectory.stop_reason is not None,
        "ok": trajectory.scored,
        "stop_condition": None if trajectory.stop_reason is None else trajectory.stop_reason.value,
    }
    head = {"id": id, "env": {"id": task.env}, "group": {"id": str(trajectory.group_id)}, "task": seen}
    return {**head, "traces": [trace], "ok": trajectory.scored}


def _nodes(trajectory: Trajectory) -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []
    ends: list[int] = []  # the node that each turn ends with, its answer included

    def add(messages: Iterable[Message], parent: int | None, at_s: float) -> int | None:
        for message in messages:
            shown: dict[str, Any] = {"role": message["role"], "content": _text(message["content"])}
            if message["role"] == "tool":
                shown["tool_call_id"] = message.get("tool_call_id", "")
            nodes.append({"message": shown, "parent": parent, "timestamp": at_s})
            parent = len(nodes) - 1
        return parent

    began_s = trajectory.turns[0].started_s if trajectory.turns else 0.0
    root = add(trajectory.start, None, began_s)
    for turn in trajectory.turns:
        parent = root if turn.parent is None else ends[turn.parent]
        # A turn whose parent is not the turn before begins a context of its own (its environment rewrote the
        # history). In a tree of messages that is another root, with the messages that the environment put there.
        rewritten = None if turn.index == 0 else getattr(trajectory.turns[turn.index - 1].step, "history", None)
        if turn.parent is None and rewritten is not None:
            parent = add(rewritten, None, turn.started_s)
        n = len(turn.token_ids)
        nodes.append(
            {
                "message": _verifiers_message(turn, trajectory.tools),
                "parent": parent,
                "sampled": True,
                "timestamp": turn.ended_s,
                # A turn's `prompt_ids` are only those that are new behind its parent, so the path from the root has
                # each token once, and the mask says which of them were sampled.
                "token_ids": [*turn.prompt_ids, *turn.token_ids] if n else [],
                "mask": [False] * len(turn.prompt_ids) + [True] * n if n else [],
                "logprobs": list(turn.logprobs),
            }
        )
        end = add(() if turn.step is None else turn.step.observation, len(nodes) - 1, turn.ended_s)
        assert end is not None
        ends.append(end)
    return nodes


def _verifiers_message(turn: Turn, tools: ShownTools) -> dict[str, Any]:
    """A turn as verifiers has an assistant's message: arguments are JSON text."""
    message = turn_message(turn, tools)
    shown: dict[str, Any] = {"role": "assistant", "content": _text(message["content"])}
    if calls := _calls(message):
        shown["tool_calls"] = [
            {"id": call["id"], "name": call["function"]["name"], "arguments": dump(call["function"]["arguments"])}
            for call in calls
        ]
    return shown


# --- Parquet --------------------------------------------------------------------------------------------------------


def _write_parquet(episodes: Iterator[Trajectory], out: Path, config: RunConfig) -> int:
    try:
        arrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError(f"pyarrow is not installed ({error}): {install_command('parquet')}") from None
    schema, written, part = _schema(arrow), 0, out.with_name(f"{out.name}.part")
    try:
        with parquet.ParquetWriter(part, schema) as writer:
            rows: list[dict[str, Any]] = []
            for trajectory in episodes:
                rows.append(_parquet_row(trajectory, config))
                written += 1
                if len(rows) == _ROWS:
                    writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
                    rows.clear()
            writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
        part.replace(out)
    finally:
        part.unlink(missing_ok=True)
    return written


def _schema(arrow: Any) -> Any:
    function = arrow.struct([("name", arrow.string()), ("arguments", arrow.string())])
    call = arrow.struct([("id", arrow.string()), ("type", arrow.string()), ("function", function)])
    message = arrow.struct(
        [
            *((name, arrow.string()) for name in ("role", "content", "name", "tool_call_id")),
            ("tool_calls", arrow.list_(call)),
        ]
    )
    turn = arrow.struct(
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
            ("messages", arrow.list_(message)),
            ("tools", arrow.string()),
            ("turns", arrow.list_(turn)),
        ]
    )


def _arrow_message(message: Message) -> dict[str, Any]:
    """A message in OpenAI's shape, with arguments as JSON text: each tool has others, and a column has one schema."""
    shown: dict[str, Any] = {**message, "content": _text(message["content"])}
    if calls := _calls(message):
        shown["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": dump(call["function"]["arguments"])}}
            for call in calls
        ]
    return shown


def _parquet_row(trajectory: Trajectory, config: RunConfig) -> dict[str, Any]:
    return {
        **_facts(trajectory),
        "model": config.model,
        "messages": [_arrow_message(message) for message in conversation(trajectory)],
        "tools": dump(list(trajectory.tools.schemas)) if trajectory.tools.schemas else None,
        "turns": [
            {
                "id": turn.id,
                "role": turn.role,
                "text": _text(turn.text),
                "finish": turn.finish,
                "reward": turn.reward,
                "parent": turn.parent,
                "started_s": turn.started_s,
                "ended_s": turn.ended_s,
                "prompt_ids": list(turn.prompt_ids),
                "token_ids": list(turn.token_ids),
                "logprobs": list(turn.logprobs),
                "versions": list(turn.versions),
            }
            for turn in trajectory.turns
        ],
    }
