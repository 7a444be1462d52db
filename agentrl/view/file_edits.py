"""File changes that the tool calls of a turn make, as far as their arguments tell: old and new text, or a patch.

The names of the arguments are those of the editing tools that models know best. A call is read in whichever dialect it
is written; a broken one, or one that edits nothing, is left out. Knows no tool of any environment, and opens no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, cast

from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import FORMATS
from agentrl.errors import AgentRLError

_PATHS: Final = ("path", "file_path", "filename", "file", "target_file")
_PAIRS: Final = (
    *(("old_str", "new_str"), ("old_string", "new_string"), ("old_text", "new_text"), ("old_content", "new_content")),
    *(("old", "new"), ("search", "replace"), ("find", "replace"), ("before", "after")),
)
_WHOLE: Final = ("file_text", "new_content", "contents", "content")  # of a file that is named
_INSERTED: Final = ("insert_text", "new_str", "text")  # at a line that is named
_PATCHES: Final = ("patch", "diff", "input")
_PATCH: Final = re.compile(r"^(@@ |--- |\*\*\* Begin Patch)", re.MULTILINE)
_PLACES: Final = ("line", "insert_line", "line_number")
_MOST = 50  # edits of a turn


def edits_of(text: str) -> list[dict[str, str | None]]:
    """The edits that the calls in a turn's text ask for, in their order: the tool's `name`, the `path` and the `place`
    if it names them, and either `old` (None: unknown) and `new`, or a `patch`."""
    file_edits = [file_edit for call in _calls(text) for file_edit in _of(call.name, call.arguments, "")]
    return file_edits[:_MOST]


def _calls(text: str) -> Sequence[ToolCall]:
    # Every dialect is tried, and not the one of the run's model: a page has runs of many, and a recorded turn may be
    # in none of its own run's (a model that writes calls as it was pretrained to).
    for dialect in FORMATS.values():
        has_marker = any(marker in text for marker in dialect.markers)
        # Markers are looked for first because a parse costs more than a search, and a page asks for each turn.
        if not has_marker and (dialect.markers or not text.lstrip().startswith(("{", "["))):
            continue
        try:
            parsed_calls = dialect.parse(text).calls
        # A page shows what it can: a turn that breaks a parser is shown as its text.
        except AgentRLError:
            continue
        if tool_calls := [call for call in parsed_calls if isinstance(call, ToolCall)]:
            return tool_calls
    return ()


def _of(name: str, arguments: Mapping[str, Any], outer: str) -> Iterator[dict[str, str | None]]:
    text_arguments = {key: value for key, value in arguments.items() if isinstance(value, str)}
    edit_path = next((text_arguments[key] for key in _PATHS if key in text_arguments), outer)
    place = next((str(arguments[key]) for key in _PLACES if isinstance(arguments.get(key), int | str)), None)
    edit: dict[str, str | None] = {"name": name, "path": edit_path or None, "place": place, "old": None, "new": None}
    # Some tools take several edits of one file, whose path is only outside; so the parts inherit it.
    if isinstance(nested_edits := arguments.get("edits"), list):
        for nested_edit in cast("list[Any]", nested_edits)[:_MOST]:
            if isinstance(nested_edit, dict):
                yield from _of(name, cast("Mapping[str, Any]", nested_edit), edit_path)
        return
    for old_key, new_key in _PAIRS:
        if old_key in text_arguments and new_key in text_arguments:
            yield edit | {"old": text_arguments[old_key], "new": text_arguments[new_key]}
            return
    for key in _PATCHES:
        if key in text_arguments and _PATCH.search(text_arguments[key]):
            yield edit | {"patch": text_arguments[key]}
            return
    # `content` and `text` are the names of nearly everything. Only beside a path or a line are they the contents of a
    # file.
    content_keys = _INSERTED if place is not None else _WHOLE if edit_path else ()
    if (key := next((key for key in content_keys if key in text_arguments), None)) is not None:
        yield edit | {"new": text_arguments[key]}
