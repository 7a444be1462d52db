"""What `agentrl list` and `agentrl show` say of everything that is installed."""

from __future__ import annotations

import pytest
from each_case import each_case

from agentrl import registry
from agentrl.cli.registered_ids import KINDS, entries, find
from agentrl.errors import UnknownIdError


@each_case("kind", KINDS)
def test_everything_that_is_installed_says_what_it_is(kind: registry.Kind) -> None:
    found = entries(kind)
    assert [entry.id for entry in found] == registry.ids(kind)
    for entry in found:
        assert entry.summary and not entry.summary.startswith("cannot be imported"), entry.id


def test_arguments_are_those_of_the_class_then_those_it_passes_on() -> None:
    entry = find("agentrl/ReasoningGym-v0")
    names = [argument.name for argument in entry.arguments]
    assert names[:2] == ["task", "config"] and "limits" in names
    assert {argument.name: argument.default for argument in entry.arguments}["task"] is None
    given = find("agentrl/Verifiers-v0")  # what it passes on itself is no argument of its own
    assert "program" not in [argument.name for argument in given.arguments]


def test_what_is_not_there_names_what_is_near() -> None:
    with pytest.raises(UnknownIdError, match="nothing is registered as 'shel'; near: shell"):
        find("shel")
    with pytest.raises(UnknownIdError, match="see agentrl list"):
        find("zzzzzz")


def test_what_cannot_be_imported_is_said_and_stops_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, ("tools", "broken"), "no_such_module:Tool")
    (entry,) = [entry for entry in entries("tools") if entry.id == "broken"]
    assert entry.summary.startswith("cannot be imported: ")
