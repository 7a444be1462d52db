"""The text game: a house drawn by hand, the solver against trying everything, and what a command may not do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from each_case import each_case

import agentrl
from agentrl.errors import UsageError
from agentrl_environments.text_game import TextGame
from agentrl_environments.text_game.world import DIRECTIONS, State, World, act, begin, draw, solve, won

# cellar ─north─ hall ─east (red door)─ study with the chest; the key is in the cellar
HOUSE = World(
    exits={
        "hall": {"south": "cellar", "east": "study"},
        "cellar": {"north": "hall"},
        "study": {"west": "hall"},
    },
    locks={("hall", "east"): "red", ("study", "west"): "red"},
    start="hall",
    chest="study",
    treasure="crown",
    things={"red key": "cellar", "spoon": "hall", "crown": "study"},
)
SOLUTION = [
    *("go south", "take red key", "go north", "unlock east"),
    *("go east", "open chest", "take crown", "go west"),
]


def after(*commands: str) -> tuple[State, str]:
    state, said = begin(HOUSE), ""
    for command in commands:
        state, said = act(HOUSE, state, command)
    return state, said


def test_the_house_drawn_by_hand_is_solved_as_by_hand() -> None:
    assert solve(HOUSE, begin(HOUSE)) == SOLUTION
    assert won(HOUSE, after(*SOLUTION)[0])
    assert not won(HOUSE, after(*SOLUTION[:-1])[0])


@each_case(
    ("commands", "said"),
    [
        (["look"], "You are in the hall. Ways: south, east (red door, locked). You see spoon."),
        (["go east"], "The red door is locked."),
        (["unlock east"], "You need the red key."),
        (["go up"], "There is no way up."),
        (["unlock south"], "There is no locked door south."),
        (["take crown"], "There is no crown to take here."),
        (["take the  SPOON", "inventory"], "You carry spoon."),
        (
            ["take spoon", "go south", "drop spoon", "look"],
            "You are in the cellar. Ways: north. You see red key, spoon.",
        ),
        (["inventory"], "You carry nothing."),
        (["open chest"], "There is no chest to open here."),
        (SOLUTION[:5], "You are in the study. Ways: west. You see a closed chest."),
        ([*SOLUTION[:5], "take crown"], "There is no crown to take here."),
        (SOLUTION[:6], "The chest is open. Inside: crown."),
        (["drop"], "You do not carry that."),
        ([""], "That means nothing here."),
        (["go"], "There is no way without a direction."),
    ],
)
def test_what_a_command_says(commands: list[str], said: str) -> None:
    assert after(*commands)[1].startswith(said)


def shortest_by_trying(world: World) -> int:
    """How many commands the shortest win takes: every command there is, tried from every state, level by level."""
    things = [*world.things]
    commands = [f"{verb} {direction}" for verb, direction in itertools.product(("go", "unlock"), DIRECTIONS)]
    commands += [f"{verb} {thing}" for verb, thing in itertools.product(("take", "drop"), things)] + ["open chest"]
    level, seen = [begin(world)], {begin(world).key}
    for length in itertools.count(1):
        following = []
        for state, command in itertools.product(level, commands):
            at, _ = act(world, state, command)
            if won(world, at):
                return length
            if at.key not in seen:
                seen.add(at.key)
                following.append(at)
        level = following
    raise AssertionError


@each_case("seed", range(12))
def test_the_solver_is_as_short_as_trying_everything(seed: int) -> None:
    world = draw(np.random.default_rng(seed), rooms=3, locks=seed % 3)
    solution = solve(world, begin(world))
    assert solution is not None
    assert len(solution) == shortest_by_trying(world)


def test_locked_doors_lie_on_the_way() -> None:
    for seed in range(40):
        world = draw(np.random.default_rng(seed), rooms=6, locks=1)
        assert any(command.startswith("unlock") for command in solve(world, begin(world)) or [])


def test_shaping_adds_up_to_the_whole_way_and_pays_back_what_a_detour_earned() -> None:
    env = TextGame(shaped=True)
    env.reset(seed=3)
    way = list(env._solution)
    rewards = [env.step(command)[1] for command in way]
    assert sum(rewards) == pytest.approx(1.0)
    env.reset(seed=3)
    direction = way[0].removeprefix("go ")
    back = {"north": "south", "south": "north", "east": "west", "west": "east"}[direction]
    assert [round(env.step(f"go {d}")[1] * len(way)) for d in (direction, back)] == [1, -1]
    assert env.step("look")[1] == 0.0
    short = TextGame(shaped=True, turns=1)
    short.reset(seed=3)
    assert short.step(way[0])[1] == pytest.approx(0.0), "who does not arrive has earned nothing"
    assert TextGame().reset(seed=3)[0] == env.reset(seed=3)[0], "shaping changes nothing that is seen"


def test_the_last_line_is_the_command_and_turns_run_out() -> None:
    env = TextGame(turns=2)
    env.reset(seed=3)
    observation, *_ = env.step("I think that I should look around.\n\nlook\n")
    assert observation[0]["content"].startswith("You are in the ")
    _, _, terminated, truncated, info = env.step("\ud800 nonsense")
    assert (terminated, truncated) == (False, True)
    assert info == {"stop_reason": "turn_limit", "outcome": 0.0, "success": False}


@each_case("wrong", [{"rooms": 1}, {"rooms": 99}, {"locks": 4}, {"rooms": 2, "locks": 2}, {"turns": 0}])
def test_impossible_houses_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(reversed(wrong)))):
        TextGame(**wrong)


def test_the_checker_finds_nothing() -> None:
    assert agentrl.check_env(lambda: TextGame(shaped=True), actions=["go north", "look", "take spoon", "go south"])
