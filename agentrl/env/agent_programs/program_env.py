"""`ProgramEnv`: an agent program that knows only a model's HTTP API, as an environment.

The program runs against a server of ours. A request is an observation: what its messages add to the conversation so
far; the policy's action is the answer. The tokens that were sampled stay as they are: a program that rewrites history
makes a fork (`info["history"]`), never a retokenized prompt.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from numbers import Real
from typing import Any, Final, cast

import trio
from gymnasium.error import ResetNeeded

from agentrl import notices, registry
from agentrl.env import sync_async
from agentrl.env.agent_programs.branches import Branches
from agentrl.env.agent_programs.model_apis import reply_of
from agentrl.env.agent_programs.model_endpoint import body_bound
from agentrl.env.agent_programs.open_requests import OpenRequests, Pending
from agentrl.env.agent_programs.session import Ended, Exited, Program, Running
from agentrl.env.core import CLOSE_DEADLINE_S, Env, Info, ResetResult, StepResult
from agentrl.env.limits import positive_seconds
from agentrl.env.tool_env import Grade, MaybeAwaitable
from agentrl.env.tools.by_name import check_limits
from agentrl.env.tools.parsers import format_of, get_format
from agentrl.errors import ConfigError, EnvError, InfrastructureError, SandboxPathError, UsageError
from agentrl.host.clocks import policy_time
from agentrl.protocols import Limits, Sandbox, SandboxSpec
from agentrl.records import Json, Message, Messages, StopReason
from agentrl.sandbox import known_backend
from agentrl.sandbox.current_box import CurrentBox
from agentrl.sandbox.shared_backend import SharedBackend, shared

_SILENCE_S: Final = 300.0
_LIMITS: Final = Limits(cpu_s=600.0, cpus=2.0, memory_bytes=2 << 30, pids=256, open_files=1024, disk_bytes=1 << 30)

_SCORED = (
    "a client in a box left before a slow answer, and its program ended: it is scored, as the policy may have ended "
    "the client; give the client a longer deadline, or let it ask again"
)


class ProgramEnv(Env):
    """`agentrl/Program-v0`. An agent program that speaks to a model over HTTP. `program` is a function of a
    `Session`, its reference `module:function`, or a command (a list of texts); it finds the model by the session or
    by the usual variables (`OPENAI_BASE_URL`, …).

    It may speak OpenAI's chat completions or responses, or Anthropic's messages, streamed or whole. Sampling settings
    that it asks for are the run's business and have no effect, save stop texts. The outcome is what `grade` says; by
    default the number or truth value that the program returns. A program that raises once it was answered has the
    outcome 0, as the policy could have caused it; an InfrastructureError that it raises is no fault of the policy.
    Requests side by side are answered one after the other.

    The time between an answer and the next request is the policy's, whatever the program does in it. A run bounds it by
    `rollout.step_deadline_s`; one that asks nothing for `silence_s` is ended and the episode truncated (without it 300
    s, for those who play without a run).

    A client that gave up before its answer came and asks again gets that answer. If it does not ask again, nobody read
    the turn, and it is not trained (`info["masked"]`). A program that ends because an answer came too late has failed
    through our fault: EnvError.

    With `sandbox`, the id of a sandbox backend, a command runs in a box of its own, which reaches the model and nothing
    else; it begins with the files of `box_files`, and `grade` finds it as `self.box`. `image` is the backend's name of
    its root file system, `box` has fields of `agentrl.protocols.Limits`. The box needs `sh` and `python3`."""

    replayable = False
    policy_writes_prompts = True

    def __init__(
        self,
        program: str | Program | Sequence[str],
        *,
        tool_format: str | None = None,
        max_turns: int = 100,
        silence_s: float | None = None,
        replayable: bool = False,
        sandbox: str | None = None,
        image: str | None = None,
        box: Mapping[str, Any] | None = None,
    ) -> None:
        self._program = registry.load_reference(program) if isinstance(program, str) else program
        if not callable(self._program) and not self._program:
            raise UsageError("program is empty: give a function, its reference, or a command as a list of texts")
        if sandbox is None and (image is not None or box):
            raise ConfigError("sandbox", sandbox, "image and box are of a sandbox: name it, as bubblewrap")
        if sandbox is not None and callable(self._program):
            raise ConfigError("sandbox", sandbox, "a function runs in this process: give program as a list of texts")
        check_limits(box or {}, "box")
        self._sandbox = known_backend(sandbox) if sandbox is not None else None
        self._image, self._limits = image, replace(_LIMITS, **(box or {}))
        self._boxes: SharedBackend | None = None
        self.box = CurrentBox()
        if tool_format is not None:
            get_format(tool_format)
        self._max_turns = max_turns
        self._silence_s = _SILENCE_S if silence_s is None else positive_seconds("silence_s", silence_s)
        if silence_s is not None:
            self.needs_step_s, self.needs_step_by = silence_s, "silence_s"
        self.tool_format, self.replayable = tool_format, replayable
        self._running: Running | None = None
        self._pending: Pending | None = None
        self._branches = Branches()
        self._turns = self._unread = 0  # answers that the program has read, and those that it has not

    # --- hooks

    def make_task(self, options: Mapping[str, Json]) -> Mapping[str, Json]:
        """The task that the program gets: the reset options, and any choices that `self.np_random` makes."""
        return dict(options)

    def grade(self, task: Mapping[str, Json], result: Any) -> MaybeAwaitable[Grade | float | bool | None]:
        """The outcome, from the program's return value (an `Exited` for a command)."""
        if result is None or isinstance(result, Grade | Exited):
            return result if isinstance(result, Grade) else None
        plain_result = result.item() if getattr(result, "shape", None) == () and hasattr(result, "item") else result
        if isinstance(plain_result, Real | Decimal):  # numpy's and torch's numbers, too
            try:
                float_result = float(plain_result)
                return float_result if math.isfinite(float_result) else 0.0
            except (OverflowError, ValueError):  # beyond a float's range; a signaling NaN of Decimal
                return 0.0
        notice = f"a program returned a {type(result).__qualname__}, which is no number: it has earned nothing"
        notices.note("results of agent programs", notice, by_policy=True)
        return None

    def box_files(self, task: Mapping[str, Json]) -> Mapping[str, bytes]:
        """The files that the program finds in its box's work folder, by path."""
        return {}

    # --- the contract

    def tool_schemas(self) -> list[Mapping[str, Json]]:
        """The tools of the request that waits; a program names them with its first."""
        return [dict(tool_schema) for tool_schema in self._pending.conversation.tools] if self._pending else []

    async def areset(self, *, seed: int | None = None, options: Mapping[str, Json] | None = None) -> ResetResult:
        await self.aclose()
        await super().areset(seed=seed)
        self.task = self.make_task(dict(options or {}))
        self._turns = self._unread = 0
        self._branches = Branches()
        program_box = await self._new_box()
        program = cast("Program | Sequence[str]", self._program)
        running_program = Running(program, self.task, program_box, body_bytes=body_bound(self.observation_bytes))
        self._running = running_program
        await running_program.start()
        first_event = await self._next(running_program)
        if not isinstance(first_event, Pending):
            raise EnvError(f"the program ended before its first request: {_why(first_event)}")
        self._pending = first_event
        return _copied(first_event.conversation.messages), {}

    async def astep(self, action: str) -> StepResult:
        running, pending = self._running, self._pending
        if running is None or pending is None:
            raise ResetNeeded("ProgramEnv: call reset before step, and after the end of an episode")
        # Taken before the answer goes out: a step that is cancelled from here on leaves nothing to step on, since the
        # program may have read the answer and gone on.
        self._pending = None
        reply_id = f"{self._turns + self._unread + 1:04d}"
        reply = reply_of(format_of(self), action, pending.conversation, id=reply_id, is_cut=self.action_cut)
        running.answer(reply)
        self._branches.add(pending.conversation, reply)
        with trio.move_on_after(self._silence_s):  # the policy has no part in this wait: what it wrote is not read yet
            await running.asks_again()
        # Here the clock of the policy starts: the program has read the answer, and whatever it does now the policy's
        # words may have caused, an endless loop included (law 3).
        with policy_time():
            next_event = await self._next(running)
        is_unread = running.requests.is_unread
        self._turns, self._unread = self._turns + (not is_unread), self._unread + is_unread
        step_info: Info = {"masked": True} if is_unread else {}
        # Unread answers are counted apart, or a program behind a slow link would use up its turns with answers that
        # nobody saw. They are bounded all the same: a client that never waits long enough would otherwise ask for ever.
        if isinstance(next_event, Pending) and max(self._turns, self._unread) < self._max_turns:
            self._pending = next_event
            new_messages, branch_info = self._branches.following(next_event.conversation)
            return new_messages, 0.0, False, False, {**step_info, **branch_info}
        observation, reward, terminated, truncated, last_info = await self._end(next_event, running.requests)
        return observation, reward, terminated, truncated, {**step_info, **last_info}

    async def aclose(self) -> None:
        await self._stop()
        open_boxes, self._boxes = self._boxes, None
        if open_boxes is not None:
            try:
                await self.box.close()
            finally:
                await open_boxes.leave()

    # --- inside

    async def _new_box(self) -> Sandbox | None:
        if self._sandbox is None:
            return None
        box_spec = SandboxSpec(image=self._image, limits=self._limits, files=self.box_files(self.task))
        shared_boxes = shared(self._sandbox)
        await shared_boxes.enter()
        self._boxes = shared_boxes
        new_box = self.box.box = await shared_boxes.create(box_spec)
        return new_box

    async def _stop(self) -> None:
        """End the program; its box stays."""
        running_program, self._running, self._pending = self._running, None, None
        if running_program is not None:
            with trio.move_on_after(CLOSE_DEADLINE_S, shield=True):
                await running_program.stop()

    async def _next(self, running: Running) -> Pending | Ended | None:
        """The program's next request or its end; None if it was silent for too long."""
        with trio.move_on_after(self._silence_s):
            return await running.next()
        running.requests.end(trio.current_time())
        return None

    async def _end(self, event: Pending | Ended | None, requests: OpenRequests) -> StepResult:
        await self._stop()
        try:
            if isinstance(event, Ended) and (failure := _infrastructure(event.error)) is not None:
                raise failure
            # After `_stop` and before the grade: only when no client can ask again is it certain that an answer was
            # lost, and a program that ended for our slowness has done nothing that a grade could judge.
            lost_answer = requests.lost(failed=_failed(event))
            if lost_answer is not None and not lost_answer.is_ours:
                notices.note("answers to agent programs", _SCORED, by_policy=True)
            elif lost_answer is not None:
                wait_words = f"a client of the program left after {lost_answer.waited_s:.3g} s, before its answer"
                raise EnvError(f"{wait_words}, and did not ask again: {_why(event)}")
            return await self._ending(event)
        finally:
            await self.aclose()

    async def _ending(self, event: Pending | Ended | None) -> StepResult:
        if not isinstance(event, Ended):
            stop_reason = StopReason.TOOL_TIME_LIMIT if event is None else StopReason.TURN_LIMIT
            return (), 0.0, False, True, {"stop_reason": stop_reason.value, "outcome": 0.0, "success": False}
        if event.error is not None:  # it has read what the policy wrote: the policy could have caused it
            failure_info: Info = {"stop_reason": StopReason.DONE.value, "program_error": _why(event)[:500]}
            return (), 0.0, True, False, {**failure_info, "outcome": 0.0, "success": False}
        last_info: Info = {"stop_reason": StopReason.DONE.value}
        if isinstance(event.result, Exited):
            last_info["exit_code"] = event.result.exit_code
        try:
            grade = await sync_async.call(self.grade, self.task, event.result, blocking=self.blocking)
        # Other errors of the sandbox are failures of ours and are raised. A missing file is the result of the policy's
        # work.
        except SandboxPathError:  # a file that the policy left out, say
            grade = Grade(outcome=0.0, success=False)
        if grade is not None:
            if not isinstance(grade, Grade):
                grade = Grade(outcome=float(grade), success=float(grade) >= 1.0)
            last_info |= {**grade.info, "outcome": float(grade.outcome), "success": bool(grade.success)}
        return (), 0.0, True, False, last_info


def _copied(messages: Sequence[Message]) -> Messages:
    return tuple(cast(Message, json.loads(json.dumps(message))) for message in messages)


def _infrastructure(error: BaseException | None) -> InfrastructureError | None:
    """The failure of ours that a program raised, also one among the errors of its tasks."""
    if isinstance(error, BaseExceptionGroup):
        group_errors = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return next(filter(None, map(_infrastructure, group_errors)), None)
    return error if isinstance(error, InfrastructureError) else None


def _failed(event: Ended | Pending | None) -> bool:
    """Whether a program ended by an error."""
    if not isinstance(event, Ended):
        return False
    return event.error is not None or (isinstance(event.result, Exited) and event.result.exit_code != 0)


def _why(event: Ended | Pending | None) -> str:
    if isinstance(event, Pending):
        return "the most turns are played"
    if event is None:
        return "it made no request in time"
    program_error: BaseException | None = event.error
    while isinstance(program_error, BaseExceptionGroup):  # of a program's tasks
        program_error = cast("BaseExceptionGroup[BaseException]", program_error).exceptions[0]
    if program_error is not None:
        return f"{type(program_error).__name__}: {program_error}"
    if isinstance(event.result, Exited):
        last_line = event.result.stderr.decode(errors="backslashreplace").strip().splitlines()[-1:]
        return f"exit code {event.result.exit_code}: {''.join(last_line)}"
    return f"it returned {event.result!r}"
