"""The run from its first process to its last, and the back-pressure between them:

    before ──► train ───────────────────────────────────────────► after ──► stop
    eval       admit ─► workers: play ─► journal ─► buffer        eval
                 ▲ bound: max_lag                    │
                 └───── confirm ◄─ push ◄─ step ◄─ take

Workers start up while the engines do, and so does the learner, unless it is on a GPU of theirs; it goes on with that
during the evaluation before.

The supervisor owns the children, the phase (the store's `phase`: `eval`, `train`, `drain`, `finish`, `stop`), the
deadlines and admission; it never touches a token. While the run is paused (the store's `paused`), no episode, turn or
step begins, and no deadline passes. If the tasks end before the steps do, the phase is `drain`: no task
is left to admit, and the learner trains the remaining groups in a last smaller batch. If somebody wants training to
end, it is `finish`: the learner saves its step, and takes no more groups. Evaluations during training are claimed
before training episodes, and nothing waits for them.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import trio

from agentrl import config as configuration
from agentrl.config import RunConfig
from agentrl.config.cluster import ControllerSettings as ControllerSettings
from agentrl.config.gpu_placement import starts_apart
from agentrl.engine.weight_sync.object_store import ObjectFolder
from agentrl.errors import DiskFull, RunFailed, StoreAway, StoreError, UsageError, WeightSyncError, matters
from agentrl.host.clocks import HostClock
from agentrl.host.disk_space import wait_for_space, watch_disk
from agentrl.host.installation import install_command
from agentrl.host.janitor import OwnedFolder
from agentrl.records import EngineKey, GroupState
from agentrl.rollout.admitter import Admitter, bounds_of
from agentrl.rollout.branching import Pivots
from agentrl.run.children.run_children import RunChildren
from agentrl.run.cluster import scale_requests
from agentrl.run.cluster.autoscaler import Controller
from agentrl.run.cluster.scaling import Size, requested_size
from agentrl.run.evaluation import held_out as evaluation
from agentrl.run.evaluation.pinned import PinnedEvaluations
from agentrl.run.processes.exit_status import leave_note
from agentrl.run.processes.heartbeat import Heartbeat
from agentrl.run.processes.keep_alive import live_with_parent
from agentrl.run.processes.launcher import LOCAL, Launcher
from agentrl.run.reporting import notice_counts
from agentrl.run.reporting.failed_tasks import skips
from agentrl.run.reward_services import declare
from agentrl.run.run_folder import RunDir
from agentrl.run.scratch_space import ScratchSpace
from agentrl.run.start_point import StartPoint, start_point
from agentrl.run.stop_request import StopRequest
from agentrl.run.task_sources import changed_rows, data_sets_of, digests_of, task_source
from agentrl.run.telemetry import Telemetry
from agentrl.run.weights.role_policies import objects_of
from agentrl.run.weights.room_check import check_room
from agentrl.store import FULL, RunStore, close_policy
from agentrl.store.async_calls import Aside, Looks
from agentrl.store.databases import open_store
from agentrl.store.run_values import (
    CHANGES,
    CONFIG,
    ENGINE_URLS,
    MAX_LAG,
    PAUSED,
    PHASE,
    STOP_REQUESTED,
    STOPPED_EARLY,
    TAKES_NO_SIGNALS,
    TRAIN_ENDED_S,
    TRAIN_STARTED_S,
    WENT_BACK,
    Phase,
    Value,
)

TRAINING = "training"
MEASURING = "evaluating"
"""The phase, in words, in which steps come."""
_T = TypeVar("_T")
_TICK_S = 0.25
_PAUSED_TICK_S = 1.0  # the same while the run is paused: nothing is due then but the look at whether it goes on
_STORE_LOOK_S = 1.0  # between two looks at whether somebody wants the run to end
_JUMP_S = 5.0  # by which two clocks differ between two looks, if one of them jumped
_LAST_WORD_S = 2.0  # how long the end of a run waits for the store's lock
_STORE_S = 10.0  # how long the end of a run waits for an object store
_MIN_FAILURES = 8  # a run never stops for this few failures of infrastructure; an outage counts as one


class Interrupted(RunFailed):
    """Ctrl-C or SIGTERM: the run shut down in order and can be resumed."""

    exit_code = 130


@dataclass(slots=True)
class Supervisor:
    """One live run. `on_tick` is called with the supervisor four times a second, once while the run is paused, to draw;
    it never decides. It reads by `store`: in a thread, if that is on a server."""

    run: RunDir
    config: RunConfig
    store: RunStore
    writes: Aside[RunStore]
    telemetry: Telemetry
    children: RunChildren
    start: StartPoint
    on_tick: Callable[[Supervisor], None]
    stop: StopRequest = field(default_factory=StopRequest)
    phase: str = "starting"
    started_s: float = field(default_factory=time.time)
    _clocks: tuple[float, float] | None = None  # the store's and our own, at the last look
    _paused_at: float | None = None  # by our own clock, if the run is paused
    _changes: int = 0  # how often settings changed, as far as `config` has them
    _went_on_s: float = -math.inf  # by the store's clock, after the last pause
    _admitter: Admitter | None = None
    _looks: Looks[RunStore] = field(init=False)
    _more: str = field(init=False)  # what to type after a failure

    def __post_init__(self) -> None:
        self._looks = Looks(self.store)
        self._more = (
            f"; agentrl tasks {self.run.path} --failed lists the tasks, agentrl logs {self.run.path} has tracebacks"
        )

    async def train(self) -> None:
        """Evaluate, train, evaluate again. Returns when all results are in the store. Raises ConfigError if the scratch
        space is too small for the weight files."""
        model_folders = [self.start.model_of(role_name, self.config) for role_name in (None, *self.config.role_models)]
        check_room(self.config, model_folders, self.run.scratch)
        await self.writes(partial(declare, self.config))
        # Before anything starts: the addresses of the last life's engines would be taken for this one's by workers that
        # come up first.
        await self._with_space(_go_on)
        data_sets = data_sets_of(self.config)  # without any nothing is read, and nobody waits for a thread
        row_digests = await trio.to_thread.run_sync(digests_of, self.config) if data_sets else {}
        for data_set_name in await self._with_space(partial(changed_rows, row_digests)):
            change_warning = "the data set has changed since the run went on last: from now on its tasks are others"
            print(f"agentrl: warning: {data_set_name}: {change_warning}", file=sys.stderr)
        is_apart = starts_apart(self.config.engine, self.config.train, on_ray=self.config.cluster.on_ray)
        learner_done = self.children.start_learner() if is_apart else trio.Event()
        await self.children.start_workers()
        await self.children.start_engines(self.start)
        await self._with_space(_enter("eval"))
        self.children.follow_size()
        measuring = self._measuring()
        learner_done = learner_done if is_apart else self.children.start_learner()
        self.phase = "evaluating before"
        await self.evaluate("before")
        # An environment in which not one held-out episode can be played will not train either. Ten minutes here are
        # cheaper than a night in which the failure budget is spent.
        if unmeasured_text := await self.writes(lambda store: evaluation.unmeasured(store, self.config, "before")):
            await self._show()
            raise RunFailed(f"{unmeasured_text}{self._more}")
        self.phase = TRAINING
        await self._with_space(_enter("train"))
        await self._with_space(_clock(TRAIN_STARTED_S))
        async with trio.open_nursery() as admission:
            training_tasks = task_source(self.config)
            admission_bounds = bounds_of(self.config)
            # Made in the store's thread, since making one reads rows: pivots look for what was forked before.
            admitter = await self.writes(
                lambda store: Admitter(
                    store,
                    training_tasks,
                    admission_bounds,
                    partial(MAX_LAG.of, store.meta),
                    Pivots.of(self.config, store.groups, store.reads),
                    partial(skips, skipped=self.config.rollout.skip_tasks),
                )
            )
            self._admitter = admitter
            admission.start_soon(admitter.run, self.writes)
            if self.config.cluster.controller is not None:
                admission.start_soon(self._controller(self.config.cluster.controller).keep_looking)
            run_progress, finishing = _Progress(self.config.train.stall_deadline_s), False
            while not learner_done.is_set():
                await self._with_space(self._schedule_during)
                if self.stop.ends_training:
                    if not finishing:
                        await self._with_space(_finish(self.stop.finish))
                    finishing = True
                elif training_tasks.size is not None and await self.writes(partial(self._played, training_tasks.size)):
                    await self._with_space(_enter("drain"))
                # One tick does everything that has to be looked at, a quarter of a second apart: no task of its own for
                # each deadline, whose order at the end of a run would be another race.
                await self._tick(run_progress)
            admission.cancel_scope.cancel()
        if self.stop.error is not None:
            raise self.stop.error
        await self._with_space(_clock(TRAIN_ENDED_S))
        while measuring is not None and measuring.pending:
            self.phase = "evaluating what waits"
            await self._tick(run_progress)
        await self._with_space(lambda store: store.buffer.end_late())
        await self._with_space(_enter("eval"))
        self.phase = f"evaluating after {await self.writes(lambda store: store.versions.current_version().step)} steps"
        await self.evaluate("after")

    def _measuring(self) -> PinnedEvaluations | None:
        """Start evaluations on engines of their own, and return them. None if evaluation shares the engines of
        training."""
        if not self.config.eval.engines:
            return None
        measuring = PinnedEvaluations(self.run, lambda: self.config, self._with_space, self.children.pin)
        self.children.nursery.start_soon(measuring.keep_measuring)
        return measuring

    async def obey(self) -> None:
        """End the run if a thread of this process wants it. While the learner trains, an error waits for its step."""
        while True:
            if self.stop.interrupt is not None:
                raise _interrupted(f"{self.stop.interrupt}; go on with agentrl train --resume {self.run.path}")
            if self.stop.error is not None and self.phase != "training":
                raise self.stop.error
            await trio.sleep(_TICK_S)

    def _controller(self, settings: ControllerSettings) -> Controller:
        return Controller(
            run=self.run,
            config=self.config,
            settings=settings,
            looks=self._looks,
            writes=self.writes,
            telemetry=self.telemetry,
            engines=lambda: len(self.children.present("engine")),
            engine_start_s=lambda: self.children.engine_start_s,
        )

    async def measure(self) -> None:
        """Evaluate only, under the label `now`: no learner is started."""
        self._more, self.phase = "", MEASURING  # the run is seldom kept
        await self._with_space(_go_on)
        await self.children.start_workers()
        await self.children.start_engines(self.start)
        await self._with_space(_enter("eval"))
        await self.evaluate("now")

    async def evaluate(self, when: str) -> None:
        """Run every held-out set under the label `when`; returns when the last episode has ended. A set whose episodes
        have all failed before is played again."""
        purposes: list[str] = []
        for held_out in self.config.eval.sets:
            schedule_set = partial(
                evaluation.schedule, config=self.config, held_out=held_out, when=when, n=held_out.n, again=True
            )
            purposes.append(await self._with_space(schedule_set))
        run_progress = _Progress(self.config.train.stall_deadline_s)
        while not await self.writes(lambda store: all(evaluation.finished(store, purpose) for purpose in purposes)):
            await self._tick(run_progress)
        # Without held-out sets there was no tick, and the learner may have recorded its last step after the one before.
        await self._show()

    def _schedule_during(self, store: RunStore) -> None:
        """Schedule the sets of `eval.during`, with fewer tasks, whenever the learner passes a multiple of
        `eval.every`."""
        step_interval, eval_sets = self.config.eval.every, self.config.eval.sets_during
        current_step = store.versions.current_version().step
        if (
            self.config.eval.engines
            or not step_interval
            or not eval_sets
            or current_step < step_interval
            or current_step >= self.config.train.steps
        ):
            return
        when = f"during@{current_step - current_step % step_interval}"
        for held_out in eval_sets:
            evaluation.schedule(store, self.config, held_out, when, min(self.config.eval.n_during, held_out.n))

    async def _with_space(self, write: Callable[[RunStore], _T]) -> _T:
        """The result of `write`, once the disk has space for it. Raises DiskFull after `train.stall_deadline_s`."""

        def tell(error: DiskFull) -> None:
            print(f"agentrl: {error}; the run waits for it", file=sys.stderr)

        deadline_s = self.config.train.stall_deadline_s
        return await wait_for_space(lambda: self.writes(write), deadline_s=deadline_s, tell=tell)

    def _expire(self, store: RunStore) -> None:
        buffer_settings, deadline_s = self.config.buffer, self.config.rollout.group_deadline_s
        # A pause is no time for the others.
        has_waited = store.now() - self._went_on_s >= buffer_settings.quorum_after_s
        quorum_policy = close_policy(self.config.quorum, after_s=buffer_settings.quorum_after_s) if has_waited else FULL
        store.buffer.expire(store.now(), deadline_s, close_policy=quorum_policy)
        if self.config.rewards:
            store.scores.expire_sources(store.now())

    async def _follow_the_clock(self, store_now_s: float) -> None:
        """Deadlines in the store are times of its clock. If that jumped, or this process and its machine stood still,
        move them along: nobody had that time."""
        earlier_clocks, self._clocks = self._clocks, (store_now_s, trio.current_time())
        if earlier_clocks is not None:
            passed_store_s, passed_own_s = (
                clock_now - clock_before for clock_now, clock_before in zip(self._clocks, earlier_clocks, strict=True)
            )
            # Two clocks that should run alike do not: the wall clock was set, or this process was stopped or suspended.
            # Either way the episodes did not have that time, and their deadlines move along instead of expiring all at
            # once (law 3).
            if abs(passed_store_s - passed_own_s) > _JUMP_S:
                await self._with_space(lambda store: store.deaths.shift_deadlines(passed_store_s - passed_own_s))

    async def _follow_pause(self, *, is_paused: bool) -> None:
        """Move the deadlines along once a pause ends: nobody had its time."""
        if is_paused and self._paused_at is None:
            self._paused_at = trio.current_time()
            _say(f"the run is paused; agentrl resume {self.run.path} lets it go on")
        elif not is_paused and self._paused_at is not None:
            await self._with_space(partial(self._go_on, trio.current_time() - self._paused_at))
            self._paused_at = None
            _say("the run goes on")

    def _go_on(self, stood_s: float, store: RunStore) -> None:
        store.deaths.shift_deadlines(stood_s)
        self._went_on_s = store.now()
        train_began_s, train_ended_s = TRAIN_STARTED_S.of(store.meta), TRAIN_ENDED_S.of(store.meta)
        if train_began_s is not None and train_ended_s is None:
            TRAIN_STARTED_S.set(store, train_began_s + stood_s)

    async def _follow_settings(self, change_count: int) -> None:
        """Take the settings that the learner has taken up."""
        if change_count == self._changes:
            return
        if (config_text := await self.writes(lambda store: CONFIG.of(store.meta))) is not None:
            self._changes = change_count
            new_config = configuration.from_json(config_text)
            self.config = new_config.model_copy(update={"engine": self.config.engine})  # which has the run's key
            if self._admitter is not None:
                self._admitter.bounds = bounds_of(new_config)
                self._admitter.skips = partial(skips, skipped=new_config.rollout.skip_tasks)

    async def _tick(self, progress: _Progress) -> None:
        look = await self.writes(_Look.at)
        await self._follow_the_clock(look.now_s)
        await self._follow_settings(look.change_count)
        await self._follow_pause(is_paused=look.is_paused)
        # While every engine restarts nothing can move, and the restart budget bounds that time. Counted here as well, a
        # start of a large model that takes longer than the stall deadline would end the run that is being repaired.
        is_excused = self._paused_at is not None or self.children.engines_are_restarting
        progress.saw(look.progress, excused=is_excused, children=self.children)
        if self._paused_at is None:
            await self._with_space(self._expire)
        try:
            await self.writes(self._check_failures)
        finally:  # it also shows what the run ends for
            await self._show()
        await trio.sleep(_TICK_S if self._paused_at is None else _PAUSED_TICK_S)

    async def _show(self) -> None:
        with suppress(StoreAway):
            await self._looks(lambda _: self.on_tick(self))

    def _check_failures(self, store: RunStore) -> None:
        """Stop when too much fails through no doing of the policy: a larger share than the budget allows, or too much
        in a row without an episode that ended well. An outage counts as one failure. An exception of somebody's code
        counts by itself, and is held against the episodes that run, too: a task that raises at once is over before the
        others are. The message has the latest cause."""
        failure_counts, failure_budget = store.metrics.failures(), self.config.rollout.failure_budget
        summary_text = (
            f"{failure_counts.failed} of {failure_counts.ended} episodes failed through no doing of the policy"
        )
        latest_text = f"the last: {failure_counts.detail}{self._more}"
        if failure_counts.in_a_row > _MIN_FAILURES or failure_counts.raised_in_a_row > max(
            _MIN_FAILURES, failure_counts.running
        ):
            failures_in_a_row = failure_counts.in_a_row + failure_counts.raised_in_a_row
            raise RunFailed(f"{summary_text}, and since {failures_in_a_row} failures none ended well; {latest_text}")
        spent_failures = failure_counts.outages + failure_counts.raised
        if spent_failures > max(
            _MIN_FAILURES,
            failure_budget
            * (spent_failures + failure_counts.well + (failure_counts.running if failure_counts.raised else 0)),
        ):
            times_text = f", at {failure_counts.outages} different times" if failure_counts.outages else ""
            raised_text = f", {failure_counts.raised} of them by an exception" if failure_counts.raised else ""
            raise RunFailed(
                f"{summary_text}{times_text}{raised_text} (rollout.failure_budget = {failure_budget:g}); {latest_text}"
            )

    def _played(self, tasks: int, store: RunStore) -> bool:
        """Whether this many training tasks were all played, late members and replays included."""
        group_counts = store.groups.counts()
        unfinished = group_counts.get(GroupState.WAITING, 0) + group_counts.get(GroupState.RUNNING, 0)
        waiting_replays = store.replays.counts(self.config.rollout.max_replays).waiting
        return (
            not unfinished
            and store.groups.tasks_started() >= tasks
            and not store.buffer.late_open()
            and not waiting_replays
        )


def _enter(phase: Phase) -> Callable[[RunStore], None]:
    return lambda store: PHASE.set(store, phase)


def _finish(reason: str | None) -> Callable[[RunStore], None]:
    """Return the write that finishes the run early, for `reason`. Without one the run fails, and may go on as it
    was."""

    def write(store: RunStore) -> None:
        if reason is not None:
            STOPPED_EARLY.set(store, reason)
        PHASE.set(store, "finish")

    return write


def _go_on(store: RunStore) -> None:
    """Prepare the store for what starts before the engines: those of before are gone, and a run that was stopped goes
    on."""
    ENGINE_URLS.set(store, [])
    if PHASE.of(store.meta) is not None:
        PHASE.set(store, "eval")


def _clock(at: Value[float | None]) -> Callable[[RunStore], None]:
    def write(store: RunStore) -> None:
        if at.of(store.meta) is None:
            at.set(store, time.time())

    return write


class _Look(NamedTuple):
    """One tick's reading of the store: how often settings changed, whether the run is paused, the numbers that must
    keep moving, and its clock in seconds. In one call, since each call takes a thread, four times a second."""

    change_count: int
    is_paused: bool
    progress: tuple[int, ...]
    now_s: float

    @classmethod
    def at(cls, store: RunStore) -> _Look:
        changes, is_paused, progress = CHANGES.of(store.meta), bool(PAUSED.of(store.meta)), store.metrics.progress()
        # The clock last: our own is read behind this call, and a store that answers late would look like a jump.
        return cls(len(changes), is_paused, progress, store.now())


class _Progress:
    """Raises RunFailed when a number that must keep moving has stood still for too long (law 4)."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._last: object = None
        self._since = trio.current_time()

    def saw(self, value: object, *, excused: bool, children: RunChildren) -> None:
        """Note the number. Time that is `excused` does not count: the run is paused, or every engine is restarting, and
        other deadlines hold then."""
        current_s = trio.current_time()
        if value != self._last or excused:
            self._last, self._since = value, current_s
        elif current_s - self._since > self._deadline_s:
            stall_text = f"no turn, score or step for {self._deadline_s:g} s (train.stall_deadline_s)"
            raise RunFailed("; ".join([stall_text, *children.troubles, "see the logs folder"]))


@asynccontextmanager
async def supervise(
    run: RunDir, *, on_tick: Callable[[Supervisor], None] = lambda _: None, stop: StopRequest | None = None
) -> AsyncGenerator[Supervisor]:
    """A supervisor over `run` with its scratch space made and its signals caught; all of it is removed at the end.

    Outside of the main thread there are no signals: `agentrl stop` ends it through the store.

    Raises Interrupted on SIGINT or SIGTERM, UsageError if another supervisor holds the run."""
    run_config, heartbeat = run.config(), Heartbeat.of_process()
    live_with_parent()
    # A key for each life of the run, in memory and in the children's environment alone: written to the run's folder it
    # would be in every copy of it.
    run_config = run_config.model_copy(update={"engine": run_config.engine.with_key(EngineKey.fresh())})
    supervision = open_store.supervising(run.store_path)
    with (
        run.lock() as lock_descriptor,
        ScratchSpace(run).owned(lock_descriptor) as mark,
        supervision as still_alone,
        _sockets(run_config) as sockets,
    ):
        open_store.own(run.store_path)
        run_store = RunStore.open(run.store_path, away_s=run_config.cluster.store_deadline_s)
        read_store = RunStore.read(run.store_path, away_s=0)
        try:
            is_checked = threading.Event()
            heartbeat.mark_while(lambda: run_store.waits or not is_checked.is_set())
            # Once at the start, before anything relies on a row: a page that a disk has changed would otherwise be met
            # hours later, by whichever process reads it.
            run_store.refuse_damage()
            is_checked.set()
            went_back = WENT_BACK.of(run_store.meta)
            run_start = start_point(run, run_store, heartbeat.mark)
            run_store.deaths.release_all()
            if not _gets_signals():
                TAKES_NO_SIGNALS.set(run_store, run.lock_path.read_text())
            store_writes, store_looks = Aside[RunStore](run_store), Looks[RunStore](read_store)
            # A run that grew grows again.
            start_size = Size.of(run_config).at_most(requested_size(run_config, run_store.meta))
            beat_meanwhile = partial(_beat_until_interrupted, run, heartbeat)
            async with (
                _launcher_of(run, run_config, start_size, store_looks, beat_meanwhile) as launcher,
                trio.open_nursery() as nursery,
            ):
                run_children = RunChildren(
                    run, run_config, store_looks, store_writes, nursery, mark, launcher, start_size, sockets
                )
                telemetry = Telemetry(run_store, run.metrics, "supervisor")
                nursery.start_soon(_interrupt, run.path)
                nursery.start_soon(_stop_on_request, run, store_looks)
                nursery.start_soon(_stay_alone, still_alone)
                nursery.start_soon(_say_what_it_cost, store_looks, went_back)
                nursery.start_soon(watch_disk, run.path, _say)
                nursery.start_soon(heartbeat.beat)
                nursery.start_soon(launcher.watch)
                stop_request = stop or StopRequest()
                supervisor = Supervisor(
                    run, run_config, read_store, store_writes, telemetry, run_children, run_start, on_tick, stop_request
                )
                nursery.start_soon(supervisor.obey)
                try:
                    notice_counts.record(run_store.metrics, 0, last=True)  # of the start: data, tasks, model folder
                    yield supervisor
                finally:
                    run_store.hurry(_LAST_WORD_S)
                    await run_children.stop()
                    await _forget_objects(run_config, store_looks)
                nursery.cancel_scope.cancel()
        finally:
            # What is left, summary and plot, has no deadline: a parent that keeps this process alive must not take it
            # for hung.
            heartbeat.retire()
            read_store.close()
            run_store.close()


@contextmanager
def _sockets(config: RunConfig) -> Generator[Path | None]:
    """A folder that only this user may enter, for engines to listen in; None where they are on several machines."""
    if config.cluster.on_ray:
        yield None
        return
    with closing(OwnedFolder()) as owned_folder:
        yield owned_folder.path


async def _forget_objects(config: RunConfig, looks: Looks[RunStore]) -> None:
    """Remove what the run has in its object store: the newest checkpoint has the weights."""
    with trio.CancelScope(shield=True), suppress(WeightSyncError, StoreAway):
        if (
            weights_folder := await looks(lambda store: objects_of(config.engine, config.name, store.meta, None))
        ) is not None:
            hurried_folder = ObjectFolder(weights_folder.url, deadline_s=_STORE_S)
            await trio.to_thread.run_sync(hurried_folder.remove_all)


def _gets_signals() -> bool:
    return threading.current_thread() is threading.main_thread()


async def _interrupt(path: Path) -> None:
    if not _gets_signals():
        return
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for signal_number in signals:
            raise _interrupted(
                f"stopped by {signal.Signals(signal_number).name}; go on with agentrl train --resume {path}"
            )


def _interrupted(why: str) -> Interrupted:
    leave_note(why)  # now: should this process hang while it ends its children, it is not started again
    return Interrupted(why)


async def _beat_until_interrupted(run: RunDir, heartbeat: Heartbeat) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_interrupt, run.path)
        nursery.start_soon(heartbeat.beat)


async def _stop_on_request(run: RunDir, looks: Looks[RunStore]) -> None:
    """Stop the run on a request in its store, since somebody on another machine can send no signal."""
    own_lock_text = run.lock_path.read_text()
    while True:
        with suppress(StoreError):
            if await looks(lambda store: STOP_REQUESTED.of(store.meta)) == own_lock_text:
                raise _interrupted(f"stopped by agentrl stop; go on with agentrl train --resume {run.path}")
        await trio.sleep(_STORE_LOOK_S)


def check_no_loop(name: str) -> None:
    """Raises UsageError inside of trio, whose loops do not nest. Inside of asyncio a run works."""
    if trio.lowlevel.in_trio_run():
        correction = "give it a thread: await trio.to_thread.run_sync(...)"
        raise UsageError(f"{name} starts an event loop of trio's, and was called inside of one: {correction}")


def _say(line: str) -> None:
    print(f"agentrl: {line}", file=sys.stderr)


async def _say_what_it_cost(looks: Looks[RunStore], before: str | None) -> None:
    """Report the cost whenever the run goes back to a checkpoint: at its own start, or a learner's that was started
    again."""
    while True:
        with suppress(StoreError):
            cost_text = await looks(lambda store: WENT_BACK.of(store.meta))
            if cost_text and cost_text != before:
                _say(cost_text)
            before = cost_text
        await trio.sleep(_STORE_LOOK_S)


async def _stay_alone(check: Callable[[], None]) -> None:
    while True:
        await trio.sleep(_STORE_LOOK_S)
        await trio.to_thread.run_sync(check, abandon_on_cancel=True)


def run_to_end(
    run: RunDir,
    body: Callable[[Supervisor], Awaitable[None]],
    *,
    on_tick: Callable[[Supervisor], None] = lambda _: None,
    stop: StopRequest | None = None,
) -> None:
    """Run `body` under a supervisor, which `stop` may end, and unwrap the one error that ended it."""

    async def main() -> None:
        async with supervise(run, on_tick=on_tick, stop=stop) as supervisor:
            await body(supervisor)

    try:
        trio.run(main, clock=HostClock())  # no deadline of a child passes while the machine is suspended
    except BaseExceptionGroup as group:
        raise matters(group) from None


@asynccontextmanager
async def _launcher_of(
    run: RunDir, config: RunConfig, size: Size, looks: Looks[RunStore], starting: Callable[[], Awaitable[None]]
) -> AsyncGenerator[Launcher]:
    """The launcher that the run file names, with places for a run of this size; `starting` runs until it has them.
    Raises UsageError if it cannot start anything."""
    if not config.cluster.on_ray:
        yield LOCAL
        return
    try:
        from agentrl.run.cluster import ray_launcher
    except ImportError as error:
        raise UsageError(f"cluster.launcher = 'ray' needs Ray ({error}): {install_command('ray')}") from None

    async def ranks() -> int:
        return await looks(lambda store: scale_requests.ranks(config, store.meta))

    async with ray_launcher.connected(run, config, size, ranks, starting) as launcher:
        yield launcher
