"""`ToolEnv`: an environment of tools, written as a prompt, some `@tool` methods and a grade.

One turn: parse the action ─► run its calls ─► `after_turn` ─► limits ─► at the end `grade`. Whatever the policy
writes becomes an observation that it can read; only failures that it could not have caused are raised. It knows
neither tokens nor model, and holds nothing past `aclose`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from math import inf
from typing import Any, ClassVar, Final, TypeVar, cast

import trio
from gymnasium.error import ResetNeeded

from agentrl import notices
from agentrl.env import sync_async
from agentrl.env.core import CLOSE_DEADLINE_S, Info, ResetResult, StepResult
from agentrl.env.limits import EpisodeLimits, Fault, Meter, ParsePolicy, settings_as
from agentrl.env.snapshots import Recorded
from agentrl.env.tools.by_name import Named, Plugged
from agentrl.env.tools.calls import Malformed, ToolCall
from agentrl.env.tools.parsers import ToolFormat, format_of, get_format
from agentrl.env.tools.tools import (
    ArgumentCheck,
    CallResult,
    argument_check,
    as_result,
    clean_text,
    cut,
    envelope,
    failed,
    function_schema,
    is_tool,
    said,
    tool_messages,
    tools_of,
)
from agentrl.errors import (
    ContentParseError,
    PolicyFault,
    StructuralParseError,
    ToolError,
    ToolTimeout,
    UsageError,
)
from agentrl.host import json_log
from agentrl.host.clocks import policy_seconds_left, policy_time, watch
from agentrl.protocols import Sandbox, Tool, ToolResult
from agentrl.records import ImagePart, Json, Message, Messages, StopReason
from agentrl.sandbox.current_box import CurrentBox

log = logging.getLogger(__name__)
T = TypeVar("T")
MaybeAwaitable = T | Awaitable[T]

_NOT_RUN: Final = ToolResult(content="not run: the episode is over", is_error=True)
_TOOLS_SHARE: Final = 0.75  # of the seconds that a step leaves to the policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """The outcome of an episode. `info` is added to the last step's info, for metrics."""

    outcome: float
    success: bool
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])


@dataclass(slots=True)
class _Episode:
    """Where the episode stands. `busy` is set while a step runs and stays set if it was cancelled."""

    meter: Meter
    calls: int = 0
    turn_s: float = inf  # that the calls of a turn share
    kept_s: float = 0.0  # of the policy's seconds of a step, for judging what they did
    busy: bool = False
    over: bool = False
    finished: bool = False
    cut_off: bool = False  # finished, but not by the task: a limit of the environment's own
    reward: float = 0.0
    info: Info = field(default_factory=dict[str, Json])
    faults: dict[Fault, int] = field(default_factory=lambda: {"structural": 0, "content": 0})


class ToolEnv(Recorded):
    """An environment whose actions are tool calls. Write `prompt`, `@tool` methods and `grade`; each of the hooks may
    be `def` or `async def`. Plain ones run in a thread unless `blocking = False`.

    Example::

        class Guess(agentrl.ToolEnv):
            limits = EpisodeLimits(turns=8)

            def prompt(self, task):
                self.secret, self.solved = int(self.np_random.integers(1, 101)), False
                return "Find the number between 1 and 100."

            @agentrl.tool
            def guess(self, number: int) -> str:
                \"\"\"Compare a number with the hidden one.\"\"\"
                if number == self.secret:
                    self.solved = True
                    self.finish()
                return "found" if self.solved else "larger" if number < self.secret else "smaller"

            def grade(self):
                return self.solved
    """

    system: ClassVar[str | None] = None
    """A system message in front of the prompt."""
    limits: EpisodeLimits = EpisodeLimits(turns=16)
    parse_policy: ParsePolicy = ParsePolicy()
    tool_timeout_s: float = 30.0
    tool_output_bytes: int = 16_384
    max_calls: int = 16
    """Calls of one turn that are run; the model is told of the others."""
    boxed: ClassVar[bool] = False
    """Whether every episode has a box, `self.box`, from before `prompt` to its end; without it only tools that ask for
    one bring one."""
    graded: bool = True
    """Whether `grade` gives each episode an outcome, which `check_env` looks for. False where the step rewards are the
    whole signal, or where the run's rewarder judges."""
    own_box: Sandbox | None = None
    """The box in which named tools work, for environments that open one; else they get one if they ask for it."""

    task: Mapping[str, Json]
    """What this episode plays, as `make_task` gave it."""

    _seed: int | None = None
    _episode: _Episode | None = None
    _needs_teardown: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if is_tool(value) and hasattr(ToolEnv, name):
                hint = f"name the method otherwise, and the tool by @tool(name={name!r})"
                raise UsageError(f"the tool {cls.__name__}.{name} takes the place of ToolEnv.{name}: {hint}")

    def __init__(
        self,
        *,
        tools: Sequence[Named] = (),
        box: Mapping[str, Any] | None = None,
        limits: EpisodeLimits | Mapping[str, Any] | None = None,
        parse_policy: ParsePolicy | Mapping[str, Any] | None = None,
        tool_format: str | None = None,
    ) -> None:
        """`tools` beside the class's own, given or named, and the `box` for them: see `agentrl.env.tools.by_name`."""
        self.limits = settings_as(EpisodeLimits, "limits", self.limits if limits is None else limits)
        given = self.parse_policy if parse_policy is None else parse_policy
        self.parse_policy = settings_as(ParsePolicy, "parse_policy", given)
        self.tool_format = tool_format or self.tool_format
        if self.tool_format is not None:
            get_format(self.tool_format)
        self._tools: dict[str, Tool] = {}
        self._checks: dict[str, ArgumentCheck] = {}
        self._plugged = Plugged(tools, box=box, own=self.own_box, boxed=self.boxed)
        self._served = list[str]()
        self.box = self._plugged.box
        for offered in [*tools_of(self, blocking=self.blocking), *self._plugged.tools]:
            self.add_tool(offered)

    # --- hooks: what an author writes

    def make_task(self, options: Mapping[str, Json]) -> Mapping[str, Json]:
        """The episode's task from the reset options (a row of a data set, say) and `self.np_random`."""
        return dict(options)

    def task_seed(self) -> int:
        """For `make_task` of an environment whose seeds are its tasks: the seed of `reset`, or a random one without."""
        return int(self.np_random.integers(2**31)) if self._seed is None else self._seed

    def setup(self, task: Mapping[str, Json]) -> MaybeAwaitable[None]:
        """Open the resources of the episode (a sandbox, a file). `teardown` runs even if this fails half-way."""

    def prompt(self, task: Mapping[str, Json]) -> MaybeAwaitable[str | Sequence[Message]]:
        """The first observation: a text (one user message) or messages."""
        raise NotImplementedError(f"{type(self).__name__} must write prompt(task)")

    def on_text(self, text: str) -> MaybeAwaitable[str | Sequence[Message] | None]:
        """Answer an action without any tool call. The default tells the model to make one."""
        names = ", ".join(self._tools)
        raise StructuralParseError(f"no tool call found; call one of: {names}")

    def after_turn(self, results: Sequence[CallResult]) -> MaybeAwaitable[float | None]:
        """The process reward of the turn, once its calls are done, beside what `self.reward` adds to it."""
        return None

    def grade(self) -> MaybeAwaitable[Grade | float | bool | None]:
        """The outcome, once, when the episode ends, also when a limit ends it. True is 1.0 with success; a number is
        a success from 1.0 on; None, with `graded = False`, leaves the outcome to the run's rewarder."""
        return None

    def teardown(self) -> MaybeAwaitable[None]:
        """Close what `setup` opened. Runs once after each `setup`, also after a failure or a cancellation."""

    # --- what an author calls

    def finish(self, *, truncated: bool = False) -> None:
        """End the episode with this turn; calls of the turn that were not run yet are not run any more. `truncated`
        says that a limit of the environment's own ends it, such as gymnasium's TimeLimit, and not the task."""
        episode = self._live()
        episode.cut_off = truncated and (episode.cut_off or not episode.finished)
        episode.finished = True

    def reward(self, amount: float) -> None:
        """Add to this turn's process reward."""
        self._live().reward += amount

    def note(self, **info: Json) -> None:
        """Add to this turn's info: JSON-safe values that are equal on replay."""
        self._live().info.update(info)

    def call(self, name: str, /, **arguments: Json) -> str:
        """A call as the model has to write it, for oracles."""
        return self._format.write(self._format.spelled(ToolCall(name, arguments), self.schemas))

    def add_tool(self, tool: Tool) -> None:
        """Offer one more tool. Raises UsageError for a value that is no tool, a taken name or an invalid schema."""
        if missing := [part for part in ("name", "parallel", "schema", "call") if not hasattr(tool, part)]:
            raise UsageError(f"{tool!r} is no tool: it has no {' and no '.join(missing)}")
        if (told := function_schema(tool.schema).get("name")) != tool.name:
            raise UsageError(f"the tool {tool.name!r} is named {told!r} in its schema: give both one name")
        if tool.name in self._tools:
            raise UsageError(f"{type(self).__name__} has two tools named {tool.name!r}: rename one")
        self._checks[tool.name] = argument_check(tool.schema)
        self._tools[tool.name] = tool

    # --- the contract

    @property
    def schemas(self) -> list[Mapping[str, Json]]:
        """The function schema (name, description, parameters) of every tool."""
        return [function_schema(tool.schema) for tool in self._tools.values()]

    def fresh_box(self, carry: Sequence[str] = ()) -> AbstractAsyncContextManager[Sandbox]:
        """`async with`: another box like `self.box`, for grading the policy's work in a place where it has not been.
        Only the files named in `carry` come along, if they exist; the policy answers for their content."""
        return self._plugged.fresh(carry)

    @property
    def _format(self) -> ToolFormat:
        return format_of(self)

    def tool_schemas(self) -> list[Mapping[str, Json]]:
        """For the chat template; empty where the tool format teaches the tools by a system message of its own."""
        return envelope(self.schemas) if self.tool_format is None or self._format.native else []

    def charge_tokens(self, count: int) -> None:
        self._live().meter.tokens += count

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Json] | None = None) -> ResetResult:
        if not hasattr(self, "_tools"):
            raise UsageError(f"{type(self).__name__}.__init__ must call super().__init__()")
        await self._end_episode()
        await super().areset(seed=seed)
        self._seed = seed
        self.task = self.make_task(dict(options or {}))
        episode = self._episode = _Episode(Meter(self.limits), busy=True)
        past = self._begin_record(seed, options)
        self._needs_teardown = True
        await self._hook(self.setup, self.task)
        for offered in await self._plugged.open():
            self.add_tool(offered)
            self._served.append(offered.name)
        opening = _messages(await self._hook(self.prompt, self.task), f"{type(self).__name__}.prompt")
        alone = bool(self._tools) and not self.tool_schemas()
        told = [self.system or "", self._format.instructions(self.schemas) if alone else ""]
        if any(told):
            opening = (Message(role="system", content="\n\n".join(filter(None, told))), *opening)
        past.began(opening)
        episode.busy = False
        info, episode.info = episode.info, {}
        return opening, info

    async def astep(self, action: str) -> StepResult:
        episode = self._episode
        if episode is None or episode.over or episode.busy:
            raise ResetNeeded(f"{type(self).__name__}: call reset before step, and after the end of an episode")
        if not isinstance(action, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"action is a {type(action).__name__}, not text")
        episode.busy, episode.reward, episode.info = True, 0.0, {}
        with episode.meter.step():
            answer = await self._play_turn(episode, action)
        self._record_action(action, answer)
        return answer

    async def _play_turn(self, episode: _Episode, action: str) -> StepResult:
        parsed = self._format.parse(action, self.schemas) if self._tools else None
        if parsed is not None and parsed.calls:
            results = await self._run_calls(episode, parsed.calls)
            observation = tool_messages(results, episode.calls)
            if not self.tool_schemas():
                observation = self._format.answer(observation)
            faults: set[Fault] = {result.fault for result in results if result.fault is not None}
            ran = [one for one in results if one.fault is None and one.result is not _NOT_RUN]
            if broken := Counter(one.name for one in ran if one.result.is_error):
                episode.info["tool_errors"] = dict(broken)  # `agentrl health` knows a broken tool by it
        else:
            results = []
            observation, faults = await self._answer_text(action)
        episode.calls += len(results)
        earned = await self._hook(self.after_turn, tuple(results))  # awaited apart: the hook may call self.reward
        episode.reward += float(earned or 0.0)
        failed = self._charge_faults(episode, faults)
        episode.meter.turns += 1
        stop = StopReason.PARSE_FAILURE if failed else episode.meter.exceeded()
        if episode.finished:
            stop = StopReason.TRUNCATED if episode.cut_off else StopReason.DONE
        terminated = stop in (StopReason.DONE, StopReason.PARSE_FAILURE)
        truncated = stop is not None and not terminated
        if stop is not None:
            episode.info.update(await self.aend(stop))
        episode.busy = False
        return observation, episode.reward, terminated, truncated, episode.info

    async def aend(self, reason: StopReason) -> Info:
        """End the running episode: the info with `outcome`, `success` and `stop_reason`. It is graded once."""
        episode = self._live()
        if episode.over:
            return {}
        episode.over = True
        info: Info = {"stop_reason": reason.value}
        grade = await self._hook(self.grade)
        if grade is None:
            return info
        if not isinstance(grade, Grade):
            try:
                grade = Grade(outcome=float(grade), success=float(grade) >= 1.0)
            except (TypeError, ValueError):
                hint = "give a number, a truth value, a Grade or None"
                raise UsageError(f"{type(self).__name__}.grade returned {grade!r}: {hint}") from None
        return {**info, **grade.info, "outcome": float(grade.outcome), "success": bool(grade.success)}

    async def aclose(self) -> None:
        await self._end_episode()

    # --- inside

    def _record_box(self) -> CurrentBox | None:
        return self._plugged.current

    def _record_meter(self) -> Meter | None:
        return None if self._episode is None or self._episode.busy else self._episode.meter

    def _live(self) -> _Episode:
        if self._episode is None:
            raise ResetNeeded(f"{type(self).__name__} has no episode yet: call reset")
        return self._episode

    async def _hook(self, function: Any, *args: Any) -> Any:
        return await sync_async.call(function, *args, blocking=self.blocking)

    async def _end_episode(self) -> None:
        self._episode = None
        if self._needs_teardown:
            self._needs_teardown = False
            while self._served:
                name = self._served.pop()
                del self._tools[name], self._checks[name]
            with trio.move_on_after(CLOSE_DEADLINE_S, shield=True):
                try:
                    await self._plugged.aclose()
                finally:
                    await self._hook(self.teardown)

    async def _answer_text(self, text: str) -> tuple[Messages, set[Fault]]:
        try:
            answer = await self._hook(self.on_text, text)
            return () if answer is None else _messages(answer, f"{type(self).__name__}.on_text"), set()
        except PolicyFault as error:
            fault: Fault = "structural" if isinstance(error, StructuralParseError) else "content"
            return _messages(said(self._told_of_cut(error)), "on_text"), {fault}

    def _charge_faults(self, episode: _Episode, faults: set[Fault]) -> bool:
        """Count, penalise and mark the turn's parse failures; whether they used up their retries."""
        failed = False
        kinds: tuple[Fault, Fault] = ("structural", "content")
        for fault in kinds:
            if fault not in faults:
                episode.faults[fault] = 0
                continue
            episode.faults[fault] += 1
            episode.reward -= self.parse_policy.penalty(fault)
            episode.info.setdefault("parse_failure", fault)
            if self.parse_policy.masks(fault):
                episode.info["masked"] = True
            retries = self.parse_policy.retries(fault)
            failed = failed or (retries is not None and episode.faults[fault] > retries)
        return failed

    async def _run_calls(self, episode: _Episode, calls: Sequence[ToolCall | Malformed]) -> list[CallResult]:
        """Run the calls in order; neighbours that all allow it run at the same time. All of them share most of the
        seconds that a step leaves to the policy; the rest is for judging what they did."""
        results: list[CallResult] = []
        left_s = policy_seconds_left()
        episode.turn_s, episode.kept_s = _TOOLS_SHARE * left_s, (1 - _TOOLS_SHARE) * left_s if left_s < inf else 0.0
        for stage in self._stages(calls[: self.max_calls]):
            if episode.finished:
                results.extend(CallResult(call, _NOT_RUN) for call in stage)
            else:
                results.extend(await self._run_stage(episode, stage))
        left = len(calls) - self.max_calls
        if left > 0:
            error = ContentParseError(f"{left} more calls were not run: make at most {self.max_calls} at once")
            results.append(failed(calls[self.max_calls], error))
        return results

    def _stages(self, calls: Sequence[ToolCall | Malformed]) -> Iterator[list[ToolCall | Malformed]]:
        stage: list[ToolCall | Malformed] = []
        for call in calls:
            tool = self._tools.get(call.name)
            alone = tool is not None and not tool.parallel and isinstance(call, ToolCall)
            if alone and stage:
                yield stage
                stage = []
            stage.append(call)
            if alone:
                yield stage
                stage = []
        if stage:
            yield stage

    async def _run_stage(self, episode: _Episode, stage: Sequence[ToolCall | Malformed]) -> list[CallResult]:
        if len(stage) == 1:
            return [await self._run_call(episode, stage[0])]
        results: dict[int, CallResult] = {}
        broken: list[Exception] = []

        async def run(index: int) -> None:
            try:
                results[index] = await self._run_call(episode, stage[index])
            except Exception as error:
                broken.append(error)
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for index in range(len(stage)):
                nursery.start_soon(run, index)
        if broken:
            raise broken[0]
        return [results[index] for index in range(len(stage))]

    async def _run_call(self, episode: _Episode, call: ToolCall | Malformed) -> CallResult:
        """One call. Raises only what the policy could not have caused."""
        if isinstance(call, Malformed):
            return failed(call, self._told_of_cut(call.error))
        try:
            tool = self._tools.get(call.name)
            if tool is None:
                raise ContentParseError(
                    f"no tool named {clean_text(call.name)[:100]!r}; known: {', '.join(self._tools)}"
                )
            call = ToolCall(call.name, self._checks[call.name](call.arguments))
            result = await self._call_in_time(episode, tool, call)
            if len(result.images) > getattr(self.observation_space, "max_images", 0):
                # Not the environment's failure: what a tool returns may be what the policy put into a file.
                hint = f"observation_space = Messages(max_images={len(result.images)}) of the environment allows them"
                what = f"{call.name} returned pictures, and none are shown here: {hint}"
                notices.note("results of tools", what, by_policy=True)
                raise ToolError(what)
        except PolicyFault as error:
            return failed(call, error, limit=self.tool_output_bytes)
        content, was_cut = cut(clean_text(result.content), self.tool_output_bytes)
        if result.truncated and not was_cut:
            content += "\n[output cut]"
        truncated = was_cut or result.truncated
        shown = [ImagePart(at=min(image["at"], len(content)), url=image["url"]) for image in result.images]
        return CallResult(
            call,
            ToolResult(content=content, is_error=result.is_error, truncated=truncated, images=shown, data=result.data),
        )

    async def _call_in_time(self, episode: _Episode, tool: Tool, call: ToolCall) -> ToolResult:
        own = cast("float | None", getattr(tool, "timeout_s", None))
        own_s = min(own if own is not None else self.tool_timeout_s, episode.meter.tool_seconds_left())
        turn_s = policy_seconds_left() - episode.kept_s
        shared = f": the calls of a turn share {episode.turn_s:g} s" if turn_s < own_s else ""
        if turn_s <= 0:
            raise ToolTimeout(f"{call.name} was not run{shared}, and those before it took them")
        limit_s = min(own_s, turn_s)
        with watch(policy_s=limit_s) as calling:
            try:
                with policy_time(), json_log.about(tool=call.name):
                    result = await sync_async.call(tool.call, call.arguments, blocking=self.blocking)
                    return as_result(result, call.name)
            finally:
                episode.meter.tool_seconds += calling.seconds
                log.info("the tool %s took %.3f s", call.name, calling.seconds)
        raise ToolTimeout(f"{call.name} was ended after {limit_s:g} s{shared}")

    def _told_of_cut(self, error: PolicyFault) -> PolicyFault:
        """A turn that was cut in the middle of a call, or before one, is told so."""
        if self.action_cut and isinstance(error, StructuralParseError):
            return StructuralParseError(f"{error} (your turn was cut at its limit of tokens: write less at once)")
        return error


def _messages(value: str | Sequence[Message], what: str) -> Messages:
    """A hook's answer as messages, copied: what the author keeps must not be what the observer holds."""
    if isinstance(value, str):
        return (Message(role="user", content=clean_text(value)),)
    given: Any = value
    if not isinstance(given, list | tuple) or not all(isinstance(each, Mapping) for each in cast("list[Any]", given)):
        raise UsageError(f"{what} returned {given!r:.80}: give a text, or a list of messages")
    return tuple(cast(Message, dict(message)) for message in value)
