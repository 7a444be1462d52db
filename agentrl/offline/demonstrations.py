"""Demonstrations in a file of JSON lines become episodes that a learner can train on.

A line is one of

    {"messages": [{"role": "user", "content": …}, {"role": "assistant", …}, …], "tools": […]}     OpenAI's shape
    {"prompt": TEXT or MESSAGES, "completion": TEXT or MESSAGES}
    {"turns": [{"parent": null, "prompt_ids": […], "token_ids": […], "learns": true}, …]}          exact tokens

and may have other keys. Each message of the assistant is a turn; its tokens, tool calls and the end of its turn too,
are trained, all others are context. If the template writes earlier messages otherwise once later ones follow (reasoning
that it strips), the later turn stands in a row of its own, as in an episode whose history was rewritten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from agentrl.engine.rendering.renderer import Renderer
from agentrl.env.chat_messages import plain_messages
from agentrl.env.spaces import Messages as MessagesSpace
from agentrl.errors import ModelError, UsageError
from agentrl.records import StopReason, Task, Trajectory, Turn, VersionSpan

_TASK = Task(index=0, env="agentrl/demonstrations", seed=0)
_SPACE = MessagesSpace(max_messages=100_000, max_length=64 << 20)


def read(file: Path, renderer: Renderer, *, vocab: int, max_context: int) -> list[Trajectory]:
    """All demonstrations of a file, in order; their ids are the numbers of their lines. Raises UsageError, with the
    line, for one that is malformed, longer than `max_context` tokens, or without a token to learn."""
    found: list[Trajectory] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    with_place = f"{file}, line {number}"
                    try:
                        turns = _turns(json.loads(line), renderer)
                    except (ValueError, KeyError, TypeError, ModelError) as error:
                        what = f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())[:300]
                        raise UsageError(f"{with_place}: {what}") from error
                    _check(turns, with_place, vocab, max_context)
                    found.append(_episode(number, turns))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    if not found:
        raise UsageError(f"{file} holds no demonstrations")
    return found


def _turns(row: Any, renderer: Renderer) -> list[Turn]:
    if not isinstance(row, dict):
        raise ValueError("it is no JSON object")
    table = cast("dict[str, Any]", row)
    if "turns" in table:
        return [_exact(at, turn) for at, turn in enumerate(table["turns"])]
    if "messages" in table:
        messages = list(table["messages"])
    elif "prompt" in table:
        messages = [*_messages(table["prompt"], "user"), *_messages(table["completion"], "assistant")]
    else:
        raise ValueError("it has neither messages, nor prompt and completion, nor turns")
    messages = plain_messages(messages)
    if reason := _SPACE.why_not(messages):
        raise ValueError(reason)
    tools = cast("Sequence[Mapping[str, Any]]", table.get("tools") or ())
    turns: list[Turn] = []
    held: list[int] = []  # the tokens up to the end of the last turn
    for before, said in renderer.demonstrated(messages, tools):
        goes_on = bool(held) and list(before[: len(held)]) == held
        prompt = before[len(held) :] if goes_on else before
        turns.append(_turn(len(turns), len(turns) - 1 if goes_on else None, prompt, said))
        held = [*before, *said]
    return turns


def _messages(given: Any, role: str) -> list[dict[str, Any]]:
    return [{"role": role, "content": given}] if isinstance(given, str) else list(given)


def _exact(at: int, turn: Mapping[str, Any]) -> Turn:
    parent = turn["parent"]
    if parent is not None and not 0 <= parent < at:
        raise ValueError(f"turn {at} extends turn {parent}")
    return _turn(at, parent, turn["prompt_ids"], turn["token_ids"], learns=turn.get("learns", True))


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
