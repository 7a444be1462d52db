"""TextArena's games under illegal moves, which are the policy's doing; and those that cannot be played here."""

from __future__ import annotations

import random
import signal
from types import FrameType
from typing import Any

import pytest
from each_case import each_case

from agentrl.env.adapters.textarena import TextArena
from agentrl.errors import UsageError

pytestmark = pytest.mark.adapters

ILLEGAL = ["", "hello", "[9]", "[0]", "[1 2]", "[" + "9" * 5_000 + "]", "[-1]", "[a b]", "\0", "[A1 B2]", "[Fold]"]
ILLEGAL += ["[e2e4]", "[up]", "[[" * 500, "[submit]", "[crane]", "[1,1]", "[Player 1]", "[cooperate]", "²[²]", "[1 ٣]"]
RESETS_FAIL = {"SpiteAndMalice-v0-raw", "Stratego-v0-raw", "Sokoban-v0-medium-raw"}  # or take minutes, for some seeds
PLAYERS = (1, 2, 3, 4, 5, 6)


class Hangs(BaseException):
    """A call of a game took over 30 s."""


def ids() -> list[str]:
    try:
        from textarena.envs.registration import ENV_REGISTRY  # pyright: ignore
    except ImportError:
        return []
    families: dict[str, str] = {}
    for id in sorted(ENV_REGISTRY):
        if id.endswith("-raw"):
            families.setdefault(id.partition("-v")[0], id)
    return list(families.values())


async def play_badly(game: str, players: int, seed: int, turns: int) -> dict[str, Any]:
    """The info of the last of at most `turns` random illegal moves."""
    rng, env, info = random.Random(seed), TextArena(game, players=players), {}
    await env.areset(seed=seed)
    for _ in range(turns):
        _, _, terminated, truncated, info = await env.astep(rng.choice(ILLEGAL))
        if terminated or truncated:
            break
    return info


@each_case("seed", range(4))
async def test_a_game_that_mixes_up_reward_and_reason_gives_minus_one(seed: int) -> None:
    for game in ("Countdown-v0", "Cryptarithm-v0"):
        assert (await play_badly(game, 1, seed, 10))["outcome"] == -1.0


async def test_a_game_ends_once_invalid_moves_have_eliminated_all() -> None:
    env, info = TextArena("PublicGoodsGame-v0"), dict[str, Any]()
    await env.areset(seed=0)
    for _ in range(50):
        _, _, terminated, _, info = await env.astep("[9999]")
        if terminated:
            break
    assert info["outcomes"] == {"player_0": -1.0}


async def test_who_forfeits_gets_what_an_invalid_move_costs() -> None:
    env = TextArena("TicTacToe-v0", players=2)
    assert env.outcomes("player_1") == {"player_0": 1.0, "player_1": -1.0}
    three = TextArena("ThreePlayerTicTacToe-v0", players=3)
    assert three.outcomes("player_1") == {"player_0": 0.0, "player_1": -1.0, "player_2": 0.0}


@each_case(
    ("game", "players", "reason"),
    [
        ("Debate-v0", 2, r"makes no 'Debate-v0': ValueError: OpenRouter API key not found"),
        ("SecretMafia-v0", 2, r"2 players cannot play this game: Player count must be between 5 and 15"),
        ("TwoDollar-v0", 3, r"makes no 'TwoDollar-v0': ValueError: TwoDollar game requires exactly 2 players"),
    ],
)
def test_what_a_game_needs_is_said_when_it_is_made(
    game: str, players: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(UsageError, match=reason):
        TextArena(game, players=players)


@pytest.mark.slow
@each_case("game", ids()[::6] or ["none is installed"])
async def test_a_game_ends_or_goes_on_under_illegal_moves_or_says_why_it_cannot_be_made(game: str) -> None:
    def hangs(number: int, frame: FrameType | None) -> None:
        raise Hangs(game)

    reasons: list[str] = []
    previous = signal.signal(signal.SIGALRM, hangs)
    try:
        for players in PLAYERS:
            signal.alarm(30)
            try:
                TextArena(game, players=players)
            except UsageError as error:
                reasons.append(str(error))
                assert "\n" not in str(error)
                continue
            if game in RESETS_FAIL:
                continue
            for seed in range(2):
                signal.alarm(30)
                await play_badly(game, players, seed, 40)
        assert len(set(reasons)) <= len(PLAYERS)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
