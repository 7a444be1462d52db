"""gymnasium's own environments as language environments: played to the end, with the rules they really have."""

import json
from collections import deque
from typing import Any

import gymnasium
import numpy as np
import pytest
from each_case import each_case
from gymnasium.wrappers import TimeLimit

import agentrl
from agentrl.env.adapters.gym import Blackjack, FrozenLake, Taxi, TextGym
from agentrl.env.tools.calls import ToolCall
from agentrl.env.tools.parsers import get_format
from agentrl.errors import UsageError

HERMES = get_format("hermes")
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def act(action):
    return HERMES.write(ToolCall("act", {"action": action}))


def shortest_path(drawn, goal="G"):
    """An oracle of its own: breadth-first search from @ over what the model is shown."""
    rows = [line.split() for line in drawn.splitlines()]
    size = len(rows)
    start = next((r, c) for r in range(size) for c in range(size) if rows[r][c] == "@")
    queue, came = deque([start]), {start: []}
    while queue:
        at = queue.popleft()
        if rows[at[0]][at[1]] == goal:
            return came[at]
        for name, (dr, dc) in MOVES.items():
            to = (at[0] + dr, at[1] + dc)
            if 0 <= to[0] < size and 0 <= to[1] < size and to not in came and rows[to[0]][to[1]] in ("F", goal):
                came[to] = [*came[at], name]
                queue.append(to)
    raise AssertionError("no way")


async def test_frozen_lake_is_crossed_by_the_shortest_path():
    maps = set()
    async with FrozenLake(size=5) as env:
        for seed in range(5):
            opening, _ = await env.areset(seed=seed)
            drawn = opening[-1]["content"].split("\n\n")[-1]
            maps.add(drawn)
            path = shortest_path(drawn)
            rewards = []
            for number, move in enumerate(path):
                _, reward, terminated, _, info = await env.astep(act(move) if number % 2 else f"{move}.")
                rewards.append(reward)
                assert terminated == (number == len(path) - 1)
            assert rewards == [0.0] * (len(path) - 1) + [1.0]
            assert info["success"] and info["return"] == 1.0 and info["outcome"] == 0.0
    assert len(maps) > 1, "maps follow the seed"


async def test_a_hole_ends_the_walk_without_success():
    async with FrozenLake() as env:
        opening, _ = await env.areset(seed=3)
        for move in shortest_path(opening[-1]["content"].split("\n\n")[-1], "H"):
            _, reward, terminated, _, info = await env.astep(move)
        assert terminated and reward == 0.0 and not info["success"]


async def test_taxi_masks_what_does_nothing_and_delivers():
    async with Taxi() as env:
        opening, _ = await env.areset(seed=1)
        assert "The passenger waits at" in opening[-1]["content"]
        observation, reward, *_ = await env.astep(act("pickup"))
        assert observation[0]["content"].startswith("error: pickup is not possible now; possible: ")
        assert reward == 0.0, "what was not played costs nothing"
        total, terminated = 0.0, False
        for action in solve(env):
            _, reward, terminated, _, info = await env.astep(act(action))
            total += reward
        assert terminated and reward == 20.0 and info["success"] and info["return"] == total


def solve(env):
    """Breadth-first search over gymnasium's own transition table."""
    taxi = env._gym.unwrapped
    names = ("south", "north", "east", "west", "pickup", "dropoff")
    queue, came = deque([int(taxi.s)]), {int(taxi.s): []}
    while queue:
        at = queue.popleft()
        for number, name in enumerate(names):
            ((_, to, _, done),) = taxi.P[at][number]
            if done:
                return [*came[at], name]
            if to not in came:
                came[to] = [*came[at], name]
                queue.append(to)
    raise AssertionError("no way")


async def test_blackjack_is_played_to_its_end():
    results = set()
    async with Blackjack() as env:
        for seed in range(30):
            opening, _ = await env.areset(seed=seed)
            assert "The dealer shows" in opening[-1]["content"]
            total, terminated = 0.0, False
            while not terminated:
                have = int(env._gym.unwrapped._get_obs()[0])
                _, reward, terminated, _, info = await env.astep("stick" if have >= 17 else act("hit"))
                total += reward
            assert info["success"] == (total >= 1.0)
            results.add(total)
    assert results >= {-1.0, 1.0}


@pytest.mark.medium
@each_case("cls", [FrozenLake, Taxi, Blackjack])
def test_passes_the_checker(cls):
    assert agentrl.check_env(cls).findings == ()


async def test_any_environment_by_its_id():
    async with TextGym("CliffWalking-v1", limits={"turns": 3}) as env:
        opening, _ = await env.areset(seed=0)
        assert opening[0]["content"].startswith("Actions: 0, 1, 2, 3.")
        assert "x" in opening[0]["content"]
        _, reward, *_ = await env.astep("0")
        assert reward == -1.0
        observation, reward, *_ = await env.astep("9")
        assert observation[0]["content"] == "invalid call: write one of 0, 1, 2, 3, or call act"
        observation, *_ = await env.astep(act("up"))
        assert observation[0]["content"].startswith("wrong arguments: act: argument 'action': 'up' is not one of")


async def test_box_and_multi_actions_are_lists():
    async with TextGym("MountainCarContinuous-v0") as env:
        await env.areset(seed=0)
        assert env.schemas[0]["parameters"]["properties"]["action"] == {
            "type": "array",
            "items": {"type": "number", "minimum": -1.0, "maximum": 1.0},
            "minItems": 1,
            "maxItems": 1,
        }
        observation, reward, *_ = await env.astep(act([0.5]))
        assert len(eval(observation[0]["content"])) == 2 and reward == pytest.approx(-0.025)
        assert "greater than the maximum" in (await env.astep(act([3.0])))[0][0]["content"]

    class Buttons(gymnasium.Env):
        action_space = gymnasium.spaces.MultiDiscrete([2, 3])
        observation_space = gymnasium.spaces.Dict({"n": gymnasium.spaces.Box(0, 1, (2,))})

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return {"n": np.zeros(2)}, {}

        def step(self, action):
            return {"n": action / 2}, np.float32(action.sum()), False, False, {}

    async with TextGym(Buttons()) as env:
        opening, _ = await env.areset(seed=0)
        assert opening[0]["content"] == '{"n": [0.0, 0.0]}'
        observation, reward, *_ = await env.astep(act([1, 2]))
        assert (observation[0]["content"], reward) == ('{"n": [0.5, 1.0]}', 3.0)
        observation, *_ = await env.astep(act([1, 3]))
        assert observation[0]["content"].startswith("error: [1, 3] is outside of MultiDiscrete")
        assert (await env.astep("1"))[0][0]["content"] == "malformed call: no tool call found; call act"


def test_what_cannot_be_played_is_refused():
    with pytest.raises(UsageError, match="2 action names for 4 actions"):
        TextGym("FrozenLake-v1", actions=("left", "right"))
    with pytest.raises(UsageError, match="made already"):
        TextGym(gymnasium.make("FrozenLake-v1"), kwargs={"map_name": "8x8"})
    with pytest.raises(UsageError, match="not of Box"):
        TextGym("Pendulum-v1", actions=("a",))

    class Graph(gymnasium.Env):
        action_space = gymnasium.spaces.Dict({"a": gymnasium.spaces.Discrete(2)})

    with pytest.raises(UsageError, match="no small JSON form"):
        TextGym(Graph())


@each_case("number", [10**400, -(10**30), 2**63, 1e300, 1.5, -0.0])
async def test_numbers_that_no_array_holds_are_the_policys_fault(number):
    spaces = gymnasium.spaces
    for space in (spaces.MultiDiscrete([3, 3]), spaces.MultiBinary(2), spaces.Box(-np.inf, np.inf, (2,))):
        made = gymnasium.make("CartPole-v1")
        made.unwrapped.action_space = made.action_space = space
        async with TextGym(made) as env:
            await env.areset(seed=0)
            env._gym.step = lambda _: (np.zeros(2), 0.0, False, False, {})
            observation, *_ = await env.astep(env.call("act", action=[number, 1]))
            assert observation[0]["content"]


class Walk(gymnasium.Env[Any, Any]):
    observation_space, action_space = gymnasium.spaces.Discrete(100), gymnasium.spaces.Discrete(2)

    def __init__(self, last: int = 99, seen: Any = None) -> None:
        self.last, self.seen = last, seen

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = 0
        return (0 if self.seen is None else self.seen), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return self.at, 1.0, self.at >= self.last, False, {}


@pytest.mark.parametrize(("last", "ended"), [(99, (False, True, "truncated")), (2, (True, False, "done"))])
def test_a_time_limit_truncates_and_the_task_itself_terminates(last: int, ended: tuple[bool, bool, str]) -> None:
    env = TextGym(TimeLimit(Walk(last), max_episode_steps=2))
    env.reset(seed=0)
    assert env.step(env.call("act", action="0"))[2:4] == (False, False)
    *_, terminated, truncated, info = env.step(env.call("act", action="0"))
    assert (terminated, truncated, info["stop_reason"]) == ended


def test_an_observation_is_shown_as_json() -> None:
    seen = {"a": np.float32(1.5), "ok": np.bool_(True), "b": None, "many": np.arange(3), 1: ("x", "é")}
    text = str(TextGym(Walk(seen=seen)).reset(seed=0)[0][0]["content"])
    expected = {"a": 1.5, "ok": True, "b": None, "many": [0, 1, 2], "1": ["x", "é"]}
    assert json.loads(text.partition("\n\n")[2]) == expected and "é" in text
