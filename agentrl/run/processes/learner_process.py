"""The learner's process: take a batch, step, mint a version, send it, confirm it; checkpoint now and then.

It is the only process that loads torch besides the engine. A push overlaps the next step, on a thread: neither side
waits for the other (law 6). A push therefore sends a file, or a copy in memory, made between two steps. The time in
which the learner waits for groups, or for the push before, is measured as idle time; the run's trainer idle share is
computed from it. A checkpoint is written beside the next steps too, from a copy. Its episodes count as trained once it
is durable, and the next one waits for that: a kill in between costs the steps since the one before. A learner that
shares its GPU with the engines (`runtime.turns`) has it from the batch to the file of the new weights.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio

from agentrl.config import RunConfig
from agentrl.engine.weight_sync import canary
from agentrl.engine.weight_sync.canary import Canary
from agentrl.engine.weight_sync.publisher import NotDelivered
from agentrl.engine.weight_sync.transport import MemoryParcel, Parcel
from agentrl.engine.weight_sync.weight_lock import WeightLock
from agentrl.errors import RunFailed, StoreError, WornOut
from agentrl.host.disk_space import once_there_is_space, with_space
from agentrl.host.janitor import watch_lifeline
from agentrl.learner.build_learner import build_learner, ranks_of
from agentrl.learner.gpu_sender import GpuSender
from agentrl.learner.learner import Diverged
from agentrl.learner.optimizers.offload import Parking
from agentrl.learner.weight_export import circumstances
from agentrl.learner.weight_proof import proof_of
from agentrl.models.resolve import engine_dtype, model_dir, slot_dir
from agentrl.records import Group, WeightVersion
from agentrl.run import live_settings
from agentrl.run.alarms import LagBound, advice, raised
from agentrl.run.cluster import scale_requests
from agentrl.run.evaluation import pinned
from agentrl.run.league import League
from agentrl.run.processes import heartbeat
from agentrl.run.processes.exit_status import give_up
from agentrl.run.processes.heartbeat import BEAT_S, Heartbeat
from agentrl.run.reporting import notice_counts
from agentrl.run.run_folder import RunDir
from agentrl.run.start_point import start_point
from agentrl.run.take_orders import returns_of, take_order
from agentrl.run.telemetry import Telemetry
from agentrl.run.weights.gpu_turns import Turns
from agentrl.run.weights.role_policies import Publishers, file_of, urls_of
from agentrl.store import Patience, RunStore
from agentrl.store.run_values import LEARNER_STARTED, LEARNER_WAITS, MAX_LAG, MODEL_PARAMS, PAUSED, PHASE
from agentrl.tokens import staleness

_WAIT_S = 0.25  # the longest wait for members before the learner looks at its push again
_LONG_S = 30.0  # after which a wait for members is named
_HOLD = -1  # in the place of a number of members: no group is taken
_WATCH_S = 1.0  # between two checks of the engines' versions while the learner waits
_Write = Callable[[Callable[[], None]], Path]


def learn(path: Path) -> None:
    """Train the run at `path` from its newest checkpoint to its last step. Exits at once when its owner is gone."""
    watch_lifeline(lambda: os._exit(70))
    run = RunDir.open(path)
    store = RunStore.open(run.store_path, away_s=run.config().cluster.store_deadline_s)
    try:
        _Learning(run, store).run()
    finally:
        store.close()


class _Learning:
    """The loop and its state. `learner.step_index` is the step of its weights; at most one push and one checkpoint are
    under way."""

    _row_at = 0.0  # when the row of the last step was made, by `time.perf_counter`

    _league: League | None = None  # of a run without past selves
    _at_bound = 0  # episodes for which the learner waits at the lag bound
    _turns: Turns | None = None  # of a run whose learner has its device for itself
    _write: Future[None] | None = None  # the checkpoint under way

    def __init__(self, run: RunDir, store: RunStore) -> None:
        self._run, self._heartbeat = run, Heartbeat.of_process()
        self._heartbeat.mark_while(lambda: store.waits)
        self._as_begun = run.config()
        self._patience = partial(
            once_there_is_space, deadline_s=self._as_begun.train.stall_deadline_s, mark=self._heartbeat.mark
        )
        self._store = store = with_space(store, **self._patience.keywords)
        self._config: RunConfig = with_ranks(self._as_begun, scale_requests.ranks(self._as_begun, store.meta))
        store.lineage.lead()
        start = start_point(run, store, self._heartbeat.mark)
        start_s, ends = self._config.engine.start_deadline_s, partial(give_up, "learner")
        self._ranks = ranks_of(self._config.train, start_s, self._heartbeat.mark, ends=ends)
        if self._config.engine.colocated:
            engine, level = self._config.engine, 1 if self._config.sends_adapters else 2
            self._turns = Turns(engine, run.locks, self._heartbeat.mark, level=level)
            self._turns.begin(self._urls, weights_follow=False)
        self._learner = build_learner(
            self._config.learner,
            model_dir(self._config.model),
            folder_of=partial(slot_dir, self._config),
            progress=self._heartbeat.mark,
            may_save=store.lineage.still_leads,
            ranks=self._ranks,
        )
        if start.checkpoint is not None:
            self._learner.load(start.checkpoint)
        if self._turns is not None:
            self._turns.parking = Parking(self._learner.models)
            self._turns.without_weights(self._urls)
        self._telemetry = Telemetry(store, run.metrics, "learner")
        device, memory = self._learner.model.device, self._config.syncs_memory
        sender = GpuSender(self._config.transport.backend, device) if memory else None
        self._order, self._returns = take_order(self._config), returns_of(self._config)
        if self._config.league_roles:
            self._league = League(self._config, run, store)
            if start.checkpoint is not None and self._league.is_due(start.version.step):
                self._league.join(start.version, start.checkpoint)
        self._publisher = Publishers(
            self._config.engine,
            self._config.sync,
            self._as_leader,
            sender,
            name=self._config.name,
            roles=tuple(self._config.role_models),
            locks=run.locks,
        )
        full = self._config.buffer.max_lag
        self._bound = LagBound(full, now=staleness.bound_now(MAX_LAG.of(store.meta), full))
        self._held = Patience(self._config.buffer.patience)
        self._saved_at = time.monotonic()
        self._watch_at = time.monotonic() if sender is not None else math.inf
        self._pushes, self._writes = ThreadPoolExecutor(1, "push"), ThreadPoolExecutor(1, "checkpoint")
        self._push: Future[None] | None = None
        self._progress = threading.Event()  # a part of the checkpoint was written
        MODEL_PARAMS.set(store, sum(p.numel() for p in self._learner.model.parameters()))
        ready = {"ranks": self._ranks.size, "step": self._learner.step_index, "start_s": heartbeat.age_s()}
        LEARNER_STARTED.set(store, ready)
        LEARNER_WAITS.set(store, None)  # one before may have died while it waited

    def run(self) -> None:
        """Raises RunFailed; if the engines failed, or the gradients, saves a checkpoint first. Raises LeaseLost if
        another learner leads by now: that one removes what this one writes, so whatever failed here is no failure."""
        try:
            self._train()
        except StoreError:
            raise
        except Exception:
            self._store.lineage.still_leads()
            raise

    def _train(self) -> None:
        try:
            self._learn()
        except (NotDelivered, Diverged) as error:
            self._written()
            if self._turns is not None:
                self._turns.give_up()
            if self._learner.trained:
                self._learner.save(self._run.checkpoints)  # `start_point` makes it known to the store
            if not isinstance(error, Diverged):
                raise
            more = f"train.max_skipped={2 * max(1, self._config.train.max_skipped)}"
            hint = f"this one is saved and goes on with agentrl train --resume {self._run.path} --set {more}"
            raise RunFailed(f"{error}; {hint}") from error
        finally:
            if self._write is not None:  # another error ends the learner: what it saved counts
                wait([self._write])

    def _learn(self) -> None:
        learner = self._learner
        self._await_engines()
        current = self._store.versions.current_version()
        # After a rollback the engines serve versions that were undone: a new version is newer than these.
        if current.step != learner.step_index or trio.run(self._publisher.behind, current.version):
            self._begin()
            self._publish({})
        version = None
        self._row_at = time.perf_counter()
        while learner.step_index < self._config.train.steps and (batch := self._take()) is not None:
            (groups, idle_s), config = batch, self._config
            held_s, self._held.held_s = self._held.held_s, 0.0
            idle_s += self._begin()
            busy = time.perf_counter()
            self._heartbeat.mark()
            bound = self._bound.now
            report = learner.step(
                groups, step_of=self._store.versions.step_of, undone=self._store.versions.is_undone, max_lag=bound
            )
            busy_s = time.perf_counter() - busy
            idle_s += self._settle()
            taken = [group.id for group in groups if not group.skipped]
            weights = {str(group.id): group.weight for group in groups if group.weight != 1.0}
            self._held.worked(busy_s)
            row = {**asdict(report), "idle_s": idle_s, "busy_s": busy_s, "groups": taken, "group_weights": weights}
            row |= {"held_s": held_s, "wall_s": self._wall_s()}
            alarms = raised(row, config.alarms)
            if self._league is not None:
                row |= self._league.count(groups)
            row |= {"max_lag": bound, "alarms": [alarm.text for alarm in alarms]}
            if changed := live_settings.of_step(self._store, config):
                row["settings"] = changed
            MAX_LAG.set(self._store, self._bound.after(alarms))
            self._record_hashes()
            version = self._publish(row)
            self._heartbeat.mark()
            if stopping := [alarm for alarm in alarms if alarm.action == "stop"]:
                self._checkpoint(version)
                self._settle()
                self._written()
                raise RunFailed(f"step {learner.step_index}: {advice(stopping, self._run.path)}")
            if self._is_time(learner.step_index):
                self._checkpoint(version)
        if version is not None and learner.trained:
            self._checkpoint(version)
        self._settle()
        self._written()

    def _wall_s(self) -> float:
        """Seconds since the row of the step before, without pauses of the run: all that the step cost, also what is
        neither its work nor its wait."""
        before, self._row_at = self._row_at, time.perf_counter()
        return self._row_at - before

    def _await_engines(self) -> None:
        """Wait until the engines serve: they may have started with the learner."""
        self._heartbeat.mark()
        while not self._urls():
            self._store.wait_for_work("learner", _WAIT_S)
            self._heartbeat.mark()

    def _take(self) -> tuple[list[Group], float] | None:
        """The next batch and how long the learner waited for it, in seconds; None if no task is left or training is to
        end. The last one waits for late members, which no later step trains, at most `rollout.group_deadline_s`."""
        buffer, train = self._config.buffer, self._config.train
        started, size, whole_at = time.perf_counter(), buffer.groups_per_step, math.inf
        patience_s, named = min(self._config.rollout.group_deadline_s, train.stall_deadline_s / 2), ""
        tell_s = _LONG_S
        while (phase := PHASE.of(self._store.meta)) != "stop":
            if phase == "finish":
                return None
            self._take_settings()
            if PAUSED.of(self._store.meta):
                stood_s = self._stand_still()
                started, whole_at = started + stood_s, whole_at + stood_s
                self._row_at += stood_s
                continue
            if self._config.cluster.controller is not None:
                self._make_way()
            if phase == "drain":
                size = min(size, self._store.buffer.ready_count())  # 0: only late members
            step, now, groups = self._learner.step_index + 1, time.perf_counter(), None
            if step < train.steps or not self._store.buffer.late_open() or now > whole_at + patience_s:
                least = self._least_at_bound(step, size)
                groups = (
                    None
                    if least == _HOLD
                    else self._store.buffer.take(
                        step,
                        size,
                        max_lag=self._bound.now,
                        order=self._order,
                        returns=self._returns,
                        skip_at_most=buffer.skips,
                        close_at_bound=least,
                    )
                )
            elif self._store.buffer.ready_count() >= size:
                whole_at = min(whole_at, now)
            if groups is not None:
                if named:
                    LEARNER_WAITS.set(self._store, None)
                return groups, time.perf_counter() - started
            if now - started > tell_s:  # again and again: what is missing may change
                tell_s, held = 2 * tell_s, self._at_bound
                named = waits_for(self._store, step, size, last=step >= train.steps, patience_s=patience_s, held=held)
                LEARNER_WAITS.set(self._store, named)
                print(f"agentrl learner: {named}", file=sys.stderr)
            if size == 0:
                return None
            self._wait()
        raise SystemExit(0)

    def _wait(self) -> None:
        """Wait a moment for groups, or for what the supervisor says."""
        if self._push is not None and self._push.done():
            self._settle()  # raises if it failed: without its version no group may ever come
        elif self._push is None and time.monotonic() >= self._watch_at:
            self._send_again()
        self._heartbeat.mark()
        self._store.wait_for_work("learner", _WAIT_S)

    def _take_settings(self) -> None:
        """What somebody asked for holds from the next step on."""
        after = live_settings.take_up(self._run, self._store, self._learner.step_index + 1)
        if after is None:
            return
        self._as_begun, self._config = after, with_ranks(after, self._ranks.size)
        self._learner.retune(self._config.learner)
        MAX_LAG.set(self._store, self._bound.resize(after.buffer.max_lag))

    def _stand_still(self) -> float:
        """Wait until the run goes on, or is to end. Returns how long that took, in seconds."""
        began = time.perf_counter()
        self._held.holds(False, time.monotonic())
        while PAUSED.of(self._store.meta) and PHASE.of(self._store.meta) not in ("stop", "finish"):
            self._take_settings()
            self._wait()
        return time.perf_counter() - began

    def _least_at_bound(self, step: int, size: int) -> int | None:
        """With how many scored members a group at the lag bound closes for `step`; `_HOLD` while the learner waits
        there, though it could go on, for the episodes that the step would lose."""
        work = self._store.buffer.at_bound(step, max_lag=self._bound.now, quorum=self._config.quorum)
        ready = size > 0 and self._store.buffer.ready_count() + work.closable >= size
        waits = work.episodes > 0 and ready
        self._at_bound = work.episodes if self._held.holds(waits, time.monotonic()) else 0
        return _HOLD if self._at_bound else 0 if waits else self._config.quorum

    def _as_leader(self, key: str) -> str | None:
        """A push that no engine takes asks again and again where the engines are: it ends when another learner leads.
        Raises LeaseLost."""
        self._store.lineage.still_leads()
        return self._store.meta(key)

    def _urls(self) -> list[str]:
        return urls_of(self._store.meta, None)

    def _begin(self) -> float:
        """Have the device. Returns how long the learner waited for the push before, in seconds, if it shares one."""
        if self._turns is None:
            return 0.0
        waited_s = self._settle()
        self._turns.begin(self._urls)
        self._heartbeat.mark()
        return waited_s

    def _make_way(self) -> None:
        """If another number of ranks is wanted: save, and end. The learner that is started then has that number."""
        wanted = scale_requests.ranks(self._as_begun, self._store.meta)
        if wanted == self._ranks.size:
            return
        self._settle()
        if self._learner.trained:
            self._checkpoint(self._store.versions.current_version())
            self._written()
        raise WornOut(f"the learner goes on with {wanted} ranks instead of {self._ranks.size}")

    def _publish(self, row: dict[str, Any]) -> WeightVersion:
        """Write the weights to shared memory, or copy them, leave a device that is shared, and start to send them. The
        step's metrics `row` is recorded when every engine has them."""
        if self._turns is not None and self._turns.parking is not None:
            self._turns.parking.begin()
        if self._config.syncs_memory:
            version = self._store.versions.mint_version(self._learner.step_index)
            self._push = self._pushes.submit(self._send, version, {None: self._snapshot(version)}, row)
            return version
        path = self._run.scratch / "weights" / str(time.time_ns())
        sha256, marks = dict[str | None, str](), dict[str | None, Mapping[str, str]]()
        if self._config.sends_adapters:
            self._learner.export_adapter(path)
        else:
            path = path.with_suffix(".safetensors")
            for role in self._policies:
                dtype = getattr(torch, self._dtype(role))
                file = self._learner.export(file_of(path, role), dtype=dtype, role=role)
                sha256[role], marks[role] = file.sha256, file.fingerprints
                self._heartbeat.mark()
        self._heartbeat.mark()
        version = self._store.versions.mint_version(self._learner.step_index, path)
        parcels = {
            role: Parcel(
                version=version.version,
                path=file_of(path, role),
                sha256=sha256.get(role, ""),
                canary=self._canary(version, marks.get(role, {}), role),
            )
            for role in self._policies
        }
        held = None if self._turns is None else self._turns.end()
        self._push = self._pushes.submit(self._send, version, parcels, row, held)
        return version

    def _send_again(self) -> None:
        """Send the current weights again if an engine lacks them: an engine that was restarted, or one the run attached
        to. Only the learner can do it when no file holds them."""
        self._watch_at = time.monotonic() + _WATCH_S
        version = self._store.versions.current_version()
        if version.step == self._learner.step_index and trio.run(self._publisher.behind, version.version):
            self._push = self._pushes.submit(self._send, version, {None: self._snapshot(version)}, {})

    def _snapshot(self, version: WeightVersion) -> MemoryParcel:
        """A copy of the current weights in the engines' dtype; the next step changes the originals during the send."""
        snapshot = self._learner.snapshot(getattr(torch, self._dtype()))
        proof = self._canary(version, snapshot.fingerprints())
        return MemoryParcel(version=version.version, snapshot=snapshot, canary=proof)

    @property
    def _policies(self) -> tuple[str | None, ...]:
        """The roles with a model of their own, and None for all others."""
        return (None, *self._config.role_models)

    def _dtype(self, role: str | None = None) -> canary.Dtype:
        return engine_dtype(self._config.engine, self._learner.models.of(role).folder)

    def _canary(
        self, version: WeightVersion, fingerprints: Mapping[str, str], role: str | None = None
    ) -> Canary | None:
        """The log-probs of a fixed probe under the weights that are sent to the engines of a role with a model of its
        own, or of all others, and the fingerprints of these weights."""
        config = self._config
        if not config.engine.canary:
            return None
        return proof_of(
            self._learner,
            fingerprints,
            version=version.version,
            dtype=self._dtype(role),
            train=config.train,
            role=role,
            most_tokens=config.rollout.max_context - 1,
            as_adapter=config.sends_adapters,
            adapted=config.adapted_roles,
        )

    def _settle(self) -> float:
        """Wait for the push under way. Returns how long that took, in seconds. Re-raises the push's error."""
        started = time.perf_counter()
        push, self._push = self._push, None
        if push is not None:
            patience_s = 2 * self._config.engine.mending_deadline_s  # longer than `WeightPublisher.deliver` ever takes
            while wait([push], timeout=BEAT_S).not_done:
                if time.perf_counter() - started < patience_s:
                    self._heartbeat.mark()
            push.result()
        return time.perf_counter() - started

    def _send(
        self,
        version: WeightVersion,
        parcels: Mapping[str | None, Parcel | MemoryParcel],
        row: dict[str, Any],
        held: WeightLock | None = None,
    ) -> None:
        """Send the weights to every engine, confirm the version, drop the versions that nobody needs any more."""
        try:
            sync = trio.run(self._publisher.deliver, parcels, held)
        finally:
            if held is not None:
                held.let_go()
        if self._turns is not None:
            sync |= self._turns.cost()
        if self._league is not None:  # first: groups that this version admits draw from all members before it
            trio.run(self._league.announce, self._publisher.urls())
        whole = parcels[None]
        if row and isinstance(whole, Parcel) and pinned.is_due(self._config, version.step):
            self._patience(lambda: pinned.keep(self._run, version, whole.path))
        self._store.versions.confirm_version(version)
        if row:
            values = {**row, **sync, "version": version.version}
            self._store.metrics.record("step", version.step, values)
            self._patience(lambda: self._telemetry.append("step", version.step, values))
        self._patience(lambda: notice_counts.record(self._store.metrics, version.step))
        trio.run(self._publisher.tidy)

    def _record_hashes(self) -> None:
        """What `agentrl retrain` compares its weights with. Only the store has it: it is no curve."""
        made = {"hashes": list(self._learner.hashes().values()), "with": circumstances(self._config.train)}
        self._store.metrics.record("weights", self._learner.step_index, made)

    def _is_time(self, step: int) -> bool:
        """Whether to save now, so that a dead learner loses no more steps or time than the settings allow."""
        every = self._config.train
        joins = self._league is not None and self._league.is_due(step)
        return (
            joins or step % every.checkpoint_every == 0 or time.monotonic() - self._saved_at >= every.checkpoint_every_s
        )

    def _checkpoint(self, version: WeightVersion) -> None:
        """Save the state of this step: a copy of it, on a thread, once the checkpoint before is durable. If there is no
        room for a copy, or past selves are to join from the folder, nothing goes on meanwhile."""
        self._written()
        write = None
        if self._league is None:
            write = self._learner.copy(self._run.checkpoints)
            self._heartbeat.mark()
        if write is not None:
            self._write = self._writes.submit(self._save, version, write, self._push)
        else:
            self._settle()
            self._record(version, self._learner.save(self._run.checkpoints))
        self._saved_at = time.monotonic()

    def _save(self, version: WeightVersion, write: _Write, push: Future[None] | None) -> None:
        """Write a copy, unless its push finds that engines compute with other weights: then the learner ends, as it
        settles, and the checkpoint before stays the newest."""
        error = None if push is None else push.exception()
        if error is None or isinstance(error, NotDelivered):
            self._record(version, write(self._progress.set))

    def _record(self, version: WeightVersion, folder: Path) -> None:
        """Folder first, then the store: `start_point` mends a kill in between."""
        self._store.lineage.checkpoint(version.step, version, folder)
        if self._league is not None and self._league.is_due(version.step):
            self._league.join(version, folder)
        self._store.lineage.retain(
            version.step, keep_steps=self._config.buffer.keep_steps, keep_sample=self._config.buffer.keep_sample
        )

    def _written(self) -> None:
        """Wait until the checkpoint under way is durable and recorded; only its progress is a mark. Re-raises its
        error."""
        write, self._write = self._write, None
        while write is not None and wait([write], timeout=BEAT_S).not_done:
            if self._progress.is_set():
                self._progress.clear()
                self._heartbeat.mark()
        if write is not None:
            write.result()


def waits_for(store: RunStore, step: int, size: int, *, last: bool, patience_s: float, held: int = 0) -> str:
    """What the learner waits for before `step`, which takes `size` groups; `held`: episodes at the lag bound."""
    if held:
        least = "lower rollout.step_deadline_s or raise buffer.max_lag; buffer.wait_at_bound=1 would lose some of them"
        return f"step {step} waits for {held} running episodes that it would make too old: {least}"
    ready, late = store.buffer.ready_count(), store.buffer.late_open()
    if ready < size:
        return f"step {step} waits for groups: {ready} of {size} are scored; agentrl rewards RUN names late sources"
    if last and late:
        least = f"{patience_s:g} s at most (rollout.group_deadline_s)"
        return f"step {step} is the last: it waits for {late} late members, which no later step trains, {least}"
    return f"step {step} waits, though {ready} groups are scored: of these too few fit (buffer.max_lag, its order)"


def with_ranks(config: RunConfig, ranks: int) -> RunConfig:
    """The configuration of a learner over so many ranks."""
    return config.model_copy(update={"train": config.train.over(ranks)})
