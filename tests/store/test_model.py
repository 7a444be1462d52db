"""The whole store against a simple model in memory, with a crash before or after any statement of any call (law 2).

The model is in `model`. After every call both must say the same; after a crash the store must be as before the call or
as after it, never between. Then the run resumes as a real one.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from agentrl.records import StopReason, turn_id
from agentrl.store import Ending, EnvSnapshot, LeaseLost, Quorum, RunStore, Source
from agentrl.store.audit import audit
from tests.parts.outside_audit import OutsideAuditor

from .fuse import Fuse, Killed
from .model import (
    BATCH,
    DEADLINE_S,
    LEASE_S,
    MAX_LAG,
    MAX_REPLAYS,
    MAX_RUNNING,
    QUORUM,
    QUORUM_AFTER_S,
    SIZE,
    SOURCES,
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
    episodes = rows("SELECT id, state, fence, trial, start IS NOT NULL, stop_reason, outcome FROM episodes ORDER BY id")
    partial = dict(rows("SELECT episode_id, SUM(n) FROM partials GROUP BY episode_id"))
    versions = rows("SELECT step, undone_attempt, confirmed_s FROM versions ORDER BY version")
    assert all(confirmed is not None for *_, confirmed in versions)
    return {
        "groups": {
            id: (*rest, None if record is None else record_of(json.loads(record)))
            for id, *rest, record in rows(
                "SELECT id, purpose, state, reason, taken_step, skipped_step, replay_of, replays, record FROM groups"
            )
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
        "scores": {
            tuple(key): (value, bool(counts))
            for *key, value, counts in rows(
                "SELECT t.episode_id, t.trial, t.idx, r.source, r.version, r.value, r.counts"
                " FROM rewards r JOIN turns t ON t.id = r.turn_id"
            )
        },
        "waits": set(rows("SELECT u.episode_id, t.idx, u.source FROM unscored u JOIN turns t ON t.id = u.turn_id")),
        "held": {id: tuple(rest) for id, *rest in rows("SELECT episode_id, time_s, stop_reason, outcome FROM endings")},
        "snapshots": dict(rows("SELECT episode_id, turn FROM snapshots")),
        "members": {
            id: (bool(late), taken, dropped)
            for id, late, taken, dropped in rows("SELECT id, late, taken_step, dropped FROM episodes")
        },
        "lineage": dict(rows("SELECT episode_id, step FROM lineage WHERE undone_attempt IS NULL ORDER BY 1")),
        "versions": [(step, undone is not None) for step, undone, _ in versions],
        "checkpoints": [s for (s,) in rows("SELECT step FROM checkpoints WHERE undone_attempt IS NULL ORDER BY id")],
        "next_task": int(store.meta("next_task") or 0),
    }


def record_of(members: dict[str, Any]) -> dict[int, tuple[float, list[float]]]:
    return {int(m): (one["outcome"], one["rewards"].get("policy", [])) for m, one in members.items()}


def silent(_: object) -> None:
    """For calls whose answer the model does not have."""


ENDS = [("turn_limit", 1.0)] * 6 + [("engine_failed", None), ("turn_limit", None), ("runs on", None), ("runs on", None)]
ENDINGS = ["no", "no", "no", "sample", "sample", "snapshot", "done", "done", "engine_failed", "unscored", "restart"]
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
        self.store = self.make_store(Path(self._folder.name))
        self.model = Model()
        self.claims: list[tuple[int, int]] = []  # episode, fence: every one ever handed out

    def make_store(self, folder: Path) -> RunStore:
        return RunStore.create(folder / "store.sqlite", "{}", clock=self.clock)

    def look_from_outside(self) -> list[str]:
        return OutsideAuditor(self.store.path).look()

    @initialize()
    def start(self) -> None:
        self.store.versions.confirm_version(self.store.versions.mint_version(0))
        self.declare()
        self.model.publish()

    def declare(self) -> None:
        self.store.scores.declare_sources(
            [
                Source(name=name, weight=weight, deadline_s=deadline_s, late=late)  # pyright: ignore[reportArgumentType]
                for name, (weight, deadline_s, late) in SOURCES.items()
                if name in self.model.sources
            ]
        )

    def connected(self) -> Any:
        """The object whose `connection` goes to the database."""
        return self.store._db.driver

    def both(self, real: Callable[[], Any], imagined: Callable[[Model], Any], crash: Crash = None) -> Any:
        """One call to both. If it crashes, the store is as before or as after it, and the run resumes."""
        after = copy.deepcopy(self.model)
        expected = imagined(after)
        if crash is None:
            assert real() == expected
            self.model = after
            return expected
        driver, connected = self.store._db.driver, self.connected()
        connection = connected.connection
        connected.connection = Fuse(connection, crash[0], after=crash[1])
        try:
            assert real() == expected
        except Killed:
            connected.connection = connection
            driver.roll_back()  # what the system does to the locks of a dead process
            self.store.close()
            self.store = RunStore.open(self.store.path, clock=self.clock)
            seen = snapshot(self.store)
            assert seen in (self.model.snapshot(), after.snapshot())
            self.model = after if seen == after.snapshot() else self.model
            self.resume()
            return None
        connected.connection = connection
        self.model = after
        return expected

    def resume(self) -> None:
        """What a restarted run does: nobody holds anything, the learner goes on from its last checkpoint."""
        self.store.deaths.release_all()
        latest = self.store.lineage.latest_checkpoint()
        attempt = self.store.lineage.rollback(0 if latest is None else latest.step)
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
                max_replays=MAX_REPLAYS,
            ),
            lambda model: model.admit(limit),
            crash,
        )

    @precondition(lambda self: sum(g.purpose != "train" for g in self.model.groups.values()) < 4)
    @rule(crash=crashes)
    def evaluate(self, crash: Crash) -> None:
        self.both(
            lambda: silent(self.store.groups.add_groups([task(0)], size=1, purpose="eval")),
            lambda model: model.add("eval", 1, 0),
            crash,
        )

    @rule(worker=st.sampled_from("ab"), limit=st.integers(1, 5), crash=crashes)
    def claim(self, worker: str, limit: int, crash: Crash) -> None:
        def real() -> list[tuple[int, int, int]]:
            claims = self.store.leases.claim(worker, limit, lease_s=LEASE_S)
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
            self.both(
                guarded(lambda: self.store.journal.begin(id, fence, START)), lambda model: model.begin(id, fence), crash
            )
        elif ending == "restart":
            real = guarded(lambda: self.store.journal.restart_episode(id, fence, "cannot replay"))
            self.both(real, lambda model: model.restart(id, fence), crash)
        elif unanswered and ending != "engine_failed":
            index = len(episode.turns) - 1
            real = guarded(lambda: self.store.journal.journal_step(id, fence, index, answer(index)))
            self.both(real, lambda model: model.answer(id, fence), crash)
        elif ending == "sample":
            one = part(turn(len(episode.turns), 1, episode.partial + 1), episode.partial)
            real = guarded(lambda: self.store.journal.journal_partial(id, fence, one))
            self.both(real, lambda model: model.sample(id, fence), crash)
        elif ending == "snapshot":
            one = EnvSnapshot(turn=len(episode.turns), data=b"box")
            real = guarded(lambda: self.store.journal.keep_snapshot(id, fence, one))
            self.both(real, lambda model: model.keep_snapshot(id, fence), crash)
        elif ending == "no":
            version = 1 + pick % len(self.model.versions)
            made_at = self.model.versions[version - 1][0]
            one = turn(len(episode.turns), version)
            real = guarded(lambda: self.store.journal.journal_turn(id, fence, one))
            self.both(real, lambda model: model.turn(id, fence, made_at), crash)
        else:
            stop = "engine_failed" if ending == "engine_failed" else "turn_limit"
            outcome = 1.0 if ending == "done" else None
            real = guarded(
                lambda: self.store.journal.finish(
                    id, fence, Ending(stop_reason=StopReason(stop), outcome=outcome, success=None)
                )
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
                self.store.journal.begin(id, fence, START)
                self.model.begin(id, fence)
            if all(answered for _, answered in self.model.episodes[id].turns):
                self.store.journal.journal_turn(id, fence, turn(len(self.model.episodes[id].turns), version))
                self.model.turn(id, fence, made_at)
            self.store.journal.finish(id, fence, Ending(stop_reason=StopReason(stop), outcome=outcome, success=None))
            self.model.finish(id, fence, stop, outcome)
            for index, source in sorted(self.model.episodes[id].waits) if id % 4 else []:
                self.say(id, self.model.episodes[id].trial, index, source, 1, float(index), None)
        self.time_passes(QUORUM_AFTER_S)
        self.expire(None)

    def say(self, id: int, trial: int, index: int, source: str, version: int, value: float, crash: Crash) -> None:
        self.both(
            lambda: self.store.scores.score(turn_id(id, trial, index), source, value, version=version),
            lambda model: model.score(id, trial, index, source, version, value),
            crash,
        )

    @precondition(lambda self: any(episode.waits for episode in self.model.episodes.values()))
    @rule(pick=picks, value=st.sampled_from([-1.0, 0.0, 0.5, 2.0]), crash=crashes)
    def a_source_speaks(self, pick: int, value: float, crash: Crash) -> None:
        """Of a turn that waits for it: of an episode that still runs, or was played."""
        waits = sorted((id, *wait) for id, one in self.model.episodes.items() for wait in one.waits)
        id, index, source = waits[pick % len(waits)]
        self.say(id, self.model.episodes[id].trial, index, source, 1, value, crash)

    @precondition(lambda self: any(episode.turns for episode in self.model.episodes.values()))
    @rule(pick=picks, source=st.sampled_from([*SOURCES, "unknown"]), version=st.sampled_from([1, 2]), crash=crashes)
    def a_source_speaks_of_any_turn(self, pick: int, source: str, version: int, crash: Crash) -> None:
        """Again, too late, in another version, or unasked."""
        turns = [(id, one.trial, n) for id, one in self.model.episodes.items() for n in range(len(one.turns))]
        self.say(*turns[pick % len(turns)], source, version, 3.0, crash)

    @rule(crash=crashes)
    def sources_expire(self, crash: Crash) -> None:
        now = self.clock.now
        self.both(lambda: silent(self.store.scores.expire_sources(now)), lambda model: model.expire_sources(), crash)

    @precondition(lambda self: len(self.model.sources) > 1 and self.model.next_task > 9)
    @rule(pick=picks, crash=crashes)
    def a_source_is_given_up(self, pick: int, crash: Crash) -> None:
        gone = self.model.sources[pick % len(self.model.sources)]
        left = [source for source in self.store.scores.sources() if source.name != gone]
        self.both(lambda: self.store.scores.declare_sources(left), lambda model: model.undeclare(gone), crash)

    @rule(seconds=st.sampled_from([1.0, 11.0, 101.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.model.now += seconds

    @rule(crash=crashes)
    def expire(self, crash: Crash) -> None:
        now = self.clock.now
        policy = Quorum(QUORUM, QUORUM_AFTER_S)
        real = lambda: silent(self.store.buffer.expire(now, DEADLINE_S, close_policy=policy))  # noqa: E731
        self.both(real, lambda model: model.expire(), crash)

    @rule(worker=st.sampled_from("ab"), crash=crashes)
    def worker_dies(self, worker: str, crash: Crash) -> None:
        self.both(lambda: silent(self.store.deaths.release_worker(worker)), lambda model: model.die(worker), crash)

    # --- learner

    @precondition(lambda self: sum(g.state == "scored" for g in self.model.groups.values()) >= BATCH)
    @rule(skips=st.integers(0, 2), crash=crashes)
    def learn(self, skips: int, crash: Crash) -> None:
        """A whole step of the learner."""
        self.take(skips, crash)
        if (self.model.learner, False) not in self.model.versions:
            self.publish()
        if self.model.learner % 2 == 1:
            self.checkpoint(None)

    @rule(skips=st.integers(0, 2), crash=crashes)
    def take(self, skips: int, crash: Crash) -> None:
        def real() -> list[int] | None:
            groups = self.store.buffer.take(self.model.learner + 1, BATCH, max_lag=MAX_LAG, skip_at_most=skips)
            return None if groups is None else sorted(one.episode_id for g in groups for one in g.trajectories)

        self.both(real, lambda model: model.take(skips), crash)

    @rule()
    def publish(self) -> None:
        version = self.store.versions.mint_version(self.model.learner)
        self.store.versions.confirm_version(version)
        assert version.version == self.model.publish()

    @precondition(lambda self: (self.model.learner, False) in self.model.versions and self.model.learner > 0)
    @rule(crash=crashes)
    def checkpoint(self, crash: Crash) -> None:
        version = self.store.versions.version_at(self.model.learner)
        assert version is not None
        self.both(
            lambda: self.store.lineage.checkpoint(self.model.learner, version, "/checkpoint"),
            lambda model: model.checkpoint(),
            crash,
        )

    @precondition(lambda self: self.model.learner % 4 == 2)
    @rule()
    def learner_dies(self) -> None:
        latest = self.store.lineage.latest_checkpoint()
        attempt = self.store.lineage.rollback(0 if latest is None else latest.step)
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
        assert self.look_from_outside() == []
        self.store.close()
        self._folder.cleanup()


StoreMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=40)


class TestLaw2TheStoreIsItsModelThroughAnyCrash(StoreMachine.TestCase):
    """Law 2, as a stateful property."""
