"""The learner's process: take a batch, step, mint a version, push it, confirm it; checkpoint now and then.

It is the only process that loads torch besides the engine. Its waiting for groups is measured as idle time: that is
what the run's trainer idle share is made of.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import trio

from agentrl.config import RunConfig
from agentrl.engine.weights import push
from agentrl.errors import EngineError
from agentrl.records import Group, WeightVersion
from agentrl.runtime.checkpoints import start_point
from agentrl.runtime.child import watch_lifeline
from agentrl.runtime.models import model_dir
from agentrl.runtime.rundir import RunDir
from agentrl.store import RunStore
from agentrl.telemetry import Telemetry
from agentrl.train.learner import Learner

_POLL_S = 0.005
_SYNC_TRIES = 20
_SYNC_RETRY_S = 0.5


def learn(path: Path) -> None:
    """Train the run at `path` from its newest checkpoint to its last step. Exits at once when its owner is gone."""
    watch_lifeline(lambda: os._exit(70))
    run = RunDir.open(path)
    store = RunStore.open(run.store_path)
    try:
        _Learning(run, store).run()
    finally:
        store.close()


class _Learning:
    """The loop and its state. `learner.step_index` is the step of the weights it holds."""

    def __init__(self, run: RunDir, store: RunStore) -> None:
        self._run, self._store = run, store
        self._config: RunConfig = run.config()
        start = start_point(run, store)
        self._learner = Learner(self._config, model_dir(self._config.model))
        if start.checkpoint is not None:
            self._learner.load(start.checkpoint)
        self._telemetry = Telemetry(store, run.metrics, "learner")
        store.set_meta("model_params", str(sum(p.numel() for p in self._learner.model.parameters())))

    def run(self) -> None:
        learner, config = self._learner, self._config
        if self._store.current_version().step != learner.step_index:
            self._publish()
        while learner.step_index < config.train.steps:
            groups, idle_s = self._take()
            busy = time.perf_counter()
            report = learner.step(groups, step_of=self._store.step_of)
            version, sync = self._publish()
            self._telemetry.record(
                "step",
                learner.step_index,
                {
                    **asdict(report),
                    **sync,
                    "version": version.version,
                    "idle_s": idle_s,
                    "busy_s": time.perf_counter() - busy,
                    "groups": [group.id for group in groups],
                },
            )
            if learner.step_index % config.train.checkpoint_every == 0 or learner.step_index == config.train.steps:
                self._checkpoint(version)

    def _take(self) -> tuple[list[Group], float]:
        """The next batch, and how long the learner had to wait for it."""
        started = time.perf_counter()
        while self._store.meta("phase") != "stop":
            groups = self._store.take(
                self._learner.step_index + 1,
                self._config.buffer.groups_per_step,
                max_lag=self._config.buffer.max_lag,
            )
            if groups is not None:
                return groups, time.perf_counter() - started
            time.sleep(_POLL_S)
        raise SystemExit(0)

    def _publish(self) -> tuple[WeightVersion, dict[str, float]]:
        """Write the weights to shared memory, have every engine load them, confirm the version."""
        version_path = self._run.scratch / "weights" / f"{time.time_ns()}.safetensors"
        file = self._learner.export(version_path)
        version = self._store.mint_version(self._learner.step_index, version_path)
        urls: list[str] = json.loads(self._store.meta("engine_urls") or "[]")
        report = trio.run(self._push, urls, file.path, file.sha256, version)
        self._store.confirm_version(version)
        for old in sorted(version_path.parent.glob("*.safetensors"))[:-2]:
            old.unlink()
        return version, report

    async def _push(self, urls: list[str], path: Path, sha256: str, version: WeightVersion) -> dict[str, float]:
        """Push to all engines; one that is being restarted gets a few chances."""
        settings = self._config.engine
        for attempt in range(_SYNC_TRIES):
            try:
                report = await push(
                    urls,
                    path,
                    version.version,
                    sha256=sha256,
                    deadline_s=settings.admin_deadline_s,
                    clear_cache=settings.recompute_kv,
                )
                return {"pause_s": report.pause_s, "sync_s": report.total_s, "sync_bytes": report.bytes}
            except EngineError:
                if attempt == _SYNC_TRIES - 1:
                    raise
                await trio.sleep(_SYNC_RETRY_S)
        raise AssertionError("unreachable")

    def _checkpoint(self, version: WeightVersion) -> None:
        """Folder first, then the store: `start_point` mends a kill in between."""
        folder = self._learner.save(self._run.checkpoints)
        self._store.checkpoint(self._learner.step_index, version, folder)
        self._store.retain(
            self._learner.step_index,
            keep_steps=self._config.buffer.keep_steps,
            keep_sample=self._config.buffer.keep_sample,
        )
