"""Tools by name: turns the list `tools` of a run file into the tools of an episode.

    kwargs = { tools = ["calculator", "my_package.words:look_up", { id = "fetch", allow = ["docs.python.org"] }] }

A name is an id of the entry-point group `agentrl.tools`, or a reference. It stands for a function with type hints and
a docstring, for a tool, for a class that makes one, or for a class that makes a *server*: `open()` gives its tools when
an episode begins, `aclose()` ends it. Classes are called with the other keys of their table; one that needs a `sandbox`
gets the box of the episode, and so does one that can do without if its table says `sandbox = true`. The model reads the
name that the tool has, or the `name` of its table.

Owns that box and the servers from `open` to `aclose`. Knows nothing of episodes, prompts or models.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import fields
from typing import Any, Protocol, cast

import trio

from agentrl import registry
from agentrl.env.tools.tools import FunctionTool, function_schema
from agentrl.errors import ConfigError, SandboxError, SandboxPathError, UsageError
from agentrl.host.platform_checks import default_sandbox
from agentrl.protocols import Limits, Sandbox, SandboxSpec, Tool
from agentrl.records import Json
from agentrl.sandbox import known_backend
from agentrl.sandbox.current_box import CurrentBox
from agentrl.sandbox.shared_backend import SharedBackend, shared

Named = Tool | Callable[..., Any] | str | Mapping[str, Any]
"""A tool, a function, the name of either, or a table with a name (`id`) and settings."""


class ToolServer(Protocol):
    """Something whose tools are known once it runs, such as an MCP server or an executor elsewhere; one an episode."""

    async def open(self) -> Sequence[Tool]:
        """Start: its tools. Raises InfrastructureError if it does not."""
        ...

    async def aclose(self) -> None:
        """Stop it and everything it started, even if `open` failed half-way. Idempotent."""
        ...


class Plugged:
    """The named tools, with the box and the servers that they need while an episode lasts."""

    def __init__(
        self,
        named: Sequence[Named],
        *,
        box: Mapping[str, Any] | None = None,
        own: Sandbox | None = None,
        boxed: bool = False,
    ) -> None:
        """`box` describes the episode's box: `sandbox` (a backend's id), `image`, `ready` (boxes made ahead) and
        fields of `Limits`. With `own`, a box that the environment opens itself, none is opened here. `boxed` opens
        a box even if no tool asks for one.

        Raises UnknownIdError, UsageError for a value that is not a tool, ConfigError for settings that do not fit."""
        self._backend, self._ready, self._spec = _box(box or {})
        self._box = CurrentBox()
        self._own = own
        self._needs_box = boxed
        self._boxes: SharedBackend | None = None
        self._servers: list[Callable[[], ToolServer]] = []
        self._opened: list[ToolServer] = []
        self.tools: list[Tool] = []
        if isinstance(named, str | Mapping):
            raise ConfigError("tools", named, "give a list of tools")
        for named_tool in named:
            if isinstance(named_tool, str):
                self._resolve({"id": named_tool})
            elif isinstance(named_tool, Mapping):
                self._resolve(cast("Mapping[str, Any]", named_tool))
            else:
                self.tools.append(_tool(named_tool))

    @property
    def box(self) -> Sandbox:
        """The box of the running episode; its methods raise SandboxError while there is none."""
        return self._own or self._box

    @property
    def current(self) -> CurrentBox | None:
        """The box of the episode if it has one that records its calls, else None."""
        if self._own is not None:
            return self._own if isinstance(self._own, CurrentBox) else None
        return self._box if self._needs_box else None

    @asynccontextmanager
    async def fresh(self, carry: Sequence[str]) -> AsyncGenerator[Sandbox]:
        """Another box of the same kind, closed at the end of the block, with the files `carry` of the episode's box. A
        file that is not there, or that cannot be read as one, is not carried. Raises SandboxError."""
        if self._boxes is None:
            raise SandboxError("no episode has a box now")
        fresh_box = await self._boxes.create(self._spec)
        try:
            for carried_path in carry:
                # What the policy did not write, or wrote as a folder, is missing in the fresh box too, and the grader's
                # own test says so. Raised here it would be a failure of ours for a fault of the policy's (law 3).
                with suppress(SandboxPathError):
                    await fresh_box.write(carried_path, await self._box.read(carried_path))
            yield fresh_box
        finally:
            # A grader that ran out of time is cancelled in here, and the box of a cancelled grader must go too (law 4).
            with trio.CancelScope(shield=True):
                await fresh_box.close()

    async def open(self) -> list[Tool]:
        """Begin an episode: the tools that its servers offer. `aclose` is due after it, also if it fails."""
        if self._needs_box and self._own is None:
            shared_boxes = shared(self._backend, ready=self._ready)
            await shared_boxes.enter()
            self._boxes = shared_boxes
            self._box.box = await shared_boxes.create(self._spec)
        offered_tools: list[Tool] = []
        for make_server in self._servers:
            tool_server = make_server()
            self._opened.append(tool_server)
            offered_tools.extend(await tool_server.open())
        return offered_tools

    async def aclose(self) -> None:
        """End the episode's sessions and servers, then its box. Idempotent."""
        opened_servers, self._opened = self._opened, []
        shared_boxes, self._boxes = self._boxes, None
        async with AsyncExitStack() as last_first:
            if shared_boxes is not None:
                # A stack, because each close may fail and the rest must be closed all the same. The servers go first,
                # as they speak to processes in the box; then the box; then its backend, which removes what is left.
                last_first.push_async_callback(shared_boxes.leave)
            last_first.push_async_callback(self._box.close)
            for tool_or_server in [*self.tools, *opened_servers]:
                if (close_it := getattr(tool_or_server, "aclose", None)) is not None:
                    last_first.push_async_callback(close_it)

    def _resolve(self, table: Mapping[str, Any]) -> None:
        settings = dict(table)
        tool_id = settings.pop("id", None)
        if not isinstance(tool_id, str):
            raise ConfigError("tools", dict(table), "give the id of a tool, or a table with one: { id = ... }")
        tool_target = registry.resolve("tools", tool_id)
        own_name = inspect.isclass(tool_target) and "name" in inspect.signature(tool_target).parameters
        new_name = _name_of(tool_id, settings.pop("name")) if "name" in settings and not own_name else None
        if not inspect.isclass(tool_target):
            if settings:
                raise ConfigError(f"tools.{tool_id}", settings, "it is no class and takes no settings but a name")
            self.tools.append(_named(_tool(tool_target), new_name))
            return
        signature = inspect.signature(tool_target)
        wants_box = settings.pop("sandbox", False)
        parameter = signature.parameters.get("sandbox")
        # A tool that can do without a box gets none unless its table asks: a box costs a process and a file system for
        # each episode, and an unread default must not multiply that by the number of episodes.
        if parameter is not None and (wants_box is True or parameter.default is parameter.empty):
            self._needs_box = True
            settings["sandbox"] = self._own or self._box
        elif wants_box is not False:
            raise ConfigError(
                f"tools.{tool_id}.sandbox", wants_box, "give true to have it in the box, if it can be there"
            )
        try:
            signature.bind(**settings)
        except TypeError as bind_error:
            raise ConfigError(f"tools.{tool_id}", sorted(settings), str(bind_error)) from bind_error
        if hasattr(tool_target, "open"):
            if new_name is not None:
                raise ConfigError(f"tools.{tool_id}.name", new_name, "its tools name themselves: leave it out")
            self._servers.append(functools.partial(cast("Callable[..., ToolServer]", tool_target), **settings))
        else:
            self.tools.append(_named(_tool(tool_target(**settings)), new_name))


class _Renamed:
    """A tool under another name; all else of it is as it was."""

    def __init__(self, tool: Tool, name: str) -> None:
        self._tool, self.name = tool, name

    @property
    def schema(self) -> Mapping[str, Json]:
        return {**function_schema(self._tool.schema), "name": self.name}

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self._tool, attribute)


def _named(tool: Tool, name: str | None) -> Tool:
    return tool if name is None else cast(Tool, _Renamed(tool, name))


def _name_of(id: str, name: object) -> str:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name):
        raise ConfigError(f"tools.{id}.name", name, "give at most 64 letters, digits, _ and -")
    return name


def _tool(value: Any) -> Tool:
    if hasattr(value, "call") and hasattr(value, "schema"):
        return cast(Tool, value)
    if inspect.isroutine(value):
        return FunctionTool(value)
    raise UsageError(f"{value!r} is no tool: give a function, or an object with name, parallel, schema and call")


def _box(settings: Mapping[str, Any]) -> tuple[str, int, SandboxSpec]:
    """Backend, boxes made ahead, and what kind of box. Raises ConfigError."""
    if not isinstance(settings, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError("box", settings, "give a table, such as { sandbox = 'docker' }")
    limit_settings = dict(settings)
    backend_id, ready_count = limit_settings.pop("sandbox", default_sandbox()), limit_settings.pop("ready", 0)
    image_name = limit_settings.pop("image", None)
    if not isinstance(backend_id, str):
        raise ConfigError("box.sandbox", backend_id, "give the id of a sandbox backend")
    if image_name is not None and (not isinstance(image_name, str) or not image_name):
        raise ConfigError("box.image", image_name, "give the name of an image of the backend's, or leave it out")
    if isinstance(ready_count, bool) or not isinstance(ready_count, int) or ready_count < 0:
        raise ConfigError("box.ready", ready_count, "give how many boxes are made ahead, 0 for none")
    check_limits(limit_settings, "box")
    return (
        known_backend(backend_id, "box.sandbox"),
        ready_count,
        SandboxSpec(image=image_name, limits=Limits(**limit_settings)),
    )


def check_limits(settings: Mapping[str, Any], field: str) -> None:
    """Fields of `Limits` as a run file gives them. Raises ConfigError for an unknown one, and as `Limits` does."""
    limit_names = [limit_field.name for limit_field in fields(Limits)]
    for limit_name, limit_value in settings.items():
        if limit_name not in limit_names:
            raise ConfigError(f"{field}.{limit_name}", limit_value, f"give fields of Limits ({', '.join(limit_names)})")
    try:
        Limits(**settings)
    except ConfigError as limit_error:
        raise ConfigError(f"{field}.{limit_error.field}", limit_error.value, limit_error.hint) from None
