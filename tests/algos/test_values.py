"""GAE, V-trace and the layout of sequences against second implementations written as loops over Python floats."""

from __future__ import annotations

import random
from itertools import groupby

import pytest
import torch
from each_case import each_case

from agentrl.algos.gae import Sequences, centred, lambda_of_length, traces


def looped(
    rewards: list[float], values: list[float], ratios: list[float], discount: float, lam: float, cap: float
) -> tuple[list[float], list[float]]:
    """The definitions as sums: the target is V_s plus the sum over t >= s of the discounted temporal differences, each
    with its rho and the product of the traces before it (Espeholt et al. 2018, eq. 1)."""
    n = len(rewards)
    after = [*values[1:], 0.0]
    delta = [rewards[t] + discount * after[t] - values[t] for t in range(n)]
    rho = [min(cap, ratio) for ratio in ratios]
    targets = []
    for s in range(n):
        total, trace = values[s], 1.0
        for t in range(s, n):
            total += discount ** (t - s) * trace * rho[t] * delta[t]
            trace *= lam * rho[t]
        targets.append(total)
    gaps = [target - value for target, value in zip(targets, values, strict=True)] + [0.0]
    return [delta[t] + discount * lam * gaps[t + 1] for t in range(n)], targets


def looped_gae(rewards: list[float], values: list[float], discount: float, lam: float) -> list[float]:
    """Schulman et al. 2016, eq. 16: the sum of (discount lambda)^l delta_{t+l}."""
    n, after = len(rewards), [*values[1:], 0.0]
    delta = [rewards[t] + discount * after[t] - values[t] for t in range(n)]
    return [sum((discount * lam) ** (t - s) * delta[t] for t in range(s, n)) for s in range(n)]


def random_sequences(seed: int, ratios: bool) -> list[tuple[list[float], list[float], list[float]]]:
    rng = random.Random(seed)
    return [
        (
            [rng.gauss(0, 1) for _ in range(n)],
            [rng.gauss(0, 1) for _ in range(n)],
            [rng.lognormvariate(0, 0.7) if ratios else 1.0 for _ in range(n)],
        )
        for n in (1, 4, 7, 2)
    ]


def padded(columns: list[list[float]]) -> torch.Tensor:
    width = max(map(len, columns))
    return torch.tensor([[*column, *[9.0] * (width - len(column))] for column in columns], dtype=torch.float64)


@each_case(("discount", "lam", "cap"), [(1.0, 1.0, 1e9), (0.9, 0.8, 1.3), (1.0, 0.0, 1.0), (0.5, 1, 2)])
@each_case("ratios", [False, True])
def test_traces_are_their_definitions(discount: float, lam: float, cap: float, ratios: bool) -> None:
    made = random_sequences(5, ratios)
    length_B = torch.tensor([len(rewards) for rewards, _, _ in made])
    advantages_BU, targets_BU = traces(
        padded([one[0] for one in made]),
        padded([one[1] for one in made]),
        length_B,
        discount=discount,
        lambda_B=torch.full((4,), float(lam), dtype=torch.float64),
        ratio_BU=padded([one[2] for one in made]),
        cap=cap,
    )
    for row, (rewards, values, by) in enumerate(made):
        n = len(rewards)
        advantages, targets = looped(rewards, values, by, discount, lam, cap)
        assert advantages_BU[row, :n].tolist() == pytest.approx(advantages, abs=1e-12)
        assert targets_BU[row, :n].tolist() == pytest.approx(targets, abs=1e-12)
        if not ratios:
            assert advantages == pytest.approx(looped_gae(rewards, values, discount, lam), abs=1e-12)
            assert targets == pytest.approx([a + v for a, v in zip(advantages, values, strict=True)], abs=1e-12)
        assert not advantages_BU[row, n:].any() and not targets_BU[row, n:].any()


def test_the_horizon_grows_with_the_length() -> None:
    assert lambda_of_length(torch.tensor([1, 20, 100, 400]), 0.05).tolist() == pytest.approx([0, 0, 0.8, 0.95])


@pytest.mark.parametrize("by_turn", [False, True], ids=["token", "turn"])
def test_tokens_become_the_states_of_their_episode_in_whatever_order_rows_hold_them(by_turn: bool) -> None:
    rng = random.Random(2)
    tokens = [  # episode, role, turn, number in the turn
        (episode, role, turn, at)
        for episode in (7, 3, 5)
        for turn in range(4)
        for role in [turn % 2 if episode == 5 else 0]
        for at in range(rng.randint(1, 3))
    ]
    turns = [list(of) for _, of in groupby(tokens, key=lambda token: token[:3])]
    rng.shuffle(turns)  # tokens of a turn stay together, as in a row
    shuffled = [token for turn in turns for token in turn]
    value = {token: rng.random() for token in tokens}
    column_T = torch.tensor([value[token] for token in shuffled], dtype=torch.float64)
    columns = [torch.tensor([token[i] for token in shuffled]) for i in range(3)]
    sequences = Sequences.of(*columns, by_turn=by_turn)
    chains = [list(of) for _, of in groupby(sorted(tokens), key=lambda token: token[:2])]
    key = (lambda token: token[:3]) if by_turn else (lambda token: token)
    states = [[list(of) for _, of in groupby(chain, key=key)] for chain in chains]
    assert sequences.length().tolist() == [len(chain) for chain in states]
    for row, chain in enumerate(states):
        first = sequences.first(column_T)[row].tolist()
        total = sequences.total(column_T)[row].tolist()
        assert first[: len(chain)] == [value[state[0]] for state in chain]
        assert total[: len(chain)] == pytest.approx([sum(value[token] for token in state) for state in chain])
        assert not any(first[len(chain) :])
    back_T = sequences.tokens(sequences.first(column_T))
    owner = {token: state[0] for chain in states for state in chain for token in state}
    assert back_T.tolist() == [value[owner[token]] for token in shuffled]
    assert sequences.begins().tolist() == [owner[token] == token for token in shuffled]


def test_an_advantage_is_less_the_mean_of_the_other_episodes_in_its_turn() -> None:
    """In turn 4: episodes 0, 1, 2 with tokens 1 1, 3 and 5 7, the last at twice the weight, and one of no weight in
    episode 1, which judges nobody. A turn and a role that nobody else played; turn 0 of episodes 1 and 2."""
    advantage_T = torch.tensor([1.0, 5, 3, 1, 7, 8, 9, 6, 2, 4])
    weight_T = torch.tensor([1.0, 1, 1, 1, 2, 0, 1, 1, 1, 1])
    episode_T = torch.tensor([0, 2, 1, 0, 2, 1, 0, 0, 1, 2])
    turn_T = torch.tensor([4, 4, 4, 4, 4, 4, 5, 4, 0, 0])
    role_T = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1, 0, 0])
    of_0, of_1, of_2 = (3 + 5 + 14) / 4, (1 + 1 + 5 + 14) / 5, (1 + 1 + 3) / 3
    expected = [1 - of_0, 5 - of_2, 3 - of_1, 1 - of_0, 7 - of_2, 8 - of_1, 9, 6, 2 - 4, 4 - 2]
    assert centred(advantage_T, weight_T, episode_T, role_T, turn_T).tolist() == pytest.approx(expected)
