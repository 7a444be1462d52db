"""Long random lives of a store beside its model (see `test_model`), with crashes, until the learner has ended."""

from __future__ import annotations

import random

import pytest

from .model import SOURCES
from .test_model import ENDINGS, ENDS, StoreMachine

# What a walk does how often. Hypothesis leaves out most rules in most of its examples, which shrinks well but seldom
# comes far; a walk does everything, and a learner in it comes to its end.
WEIGHTS = {
    "admit": 4,
    "evaluate": 1,
    "claim": 6,
    "play_on": 40,
    "a_good_hour": 4,
    "time_passes": 2,
    "expire": 4,
    "a_source_speaks": 20,
    "a_source_speaks_of_any_turn": 2,
    "sources_expire": 4,
    "a_source_is_given_up": 1,
    "worker_dies": 1,
    "learn": 8,
    "take": 2,
    "publish": 2,
    "checkpoint": 2,
    "learner_dies": 1,
    "everything_dies": 1,
}


class Walk:
    """A life of a store, as random as its seed."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.machine = StoreMachine()
        self.machine.start()

    def step(self) -> None:
        rng, model = self._rng, self.machine.model
        crash = (rng.randrange(15), rng.random() < 0.5) if rng.random() < 0.04 else None
        worker = rng.choice("ab")
        action = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if action == "admit":
            self.machine.admit(rng.randint(1, 3), crash)
        elif action == "claim":
            self.machine.claim(worker, rng.randint(1, 5), crash)
        elif action == "play_on" and self.machine.claims:
            self.machine.play_on(rng.randrange(10**6), rng.random() < 0.1, rng.choice(ENDINGS), crash)
        elif action == "a_good_hour":
            self.machine.a_good_hour(worker, rng.choices(ENDS, k=12), rng.choice([0, 0, 0, 1, 2, 3]))
        elif action == "a_source_speaks":
            if any(episode.waits for episode in model.episodes.values()):
                self.machine.a_source_speaks(rng.randrange(10**6), rng.choice([-1.0, 0.5, 2.0]), crash)
        elif action == "a_source_speaks_of_any_turn":
            if any(episode.turns for episode in model.episodes.values()):
                source, version = rng.choice([*SOURCES, "unknown"]), rng.choice([1, 2])
                self.machine.a_source_speaks_of_any_turn(rng.randrange(10**6), source, version, crash)
        elif action == "a_source_is_given_up":
            if len(model.sources) > 1 and model.next_task > 9:
                self.machine.a_source_is_given_up(rng.randrange(10**6), crash)
        elif action == "time_passes":
            self.machine.time_passes(rng.choice([1.0, 11.0, 101.0]))
        elif action == "worker_dies":
            self.machine.worker_dies(worker, crash)
        elif action == "checkpoint":
            if model.learner > 0 and (model.learner, False) in model.versions:
                self.machine.checkpoint(crash)
        elif action == "sources_expire":
            self.machine.time_passes(rng.choice([1.0, 16.0, 21.0, 31.0]))
            self.machine.sources_expire(crash)
        elif action in ("learn", "take"):
            getattr(self.machine, action)(rng.choice([0, 1, 2]), crash)
        elif action in ("evaluate", "expire"):
            getattr(self.machine, action)(crash)
        elif action in ("publish", "learner_dies", "everything_dies"):
            getattr(self.machine, action)()
        self.machine.store_and_model_say_the_same()
        self.machine.no_law_is_broken()


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(1, 7))
def test_law_2_the_store_is_its_model_through_a_long_life(seed: int) -> None:
    walk = Walk(seed)
    try:
        for _ in range(350):
            walk.step()
        assert walk.machine.store.metrics.drops()  # it came far enough to drop something
        assert walk.machine.store.lineage.latest_checkpoint()
        model = walk.machine.model
        assert any(episode.late for episode in model.episodes.values())
        assert any(counts for _, counts in model.scores.values())
        assert any(group.replay_of for group in model.groups.values())
    finally:
        walk.machine.teardown()
