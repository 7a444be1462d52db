"""Environment classes written for TRL's `environment_factory`, unchanged: `reset(**row)`, public methods, `get_reward`.

Their rules: public methods are the tools; `reset` takes the row of the data set and may return text, which is appended
to the last prompt message; whatever a method raises is read by the model; a message without a tool call ends the
episode; `get_reward()` is the outcome.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from agentrl import registry
from agentrl.env.tool_env import Grade, ToolEnv
from agentrl.env.tools import FunctionTool, ToolOptions
from agentrl.errors import InfrastructureError, UsageError
from agentrl.records import Json, Message


class TrlEnv(ToolEnv):
    """`agentrl/TRL-v0`. A class written for TRL, unchanged. `env` is the class (or a factory), or its reference
    `module:Class`; `prompt` the opening where the row has no `prompt` of its own.

    Blocking methods run in a thread. Rows come from the reset options. Such an environment does not promise replay."""

    def __init__(self, env: str | Callable[[], Any], *, prompt: str | Sequence[Message] = "", **settings: Any) -> None:
        make = registry.load_reference(env) if isinstance(env, str) else env
        self._env = make()
        if not callable(getattr(self._env, "reset", None)):
            raise UsageError(f"{type(self._env).__name__} has no reset method: it is no environment in TRL's sense")
        self._default = prompt
        self.graded = hasattr(self._env, "get_reward")
        super().__init__(tools=_methods_of(self._env), **settings)

    async def prompt(self, task: Mapping[str, Json]) -> Sequence[Message]:
        seen = cast(object, await self._hook(functools.partial(self._env.reset, **task)))
        if seen is not None and not isinstance(seen, str):
            name, kind = type(self._env).__name__, type(seen).__name__
            raise UsageError(f"{name}.reset returned a {kind}, neither None nor text")
        given: Any = task.get("prompt", self._default)
        opening = [Message(role="user", content=given)] if isinstance(given, str) else [*cast("list[Message]", given)]
        if seen is not None:
            last = opening.pop() if opening else Message(role="user", content="")
            opening.append(Message(role=last["role"], content=last["content"] + seen))
        return opening

    def on_text(self, text: str) -> None:
        """A message without a call is the model's last word."""
        self.finish()

    async def grade(self) -> Grade | None:
        """What `get_reward` gives. If it raises, or gives no finite number, the outcome is 0: it judges what the policy
        did, so the policy could have caused it."""
        get_reward = getattr(self._env, "get_reward", None)
        if get_reward is None:
            return None
        try:
            outcome = float(await self._hook(get_reward))
        except InfrastructureError:
            raise
        except Exception as error:
            return Grade(outcome=0.0, success=False, info={"reward_error": f"{type(error).__name__}: {error}"[:500]})
        outcome = outcome if math.isfinite(outcome) else 0.0
        return Grade(outcome=outcome, success=outcome >= 1.0)


def _methods_of(env: Any) -> list[FunctionTool]:
    """The public methods of the class as tools, by name."""
    members = cast("list[tuple[str, object]]", inspect.getmembers(cast(object, env).__class__))
    names = [name for name, value in members if inspect.isfunction(value) and not name.startswith("_")]
    return [
        FunctionTool(getattr(env, name), ToolOptions(name=name, errors=(Exception,)))
        for name in names
        if name not in ("reset", "get_reward")
    ]
