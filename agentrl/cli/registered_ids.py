"""The classes that installed packages offer, by id: for `agentrl list` and `agentrl show`.

It imports a class and reads its documentation; it never makes an instance.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from agentrl import registry
from agentrl.errors import UnknownIdError, UsageError
from agentrl.registration import parameters_of
from agentrl.tokens.columns import column

KINDS: tuple[registry.Kind, ...] = get_args(registry.Kind)


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a constructor; `default` is its default value as code, None if the argument is required."""

    name: str
    kind: str
    default: str | None


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """The class or function behind an id. `text` is its docstring; `open` is whether it takes further arguments."""

    kind: registry.Kind
    id: str
    target: str
    text: str
    arguments: tuple[Argument, ...]
    open: bool = False

    @property
    def summary(self) -> str:
        """The first sentence that says more than the id."""
        doc_text = re.sub(rf"^`{re.escape(self.id)}`[.:] *", "", " ".join(self.text.split()))
        return doc_text.partition(". ")[0].rstrip(".")


def entries(kind: registry.Kind) -> list[CatalogueEntry]:
    """All entries of a kind, sorted by id."""
    return [_entry(kind, entry_id) for entry_id in registry.ids(kind)]


def find(id: str) -> CatalogueEntry:
    """The entry of an id of any kind, or of a reference `module:Class` or `file.py:Class`. Raises UnknownIdError, which
    names the nearest known ids."""
    for id_kind in KINDS:
        if id in registry.ids(id_kind):
            return _entry(id_kind, id)
    if ":" in id:
        return _entry("environments", id)
    near_ids = registry.nearest(id, [known_id for id_kind in KINDS for known_id in registry.ids(id_kind)])
    hint = f"near: {', '.join(near_ids)}" if near_ids else "see agentrl list"
    if Path(id).is_dir():
        hint += f"; of a run, agentrl status {id} says what it does"
    raise UnknownIdError(f"nothing is registered as {id!r}; {hint}")


def _entry(kind: registry.Kind, id: str) -> CatalogueEntry:
    if kind == "columns":
        return CatalogueEntry(kind, id, "", repr(column(id)), ())
    try:
        constructor: Any = registry.resolve(kind, id)
    except UsageError as error:
        # A row and no failure: one broken package must not take the list of all others away, which is where its user
        # looks for the reason.
        return CatalogueEntry(kind, id, "", f"cannot be imported: {error}", ())
    import_path = f"{constructor.__module__}:{constructor.__qualname__}"
    parameters = list(parameters_of(constructor))
    named_parameters = [
        parameter for parameter in parameters if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    ]
    return CatalogueEntry(
        kind,
        id,
        import_path,
        inspect.getdoc(constructor) or "",
        tuple(
            Argument(
                parameter.name,
                _annotation(parameter),
                None if parameter.default is parameter.empty else repr(parameter.default),
            )
            for parameter in named_parameters
        ),
        open=len(named_parameters) < len(parameters),
    )


def _annotation(parameter: inspect.Parameter) -> str:
    if parameter.annotation is parameter.empty:
        return ""
    return (
        parameter.annotation
        if isinstance(parameter.annotation, str)
        else inspect.formatannotation(parameter.annotation)
    )
