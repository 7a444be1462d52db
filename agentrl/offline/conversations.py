"""Journaled episodes as conversations of messages, in which the calls of a turn are calls again.

The journal has the text of a turn as it was sampled, in the dialect of the run's model. Another model writes calls
otherwise, and a model whose marks of a call are special tokens (`[TOOL_CALLS]`, `<|tool_call_start|>`) never learns
them from their characters: `agentrl sft` keeps text from passing for control tokens. So exports parse the turns with
the dialect and the schemas that the episode was played with. A turn with a broken call stays the text that it is.
"""

from __future__ import annotations

from typing import Any, cast

from agentrl.env.tools.calls import Malformed, Parsed, ToolCall
from agentrl.env.tools.parsers import get_format
from agentrl.env.tools.tools import function_schema
from agentrl.records import POLICY, Message, Messages, ShownTools, Trajectory, Turn


def conversation(trajectory: Trajectory, *, splits_thoughts: bool = False) -> Messages:
    """The whole conversation in its order; if several roles took turns, each action has its role as `name`. With
    `splits_thoughts` the reasoning of a turn is its `reasoning_content`, else it stays in the content."""
    messages = list(trajectory.start)
    for turn in trajectory.turns:
        action = turn_message(turn, trajectory.tools, splits_thoughts=splits_thoughts)
        messages.append(action if turn.role == POLICY else cast("Message", {**action, "name": turn.role}))
        if turn.step is not None:
            messages.extend(turn.step.observation)
    return tuple(messages)


def turn_message(turn: Turn, tools: ShownTools, *, splits_thoughts: bool = False) -> Message:
    """A turn as a message of the assistant. Its text is as it was sampled, unless it makes calls."""
    parsed = _parsed(turn.text, tools)
    calls = calls_of(turn, tools)
    # Reasoning with words before it cannot become `reasoning_content`: a template writes that field first, so the
    # exported turn would have its words in another order than the policy sampled them.
    openings = [opening for opening, _ in get_format(tools.dialect or "hermes").thoughts]
    if any(opening in parsed.thoughts for opening in openings):  # words before them: no template writes these again
        splits_thoughts = False
    # The untouched text is the safe form: what a template writes for it is what was sampled. A turn is taken apart
    # only where that is needed, for calls or for thoughts that a template has a field for.
    if not calls and not (splits_thoughts and parsed.thoughts and not has_broken_call(turn.text, tools)):
        return {"role": "assistant", "content": turn.text}
    message: dict[str, Any] = {"role": "assistant", "content": parsed.text.strip()}
    if parsed.thoughts and splits_thoughts:
        message["reasoning_content"] = parsed.thoughts
    # Without a field for thoughts they stay where they were, as text before the calls. To leave them out would teach
    # a model to call without reasoning, which is not what earned the reward.
    elif parsed.thoughts:
        message["content"] = "\n".join(filter(None, (parsed.head.strip(), parsed.text.strip())))
    if calls:
        message["tool_calls"] = calls
    return cast("Message", message)


def calls_of(turn: Turn, tools: ShownTools) -> list[dict[str, Any]]:
    """The calls of a turn in OpenAI's envelope, with the ids by which the answers name them; none if any is broken."""
    # One broken call makes the whole turn text, even if others in it are well-formed: with these alone as calls, the
    # export would show a turn that the policy never took.
    if not tools.schemas or has_broken_call(turn.text, tools):
        return []
    observation = () if turn.step is None else turn.step.observation
    ids = [str(message.get("tool_call_id", "")) for message in observation if message["role"] == "tool"]
    calls = [call for call in _parsed(turn.text, tools).calls if isinstance(call, ToolCall)]
    # The ids are those under which the answers were journaled, so call and answer still belong together in another
    # format. A turn after which the episode ended has no answers, and its calls get numbers.
    call_ids = [*ids, *(f"call{number:05d}" for number in range(len(ids), len(calls)))]
    return [
        {"id": id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        for id, call in zip(call_ids, calls, strict=False)
    ]


def has_broken_call(text: str, tools: ShownTools) -> bool:
    """Whether a turn begins a call that is not well-formed."""
    return bool(tools.schemas) and any(isinstance(call, Malformed) for call in _parsed(text, tools).calls)


def _parsed(text: str, tools: ShownTools) -> Parsed:
    schemas = [function_schema(schema) for schema in tools.schemas]
    return get_format(tools.dialect or "hermes").parse(text, schemas)
