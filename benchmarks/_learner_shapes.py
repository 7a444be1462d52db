"""The recorded groups of the learner's benchmark, by shape. Lengths are spread as those of real episodes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from agentrl.records import Group, GroupState, Step, StopReason, Task, Trajectory, Turn, VersionSpan

VOCAB = 512
TASK = Task(index=0, env="benchmark", seed=0)


def prompt(groups: int, members: int = 8) -> list[Group]:
    """Episodes of one turn; three fifths of their tokens are the prompt that the group shares."""
    rng = random.Random(0)
    made: list[Group] = []
    for group in range(groups):
        asked = _ids(rng, 192)
        turns = [[_turn(0, asked, _ids(rng, _length(rng, 107, 584)))] for _ in range(members)]
        made.append(_group(group, turns, rng))
    return made


def divided(groups: int, members: int = 8, tokens: int = 1024) -> list[Group]:
    """Episodes of one turn: as many tokens as the prompt has. At a budget of two such lengths each is a pass."""
    rng = random.Random(0)
    made: list[Group] = []
    for group in range(groups):
        asked = _ids(rng, tokens)
        made.append(_group(group, [[_turn(0, asked, _ids(rng, tokens))] for _ in range(members)], rng))
    return made


def forks(groups: int, members: int = 8, turns: int = 20) -> list[Group]:
    """Episodes of many turns. The next prompt keeps a turn's answer and drops its thoughts, as the templates of models
    that reason do: each turn is a row of its own."""
    rng = random.Random(0)
    made: list[Group] = []
    for group in range(groups):
        asked = _ids(rng, 192)
        played: list[list[Turn]] = []
        for _ in range(members):
            history, own = asked, list[Turn]()
            for index in range(turns):
                thoughts, answer = _ids(rng, _length(rng, 24, 72)), _ids(rng, 8)
                own.append(_turn(index, history, (*thoughts, *answer)))
                history = (*history, *answer, *_ids(rng, _length(rng, 12, 36)))
            played.append(own)
        made.append(_group(group, played, rng))
    return made


SHAPES: dict[str, Callable[[int], list[Group]]] = {"prompt": prompt, "forks": forks, "divided": divided}


def _length(rng: random.Random, mean: int, most: int) -> int:
    return max(2, min(most, round(rng.lognormvariate(0, 0.6) * mean / 1.2)))


def _ids(rng: random.Random, n: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB) for _ in range(n))


def _turn(index: int, asked: Sequence[int], said: Sequence[int]) -> Turn:
    return Turn(
        index=index,
        parent=None,
        prompt_ids=tuple(asked),
        token_ids=tuple(said),
        logprobs=(-6.2,) * len(said),
        spans=(VersionSpan(0, 0, len(said)),),
        finish="stop",
        text="",
        step=Step(observation=()),
    )


def _group(id: int, played: Sequence[Sequence[Turn]], rng: random.Random) -> Group:
    trajectories = tuple(
        Trajectory(
            episode_id=100 * id + member,
            group_id=id,
            member=member,
            task=TASK,
            start=(),
            turns=tuple(turns),
            stop_reason=StopReason.DONE,
            outcome=rng.random(),
        )
        for member, turns in enumerate(played)
    )
    return Group(id=id, task=TASK, state=GroupState.TAKEN, size=len(played), trajectories=trajectories)
