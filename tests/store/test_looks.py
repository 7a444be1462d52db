"""Reads in a loop: a server that falls silent stops none of its deadlines, and asks nobody to wait in line."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from agentrl.config import parse
from agentrl.errors import StoreAway
from agentrl.run import supervisor
from agentrl.run.children.engine_health import EngineWatch
from agentrl.run.cluster.scaling import Scaler
from agentrl.run.processes import worker_process
from agentrl.store import RunStore
from agentrl.store.async_calls import Looks, Newest, Waiting
from agentrl.store.databases.open_store import ADDRESS
from agentrl.store.journal_writer import JournalWriter

from .play import admit, serve
from .proxy import Proxy, before
from .server import Server

ANSWER_S = 12.0  # how long a call waits for a silent server here
LATE_S = 8.0  # how late a busy machine may wake a task


class Slow:
    """A handle of a store on a server; `call` waits until it is told to go on."""

    remote = True

    def __init__(self) -> None:
        self.goes_on, self.calls = threading.Event(), 0

    def call(self) -> int:
        self.calls += 1
        number = self.calls
        assert self.goes_on.wait(60.0)
        return number


async def test_a_read_of_a_file_is_made_at_once_and_one_of_a_server_in_a_thread() -> None:
    there: Any = SimpleNamespace(remote=False)
    looks = Looks(there)
    assert await looks(lambda _: threading.current_thread()) is threading.main_thread()
    there.remote = True
    assert await looks(lambda _: threading.current_thread()) is not threading.main_thread()
    assert await Looks(there, inline=True)(lambda _: threading.current_thread()) is threading.main_thread()


async def test_law_4_a_read_ends_at_its_deadline_a_cancelled_one_at_once_and_both_leave_one_thread() -> None:
    slow = Slow()
    looks = Looks(slow, deadline_s=0.05)
    with trio.fail_after(60.0):
        with pytest.raises(StoreAway, match=r"within 0\.05 s: start it"):
            await looks(Slow.call)
        with trio.move_on_after(0.01) as cancelled:
            await looks(Slow.call)
        assert cancelled.cancelled_caught and slow.calls == 1, "the second one waits for the thread of the first"
        slow.goes_on.set()
        assert await Looks(slow)(Slow.call) == 2


async def test_all_who_ask_meanwhile_share_one_read_that_begins_after_they_asked() -> None:
    reads, found, send = 0, list[int](), trio.Event()

    async def read() -> int:
        nonlocal reads
        reads += 1
        number = reads
        await send.wait()
        return number

    newest = Newest(read, 0)

    async def ask() -> None:
        found.append(await newest())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(100):
            nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert reads == 1, "it began before a hundred asked"
        send.set()
    assert sorted(found) == [1] + [2] * 100 and reads == 2
    assert await newest() == 3


async def test_while_the_server_is_away_the_last_answer_holds(autojump_clock: MockClock) -> None:
    answers: list[int | None] = [7, None, None, 8]

    async def read() -> int:
        await trio.sleep(10.0)
        if (answer := answers.pop(0)) is None:
            raise StoreAway("away")
        return answer

    newest, found = Newest(read, 5), list[int]()

    async def ask() -> None:
        found.append(await newest())

    for _ in range(2):
        async with trio.open_nursery() as nursery:
            for _ in range(9):
                nursery.start_soon(ask)
    assert found == [7] * 9 + [8] * 9 or found == [7] * 18, found
    assert trio.current_time() < 50.0, "nobody waits for more than two reads"


# --- a real server behind a network that swallows everything


@pytest.fixture
def proxy(server: Server) -> Generator[Proxy]:
    with before(server.folder / ".s.PGSQL.5432") as proxy:
        yield proxy


@pytest.fixture
def far(tmp_path: Path, server: Server, proxy: Proxy) -> Path:
    """The store of a run whose database is behind the proxy, with episodes to play."""
    path = tmp_path / ADDRESS
    with RunStore.create(path, "{}", url=server.url) as store:
        serve(store, 0)
        admit(store, limit=2)
        store.set_meta("engine_urls", '["http://nowhere"]')
    through = f"postgresql://agentrl@127.0.0.1:{proxy.port}/agentrl?sslmode=disable"
    text = path.read_text().replace(server.url, through)
    assert through in text
    path.write_text(text)
    return path


@pytest.mark.postgres
@pytest.mark.parametrize("lost", [False, True], ids=["silent", "lost, then silent"])
async def test_law_4_nothing_in_a_loop_is_late_while_the_database_is_silent(
    far: Path, lost: bool, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What workers and supervisors ask in their loops, all of it at once, by connections that are there or dialled."""
    session = pytest.importorskip("agentrl.store.databases.postgres.connection")
    monkeypatch.setattr(session, "ANSWER_S", ANSWER_S)
    config = parse({"model": "agentrl/tiny-coder", "env": {"id": "test/Env"}, "engine": {"kind": "vllm"}})
    run: Any = SimpleNamespace(lock_path=tmp_path / "lock", path=tmp_path)
    run.lock_path.write_text("this supervisor")
    late_s, beats, over = 0.0, 0, list[str]()

    async def beat() -> None:
        nonlocal late_s, beats
        while True:
            due = trio.current_time() + 0.02
            await trio.sleep_until(due)
            late_s, beats = max(late_s, trio.current_time() - due), beats + 1

    async def until_cancelled(name: str, call: Callable[[], Awaitable[object]]) -> None:
        with trio.move_on_after(0.2):
            while True:
                with trio.CancelScope():
                    await call()
                await trio.lowlevel.checkpoint()
        over.append(name)

    async def tell(*_: str) -> None: ...

    monkeypatch.setattr(worker_process, "_FOLLOW_S", 0.01)
    monkeypatch.setattr(supervisor, "_STORE_LOOK_S", 0.01)
    with RunStore.open(far) as opened, RunStore.read(far, away_s=0) as reader, RunStore.read(far) as writer:
        looks: Any = Looks(reader)
        known = await looks(partial(worker_process.known_of, config))
        sight = worker_process.RunView(config, looks, known)
        fleet: Any = SimpleNamespace(follow=lambda *_: None)
        leaves: Any = SimpleNamespace(sharing=1, leave=lambda: None)
        children: Any = SimpleNamespace(present=lambda kind: {0})
        watch = EngineWatch(url="http://nowhere", config=config, looks=looks, weights=tell, locks=tmp_path)  # type: ignore[arg-type]
        again = Waiting(RunStore.read(far))
        asked: dict[str, Callable[[], Awaitable[object]]] = {
            "where engines are": partial(worker_process._follow, sight, {None: fleet}, None, {}, leaves, 0),
            "an adapter": sight.adapter,
            "whether weights fit": partial(sight.fits, 99),
            "whether to end": partial(supervisor._stop_on_request, run, looks),
            "the size": Scaler(config, looks, children, tell).run,
            "an engine's weights": partial(watch._fits, 99),
            "room for groups": partial(Waiting(writer), "control", 60.0),
            "what was written": partial(again, "control", 60.0),
        }
        async with JournalWriter(opened, reader) as desk:
            asked |= {
                "a value": partial(desk.meta, "phase"),
                "the version": desk.current_version,
                "an episode": partial(desk.trajectory, 1),
                "work": partial(desk.artifacts, "1.0.0"),
                "turns to score": partial(desk.awaiting, "tests", 8),
                "episodes": partial(desk.wait_for_work, "rollout", 60.0),
            }
            with trio.fail_after(10 * ANSWER_S):
                await again("control", 60.0)  # it is connected
                async with trio.open_nursery() as beating:
                    beating.start_soon(beat)
                    if lost:
                        proxy.cut()
                    proxy.swallow()
                    async with trio.open_nursery() as nursery:
                        for name, call in asked.items():
                            nursery.start_soon(until_cancelled, name, call)
                    beating.cancel_scope.cancel()
            assert sorted(over) == sorted(asked) and beats > 5
            assert late_s < LATE_S, f"the loop stood still for {late_s:.1f} s"
            proxy.carry()
            assert await desk.meta("config") == "{}", "and once the server is heard again, so is the answer"
