"""Nim against exhaustive search: the perfect player is perfect, and the learner's part can be won."""

import functools
import re

import pytest

import agentrl
from agentrl.errors import UsageError
from agentrl_environments.nim import NimTable, perfect_player, random_player


@functools.cache
def can_win(heaps):
    """Whether the one to move can win, by trying every game to its end."""
    for heap, stones in enumerate(heaps):
        for taken in range(1, stones + 1):
            rest = tuple(sorted([*heaps[:heap], stones - taken, *heaps[heap + 1 :]]))
            if not can_win(rest):
                return True
    return False


def heaps_in(text):
    return tuple(int(stones) for stones in re.findall(r"[A-Z] (\d+)", text.rpartition("Heaps: ")[2]))


def test_the_perfect_player_never_gives_a_won_game_away():
    for a in range(5):
        for b in range(5):
            for c in range(1, 5):
                move = perfect_player(({"role": "user", "content": f"Heaps: A {a}, B {b}, C {c}."},), None)
                taken, heap = re.fullmatch(r"take (\d+) from ([A-C])", move).groups()
                heaps = [a, b, c]
                assert 1 <= int(taken) <= heaps["ABC".index(heap)]
                heaps["ABC".index(heap)] -= int(taken)
                if can_win(tuple(sorted((a, b, c)))):
                    assert not can_win(tuple(sorted(heaps)))


async def play(env, seed, player):
    observation, _ = await env.areset(seed=seed)
    history = list(observation)
    while True:
        observation, _, terminated, _, info = await env.astep(player(tuple(history), env.np_random))
        history.extend(observation)
        if terminated:
            return info


async def test_perfect_play_always_wins_the_learners_part():
    env = agentrl.make("agentrl/Nim-v0")
    roles = set()
    for seed in range(40):
        observation, _ = await env.areset(seed=seed)
        assert can_win(tuple(sorted(heaps_in(observation[-1]["content"])))), "the position to move in is winnable"
        roles.add(env.role)
        assert (await play(env, seed, perfect_player))["success"]
    assert roles == {"first", "second"}


async def test_random_play_mostly_loses_against_the_perfect_player():
    env = agentrl.make("agentrl/Nim-v0")
    wins = [(await play(env, seed, random_player))["success"] for seed in range(100)]
    assert 0 < sum(wins) < 60


async def test_the_table_refuses_illegal_moves_with_the_reason():
    env = NimTable()
    observation, info = await env.areset(seed=0, options={"heaps": [2, 1]})
    assert observation[0]["content"].endswith("Heaps: A 2, B 1.") and "Whoever takes the last stone" in str(observation)
    for text, said in [("pass", "no move found"), ("take 3 from A", "A does not hold 3"), ("take 1 from C", "C does")]:
        await env.areset(seed=0, options={"heaps": [2, 1]})
        assert said in (await env.astep(text))[0][0]["content"]
    observation, *_ = await env.astep("I think, so: TAKE 2 from a")
    assert observation[0]["content"].startswith("Nim.") and "The other player: take 2 from A." in str(observation)
    *_, terminated, _, info = await env.astep("take 1 from B")
    assert terminated and info["outcomes"] == {"first": 0.0, "second": 1.0}


def test_both_pass_the_checker():
    assert agentrl.check_env("agentrl/Nim-v0", actions=["take 1 from A", "take 1 from B", "?"]).findings == ()
    assert agentrl.check_env("agentrl/NimTable-v0", actions=["take 1 from A", "take 1 from C"]).findings == ()


def test_settings_are_checked():
    with pytest.raises(UsageError, match="opponent = 'me'"):
        agentrl.make("agentrl/Nim-v0", opponent="me")
    with pytest.raises(UsageError, match="heaps = 0"):
        agentrl.make("agentrl/NimTable-v0", heaps=0)
