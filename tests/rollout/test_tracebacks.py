"""An exception in somebody's own code: its place is in the message, and the first traceback of each kind in the log."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
from each_case import each_case

from agentrl.errors import Tracebacks, UsageError, place_of, split_place
from agentrl.protocols import Rewarder
from agentrl.records import StopReason, Task
from agentrl.registry import load_reference
from agentrl.rollout.episode import play
from agentrl.store import RunStore

from .conftest import ScriptedEnv, done

USER_CODE = '''\
"""Somebody's environment."""

import json


def parse(text):
    return json.loads(text)


def look_up(text):
    return {}[text]


def reward(seen):
    return parse("{")["reward"]
'''


@pytest.fixture
def user_code(tmp_path: Path) -> Path:
    file = tmp_path / "user_code.py"
    file.write_text(USER_CODE)
    return file


def line_of(text: str) -> int:
    return 1 + USER_CODE.splitlines().index(text)


def raised_by(call: Any, *args: Any) -> Exception:
    try:
        call(*args)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_place_is_the_users_line_and_not_that_of_the_library_it_called(user_code: Path) -> None:
    error = raised_by(load_reference(f"{user_code}:parse"), "{")
    assert isinstance(error, json.JSONDecodeError)
    assert place_of(error) == f"{user_code}:{line_of('    return json.loads(text)')}"


def test_without_a_users_frame_the_place_is_that_of_the_library() -> None:
    error = raised_by(json.JSONDecoder().decode, "{")
    error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of this file
    assert place_of(error).startswith(str(Path(json.__file__).parent / "decoder.py"))


def test_an_error_of_ours_that_no_users_code_led_to_has_no_place() -> None:
    """It was raised within a thread of trio's: a line of trio's would send the reader astray."""
    error = raised_by(trio.run, partial(trio.to_thread.run_sync, load_reference, "no reference"))
    error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None  # without the frame of this file
    assert isinstance(error, UsageError) and place_of(error) == ""


@each_case(
    ("text", "parts"),
    [
        ("x: step raised KeyError: 'a' (/home/me/env.py:12)", ("x: step raised KeyError: 'a'", "/home/me/env.py:12")),
        ("x: step took over 60 s", ("x: step took over 60 s", "")),
        ("no space (12 of 13)", ("no space (12 of 13)", "")),
    ],
)
def test_a_text_is_taken_apart_into_what_and_where(text: str, parts: tuple[str, str]) -> None:
    assert split_place(text) == parts


async def test_a_failed_episode_names_the_users_line_and_the_log_has_the_first_traceback_of_each_kind(
    store: RunStore, claim_one: Any, context: Any, user_code: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.groups.add_groups([Task(index=4, env="test/Env", seed=13)], size=3, purpose="train")
    parse, look_up = load_reference(f"{user_code}:parse"), load_reference(f"{user_code}:look_up")
    shared = Tracebacks()

    async def step(call: Any, text: str) -> Any:
        return call(text)

    async def fail(call: Any, text: str) -> str:
        claim = claim_one()
        of_worker = replace(context(ScriptedEnv([lambda: step(call, text)])), tracebacks=shared)
        ending = await play(claim, of_worker)
        assert ending.stop_reason is StopReason.ENV_FAILED
        return ending.detail

    with caplog.at_level(logging.WARNING):
        details = [await fail(parse, "{"), await fail(parse, "["), await fail(look_up, "missing")]
    assert details[0].endswith(f" ({user_code}:{line_of('    return json.loads(text)')})")
    assert details[2] == f"test/Env: step raised KeyError: 'missing' ({user_code}:{line_of('    return {}[text]')})"
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 2, "one for each kind"
    assert logged[0].startswith("test/Env, seed 13 (task 4, episode 1): test/Env: step raised JSONDecodeError: ")
    assert "in parse\n    return json.loads(text)" in logged[0]
    assert "in look_up\n    return {}[text]" in logged[1]


async def test_a_reward_of_ones_own_that_raises_is_logged_with_its_line(
    claim_one: Any, context: Any, user_code: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewarder: Rewarder = load_reference(f"{user_code}:reward")
    with caplog.at_level(logging.WARNING):
        ending = await play(claim_one(), replace(context(ScriptedEnv([done()])), rewarder=rewarder))
    assert ending.stop_reason is StopReason.ENV_FAILED
    assert f"{user_code}:{line_of('    return json.loads(text)')}" in ending.detail
    (record,) = caplog.records
    assert "in reward" in record.getMessage() and "Traceback" in record.getMessage()
