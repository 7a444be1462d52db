"""Repository tasks: a seed, a split and a level choose an entry of the catalogue and the tests that stay hidden.

Owns: what the levels are, and which tests the policy may see. Knows nothing of boxes, prompts or rewards. The same
seed gives the same task in every process.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, get_args

from agentrl_environments.repo_repair.breaking import MUTATIONS, Breakage, applied
from agentrl_environments.repo_repair.catalogue import KnownBreakage, entries
from agentrl_environments.repo_repair.repository import REPOSITORIES, Split, load, without_tests

Level = Literal["easy", "medium", "hard", "all"]
LEVELS: Final[tuple[Level, ...]] = get_args(Level)
_MANY_FAIL: Final = 3
_HIDDEN_SHARE: Final = 0.3


@dataclass(frozen=True, slots=True)
class RepoTask:
    """The policy gets `broken` and the `visible` tests; `gold` are the sources before they were broken. All of `tests`
    judge: those in `fails` fail on `broken`, those in `passes` pass before and after. `hidden` ones are not `visible`.
    """

    seed: int
    repository: str
    readme: str
    breakage: Breakage
    broken: Mapping[str, str]
    gold: Mapping[str, str]
    visible: Mapping[str, str]
    tests: Mapping[str, str]
    fails: tuple[str, ...]
    passes: tuple[str, ...]
    hidden: frozenset[str]

    @property
    def shown_failing(self) -> tuple[str, ...]:
        """The failing tests that the policy can see."""
        return tuple(test_id for test_id in self.fails if test_id not in self.hidden)


def level_of(entry: KnownBreakage) -> Level:
    """`easy`: one small bug that three tests or more complain of. `medium`: one that fewer do, or a body to write anew.
    `hard`: several bugs at once, or a function that is missing together with its tests."""
    breakage_kind = entry.breakage.kind
    if breakage_kind in ("several", "feature"):
        return "hard"
    return "easy" if breakage_kind in MUTATIONS and len(entry.fails) >= _MANY_FAIL else "medium"


@lru_cache(maxsize=16)
def choices(split: Split, level: Level) -> tuple[KnownBreakage, ...]:
    """The catalogue's entries of a split and a level."""
    return tuple(
        known_breakage
        for known_breakage in entries()
        if known_breakage.repository in REPOSITORIES[split] and level in ("all", level_of(known_breakage))
    )


@lru_cache(maxsize=1024)
def make_task(seed: int, split: Split = "train", level: Level = "easy") -> RepoTask:
    """The task of a seed."""
    generator = random.Random(f"{split}:{level}:{seed}")
    return task_of(generator.choice(choices(split, level)), generator, seed)


def task_of(entry: KnownBreakage, rng: random.Random, seed: int = 0) -> RepoTask:
    """The task of a catalogue entry; `rng` draws the hidden tests. Of the failing tests at least one is shown, save for
    features: there all of them are hidden, as no test of a missing feature would be in the repository yet."""
    repository = load(entry.repository)
    passing_tests = tuple(test_id for test_id in repository.test_ids if test_id not in entry.fails)
    hidden_tests = set(rng.sample(passing_tests, int(_HIDDEN_SHARE * len(passing_tests))))
    if entry.breakage.kind == "feature":
        hidden_tests.update(entry.fails)
    else:
        hidden_tests.update(
            rng.sample(entry.fails, min(int(_HIDDEN_SHARE * len(entry.fails) + 0.5), len(entry.fails) - 1))
        )
    return RepoTask(
        seed=seed,
        repository=repository.name,
        readme=repository.readme,
        breakage=entry.breakage,
        broken=applied(repository.sources, entry.breakage.edits),
        gold=repository.sources,
        visible=without_tests(repository.tests, hidden_tests),
        tests=repository.tests,
        fails=entry.fails,
        passes=passing_tests,
        hidden=frozenset(hidden_tests),
    )
