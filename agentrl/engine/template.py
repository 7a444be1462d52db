"""Chat templates compiled the way transformers compiles them: sandboxed jinja with its few extras."""

from __future__ import annotations

import json
from collections.abc import Collection
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as loop_controls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.errors import ModelError

_OURS = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token"}  # the renderer says these


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks what the assistant said; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str, where: str, arguments: Collection[str] = ()) -> Template:
    """A template ready to render. Raises ModelError for one that does not parse, or that reads none of `arguments` by
    such a name: jinja would leave it out silently; `where` names the template."""
    environment: Any = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loop_controls]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        reads = meta.find_undeclared_variables(environment.parse(source)) - _OURS - environment.globals.keys()
    except TemplateSyntaxError as error:
        raise ModelError(f"the chat template of {where!r} does not parse: {error}") from error
    for name in arguments:
        if name not in reads:
            known = f"give {' or '.join(sorted(reads))}" if reads else "it reads none, leave it out"
            raise ModelError(f"the chat template of {where!r} reads no argument {name!r} (template = …): {known}")
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
