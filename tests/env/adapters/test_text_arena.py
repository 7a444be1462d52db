"""Real games of TextArena: alone, and two roles at one table."""

import random
import re

import pytest
from each_case import each_case

import agentrl
from agentrl.env.adapters.textarena import TextArena
from agentrl.env.multi_agent import OneRole
from agentrl.errors import UsageError

pytestmark = pytest.mark.adapters


async def test_guess_the_number_is_won_by_bisection():
    env = TextArena("GuessTheNumber-v0")
    for seed in range(5):
        observation, info = await env.areset(seed=seed)
        assert info == {"role": "player_0"} and "between 1 and 20" in observation[0]["content"]
        low, high, terminated = 1, 20, False
        while not terminated:
            guess = (low + high) // 2
            observation, _, terminated, _, info = await env.astep(f"Maybe [{guess}]?")
            if not terminated:
                assert "Maybe" not in observation[0]["content"], "one's own words are no news"
                low, high = (guess + 1, high) if "higher" in observation[0]["content"] else (low, guess - 1)
        assert info["outcome"] == 1.0 and info["outcomes"] == {"player_0": 1.0}


async def test_two_roles_play_tic_tac_toe():
    env = TextArena("TicTacToe-v0", players=2)
    observation, info = await env.areset(seed=1)
    seen = {info["role"]: observation[0]["content"]}
    for move in ("4", "0", "2", "1"):
        observation, _, terminated, _, info = await env.astep(f"[{move}]")
        seen.setdefault(info["role"], observation[0]["content"])
        assert not terminated
    assert "As Player 0" in seen["player_0"] and "As Player 1" in seen["player_1"]
    assert "[1]" in observation[0]["content"], "what the other one said is news"
    observation, _, terminated, _, info = await env.astep("[6]")
    assert terminated and info["outcomes"] == {"player_0": 1.0, "player_1": -1.0}


def first_free(heard, rng):
    return re.findall(r"'(\[\d\])'", heard[-1]["content"])[-1]


async def test_one_role_against_a_given_player():
    env = OneRole(TextArena("TicTacToe-v0", players=2), role="player_1", others=first_free)
    observation, _ = await env.areset(seed=0)
    info = {}
    for _ in range(5):
        observation, _, terminated, _, info = await env.astep(first_free(observation, None))
        if terminated:
            break
    assert terminated and info["outcome"] in (-1.0, 0.0, 1.0)


async def test_the_global_generators_are_left_alone():
    random.seed(7)
    expected = random.Random(7).random()
    env = TextArena("GuessTheNumber-v0")
    await env.areset(seed=3)
    await env.astep("[1]")
    assert random.random() == expected


def test_passes_the_checker():
    make = lambda: TextArena("GuessTheNumber-v0")  # noqa: E731
    assert agentrl.check_env(make, actions=["[3]", "[9]", "none"]).findings == ()


def test_what_it_cannot_make_is_named():
    with pytest.raises(UsageError, match="textarena makes no 'Nothing-v0'"):
        TextArena("Nothing-v0")


async def test_a_game_for_two_refuses_one():
    with pytest.raises(UsageError, match="1 players cannot play"):
        await TextArena("TicTacToe-v0").areset(seed=0)


@each_case("text", ["[" + "9" * 5_000 + "]", "", "[]", "\0", "[-1]", "[" * 5_000])
async def test_no_text_of_the_policy_is_a_failure_of_the_game(text):
    env = TextArena("GuessTheNumber-v0")
    await env.areset(seed=0)
    for _ in range(6):
        _, _, terminated, truncated, info = await env.astep(text)
        if terminated or truncated:
            break
    assert not terminated or info["stop_reason"] in ("done", "parse_failure")
