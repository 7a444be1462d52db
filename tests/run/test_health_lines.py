"""The advice of a run in progress, line by line; and what workers and environments write down for it."""

from __future__ import annotations

import logging
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.config import parse
from agentrl.env import ToolEnv, tool
from agentrl.errors import ToolError
from agentrl.records import StopReason
from agentrl.run.health.examine import HealthLines, examine
from agentrl.run.health.run_facts import EpisodeFacts, HostFacts, RunFacts, read_facts
from agentrl.run.reporting.live_view import Warnings
from agentrl.run.run_folder import RunDir
from agentrl.run.supervisor import TRAINING
from agentrl.store import RunStore

CONFIG = parse({"model": "m", "env": {"id": "test/Env-v0"}})


def facts(step: int, **measured: Any) -> RunFacts:
    rows: list[Mapping[str, Any]] = [{"step": at, **measured} for at in range(1, step + 1)]
    return RunFacts(path="runs/a", config=CONFIG, now_s=0.0, steps=rows)


def test_a_new_advice_is_a_line_once_and_again_when_it_comes_back() -> None:
    lines = HealthLines("runs/a", now=lambda: 0.0)
    cut, well = {"turns_cut": 0.75}, {"turns_cut": 0.0}
    line = (
        "health: most turns are cut before the model has ended them (75%, 75%, 75% of the turns; at most 64 tokens): "
        "agentrl health runs/a"
    )
    assert list(lines.lines(2, lambda: facts(2, **cut))) == [], "two steps are chance"
    assert list(lines.lines(3, lambda: facts(3, **cut))) == [line]
    assert list(lines.lines(3, lambda: facts(3, **cut))) == list(lines.lines(4, lambda: facts(4, **cut))) == []
    assert list(lines.lines(5, lambda: facts(5, **well))) == []
    assert list(lines.lines(6, lambda: facts(6, **cut))) == [line]


def test_a_learner_that_starves_on_busy_cores_is_not_told_to_share_them_further() -> None:
    starved = facts(5, idle_s=9.9, busy_s=0.1, wall_s=10.0, held_s=0.0)
    starved = replace(starved, times=[10.0 * at for at in range(1, 6)], playing=[(0.0, 50.0)])
    for load, settings in ((0.5, True), (3.0, False)):
        (advice,) = [each for each in examine(replace(starved, load=load)) if each.name == "learner_starves"]
        assert bool(advice.settings) is settings


def test_a_look_that_takes_long_is_taken_seldom() -> None:
    now, looks = [0.0], list[int]()
    lines = HealthLines("runs/a", now=lambda: now[0])

    def look(step: int) -> RunFacts:
        looks.append(step)
        now[0] += 2.0
        return facts(step)

    for step in range(3, 100):
        now[0] += 1.0
        assert list(lines.lines(step, lambda step=step: look(step))) == []
    assert looks == [3], "the next one is due after 100 s"
    now[0] += 10.0
    assert list(lines.lines(100, lambda: look(100))) == []
    assert looks == [3, 100]


def test_a_check_that_breaks_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    lines = HealthLines("runs/a", now=lambda: 0.0)
    with caplog.at_level(logging.ERROR):
        for step in (3, 4):
            assert list(lines.lines(step, lambda: facts(3, turns_cut="much"))) == []
    assert [record.message for record in caplog.records] == [
        "agentrl health runs/a is broken, and says nothing more of this run"
    ]


def test_a_failure_that_strikes_any_host_alike_is_not_called_one_hosts() -> None:
    """Three failures fall on one of two hosts by chance once in eight times, ten once in a thousand."""
    failed = [
        EpisodeFacts(
            id=at,
            group=at,
            stop_reason=StopReason.SANDBOX_FAILED if at < 10 else StopReason.DONE,
            outcome=None,
            success=None,
            detail="no box",
            tokens=1,
            began_s=0.0,
            ended_s=1.0,
        )
        for at in range(40)
    ]
    for broken, name in ((10, "host_fails"), (5, "sandbox_fails")):
        hosts = {"a": HostFacts(ended=20, failed=broken), "b": HostFacts(ended=20, failed=10 - broken)}
        run = RunFacts(path="runs/a", config=CONFIG, now_s=0.0, episodes=failed, hosts=hosts)
        assert [advice.name for advice in examine(run)] == [name]


def test_hosts_are_counted_from_what_their_workers_record(tmp_path: Path) -> None:
    """Two workers of host a; of one there is a count from before the last three steps."""
    now = [0.0]
    with RunStore.create(tmp_path / "store.sqlite", "{}", clock=lambda: now[0]) as store:

        def record(worker: str, host: str, ended: int, failed: int) -> None:
            counts = {"worker": worker, "host": host, "ended": ended, "failed": failed}
            store.metrics.record("fleet", int(now[0]), counts)

        for step in range(1, 7):
            now[0] = float(step)
            store.metrics.record("step", step, {})
            record("worker-0.7", "a", 10 * step, step)
            if step > 4:
                record("worker-1.8", "a", 2, 1)
                record("worker-2.9", "b", 7, 0)
        found = read_facts(store, CONFIG, tmp_path, live=False, now=lambda: 6.0)
    assert found.hosts == {"a": HostFacts(ended=32, failed=4), "b": HostFacts(ended=7, failed=0)}


def test_a_look_at_a_long_run_takes_no_more_memory_than_one_at_a_shorter_one(tmp_path: Path) -> None:
    """The supervisor looks after every step: what a look needs at most, its process keeps."""
    peaks = list[int]()
    values: dict[str, Any] = {f"measure {at}": 0.1 * at for at in range(60)}
    with RunStore.create(tmp_path / "store.sqlite", "{}") as store:
        for step in range(1, 4001):
            store.metrics.record("step", step, values)
            if step in (1000, 4000):
                tracemalloc.start()
                found = read_facts(store, CONFIG, tmp_path, live=False)
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
    assert found.step == 4000 and len(found.recent) == 3
    assert peaks[1] < 1.3 * peaks[0]


async def test_an_environment_writes_down_which_of_its_tools_failed() -> None:
    class Shop(ToolEnv):
        def prompt(self, task: Any) -> str:
            return "buy"

        @tool
        def buy(self, n: int) -> str:
            """Buy something.

            Args:
                n: how many
            """
            if n > 1:
                raise ToolError("sold out")
            return "bought"

    def call(n: object) -> str:
        return f'<tool_call>{{"name": "buy", "arguments": {{"n": {n}}}}}</tool_call>'

    env = Shop(tool_format="hermes")
    await env.areset(seed=1)
    infos = [(await env.astep(text))[4] for text in (call(1), call(2) + call(3) + call(1), call('"x"'))]
    await env.aclose()
    assert [info.get("tool_errors") for info in infos] == [None, {"buy": 2}, None]
    assert infos[2]["parse_failure"] == "content", "wrong arguments are the model's fault, not the tool's"


def test_who_watches_a_run_hears_of_its_health(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    with RunStore.open(run.store_path) as store:
        watched: Any = SimpleNamespace(phase=TRAINING, store=store, config=CONFIG, run=run, started_s=0.0)
        for step in (1, 2, 3):
            store.versions.confirm_version(store.versions.mint_version(step))
            store.metrics.record("step", step, {"updated": True, "grad_norm": 1.0, "turns_cut": 0.5})
        with caplog.at_level(logging.WARNING), Warnings() as view:
            view.tick(watched)
            view.tick(watched)
    figures = "50%, 50%, 50% of the turns; at most 64 tokens"
    assert [record.message for record in caplog.records] == [
        f"health: most turns are cut before the model has ended them ({figures}): agentrl health {run.path}"
    ]


@pytest.mark.parametrize("broken", ["absent", "garbage"])
def test_a_run_that_cannot_be_read_is_exit_code_2(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if broken == "garbage":
        RunDir.create(tmp_path / "run", CONFIG).store_path.write_bytes(b"nothing of a store" * 1000)
    monkeypatch.setattr("sys.argv", ["agentrl", "health", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert str(tmp_path / "run") in capsys.readouterr().err
