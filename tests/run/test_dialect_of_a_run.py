"""At its start a run says which tools its chat template leaves out, and refuses what the environment could not read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.config import parse
from agentrl.errors import ConfigError
from agentrl.run import trainer

UNTOLD = "the chat template of 'm' writes no tools (they go into the system message)"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    def checked(dialect: str | None, untold: str | None, own: str | None, tools: bool = True) -> str | None:
        renderer = SimpleNamespace(tool_format=dialect, untold=untold)
        monkeypatch.setattr(trainer, "renderer_of", lambda _: renderer)
        env = SimpleNamespace(schemas=[{"name": "f"}] if tools else [], tool_format=own)
        return trainer._check_dialect(SimpleNamespace(model="m"), env)  # type: ignore[arg-type]

    return checked


def test_what_a_template_leaves_out_is_said_in_one_line_whatever_arguments_the_environment_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer, "renderer_of", lambda _: SimpleNamespace(tool_format="json", untold=UNTOLD))
    harder = [{"name": "harder", "n": 2, "kwargs": {"terms": 3}}]
    trainer._check_environments(parse({"model": "m", "env": {"id": "agentrl/Calculator-v0"}, "eval": {"sets": harder}}))
    assert capsys.readouterr().err == f"agentrl: agentrl/Calculator-v0: {UNTOLD}\n"


@pytest.mark.parametrize(
    ("dialect", "untold", "own", "tools"),
    [
        ("hermes", None, None, True),
        ("json", UNTOLD, "react", True),
        (None, None, None, False),
        (None, None, "glm", True),
    ],
)
def test_nothing_is_said_where_all_is_well(
    dialect: str | None,
    untold: str | None,
    own: str | None,
    tools: bool,
    check: Any,
) -> None:
    assert check(dialect, untold, own, tools) is None


def test_a_dialect_that_the_model_is_not_told_is_refused(check: Any) -> None:
    with pytest.raises(ConfigError, match=r"tool_format = 'hermes'.*leave it out, or give json"):
        check("json", UNTOLD, "hermes")


def test_an_unknown_dialect_asks_for_one(check: Any) -> None:
    with pytest.raises(ConfigError, match="not known here: give one of hermes"):
        check(None, None, None)
