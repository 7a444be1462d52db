"""Tools: Python callables with type hints become what a model may call, with a JSON schema and readable errors.

`@tool` marks a method of a `ToolEnv` (or a plain function); `FunctionTool` is the `protocols.Tool` made of it. This
module validates arguments, shapes results and writes the messages that answer a turn's calls; it neither parses a
model's text nor decides an episode.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast, get_type_hints, overload

import jsonschema
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from agentrl.env import asyncio_code
from agentrl.env.limits import Fault
from agentrl.env.sync_async import call
from agentrl.env.tools.calls import Malformed, Parsed, ToolCall, own_id
from agentrl.env.tools.json_schema import (
    VALIDATOR,
    function_schema,
    has_float,
    leads_nowhere,
    schemas_of_item,
    schemas_of_member,
    target_of,
    types_of,
    without_references,
)
from agentrl.env.tools.tool_results import as_result, clean_text, cut
from agentrl.errors import (
    ParseError,
    PolicyFault,
    StructuralParseError,
    ToolArgumentError,
    ToolError,
    ToolTimeout,
    UsageError,
)
from agentrl.protocols import ToolResult
from agentrl.records import Json, Message, Messages

F = TypeVar("F", bound=Callable[..., Any])

_MARK: Final = "__agentrl_tool__"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """The arguments of `@tool`. `timeout_s` None is the environment's default."""

    name: str
    parallel: bool = False
    timeout_s: float | None = None
    errors: tuple[type[Exception], ...] = ()


@overload
def tool(function: F, /) -> F: ...
@overload
def tool(
    *,
    name: str | None = None,
    parallel: bool = False,
    timeout_s: float | None = None,
    errors: tuple[type[Exception], ...] = (),
    asyncio: bool | None = None,
) -> Callable[[F], F]: ...
def tool(
    function: Any = None,
    /,
    *,
    name: str | None = None,
    parallel: bool = False,
    timeout_s: float | None = None,
    errors: tuple[type[Exception], ...] = (),
    asyncio: bool | None = None,
) -> Any:
    """Offer a method (or function) to the model. Its type hints and docstring become the JSON schema.

    `parallel`: calls of one turn may run at the same time as their parallel neighbours. `timeout_s`: seconds until the
    call is ended with an error that the model reads. `errors`: exceptions that the model's arguments can cause; their
    text is shown to it. Any other exception is a failure of the environment and takes the episode out of the loss;
    raise `ToolError` with a message for the model. `asyncio`: whether an `async def` is written with asyncio and runs
    on its loop, and not under trio; None: as its code says, see `agentrl.env.asyncio_code`.

    Example::

        @agentrl.tool
        def look_up(self, word: str, limit: int = 3) -> list[str]:
            \"\"\"Find a word in the dictionary.

            Args:
                word: what to look for
                limit: how many entries at most
            \"\"\"
    """

    def mark(function: F) -> F:
        tool_options = ToolOptions(
            name=name or function.__name__, parallel=parallel, timeout_s=timeout_s, errors=tuple(errors)
        )
        setattr(function, _MARK, tool_options)
        if asyncio is not None:
            asyncio_code.mark(function, asyncio)
        return function

    return mark if function is None else mark(function)


class FunctionTool:
    """A callable as a `protocols.Tool`. `blocking` says whether a plain `def` goes to a thread."""

    def __init__(self, function: Callable[..., Any], options: ToolOptions | None = None, *, blocking: bool = True):
        self._function, self._blocking = function, blocking
        marked_options: ToolOptions | None = options or getattr(function, _MARK, None)
        options = marked_options or ToolOptions(name=function.__name__)
        self.name, self.parallel, self.timeout_s = options.name, options.parallel, options.timeout_s
        self._errors = options.errors
        self._signature = _signature_of(_underlying(function), self.name)

    @property
    def schema(self) -> Mapping[str, Json]:
        """Name, description and parameters, as OpenAI's function schema has them; a fresh copy."""
        # A copy by way of its text: schemas are nested, and a caller that changes its copy (a chat template does) must
        # not change what the next episode reads.
        return json.loads(self._signature.schema_json)

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Validate, convert to the hinted types, call. Raises ToolArgumentError, ToolError, or the body's exception."""
        converted_arguments = self._signature.convert(arguments)
        try:
            returned = await call(self._function, blocking=self._blocking, **converted_arguments)
        except PolicyFault:
            raise
        # Only what the author has named: a KeyError from a bug of the tool looks like one from a bad argument, and as a
        # fault of the policy it would be trained on (law 3).
        except self._errors as named_error:
            raise ToolError(f"{type(named_error).__name__}: {named_error}") from named_error
        return as_result(returned, self.name)


class SchemaTool:
    """A `protocols.Tool` with a JSON schema from its maker, not derived from type hints: `function` takes the checked
    arguments as a dict."""

    def __init__(
        self,
        name: str,
        description: str,
        parameters: Mapping[str, Json],
        function: Callable[[Mapping[str, Json]], Any],
        *,
        parallel: bool = False,
        timeout_s: float | None = None,
        errors: tuple[type[Exception], ...] = (),
        blocking: bool = True,
    ) -> None:
        self.name, self.parallel, self.timeout_s = name, parallel, timeout_s
        self._function, self._errors, self._blocking = function, errors, blocking
        self._schema = json.dumps({"name": name, "description": description, "parameters": parameters})
        self._check = argument_check(self.schema)

    @property
    def schema(self) -> Mapping[str, Json]:
        return json.loads(self._schema)

    async def call(self, arguments: Mapping[str, Json]) -> ToolResult:
        """Raises ToolArgumentError, ToolError for exceptions that `errors` names, or the function's own exception."""
        arguments = self._check(arguments)
        try:
            returned = await call(self._function, arguments, blocking=self._blocking)
        except PolicyFault:
            raise
        except self._errors as named_error:
            raise ToolError(f"{type(named_error).__name__}: {named_error}") from named_error
        return as_result(returned, self.name)


def is_tool(value: object) -> bool:
    """Whether `@tool` marked it."""
    return isinstance(getattr(value, _MARK, None), ToolOptions)


def tools_of(owner: object, *, blocking: bool = True) -> list[FunctionTool]:
    """The `@tool` methods of an object, in the order in which its classes define them, base classes first."""
    options_by_name: dict[str, ToolOptions] = {}
    for base_class in reversed(type(owner).__mro__):
        for attribute, class_member in vars(base_class).items():
            if is_tool(class_member):
                options_by_name[attribute] = getattr(class_member, _MARK)
            elif attribute in options_by_name:  # overridden without a mark: no longer offered
                del options_by_name[attribute]
    return [
        FunctionTool(getattr(owner, attribute), tool_options, blocking=blocking)
        for attribute, tool_options in options_by_name.items()
    ]


def argument_check(schema: Mapping[str, Json]) -> ArgumentCheck:
    """The check of a tool schema, shared by all that have the same one. Raises UsageError for an invalid schema."""
    return _argument_check(json.dumps(function_schema(schema), sort_keys=True))


@functools.lru_cache(maxsize=1_024)
def _argument_check(schema: str) -> ArgumentCheck:
    return ArgumentCheck(json.loads(schema))


class ArgumentCheck:
    """Validates arguments against the parameters of one tool schema."""

    def __init__(self, schema: Mapping[str, Json]) -> None:
        function = function_schema(schema)
        self._name = str(function.get("name", "tool"))
        parameters = function.get("parameters") or {"type": "object"}
        try:
            jsonschema.Draft202012Validator.check_schema(parameters)
        except jsonschema.SchemaError as schema_error:
            raise UsageError(
                f"tool {self._name!r} has an invalid JSON schema: {schema_error.message}"
            ) from schema_error
        # Found when the tool is offered. jsonschema meets it only when a value comes to that part of the schema, in the
        # middle of an episode.
        if reference := leads_nowhere(parameters, parameters):
            raise UsageError(
                f"tool {self._name!r} has the reference {reference!r} in its JSON schema, which names nothing"
            )
        self._parameters: Mapping[str, Any] = parameters
        self._validator: Any = VALIDATOR(parameters)

    def __call__(self, arguments: Mapping[str, Json]) -> dict[str, Json]:
        """The arguments as a tool may take them: 1.0 is 1 where the schema takes integers alone, and stays a float
        elsewhere. Raises ToolArgumentError naming up to three that do not fit."""
        # Sorted by place, as the order of the checks differs between versions of jsonschema, and a replay must read the
        # same text. Three of them: a model that gets everything wrong learns nothing from a list of forty.
        violations: list[Any] = sorted(self._validator.iter_errors(dict(arguments)), key=_error_place)
        if violations:
            problems = "; ".join(_describe_violation(violation) for violation in violations[:3])
            raise ToolArgumentError(f"{self._name}: {problems}")
        return cast("dict[str, Json]", self._with_integers(dict(arguments), [self._parameters]))

    def _with_integers(self, value: Any, schemas: Sequence[Any]) -> Any:
        """A valid value with integers for the floats that `schemas`, all of which it fits, want as integers."""
        if isinstance(value, float):
            wants_integer = any("number" not in types_of(schema, self._parameters) for schema in schemas)
            return _whole(value) if wants_integer else value
        if not has_float(value):
            return value
        schema_parts = [schema_part for schema in schemas for schema_part in self._parts_of(schema, value, frozenset())]
        if isinstance(value, list):
            list_items = cast("list[Any]", value)
            return [
                self._with_integers(
                    list_item,
                    [
                        item_schema
                        for schema_part in schema_parts
                        for item_schema in schemas_of_item(schema_part, item_index)
                    ],
                )
                for item_index, list_item in enumerate(list_items)
            ]
        return {
            member_key: self._with_integers(
                inner_value,
                [
                    inner_schema
                    for schema_part in schema_parts
                    for inner_schema in schemas_of_member(schema_part, member_key)
                ],
            )
            for member_key, inner_value in cast("dict[str, Any]", value).items()
        }

    def _parts_of(self, schema: Any, value: Any, followed: frozenset[str]) -> Iterator[Mapping[str, Any]]:
        """A schema and those that it combines, as far as they apply to a value that fits it."""
        if not isinstance(schema, Mapping):
            return
        schema_fields = cast("Mapping[str, Any]", schema)
        yield schema_fields
        reference = str(schema_fields.get("$ref"))
        if reference not in followed:
            yield from self._parts_of(target_of(schema_fields, self._parameters), value, followed | {reference})
        for part_schema in cast("list[Any]", schema_fields.get("allOf") or []):
            yield from self._parts_of(part_schema, value, followed)
        for keyword in ("anyOf", "oneOf"):
            for branch_schema in cast("list[Any]", schema_fields.get(keyword) or []):
                if self._validator.evolve(schema=branch_schema).is_valid(value):
                    yield from self._parts_of(branch_schema, value, followed)


def _whole(value: float) -> int | float:
    """The integer that a float is, if it is one."""
    return int(value) if value.is_integer() else value


def _error_place(error: Any) -> str:
    return str(error.json_path)


def _describe_violation(error: Any) -> str:
    argument_path = ".".join(str(path_part) for path_part in error.absolute_path)
    message = clean_text(str(error.message))
    message = message if len(message) <= 200 else message[:200] + "…"
    return f"argument {argument_path!r}: {message}" if argument_path else message


# --- signatures


class _Signature:
    """The schema of a function and the conversion of JSON arguments to its hinted types."""

    def __init__(self, schema: Mapping[str, Json], model: type[BaseModel], aliases: Mapping[str, str]) -> None:
        self.schema_json = json.dumps(schema)
        self._model, self._aliases = model, aliases
        self._check = argument_check(schema)

    def convert(self, arguments: Mapping[str, Json]) -> dict[str, Any]:
        try:
            argument_model = self._model.model_validate(self._check(arguments))
        except ValidationError as pydantic_error:
            first_problem = pydantic_error.errors(include_url=False)[0]
            argument_path = ".".join(str(path_part) for path_part in first_problem["loc"])
            raise ToolArgumentError(f"argument {argument_path!r}: {first_problem['msg']}") from None
        # What the model left out is left to the function's own default, which need not be a value that JSON has.
        set_fields = argument_model.model_fields_set
        return {
            self._aliases[field_name]: getattr(argument_model, field_name)
            for field_name in self._aliases
            if field_name in set_fields
        }


@functools.cache
def _signature_of(function: Callable[..., Any], name: str) -> _Signature:
    """Built once per function, however many environments offer it. Raises UsageError for what has no schema."""
    tool_label = f"tool {function.__qualname__!r}"
    try:
        type_hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as signature_error:
        raise UsageError(f"{tool_label}: cannot read its type hints: {signature_error}") from signature_error
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise UsageError(f"{tool_label} yields, and a model reads one answer: return it")
    summary, described = _read_docstring(inspect.getdoc(function) or "")
    if not summary:
        raise UsageError(f"{tool_label} needs a docstring: it is what the model reads")
    model_fields: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for parameter_index, parameter in enumerate(inspect.signature(function).parameters.values()):
        if parameter_index == 0 and parameter.name in ("self", "cls"):
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UsageError(f"{tool_label}: parameter {parameter} cannot be named in a call")
        if parameter.name not in type_hints:
            raise UsageError(f"{tool_label}: parameter {parameter.name!r} needs a type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        field_name = f"field_{len(model_fields)}"  # a name of our own: pydantic reserves some that arguments may have
        model_fields[field_name] = (
            type_hints[parameter.name],
            Field(default, alias=parameter.name, description=described.get(parameter.name)),
        )
        aliases[field_name] = parameter.name
    try:
        argument_model = create_model(f"{name}_arguments", __config__=ConfigDict(extra="forbid"), **model_fields)
        parameters = without_references(_without_titles(argument_model.model_json_schema(by_alias=True)))
    except Exception as signature_error:  # pydantic raises several kinds for types that JSON cannot express
        raise UsageError(
            f"{tool_label}: its type hints have no JSON schema: {str(signature_error).splitlines()[0]}"
        ) from signature_error
    parameters = {**parameters, "properties": parameters.get("properties", {})}
    return _Signature({"name": name, "description": summary, "parameters": parameters}, argument_model, aliases)


def _underlying(function: Callable[..., Any]) -> Callable[..., Any]:
    return getattr(function, "__func__", function)


def _without_titles(schema: Any, *, names: bool = False) -> Any:
    """The schema without pydantic's titles, which tell a model nothing. `names`: the keys here are property names."""
    if isinstance(schema, dict):
        schema_fields = cast("dict[str, Any]", schema)
        return {
            schema_key: _without_titles(schema_value, names=not names and schema_key in ("properties", "$defs"))
            for schema_key, schema_value in schema_fields.items()
            if names or schema_key != "title"
        }
    return (
        [_without_titles(list_item) for list_item in cast("list[Any]", schema)] if isinstance(schema, list) else schema
    )


_ARGS: Final = re.compile(r"^(Args|Arguments|Parameters):\s*$")
_SECTION: Final = re.compile(r"^(Args|Arguments|Parameters|Returns?|Raises|Yields|Examples?|Notes?):\s*$")
_ARGUMENT: Final = re.compile(r"^\s+\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")
_REST_ARGUMENT: Final = re.compile(r"^:param\s+(?:[\w\[\], ]+\s+)?(\w+):\s*(.*)$")


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description (all before the first section) and the description of each argument, Google or reST style."""
    summary_lines: list[str] = []
    described: dict[str, str] = {}
    section_kind = last_argument = ""
    for doc_line in text.splitlines():
        if rest_match := _REST_ARGUMENT.match(doc_line):
            section_kind, last_argument = ":param", rest_match[1]
            described[last_argument] = rest_match[2].strip()
        elif doc_line.startswith(":"):
            section_kind = ":"
        elif _SECTION.match(doc_line):
            section_kind, last_argument = ("args" if _ARGS.match(doc_line) else "other"), ""
        elif not section_kind:
            summary_lines.append(doc_line)
        elif section_kind == "args" and (argument_match := _ARGUMENT.match(doc_line)):
            last_argument = argument_match[1]
            described[last_argument] = argument_match[2].strip()
        elif section_kind in ("args", ":param") and last_argument and doc_line.strip():
            described[last_argument] = f"{described[last_argument]} {doc_line.strip()}"
    return "\n".join(summary_lines).strip(), described


def envelope(schemas: Sequence[Mapping[str, Json]]) -> list[Mapping[str, Json]]:
    """Tool schemas as chat templates want them: `{"type": "function", "function": {…}}` each."""
    return [{"type": "function", "function": dict(function_schema(schema))} for schema in schemas]


@dataclass(frozen=True, slots=True)
class CallResult:
    """One call of a turn and its result as the model reads it. `error` says why it failed, None if it did not."""

    call: ToolCall | Malformed
    result: ToolResult
    error: PolicyFault | None = None

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def fault(self) -> Fault | None:
        """The kind of parse failure, None for calls that reached their tool."""
        if isinstance(self.error, StructuralParseError):
            return "structural"
        return "content" if isinstance(self.error, ParseError | ToolArgumentError) else None


def failed(call: ToolCall | Malformed, error: PolicyFault, *, limit: int = 2_000) -> CallResult:
    """The result of a call that went wrong, as the model reads it."""
    fault_text, was_cut = cut(clean_text(describe_fault(error)), limit)
    return CallResult(call, ToolResult(content=fault_text, is_error=True, truncated=was_cut), error)


def describe_fault(error: PolicyFault) -> str:
    """An error as the model reads it: its kind, then its text."""
    for fault_class, fault_name in _KINDS.items():
        if isinstance(error, fault_class):
            return f"{fault_name}: {error}"
    return f"error: {error}"


_KINDS: Final[Mapping[type[PolicyFault], str]] = {
    StructuralParseError: "malformed call",
    ParseError: "invalid call",
    ToolArgumentError: "wrong arguments",
    ToolTimeout: "timeout",
}


def tool_messages(results: Sequence[CallResult], before: int) -> Messages:
    """One tool message per call, with the id that the model gave its call. Other ids count the episode's calls, of
    which there were `before`, and have the nine characters that Mistral wants."""
    messages = list[Message]()
    for result_index, call_result in enumerate(results):
        tool_message = Message(
            role="tool",
            content=call_result.result.content,
            name=clean_text(call_result.name)[:100] or "unknown",
            tool_call_id=own_id(call_result.call) or f"call{before + result_index:05d}",
        )
        if call_result.result.images:
            tool_message["images"] = [*call_result.result.images]
        messages.append(tool_message)
    return tuple(messages)


def completion_messages(parsed: Parsed, action: str, results: Sequence[CallResult]) -> list[Message]:
    """One turn as TRL gives it to reward functions: the policy's message with its `tool_calls`, then the results."""
    tool_calls: list[dict[str, Json]] = [
        {"type": "function", "function": {"name": call_result.name, "arguments": dict(call_result.call.arguments)}}
        for call_result in results
        if isinstance(call_result.call, ToolCall)
    ]
    policy_message = Message(
        role="assistant", content=parsed.text.strip() if tool_calls or parsed.thoughts else parsed.text
    )
    if parsed.thoughts:
        policy_message["reasoning_content"] = parsed.thoughts
    if tool_calls:
        policy_message["tool_calls"] = tool_calls
    elif results:
        # A turn of broken calls alone is text, as in TRL. Without it a function that rewards the format would judge
        # nothing, as `parsed.text` leaves out whatever begins like a call.
        policy_message = Message(role="assistant", content=action)
    return [policy_message, *tool_messages(results, 0)]


def without_last_results(messages: Sequence[Message]) -> Sequence[Message]:
    """A completion that ends with the policy's own message.

    A limit ends an episode behind the results of its last calls. Reward functions judge the text of the last message,
    and would judge a tool's words as the policy's, so that calling a tool that knows the answer would pay."""
    kept_count = len(messages)
    while kept_count and messages[kept_count - 1]["role"] == "tool":
        kept_count -= 1
    return messages[:kept_count]
