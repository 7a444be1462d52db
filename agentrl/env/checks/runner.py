"""Plays an environment for `check_env`, and finds the place of a flaw. The checks are in `agentrl.env.checks.checks`.

Everything async runs in a thread that can be left behind: an environment that hangs is a finding, not a hang. Actions
are random, from a seeded generator: well-formed calls after the environment's schemas, and texts that are none.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import queue
import threading
import traceback
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import gymnasium
import numpy as np
import trio

from agentrl.env import step_results
from agentrl.env.core import as_async
from agentrl.env.spaces import Messages as MessagesSpace
from agentrl.env.spaces import Text
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import ToolFormat, format_of
from agentrl.env.tools.toolbox import Toolbox
from agentrl.env.tools.tools import function_schema
from agentrl.protocols import AsyncEnv
from agentrl.records import Json, Messages, StopReason

T = TypeVar("T")

_FRAMEWORK: Final = ("agentrl.env.", "gymnasium.", "builtins.", "typing.")
_HOOKS: Final = {"reset": ("prompt",), "step": ("on_text", "after_turn"), "end": ("grade",), "close": ("teardown",)}
_awaited: ContextVar[list[str]] = ContextVar("agentrl_check_awaited")  # the methods that a check waits for now


@dataclass(frozen=True, slots=True)
class Flaw:
    """A broken promise, how to fix it, and where to look: a method, the exception if there was one, and the action
    whose answer was wrong, if that is known."""

    problem: str
    hint: str
    method: str = "step"
    error: BaseException | None = None
    action: str = ""


class Skipped(Exception):
    """A check has nothing to look at; the text says why."""


class Broke(Exception):
    """The environment's own code raised, or took too long; `method` names where."""

    def __init__(self, method: str, cause: BaseException) -> None:
        self.method, self.cause = method, cause
        super().__init__(f"{method} raised {type(cause).__name__}: {' '.join(str(cause).split())}"[:400])


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The environment to check, and how long a check may take."""

    make: Callable[[], gymnasium.Env[Any, Any]]
    actions: tuple[str, ...]
    seed: int
    steps: int
    deadline_s: float
    tmp: Path

    @property
    def space(self) -> MessagesSpace:
        """The space of its observations: as many images as it declares, and messages of any other size."""
        fresh_env = self.make()
        try:
            return MessagesSpace(max_images=getattr(fresh_env.unwrapped.observation_space, "max_images", 0))
        finally:
            fresh_env.close()

    @property
    def replayable(self) -> bool:
        """Whether the environment promises replay."""
        fresh_env = self.make()
        try:
            return bool(getattr(fresh_env.unwrapped, "replayable", False))
        finally:
            fresh_env.close()


@dataclass(slots=True)
class Played:
    """One episode as its driver saw it."""

    start: Messages = ()
    info: Mapping[str, Json] = field(default_factory=dict[str, Json])
    steps: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    actions: list[str] = field(default_factory=list[str])
    end: Mapping[str, Json] = field(default_factory=dict[str, Json])


class Player:
    """Plays one episode and records it."""

    def __init__(self, subject: Subject, env: AsyncEnv, seed: int) -> None:
        self._subject, self._env, self._seed = subject, env, seed
        self._rng = np.random.default_rng(seed)
        self._form = format_of(env)
        self.played = Played()

    async def start(self) -> None:
        reset_answer: Any = await named("reset", self._env.areset(seed=self._seed))
        with naming("reset"):
            self.played.start, reset_info = step_results.of_reset(reset_answer, "reset")
        self.played.info = _copied(reset_info)

    async def step(self, action: str | None = None) -> bool:
        """Play one turn. Returns whether the episode is over."""
        if action is None:
            fixed_actions, turn_index = self._subject.actions, len(self.played.steps)
            # An environment that teaches its tools in a system message offers no schemas to the chat template, but has
            # them.
            tool_schemas = getattr(self._env, "schemas", None) or self._env.tool_schemas()
            action = (
                fixed_actions[turn_index % len(fixed_actions)]
                if fixed_actions
                else sample_action(tool_schemas, self._form, self._rng)
            )
        step_answer: Any = await named("step", self._env.astep(action))
        with naming("step"):
            observation, step_reward, terminated, truncated, step_info = step_results.of_step(step_answer, "step")
        self.played.actions.append(action)
        self.played.steps.append((observation, step_reward, terminated, truncated, _copied(step_info)))
        return bool(terminated or truncated)

    async def end(self) -> None:
        """End the episode as a limit of the run does, if it goes on."""
        if not any(played_step[2] or played_step[3] for played_step in self.played.steps):
            self.played.end = _copied(await named("aend", self._env.aend(StopReason.TURN_LIMIT)))

    async def play(self, actions: Sequence[str] = (), *, steps: int = 0, yields: bool = False) -> Played:
        """Play a whole episode: these actions, or up to `steps` of its own; `yields` lets others run in between."""
        await self.start()
        for turn_index in range(len(actions) or steps or self._subject.steps):
            if yields:
                await trio.lowlevel.checkpoint()
            if await self.step(actions[turn_index] if actions else None):
                break
        return self.played


async def life(
    subject: Subject,
    seed: int,
    *,
    actions: Sequence[str] = (),
    steps: int = 0,
    yields: bool = False,
    ends: bool = False,
) -> Played:
    """A fresh instance plays an episode and is closed; `ends` lets a limit of the run end it before."""
    fresh_env = as_async(subject.make())
    try:
        player = Player(subject, fresh_env, seed)
        recorded_play = await player.play(actions, steps=steps, yields=yields)
        if ends:
            await player.end()
        return recorded_play
    finally:
        with trio.CancelScope(shield=True):
            await named("aclose", fresh_env.aclose())


async def second_life(subject: Subject, actions: Sequence[str]) -> Played:
    """Play the first seed on an instance that has played another seed before."""
    reused_env = as_async(subject.make())
    try:
        # An instance that has played before must deal the same episode as a fresh one. The usual slip is state that
        # `reset` does not clear; another seed first makes it show.
        await Player(subject, reused_env, subject.seed + 17).play()
        return await Player(subject, reused_env, subject.seed).play(actions)
    finally:
        await named("aclose", reused_env.aclose())


async def named(method: str, awaitable: Awaitable[T]) -> T:
    """Await a call into the environment; its exception becomes `Broke` with the method's name."""
    awaited_methods = _awaited.get([])
    awaited_methods.append(method)
    try:
        with naming(method):
            return await awaitable
    finally:
        awaited_methods.remove(method)


@contextlib.contextmanager
def naming(method: str) -> Generator[None]:
    try:
        yield
    except Exception as method_error:
        raise Broke(method, method_error) from method_error


def in_trio(subject: Subject, function: Callable[[], Awaitable[T]], *, plays: int = 1) -> T:
    """Run it in a trio loop of its own, in a thread that is left behind if it does not come back in the time that so
    many plays may take."""
    thread_results: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
    awaited_methods: list[str] = []
    time_limit_s = plays * subject.deadline_s

    async def main() -> T:
        _awaited.set(awaited_methods)
        return await function()

    def body() -> None:
        try:
            thread_results.put((trio.run(main), None))
        except BaseException as raised_error:
            thread_results.put((None, single(raised_error)))

    # No task of a loop can be left behind: code that blocks holds its loop for ever. A daemon thread ends with the
    # process.
    runner_thread = threading.Thread(target=body, name="check_env", daemon=True)
    runner_thread.start()
    try:
        returned_value, thread_error = thread_results.get(timeout=time_limit_s)
    except queue.Empty:
        method_name = awaited_methods[-1] if awaited_methods else "step"
        raise Broke(method_name, TimeoutError(f"no answer within {time_limit_s:g} s")) from None
    runner_thread.join()
    if thread_error is not None:
        raise thread_error
    return cast(T, returned_value)


def place_of(make: Callable[[], gymnasium.Env[Any, Any]], flaw: Flaw) -> str:
    """`file:line` of the frame that raised within the environment's own code, else of the tool that was called, else of
    the method or a hook that it calls, else of the class."""
    try:
        checked_env = make()
    except Exception as make_error:
        if not inspect.isclass(make):
            return _last_frame(make_error, None)
        return _last_frame(make_error, _file_of(make)) or f"{_file_of(make)}:{_line_of(make)}"
    unwrapped_env: Any = checked_env.unwrapped
    checked_env.close()
    own_classes = [
        env_class for env_class in type(unwrapped_env).__mro__ if not f"{env_class.__module__}.".startswith(_FRAMEWORK)
    ]
    own_classes = own_classes or [type(unwrapped_env)]
    for env_class in own_classes:
        if flaw.error is not None and (frame_place := _last_frame(flaw.error, _file_of(env_class))):
            return frame_place
    for function in (*_tools_called(unwrapped_env, flaw.action), *_written(own_classes, flaw.method.removeprefix("a"))):
        if (function_code := getattr(inspect.unwrap(function), "__code__", None)) is not None:
            return f"{function_code.co_filename}:{function_code.co_firstlineno}"
    return f"{_file_of(own_classes[0])}:{_line_of(own_classes[0])}"


def _tools_called(env: Any, action: str) -> Iterator[Callable[..., Any]]:
    """The functions behind the calls of an action, in order."""
    env_toolbox = getattr(env, "_tools", None)
    if not isinstance(env_toolbox, Toolbox) or not env_toolbox or not action:
        return
    for tool_call in format_of(env).parse(action).calls:
        if (called_tool := env_toolbox.get(tool_call.name)) is not None:
            yield getattr(called_tool, "_function", None) or called_tool.call


def _written(own: Sequence[type], name: str) -> Iterator[Callable[..., Any]]:
    """Yield an author's own functions for a method, and for the hooks that it calls."""
    for method_name in (name, *_HOOKS.get(name, ())):
        for own_class in own:
            function = vars(own_class).get(f"a{method_name}", vars(own_class).get(method_name))
            if inspect.isfunction(function):
                yield function


def _file_of(cls: type) -> str:
    try:
        return inspect.getfile(cls)
    except (OSError, TypeError):  # defined in an interactive session
        return cls.__module__


def _line_of(cls: type) -> int:
    try:
        return inspect.getsourcelines(cls)[1]
    except (OSError, TypeError):
        return 1


def _last_frame(error: BaseException, source: str | None) -> str:
    error_frames = traceback.extract_tb(error.__traceback__)
    source_frames = [error_frame for error_frame in error_frames if source is None or error_frame.filename == source]
    return f"{source_frames[-1].filename}:{source_frames[-1].lineno}" if source_frames else ""


def single(error: BaseException) -> BaseException:
    """The one exception in a group of one, which a nursery wraps around it."""
    inner_errors = cast("tuple[BaseException, ...]", getattr(error, "exceptions", ()))
    return single(inner_errors[0]) if len(inner_errors) == 1 else error


def _copied(info: Mapping[str, Json]) -> Mapping[str, Json]:
    """A copy that later changes by the environment do not reach; what JSON cannot carry stays, for a check to
    report."""
    try:
        copied_info = json.loads(json.dumps(info))
    except (TypeError, ValueError):
        return info
    return copied_info if copied_info == info else info


_MAX_DEPTH: Final = 6
_WORDS: Final = ("", "a", "one two", "x" * 80, "0", "../up", "naïve ✓", "line\nbreak", '"quoted"', "</tool_call>")


def sample_action(schemas: Sequence[Mapping[str, Json]], form: ToolFormat, rng: np.random.Generator) -> str:
    """Draw an action: mostly one or two well-formed calls with some text before them; at times only text."""
    if not schemas or rng.random() < 0.15:
        return Text(seed=rng).sample()
    call_count = 1 + int(rng.random() < 0.2)
    sampled_calls = [sample_call(schemas[int(rng.integers(len(schemas)))], rng) for _ in range(call_count)]
    # A llama speaks or calls.
    leading_text = "" if form.name in ("llama", "pythonic") else _pick(_WORDS[:4], rng) + "\n"
    return leading_text + form.write(*(form.spelled(sampled_call, schemas) for sampled_call in sampled_calls))


def sample_call(schema: Mapping[str, Json], rng: np.random.Generator) -> ToolCall:
    """A call whose arguments fit the schema, as far as the common keywords of JSON schema go."""
    function = function_schema(schema)
    parameters = cast("Mapping[str, Json]", function.get("parameters") or {})
    arguments = sample_value({"type": "object", **parameters}, rng, root=parameters)
    return ToolCall(str(function["name"]), cast("dict[str, Json]", arguments))


def sample_value(
    schema: Mapping[str, Json], rng: np.random.Generator, *, root: Mapping[str, Json], depth: int = _MAX_DEPTH
) -> Json:
    """A value that fits `schema`; references are looked up in `root`."""
    if "$ref" in schema:
        schema = _resolve(str(schema["$ref"]), root)
    if "const" in schema:
        return schema["const"]
    for schema_keyword in ("enum", "examples"):
        if schema.get(schema_keyword):
            return _pick(schema[schema_keyword], rng)
    for schema_keyword in ("anyOf", "oneOf", "allOf"):
        if schema.get(schema_keyword):
            return sample_value(_pick(schema[schema_keyword], rng), rng, root=root, depth=depth - 1)
    value_type: Any = schema.get("type", "string")
    value_type = _pick(value_type, rng) if isinstance(value_type, list) else value_type
    if value_type == "object":
        return _sample_object(schema, rng, root, depth)
    if value_type == "array":
        least_items = int(schema.get("minItems", 0))
        item_count = (
            least_items
            if depth <= 0
            else int(rng.integers(least_items, max(least_items, min(int(schema.get("maxItems", 3)), 3)) + 1))
        )
        item_schema = cast("Mapping[str, Json]", schema.get("items") or {})
        return [sample_value(item_schema, rng, root=root, depth=depth - 1) for _ in range(item_count)]
    return _sample_scalar(str(value_type), schema, rng)


def _sample_object(schema: Mapping[str, Json], rng: np.random.Generator, root: Mapping[str, Json], depth: int) -> Json:
    properties = cast("Mapping[str, Mapping[str, Json]]", schema.get("properties") or {})
    required = set(cast("list[str]", schema.get("required") or []))
    chosen_names = [
        property_name for property_name in properties if property_name in required or (depth > 0 and rng.random() < 0.5)
    ]
    return {
        property_name: sample_value(properties[property_name], rng, root=root, depth=depth - 1)
        for property_name in chosen_names
    }


def _sample_scalar(kind: str, schema: Mapping[str, Json], rng: np.random.Generator) -> Json:
    if kind == "integer":
        minimum, maximum = int(schema.get("minimum", -3)), schema.get("maximum")
        return int(rng.integers(minimum, max(minimum, int(maximum) if maximum is not None else minimum + 103) + 1))
    if kind == "number":
        minimum, maximum = float(schema.get("minimum", -1.0)), schema.get("maximum")
        return minimum + (float(maximum) - minimum if maximum is not None else 10.0) * float(rng.random())
    if kind == "boolean":
        return bool(rng.random() < 0.5)
    if kind == "null":
        return None
    sampled_text: str = _pick(_WORDS, rng)
    min_length, max_length = int(schema.get("minLength", 0)), schema.get("maxLength")
    sampled_text = sampled_text.ljust(min_length, "x")
    return sampled_text if max_length is None else sampled_text[: int(max_length)]


def _resolve(reference: str, root: Mapping[str, Json]) -> Mapping[str, Json]:
    schema_node: Any = root
    for reference_part in reference.removeprefix("#/").split("/"):
        schema_node = schema_node[reference_part]
    return schema_node


def _pick(options: Any, rng: np.random.Generator) -> Any:
    return options[int(rng.integers(len(options)))]
