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
    {"episode", "env", "seed", "outcome", "oracle", "text_only"}
)  # that `agentrl export-episodes` and `demos` write
_TALK_KEYS = _ORIGIN_KEYS | {"messages", "tools", "functions"}
_PAIR_KEYS = _ORIGIN_KEYS | {"prompt", "completion", "tools", "functions"}
_EXACT_KEYS = _ORIGIN_KEYS | {"turns"}
_TURN_KEYS = frozenset({"parent", "prompt_ids", "token_ids", "learns", "branch"})  # the last one is for people
_PICTURE_KEYS = ("images", "image", "videos", "video", "audios", "audio")
# Bounds of a conversation are a matter of an environment's declaration; a file has none. These are so large that only
# nonsense is beyond them, and `max_context` is the bound that people set.
_SPACE = MessagesSpace(max_messages=100_000, max_length=64 << 20, max_images=100_000)  # the renderer refuses images


def read(file: Path, renderer: Renderer, *, vocab: int, max_context: int) -> list[Trajectory]:
    """All demonstrations of a file, in order; their ids are the numbers of their lines or rows, from 1 on. Raises
    UsageError, with the line or row, for one that is malformed, longer than `max_context` tokens, or without a token to
    learn."""
    episodes: list[Trajectory] = []
    # A key that nothing reads is usually in every row of a file. One notice a row would bury the one that matters, so
    # they are counted, and each is printed once with its first place.
    with notices.gathered():
        for row_number, row_place, data_row in _rows(file):
            try:
                with notices.at(row_place):
                    row_turns = _turns(data_row, renderer)
            except (ValueError, KeyError, TypeError, ModelError) as error:
                # The text of a KeyError is only the quoted key, which reads as nonsense behind a line number.
                error_text = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:300]
                raise UsageError(f"{row_place}: {error_text}") from error
            _check(row_turns, row_place, vocab, max_context)
            episodes.append(_episode(row_number, row_turns))
    if not episodes:
        raise UsageError(f"{file} holds no demonstrations")
    return episodes


def _rows(file: Path) -> Iterator[tuple[int, str, Any]]:
    """Number, place and value of each row. Lines are read one by one, so that a file may be larger than memory."""
    if set(file.suffixes) & {".json", ".csv", ".tsv", ".parquet", ".gz"}:
        for row_number, data_row in enumerate(read_rows(str(file)), 1):
            yield row_number, f"{file}, row {row_number}", data_row
        return
    try:
        # `utf-8-sig` because spreadsheets and Windows editors begin a file with a byte-order mark, which JSON
        # refuses. `newline="\n"` because universal newlines would split a line at a lone carriage return, and the
        # numbers in errors would no longer be those of an editor.
        with file.open(encoding="utf-8-sig", newline="\n") as text_lines:
            for row_number, json_line in enumerate(text_lines, 1):
                if json_line.strip():
                    row_place = f"{file}, line {row_number}"
                    try:
                        data_row = decode_row(json_line)
                    except ValueError as error:
                        raise UsageError(f"{row_place} is not JSON: {error}") from error
                    yield row_number, row_place, data_row
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error}") from error


def _turns(row: Any, renderer: Renderer) -> list[Turn]:
    if not isinstance(row, dict):
        raise ValueError("it is no JSON object")
    # A table of Parquet or CSV has every column in every row, those that a row does not use as null. Null is
    # therefore absence, or `functions: null` would forbid `tools`.
    row_fields = {
        column_name: field_value
        for column_name, field_value in cast("dict[str, Any]", row).items()
        if field_value is not None
    }
    # Either could be trained, and they need not be the same. A guess here would be wrong without anybody's notice,
    # and a wrong demonstration is learned as well as a right one.
    if "turns" in row_fields and "messages" in row_fields:
        raise ValueError("it has turns, the exact tokens of a model, beside messages: give one of them")
    if "turns" in row_fields:
        _name_unused(row_fields, _EXACT_KEYS)
        return [
            _exact(turn_number, exact_turn)
            for turn_number, exact_turn in enumerate(_listed(row_fields["turns"], "turns"))
        ]
    if "messages" in row_fields:
        _name_unused(row_fields, _TALK_KEYS)
        raw_messages = _listed(row_fields["messages"], "messages")
    elif "prompt" in row_fields:
        _name_unused(row_fields, _PAIR_KEYS)
        raw_messages = _prompted(row_fields)
    # ShareGPT's `from` and `value` are refused by name. Their roles are not standardised, and to guess which speaker
    # is the assistant decides what is trained.
    elif "conversations" in row_fields or "conversation" in row_fields:
        raise ValueError("conversations are not read: give messages, each with role and content")
    else:
        raise ValueError("it has neither messages, nor prompt and completion, nor turns")
    if picture_keys := [picture_key for picture_key in _PICTURE_KEYS if row_fields.get(picture_key)]:
        raise ValueError(f"demonstrations with images are not learned from: leave {picture_keys[0]!r} out")
    if "functions" in row_fields and "tools" in row_fields:
        raise ValueError("it has functions beside tools: give tools alone")
    row_tools = plain_tools(row_fields.get("tools", row_fields.get("functions")))
    # Arrow gives all structs of a column the union of their keys: the arguments of a call then have a null for each
    # argument of every other tool. Trained as they are, they would teach calls with dozens of nulls.
    messages = without_padded_arguments(plain_messages(raw_messages), row_tools)
    if refusal := _SPACE.why_not(messages):
        raise ValueError(refusal)
    return _turns_of(messages, row_tools, renderer)


def _turns_of(messages: Messages, tools: Sequence[Mapping[str, Json]], renderer: Renderer) -> list[Turn]:
    """The turns of the assistant in a conversation. Those marked as context are turns that do not learn: later turns
    extend them all the same."""
    spoken_messages: list[Mapping[str, Any]] = []
    for message_number, message in enumerate(messages):
        if message["role"] == "assistant":
            # Also the messages that are only context: the renderer returns one turn for each message of the
            # assistant, and the two lists are zipped below. Context is marked, not left out.
            spoken_messages.append(message)
            if is_trained(message):
                _check_calls(message_number, message, tools)
            spoken_content = message["content"] or message.get("tool_calls") or message.get("reasoning_content")
            if not spoken_content and is_trained(message):
                raise ValueError(
                    f"message {message_number}: the assistant says nothing: leave it out, or give it weight 0"
                )
        elif any(message.get(training_mark) for training_mark in TRAINING_MARKS):
            notices.note("demonstrations", f"a mark to train a message of role {message['role']!r}: it is context")
    if messages and messages[-1]["role"] != "assistant" and spoken_messages:
        notices.note("demonstrations", "messages behind the assistant's last one are not used")
    # The marks are ours and not the template's. Left in, the renderer would name them as keys that the template does
    # not read, for every file that uses them.
    bare_messages = tuple(
        cast(
            "Message",
            {
                message_key: message_value
                for message_key, message_value in message.items()
                if message_key not in TRAINING_MARKS
            },
        )
        for message in messages
    )
    renderer.name_unread(bare_messages, tools)
    new_turns: list[Turn] = []
    context_ids: list[int] = []  # the tokens up to the end of the last turn
    for (prompt_ids, token_ids), message in zip(
        renderer.demonstrated(bare_messages, tools), spoken_messages, strict=True
    ):
        # A turn extends the one before only if its prompt begins with exactly those tokens (law 1: tokens in, tokens
        # out). Equality of the messages would not do: a template that strips earlier reasoning writes other tokens
        # for the same messages, and the trained tokens would stand behind a context that the model never sees when it
        # acts.
        extends_last = bool(context_ids) and list(prompt_ids[: len(context_ids)]) == context_ids
        new_ids = prompt_ids[len(context_ids) :] if extends_last else prompt_ids
        parent_index = len(new_turns) - 1 if extends_last else None
        new_turns.append(_turn(len(new_turns), parent_index, new_ids, token_ids, learns=is_trained(message)))
        context_ids = [*prompt_ids, *token_ids]
    return new_turns


def _check_calls(number: int, message: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError for a call that nobody should learn: one whose arguments are no object. Name a call of a tool
    that the prompt does not offer."""
    offered_names = {
        cast("Mapping[str, Any]", offered_tool.get("function", offered_tool)).get("name") for offered_tool in tools
    }
    for tool_call in message.get("tool_calls", ()):
        tool_name, arguments = tool_call["function"]["name"], tool_call["function"]["arguments"]
        # A template writes arguments that are text or a list without complaint, in a form that no parser of calls
        # takes back. In context it is history; trained, it teaches a call that always fails.
        if not isinstance(arguments, dict):
            correction = "give a JSON object, or the message weight 0"
            raise ValueError(f"message {number}: the arguments of {tool_name!r} are {arguments!r:.60}: {correction}")
        if tool_name not in offered_names:
            notices.note(
                "demonstrations", f"calls of {tool_name!r}, which is not among the tools of its row, are trained"
            )


def _name_unused(row: Mapping[str, Any], used: frozenset[str]) -> None:
    """One notice for each key of a row that nothing here reads. Raises ValueError for a mark of what is trained: marks
    are those of messages, and a row that is marked as context must not be trained."""
    # Refused, not merely named as unused: some data sets mask whole rows this way, and a row that its author excluded
    # would be trained. `tests/run/test_sft.py::test_a_row_that_would_teach_something_else_is_refused`.
    for row_key in (*TRAINING_MARKS, "mask", "loss_mask"):
        if isinstance(mark_value := row.get(row_key), bool | int | float | list) and mark_value != 1:
            raise ValueError(
                f"the row has {row_key} = {mark_value!r:.40}: give its messages weight 0, or leave the row out"
            )
    for row_key in sorted(row.keys() - used):
        notices.note("demonstrations", f"the key {row_key!r} is not used")


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
    prompt_messages = _messages(row, "prompt", "user")
    for position, message in enumerate(prompt_messages):
        if isinstance(message, Mapping) and cast("Mapping[str, Any]", message).get("role") == "assistant":
            message_fields = cast("Mapping[str, Any]", message)
            # A template ends the assistant's message before the completion begins, so the completion would open a
            # second message of the assistant, which is not how a model continues words of its own.
            if position == len(prompt_messages) - 1 and not message_fields.get("tool_calls"):
                correction = "put these words at the beginning of the completion"
                raise ValueError(f"the prompt ends with the assistant's words: {correction}")
            # A mark in the prompt that asks to train it is overruled: a prompt is context.
            # `tests/run/test_sft.py::test_what_the_assistant_says_in_a_prompt_is_context`.
            unmarked_fields = {
                field_key: field_value
                for field_key, field_value in message_fields.items()
                if field_key not in TRAINING_MARKS
            }
            prompt_messages[position] = {**unmarked_fields, "weight": 0}
    return [*prompt_messages, *_messages(row, "completion", "assistant")]


def _messages(row: Mapping[str, Any], field: str, role: str) -> list[Any]:
    """The messages of a prompt or a completion, either of which may be a text."""
    field_value: Any = row[field]
    if isinstance(field_value, str) and is_talk(field_value):
        notices.note("demonstrations", f"a {field} that is the JSON text of chat messages is taken as a text")
    return [{"role": role, "content": field_value}] if isinstance(field_value, str) else _listed(field_value, field)


def _exact(at: int, turn: Any) -> Turn:
    if not isinstance(turn, dict):
        raise ValueError(f"turn {at} is a {type(turn).__name__}, not an object")
    turn = cast("dict[str, Any]", turn)
    for turn_key in sorted(turn.keys() - _TURN_KEYS):
        notices.note("demonstrations", f"the key {turn_key!r} of a turn is not used")
    parent_index, learns = turn["parent"], turn.get("learns", True)
    # `type(...) is not int` because `True` is an int, and a file that mixes up `parent` and `learns` would make turn
    # 1 the parent without complaint.
    if parent_index is not None and (type(parent_index) is not int or not 0 <= parent_index < at):
        raise ValueError(f"turn {at} extends turn {parent_index!r:.40}")
    if not isinstance(learns, bool):
        raise ValueError(f"turn {at} has learns = {learns!r:.40}: give true or false")
    for ids_field in ("prompt_ids", "token_ids"):
        field_ids: Any = turn[ids_field]
        if not isinstance(field_ids, list) or any(
            type(token_id) is not int or token_id < 0 for token_id in cast("list[Any]", field_ids)
        ):
            raise ValueError(f"turn {at} has {ids_field} = {field_ids!r:.40}: give a list of token ids")
    return _turn(at, parent_index, turn["prompt_ids"], turn["token_ids"], learns=learns)


def _turn(index: int, parent: int | None, prompt: Sequence[int], reply: Sequence[int], *, learns: bool = True) -> Turn:
    return Turn(
        index=index,
        parent=parent,
        prompt_ids=tuple(prompt),
        token_ids=tuple(reply),
        # Nobody sampled these tokens, so there is no behaviour policy. The zeros take its place, and supervised
        # training never reads them: its loss is of the log-probs of now.
        logprobs=(0.0,) * len(reply),
        spans=(VersionSpan(0, 0, len(reply)),) if reply else (),
        finish="stop",
        text="",
        learns=learns,
    )


def _check(turns: Sequence[Turn], place: str, vocab: int, max_context: int) -> None:
    context_lengths: list[int] = []
    for checked_turn in turns:
        # A length is that of the whole context up to the end of the turn, for it is what the model computes at once.
        # That of a turn alone would let long conversations through to an error of the device.
        earlier_tokens = 0 if checked_turn.parent is None else context_lengths[checked_turn.parent]
        context_lengths.append(earlier_tokens + len(checked_turn.prompt_ids) + len(checked_turn.token_ids))
        # The first token of a sequence is predicted from nothing, so a turn without a token before it would have one
        # that cannot be learned.
        if not earlier_tokens and not checked_turn.prompt_ids:
            raise UsageError(f"{place}: turn {checked_turn.index} has no token before it")
        if max((*checked_turn.prompt_ids, *checked_turn.token_ids), default=0) >= vocab:
            raise UsageError(f"{place}: turn {checked_turn.index} has a token beyond the model's {vocab}")
    if not any(checked_turn.learns and checked_turn.token_ids for checked_turn in turns):
        raise UsageError(f"{place}: there is nothing to learn: no message of the assistant")
    if max(context_lengths) > max_context:
        raise UsageError(f"{place}: {max(context_lengths)} tokens: raise max_context ({max_context}), or leave it out")


def _episode(number: int, turns: Sequence[Turn]) -> Trajectory:
    return Trajectory(
        episode_id=number,
        group_id=number,
        member=0,
        task=_TASK,
        start=(),
        turns=tuple(turns),
        stop_reason=StopReason.DONE,
        # Supervised training reads no outcome; it is there because a scored episode must have one.
        outcome=0.0,
    )
