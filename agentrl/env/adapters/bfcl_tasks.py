"""The tasks of the Berkeley Function Calling Leaderboard, scored by its own checkers.

    reset ─► messages of turn 0, tools ─► calls ─► results ─► … ─► a text ends the turn ─► next turn ─► … ─► verdict

A single-turn task is its first answer. What a policy writes reaches the package in its child process alone
(`agentrl.env.adapters.bfcl_package`), as parsed JSON.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from gymnasium.error import ResetNeeded

from agentrl.env.child_processes import ChildProcesses, Hangs
from agentrl.env.core import Env, Info, ResetResult, StepResult
from agentrl.env.limits import positive_seconds
from agentrl.env.tools.calls import Parsed, ToolCall
from agentrl.env.tools.json_schema import function_schema
from agentrl.env.tools.parsers import ToolFormat, format_of, get_format
from agentrl.env.tools.tools import CallResult, clean_text, completion_messages, tool_messages
from agentrl.errors import EnvError, UsageError
from agentrl.host.clocks import host_time_in_thread, policy_time
from agentrl.protocols import ToolResult
from agentrl.records import Json, Message, Messages, StopReason

STEPS: Final = 20
"""The package's bound on the steps of one turn: the one after it still runs, and then the conversation is over."""
_LOAD_S: Final = 120.0  # for the package to read a category
_PROCESSES: Final = 4

_Answer = list[dict[str, Json]] | str
"""A turn of the policy as the package takes it: `[{name: arguments}, …]`, or a text."""


def _spread(count: int) -> int:
    """The distance of the tasks of two seeds that follow each other: near the golden section of `count`, and without a
    divisor in common with it, so that no task comes twice before all have come."""
    # In the package's order an evaluation of 200 tasks would be one category, under the name of the whole group.
    return next(step for step in range(max(round(count * 0.618), 1), 2 * count + 1) if math.gcd(step, count) == 1)


class BFCL(Env):
    """`agentrl/BFCL-v0`. Tasks of the Berkeley Function Calling Leaderboard (the package `bfcl-eval`).

    `categories` are the package's, or its groups (`single_turn`, `multi_turn`, …). The option `index` names a task by
    its number in the package's order. Seeds that follow each other are spread evenly over all tasks, and as many of
    them as there are tasks name each task once. The outcome is 1 where the package's own checker accepts the answer,
    else 0, and the info has the checker's `error_type`.

    A single-turn task is answered by the policy's first turn: its calls, or a text. In a multi-turn task the policy
    calls the package's simulated APIs until it writes a turn without calls; then the next message of the user comes. It
    has at most `steps` steps of calls for each message, and one more. A call that cannot be read counts as text: in the
    package, too, an answer that is no JSON holds no call. Calls or a verdict that take more than `call_s` seconds are
    ended, and so are those that need gigabytes; the policy answers for them.

    The tasks are an evaluation set with published answers: there is no training split."""

    replayable = True
    evaluation_set = "BFCL has no training split: the score of a policy that was trained on its tasks says nothing"

    def __init__(
        self,
        categories: str | Sequence[str] = "single_turn",
        *,
        steps: int = STEPS,
        call_s: float = 20.0,
        tool_format: str | None = None,
    ) -> None:
        if type(steps) is not int or steps < 1:
            raise UsageError(f"steps = {steps!r}: give a whole number from 1 on; the package has {STEPS}")
        if tool_format is not None:
            get_format(tool_format)
        self.tool_format = tool_format
        self._steps, self._call_s = steps, positive_seconds("call_s", call_s)
        self.needs_step_s, self.needs_step_by = self._call_s, "call_s"
        names: tuple[object, ...] = (categories,) if isinstance(categories, str) else tuple(categories)
        self._counts = _counts(tuple(map(str, names)))
        self.task_count, self.bad_tasks = sum(self._counts.values()), ()
        self._tools: list[Mapping[str, Json]] = []
        self._is_over = True

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        super().reset(seed=seed)
        number = (options or {}).get("index")
        if number is None and seed is not None:
            number = seed * _spread(self.task_count)
        elif number is None:
            number = int(self.np_random.integers(self.task_count))
        if type(number) is not int or number < 0:
            raise UsageError(f"index = {number!r}: give the number of a task, 0 to {self.task_count - 1}")
        self._category, self._index = self._place_of(number % self.task_count)
        self._task = self._ask("task", _LOAD_S)
        self._tools = list(self._task["tools"])
        self._turns: list[list[_Answer]] = []  # what the policy wrote in answer to each message of the user
        self._calls_before, self._is_over = 0, False
        self._conversation: list[Message] = []
        opening = self._next_turn()
        return self._with_instructions(opening), {"category": self._category, "task": self._task["id"]}

    def step(self, action: str) -> StepResult:
        if self._is_over:
            raise ResetNeeded("BFCL: call reset before step, and after the end of an episode")
        parsed = self._format.parse(action, self._functions)
        answer = _answer_of(parsed)
        self._turns[-1].append(answer)
        if not self._category.startswith("multi_turn"):
            return (), 0.0, True, False, self._verdict(answer)
        if isinstance(answer, list):
            results = self._results(parsed)
            self._converse(parsed, action, results)
            # The package counts like this: the bound is looked at behind a step, so that one more is run.
            is_forced = len(self._turns[-1]) > self._steps
            return results, 0.0, is_forced, False, self._verdict(self._turns) if is_forced else {}
        self._converse(parsed, action, ())
        if len(self._turns) == len(self._task["turns"]):
            return (), 0.0, True, False, self._verdict(self._turns)
        has_new_tools = str(len(self._turns)) in self._task["later_tools"]
        next_messages = self._next_turn()
        if has_new_tools:  # a chat template writes the tools in front of all messages: the prompt is rendered anew
            return (), 0.0, False, False, {"history": list(self._with_instructions(self._conversation))}
        return next_messages, 0.0, False, False, {}

    async def aend(self, reason: StopReason) -> Info:
        """End the episode without a verdict: a task that was not played to its end is not solved."""
        if self._is_over:
            return {}
        self._is_over = True
        return {"stop_reason": reason.value, "outcome": 0.0, "success": False}

    def tool_schemas(self) -> list[Mapping[str, Json]]:
        return [dict(tool) for tool in self._tools] if self._shows_tools else []

    # --- inside

    @property
    def _format(self) -> ToolFormat:
        return format_of(self)

    @property
    def _shows_tools(self) -> bool:
        """Whether the chat template shows the tools, and knows their results."""
        return self.tool_format is None or self._format.native

    @property
    def _functions(self) -> list[Mapping[str, Json]]:
        return [function_schema(tool) for tool in self._tools]

    def _place_of(self, number: int) -> tuple[str, int]:
        for category, count in self._counts.items():
            if number < count:
                return category, number
            number -= count
        raise EnvError(f"bfcl-eval has no task {number} behind those of {', '.join(self._counts)}")

    def _next_turn(self) -> Messages:
        """Begin the next turn of the user, with the tools that come with it."""
        turn_index = len(self._turns)
        self._turns.append([])
        user_messages = [cast("Message", dict(message)) for message in self._task["turns"][turn_index]]
        if later_tools := self._task["later_tools"].get(str(turn_index)):
            self._tools += later_tools
            user_messages = [Message(role="user", content=self._task["notice"])]
        self._conversation += user_messages
        return tuple(user_messages)

    def _results(self, parsed: Parsed) -> Messages:
        """Run the calls of a step, behind all those before it."""
        steps = [step for turn in self._turns for step in turn if not isinstance(step, str)]
        calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
        try:
            results = self._ask("execute", self._call_s, steps=steps)["results"]
        except Hangs:
            # Left out of the episode, since each request runs all calls before its own, and none of them would end.
            self._turns[-1][-1] = ""
            results = [f"Error during execution: not ended within {self._call_s:g} s"] * len(calls)
        call_results = [
            CallResult(call, ToolResult(content=clean_text(result)))
            for call, result in zip(calls, results, strict=True)
        ]
        messages = tool_messages(call_results, self._calls_before)
        self._calls_before += len(calls)
        return messages if self._shows_tools else self._format.answer(messages)

    def _converse(self, parsed: Parsed, action: str, results: Messages) -> None:
        """Keep a turn of the policy and its results, for a prompt that is rendered anew."""
        if self._shows_tools and results:
            calls = [CallResult(call, ToolResult(content="")) for call in parsed.calls]
            spoken = completion_messages(parsed, action, calls)[0]
            for tool_call, result in zip(spoken.get("tool_calls", ()), results, strict=True):
                tool_call["id"] = result.get("tool_call_id", "")
        else:
            is_plain = self._shows_tools and not parsed.calls  # the text leaves out a call that cannot be read
            spoken = Message(role="assistant", content=parsed.text if is_plain else action)
        self._conversation += [spoken, *results]

    def _with_instructions(self, messages: Sequence[Message]) -> Messages:
        """The messages, behind the text that teaches the tools where the chat template does not."""
        if self._shows_tools or not self._tools:
            return tuple(messages)
        instructions = self._format.instructions(self._functions)
        if messages and messages[0]["role"] == "system":
            joined = f"{messages[0]['content']}\n\n{instructions}"
            return (Message(role="system", content=joined), *messages[1:])
        return (Message(role="system", content=instructions), *messages)

    def _verdict(self, answer: Any) -> Info:
        self._is_over = True
        try:
            verdict = self._ask("judge", self._call_s, answer=answer)
        except Hangs:
            verdict = {"valid": False, "error_type": f"the checker did not end within {self._call_s:g} s"}
        info: Info = {"outcome": float(verdict["valid"]), "success": bool(verdict["valid"]), "category": self._category}
        return {**info, "error_type": verdict["error_type"]} if verdict["error_type"] else info

    def _ask(self, request: str, deadline_s: float, **arguments: Any) -> dict[str, Any]:
        with _processes().borrowed() as child:
            try:
                # Apart, as a child reads a category at its first request, and the policy does not pay for that.
                with host_time_in_thread():
                    child.ask({"do": "load", "category": self._category}, _LOAD_S)
            except Hangs:
                raise EnvError(f"bfcl-eval did not read the tasks of {self._category} within {_LOAD_S:g} s") from None
            with policy_time():
                place = {"do": request, "category": self._category, "index": self._index}
                return child.ask({**place, **arguments}, deadline_s)[0]


def _answer_of(parsed: Parsed) -> _Answer:
    """A turn as the package takes it: its calls, or its text if there is none or one of them cannot be read."""
    calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
    if not calls or len(calls) < len(parsed.calls):
        return parsed.text
    return [{call.name: dict(call.arguments)} for call in calls]


@functools.cache
def _processes() -> ChildProcesses:
    """The processes that all episodes of this process share."""
    return ChildProcesses("agentrl.env.adapters.bfcl_package", name="bfcl-eval", most=_PROCESSES)


@functools.cache
def _counts(names: tuple[str, ...]) -> Mapping[str, int]:
    """How many tasks each category has. Raises UsageError for a name that is no category, and one that is not played
    here."""
    try:
        with _processes().borrowed() as child:
            return cast("dict[str, int]", child.ask({"do": "counts", "names": list(names)}, _LOAD_S)[0]["counts"])
    except Hangs:
        raise EnvError(f"bfcl-eval did not read its categories within {_LOAD_S:g} s") from None
