"""Tags and a note on a run, which people write, in a small file of its folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from agentrl.errors import UsageError
from agentrl.run.run_folder import RunDir

Json = dict[str, Any]
_MOST_TAGS: Final = 20
_TAG_CHARS: Final = 40
_NOTE_CHARS: Final = 10_000


def notes_of(run: RunDir) -> Json:
    """The `tags` (a list of texts) and the `note` of a run; none for a file that is missing, or is not ours."""
    # The file lies in the run's folder, where people edit it: a broken one must not take the run from the list.
    with suppress(OSError, ValueError, UsageError):
        return _checked(json.loads(run.notes.read_text(encoding="utf-8")))
    return {"tags": [], "note": ""}


def keep_notes(run: RunDir, body: Any) -> Json:
    """Put tags and a note in the place of those that are there; they are returned. Raises UsageError for others than
    these, or if the run's folder cannot be written."""
    checked_notes = _checked(body)
    draft_path: Path | None = None
    try:
        # Written beside and then renamed: two viewers that save at once leave one of the two notes, and never half of
        # each.
        with tempfile.NamedTemporaryFile("w", dir=run.path, prefix=".notes-", delete=False) as draft_file:
            draft_path = Path(draft_file.name)
            json.dump(checked_notes, draft_file)
        draft_path.replace(run.notes)
    except OSError as error:
        if draft_path is not None:
            draft_path.unlink(missing_ok=True)
        raise UsageError(f"{run.notes} cannot be written: {error.strerror}") from error
    return checked_notes


def _checked(body: Any) -> Json:
    document = cast("Mapping[str, Any]", body if isinstance(body, dict) else {})
    listed_tags, note_text = document.get("tags"), document.get("note")
    if set(document) != {"tags", "note"} or not isinstance(listed_tags, list) or not isinstance(note_text, str):
        raise UsageError('notes are {"tags": [text, …], "note": text}')
    if len(note_text) > _NOTE_CHARS:
        raise UsageError(f"note has {len(note_text)} characters: write {_NOTE_CHARS} at most")
    checked_tags: list[str] = []
    for tag in cast("list[Any]", listed_tags):
        # Printable, since a command line lists tags in a table, and a control character would write to the terminal.
        if not isinstance(tag, str) or not 0 < len(tag.strip()) <= _TAG_CHARS or not tag.isprintable():
            raise UsageError(f"tag {str(tag)[:50]!r}: give 1 to {_TAG_CHARS} letters, digits, signs")
        checked_tags.append(tag.strip())
    if len(checked_tags) > _MOST_TAGS:
        raise UsageError(f"tags are {len(checked_tags)}: give {_MOST_TAGS} at most")
    return {"tags": list(dict.fromkeys(checked_tags)), "note": note_text}
