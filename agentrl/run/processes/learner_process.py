"""The learner's process: its set-up, and the one `trio.run` of its loop (`agentrl.run.learning.learner_loop`).

It is the only process that loads torch besides the engine. All that computes does so on one thread (`TorchThread`);
the main thread turns the loop. It begins from the newest intact checkpoint. A learner that shares its GPU with the
engines (`engine.colocated`) has them sleep while it loads its model.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import trio

from agentrl.config import RunConfig
from agentrl.errors import matters
from agentrl.host.janitor import watch_lifeline
from agentrl.learner.build_learner import build_learner, ranks_of
from agentrl.learner.gpu_sender import GpuSender
from agentrl.learner.learner import Learner
from agentrl.learner.optimizers.offload import Parking
from agentrl.models.resolve import model_dir, slot_dir
from agentrl.records import WeightVersion
from agentrl.run.alarms import LagBound
from agentrl.run.cluster import scale_requests
from agentrl.run.evaluation import pinned
from agentrl.run.league import League
from agentrl.run.learning.background import TorchThread
from agentrl.run.learning.checkpoint_writer import CheckpointWriter
from agentrl.run.learning.current_settings import CurrentSettings
from agentrl.run.learning.learner_loop import LearnerLoop
from agentrl.run.learning.step_edge import StepEdge
from agentrl.run.learning.step_records import StepRecords
from agentrl.run.learning.store_calls import StoreCalls
from agentrl.run.learning.take_batches import BatchTaker
from agentrl.run.learning.weight_parcels import ParcelMaker
from agentrl.run.learning.weight_push import WeightPush, leader_meta
from agentrl.run.processes import heartbeat
from agentrl.run.processes.exit_status import give_up
from agentrl.run.processes.heartbeat import Heartbeat
from agentrl.run.run_folder import RunDir
from agentrl.run.start_point import StartPoint, start_point
from agentrl.run.take_orders import returns_of, take_order
from agentrl.run.telemetry import Telemetry
from agentrl.run.weights.gpu_turns import Turns
from agentrl.run.weights.role_policies import Publishers, urls_of
from agentrl.store import RunStore
from agentrl.store.run_values import LEARNER_STARTED, LEARNER_WAITS, MAX_LAG, MODEL_PARAMS
from agentrl.tokens import staleness


def learn(path: Path) -> None:
    """Train the run at `path` from its newest checkpoint to its last step. Exits at once when its owner is gone."""
    # At once and without cleaning up: a learner without a supervisor must not write a checkpoint beside the one of its
    # successor, and everything that it has finished is in the store already.
    watch_lifeline(lambda: os._exit(70))
    run_folder = RunDir.open(path)
    run_store = RunStore.open(run_folder.store_path, away_s=run_folder.config().cluster.store_deadline_s)
    try:
        train(run_folder, run_store)
    finally:
        run_store.close()


def train(run: RunDir, store: RunStore) -> None:
    """Train the run of an open `store`. Raises the most important of the errors that ended it."""
    try:
        trio.run(_Process(run, store).main)
    except BaseExceptionGroup as group:
        raise matters(group) from None


class _Process:
    """Makes the parts of the loop, each with what it needs of the run's configuration."""

    def __init__(self, run: RunDir, store: RunStore) -> None:
        self._run, self._store, self._torch = run, store, TorchThread()
        self._heartbeat = Heartbeat.of_process()
        self._heartbeat.mark_while(lambda: store.waits)
        self._mark = self._heartbeat.mark

    async def main(self) -> None:
        run_folder, run_store, as_written = self._run, self._store, self._run.config()
        self._calls = store_calls = StoreCalls(run_store, self._mark, deadline_s=as_written.train.stall_deadline_s)
        # The very first thing: from here on a learner that was taken for dead and is not cannot change anything, also
        # not while this one still loads its model.
        await store_calls(lambda store: store.lineage.lead())
        run_start = await store_calls(lambda store: start_point(run_folder, store, self._mark))
        requested = await store_calls(lambda store: scale_requests.ranks(as_written, store.meta))
        self._settings = CurrentSettings(run_folder, store_calls, as_written, requested)
        run_config = self._settings.config
        gpu_turns = self._turns(run_config)
        learner = await self._learner(run_config, run_start, gpu_turns)
        run_league = await self._league(run_config, run_start)
        full_bound = run_config.buffer.max_lag
        lag_bound = LagBound(
            full_bound, now=staleness.bound_now(await store_calls(lambda store: MAX_LAG.of(store.meta)), full_bound)
        )
        async with trio.open_nursery() as nursery:
            weight_push = self._pushes(run_config, learner, nursery, run_league, gpu_turns)
            checkpoints = CheckpointWriter(
                learner,
                run_folder.checkpoints,
                weight_push,
                store_calls,
                self._torch,
                nursery,
                self._mark,
                train=run_config.train,
                buffer=run_config.buffer,
                league=run_league,
            )
            step_records = StepRecords(store_calls, self._settings, lag_bound, run_league)
            step_edge = StepEdge(
                learner, self._torch, store_calls, self._settings, weight_push, checkpoints, lag_bound, self._mark
            )
            batch_taker = BatchTaker(
                step_edge,
                store_calls,
                lag_bound,
                buffer=run_config.buffer,
                quorum=run_config.quorum,
                steps=run_config.train.steps,
                stall_deadline_s=run_config.train.stall_deadline_s,
                group_deadline_s=run_config.rollout.group_deadline_s,
                order=take_order(run_config),
                returns=returns_of(run_config),
            )
            await store_calls(partial(_announce, learner=learner))
            learner_loop = LearnerLoop(
                path=run_folder.path,
                learner=learner,
                torch=self._torch,
                batches=batch_taker,
                pushes=weight_push,
                checkpoints=checkpoints,
                records=step_records,
                calls=store_calls,
                versions=run_store.versions,
                bound=lag_bound,
                mark=self._mark,
                turns=gpu_turns,
            )
            await learner_loop.run()

    def _turns(self, config: RunConfig) -> Turns | None:
        if not config.engine.colocated:
            return None
        # Sleep level 2 drops the engine's weights, which the next push brings anyway. With adapters the weights below
        # them are never sent again, so level 1 keeps them in host memory.
        sleep_level = 1 if config.sends_adapters else 2
        return Turns(config.engine, self._run.locks, self._torch, self._mark, level=sleep_level)

    async def _learner(self, config: RunConfig, start: StartPoint, turns: Turns | None) -> Learner:
        """The learner of the run, at its start point."""
        start_deadline_s, give_up_learner = config.engine.start_deadline_s, partial(give_up, "learner")
        engine_urls = partial(urls_of, self._store.meta, None)

        def build() -> Learner:
            learner = build_learner(
                config.learner,
                model_dir(config.model),
                folder_of=partial(slot_dir, config),
                progress=self._mark,
                may_save=self._store.lineage.still_leads,
                ranks=learner_ranks,
            )
            if start.checkpoint is not None:
                learner.load(start.checkpoint)
            return learner

        learner_ranks = await self._torch.run(
            lambda: ranks_of(config.train, start_deadline_s, self._mark, ends=give_up_learner)
        )
        if turns is None:
            return await self._torch.run(build)
        await turns.begin(engine_urls, weights_follow=False)
        learner = await self._torch.run(build)
        turns.parking = await self._torch.run(lambda: Parking(learner.models))
        await turns.without_weights(engine_urls)
        return learner

    async def _league(self, config: RunConfig, start: StartPoint) -> League | None:
        if not config.league_roles:
            return None
        run_league = await self._calls(lambda store: League(config, self._run, store))
        if start.checkpoint is not None and run_league.is_due(start.version.step):
            await trio.to_thread.run_sync(run_league.join, start.version, start.checkpoint)
        return run_league

    def _pushes(
        self, config: RunConfig, learner: Learner, nursery: trio.Nursery, league: League | None, turns: Turns | None
    ) -> WeightPush:
        role_names, read_meta, in_memory = (
            tuple(config.role_models),
            partial(leader_meta, self._store),
            config.syncs_memory,
        )
        gpu_sender = GpuSender(config.transport.backend, learner.model.device) if in_memory else None
        publisher = Publishers(
            config.engine, config.sync, read_meta, gpu_sender, name=config.name, roles=role_names, locks=self._run.locks
        )
        parcel_maker = ParcelMaker(
            learner,
            self._run.scratch / "weights",
            self._mark,
            engine=config.engine,
            train=config.train,
            roles=role_names,
            adapted=config.adapted_roles,
            sends_adapters=config.sends_adapters,
            most_tokens=config.rollout.max_context - 1,
        )
        return WeightPush(
            parcel_maker,
            publisher,
            self._calls,
            self._torch,
            nursery,
            Telemetry(self._store, self._run.metrics, "learner"),
            self._mark,
            pin=self._pin,
            in_memory=in_memory,
            patience_s=2 * config.engine.mending_deadline_s,
            league=league,
            turns=turns,
        )

    def _pin(self, version: WeightVersion, weights: Path) -> None:
        """Keep the weights of a version that an evaluation with engines of its own needs."""
        if pinned.is_due(self._settings.config, version.step):
            pinned.keep(self._run, version, weights)


def _announce(store: RunStore, learner: Learner) -> None:
    """Let the other processes know that the learner is ready."""
    MODEL_PARAMS.set(store, sum(parameter.numel() for parameter in learner.model.parameters()))
    start_row = {"ranks": learner.ranks.size, "step": learner.step_index, "start_s": heartbeat.age_s()}
    LEARNER_STARTED.set(store, start_row)
    LEARNER_WAITS.set(store, None)  # one before may have died while it waited
