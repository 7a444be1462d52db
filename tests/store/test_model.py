"""The whole store against a simple model in memory, with a crash before or after any statement of any call (law 2).

The model is in `model`. After every call both must say the same; after a crash the store must be as before the call or
as after it, never between. Then the run resumes as a real one.
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.records import StopReason
from agentrl.store import LeaseLost, Quorum, RunStore
from agentrl.store.audit import audit

from .fuse import Fuse, Killed
from .model import (
    BATCH,
    DEADLINE_S,
    LEASE_S,
    MAX_LAG,
    MAX_RUNNING,
    QUORUM,
    QUORUM_AFTER_S,
    SIZE,
    STEPS,
    Model,
)
from .play import START, Clock, admit, answer, part, task, turn


def snapshot(store: RunStore) -> dict[str, Any]:
    """What the model knows, read from the raw rows."""
    rows = store._db.rows  # pyright: ignore[reportPrivateUsage]
    turns: dict[int, list[tuple[int, bool]]] = {}
    aside: dict[int, int] = {}
    for episode, trial, last_trial, made_at, step in rows(
        "SELECT e.id, t.trial, e.trial, t.oldest_step, s.turn_id FROM turns t JOIN episodes e ON e.id = t.episode_id"
        " LEFT JOIN steps s ON s.turn_id = t.id ORDER BY e.id, t.trial, t.idx"
    ):
        if trial == last_trial:
            turns.setdefault(episode, []).append((made_at, step is not None))
        else:
            aside[episode] = aside.get(episode, 0) + 1
    episodes = rows("SELECT id, state, fence, trial, start NOT NULL, stop_reason, outcome FROM episodes ORDER BY id")
    partial = dict(rows("SELECT episode_id, SUM(n) FROM partials GROUP BY episode_id"))
    versions = rows("SELECT step, undone_attempt, confirmed_s FROM versions ORDER BY version")
    assert all(confirmed is not None for *_, confirmed in versions)
    return {
        "groups": {
            id: (*rest, None if record is None else {int(m): one["outcome"] for m, one in json.loads(record).items()})
            for id, *rest, record in rows("SELECT id, purpose, state, reason, taken_step, record FROM groups")
        },
        "episodes": {
            id: (
                state,
                fence,
                trial,
                bool(begun),
                stop,
                outcome,
                tuple(turns.get(id, [])),
                aside.get(id, 0),
                partial.get(id, 0),
            )
            for id, state, fence, trial, begun, stop, outcome in episodes
        },
        "members": {
            id: (bool(late), taken, dropped)
            for id, late, taken, dropped in rows("SELECT id, late, taken_step, dropped FROM episodes")
        },
        "lineage": dict(rows("SELECT episode_id, step FROM lineage WHERE undone_attempt IS NULL ORDER BY 1")),
        "versions": [(step, undone is not None) for step, undone, _ in versions],
        "checkpoints": [s for (s,) in rows("SELECT step FROM checkpoints WHERE undone_attempt IS NULL ORDER BY id")],
        "next_task": int(store.meta("next_task") or 0),
    }


def silent(_: object) -> None:
    """For calls whose answer the model does not have."""


ENDS = [("turn_limit", 1.0)] * 6 + [("engine_failed", None), ("turn_limit", None), ("runs on", None), ("runs on", None)]
ENDINGS = ["no", "no", "no", "sample", "sample", "done", "done", "engine_failed", "unscored", "restart"]
picks = st.integers(0, 10**6)
ages = st.sampled_from([0, 0, 0, 1, 2, 3])
crashes = st.one_of(*[st.none()] * 19, st.tuples(st.integers(0, 14), st.booleans()))
Crash = tuple[int, bool] | None


class StoreMachine(RuleBasedStateMachine):
    """Each rule does one call to the store and the same to the model."""

    def __init__(self) -> None:
        super().__init__()
        shm = Path("/dev/shm")  # no disk to wait for: what survives a loss of power is not the question here
        self._folder = tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None)
        self.clock = Clock()
        self.store = RunStore.create(Path(self._folder.name) / "store.sqlite", "{}", clock=self.clock)
        self.model = Model()
        self.claims: list[tuple[int, int]] = []  # episode, fence: every one ever handed out

    @initialize()
    def start(self) -> None:
        self.store.confirm_version(self.store.mint_version(0))
        self.model.publish()

    def both(self, real: Callable[[], Any], imagined: Callable[[Model], Any], crash: Crash = None) -> Any:
        """One call to both. If it crashes, the store is as before or as after it, and the run resumes."""
        after = copy.deepcopy(self.model)
        expected = imagined(after)
        if crash is None:
            assert real() == expected
            self.model = after
            return expected
        database = self.store._db  # pyright: ignore[reportPrivateUsage]
        connection = database._connection  # pyright: ignore[reportPrivateUsage]
        database._connection = Fuse(connection, crash[0], after=crash[1])  # pyright: ignore
        try:
            assert real() == expected
        except Killed:
            if connection.in_transaction:
                connection.execute("ROLLBACK")  # what the system does to the locks of a dead process
            connection.close()
            self.store = RunStore.open(self.store.path, clock=self.clock)
            seen = snapshot(self.store)
            assert seen in (self.model.snapshot(), after.snapshot())
            self.model = after if seen == after.snapshot() else self.model
            self.resume()
            return None
        database._connection = connection  # pyright: ignore[reportPrivateUsage]
        self.model = after
        return expected

    def resume(self) -> None:
        """What a restarted run does: nobody holds anything, the learner goes on from its last checkpoint."""
        self.store.release_all()
        latest = self.store.latest_checkpoint()
        attempt = self.store.rollback(0 if latest is None else latest.step)
        self.model.resume(attempt)

    # --- rollout

    @rule(limit=st.integers(1, 3), crash=crashes)
    def admit(self, limit: int, crash: Crash) -> None:
        self.both(
            lambda: admit(
                self.store,
                group_size=SIZE,
                groups_per_step=BATCH,
                max_lag=MAX_LAG,
                max_running=MAX_RUNNING,
                limit=limit,
                steps_total=STEPS,
            ),
            lambda model: model.admit(limit),
            crash,
        )

    @precondition(lambda self: sum(g.purpose != "train" for g in self.model.groups.values()) < 4)
    @rule(crash=crashes)
    def evaluate(self, crash: Crash) -> None:
        self.both(
            lambda: silent(self.store.add_groups([task(0)], size=1, purpose="eval")),
            lambda model: model.add("eval", 1),
            crash,
        )

    @rule(worker=st.sampled_from("ab"), limit=st.integers(1, 5), crash=crashes)
    def claim(self, worker: str, limit: int, crash: Crash) -> None:
        def real() -> list[tuple[int, int, int]]:
            claims = self.store.claim(worker, limit, lease_s=LEASE_S)
            return [(claim.episode_id, claim.fence, len(claim.turns)) for claim in claims]

        for id, fence, _ in self.both(real, lambda model: model.claim(worker, limit), crash) or []:
            self.claims.append((id, fence))

    @precondition(lambda self: self.claims)
    @rule(pick=picks, lost=st.sampled_from([False] * 4 + [True]), ending=st.sampled_from(ENDINGS), crash=crashes)
    def play_on(self, pick: int, lost: bool, ending: str, crash: Crash) -> None:
        """The next thing in an episode's life, by who holds it, or now and then by who once held it."""
        held = [claim for claim in self.claims if self.model.held(*claim)]
        choice = self.claims if lost or not held else held
        id, fence = choice[pick % len(choice)]
        episode = self.model.episodes[id]
        unanswered = bool(episode.turns) and not episode.turns[-1][1]

        def guarded(call: Callable[[], None]) -> Callable[[], str]:
            def real() -> str:
                try:
                    call()
                except LeaseLost:
                    return "lost"
                return "done"

            return real

        if not episode.begun and self.model.held(id, fence):
            self.both(guarded(lambda: self.store.begin(id, fence, START)), lambda model: model.begin(id, fence), crash)
        elif ending == "restart":
            real = guarded(lambda: self.store.restart_episode(id, fence, "cannot replay"))
            self.both(real, lambda model: model.restart(id, fence), crash)
        elif unanswered and ending != "engine_failed":
            index = len(episode.turns) - 1
            real = guarded(lambda: self.store.journal_step(id, fence, index, answer(index)))
            self.both(real, lambda model: model.answer(id, fence), crash)
        elif ending == "sample":
            one = part(turn(len(episode.turns), 1, episode.partial + 1), episode.partial)
            real = guarded(lambda: self.store.journal_partial(id, fence, one))
            self.both(real, lambda model: model.sample(id, fence), crash)
        elif ending == "no":
            version = 1 + pick % len(self.model.versions)
            made_at = self.model.versions[version - 1][0]
            one = turn(len(episode.turns), version)
            real = guarded(lambda: self.store.journal_turn(id, fence, one))
            self.both(real, lambda model: model.turn(id, fence, made_at), crash)
        else:
            stop = "engine_failed" if ending == "engine_failed" else "turn_limit"
            outcome = 1.0 if ending == "done" else None
            real = guarded(
                lambda: self.store.finish(id, fence, stop_reason=StopReason(stop), outcome=outcome, success=None)
            )
            self.both(real, lambda model: model.finish(id, fence, stop, outcome), crash)

    @rule(worker=st.sampled_from("ab"), stops=st.lists(st.sampled_from(ENDS), min_size=12, max_size=12), age=ages)
    def a_good_hour(self, worker: str, stops: list[tuple[str, float | None]], age: int) -> None:
        """Admit, claim what there is, play it to its end and close groups: single calls alone seldom come to one."""
        self.admit(3, None)
        self.claim(worker, 12, None)
        version = max(1, len(self.model.versions) - age)
        made_at = self.model.versions[version - 1][0]
        held = [(id, fence) for id, fence in self.claims if self.model.held(id, fence)]
        for (id, fence), (stop, outcome) in zip(held, stops, strict=False):
            if stop == "runs on":
                continue
            if not self.model.episodes[id].begun:
                self.store.begin(id, fence, START)
                self.model.begin(id, fence)
            if all(answered for _, answered in self.model.episodes[id].turns):
                self.store.journal_turn(id, fence, turn(len(self.model.episodes[id].turns), version))
                self.model.turn(id, fence, made_at)
            self.store.finish(id, fence, stop_reason=StopReason(stop), outcome=outcome, success=None)
            self.model.finish(id, fence, stop, outcome)
        self.time_passes(QUORUM_AFTER_S)
        self.expire(None)

    @rule(seconds=st.sampled_from([1.0, 11.0, 101.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.model.now += seconds

    @rule(crash=crashes)
    def expire(self, crash: Crash) -> None:
        now = self.clock.now
        policy = Quorum(QUORUM, QUORUM_AFTER_S)
        real = lambda: silent(self.store.expire(now, DEADLINE_S, close_policy=policy))  # noqa: E731
        self.both(real, lambda model: model.expire(), crash)

    @rule(worker=st.sampled_from("ab"), crash=crashes)
    def worker_dies(self, worker: str, crash: Crash) -> None:
        self.both(lambda: silent(self.store.release_worker(worker)), lambda model: model.die(worker), crash)

    # --- learner

    @precondition(lambda self: sum(g.state == "scored" for g in self.model.groups.values()) >= BATCH)
    @rule(crash=crashes)
    def learn(self, crash: Crash) -> None:
        """A whole step of the learner."""
        self.take(crash)
        if (self.model.learner, False) not in self.model.versions:
            self.publish()
        if self.model.learner % 2 == 1:
            self.checkpoint(None)

    @rule(crash=crashes)
    def take(self, crash: Crash) -> None:
        def real() -> list[int] | None:
            groups = self.store.take(self.model.learner + 1, BATCH, max_lag=MAX_LAG)
            return None if groups is None else sorted(one.episode_id for g in groups for one in g.trajectories)

        self.both(real, lambda model: model.take(), crash)

    @rule()
    def publish(self) -> None:
        version = self.store.mint_version(self.model.learner)
        self.store.confirm_version(version)
        assert version.version == self.model.publish()

    @precondition(lambda self: (self.model.learner, False) in self.model.versions and self.model.learner > 0)
    @rule(crash=crashes)
    def checkpoint(self, crash: Crash) -> None:
        version = self.store.version_at(self.model.learner)
        assert version is not None
        self.both(
            lambda: self.store.checkpoint(self.model.learner, version, "/checkpoint"),
            lambda model: model.checkpoint(),
            crash,
        )

    @precondition(lambda self: self.model.learner % 4 == 2)
    @rule()
    def learner_dies(self) -> None:
        latest = self.store.latest_checkpoint()
        attempt = self.store.rollback(0 if latest is None else latest.step)
        self.model.roll_back(attempt)

    @precondition(lambda self: self.model.next_task % 5 == 4)
    @rule()
    def everything_dies(self) -> None:
        self.store.close()
        self.store = RunStore.open(self.store.path, clock=self.clock)
        self.resume()

    # --- what always holds

    @invariant()
    def store_and_model_say_the_same(self) -> None:
        assert snapshot(self.store) == self.model.snapshot()

    @invariant()
    def no_law_is_broken(self) -> None:
        assert audit(self.store).violations == []

    def teardown(self) -> None:
        self.store.close()
        self._folder.cleanup()


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40)


class TestLaw2TheStoreIsItsModelThroughAnyCrash(StoreMachine.TestCase):
    """Law 2, as a stateful property."""


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
        elif action == "time_passes":
            self.machine.time_passes(rng.choice([1.0, 11.0, 101.0]))
        elif action == "worker_dies":
            self.machine.worker_dies(worker, crash)
        elif action == "checkpoint":
            if model.learner > 0 and (model.learner, False) in model.versions:
                self.machine.checkpoint(crash)
        elif action in ("evaluate", "expire", "learn", "take"):
            getattr(self.machine, action)(crash)
        elif action in ("publish", "learner_dies", "everything_dies"):
            getattr(self.machine, action)()
        self.machine.store_and_model_say_the_same()
        self.machine.no_law_is_broken()


@pytest.mark.parametrize("seed", range(6))
def test_law_2_the_store_is_its_model_through_a_long_life(seed: int) -> None:
    walk = Walk(seed)
    try:
        for _ in range(350):
            walk.step()
        assert walk.machine.store.drops()  # it came far enough to drop something
        assert walk.machine.store.latest_checkpoint()
        assert any(episode.late for episode in walk.machine.model.episodes.values())
    finally:
        walk.machine.teardown()
