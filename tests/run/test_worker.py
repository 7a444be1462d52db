"""What a worker writes down of the engines that it asks."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import trio
from trio.testing import MockClock

from agentrl.config import parse
from agentrl.engine.router.concurrency import Aimd
from agentrl.engine.router.router import Fleet, ReplicaState
from agentrl.errors import DiskFull, EngineBroke, EngineTimeout
from agentrl.host.clocks import HostClock
from agentrl.protocols import GenerateRequest
from agentrl.records import SamplingParams
from agentrl.run.processes import heartbeat, worker_process
from agentrl.run.processes.heartbeat import Heartbeat
from agentrl.run.processes.worker_process import RunView, await_engines, known_of, report
from agentrl.run.run_folder import RunDir
from agentrl.run.telemetry import Telemetry
from agentrl.store import RunStore
from agentrl.store.async_calls import Looks
from agentrl.store.journal_writer import JournalWriter
from tests.parts.fake_engine import FakeEngine
from tests.parts.vllm_server import FakeVLLM

BUSY = {"vllm:num_requests_running": 8.0, "vllm:num_requests_waiting": 8.0}


async def test_the_limit_of_every_replica_is_in_the_metrics(tmp_path: Path, autojump_clock: MockClock) -> None:
    busy, calm = FakeEngine(version=1, url="fake://busy"), FakeEngine(version=1, url="fake://calm")
    busy.readings = BUSY
    fleet = Fleet([busy, calm])
    with (
        RunStore.create(tmp_path / "store.sqlite", "{}") as store,
        Telemetry(store, tmp_path / "metrics.jsonl", "worker-0.7", clock=trio.current_time) as telemetry,
    ):
        store.versions.confirm_version(store.versions.mint_version(0))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(fleet.control, period_s=4.0, start=Aimd(limit=16.0)))
            nursery.start_soon(report, fleet, telemetry, JournalWriter(store, inline=True))
            await trio.sleep(6)
            store.versions.confirm_version(store.versions.mint_version(1))
            fleet.replicas[1].state = ReplicaState.DRAINING
            await trio.sleep(5)
            nursery.cancel_scope.cancel()
        assert [row.values["limit"] for row in store.metrics.values("fleet")] == [[12.0, 16.0], [9.0, 16.0]]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    told = {"kind": "fleet", "process": "worker-0.7", "attempt": lines[0]["attempt"], "running": [0, 0]}
    told |= {"hedges": {"asked": 0, "won": 0}}
    start = lines[0]["time"] - 5
    assert lines == [
        {**told, "step": 0, "time": start + 5, "state": ["ready", "ready"], "limit": [12.0, 16.0]},
        {**told, "step": 1, "time": start + 10, "state": ["ready", "draining"], "limit": [9.0, 16.0]},
    ]


async def test_turns_go_to_engines_with_the_newest_weights_of_this_run_alone(tmp_path: Path) -> None:
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        old, current, coming = (store.versions.mint_version(step).version for step in range(3))
        store.versions.confirm_version(old)
        store.versions.confirm_version(current)  # an engine that has the next one already is no worse
        unminted = (0, coming + 1)  # a server that was started anew, one of another run
        config = parse({"model": "m", "env": {"id": "test/Env"}})
        sight = RunView(config, Looks[RunStore](store), known_of(config, store))
        fitting = [version for version in (*unminted, old, current, coming) if await sight.fits(version)]
        assert fitting == [current, coming]
        known = [version for version in (*unminted, old, current, coming) if await sight.knows(version)]
        assert known == [old, current, coming]  # turns under way may have older ones


async def test_a_worker_takes_no_tokens_of_another_runs_weights(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 256}')
    server = FakeVLLM(url="http://engine", version="999")
    monkeypatch.setattr("agentrl.engine.client.TrioTransport", lambda socket: server)
    settings = {"outage_deadline_s": 5.0}
    config = parse({"model": str(tmp_path), "env": {"id": "test/Env"}, "engine": settings})
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        store.versions.confirm_version(store.versions.mint_version(0).version)
        store.set_meta("engine_urls", json.dumps([server.url]))
        known = known_of(config, store)
        fleet = worker_process._fleet(
            RunView(config, Looks[RunStore](store), known), known, SimpleNamespace(decode=str)
        )  # type: ignore[arg-type]
        asked = GenerateRequest(request_id="r", session="s", token_ids=(1,), sampling=SamplingParams(max_tokens=4))
        with pytest.raises(EngineTimeout, match=r"http://engine is stale \(it serves version 999"):
            await fleet.generate(asked)
        assert len(server.requests) == 1


@pytest.mark.parametrize("said", [{"vocab_size": 9}, {"text_config": {"vocab_size": 9}}])
async def test_the_engines_of_a_run_may_send_no_token_that_its_model_lacks(
    said: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(said))
    answer = {"choices": [{"token_ids": [9], "logprobs": {"content": [{"logprob": -1.0}]}, "finish_reason": "stop"}]}
    body = f"data: {json.dumps(answer)}\n\n".encode()
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    monkeypatch.setattr("agentrl.engine.client.TrioTransport", lambda socket: transport)
    config = parse({"model": str(tmp_path), "env": {"id": "test/Env"}})
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        store.versions.confirm_version(store.versions.mint_version(0).version)
        store.set_meta("engine_urls", json.dumps(["http://engine"]))
        known = known_of(config, store)
        sight = RunView(config, Looks[RunStore](store), known)
        fleet = worker_process._fleet(sight, known, SimpleNamespace(decode=str))  # type: ignore[arg-type]
        asked = GenerateRequest(request_id="r", session="s", token_ids=(1,), sampling=SamplingParams(max_tokens=4))
        with pytest.raises(EngineBroke, match="token 9, and the model has 9"):
            await fleet.replicas[0].client.generate(asked)  # type: ignore[attr-defined]


async def test_a_worker_that_is_there_first_waits_for_engines_and_is_no_hang(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    config, beat = parse({"model": "m", "env": {"id": "test/Env"}}), tmp_path / "beat"
    heartbeat.prepare(beat)
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        store.versions.confirm_version(store.versions.mint_version(0).version)
        store.set_meta("engine_urls", "[]")
        began = trio.current_time()

        async def serve() -> None:
            await trio.sleep(600)
            assert heartbeat.read(beat) > 600 / config.rollout.hang_deadline_s
            store.set_meta("engine_urls", '["http://engine"]')

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            known = await await_engines(config, Looks[RunStore](store), Heartbeat(beat))
        assert known.urls == {None: ["http://engine"]}
        assert 600 <= trio.current_time() - began < 601


async def test_a_full_disk_ends_no_worker(
    tmp_path: Path, autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        RunStore.create(tmp_path / "store.sqlite", "{}") as store,
        Telemetry(store, tmp_path / "metrics.jsonl", "worker-0.7") as telemetry,
    ):
        store.versions.confirm_version(store.versions.mint_version(0))
        record, full = store.metrics.record, [True, False]

        def recorded(*args: object) -> None:
            if full.pop(0):
                raise DiskFull("no space")
            record(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(store.metrics, "record", recorded)
        with trio.move_on_after(11):
            await report(Fleet([FakeEngine()]), telemetry, JournalWriter(store, inline=True))
        assert len(store.metrics.values("fleet")) == 1


def test_a_busy_loop_lets_the_thread_that_writes_the_journal_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    intervals: list[float] = []
    monkeypatch.setattr(worker_process, "watch_lifeline", lambda on_end: None)
    monkeypatch.setattr(worker_process.trio, "run", lambda *args, clock=None: intervals.append(sys.getswitchinterval()))
    monkeypatch.setattr(worker_process.tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    RunDir.create(tmp_path / "run", parse({"model": "m", "env": {"id": "test/Env"}}))
    before = sys.getswitchinterval()
    try:
        worker_process.serve(tmp_path / "run", 0)
    finally:
        sys.setswitchinterval(before)
    assert intervals[0] <= before / 5


def test_a_worker_runs_by_the_clock_that_leaves_out_what_it_was_stopped_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks: list[object] = []
    monkeypatch.setattr(worker_process, "watch_lifeline", lambda on_end: None)
    monkeypatch.setattr(worker_process.trio, "run", lambda *args, clock=None: clocks.append(clock))
    monkeypatch.setattr(worker_process.tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    config = parse({"model": "m", "env": {"id": "test/Env"}})
    RunDir.create(tmp_path / "run", config)
    worker_process.serve(tmp_path / "run", 0)
    assert [type(clock) for clock in clocks] == [HostClock]
