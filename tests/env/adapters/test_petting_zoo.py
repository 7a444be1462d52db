"""PettingZoo's tic-tac-toe and rock-paper-scissors, played by roles to their real rewards."""

import numpy as np
import pytest

import agentrl
from agentrl.env.adapters.pettingzoo_env import PettingZoo
from agentrl.env.multi_agent import OneRole
from agentrl.errors import UsageError

pytestmark = pytest.mark.adapters
TIC_TAC_TOE = "pettingzoo.classic.tictactoe_v3:env"


async def play(env, moves, **options):
    observation, info = await env.areset(seed=0, options=options)
    steps = [(observation, 0.0, False, False, info)]
    for move in moves:
        steps.append(await env.astep(move))
    return steps


async def test_tic_tac_toe_by_its_rules():
    env = PettingZoo(TIC_TAC_TOE, rules="Three in a row wins.")
    steps = await play(env, ["0", "action: 3", "1", "I take\nMove: 4", "2."])
    assert [step[4].get("role") for step in steps] == ["player_1", "player_2", "player_1", "player_2", "player_1", None]
    first = steps[0][0][0]["content"]
    assert first.startswith("Three in a row wins.\nYou are player_1.\n")
    assert first.endswith("Possible actions: 0, 1, 2, 3, 4, 5, 6, 7, 8.")
    assert steps[2][0][0]["content"].endswith("Possible actions: 1, 2, 4, 5, 6, 7, 8.")
    assert steps[-1][2] and steps[-1][4]["outcomes"] == {"player_1": 1.0, "player_2": -1.0}
    await env.aclose()


async def test_what_is_taken_is_refused_and_at_last_forfeits():
    env = PettingZoo(TIC_TAC_TOE)
    steps = await play(env, ["0", "0", "somewhere", "0"])
    assert steps[2][0][0]["content"].startswith("not possible: 0 is not possible now; possible: 1, 2,")
    assert "write the name of one possible action" in steps[3][0][0]["content"]
    assert steps[4][2] and steps[4][4]["outcomes"] == {"player_1": 0.0, "player_2": -1.0}
    assert steps[4][4]["stop_reason"] == "parse_failure"


async def test_every_role_returns_what_pettingzoo_gave_it():
    """Rock-paper-scissors rewards only when both have moved; the sum over cycles is the outcome."""
    env = PettingZoo(
        "pettingzoo.classic.rps_v2:env", kwargs={"max_cycles": 3}, actions=("rock", "paper", "scissors", "none")[:3]
    )
    steps = await play(env, ["paper", "rock", "paper", "rock", "rock", "rock"])
    assert steps[-1][3] and steps[-1][4]["outcomes"] == {"player_0": 2.0, "player_1": -2.0}


def first_legal(heard, rng):
    return heard[-1]["content"].rpartition("Possible actions: ")[2].strip(".").split(", ")[0]


async def test_one_role_learns_against_a_given_player():
    env = OneRole(PettingZoo(TIC_TAC_TOE), role="player_2", others=first_legal)
    observation, _ = await env.areset(seed=0)
    assert "You are player_2." in observation[0]["content"]
    await env.astep("4")
    *_, terminated, _, info = await env.astep("8")
    assert terminated and info["outcome"] == -1.0 and info["success"] is False


def test_passes_the_checker():
    make = lambda: PettingZoo(TIC_TAC_TOE)  # noqa: E731
    assert agentrl.check_env(make, actions=[str(n) for n in range(9)]).findings == ()


def test_what_cannot_be_played_is_refused():
    with pytest.raises(UsageError, match="no AEC environment"):
        PettingZoo(lambda: object())
    from pettingzoo.classic import tictactoe_v3

    class Wide:
        possible_agents = ("a",)
        agent_selection = "a"

        def action_space(self, agent):
            import gymnasium

            return gymnasium.spaces.Box(0, 1, (2,), np.float32)

    with pytest.raises(UsageError, match="a take no Discrete actions"):
        PettingZoo(Wide())
    with pytest.raises(UsageError, match="2 action names for 9"):
        PettingZoo(tictactoe_v3.env(), actions=("a", "b"))


async def test_a_game_without_a_mask_that_raises_on_a_move_is_tried_again(monkeypatch):
    env = PettingZoo("pettingzoo.classic.rps_v2:env")
    await env.areset(seed=0)
    step = env._env.step

    def strict(action):
        if action == 2:
            raise ValueError("a move against the rules")
        step(action)

    monkeypatch.setattr(env._env, "step", strict)
    observation, _, terminated, _, info = await env.astep("2")
    assert not terminated and info["role"] == "player_0"
    assert (
        observation[0]["content"] == "not possible: the game cannot take 2 now (ValueError: a move against the rules)"
    )
    assert (await env.astep("1"))[4]["role"] == "player_1"
    await env.aclose()
