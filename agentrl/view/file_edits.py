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
    edits = [edit for call in _calls(text) for edit in _of(call.name, call.arguments, "")]
    return edits[:_MOST]


def _calls(text: str) -> Sequence[ToolCall]:
    # Every dialect is tried, and not the one of the run's model: a page has runs of many, and a recorded turn may be
    # in none of its own run's (a model that writes calls as it was pretrained to).
    for form in FORMATS.values():
        marked = any(marker in text for marker in form.markers)
        # Markers are looked for first because a parse costs more than a search, and a page asks for each turn.
        if not marked and (form.markers or not text.lstrip().startswith(("{", "["))):
            continue
        try:
            calls = form.parse(text).calls
        # A page shows what it can: a turn that breaks a parser is shown as its text.
        except AgentRLError:
            continue
        if good := [call for call in calls if isinstance(call, ToolCall)]:
            return good
    return ()


def _of(name: str, arguments: Mapping[str, Any], outer: str) -> Iterator[dict[str, str | None]]:
    texts = {key: value for key, value in arguments.items() if isinstance(value, str)}
    path = next((texts[key] for key in _PATHS if key in texts), outer)
    place = next((str(arguments[key]) for key in _PLACES if isinstance(arguments.get(key), int | str)), None)
    edit: dict[str, str | None] = {"name": name, "path": path or None, "place": place, "old": None, "new": None}
    # Some tools take several edits of one file, whose path is only outside; so the parts inherit it.
    if isinstance(several := arguments.get("edits"), list):
        for part in cast("list[Any]", several)[:_MOST]:
            if isinstance(part, dict):
                yield from _of(name, cast("Mapping[str, Any]", part), path)
        return
    for old, new in _PAIRS:
        if old in texts and new in texts:
            yield edit | {"old": texts[old], "new": texts[new]}
            return
    for key in _PATCHES:
        if key in texts and _PATCH.search(texts[key]):
            yield edit | {"patch": texts[key]}
            return
    # `content` and `text` are the names of nearly everything. Only beside a path or a line are they the contents of a
    # file.
    keys = _INSERTED if place is not None else _WHOLE if path else ()
    if (key := next((key for key in keys if key in texts), None)) is not None:
        yield edit | {"new": texts[key]}
