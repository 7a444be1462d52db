"""`ToolEnv`: an environment of tools, written as a prompt, some `@tool` methods and a grade.

One turn: parse the action ─► run its calls ─► `after_turn` ─► limits ─► at the end `grade`. Whatever the policy
writes becomes an observation that it can read; only failures that it could not have caused are raised. It knows
neither tokens nor model, and holds nothing past `aclose`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

import trio
from gymnasium.error import ResetNeeded

from agentrl.env import sync_async
from agentrl.env.core import CLOSE_DEADLINE_S, Info, ResetResult, StepResult
from agentrl.env.limits import EpisodeLimits, Fault, FaultCount, Meter, ParsePolicy, settings_as
from agentrl.env.snapshots import Recorded
from agentrl.env.tools.by_name import Named, Plugged
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import ToolFormat, format_of, get_format
from agentrl.env.tools.tool_turn import ToolTurn, errors_by_tool, with_cut
from agentrl.env.tools.toolbox import Toolbox
from agentrl.env.tools.tools import CallResult, clean_text, describe_fault, envelope, is_tool, tool_messages, tools_of
from agentrl.errors import PolicyFault, StructuralParseError, UsageError
from agentrl.protocols import Sandbox, Tool
from agentrl.records import Json, Message, Messages, StopReason
from agentrl.sandbox.current_box import CurrentBox

T = TypeVar("T")
MaybeAwaitable = T | Awaitable[T]


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
    faults: FaultCount
    calls: int = 0
    busy: bool = False
    over: bool = False
    finished: bool = False
    cut_off: bool = False  # finished, but not by the task: a limit of the environment's own
    reward: float = 0.0
    info: Info = field(default_factory=dict[str, Json])


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
                return "right" if self.solved else "larger" if number < self.secret else "smaller"

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
    """Calls of one turn that are run; of the others the model reads an error."""
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
        for attribute_name, attribute in vars(cls).items():
            # A tool named `reset` or `reward` would silently replace a part of the contract: the episode then fails far
            # from here, or worse, runs with another meaning. Known at the class statement, so it is reported there.
            if is_tool(attribute) and hasattr(ToolEnv, attribute_name):
                correction = f"name the method otherwise, and the tool by @tool(name={attribute_name!r})"
                problem = f"the tool {cls.__name__}.{attribute_name} takes the place of ToolEnv.{attribute_name}"
                raise UsageError(f"{problem}: {correction}")

    def __init__(
        self,
        *,
        tools: Sequence[Named] = (),
        box: Mapping[str, Any] | None = None,
        limits: EpisodeLimits | Mapping[str, Any] | None = None,
        parse_policy: ParsePolicy | Mapping[str, Any] | None = None,
        tool_format: str | None = None,
    ) -> None:
        """`tools` beside the class's own, as objects or names, and the `box` for them: see
        `agentrl.env.tools.by_name`."""
        self.limits = settings_as(EpisodeLimits, "limits", self.limits if limits is None else limits)
        parse_settings = self.parse_policy if parse_policy is None else parse_policy
        self.parse_policy = settings_as(ParsePolicy, "parse_policy", parse_settings)
        self.tool_format = tool_format or self.tool_format
        if self.tool_format is not None:
            get_format(self.tool_format)
        self._tools = Toolbox(type(self).__name__)
        self._plugged = Plugged(tools, box=box, own=self.own_box, boxed=self.boxed)
        self._served = list[str]()
        self.box = self._plugged.box
        for own_tool in [*tools_of(self, blocking=self.blocking), *self._plugged.tools]:
            self.add_tool(own_tool)

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
        """Answer an action without any tool call. The default answers that it needs one."""
        raise StructuralParseError(f"no tool call found; call one of: {self._tools.names}")

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
        live_episode = self._live()
        live_episode.cut_off = truncated and (live_episode.cut_off or not live_episode.finished)
        live_episode.finished = True

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
        self._tools.add(tool)

    # --- the contract

    @property
    def schemas(self) -> list[Mapping[str, Json]]:
        """The function schema (name, description, parameters) of every tool."""
        return self._tools.schemas

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
        # The commonest slip of a subclass. Without this line its first symptom is an AttributeError on a private name.
        if not hasattr(self, "_tools"):
            raise UsageError(f"{type(self).__name__}.__init__ must call super().__init__()")
        await self._end_episode()
        await super().areset(seed=seed)
        self._seed = seed
        self.task = self.make_task(dict(options or {}))
        # Busy from the start, and cleared only at the end: a reset that failed or was cancelled between these lines
        # leaves an environment that asks for another reset, not one that plays on with half a `setup`.
        new_episode = self._episode = _Episode(Meter(self.limits), FaultCount(self.parse_policy), busy=True)
        new_past = self._begin_record(seed, options)
        # Before `setup`, not after it: one that fails at its second resource has opened the first.
        self._needs_teardown = True
        await self._hook(self.setup, self.task)
        for served_tool in await self._plugged.open():
            self.add_tool(served_tool)
            self._served.append(served_tool.name)
        opening_messages = _messages(await self._hook(self.prompt, self.task), f"{type(self).__name__}.prompt")
        template_lacks_tools = bool(self._tools) and not self.tool_schemas()
        system_parts = [self.system or "", self._format.instructions(self.schemas) if template_lacks_tools else ""]
        if any(system_parts):
            opening_messages = (
                Message(role="system", content="\n\n".join(filter(None, system_parts))),
                *opening_messages,
            )
        new_past.began(opening_messages)
        new_episode.busy = False
        # What `setup` and `prompt` noted belongs to the reset. A fresh dict, because the observer now holds the old
        # one.
        reset_info, new_episode.info = new_episode.info, {}
        return opening_messages, reset_info

    async def astep(self, action: str) -> StepResult:
        live_episode = self._episode
        if live_episode is None or live_episode.over or live_episode.busy:
            raise ResetNeeded(f"{type(self).__name__}: call reset before step, and after the end of an episode")
        if not isinstance(action, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"action is a {type(action).__name__}, not text")
        # A cancelled step never comes to the line that clears `busy`. That is meant: its tools may have run half-way,
        # so the state is one that no replay of the recorded actions leads to, and the next step must be refused.
        live_episode.busy, live_episode.reward, live_episode.info = True, 0.0, {}
        with live_episode.meter.step():
            turn_answer = await self._play_turn(live_episode, action)
        self._record_action(action, turn_answer)
        return turn_answer

    async def _play_turn(self, episode: _Episode, action: str) -> StepResult:
        parsed_action = self._format.parse(action, self.schemas) if self._tools else None
        if parsed_action is not None and parsed_action.calls:
            tool_turn = ToolTurn(
                tools=self._tools,
                meter=episode.meter,
                is_over=lambda: episode.finished,
                max_calls=self.max_calls,
                timeout_s=self.tool_timeout_s,
                output_bytes=self.tool_output_bytes,
                max_images=getattr(self.observation_space, "max_images", 0),
                blocking=self.blocking,
                action_cut=self.action_cut,
            )
            call_results = await tool_turn.run(parsed_action.calls)
            observation = tool_messages(call_results, episode.calls)
            # Without schemas in the chat template the model was taught the calls in a system message, and such
            # templates need not know the role "tool": the format writes the results as it taught them.
            if not self.tool_schemas():
                observation = self._format.answer(observation)
            fault_kinds: set[Fault] = {
                call_result.fault for call_result in call_results if call_result.fault is not None
            }
            if tool_errors := errors_by_tool(call_results):
                episode.info["tool_errors"] = tool_errors  # `agentrl health` knows a broken tool by it
        else:
            call_results = []
            observation, fault_kinds = await self._answer_text(action)
        episode.calls += len(call_results)
        # Awaited apart: the hook may call self.reward.
        earned_reward = await self._hook(self.after_turn, tuple(call_results))
        episode.reward += float(earned_reward or 0.0)
        episode.reward = episode.faults.charge(fault_kinds, episode.reward, episode.info)
        episode.meter.turns += 1
        # The order is a ranking. An author's `finish` wins over any limit reached in the same turn: the task was solved
        # with the last turn that was allowed, and calling that a truncation would bootstrap a value for a state with no
        # future.
        stop_reason = StopReason.PARSE_FAILURE if episode.faults.exhausted else episode.meter.exceeded()
        if episode.finished:
            stop_reason = StopReason.TRUNCATED if episode.cut_off else StopReason.DONE
        terminated = stop_reason in (StopReason.DONE, StopReason.PARSE_FAILURE)
        truncated = stop_reason is not None and not terminated
        if stop_reason is not None:
            episode.info.update(await self.aend(stop_reason))
        episode.busy = False
        return observation, episode.reward, terminated, truncated, episode.info

    async def aend(self, reason: StopReason) -> Info:
        """End the running episode: the info with `outcome`, `success` and `stop_reason`. It is graded once."""
        live_episode = self._live()
        if live_episode.over:
            return {}
        # Before the grade is awaited: a driver that loses patience with a slow grade and ends the episode for that
        # reason must not have it graded a second time, by tests that the first run may still be using.
        live_episode.over = True
        end_info: Info = {"stop_reason": reason.value}
        final_grade = await self._hook(self.grade)
        if final_grade is None:
            return end_info
        if not isinstance(final_grade, Grade):
            try:
                final_grade = Grade(outcome=float(final_grade), success=float(final_grade) >= 1.0)
            except (TypeError, ValueError):
                correction = "give a number, a truth value, a Grade or None"
                raise UsageError(f"{type(self).__name__}.grade returned {final_grade!r}: {correction}") from None
        return {
            **end_info,
            **final_grade.info,
            "outcome": float(final_grade.outcome),
            "success": bool(final_grade.success),
        }

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
        # First of all: whatever fails below, no later step may reach the closed resources through the old episode.
        self._episode = None
        if self._needs_teardown:
            # Cleared before the work, so that a teardown that raises is not run again at the next reset. Its tools go
            # too: they speak to servers inside the box that is about to be closed.
            self._needs_teardown = False
            while self._served:
                self._tools.remove(self._served.pop())
            # Most closings happen because the episode was cancelled, and in a cancelled scope the first await would end
            # them. Shielded needs its own deadline: a `teardown` that hangs would otherwise hold the whole worker.
            with trio.move_on_after(CLOSE_DEADLINE_S, shield=True):
                try:
                    await self._plugged.aclose()
                finally:
                    await self._hook(self.teardown)

    async def _answer_text(self, text: str) -> tuple[Messages, set[Fault]]:
        try:
            hook_answer = await self._hook(self.on_text, text)
            return () if hook_answer is None else _messages(hook_answer, f"{type(self).__name__}.on_text"), set()
        except PolicyFault as policy_fault:
            fault_kind: Fault = "structural" if isinstance(policy_fault, StructuralParseError) else "content"
            return _messages(describe_fault(with_cut(policy_fault, self.action_cut)), "on_text"), {fault_kind}


def _messages(value: str | Sequence[Message], what: str) -> Messages:
    """A hook's answer as messages, copied: what the author keeps must not be what the observer holds."""
    if isinstance(value, str):
        return (Message(role="user", content=clean_text(value)),)
    messages: Any = value
    if not isinstance(messages, list | tuple) or not all(
        isinstance(list_entry, Mapping) for list_entry in cast("list[Any]", messages)
    ):
        raise UsageError(f"{what} returned {messages!r:.80}: give a text, or a list of messages")
    return tuple(cast(Message, dict(message)) for message in value)
