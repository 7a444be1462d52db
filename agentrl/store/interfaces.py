"""What each process of a run may ask of the run store: one protocol for each role, plain data in and out.

    EpisodeStore    an episode: its journal
    RolloutStore    a worker: claims episodes, journals them, gives them back
    RewardStore     a reward source: which turns wait, and the scores
    LearnerStore    the learner: takes members, mints versions, checkpoints, rolls back
    AdmissionStore  the admitter: how many groups may start, and starting them
    MovingStore     whoever takes untrained episodes out of a run, or into one
    ControlStore    the supervisor: phases, deadlines, deaths, evaluations, and admission
    ReadStore       everybody who only looks: reports, live view, rewards, audit

A process types its store by the narrowest role that it needs. Arguments and answers of a call are written once, where
`RunStore` has it: a role is a list of names. Nothing here tells how a store keeps its rows, and no call takes a
function: a store may be on another host. Errors are those of `agentrl.errors`: LeaseLost, DiskFull,
StoreBusy, StoreError.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar, cast

from agentrl.store import RunStore
from agentrl.store.databases.change_signal import Role
from agentrl.store.databases.database import Result
from agentrl.store.episodes.partial_turns import Partial

_P = ParamSpec("_P")
_T = TypeVar("_T")


def awaited(method: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]]:
    """A call of the store as a program with a loop makes it, see `agentrl.store.asynchronous`."""
    return cast("Any", method)


class Changes(Protocol):
    """Tells one waiting role of writes, see `agentrl.store.asynchronous`."""

    @property
    def pause_s(self) -> float: ...
    @property
    def wakes(self) -> int | None: ...
    @property
    def remote(self) -> bool: ...
    def changed(self) -> bool: ...


class Versions(Protocol):
    """Which weights there are."""

    @property
    def remote(self) -> bool: ...

    meta = RunStore.meta
    current_version = RunStore.current_version
    knows_version = RunStore.knows_version
    step_of = RunStore.step_of
    is_undone = RunStore.is_undone
    version_at = RunStore.version_at
    weights_path = RunStore.weights_path


class ReadStore(Versions, Protocol):
    """Looks at a run, and never changes it."""

    @property
    def path(self) -> Path: ...
    @property
    def attempt(self) -> int: ...

    trajectory = RunStore.trajectory
    trajectories = RunStore.trajectories
    group = RunStore.group
    image = RunStore.image
    results = RunStore.results
    restarts = RunStore.restarts
    episodes = RunStore.episodes
    find_episodes = RunStore.find_episodes
    outcomes = RunStore.outcomes
    search_texts = RunStore.search_texts
    turn_sizes = RunStore.turn_sizes
    turn_times = RunStore.turn_times
    roles = RunStore.roles
    family = RunStore.family
    purposes = RunStore.purposes
    counts = RunStore.counts
    ready_count = RunStore.ready_count
    late_open = RunStore.late_open
    tasks_started = RunStore.tasks_started
    replays = RunStore.replays
    quarantined = RunStore.quarantined
    metrics = RunStore.metrics
    drops = RunStore.drops
    endings = RunStore.endings
    failures = RunStore.failures
    failed_tasks = RunStore.failed_tasks
    waited = RunStore.waited
    episodes_trained = RunStore.episodes_trained
    members_dropped = RunStore.members_dropped
    length_bias = RunStore.length_bias
    training_bias = RunStore.training_bias
    progress = RunStore.progress
    lineage = RunStore.lineage
    steps_trained = RunStore.steps_trained
    retake = RunStore.retake
    episode_times = RunStore.episode_times
    activity = RunStore.activity
    silent_groups = RunStore.silent_groups
    push_times = RunStore.push_times
    latest_checkpoint = RunStore.latest_checkpoint
    checkpoint_steps = RunStore.checkpoint_steps
    served_versions = RunStore.served_versions
    sources = RunStore.sources
    artifacts = RunStore.artifacts
    awaiting = RunStore.awaiting
    scores = RunStore.scores
    episodes_unscored = RunStore.episodes_unscored
    stands_beyond = RunStore.stands_beyond
    close = RunStore.close

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Posted(Protocol):
    """A write that nobody waits for; `result` is None until it is committed or has failed."""

    @property
    def result(self) -> Result | None: ...


class EpisodeStore(Protocol):
    """Journals claimed episodes. All that `agentrl.rollout.episode.play` needs: see `agentrl.rollout.memory_store` for
    one without a database."""

    reload = awaited(RunStore.reload)
    begin = awaited(RunStore.begin)
    journal_turn = awaited(RunStore.journal_turn)

    def post_partial(self, episode_id: int, fence: int, part: Partial) -> Posted: ...

    journal_step = awaited(RunStore.journal_step)
    restart_episode = awaited(RunStore.restart_episode)
    discard_turn = awaited(RunStore.discard_turn)
    restart_group = awaited(RunStore.restart_group)
    finish = awaited(RunStore.finish)
    keep_snapshot = awaited(RunStore.keep_snapshot)
    snapshot = awaited(RunStore.snapshot)
    note_unsaved = awaited(RunStore.note_unsaved)
    unsaved = awaited(RunStore.unsaved)
    keep_artifacts = awaited(RunStore.keep_artifacts)
    meta = awaited(RunStore.meta)


class RolloutStore(EpisodeStore, Protocol):
    """Claims episodes, and journals them. Calls of a process take effect in the order in which they were made. A call
    that is cancelled may have taken effect, or may still, before any later one."""

    claim = awaited(RunStore.claim)
    renew = awaited(RunStore.renew)
    hand_back = awaited(RunStore.hand_back)
    current_version = awaited(RunStore.current_version)
    record = awaited(RunStore.record)

    async def wait_for_work(self, role: Role, timeout_s: float) -> None: ...


class RewardStore(Protocol):
    """Says which turns a source has yet to score, and takes the scores."""

    awaiting = awaited(RunStore.awaiting)
    trajectory = awaited(RunStore.trajectory)
    artifacts = awaited(RunStore.artifacts)
    score = awaited(RunStore.score)
    meta = awaited(RunStore.meta)
    record = awaited(RunStore.record)

    async def wait_for_work(self, role: Role, timeout_s: float) -> None: ...


class Recorder(Protocol):
    """Keeps measured values."""

    @property
    def attempt(self) -> int: ...

    record = RunStore.record


class StartStore(Versions, Protocol):
    """Finds the point from which a run goes on, and brings the store to it."""

    reconcile = RunStore.reconcile
    latest_checkpoint = RunStore.latest_checkpoint
    checkpoint = RunStore.checkpoint
    stands_beyond = RunStore.stands_beyond
    rollback = RunStore.rollback
    metrics = RunStore.metrics
    set_meta = RunStore.set_meta
    swap_meta = RunStore.swap_meta
    mint_version = RunStore.mint_version
    confirm_version = RunStore.confirm_version


class LearnerStore(StartStore, Recorder, Protocol):
    """Takes members for steps, and says what became of them."""

    lead = RunStore.lead
    still_leads = RunStore.still_leads

    @property
    def waits(self) -> bool: ...

    ready_count = RunStore.ready_count
    late_open = RunStore.late_open
    take = RunStore.take
    at_bound = RunStore.at_bound
    wait_for_work = RunStore.wait_for_work
    retain = RunStore.retain


class AdmissionStore(Protocol):
    """Starts groups."""

    admissible = RunStore.admissible
    admit = RunStore.admit
    results = RunStore.results
    group = RunStore.group
    fork = RunStore.fork
    forked = RunStore.forked
    fork_states = RunStore.fork_states

    def signal(self, role: Role) -> Changes: ...


class MovingStore(Versions, Protocol):
    """Takes untrained groups out of a run, and into another one, once."""

    run_id = RunStore.run_id
    movable = RunStore.movable
    left_behind = RunStore.left_behind
    move_out = RunStore.move_out
    move_in = RunStore.move_in


class ControlStore(AdmissionStore, StartStore, Recorder, ReadStore, Protocol):
    """Watches over a run: phases, deadlines, deaths, evaluations."""

    @property
    def waits(self) -> bool: ...

    hurry = RunStore.hurry
    now = RunStore.now
    declare_sources = RunStore.declare_sources
    expire = RunStore.expire
    expire_sources = RunStore.expire_sources
    end_late = RunStore.end_late
    add_groups = RunStore.add_groups
    rename_purpose = RunStore.rename_purpose
    release_worker = RunStore.release_worker
    release_all = RunStore.release_all
    shift_deadlines = RunStore.shift_deadlines
    requeue = RunStore.requeue
