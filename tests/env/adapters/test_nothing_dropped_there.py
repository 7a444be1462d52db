"""No action drops an episode of another package's environment: a server, a rewarded taskset, a class of methods."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import serving

from agentrl.env.adapters.openenv_env import OpenEnv
from agentrl.env.adapters.trl_env import TrlEnv
from agentrl.env.adapters.verifiers_env import Verifiers
from agentrl.testing.hostile import check_nothing_dropped

pytestmark = pytest.mark.adapters


def trusting_app() -> Any:
    """A server of a typed action whose author trusts the policy."""
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Move(Action):
        amount: int
        note: str = ""

    class Seen(Observation):
        count: int

    class Trusting(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            return Seen(count=0)

        def step(self, action, timeout_s=None, **kwargs):
            if action.note:
                json.loads(action.note)
            return Seen(count=[0, 5, 7][action.amount], reward=1.0, done=False)

        @property
        def state(self):
            return State()

    return create_app(Trusting, Move, Seen, max_concurrent_envs=16)


def text_app() -> Any:
    """A server whose action is the policy's text."""
    from openenv.core.env_server.http_server import create_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Say(Action):
        text: str

    class Number(Observation):
        number: float

    class Trusting(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            return Number(number=0)

        def step(self, action, timeout_s=None, **kwargs):
            return Number(number=float(action.text), reward=float(action.text))

        @property
        def state(self):
            return State()

    return create_app(Trusting, Say, Number, max_concurrent_envs=16)


@pytest.mark.parametrize("app", [trusting_app, text_app])
async def test_no_action_drops_an_episode_of_an_openenv_server(app: Any) -> None:
    with serving(app()) as url:
        await check_nothing_dropped(
            lambda: OpenEnv(url, instructions="Go."), seeds=range(2), actions=["1", "nan", "inf"]
        )


class Trusting:
    """As a beginner writes one for TRL: everything trusts the policy."""

    def reset(self, **row: Any) -> None:
        self.seen: list[str] = []

    def look(self, place: str, times: int) -> str:
        """Look somewhere.

        Args:
            place: Where.
            times: How often.
        """
        self.seen.append(place)
        return str(json.loads(place))[times]

    def get_reward(self) -> float:
        return float(self.seen[-1])


async def test_no_action_drops_an_episode_of_a_class_for_trl() -> None:
    await check_nothing_dropped(lambda: TrlEnv(Trusting, prompt="Go."), seeds=range(3))


@pytest.mark.slow
async def test_no_action_drops_an_episode_of_a_taskset_for_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    await check_nothing_dropped(
        lambda: Verifiers("vf_trusting", tasks=2), seeds=range(1), turns=4, actions=["1", "x", '{"a": 1}', ""]
    )
