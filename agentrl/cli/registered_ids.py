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
        text = re.sub(rf"^`{re.escape(self.id)}`[.:] *", "", " ".join(self.text.split()))
        return text.partition(". ")[0].rstrip(".")


def entries(kind: registry.Kind) -> list[CatalogueEntry]:
    """All entries of a kind, sorted by id."""
    return [_entry(kind, id) for id in registry.ids(kind)]


def find(id: str) -> CatalogueEntry:
    """The entry of an id of any kind, or of a reference `module:Class` or `file.py:Class`. Raises UnknownIdError, which
    names the nearest known ids."""
    for kind in KINDS:
        if id in registry.ids(kind):
            return _entry(kind, id)
    if ":" in id:
        return _entry("environments", id)
    near_ids = registry.nearest(id, [known_id for kind in KINDS for known_id in registry.ids(kind)])
    hint = f"near: {', '.join(near_ids)}" if near_ids else "see agentrl list"
    if Path(id).is_dir():
        hint += f"; of a run, agentrl status {id} says what it does"
    raise UnknownIdError(f"nothing is registered as {id!r}; {hint}")


def _entry(kind: registry.Kind, id: str) -> CatalogueEntry:
    if kind == "columns":
        return CatalogueEntry(kind, id, "", repr(column(id)), ())
    try:
        maker: Any = registry.resolve(kind, id)
    except UsageError as error:
        # A row and no failure: one broken package must not take the list of all others away, which is where its user
        # looks for the reason.
        return CatalogueEntry(kind, id, "", f"cannot be imported: {error}", ())
    target = f"{maker.__module__}:{maker.__qualname__}"
    parameters = list(parameters_of(maker))
    plain = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return CatalogueEntry(
        kind,
        id,
        target,
        inspect.getdoc(maker) or "",
        tuple(Argument(p.name, _annotation(p), None if p.default is p.empty else repr(p.default)) for p in plain),
        open=len(plain) < len(parameters),
    )


def _annotation(parameter: inspect.Parameter) -> str:
    if parameter.annotation is parameter.empty:
        return ""
    return (
        parameter.annotation
        if isinstance(parameter.annotation, str)
        else inspect.formatannotation(parameter.annotation)
    )
