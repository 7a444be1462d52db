"""Another process holds the store's write lock: the supervisor's writes wait, and its loop watches its children."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from store.test_outside import held

from agentrl.config import RunConfig
from agentrl.run.children.registry import ChildRegistry
from agentrl.run.children.run_children import RunChildren
from agentrl.run.processes import heartbeat
from agentrl.run.run_folder import RunDir
from agentrl.run.scratch_space import ScratchSpace
from agentrl.store import RunStore
from agentrl.store.async_calls import Aside, Looks

from .test_heartbeat import DEADLINE_S, HANGS_AFTER_4_S, _runs

MARKS = """
import time
from agentrl.run.processes.heartbeat import Heartbeat
beat = Heartbeat.of_process()
while True:
    beat.mark(); time.sleep(0.01)
"""


async def until(condition: object) -> None:
    assert callable(condition)
    while not condition():  # noqa: ASYNC110 - other processes tell of nothing
        await trio.sleep(0.01)


@asynccontextmanager
async def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[tuple[RunChildren, RunStore]]:
    """A worker and a learner of a run, who mark and do nothing else."""
    monkeypatch.setattr(heartbeat, "_LOOK_S", 0.01)
    monkeypatch.setattr(ChildRegistry, "create", _runs(MARKS, ChildRegistry.create))
    config = RunConfig.model_validate({"model": "unused", "env": {"id": "test/none"}, **HANGS_AFTER_4_S})
    run = RunDir.create(tmp_path / "run", config)
    ScratchSpace(run).make()
    try:
        with RunStore.open(run.store_path) as store, RunStore.read(run.store_path) as reader:
            with trio.fail_after(DEADLINE_S):
                async with trio.open_nursery() as nursery:
                    children = RunChildren(run, config, Looks(reader), Aside[RunStore](store), nursery, mark={})
                    await children.start_workers()
                    children.start_learner()
                    for child in children.registry.children.values():
                        await until(lambda child=child: child.beat is not None and heartbeat.read(child.beat))
                    yield children, store
                    await children.stop()
                    nursery.cancel_scope.cancel()
    finally:
        ScratchSpace(run).clear()


@pytest.mark.medium
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel says so in /proc")
async def test_a_hang_is_noticed_while_the_write_after_another_death_waits_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with family(tmp_path, monkeypatch) as (children, store):
        pids = children.pids()
        with held(store.path):
            os.kill(pids["worker-0"], signal.SIGKILL)
            await until(lambda: store.waits)  # its episodes are to be freed
            os.kill(pids["learner"], signal.SIGSTOP)
            await until(lambda: children.restarts.get("learner"))
            assert store.waits and not children.restarts.get("worker-0")
        await until(lambda: children.restarts.get("worker-0"))


async def test_a_run_ends_in_order_although_somebody_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with family(tmp_path, monkeypatch) as (children, store):
        with held(store.path):
            store.hurry(0.0)  # as `supervise` does
            await children.stop()
            assert all(child.poll() is not None for child in children.registry.children.values())
