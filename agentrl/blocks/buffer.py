"""A durable buffer between rollouts and a learner: groups of trajectories, each trained once.

It is the store of a run: what was put in, or journaled by a `rollout`, is there after a crash, with its weight
versions, its staleness and the records that its members are judged against.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import ConfigError, RunFailed, UsageError
from agentrl.host.with_block import Closing
from agentrl.records import Group, Trajectory, WeightVersion
from agentrl.store import PlayedMember, Returns, RunStore
from agentrl.store.buffer.admission import AdmissionBounds
from agentrl.store.databases.open_store import STORE
from agentrl.store.episodes.endings import Ending

_WAIT_S = 0.25  # between two looks for groups, should no signal come
_ENDLESS = 1 << 40  # steps of a loop that says no number


@dataclass(frozen=True, slots=True)
class Batch:
    """Groups that a step trains on, with the record that their members are judged against, and the ages of weight
    versions. Optimizer step `step` takes it."""

    groups: tuple[Group, ...]
    step: int
    max_lag: int
    step_of: Callable[[int], int]
    undone: Callable[[int], bool]

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        """The members that the step trains."""
        return tuple(trajectory for group in self.groups for trajectory in group.trajectories)


class Buffer(Closing):
    """A buffer in a folder. One process has it at a time: whoever opens it last. Calls are short and may be made in any
    thread; `take` waits (in a trio program: `await trio.to_thread.run_sync(buffer.take)`).

        buffer = Buffer("runs/mine", groups_per_step=16, max_lag=2)
        batch = buffer.take()
    """

    def __init__(self, folder: str | Path, *, groups_per_step: int = 16, max_lag: int = 4) -> None:
        """Open the buffer in `folder`, or make one. `groups_per_step` is how many a `take` gives by default, and
        `max_lag` the most optimizer steps by which a token may be older than the weights that train on it.

        Raises ConfigError for a number that cannot be, StoreError for a folder whose store cannot be used."""
        if groups_per_step < 1:
            raise ConfigError("groups_per_step", groups_per_step, "give 1 or more")
        if max_lag < 0:
            raise ConfigError("max_lag", max_lag, "give 0 for synchronous training, or more")
        self.folder, self.groups_per_step, self.max_lag = Path(folder), groups_per_step, max_lag
        store_path = self.folder / STORE
        if not store_path.exists():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            RunStore.create(store_path, "{}").close()
        self.store = RunStore.open(store_path)
        # A connection of its own for reading: a trajectory that is read for a `rollout` must not wait for a `put` or a
        # `take` that writes.
        self.reader = RunStore.read(store_path)
        # Whoever opens last has the buffer, as in a run: a notebook's kernel that was restarted finds the old one's
        # calls refused, instead of sharing one learner's groups with it.
        self.store.lineage.lead()
        self.store.deaths.release_all()  # what a process before played, or held
        self.failure: Exception | None = None  # of a rollout that played into it
        self._step = max(self.store.trained.steps_trained(), default=0)

    @property
    def step(self) -> int:
        """The last optimizer step for which groups were taken, 0 before the first."""
        return self._step

    @property
    def groups_ahead(self) -> int:
        """How many groups may be played or wait within the lag bound."""
        return (self.max_lag + 1) * self.groups_per_step

    def bounds(self, group_size: int, max_running: int) -> AdmissionBounds:
        """The bounds of a rollout into this buffer: `max_running` episodes at once (room for one whole group at least),
        groups as far ahead as the buffer's lag bound allows, and no end of steps. A task that infrastructure lost is
        played again twice, as by default in a run."""
        return AdmissionBounds(
            group_size=group_size,
            groups_per_step=self.groups_per_step,
            max_lag=self.max_lag,
            max_running=max(max_running, group_size),
            steps_total=_ENDLESS,
            max_replays=2,
        )

    def mint(self, step: int) -> WeightVersion:
        """A new weight version for the weights that step `step` made: `publish` calls it."""
        return self.store.versions.mint_version(step)

    def confirm(self, version: WeightVersion) -> None:
        """An engine serves a version: `publish` calls it."""
        self.store.versions.confirm_version(version)

    def ready(self) -> int:
        """How many groups a step could take now."""
        return self.store.buffer.ready_count()

    def put(self, trajectories: Sequence[Trajectory]) -> int:
        """Put the ended trajectories of one task in, as a group; returns its id. They are judged against each other.

        Raises UsageError for trajectories of several tasks, that have not ended, or whose tokens are of a weight
        version that this buffer did not mint."""
        if not trajectories:
            raise UsageError("a group without trajectories cannot be put into the buffer: give the members of one task")
        group_task = trajectories[0].task
        played_members: list[PlayedMember] = []
        if other := next((trajectory.task for trajectory in trajectories if trajectory.task != group_task), None):
            raise UsageError(f"a group has one task: the trajectories are of seeds {group_task.seed} and {other.seed}")
        for trajectory in sorted(trajectories, key=lambda trajectory: trajectory.member):
            if trajectory.stop_reason is None:
                raise UsageError(
                    f"trajectory {trajectory.episode_id} has not ended: put it in when it has a stop reason"
                )
            version_spans = [span for turn in trajectory.turns if turn.learns for span in turn.spans]
            # Refused here and not at the training: how old a token is follows from the step of its version, and a
            # version that nobody minted has none (law 2). Taken in, the group would never be found too old.
            sampled_versions = {span.version for span in version_spans}
            unknown_versions = sorted(
                version for version in sampled_versions if not self.store.versions.knows_version(version)
            )
            if unknown_versions:
                hint = "publish(learner.weights(), fleet, buffer) before they are played"
                raise UsageError(f"the buffer minted no weight version {unknown_versions[0]}: {hint}")
            ending = Ending(
                stop_reason=trajectory.stop_reason,
                outcome=trajectory.outcome,
                success=trajectory.success,
                outcomes=dict(trajectory.outcomes),
            )
            played_members.append(
                PlayedMember(start=trajectory.start, turns=trajectory.turns, ending=ending, tools=trajectory.tools)
            )
        return self.store.played.put_group(group_task, played_members)

    def take(
        self, n: int | None = None, *, max_lag: int | None = None, skip_at_most: int = 0, timeout_s: float = 600.0
    ) -> Batch:
        """The groups of the next optimizer step: `n` (default: `groups_per_step`) closed ones, oldest first, and
        members of earlier groups that ended late. Waits for them. Groups of which every token is older than `max_lag`
        steps are dropped; of the others, `forward_backward` leaves out such tokens. Up to `skip_at_most` groups whose
        members all earned the same leave without being trained.

        Raises RunFailed if there are not so many within `timeout_s`, and what ended a rollout into this buffer."""
        group_count, lag_bound = self.groups_per_step if n is None else n, self.max_lag if max_lag is None else max_lag
        if group_count < 1:
            raise ConfigError("n", group_count, "give 1 or more")
        next_step, deadline = self.step + 1, time.monotonic() + timeout_s
        while True:
            taken_groups = self.store.buffer.take(
                next_step, group_count, max_lag=lag_bound, returns=Returns(), skip_at_most=skip_at_most
            )
            if taken_groups is not None:
                self._step = next_step
                versions = self.store.versions
                return Batch(tuple(taken_groups), next_step, lag_bound, versions.step_of, versions.is_undone)
            if self.failure is not None:
                raise self.failure
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                hint = "is a rollout playing into this buffer, and are its episodes scored?"
                raise RunFailed(
                    f"step {next_step} waited {timeout_s:g} s for {group_count} groups, "
                    f"{self.ready()} are ready: {hint}"
                )
            # A signal of the store with a short bound: another process may put groups in, and its signal may be lost
            # with it.
            self.store.wait_for_work("learner", min(_WAIT_S, remaining_s))

    def checkpoint(self, step: int, folder: str | Path) -> None:
        """A learner's checkpoint of `step` is in `folder`: what was taken up to there is trained for good."""
        # A checkpoint is tied to a version, so that after a crash the engines and the learner agree again on what the
        # next tokens are sampled from.
        trained_version = self.store.versions.version_at(step)
        if trained_version is None:
            raise UsageError(f"no weights of step {step} were published with this buffer: publish them before")
        self.store.lineage.checkpoint(step, trained_version, folder)

    def resume(self) -> Path | None:
        """Go back to the last checkpoint after a crash: groups that were taken after it can be taken again. Returns the
        checkpoint's folder, for `learner.load`; None if there is no checkpoint, so that the learner begins anew."""
        latest_checkpoint = self.store.lineage.latest_checkpoint()
        self._step = 0 if latest_checkpoint is None else latest_checkpoint.step
        self.store.lineage.rollback(self._step)
        return None if latest_checkpoint is None else Path(latest_checkpoint.path)

    def close(self) -> None:
        """Close the store; no call may follow."""
        self.reader.close()
        self.store.close()
