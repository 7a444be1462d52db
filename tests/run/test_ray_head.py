"""A run watches the head of its Ray cluster, leaves one that is dead, and waits for the next one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from pathlib import Path

import pytest
import trio
import trio.testing

from agentrl.cli import main
from agentrl.errors import UsageError
from agentrl.run.cluster import ray_head
from agentrl.run.cluster.ray_head import HeadAnswer, ask, join, watch
from agentrl.run.processes.launcher import ClusterLost

from .test_run import DEADLINE_S, command, run_file

pytestmark = pytest.mark.ray


async def test_a_head_answers_refuses_or_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel accepts for a process that is stopped, too; so only an answer shows that it turns."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(ray_head, "_ANSWER_S", 0.1)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        assert await ask(address) is HeadAnswer.SILENT
    monkeypatch.setattr(ray_head, "_ANSWER_S", 30.0)
    assert await ask(address) is HeadAnswer.REFUSES

    async def settings(stream: trio.SocketStream) -> None:
        assert (await stream.receive_some(3)) == b"PRI"
        await stream.send_all(bytes(9))

    async def closes(stream: trio.SocketStream) -> None:
        await stream.receive_some(3)

    for server in (settings, closes):
        async with trio.open_nursery() as nursery:
            listeners = await nursery.start(trio.serve_tcp, server, 0)
            assert await ask(f"127.0.0.1:{listeners[0].socket.getsockname()[1]}") is HeadAnswer.ANSWERS
            nursery.cancel_scope.cancel()


def says(monkeypatch: pytest.MonkeyPatch, answers: Iterable[HeadAnswer], *, each_s: float = 0.0) -> list[str]:
    """Heads say these, one after the other. Returns the addresses that are asked."""
    left, asked = iter(answers), list[str]()

    async def ask(address: str) -> HeadAnswer:
        asked.append(address)
        await trio.sleep(each_s)
        return next(left)

    async def same(address: str, _: trio.CapacityLimiter) -> str:
        await trio.lowlevel.checkpoint()
        return "the same"

    monkeypatch.setattr(ray_head, "ask", ask)
    monkeypatch.setattr(ray_head, "_cluster", same)
    return asked


asked_for_real = ray_head._cluster  # pyright: ignore[reportPrivateUsage]
GOOD, NO, SILENT = HeadAnswer.ANSWERS, HeadAnswer.REFUSES, HeadAnswer.SILENT


@pytest.mark.parametrize(
    ("answers", "after_s", "why"),
    [
        (repeat(NO), 2.0, r"refused connections for 2 s \(cluster.head_away_s\)"),
        (chain([NO] * 4, [GOOD], repeat(NO)), 4.5, "refused connections"),  # 1.5 s, and it is back
        (chain([NO] * 4, [SILENT], repeat(NO)), 4.5, "refused connections"),
        (repeat(SILENT), 300.0, r"has not answered for 300 s \(cluster.place_deadline_s\)"),
        (chain([SILENT] * 599, [GOOD], repeat(SILENT)), 600.0, "has not answered"),  # slow for long, and well again
    ],
)
async def test_a_run_leaves_a_dead_head_soon_and_a_slow_one_late(
    answers: Iterable[HeadAnswer],
    after_s: float,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    says(monkeypatch, answers)
    began = trio.current_time()
    found = await watch("10.0.0.1:6379", away_s=2.0, silent_s=300.0)
    assert trio.current_time() - began == pytest.approx(after_s, abs=1.0)
    assert re.search(why, found), found


async def test_one_refusal_after_a_long_stand_is_not_taken_for_many(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """This process stood still for a minute, and so did its looks."""
    asked = says(monkeypatch, chain([NO, GOOD, NO, GOOD], repeat(NO)), each_s=60.0)
    await watch("10.0.0.1:6379", away_s=2.0, silent_s=300.0)
    assert len(asked) == 6


@pytest.mark.parametrize("answers", [[GOOD, NO, GOOD, GOOD], [GOOD] * 3])
async def test_a_head_that_was_started_anew_is_left_even_if_no_refusal_was_seen(
    answers: Iterable[HeadAnswer], monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """It keeps the address, and is the head of another cluster; one that does not say which is not left for that."""
    says(monkeypatch, answers)
    clusters = iter(["first", "first", None, "second"])

    async def cluster(address: str, _: trio.CapacityLimiter) -> str | None:
        await trio.lowlevel.checkpoint()
        return next(clusters)

    monkeypatch.setattr(ray_head, "_cluster", cluster)
    began = trio.current_time()
    assert "started anew" in await watch("10.0.0.1:6379", away_s=2.0, silent_s=300.0)
    assert trio.current_time() - began < 2.0


async def test_a_head_that_greets_and_says_nothing_else_is_asked_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, chain([GOOD] * 8, repeat(NO)))
    monkeypatch.setattr(ray_head, "_cluster", asked_for_real)
    monkeypatch.setattr(ray_head, "_ANSWER_S", 0.05)
    monkeypatch.setattr(ray_head, "_LOOK_S", 0.01)
    asked, over = list[str](), threading.Event()

    def cluster(address: str) -> str:
        asked.append(address)
        assert len(asked) == 1 or over.wait(60.0)
        return "the first"

    monkeypatch.setattr(ray_head, "_cluster_id", cluster)
    try:
        assert "refused connections" in await watch("10.0.0.1:6379", away_s=0.1, silent_s=300.0)
        assert len(asked) == 2
    finally:
        over.set()


def connects(monkeypatch: pytest.MonkeyPatch, failures: int = 0) -> list[str]:
    """Ray joins at once, or fails so often before. Returns the addresses."""
    joined = list[str]()

    def connect(address: str) -> None:
        joined.append(address)
        if len(joined) <= failures:
            raise UsageError("no node here yet")

    async def at_once(function: Callable[[], object]) -> object:
        await trio.lowlevel.checkpoint()
        return function()

    monkeypatch.setattr(ray_head, "connect", connect)
    monkeypatch.setattr(ray_head, "called", at_once)
    return joined


@pytest.mark.parametrize(
    ("address", "found", "joined"),
    [
        ("10.0.0.1:6379", [], "10.0.0.1:6379"),
        ("auto", ["10.0.0.1:6379"] * 3 + ["10.0.0.2:7000"] * 9, "10.0.0.2:7000"),  # the next head has another address
        ("auto", [None] * 9, "auto"),  # only Ray can tell
    ],
)
async def test_a_run_that_was_in_a_cluster_waits_for_the_next_head(
    address: str,
    found: Sequence[str | None],
    joined: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    told = iter(found)
    monkeypatch.setattr(ray_head, "_SERVICES", type("", (), {"find_bootstrap_address": lambda *_: next(told)})())
    asked = says(monkeypatch, chain([NO, SILENT, NO], repeat(GOOD)))
    calls = connects(monkeypatch, failures=2)
    await join(address, 300.0, again=tmp_path)
    assert calls == [joined] * 3
    assert asked == [] or asked[-1] == joined


async def test_law_4_the_wait_for_a_head_ends_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    says(monkeypatch, repeat(NO))
    with pytest.raises(UsageError) as failed:
        await join("10.0.0.1:6379", 300.0, again=tmp_path / "run")
    assert "within 300 s (cluster.place_deadline_s)" in str(failed.value)
    assert f"agentrl train --resume {tmp_path / 'run'} --set cluster.address=HOST:PORT" in str(failed.value)


async def test_a_run_that_begins_waits_for_no_head(monkeypatch: pytest.MonkeyPatch) -> None:
    connects(monkeypatch, failures=1)
    with pytest.raises(UsageError, match="no node here yet"):
        await join("10.0.0.1:6379", 300.0, again=None)


@pytest.mark.medium
def test_law_4_ctrl_c_ends_a_run_that_waits_for_a_head(tmp_path: Path) -> None:
    """Its parent takes this end for one on purpose, and does not start it again."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        cluster = {"launcher": "ray", "address": f"127.0.0.1:{silent.getsockname()[1]}"}
        file = run_file(tmp_path, "agentrl/Calculator-v0", cluster=cluster)
        process = subprocess.Popen(
            command("train", file, "--out", tmp_path / "run"),
            env={**os.environ, "AGENTRL_AGAIN": "1"},
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        try:
            silent.settimeout(DEADLINE_S)
            with silent.accept()[0] as greeted:
                greeted.settimeout(DEADLINE_S)
                assert greeted.recv(3) == b"PRI"  # it waits
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130 and "stopped by SIGINT; go on with agentrl train --resume" in errors, errors


def test_a_run_that_lost_its_cluster_ends_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the interpreter's end Ray would wait for the head for seconds, or crash."""

    def lost() -> None:
        raise ClusterLost("the head is gone")

    def ends(code: int) -> None:
        raise KeyboardInterrupt(code)

    monkeypatch.delenv("AGENTRL_ERROR_FILE", raising=False)
    monkeypatch.setattr(main, "app", lost)
    monkeypatch.setattr(os, "_exit", ends)
    with pytest.raises(KeyboardInterrupt, match="7"):
        main.main()
    assert capsys.readouterr().err == "agentrl: the head is gone\n"


LOSES_ITS_NODE = """if True:
    import os, ray, trio
    from ray.cluster_utils import Cluster
    from agentrl.run.cluster import ray_head

    node = {"num_cpus": 1, "object_store_memory": 80 << 20}
    first = {"include_dashboard": False, "_system_config": {"prestart_worker_first_driver": False}}
    cluster = Cluster(initialize_head=True, head_node_args={**node, **first})
    ray_head.connect(cluster.address)
    try:
        async def looks():
            with trio.move_on_after(3):
                return await ray_head.watch(ray_head.here(), ray_head.job(), away_s=2.0, silent_s=300.0)
        assert trio.run(looks) is None, "all is well"
        raylet = cluster.head_node.all_processes["raylet"][0].process
        raylet.kill()
        try:
            print(trio.run(lambda: ray_head.watch(ray_head.here(), ray_head.job(), away_s=2.0, silent_s=300.0)))
        except ray_head.JobEnded:
            print("the job has ended", flush=True)
    finally:
        cluster.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.long
def test_law_4_a_run_whose_own_node_is_lost_is_told_so(tmp_path: Path) -> None:
    """The head lives and answers; Ray's calls for a new place would wait for ever."""
    variables = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": "/tmp"}
    done = subprocess.run(
        [sys.executable, "-c", LOSES_ITS_NODE], env=variables, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert "the job has ended" in done.stdout.splitlines(), done.stdout + done.stderr
