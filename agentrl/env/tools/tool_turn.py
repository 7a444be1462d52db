"""Calls of tools in one turn: within its time, marked neighbours side by side, each result as the model reads it.

A mistake of the policy becomes a result. Only a failure that it could not have caused is raised (law 3). Knows neither
rewards nor the end of an episode.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, cast

import trio

from agentrl import notices
from agentrl.env import sync_async
from agentrl.env.limits import Meter
from agentrl.env.tools.calls import Malformed, ToolCall
from agentrl.env.tools.toolbox import Toolbox
from agentrl.env.tools.tools import CallResult, as_result, clean_text, cut, failed
from agentrl.errors import ContentParseError, PolicyFault, StructuralParseError, ToolError, ToolTimeout
from agentrl.host import json_log
from agentrl.host.clocks import policy_seconds_left, policy_time, watch
from agentrl.protocols import Tool, ToolResult
from agentrl.records import ImagePart

log = logging.getLogger(__name__)

_NOT_RUN: Final = ToolResult(content="not run: the episode is over", is_error=True)
_TOOLS_SHARE: Final = 0.75  # of the seconds that a step leaves to the policy; the rest is for judging the calls

Call = ToolCall | Malformed


# Why calls run side by side only if their tools allow it, and only with their neighbours.
#
# A model writes several calls in one turn and counts on their order. To start all of them at once is the quickest way.
# But one may rely on the one before it: write a file, then run it. Such a pair would succeed or fail by which call is
# quicker, so the reward would depend on the machine (law 3), and an episode that is replayed from its actions would get
# other observations. To run all of them one after the other is right, and takes the sum of their times where the
# longest would do.
#
# Only the author of a tool knows whether its calls touch each other. So `parallel` is a mark of the tool, and off
# unless the author sets it. Neighbours that all have the mark are a stage; a call without it is a stage of its own.
# Stages run in order: everything before a call has ended, and nothing behind it has begun. The results are in the order
# of the calls, whichever ended first. A broken call runs nothing, so it divides no stage.
#
# A mistake of the policy is the result of its call and ends nothing else. A failure that the policy could not have
# caused ends the other calls at once: the step is lost with it, and their results would be read by nobody. It is raised
# by itself and not in a group, since callers choose by its class.
#
# The price: seconds of calls that run side by side are added up in the episode's budget of tool time, as if they had
# run in a row. So nobody gains time by a guess about which calls the model will make.
#
# `tests/env/test_tool_env.py`: `test_parallel_neighbours_run_together_and_others_alone` fails without the stages,
# `test_what_the_policy_could_not_cause_is_raised_bare` if a failure waits for the other calls or comes in a group.
@dataclass(slots=True, kw_only=True)
class ToolTurn:
    """Runs the calls of one turn."""

    tools: Toolbox
    meter: Meter
    """Counts the seconds that the tools take."""
    is_over: Callable[[], bool]
    """True once a call has ended the episode; calls behind it are not run."""
    max_calls: int
    timeout_s: float
    """Seconds that one call may take if its tool does not say."""
    output_bytes: int
    max_images: int
    """Images that the environment shows of one result."""
    blocking: bool
    action_cut: bool
    """True if the model's turn was cut before it ended."""
    _turn_s: float = inf
    """Seconds that all calls share."""
    _judging_s: float = 0.0
    """Seconds that a step keeps for judging what the calls did."""

    async def run(self, calls: Sequence[Call]) -> list[CallResult]:
        """Run the calls in order; neighbours that all allow it run at the same time."""
        call_results: list[CallResult] = []
        left_s = policy_seconds_left()
        self._turn_s, self._judging_s = _TOOLS_SHARE * left_s, (1 - _TOOLS_SHARE) * left_s if left_s < inf else 0.0
        for call_stage in self._stages(calls[: self.max_calls]):
            if self.is_over():
                call_results.extend(CallResult(stage_call, _NOT_RUN) for stage_call in call_stage)
            else:
                call_results.extend(await self._run_stage(call_stage))
        surplus_count = len(calls) - self.max_calls
        if surplus_count > 0:
            surplus_error = ContentParseError(
                f"{surplus_count} more calls were not run: make at most {self.max_calls} at once"
            )
            call_results.append(failed(calls[self.max_calls], surplus_error))
        return call_results

    def _stages(self, calls: Sequence[Call]) -> Iterator[list[Call]]:
        """Split the calls into groups that run one after the other."""
        open_stage: list[Call] = []
        for turn_call in calls:
            called_tool = self.tools.get(turn_call.name) if isinstance(turn_call, ToolCall) else None
            runs_alone = called_tool is not None and not called_tool.parallel
            if runs_alone and open_stage:
                yield open_stage
                open_stage = []
            open_stage.append(turn_call)
            if runs_alone:
                yield open_stage
                open_stage = []
        if open_stage:
            yield open_stage

    async def _run_stage(self, stage: Sequence[Call]) -> list[CallResult]:
        """Run calls at the same time. The first failure cancels the others, and is raised by itself, not in a group."""
        if len(stage) == 1:
            return [await self._run_call(stage[0])]
        result_by_index: dict[int, CallResult] = {}
        failures: list[Exception] = []

        async def run(index: int) -> None:
            try:
                result_by_index[index] = await self._run_call(stage[index])
            except Exception as call_error:
                failures.append(call_error)
                call_nursery.cancel_scope.cancel()

        async with trio.open_nursery() as call_nursery:
            for call_index in range(len(stage)):
                call_nursery.start_soon(run, call_index)
        if failures:
            raise failures[0]
        return [result_by_index[call_index] for call_index in range(len(stage))]

    async def _run_call(self, call: Call) -> CallResult:
        if isinstance(call, Malformed):
            return failed(call, with_cut(call.error, self.action_cut))
        try:
            called_tool, call = self.tools.checked(call)
            return self._shown(call, await self._call_in_time(called_tool, call))
        except PolicyFault as policy_fault:
            return failed(call, policy_fault, limit=self.output_bytes)

    async def _call_in_time(self, tool: Tool, call: ToolCall) -> ToolResult:
        tool_s = cast("float | None", getattr(tool, "timeout_s", None))
        call_s = min(self.timeout_s if tool_s is None else tool_s, self.meter.tool_seconds_left())
        # Read anew for each call: those before it, and time that the host gave back, have changed it.
        turn_s = policy_seconds_left() - self._judging_s
        shared_note = f": the calls of a turn share {self._turn_s:g} s" if turn_s < call_s else ""
        if turn_s <= 0:
            raise ToolTimeout(f"{call.name} was not run{shared_note}, and those before it took them")
        limit_s = min(call_s, turn_s)
        with watch(policy_s=limit_s) as call_watch:
            try:
                with policy_time(), json_log.about(tool=call.name):
                    tool_result = await sync_async.call(tool.call, call.arguments, blocking=self.blocking)
                    return as_result(tool_result, call.name)
            finally:
                self.meter.tool_seconds += call_watch.seconds
                log.info("the tool %s took %.3f s", call.name, call_watch.seconds)
        raise ToolTimeout(f"{call.name} was ended after {limit_s:g} s{shared_note}")

    def _shown(self, call: ToolCall, result: ToolResult) -> CallResult:
        """A result as the model reads it. Raises ToolError for images that the environment does not show."""
        if len(result.images) > self.max_images:
            # Not the environment's failure: what a tool returns may be what the policy put into a file.
            correction = f"observation_space = Messages(max_images={len(result.images)}) of the environment allows them"
            reason = f"{call.name} returned pictures, and none are shown here: {correction}"
            notices.note("results of tools", reason, by_policy=True)
            raise ToolError(reason)
        shown_content, was_cut = cut(clean_text(result.content), self.output_bytes)
        if result.truncated and not was_cut:
            shown_content += "\n[output cut]"
        truncated = was_cut or result.truncated
        shown_images = [
            ImagePart(at=min(tool_image["at"], len(shown_content)), url=tool_image["url"])
            for tool_image in result.images
        ]
        return CallResult(
            call,
            ToolResult(
                content=shown_content,
                is_error=result.is_error,
                truncated=truncated,
                images=shown_images,
                data=result.data,
            ),
        )


def errors_by_tool(results: Sequence[CallResult]) -> dict[str, int]:
    """How many calls of each tool ended with an error of the tool."""
    run_calls = (
        call_result for call_result in results if call_result.fault is None and call_result.result is not _NOT_RUN
    )
    return dict(Counter(call_result.name for call_result in run_calls if call_result.result.is_error))


def with_cut(error: PolicyFault, action_cut: bool) -> PolicyFault:
    """The error of a call as the model reads it, with a note if its turn was cut in the middle of the call, or before
    one."""
    if action_cut and isinstance(error, StructuralParseError):
        return StructuralParseError(f"{error} (your turn was cut at its limit of tokens: write less at once)")
    return error
