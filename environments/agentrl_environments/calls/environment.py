"""`Calls`: a request, functions, and one turn to write the right calls in. Nothing is executed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gymnasium.error import ResetNeeded

from agentrl.env.checks.oracles import Oracle, say
from agentrl.env.core import Env, Info, ResetResult, StepResult
from agentrl.env.tools.calls import Parsed, ToolCall
from agentrl.env.tools.json_schema import function_schema
from agentrl.env.tools.parsers import ToolFormat, format_of, get_format
from agentrl.errors import ConfigError
from agentrl.records import Json, Message, StopReason
from agentrl_environments.calls.scoring import Call, is_right, share_of
from agentrl_environments.calls.tasks import DOMAINS, KINDS, Split, changed, check_kinds, make_task

PARTIAL_MOST = 0.5
"""The most that a wrong answer earns with `partial`."""


class Calls(Env):
    """`agentrl/Calls-v0`: answer a request by calls of the offered functions, or in words where none fits.

    `kinds`: which of `simple`, `multiple`, `parallel`, `parallel_multiple` and `irrelevance` are drawn. `split`:
    `train`, or `held_out`, whose domains and functions are others. Outcome: 1 if the calls of the first turn are the
    right ones, else 0. With `partial` a wrong answer has a process reward, the share of it that is right, times 0.5."""

    blocking = False
    replayable = True

    def __init__(
        self,
        *,
        kinds: str | Sequence[str] = KINDS,
        split: Split = "train",
        partial: bool = False,
        tool_format: str | None = None,
    ) -> None:
        if split not in DOMAINS:
            raise ConfigError("split", split, f"choose one of {', '.join(DOMAINS)}")
        if type(partial) is not bool:
            raise ConfigError("partial", partial, "give true or false")
        if tool_format is not None:
            get_format(tool_format)
        self.tool_format = tool_format
        self._kinds, self._is_partial = check_kinds(kinds), partial
        self._split: Split = split
        self._tools: list[Mapping[str, Json]] = []
        self._is_over = True

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        if options:
            raise ConfigError("options", sorted(options), "leave them out: seed, kinds and split make the task")
        drawn_seed = int(self.np_random.integers(1 << 31)) if seed is None else seed
        self._task = make_task(drawn_seed, self._split, self._kinds)
        self._tools, self._is_over = list(self._task.tools), False
        messages = (Message(role="user", content=self._task.request),)
        if not self._shows_tools:
            instructions = self._format.instructions(self._functions)
            messages = (Message(role="system", content=instructions), *messages)
        return messages, {"kind": self._task.kind, "domain": self._task.domain}

    def step(self, action: str) -> StepResult:
        if self._is_over:
            raise ResetNeeded("Calls: call reset before step, and after the end of an episode")
        self._is_over = True
        parsed = self._format.parse(action, self._functions)
        mistake = self._mistake(parsed)
        info: Info = {"outcome": float(not mistake), "success": not mistake, "kind": self._task.kind}
        if not mistake:
            return (), 0.0, True, False, info
        reward = PARTIAL_MOST * share_of(self._task.parameters, *self._both(parsed)) if self._is_partial else 0.0
        return (), reward, True, False, {**info, "mistake": mistake}

    async def aend(self, reason: StopReason) -> Info:
        """End the episode without an answer, which is a wrong one."""
        if self._is_over:
            return {}
        self._is_over = True
        return {"stop_reason": reason.value, "outcome": 0.0, "success": False, "kind": self._task.kind}

    def tool_schemas(self) -> list[Mapping[str, Json]]:
        return [dict(tool) for tool in self._tools] if self._shows_tools else []

    def call(self, name: str, /, **arguments: Json) -> str:
        """A call as the model has to write it, for oracles."""
        return self._written(Call(name, arguments))

    def oracles(self) -> list[Oracle]:
        misfit, expected = self._task.misfit, self._task.expected
        no_op = Oracle("no-op", 0.0, say(""))
        if not expected:
            return [
                Oracle("gold", 1.0, say(self._task.refusal)),
                Oracle("call where none fits", 0.0, say(self._written(misfit))),
                no_op,
            ]
        properties = self._task.parameters[expected[0].name]["properties"]
        name, value = next(iter(expected[0].arguments.items()))
        wrong_call = replace(expected[0], arguments={**expected[0].arguments, name: changed(properties[name], value)})
        gold = self._written(*expected)
        # In one line with words in front of it: no dialect reads that as a call.
        quoted = " and ".join(f"{call.name} with {dict(call.arguments)}" for call in expected)
        return [
            Oracle("gold", 1.0, say(gold)),
            Oracle("wrong function", 0.0, say(self._written(misfit, *expected[1:]))),
            Oracle("wrong argument", 0.0, say(self._written(wrong_call, *expected[1:]))),
            Oracle("prose that quotes the call", 0.0, say(f"The right answer is {quoted}."), cheats=True),
            no_op,
        ]

    # --- inside

    @property
    def _format(self) -> ToolFormat:
        return format_of(self)

    @property
    def _shows_tools(self) -> bool:
        """Whether the prompt's renderer writes the tools, as with BFCL, so that both have the same prompts."""
        return self.tool_format is None or self._format.native

    @property
    def _functions(self) -> list[Mapping[str, Json]]:
        return [function_schema(tool) for tool in self._tools]

    def _written(self, *calls: Call) -> str:
        tool_calls = [ToolCall(call.name, call.arguments) for call in calls]
        return self._format.write(*(self._format.spelled(call, self._functions) for call in tool_calls))

    def _both(self, parsed: Parsed) -> tuple[Sequence[Call], Sequence[Call]]:
        """The expected calls, and those of the policy that can be read."""
        made_calls = [Call(call.name, call.arguments) for call in parsed.calls if isinstance(call, ToolCall)]
        return self._task.expected, made_calls

    def _mistake(self, parsed: Parsed) -> str:
        """A word for the first mistake of an answer; nothing for a right one. It repeats no text of the policy."""
        expected_calls, made_calls = self._both(parsed)
        if len(made_calls) < len(parsed.calls):
            return "broken call"
        if not made_calls and not parsed.text.strip():
            return "empty"
        if len(made_calls) != len(expected_calls):
            return "number of calls" if made_calls else "no call"
        if sorted(call.name for call in made_calls) != sorted(call.name for call in expected_calls):
            return "function"
        return "" if is_right(self._task.parameters, expected_calls, made_calls) else "argument"
