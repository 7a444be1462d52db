"""Demonstrations in a file become episodes that a learner can train on.

A file is one of JSON lines, or of another kind that `agentrl.env.datasets.read_rows` reads by its name. A row is one of

    {"messages": [{"role": "user", "content": …}, {"role": "assistant", …}, …], "tools": […]}     OpenAI's shape
    {"prompt": TEXT or MESSAGES, "completion": TEXT or MESSAGES}
    {"turns": [{"parent": null, "prompt_ids": […], "token_ids": […], "learns": true}, …]}          exact tokens

Other keys of a row, and keys of a message that neither we nor the chat template read, are named. Each message of the
assistant is a turn; its tokens, tool calls and the end of its turn too, are trained, all others are context, and so is
a message with `weight: 0` (or another of `chat_messages.TRAINING_MARKS`). Of a prompt with its completion, only the
completion is trained. If the template writes
earlier messages otherwise once later ones follow (reasoning that it strips), the later turn stands in a row of its own,
as in an episode whose history was rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from agentrl import notices
from agentrl.engine.rendering.renderer import Renderer
from agentrl.env.chat_messages import (
    TRAINING_MARKS,
    is_trained,
    plain_messages,
    plain_tools,
    without_padded_arguments,
)
from agentrl.env.dataset_env import is_talk
from agentrl.env.datasets import decode_row, read_rows
from agentrl.env.spaces import Messages as MessagesSpace
from agentrl.errors import ModelError, UsageError
from agentrl.records import Json, Message, Messages, StopReason, Task, Trajectory, Turn, VersionSpan

_TASK = Task(index=0, env="agentrl/demonstrations", seed=0)
_ORIGIN_KEYS = frozenset(
    {"episode", "env", "seed", "outcome", "oracle"}
)  # that `agentrl export-episodes` and `demos` write
_TALK_KEYS = _ORIGIN_KEYS | {"messages", "tools", "functions"}
_PAIR_KEYS = _ORIGIN_KEYS | {"prompt", "completion", "tools", "functions"}
_EXACT_KEYS = _ORIGIN_KEYS | {"turns"}
_TURN_KEYS = frozenset({"parent", "prompt_ids", "token_ids", "learns"})
_PICTURE_KEYS = ("images", "image", "videos", "video", "audios", "audio")
_SPACE = MessagesSpace(max_messages=100_000, max_length=64 << 20, max_images=100_000)  # the renderer refuses images


def read(file: Path, renderer: Renderer, *, vocab: int, max_context: int) -> list[Trajectory]:
    """All demonstrations of a file, in order; their ids are the numbers of their lines or rows, from 1 on. Raises
    UsageError, with the line or row, for one that is malformed, longer than `max_context` tokens, or without a token to
    learn."""
    episodes: list[Trajectory] = []
    with notices.gathered():
        for number, place, row in _rows(file):
            try:
                with notices.at(place):
                    turns = _turns(row, renderer)
            except (ValueError, KeyError, TypeError, ModelError) as error:
                reason = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:300]
                raise UsageError(f"{place}: {reason}") from error
            _check(turns, place, vocab, max_context)
            episodes.append(_episode(number, turns))
    if not episodes:
        raise UsageError(f"{file} holds no demonstrations")
    return episodes


def _rows(file: Path) -> Iterator[tuple[int, str, Any]]:
    """Number, place and value of each row. Lines are read one by one, so that a file may be larger than memory."""
    if set(file.suffixes) & {".json", ".csv", ".tsv", ".parquet", ".gz"}:
        for number, row in enumerate(read_rows(str(file)), 1):
            yield number, f"{file}, row {number}", row
        return
    try:
        with file.open(encoding="utf-8-sig", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    place = f"{file}, line {number}"
                    try:
                        row = decode_row(line)
                    except ValueError as error:
                        raise UsageError(f"{place} is not JSON: {error}") from error
                    yield number, place, row
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error}") from error


def _turns(row: Any, renderer: Renderer) -> list[Turn]:
    if not isinstance(row, dict):
        raise ValueError("it is no JSON object")
    table = {name: value for name, value in cast("dict[str, Any]", row).items() if value is not None}
    if "turns" in table and "messages" in table:
        raise ValueError("it has turns, the exact tokens of a model, beside messages: give one of them")
    if "turns" in table:
        _name_unused(table, _EXACT_KEYS)
        return [_exact(number, turn) for number, turn in enumerate(_listed(table["turns"], "turns"))]
    if "messages" in table:
        _name_unused(table, _TALK_KEYS)
        talk = _listed(table["messages"], "messages")
    elif "prompt" in table:
        _name_unused(table, _PAIR_KEYS)
        talk = _prompted(table)
    elif "conversations" in table or "conversation" in table:
        raise ValueError("conversations are not read: give messages, each with role and content")
    else:
        raise ValueError("it has neither messages, nor prompt and completion, nor turns")
    if pictures := [key for key in _PICTURE_KEYS if table.get(key)]:
        raise ValueError(f"demonstrations with images are not learned from: leave {pictures[0]!r} out")
    if "functions" in table and "tools" in table:
        raise ValueError("it has functions beside tools: give tools alone")
    tools = plain_tools(table.get("tools", table.get("functions")))
    messages = without_padded_arguments(plain_messages(talk), tools)
    if reason := _SPACE.why_not(messages):
        raise ValueError(reason)
    return _turns_of(messages, tools, renderer)


def _turns_of(messages: Messages, tools: Sequence[Mapping[str, Json]], renderer: Renderer) -> list[Turn]:
    """The turns of the assistant in a conversation. Those marked as context are turns that do not learn: later turns
    extend them all the same."""
    spoken: list[Mapping[str, Any]] = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            spoken.append(message)
            if is_trained(message):
                _check_calls(number, message, tools)
            says = message["content"] or message.get("tool_calls") or message.get("reasoning_content")
            if not says and is_trained(message):
                raise ValueError(f"message {number}: the assistant says nothing: leave it out, or give it weight 0")
        elif any(message.get(mark) for mark in TRAINING_MARKS):
            notices.note("demonstrations", f"a mark to train a message of role {message['role']!r}: it is context")
    if messages and messages[-1]["role"] != "assistant" and spoken:
        notices.note("demonstrations", "messages behind the assistant's last one are not used")
    bare = tuple(cast("Message", {k: v for k, v in message.items() if k not in TRAINING_MARKS}) for message in messages)
    renderer.name_unread(bare, tools)
    turns: list[Turn] = []
    context_ids: list[int] = []  # the tokens up to the end of the last turn
    for (prompt_ids, token_ids), message in zip(renderer.demonstrated(bare, tools), spoken, strict=True):
        goes_on = bool(context_ids) and list(prompt_ids[: len(context_ids)]) == context_ids
        new_ids = prompt_ids[len(context_ids) :] if goes_on else prompt_ids
        parent = len(turns) - 1 if goes_on else None
        turns.append(_turn(len(turns), parent, new_ids, token_ids, learns=is_trained(message)))
        context_ids = [*prompt_ids, *token_ids]
    return turns


def _check_calls(number: int, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for a call that nobody should learn: one whose arguments are no object. Name a call of a tool
    that the prompt does not offer."""
    offered = {cast("Mapping[str, Any]", tool.get("function", tool)).get("name") for tool in tools}
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not isinstance(arguments, dict):
            hint = "give a JSON object, or the message weight 0"
            raise ValueError(f"message {number}: the arguments of {name!r} are {arguments!r:.60}: {hint}")
        if name not in offered:
            notices.note("demonstrations", f"calls of {name!r}, which is not among the tools of its row, are trained")


def _name_unused(row: Mapping[str, Any], used: frozenset[str]) -> None:
    """One notice for each key of a row that nothing here reads. Raises ValueError for a mark of what is trained: marks
    are those of messages, and a row that is marked as context must not be trained."""
    for key in (*TRAINING_MARKS, "mask", "loss_mask"):
        if isinstance(value := row.get(key), bool | int | float | list) and value != 1:
            raise ValueError(f"the row has {key} = {value!r:.40}: give its messages weight 0, or leave the row out")
    for key in sorted(row.keys() - used):
        notices.note("demonstrations", f"the key {key!r} is not used")


def _listed(value: Any, field: str) -> list[Any]:
    """Messages as a list; some data sets store the JSON text of one."""
    if isinstance(value, str):
        try:
            value = decode_row(value)
        except ValueError as error:
            raise ValueError(f"{field} is a text that is no JSON ({error}): give a list") from None
    if not isinstance(value, list):
        raise ValueError(f"{field} is a {type(value).__name__}: give a list")
    return cast("list[Any]", value)


def _prompted(row: Mapping[str, Any]) -> list[Any]:
    """The conversation of a prompt and its completion. What the assistant says in the prompt is context, as in TRL."""
    if "completion" not in row:
        raise ValueError("it has a prompt and no completion")
    prompt = _messages(row, "prompt", "user")
    for place, message in enumerate(prompt):
        if isinstance(message, Mapping) and cast("Mapping[str, Any]", message).get("role") == "assistant":
            fields = cast("Mapping[str, Any]", message)
            if place == len(prompt) - 1 and not fields.get("tool_calls"):
                hint = "put these words at the beginning of the completion"
                raise ValueError(f"the prompt ends with the assistant's words: {hint}")
            marks = {key: value for key, value in fields.items() if key not in TRAINING_MARKS}
            prompt[place] = {**marks, "weight": 0}
    return [*prompt, *_messages(row, "completion", "assistant")]


def _messages(row: Mapping[str, Any], field: str, role: str) -> list[Any]:
    """The messages of a prompt or a completion, either of which may be a text."""
    value: Any = row[field]
    if isinstance(value, str) and is_talk(value):
        notices.note("demonstrations", f"a {field} that is the JSON text of chat messages is taken as a text")
    return [{"role": role, "content": value}] if isinstance(value, str) else _listed(value, field)


def _exact(at: int, turn: Any) -> Turn:
    if not isinstance(turn, dict):
        raise ValueError(f"turn {at} is a {type(turn).__name__}, not an object")
    turn = cast("dict[str, Any]", turn)
    for key in sorted(turn.keys() - _TURN_KEYS):
        notices.note("demonstrations", f"the key {key!r} of a turn is not used")
    parent, learns = turn["parent"], turn.get("learns", True)
    if parent is not None and (type(parent) is not int or not 0 <= parent < at):
        raise ValueError(f"turn {at} extends turn {parent!r:.40}")
    if not isinstance(learns, bool):
        raise ValueError(f"turn {at} has learns = {learns!r:.40}: give true or false")
    for field in ("prompt_ids", "token_ids"):
        ids: Any = turn[field]
        if not isinstance(ids, list) or any(type(id) is not int or id < 0 for id in cast("list[Any]", ids)):
            raise ValueError(f"turn {at} has {field} = {ids!r:.40}: give a list of token ids")
    return _turn(at, parent, turn["prompt_ids"], turn["token_ids"], learns=learns)


def _turn(index: int, parent: int | None, prompt: Sequence[int], said: Sequence[int], *, learns: bool = True) -> Turn:
    return Turn(
        index=index,
        parent=parent,
        prompt_ids=tuple(prompt),
        token_ids=tuple(said),
        logprobs=(0.0,) * len(said),
        spans=(VersionSpan(0, 0, len(said)),) if said else (),
        finish="stop",
        text="",
        learns=learns,
    )


def _check(turns: Sequence[Turn], place: str, vocab: int, max_context: int) -> None:
    lengths: list[int] = []
    for turn in turns:
        before = 0 if turn.parent is None else lengths[turn.parent]
        lengths.append(before + len(turn.prompt_ids) + len(turn.token_ids))
        if not before and not turn.prompt_ids:
            raise UsageError(f"{place}: turn {turn.index} has no token before it")
        if max((*turn.prompt_ids, *turn.token_ids), default=0) >= vocab:
            raise UsageError(f"{place}: turn {turn.index} has a token beyond the model's {vocab}")
    if not any(turn.learns and turn.token_ids for turn in turns):
        raise UsageError(f"{place}: there is nothing to learn: no message of the assistant")
    if max(lengths) > max_context:
        raise UsageError(f"{place}: {max(lengths)} tokens: raise max_context ({max_context}), or leave it out")


def _episode(number: int, turns: Sequence[Turn]) -> Trajectory:
    return Trajectory(
        episode_id=number,
        group_id=number,
        member=0,
        task=_TASK,
        start=(),
        turns=tuple(turns),
        stop_reason=StopReason.DONE,
        outcome=0.0,
    )
