"""One id from a turn to its lines in the logs of worker, tool and engine."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

import agentrl
from agentrl.engine.rendering.renderer import Renderer
from agentrl.host import json_log
from agentrl.rollout.episode import play
from agentrl.store import RunStore

from .saying import saying

log = logging.getLogger("my_tool")


class Looking(agentrl.ToolEnv):
    limits = agentrl.EpisodeLimits(turns=2)

    def prompt(self, task: Any) -> str:
        return "go"

    @agentrl.tool
    def look(self, where: str) -> str:
        """Look. It runs in a thread."""
        log.warning("looked")
        return "nothing"

    def grade(self) -> bool:
        return True


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "worker-0.log"
    handler = json_log.JsonHandler(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), "worker-0")
    ours = logging.getLogger("agentrl")
    level = ours.level
    ours.setLevel(logging.INFO)
    logging.getLogger().addHandler(handler)
    yield path
    logging.getLogger().removeHandler(handler)
    ours.setLevel(level)


async def test_the_request_that_an_engine_gets_is_in_every_line_of_its_turn(
    store: RunStore, claim_one: Any, context: Any, renderer: Renderer, logged: Path
) -> None:
    env, claim = Looking(), claim_one()
    engine = saying(renderer, env.call("look", where="here"))
    await play(claim, context(env, engine, max_context=10_000, max_tokens_per_turn=200))
    rows = [json.loads(line) for line in (await trio.Path(logged).read_text()).splitlines()]
    assert {row["episode"] for row in rows} == {claim.episode_id}
    assert {row["task"] for row in rows} == {claim.task.index}
    assert len(engine.requests) == 2
    for index, request in enumerate(engine.requests):
        of_turn = [row for row in rows if row.get("turn") == index]
        assert {row["request"] for row in of_turn} == {request.request_id}
        by = [(row["logger"], row.get("tool")) for row in of_turn]
        assert by.count(("my_tool", "look")) == 1
        assert by.count(("agentrl.rollout.episode", None)) == 2
    assert rows[-1]["message"] == "the episode ended: turn_limit"
