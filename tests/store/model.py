"""The store's rules as plain Python objects, for `test_model` to hold against the real store.

Written from the design, not from the store: no SQL, no transaction, no code of the store."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SIZE, BATCH, MAX_LAG, MAX_RUNNING, STEPS = 3, 2, 1, 11, 8
LEASE_S, DEADLINE_S = 10.0, 100.0
QUORUM, QUORUM_AFTER_S = 2, 5.0
MAX_REPLAYS = 1
SKIPPED = 64  # quarantined tasks that one admission skips at most
SOURCES = {"judge": (1.0, 30.0, "drop"), "prm": (0.5, 15.0, "partial"), "style": (2.0, 20.0, "neutral")}
"""Reward sources: weight, deadline, rule for late scores."""

FAILURES = ("engine_failed", "env_failed")


@dataclass
class Episode:
    group: int
    evaluation: bool
    state: str = "waiting"
    holder: str | None = None
    fence: int = 0
    trial: int = 0
    begun: bool = False
    turns: list[tuple[int, bool]] = field(default_factory=list)  # step of the weights, answered
    aside: int = 0
    partial: int = 0  # tokens of the turn under way
    stop: str | None = None
    outcome: float | None = None
    deaths: int = 0  # of workers in a row while it stood at turn `died_at` or before it
    died_at: int = 0
    ended: float = 0.0
    late: bool = False
    taken: int | None = None
    dropped: str | None = None
    waits: set[tuple[int, str]] = field(default_factory=set)  # turn, source that has yet to score it
    held: tuple[float, str, float | None] | None = None  # since when, stop, outcome: played, and not scored
    snapshot: int | None = None  # turn

    def end(self, state: str, stop: str, now: float, outcome: float | None = None) -> None:
        self.state, self.stop, self.outcome, self.ended, self.holder = state, stop, outcome, now, None
        self.waits, self.held, self.snapshot = set(), None, None

    @property
    def stuck(self) -> bool:
        return self.deaths > 0 and len(self.turns) <= self.died_at

    @property
    def in_env(self) -> bool:
        return not self.begun or any(not answered for _, answered in self.turns)

    @property
    def open(self) -> bool:
        return self.state in ("waiting", "running")

    @property
    def newest(self) -> int | None:
        return max((made for made, _ in self.turns), default=None)

    @property
    def in_loss(self) -> bool:
        return self.stop not in (None, "expired", *FAILURES) and self.outcome is not None


@dataclass
class Group:
    purpose: str
    admitted_at: int
    task: int
    replay_of: int | None = None
    replays: int = 0
    state: str = "waiting"
    reason: str | None = None
    started: float | None = None
    taken: int | None = None
    skipped: int | None = None
    record: dict[int, tuple[float | None, list[float]]] | None = None  # member -> outcome, reward of each turn

    @property
    def open(self) -> bool:
        return self.state in ("waiting", "running")

    @property
    def has_signal(self) -> bool:
        """Whether two members earned differently: their outcome, or at some turn (none is a reward of 0)."""
        assert self.record is not None
        earned = [[outcome or 0.0, *rewards] for outcome, rewards in self.record.values()]
        longest = max(map(len, earned))
        return len({tuple(one + [0.0] * (longest - len(one))) for one in earned}) > 1


@dataclass
class Model:
    now: float = 1000.0
    groups: dict[int, Group] = field(default_factory=dict)
    episodes: dict[int, Episode] = field(default_factory=dict)
    leases: dict[str, float] = field(default_factory=dict)
    versions: list[tuple[int, bool]] = field(default_factory=list)  # step, undone; all are confirmed
    checkpoints: list[int] = field(default_factory=list)
    next_task: int = 0
    learner: int = 0
    sources: list[str] = field(default_factory=lambda: list(SOURCES))
    scores: dict[tuple[int, int, int, str, int], tuple[float, bool]] = field(default_factory=dict)
    """episode, trial, turn, source, version -> value, counts"""

    quarantined: set[int] = field(default_factory=set)

    # --- questions

    @property
    def step(self) -> int:
        return [step for step, undone in self.versions if not undone][-1]

    def members(self, group: int) -> list[Episode]:
        return [episode for episode in self.episodes.values() if episode.group == group]

    def held(self, id: int, fence: int) -> bool:
        return self.episodes[id].state == "running" and self.episodes[id].fence == fence

    def snapshot(self) -> dict[str, Any]:
        return {
            "groups": {
                id: (g.purpose, g.state, g.reason, g.taken, g.skipped, g.replay_of, g.replays, g.record)
                for id, g in self.groups.items()
            },
            "episodes": {
                id: (e.state, e.fence, e.trial, e.begun, e.stop, e.outcome, tuple(e.turns), e.aside, e.partial * e.open)
                for id, e in self.episodes.items()
            },
            "scores": self.scores,
            "waits": {(id, *wait) for id, e in self.episodes.items() for wait in e.waits},
            "held": {id: e.held for id, e in self.episodes.items() if e.held},
            "snapshots": {id: e.snapshot for id, e in self.episodes.items() if e.snapshot is not None},
            "members": {id: (e.late, e.taken, e.dropped) for id, e in self.episodes.items()},
            "lineage": {id: e.taken for id, e in self.episodes.items() if e.taken is not None and e.dropped is None},
            "versions": self.versions,
            "checkpoints": self.checkpoints,
            "next_task": self.next_task,
        }

    # --- calls

    def add(self, purpose: str, size: int, task: int, replay_of: int | None = None) -> None:
        group = len(self.groups) + 1
        replays = 0 if replay_of is None else self.groups[replay_of].replays + 1
        self.groups[group] = Group(purpose, self.step, task, replay_of, replays)
        for _ in range(size):
            self.episodes[len(self.episodes) + 1] = Episode(group, purpose != "train")

    def lost(self) -> list[int]:
        again = {group.replay_of for group in self.groups.values()}
        return [
            id
            for id, group in self.groups.items()
            if group.purpose == "train"
            and group.state in ("expired", "failed")
            and group.reason in ("deadline", *FAILURES)
            and group.replays < MAX_REPLAYS
            and id not in again
            and group.task not in self.quarantined
        ]

    def admit(self, limit: int) -> int:
        train = [group for group in self.groups.values() if group.purpose == "train"]
        alive = [group for group in train if group.state not in ("expired", "failed")]
        running = sum(e.open and not e.evaluation and not e.held for e in self.episodes.values())
        n = min(
            limit,
            -((running - MAX_RUNNING) // SIZE),  # also if a part of the group has to wait for places
            (MAX_LAG + self.step + 1) * BATCH - len(alive),
            STEPS * BATCH - len(alive),
        )
        if n <= 0:
            return 0
        again = self.lost()[:n]
        for group in again:
            self.add("train", SIZE, self.groups[group].task, group)
        started, end = len(again), self.next_task + n + SKIPPED
        while started < n and self.next_task < end:
            if self.next_task not in self.quarantined:
                self.add("train", SIZE, self.next_task)
                started += 1
            self.next_task += 1
        return started

    def claim(self, worker: str, limit: int) -> list[tuple[int, int, int]]:
        free: list[tuple[bool, bool, bool, int]] = []
        for id, episode in self.episodes.items():
            lapsed = (
                episode.state == "running"
                and episode.holder != worker
                and self.leases.get(episode.holder or "", self.now) < self.now
            )
            if episode.state == "waiting" or lapsed:
                free.append((episode.deaths > 0, not episode.evaluation, not lapsed, id))
        order = [id for *_, id in sorted(free)]
        mine = [e for e in self.episodes.values() if e.state == "running" and e.holder == worker]
        here = max((episode.deaths for episode in mine if episode.stuck), default=0)
        together = [id for id in order if self.episodes[id].deaths == 1 and here < 2]
        apart = [id for id in order if self.episodes[id].deaths >= 2 and not here and not together]
        ids = [*(id for id in order if not self.episodes[id].deaths), *together, *apart[:1]][:limit]
        if ids:
            self.leases[worker] = self.now + LEASE_S
        for id in ids:
            episode = self.episodes[id]
            episode.state, episode.holder, episode.fence = "running", worker, episode.fence + 1
            group = self.groups[episode.group]
            group.state = "running" if group.state == "waiting" else group.state
            group.started = self.now if group.started is None else group.started
        return [(id, self.episodes[id].fence, len(self.episodes[id].turns)) for id in ids]

    def begin(self, id: int, fence: int) -> str:
        if not self.held(id, fence):
            return "lost"
        self.episodes[id].begun = True
        return "done"

    def sample(self, id: int, fence: int) -> str:
        if not self.held(id, fence):
            return "lost"
        self.episodes[id].partial += 1
        return "done"

    def turn(self, id: int, fence: int, made_at: int) -> str:
        if not self.held(id, fence):
            return "lost"
        episode = self.episodes[id]
        episode.partial = 0
        if not episode.evaluation:
            episode.waits |= {(len(episode.turns), source) for source in self.sources}
        episode.turns.append((made_at, False))
        return "done"

    def keep_snapshot(self, id: int, fence: int) -> str:
        if not self.held(id, fence):
            return "lost"
        self.episodes[id].snapshot = len(self.episodes[id].turns)
        return "done"

    def answer(self, id: int, fence: int) -> str:
        if not self.held(id, fence):
            return "lost"
        turns = self.episodes[id].turns
        turns[-1] = (turns[-1][0], True)
        return "done"

    def restart(self, id: int, fence: int) -> str:
        if not self.held(id, fence):
            return "lost"
        episode = self.episodes[id]
        episode.aside += len(episode.turns)
        episode.trial, episode.begun, episode.turns, episode.partial = episode.trial + 1, False, [], 0
        episode.waits, episode.held, episode.snapshot = set(), None, None
        return "done"

    def finish(self, id: int, fence: int, stop: str, outcome: float | None) -> str:
        if not self.held(id, fence):
            return "lost"
        episode = self.episodes[id]
        if episode.waits and stop not in FAILURES and outcome is not None:
            episode.held = (self.now, stop, outcome)
            episode.holder, episode.fence = None, episode.fence + 1
        else:
            self.end(id, stop, outcome)
        return "done"

    def end(self, id: int, stop: str, outcome: float | None) -> None:
        self.episodes[id].end("finished", stop, self.now, outcome)
        self.close_if_ended(self.episodes[id].group)

    def end_if_scored(self, id: int) -> None:
        episode = self.episodes[id]
        if episode.held and not episode.waits:
            self.end(id, *episode.held[1:])

    def score(self, id: int, trial: int, turn: int, source: str, version: int, value: float) -> bool:
        key, episode = (id, trial, turn, source, version), self.episodes[id]
        if key in self.scores:
            return False
        counts = version == 1 and trial == episode.trial and (turn, source) in episode.waits
        self.scores[key] = (value, counts)
        if counts:
            episode.waits.remove((turn, source))
            self.end_if_scored(id)
        return True

    def expire_sources(self) -> None:
        overdue = [
            (id, SOURCES[source][2] != "drop", source)
            for id, e in self.episodes.items()
            for source in {source for _, source in e.waits}
            if e.held and e.held[0] + SOURCES[source][1] < self.now
        ]
        for id, _, source in sorted(overdue):
            episode, late = self.episodes[id], SOURCES[source][2]
            if not episode.held:
                continue
            if late == "drop":
                self.end(id, "env_failed", None)
                continue
            if late == "neutral":
                for key, (value, _) in self.scores.items():
                    if (key[0], key[1], key[3]) == (id, episode.trial, source):
                        self.scores[key] = (value, False)
            episode.waits = {wait for wait in episode.waits if wait[1] != source}
            self.end_if_scored(id)

    def undeclare(self, source: str) -> None:
        self.sources.remove(source)
        for id, episode in self.episodes.items():
            before = len(episode.waits)
            episode.waits = {wait for wait in episode.waits if wait[1] != source}
            if len(episode.waits) < before:
                self.end_if_scored(id)

    def rewards(self, id: int) -> list[float]:
        """Of each turn: its answer's, and what the declared sources said of it, by their weights."""
        episode = self.episodes[id]
        rewards = [0.25 * index * answered for index, (_, answered) in enumerate(episode.turns)]
        for (of, trial, turn, source, _), (value, counts) in self.scores.items():
            if (of, trial) == (id, episode.trial) and counts and source in self.sources:
                rewards[turn] += SOURCES[source][0] * value
        return rewards

    def close_if_ended(self, group: int) -> None:
        if self.groups[group].open and not any(member.open for member in self.members(group)):
            self.close(group)

    def close(self, id: int) -> None:
        group, members = self.groups[id], self.members(id)
        ids = [one for one, episode in self.episodes.items() if episode.group == id]
        record = {
            place: (member.outcome, self.rewards(one))
            for place, (one, member) in enumerate(zip(ids, members, strict=True))
            if member.in_loss
        }
        if group.purpose == "train" and len(record) < 2:
            group.state = "failed"
            failed = [member.stop for member in members if member.stop in FAILURES]
            group.reason = max(sorted(set(failed), key=failed.index), key=failed.count) if failed else "no_outcome"
        else:
            group.state, group.record = "scored", record if group.purpose == "train" else None
        for member in members:
            member.late = member.open

    def expire(self) -> None:
        def age(group: Group) -> float:
            return 0.0 if group.started is None else self.now - group.started

        closing: list[int] = []
        over: list[int] = []
        for id, group in self.groups.items():
            ends = sorted(member.ended for member in self.members(id) if member.in_loss)
            train, due = group.purpose == "train", age(group) > DEADLINE_S
            quorum = len(ends) >= QUORUM and self.now - ends[QUORUM - 1] >= QUORUM_AFTER_S
            if group.state != "running":
                continue
            if train and ((due and len(ends) >= 2) or quorum):
                closing.append(id)
            elif due and (not train or age(group) > 2 * DEADLINE_S):
                over.append(id)
        late = [e for e in self.episodes.values() if e.late and e.open and age(self.groups[e.group]) > 2 * DEADLINE_S]
        for id in closing:
            self.close(id)
        for id in over:
            for member in self.members(id):
                if member.open:
                    member.end("expired", "expired", self.now)
            if self.groups[id].purpose == "train":
                self.groups[id].state, self.groups[id].reason = "expired", "deadline"
            else:
                self.close_if_ended(id)
        for member in late:
            member.end("expired", "expired", self.now)
            member.dropped = "deadline"

    def publish(self) -> int:
        self.versions.append((self.learner, False))
        return len(self.versions)

    def take(self, skips: int) -> list[int] | None:
        weights = self.learner

        def trains(episode: Episode) -> bool:
            return episode.in_loss and (episode.newest is None or weights - episode.newest <= MAX_LAG)

        ready: list[int] = []
        late = [
            e
            for e in self.episodes.values()
            if e.late and e.stop and e.taken is None and not e.dropped and self.groups[e.group].state != "scored"
        ]
        for id, group in self.groups.items():
            if group.purpose == "train" and group.state == "scored":
                if any(trains(member) for member in self.members(id)):
                    ready.append(id)
                else:
                    group.state, group.reason = "expired", "stale"
        skips -= sum(group.skipped == weights + 1 for group in self.groups.values())
        for id in [id for id in ready if not self.groups[id].has_signal][: max(0, skips)]:
            group = self.groups[id]
            group.state, group.reason, group.skipped = "expired", "no_signal", weights + 1
            ready.remove(id)
        if len(ready) < BATCH:
            return None
        self.learner += 1
        leaving = [member for id in ready[:BATCH] for member in self.members(id) if not member.open] + late
        for id in ready[:BATCH]:
            self.groups[id].state, self.groups[id].taken = "taken", self.learner
        trained = [episode for episode in leaving if trains(episode)]
        for episode in leaving:
            if episode.in_loss:
                episode.taken, episode.dropped = self.learner, None if trains(episode) else "stale"
            elif episode.late:
                episode.dropped = episode.dropped or episode.stop  # expired while its group waited to be taken
        return sorted(id for id, episode in self.episodes.items() if any(episode is one for one in trained))

    def checkpoint(self) -> None:
        self.checkpoints.append(self.learner)
        for group in self.groups.values():
            if group.state == "taken":
                group.state = "trained"

    def die(self, worker: str) -> None:
        aboard = [e for e in self.episodes.values() if e.state == "running" and e.holder == worker]
        stuck = [e for e in aboard if e.stuck]
        beside = [e for e in aboard if e.in_env and not e.stuck]
        blamed = stuck + beside or aboard
        for episode in aboard:
            if not episode.stuck:
                episode.deaths = episode.died_at = 0
            episode.died_at = max(episode.died_at, len(episode.turns))
        for episode in blamed:
            episode.deaths += 1
        self.release(worker)
        for guilty in [e for e in stuck if e.deaths >= (6 if beside else 3)]:
            guilty.end("finished", "env_failed", self.now)
            self.quarantined.add(self.groups[guilty.group].task)
            self.close_if_ended(guilty.group)
            for other in self.episodes.values():
                if other.group != guilty.group:
                    other.deaths = 0

    def release(self, worker: str) -> None:
        for episode in self.episodes.values():
            if episode.state == "running" and episode.holder == worker:
                episode.state, episode.holder = "waiting", None
        self.leases.pop(worker, None)

    def resume(self, attempt: int) -> None:
        for worker in ("a", "b"):
            self.release(worker)
        self.roll_back(attempt)
        for episode in self.episodes.values():
            if episode.held:
                episode.held = (self.now, *episode.held[1:])
        for id, group in self.groups.items():
            if group.state == "running" or any(member.late and member.open for member in self.members(id)):
                group.started = None

    def roll_back(self, attempt: int) -> None:
        self.learner = max(self.checkpoints, default=0)
        self.versions = [(step, undone or step > self.learner) for step, undone in self.versions]
        for episode in self.episodes.values():
            if episode.taken is not None and episode.taken > self.learner:
                episode.taken = episode.dropped = None
        for id, group in self.groups.items():
            if group.taken is not None and group.taken > self.learner:
                group.state, group.taken = "scored", None
            if group.skipped is not None and group.skipped > self.learner:
                group.state, group.reason, group.skipped = "scored", None, None
            if group.purpose.startswith("eval") and group.admitted_at > self.learner:
                group.purpose = f"undone-{attempt}:{group.purpose}"
                if group.state in ("waiting", "running"):
                    group.state, group.reason = "expired", "undone"
                for member in self.members(id):
                    if member.open:
                        member.end("expired", "expired", self.now)
