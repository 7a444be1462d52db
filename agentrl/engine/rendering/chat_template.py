"""Chat templates compiled the way transformers compiles them, and what each of them expects and writes.

A template is a program of its author: one wants the arguments of a call as an object, another as text; one leaves out
a call beside an empty content, another beside a null one; some know no tools. `ChatTemplate` finds out by rendering
small conversations, once. Never knows tokens.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final, cast

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as loop_controls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.env.chat_messages import REASONING_KEYS
from agentrl.env.tools.calls import dump
from agentrl.env.tools.json_schema import shown_schema
from agentrl.errors import ModelError
from agentrl.records import Json, Message

_OURS = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token"}  # the renderer says these

# Letters only, so that no template escapes, quotes or capitalises it, and rare enough that no template's own text has
# it.
MARK: Final = "zqMARKqz"
"""A word that no template writes of itself."""
PROBE_NAME: Final = "zqTOOLqz"
PROBE: Final[Mapping[str, Any]] = {
    "type": "function",
    "function": {
        "name": PROBE_NAME,
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "Probe."}},
            "required": ["key"],
        },
    },
}
"""A tool for probing."""

Messages = Sequence[Mapping[str, Any]]


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's text; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True, slots=True)
class Style:
    """How a template wants messages: contents as lists of parts, a content beside calls null instead of empty, a call's
    arguments as JSON text."""

    parts: bool = False
    null: bool = False
    argument_text: bool = False

    def of(self, message: Mapping[str, Any]) -> dict[str, Any]:
        shaped_message, tool_calls = dict(message), cast("list[dict[str, Any]] | None", message.get("tool_calls"))
        if tool_calls and self.null and not shaped_message["content"]:
            shaped_message["content"] = None
        elif shown_images := shaped_message.pop("images", None):
            borders = [0, *(image["at"] for image in shown_images), len(shaped_message["content"])]
            text_pieces = [shaped_message["content"][start:end] for start, end in itertools.pairwise(borders)]
            parts = [part for text in text_pieces for part in ({"type": "text", "text": text}, {"type": "image"})][:-1]
            shaped_message["content"] = [part for part in parts if part.get("text") != ""]
        elif self.parts:
            shaped_message["content"] = [{"type": "text", "text": shaped_message["content"]}]
        if tool_calls and self.argument_text:
            shaped_message["tool_calls"] = [{**call, "function": _with_text(call["function"])} for call in tool_calls]
        return shaped_message


def _with_text(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments", {})
    return {**function, "arguments": arguments if isinstance(arguments, str) else dump(arguments)}


class ChatTemplate:
    """A compiled template with the variables that are the same in every rendering. `where` names it in errors.

    `writes_tools`, `writes_calls`, `writes_results` say whether the schemas of tools, an assistant's calls and the
    answers to them appear in what it writes."""

    # Why templates are probed, and not recognised by a model's name: derived models change their template, one name
    # comes with several, and a list of names is out of date with the next release. A template is a program, and a
    # conversation of three messages shows what it does. All probes are lazy and cached, since a run with one template
    # asks each question once.
    def __init__(self, source: str, where: str, variables: Mapping[str, Any], arguments: Collection[str] = ()) -> None:
        self.source, self.where = source, where
        self._template, self._variables = compile_template(source, where, arguments), dict(variables)

    def reads(self, key: str) -> bool:
        """Whether the template names a key of a message anywhere. A name in another role counts too: this errs
        towards silence about a key that is not read."""
        # In the source, and not by rendering with and without the key: a key may matter only in a branch that a probe
        # does not reach.
        return re.search(rf"\b{re.escape(key)}\b", self.source) is not None

    @cached_property
    def _thought_keys(self) -> tuple[str, ...]:
        """The keys under which it looks for thoughts."""
        return tuple(key for key in REASONING_KEYS if re.search(rf"""[.\['"]{key}\b""", self.source))

    def _with_thoughts(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message with its thoughts under each key that the template looks at: their name is no standard."""
        thoughts = message.get(REASONING_KEYS[0])
        # Under each of its names at once: a template that reads `reasoning` would drop thoughts under
        # `reasoning_content` in silence (law 8), and one that reads two takes either.
        return message if thoughts is None else {**message, **dict.fromkeys(self._thought_keys, thoughts)}

    @property
    def writes_thoughts(self) -> bool:
        """Whether it looks for an assistant's thoughts at all."""
        return bool(self._thought_keys)

    def render(self, messages: Messages, tools: Sequence[Mapping[str, Json]] = (), *, asks: bool = True) -> str:
        """The text of a conversation in our records' shape. Raises ModelError for one that the template refuses."""
        shown_tools = [_with_choices(as_function(tool), self.hidden_choices) for tool in tools]
        shaped_messages = [self.style.of(self._with_thoughts(message)) for message in messages]
        return self._write(shaped_messages, shown_tools, asks)

    def _write(self, messages: Messages, tools: Sequence[Mapping[str, Json]], asks: bool) -> str:
        tool_schemas = [as_function(tool) for tool in tools] or None
        try:
            return self._template.render(
                messages=messages, tools=tool_schemas, add_generation_prompt=asks, **self._variables
            )
        # A template refuses with `raise_exception`, or by running into whatever its author did not think of: both are
        # the template's refusal, and neither may end a worker.
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError) as error:
            raise ModelError(f"the chat template of {self.where!r} refuses these messages: {error}") from error

    def _tried(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Json]] = (),
        style: Style | None = None,
        *,
        asks: bool = True,
    ) -> str:
        """Write a conversation; an empty text if the template refuses it."""
        try:
            return self._write([(style or self.style).of(message) for message in messages], tools, asks)
        except ModelError:
            return ""

    def _with_call(self, style: Style | None = None) -> str:
        """Write a conversation with a call: some templates write it only in front of an answer, others write no answer
        to it."""
        answered_call = self._tried([*probe_call(), _tool("x")], [PROBE], style)
        return answered_call if MARK in answered_call else self._tried(probe_call(), [PROBE], style)

    @cached_property
    def style(self) -> Style:
        needs_parts = MARK not in self._tried([_user(MARK)], style=Style()) and MARK in self._tried(
            [_user(MARK)], style=Style(parts=True)
        )
        fitting_styles: list[tuple[bool, bool, int, Style]] = []
        for argument_text, null in itertools.product((False, True), (False, True)):
            style = Style(parts=needs_parts, null=null, argument_text=argument_text)
            writes_answer = MARK in self._tried([*probe_call(), _tool("x")], [PROBE], style)
            written_call = self._with_call(style)
            text_before, probe, behind = written_call.rpartition(PROBE_NAME)
            # Python's own writing of an object, JSON within a JSON text, and a null written out are no model's format.
            is_odd = "{'key'" in behind or '\\"key' in behind or (null and "None" in text_before[-60:])
            # An object is what most want; a shorter text has no empty parts.
            if probe and MARK in behind and not is_odd:
                fitting_styles.append((not writes_answer, argument_text, len(written_call), style))
        # The order is the preference: a style in which answers are written too, then arguments as objects, then the
        # shorter text. `test_a_start_is_what_transformers_renders` compares what comes of it with transformers.
        return min(fitting_styles, key=lambda one: one[:3])[3] if fitting_styles else Style(parts=needs_parts)

    @cached_property
    def writes_tools(self) -> bool:
        written_texts = [self._tried(messages, [PROBE]) for messages in ([_user("a")], _SYSTEM)]
        # With and without a system message: some templates write the schemas into the system message, and only where
        # there is one.
        return bool(written_texts[0]) and all(not text or PROBE_NAME in text for text in written_texts)

    @cached_property
    def hidden_choices(self) -> frozenset[str]:
        """Where an `enum` may stand so that the template leaves its values out, by the names of `_CHOICES`. Gemma 4 and
        gpt-oss, say, write those of a parameter itself and not those of `anyOf`, which stands for an optional one."""
        if not self.writes_tools:
            return frozenset()
        probes = {place: {**_PROBE_OF, "properties": {"key": schema}} for place, schema in _CHOICES.items()}
        written_texts = {
            place: self._tried([_user("a")], [{"name": PROBE_NAME, "description": "Probe.", "parameters": parameters}])
            for place, parameters in probes.items()
        }
        return frozenset(place for place, text in written_texts.items() if MARK not in text)

    @cached_property
    def writes_calls(self) -> bool:
        conversation: list[dict[str, Any]] = [_user("a"), {"role": "assistant", "content": "a"}]
        written = self._with_call()
        # The name alone proves nothing, since the schemas have it too: a call has to add one.
        return MARK in written and written.count(PROBE_NAME) > self._tried(conversation, [PROBE]).count(PROBE_NAME)

    @cached_property
    def writes_results(self) -> bool:
        return MARK in self._tried([*probe_call("x"), _tool(MARK)], [PROBE])

    @cached_property
    def writes_several(self) -> bool:
        """Whether it writes several calls of one message."""
        question, answer = probe_call("x")
        two_calls = [*answer["tool_calls"], {**probe_call()[1]["tool_calls"][0], "id": "call00001"}]
        return not self.writes_calls or MARK in self._tried([question, {**answer, "tool_calls": two_calls}], [PROBE])

    @cached_property
    def written_call(self) -> str:
        """The text that the template writes behind the user's message for a call of `zqTOOLqz` with `key="zqMARKqz"`;
        empty if it writes no calls."""
        written = self._tried(probe_call(), [PROBE], asks=False) if self.writes_calls else ""
        written = written if MARK in written else self._with_call() if self.writes_calls else ""
        texts_before = (self._tried([_user("a")], [PROBE], asks=asks) for asks in (True, False))
        return written[len(next((text for text in texts_before if text and written.startswith(text)), "")) :]


_SYSTEM: Final = ({"role": "system", "content": "s"}, {"role": "user", "content": "a"})


_PROBE_OF: Final[Mapping[str, Any]] = {"type": "object", "required": ["key"]}
_ENUM: Final[Mapping[str, Any]] = {"type": "string", "enum": [MARK, "b"]}
_CHOICES: Final[Mapping[str, Mapping[str, Any]]] = {
    "itself": _ENUM,
    "branches": {"anyOf": [_ENUM, {"type": "null"}], "default": None},
    "items": {"type": "array", "items": _ENUM},
}
"""Schemas of a parameter with choices, by where these stand in it."""
_MOST_CHOICES: Final = 100


def _with_choices(tool: Mapping[str, Any], hidden: Collection[str]) -> Mapping[str, Any]:
    """A tool whose parameters say in their description which values they may have, where the template hides that."""
    declared: Any = tool["function"].get("parameters")
    parameters = cast("Mapping[str, Any]", declared if isinstance(declared, Mapping) else {})
    properties: Any = parameters.get("properties")
    if not hidden or not isinstance(properties, Mapping):
        return tool
    described = {
        key: _described(schema, choices) if (choices := _choices(schema, hidden)) else schema
        for key, schema in cast("Mapping[str, Any]", properties).items()
    }
    return {**tool, "function": {**tool["function"], "parameters": {**parameters, "properties": described}}}


def _choices(schema: Any, hidden: Collection[str], place: str = "itself") -> list[Any]:
    """The values of a schema's enums that stand where the template writes none."""
    if not isinstance(schema, Mapping):
        return []
    schema_fields = cast("Mapping[str, Any]", schema)
    listed = schema_fields.get("enum", [schema_fields["const"]] if "const" in schema_fields else [])
    choices: list[Any] = list(cast("list[Any]", listed)) if place in hidden and isinstance(listed, list) else []
    for keyword in ("anyOf", "oneOf", "allOf"):
        for branch in cast("list[Any]", schema_fields.get(keyword) or []):
            choices += _choices(branch, hidden, "branches")
    return choices + _choices(schema_fields.get("items"), hidden, "items")


def _described(schema: Mapping[str, Any], choices: Sequence[Any]) -> dict[str, Any]:
    choice_texts = list(dict.fromkeys(dump(choice) for choice in choices))
    remainder = f" and {len(choice_texts) - _MOST_CHOICES} more" if len(choice_texts) > _MOST_CHOICES else ""
    sentence = f"One of: {', '.join(choice_texts[:_MOST_CHOICES])}{remainder}"
    return {**schema, "description": f"{schema['description']} {sentence}" if schema.get("description") else sentence}


def one_by_one(messages: Sequence[Message]) -> list[Message]:
    """A conversation in which each message makes one call at most, which its answer follows."""
    divided_messages, answers = list[Message](), list[Message]()
    for position, message in enumerate(messages):
        tool_calls = message.get("tool_calls", ())
        if len(tool_calls) < 2:
            divided_messages += [] if message in answers else [message]
            answers = answers if message in answers else []
            continue
        tool_answers = itertools.takewhile(lambda message: message["role"] == "tool", messages[position + 1 :])
        answers = list(itertools.islice(tool_answers, len(tool_calls)))
        for call, answer in itertools.zip_longest(tool_calls, answers):
            divided_messages.append(cast("Message", {**message, "tool_calls": [call]}))
            message = cast("Message", {**message, "content": ""})
            divided_messages += [] if answer is None else [answer]
    return divided_messages


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "name": PROBE_NAME, "tool_call_id": "call00000"}


def probe_call(value: str = MARK) -> list[dict[str, Any]]:
    """A user's message and a call with one argument."""
    function = {"name": PROBE_NAME, "arguments": {"key": value}}
    tool_call = {"id": "call00000", "type": "function", "function": function}
    return [_user("a"), {"role": "assistant", "content": "", "tool_calls": [tool_call]}]


def compile_template(source: str, where: str, arguments: Collection[str] = ()) -> Template:
    """A template ready to render. Raises ModelError for one that does not parse, or that reads none of `arguments` by
    such a name: jinja would leave it out silently; `where` names the template."""
    # A template comes with a model from anywhere, so it runs in jinja's sandbox, with the options that transformers
    # compiles with. Other options would put other blanks between the messages, and every prompt would differ from the
    # ones that the model was trained on.
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loop_controls]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        # A misspelt argument (`enable_thinkng = false`) is an unused variable to jinja, and the run would think for a
        # day. Hence the refusal below (law 8).
        read_names = meta.find_undeclared_variables(environment.parse(source)) - _OURS - environment.globals.keys()
    except TemplateSyntaxError as error:
        raise ModelError(f"the chat template of {where!r} does not parse: {error}") from error
    for name in arguments:
        if name not in read_names:
            hint = f"give {' or '.join(sorted(read_names))}" if read_names else "it reads none, leave it out"
            raise ModelError(f"the chat template of {where!r} reads no argument {name!r} (template = …): {hint}")
    template = environment.from_string(source)
    template.globals = dict(template.globals)  # jinja copies them for each text, and its own kind of mapping slowly
    return template


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, sort_keys: bool = False) -> str:
    # jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, sort_keys=sort_keys)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def as_function(tool: Mapping[str, Json]) -> Mapping[str, Json]:
    """A tool as templates expect it: OpenAI's envelope around a function schema without references. Many templates
    write the properties and not the definitions that these refer to, so a model would not see its choices."""
    return {"type": "function", **(tool if "function" in tool else {}), "function": shown_schema(tool)}
