"""A run under way over a long history, and every call that its processes make, ready to be measured."""

from __future__ import annotations

import time
from collections.abc import Callable

from _store_rows import GROUPS_PER_STEP, KEPT_STEPS, SIZE, TEXT, write_history

from agentrl.records import Messages, Step, StopReason, Task, Turn, VersionSpan
from agentrl.store import AdmissionBounds, Claim, Ending, Quorum, RunStore, Saved

START: Messages = ({"role": "user", "content": "Mend the function so that its tests pass."},)
ANSWER = Step(observation=({"role": "tool", "content": "3 passed, 1 failed: expected 12 but got 11 " * 4},))
CHUNK = 16  # episodes a claim
MAX_LAG, DEADLINE_S = 4, 1800.0

Call = Callable[[], object]


def turn(index: int, version: int) -> Turn:
    """A turn of 64 tokens."""
    return Turn(
        index=index,
        parent=index - 1 if index else None,
        prompt_ids=tuple(range(100, 180)),
        token_ids=tuple(range(1000, 1064)),
        logprobs=tuple(-0.01 * n for n in range(64)),
        spans=(VersionSpan(version, 0, 64),),
        finish="stop",
        text=TEXT,
    )


class Run:
    """A run in a new store: `episodes` have ended, `running` are claimed and begun, `waiting` may be claimed."""

    def __init__(self, store: RunStore, episodes: int, *, running: int, waiting: int) -> None:
        self.store = store
        self.step = write_history(store, episodes)
        self._retained = max(0, self.step - KEPT_STEPS)
        self.version = store.versions.current_version().version
        self.last_group = GROUPS_PER_STEP * self.step
        groups = waiting // SIZE + running // SIZE + MAX_LAG * GROUPS_PER_STEP
        self._admit(groups)
        for claim in self.claim(MAX_LAG * GROUPS_PER_STEP * SIZE):
            self._play(claim)
        self.playing = self.claim(running)
        for claim in self.playing:
            store.journal.begin(claim.episode_id, claim.fence, START)
        self.begun = list(self.playing)

    def claim(self, n: int) -> list[Claim]:
        return self.store.leases.claim("worker", n, lease_s=1e9, ahead=1 << 20)

    def _admit(self, groups: int) -> None:
        bounds = AdmissionBounds(
            group_size=SIZE,
            groups_per_step=1 << 30 if groups else 1,
            max_lag=0,
            max_running=1 << 30 if groups else 0,
            steps_total=1 << 30,
            max_replays=2,
        )
        room = self.store.groups.admissible(bounds, limit=groups or 1)
        assert room.groups == groups
        if groups:
            tasks = [Task(index=room.first + n, env="agentrl/CodeRepair-v0", seed=n) for n in range(groups)]
            assert self.store.groups.admit(tasks, first=room.first, bounds=bounds, limit=groups) == groups

    def _play(self, claim: Claim) -> None:
        self.store.journal.begin(claim.episode_id, claim.fence, START)
        for index in range(2):
            self.store.journal.journal_turn(claim.episode_id, claim.fence, turn(index, self.version))
            self.store.journal.journal_step(claim.episode_id, claim.fence, index, ANSWER)
        self._finish(claim)

    def _finish(self, claim: Claim) -> None:
        self.store.journal.finish(
            claim.episode_id, claim.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
        )

    def _end(self) -> None:
        self._finish(self.playing.pop())

    def _turn(self) -> None:
        claim = self.begun.pop()
        self.store.journal.journal_turn(claim.episode_id, claim.fence, turn(0, self.version))
        self.store.journal.journal_step(claim.episode_id, claim.fence, 0, ANSWER)

    def _take(self) -> None:
        self.step += 1
        assert self.store.buffer.take(self.step, 1, max_lag=1 << 20) is not None

    def _checkpoint(self) -> None:
        self.store.lineage.checkpoint(self.step, self.version, "checkpoints")

    def _rollback(self) -> None:
        self.store.lineage.rollback(self.step, ahead=1 << 20)

    def _retain(self) -> None:
        self._retained += 1  # one step's groups more than the call before
        assert self.store.lineage.retain(self.step, keep_steps=self.step - self._retained, keep_sample=0.0)

    def _reconcile(self) -> None:
        steps = range(self.step - 3, self.step)
        listed = tuple(tuple(self.store.lineage.episodes_of(step)) for step in steps)
        saved = Saved(previous_step=steps.start - 1, episodes=listed)
        assert self.store.recovery.reconcile([saved], max_lag=MAX_LAG) == 0

    def calls(self) -> dict[str, Call]:
        """Calls by name, in an order in which each can be made several times."""
        store, now = self.store, time.time()
        return {
            "worker: claim 16": lambda: self.claim(CHUNK),
            "worker: claim, none left": lambda: store.leases.claim("other", CHUNK, lease_s=1.0, ahead=1),
            "worker: turn and its answer": self._turn,
            "worker: finish": self._end,
            "worker: renew": lambda: store.leases.renew("worker", lease_s=1e9),
            "supervisor: admit, no place": lambda: self._admit(0),
            "supervisor: admit one": lambda: self._admit(1),
            "supervisor: results": lambda: store.reads.results(self.last_group),
            "supervisor: expire, nothing due": lambda: store.buffer.expire(now, DEADLINE_S),
            "supervisor: expire with quorum": lambda: store.buffer.expire(now, DEADLINE_S, close_policy=Quorum(7, 5.0)),
            "supervisor: counts": store.groups.counts,
            "supervisor: failures": store.metrics.failures,
            "supervisor: progress": store.metrics.progress,
            "supervisor: replays": lambda: store.replays.counts(2),
            "supervisor: late_open": store.buffer.late_open,
            "learner: take, too few": lambda: store.buffer.take(self.step + 1, 1 << 20, max_lag=1 << 20),
            "learner: take a group": self._take,
            "learner: checkpoint": self._checkpoint,
            "learner: retain": self._retain,
            "resume: rollback": self._rollback,
            "resume: stands_beyond": lambda: store.lineage.stands_beyond(self.step),
            "resume: reconcile": self._reconcile,
            "resume: release_all": store.deaths.release_all,
            "death: release_worker": lambda: store.deaths.release_worker("worker"),
        }
