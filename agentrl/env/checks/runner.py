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
        env = self.make()
        try:
            return MessagesSpace(max_images=getattr(env.unwrapped.observation_space, "max_images", 0))
        finally:
            env.close()

    @property
    def replayable(self) -> bool:
        """Whether the environment promises replay."""
        env = self.make()
        try:
            return bool(getattr(env.unwrapped, "replayable", False))
        finally:
            env.close()


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
        answer: Any = await named("reset", self._env.areset(seed=self._seed))
        with naming("reset"):
            self.played.start, info = step_results.of_reset(answer, "reset")
        self.played.info = _copied(info)

    async def step(self, action: str | None = None) -> bool:
        """Play one turn. Returns whether the episode is over."""
        if action is None:
            actions, index = self._subject.actions, len(self.played.steps)
            # An environment that teaches its tools in a system message offers no schemas to the chat template, but has
            # them.
            schemas = getattr(self._env, "schemas", None) or self._env.tool_schemas()
            action = actions[index % len(actions)] if actions else sample_action(schemas, self._form, self._rng)
        answer: Any = await named("step", self._env.astep(action))
        with naming("step"):
            observation, reward, terminated, truncated, info = step_results.of_step(answer, "step")
        self.played.actions.append(action)
        self.played.steps.append((observation, reward, terminated, truncated, _copied(info)))
        return bool(terminated or truncated)

    async def end(self) -> None:
        """End the episode as a limit of the run does, if it goes on."""
        if not any(step[2] or step[3] for step in self.played.steps):
            self.played.end = _copied(await named("aend", self._env.aend(StopReason.TURN_LIMIT)))

    async def play(self, actions: Sequence[str] = (), *, steps: int = 0, yields: bool = False) -> Played:
        """Play a whole episode: these actions, or up to `steps` of its own; `yields` lets others run in between."""
        await self.start()
        for index in range(len(actions) or steps or self._subject.steps):
            if yields:
                await trio.lowlevel.checkpoint()
            if await self.step(actions[index] if actions else None):
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
    env = as_async(subject.make())
    try:
        player = Player(subject, env, seed)
        played = await player.play(actions, steps=steps, yields=yields)
        if ends:
            await player.end()
        return played
    finally:
        with trio.CancelScope(shield=True):
            await named("aclose", env.aclose())


async def second_life(subject: Subject, actions: Sequence[str]) -> Played:
    """Play the first seed on an instance that has played another seed before."""
    env = as_async(subject.make())
    try:
        # An instance that has played before must deal the same episode as a fresh one. The usual slip is state that
        # `reset` does not clear; another seed first makes it show.
        await Player(subject, env, subject.seed + 17).play()
        return await Player(subject, env, subject.seed).play(actions)
    finally:
        await named("aclose", env.aclose())


async def named(method: str, awaitable: Awaitable[T]) -> T:
    """Await a call into the environment; its exception becomes `Broke` with the method's name."""
    awaited = _awaited.get([])
    awaited.append(method)
    try:
        with naming(method):
            return await awaitable
    finally:
        awaited.remove(method)


@contextlib.contextmanager
def naming(method: str) -> Generator[None]:
    try:
        yield
    except Exception as error:
        raise Broke(method, error) from error


def in_trio(subject: Subject, function: Callable[[], Awaitable[T]], *, plays: int = 1) -> T:
    """Run it in a trio loop of its own, in a thread that is left behind if it does not come back in the time that so
    many plays may take."""
    came: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
    awaited: list[str] = []
    limit_s = plays * subject.deadline_s

    async def main() -> T:
        _awaited.set(awaited)
        return await function()

    def body() -> None:
        try:
            came.put((trio.run(main), None))
        except BaseException as error:
            came.put((None, single(error)))

    # No task of a loop can be left behind: code that blocks holds its loop for ever. A daemon thread ends with the
    # process.
    thread = threading.Thread(target=body, name="check_env", daemon=True)
    thread.start()
    try:
        result, error = came.get(timeout=limit_s)
    except queue.Empty:
        method = awaited[-1] if awaited else "step"
        raise Broke(method, TimeoutError(f"no answer within {limit_s:g} s")) from None
    thread.join()
    if error is not None:
        raise error
    return cast(T, result)


def place_of(make: Callable[[], gymnasium.Env[Any, Any]], flaw: Flaw) -> str:
    """`file:line` of the frame that raised within the environment's own code, else of the tool that was called, else of
    the method or a hook that it calls, else of the class."""
    try:
        env = make()
    except Exception as error:
        if not inspect.isclass(make):
            return _last_frame(error, None)
        return _last_frame(error, _file_of(make)) or f"{_file_of(make)}:{_line_of(make)}"
    inner: Any = env.unwrapped
    env.close()
    own_classes = [base for base in type(inner).__mro__ if not f"{base.__module__}.".startswith(_FRAMEWORK)]
    own_classes = own_classes or [type(inner)]
    for base in own_classes:
        if flaw.error is not None and (place := _last_frame(flaw.error, _file_of(base))):
            return place
    for function in (*_tools_called(inner, flaw.action), *_written(own_classes, flaw.method.removeprefix("a"))):
        if (code := getattr(inspect.unwrap(function), "__code__", None)) is not None:
            return f"{code.co_filename}:{code.co_firstlineno}"
    return f"{_file_of(own_classes[0])}:{_line_of(own_classes[0])}"


def _tools_called(env: Any, action: str) -> Iterator[Callable[..., Any]]:
    """The functions behind the calls of an action, in order."""
    tools = getattr(env, "_tools", None)
    if not isinstance(tools, Toolbox) or not tools or not action:
        return
    for call in format_of(env).parse(action).calls:
        if (tool := tools.get(call.name)) is not None:
            yield getattr(tool, "_function", None) or tool.call


def _written(own: Sequence[type], name: str) -> Iterator[Callable[..., Any]]:
    """Yield an author's own functions for a method, and for the hooks that it calls."""
    for each in (name, *_HOOKS.get(name, ())):
        for base in own:
            function = vars(base).get(f"a{each}", vars(base).get(each))
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
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if source is None or frame.filename == source]
    return f"{inside[-1].filename}:{inside[-1].lineno}" if inside else ""


def single(error: BaseException) -> BaseException:
    """The one exception in a group of one, which a nursery wraps around it."""
    inner = cast("tuple[BaseException, ...]", getattr(error, "exceptions", ()))
    return single(inner[0]) if len(inner) == 1 else error


def _copied(info: Mapping[str, Json]) -> Mapping[str, Json]:
    """A copy that later changes by the environment do not reach; what JSON cannot carry stays, for a check to
    report."""
    try:
        copied = json.loads(json.dumps(info))
    except (TypeError, ValueError):
        return info
    return copied if copied == info else info


_MAX_DEPTH: Final = 6
_WORDS: Final = ("", "a", "one two", "x" * 80, "0", "../up", "naïve ✓", "line\nbreak", '"quoted"', "</tool_call>")


def sample_action(schemas: Sequence[Mapping[str, Json]], form: ToolFormat, rng: np.random.Generator) -> str:
    """Draw an action: mostly one or two well-formed calls with some text before them; at times only text."""
    if not schemas or rng.random() < 0.15:
        return Text(seed=rng).sample()
    count = 1 + int(rng.random() < 0.2)
    calls = [sample_call(schemas[int(rng.integers(len(schemas)))], rng) for _ in range(count)]
    before = "" if form.name in ("llama", "pythonic") else _pick(_WORDS[:4], rng) + "\n"  # a llama speaks or calls
    return before + form.write(*(form.spelled(call, schemas) for call in calls))


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
    for key in ("enum", "examples"):
        if schema.get(key):
            return _pick(schema[key], rng)
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return sample_value(_pick(schema[key], rng), rng, root=root, depth=depth - 1)
    kind: Any = schema.get("type", "string")
    kind = _pick(kind, rng) if isinstance(kind, list) else kind
    if kind == "object":
        return _sample_object(schema, rng, root, depth)
    if kind == "array":
        least = int(schema.get("minItems", 0))
        count = (
            least if depth <= 0 else int(rng.integers(least, max(least, min(int(schema.get("maxItems", 3)), 3)) + 1))
        )
        items = cast("Mapping[str, Json]", schema.get("items") or {})
        return [sample_value(items, rng, root=root, depth=depth - 1) for _ in range(count)]
    return _sample_scalar(str(kind), schema, rng)


def _sample_object(schema: Mapping[str, Json], rng: np.random.Generator, root: Mapping[str, Json], depth: int) -> Json:
    properties = cast("Mapping[str, Mapping[str, Json]]", schema.get("properties") or {})
    required = set(cast("list[str]", schema.get("required") or []))
    chosen = [name for name in properties if name in required or (depth > 0 and rng.random() < 0.5)]
    return {name: sample_value(properties[name], rng, root=root, depth=depth - 1) for name in chosen}


def _sample_scalar(kind: str, schema: Mapping[str, Json], rng: np.random.Generator) -> Json:
    if kind == "integer":
        low, high = int(schema.get("minimum", -3)), schema.get("maximum")
        return int(rng.integers(low, max(low, int(high) if high is not None else low + 103) + 1))
    if kind == "number":
        low, high = float(schema.get("minimum", -1.0)), schema.get("maximum")
        return low + (float(high) - low if high is not None else 10.0) * float(rng.random())
    if kind == "boolean":
        return bool(rng.random() < 0.5)
    if kind == "null":
        return None
    text: str = _pick(_WORDS, rng)
    least, most = int(schema.get("minLength", 0)), schema.get("maxLength")
    text = text.ljust(least, "x")
    return text if most is None else text[: int(most)]


def _resolve(reference: str, root: Mapping[str, Json]) -> Mapping[str, Json]:
    node: Any = root
    for part in reference.removeprefix("#/").split("/"):
        node = node[part]
    return node


def _pick(options: Any, rng: np.random.Generator) -> Any:
    return options[int(rng.integers(len(options)))]
