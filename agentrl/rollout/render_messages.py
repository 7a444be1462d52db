"""Messages of one episode to tokens. If the chat template refuses the messages, that episode alone ends.

Owns whose failure a refusal is (law 3): the environment's, if the policy has not acted yet, or if the template refuses
the same order of roles with plain texts too; else the policy's, since its words shape what comes later. Where the
policy may write roles and tools as well, as a program may that runs its code, every refusal after its first act is the
policy's. Never knows the journal or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

import trio

from agentrl.errors import EnvError, ModelError, PolicyFault, boundary
from agentrl.records import Json, Message

_SMALL: Final = 1 << 15  # characters; tokenizing so few takes a moment
_PLAIN: Final = {"content": ".", "name": "tool", "tool_call_id": "call00000"}

Render = Callable[[Sequence[Message]], tuple[int, ...]]


async def rendered(
    render: Render,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Json]] = (),
    *,
    env: str,
    acted: bool,
    policy_writes: bool = False,
) -> tuple[int, ...]:
    """The tokens that `render` makes of `messages`, about as large as these and `tools`. If it refuses them, raises
    EnvError, or PolicyFault if the policy has `acted` and its words may be why. With `policy_writes` it may have
    written more than words: roles and tools."""
    try:
        return await _tokenized(partial(_checked, render, messages), messages, *tools)
    except ModelError as error:
        problem = f"{error} (roles: {', '.join(str(message.get('role')) for message in messages)})"
        # The same order of roles with texts that nobody can object to: if the template refuses these too, the
        # environment built a conversation that no policy could have made acceptable, so it is the environment's
        # failure. If it takes them, the policy's words are why. Guessing by the template's message would depend on its
        # author's wording.
        if acted and (policy_writes or _takes(render, plain(messages))):
            raise PolicyFault(problem) from error
        raise EnvError(f"{env}: {problem}") from error


def plain(messages: Sequence[Message]) -> list[Message]:
    """Copy the messages, with the same roles in the same order, without anything that a policy can write: texts become
    ".", an assistant makes one call at most, which one message answers."""
    plain_messages: list[Message] = []
    for message in messages:
        if message["role"] == "tool" and plain_messages and plain_messages[-1]["role"] == "tool":
            continue
        plain_message: dict[str, Any] = {
            field_name: _PLAIN[field_name] for field_name in message if field_name in _PLAIN
        }
        if "images" in message:  # the environment shows them
            plain_message["images"] = [{**shown_image, "at": 0} for shown_image in message["images"]]
        if tool_calls := cast("list[Any] | None", message.get("tool_calls")):
            plain_function = {"name": "tool", "arguments": cast("dict[str, Json]", {})}
            plain_message["tool_calls"] = [
                {"id": _id_of(tool_calls[0]), "type": "function", "function": plain_function}
            ]
        plain_messages.append(cast("Message", {"role": message["role"], **plain_message}))
    return plain_messages


def _id_of(call: Any) -> str:
    return str(cast("Mapping[str, Any]", call).get("id", "")) if isinstance(call, Mapping) else ""


def _checked(render: Render, messages: Sequence[Message]) -> tuple[int, ...]:
    with boundary(ModelError, "the chat template refuses these messages:", passes=(ModelError,)):
        return render(messages)


def _takes(render: Render, messages: Sequence[Message]) -> bool:
    try:
        _checked(render, messages)
    except ModelError:
        return False
    return True


async def _tokenized(render: Callable[[], tuple[int, ...]], *parts: Any) -> tuple[int, ...]:
    """Call `render`; in a thread if `parts` are large, so that other episodes go on meanwhile."""
    # A thread costs about as much as tokenizing a short message, and almost all are short. A large answer would hold up
    # every other episode of the process, deadlines included.
    if len(str(parts)) <= _SMALL:
        return render()
    return await trio.to_thread.run_sync(render)
