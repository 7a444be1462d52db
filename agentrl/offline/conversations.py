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
    for played_turn in trajectory.turns:
        action_message = turn_message(played_turn, trajectory.tools, splits_thoughts=splits_thoughts)
        messages.append(
            action_message
            if played_turn.role == POLICY
            else cast("Message", {**action_message, "name": played_turn.role})
        )
        if played_turn.step is not None:
            messages.extend(played_turn.step.observation)
    return tuple(messages)


def turn_message(turn: Turn, tools: ShownTools, *, splits_thoughts: bool = False) -> Message:
    """A turn as a message of the assistant. Its text is as it was sampled, unless it makes calls."""
    parsed_text = _parsed(turn.text, tools)
    tool_calls = calls_of(turn, tools)
    # Reasoning with words before it cannot become `reasoning_content`: a template writes that field first, so the
    # exported turn would have its words in another order than the policy sampled them.
    openings = [thought_opening for thought_opening, _ in get_format(tools.dialect or "hermes").thoughts]
    # Words before them: no template writes these again.
    if any(thought_opening in parsed_text.thoughts for thought_opening in openings):
        splits_thoughts = False
    # The untouched text is the safe form: what a template writes for it is what was sampled. A turn is taken apart
    # only where that is needed, for calls or for thoughts that a template has a field for.
    if not tool_calls and not (splits_thoughts and parsed_text.thoughts and not has_broken_call(turn.text, tools)):
        return {"role": "assistant", "content": turn.text}
    message: dict[str, Any] = {"role": "assistant", "content": parsed_text.text.strip()}
    if parsed_text.thoughts and splits_thoughts:
        message["reasoning_content"] = parsed_text.thoughts
    # Without a field for thoughts they stay where they were, as text before the calls. To leave them out would teach
    # a model to call without reasoning, which is not what earned the reward.
    elif parsed_text.thoughts:
        message["content"] = "\n".join(filter(None, (parsed_text.head.strip(), parsed_text.text.strip())))
    if tool_calls:
        message["tool_calls"] = tool_calls
    return cast("Message", message)


def calls_of(turn: Turn, tools: ShownTools) -> list[dict[str, Any]]:
    """The calls of a turn in OpenAI's envelope, with the ids by which the answers name them; none if any is broken."""
    # One broken call makes the whole turn text, even if others in it are well-formed: with these alone as calls, the
    # export would show a turn that the policy never took.
    if not tools.schemas or has_broken_call(turn.text, tools):
        return []
    observation = () if turn.step is None else turn.step.observation
    answer_ids = [str(message.get("tool_call_id", "")) for message in observation if message["role"] == "tool"]
    tool_calls = [tool_call for tool_call in _parsed(turn.text, tools).calls if isinstance(tool_call, ToolCall)]
    # The ids are those under which the answers were journaled, so call and answer still belong together in another
    # format. A turn after which the episode ended has no answers, and its calls get numbers.
    call_ids = [*answer_ids, *(f"call{call_number:05d}" for call_number in range(len(answer_ids), len(tool_calls)))]
    return [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": tool_call.name, "arguments": dict(tool_call.arguments)},
        }
        for call_id, tool_call in zip(call_ids, tool_calls, strict=False)
    ]


def has_broken_call(text: str, tools: ShownTools) -> bool:
    """Whether a turn begins a call that is not well-formed."""
    return bool(tools.schemas) and any(isinstance(parsed_call, Malformed) for parsed_call in _parsed(text, tools).calls)


def _parsed(text: str, tools: ShownTools) -> Parsed:
    function_schemas = [function_schema(tool_schema) for tool_schema in tools.schemas]
    return get_format(tools.dialect or "hermes").parse(text, function_schemas)
