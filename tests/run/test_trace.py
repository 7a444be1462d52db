"""What `agentrl trace` writes of a run, beside times that the test chose: Chrome's format, OpenTelemetry's spans."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store.play import START, Clock, answer, serve, task, turn
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.config import parse
from agentrl.errors import UsageError
from agentrl.offline.chrome_trace import write_trace
from agentrl.offline.run_spans import RunSpan, episode_spans, learner_spans
from agentrl.records import StopReason
from agentrl.run.run_folder import RunDir
from agentrl.store import Ending, RunStore


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Episode 1 from second 1000 to 1010 with turns at 1001 to 1003 and 1005 to 1009; episode 2 from 1000 on, which
    goes on; weights of step 1 made at 1020, served at 1022, recorded at 1023 after 6 s of work and 4 of waiting."""
    run = RunDir.create(tmp_path / "run", parse({"model": "m", "env": {"id": "test/Env-v0"}}))
    clock = Clock(900.0)
    with RunStore.open(run.store_path, clock=clock) as store:
        serve(store, 0)
        store.groups.add_groups([task(0)], size=2, purpose="train")
        clock.now = 1000.0
        first, second = store.leases.claim("w", 2, lease_s=1e6)
        for index, (began, ended) in enumerate([(1001.0, 1003.0), (1005.0, 1009.0)]):
            if not index:
                store.journal.begin(first.episode_id, first.fence, START)
            store.journal.journal_turn(
                first.episode_id, first.fence, replace(turn(index, 1), started_s=began, ended_s=ended)
            )
            store.journal.journal_step(first.episode_id, first.fence, index, answer(index, last=index == 1))
        store.journal.begin(second.episode_id, second.fence, START)
        clock.now = 1010.0
        store.journal.finish(
            first.episode_id, first.fence, Ending(stop_reason=StopReason.DONE, outcome=1.0, success=True)
        )
        clock.now = 1020.0
        version = store.versions.mint_version(1)
        clock.now = 1022.0
        store.versions.confirm_version(version)
        clock.now = 1023.0
        store.metrics.record("step", 1, {"loss": 0.5, "busy_s": 6.0, "idle_s": 4.0})
    return run


def events_of(path: Path) -> list[dict[str, Any]]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found = json.loads(text)
    assert found.keys() == {"displayTimeUnit", "traceEvents"}
    return found["traceEvents"]


def check_format(events: list[dict[str, Any]]) -> None:
    """Chrome's trace event format: fields of complete and metadata events, and on each row spans that nest."""
    rows: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            assert event.keys() == {"ph", "name", "pid", "tid", "args"} and event["args"].keys() == {"name"}
            assert event["name"] in ("process_name", "thread_name")
            continue
        assert event["ph"] == "X" and event.keys() == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}
        assert isinstance(event["ts"], int) and isinstance(event["dur"], int) and event["dur"] >= 0
        rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        open_until: list[int] = []
        for began, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= began:
                open_until.pop()
            assert not open_until or ended <= open_until[-1]
            open_until.append(ended)


def test_a_run_is_a_trace_with_its_times(run: RunDir, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    with RunStore.read(run.store_path) as store:
        write_trace(learner_spans(store), episode_spans(store, now_s=1030.0), out)
    events = events_of(out)
    check_format(events)
    found = [(at["pid"], at["tid"], at["name"], at["ts"] / 1e6, at["dur"] / 1e6) for at in events if at["ph"] == "X"]
    assert sorted(found) == [
        (1, 1, "step 1", 1014.0, 6.0),
        (1, 1, "wait for groups", 1010.0, 4.0),
        (1, 2, "weights of step 0", 900.0, 0.0),
        (1, 2, "weights of step 1", 1020.0, 2.0),
        (2, 1, "environment", 1003.0, 2.0),
        (2, 1, "environment", 1009.0, 1.0),
        (2, 1, "episode 1", 1000.0, 10.0),
        (2, 1, "turn 1.0.0", 1001.0, 2.0),
        (2, 1, "turn 1.0.1", 1005.0, 4.0),
        (2, 2, "episode 2", 1000.0, 30.0),
    ]
    (episode,) = [at for at in events if at["name"] == "episode 1"]
    facts = {"episode": 1, "group": 1, "env": "test/Env-v0", "seed": 100, "purpose": "train", "success": True}
    assert episode["args"] == {**facts, "outcome": 1.0, "stop_reason": "done"}
    named = {(at["pid"], at["tid"]): at["args"]["name"] for at in events if at["name"] == "thread_name"}
    assert named == {(1, 1): "steps", (1, 2): "weights to engines", (2, 1): "row 1", (2, 2): "row 2"}


def test_the_command_writes_it_compressed_and_a_file_that_cannot_be_is_one_line(run: RunDir, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["trace", str(run.path)])
    assert done.exit_code == 0 and "ui.perfetto.dev" in done.output
    check_format(events_of(run.path / "trace.json.gz"))
    with pytest.raises(UsageError, match=r"none.*give another --out"):
        write_trace([], [], tmp_path / "none" / "trace.json")
    refused = CliRunner().invoke(app, ["trace", str(run.path), "--out", "x.json", "--otlp", "http://h"])
    assert isinstance(refused.exception, UsageError)


@pytest.mark.medium
def test_a_big_run_needs_little_memory_and_late_starts_share_no_row(tmp_path: Path) -> None:
    def many() -> Iterator[RunSpan]:
        for number in range(4_000):
            began = 1000.0 + number - 3 * (number % 5 == 0)  # numbers are not quite in the order of their starts
            turns = tuple(
                RunSpan(kind="turn", name="t", began_s=began + at, ended_s=began + at + 1, facts={"text": "x" * 100})
                for at in range(5)
            )
            yield RunSpan(kind="episode", name=str(number), began_s=began, ended_s=began + 5, inside=turns)

    out = tmp_path / "big.json.gz"
    tracemalloc.start()
    events = write_trace([], many(), out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 3e6
    found = events_of(out)
    check_format(found)
    assert events == len(found) and len({at["tid"] for at in found if at["pid"] == 2}) < 15


@pytest.mark.adapters
def test_opentelemetry_has_the_spans_with_parents_times_and_names(run: RunDir) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from agentrl.offline.otel_export import export_spans

    exporter = InMemorySpanExporter()
    with RunStore.read(run.store_path) as store:
        for spans in (learner_spans(store), episode_spans(store, now_s=1030.0)):
            export_spans(spans, exporter, run="runs/a", model="m")
    found = exporter.get_finished_spans()
    times = sorted((at.name, at.start_time // 10**9, at.end_time // 10**9) for at in found)
    assert times == [
        ("chat m", 1001, 1003),
        ("chat m", 1005, 1009),
        ("execute_tool environment", 1003, 1005),
        ("execute_tool environment", 1009, 1010),
        ("invoke_agent test/Env-v0", 1000, 1010),
        ("invoke_agent test/Env-v0", 1000, 1030),
        ("rl.step", 1014, 1020),
        ("rl.sync", 900, 900),
        ("rl.sync", 1020, 1022),
        ("rl.wait", 1010, 1014),
    ]
    (episode,) = [at for at in found if at.end_time == 1010 * 10**9 and at.name.startswith("invoke")]
    inside = [at for at in found if at.parent is not None]
    assert len(inside) == 4 and all(at.parent.span_id == episode.context.span_id for at in inside)
    assert len({at.context.trace_id for at in found if at.parent is None}) == 6
    attributes = dict(next(at for at in inside if at.start_time == 1005 * 10**9).attributes)
    assert attributes["gen_ai.operation.name"] == "chat" and attributes["gen_ai.request.model"] == "m"
    assert attributes["rl.turn.id"] == "1.0.1" and attributes["gen_ai.usage.output_tokens"] == len(turn(1, 1).token_ids)
    assert dict(episode.attributes)["rl.episode.outcome"] == 1.0
    assert dict(episode.attributes)["gen_ai.conversation.id"] == "1"
    assert episode.resource.attributes["service.instance.id"] == "runs/a"


@pytest.mark.adapters
def test_an_endpoint_that_is_not_there_is_one_line() -> None:
    from opentelemetry.sdk.trace.export import SpanExportResult

    from agentrl.offline.otel_export import export_spans

    class Refuses:
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.FAILURE

    span = RunSpan(kind="step", name="step 1", began_s=1.0, ended_s=2.0)
    with pytest.raises(UsageError, match="0 spans are sent, and the next 1 were refused"):
        export_spans([span], Refuses(), run="r", model="m")
