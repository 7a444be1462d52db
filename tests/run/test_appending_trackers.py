"""W&B, MLflow and the plug-in of the page on trackers, without a network.

What their own readers find, over resumes, restarts, full disks and calls that fail."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from store.play import serve

from agentrl.errors import ConfigError
from agentrl.run.callbacks.appending_tracker import AppendingTracker
from agentrl.run.callbacks.tracker import made
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore

from .test_callbacks import step
from .test_trackers import run_in, tell

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "trackers.md"
SETTINGS: dict[str, dict[str, Any]] = {"wandb": {"mode": "offline"}, "mlflow": {}}
TRACKERS = pytest.mark.parametrize("id", [*(pytest.param(id, marks=pytest.mark.adapters) for id in SETTINGS), "page"])


@dataclass
class Found:
    """What a tracker's reader finds of one of its runs; `rows` are (step, name, value) in the order of the file."""

    group: str
    config: dict[str, Any]
    rows: list[tuple[int, str, float]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    plot: bytes = b""

    def points(self, name: str) -> list[tuple[int, float]]:
        return [(step, value) for step, found, value in self.rows if found == name]


@pytest.fixture(autouse=True, scope="module")
def end_wandb() -> Iterator[None]:
    """W&B's own process ends here, not at the end of Python."""
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


def table(id: str, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The tables `[trackers.ID]` of the run file. The plug-in is the page's own code."""
    if id != "page":
        return {id: SETTINGS[id]}
    (code,) = re.findall(r"```python\n(import json\n.*?class Rows.*?)```", PAGE.read_text(), re.DOTALL)
    plugin = tmp_path / "rows_tracker.py"
    plugin.write_text(code)
    return {f"{plugin}:Rows": {}}


def read(id: str, run: RunDir) -> list[Found]:
    """The tracker's runs, in the order in which they began."""
    return {"wandb": _wandb, "mlflow": _mlflow, "page": _page}[id](run)


def _wandb(run: RunDir) -> list[Found]:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # on a busy machine its process still writes what it has taken
    runs: dict[str, Found] = {}
    for file in sorted((run.path / "wandb").glob("offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns):
        found = None
        for data in _log_records(file.read_bytes()[7:], seen=7):
            record = Record.FromString(data)
            if record.HasField("run") and found is None:
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                found = runs.setdefault(record.run.run_id, Found(record.run.run_group, config))
            elif record.HasField("history") and found is not None:
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                if curves := row.get("curves/path"):
                    found.plot = (file.parent / "files" / curves).read_bytes()
                numbers = {
                    name: value for name, value in row.items() if name != "step" and isinstance(value, float | int)
                }
                found.rows += [
                    (row["step"], name, value)
                    for name, value in numbers.items()
                    if not name.startswith(("_", "curves/"))
                ]
            elif record.HasField("summary") and found is not None:
                for item in record.summary.update:
                    if (item.key or item.nested_key[0]) == "summary":
                        found.summary = json.loads(item.value_json)
    return list(runs.values())


def _log_records(data: bytes, seen: int) -> Iterator[bytes]:
    """The records of LevelDB's log format, in which W&B writes: blocks of 32 KiB, heads of 7 bytes."""
    at, part = 0, b""
    while at + 7 <= len(data):
        left = 32768 - (at + seen) % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield part
            part = b""


def _mlflow(run: RunDir) -> list[Found]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{run.path / 'mlflow' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("agentrl")
    found: list[Found] = []
    for at in client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"]):
        rows = [
            (metric.step, name, metric.value)
            for name in at.data.metrics
            for metric in client.get_metric_history(at.info.run_id, name)
        ]
        folder = Path(at.info.artifact_uri.removeprefix("file://"))
        config = json.loads((folder / "config.json").read_text())
        summary, curves = folder / "summary.json", folder / "curves.png"
        assert at.data.params["model"] == config["model"] and at.data.params["env.id"] == config["env"]["id"]
        found.append(Found(at.data.tags["agentrl.group"], config, rows))
        if summary.exists():
            assert at.info.status == "FINISHED"
            found[-1].summary, found[-1].plot = json.loads(summary.read_text()), curves.read_bytes()
    return found


def _page(run: RunDir) -> list[Found]:
    found: list[Found] = []
    for folder in sorted((run.path / "rows").iterdir(), key=lambda folder: (len(folder.name), folder.name)):
        begun = json.loads((folder / "run.json").read_text())
        rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
        points = [(row["step"], name, value) for row in rows for name, value in row.items() if name != "step"]
        found.append(Found(begun["group"], begun["config"], points))
        if (summary := folder / "summary.json").exists():
            found[-1].summary, found[-1].plot = json.loads(summary.read_text()), (folder / "curves.png").read_bytes()
    return found


@pytest.mark.medium
@TRACKERS
def test_each_step_is_there_once_over_resumes_and_a_rollback_begins_a_run_with_all_of_it(
    id: str, tmp_path: Path
) -> None:
    trackers = table(id, tmp_path)
    run = run_in(tmp_path, trackers)
    with RunStore.open(run.store_path) as store:
        serve(store, 0)
        store.lineage.checkpoint(1, step(store, 1), run.checkpoints / "1")
        step(store, 2)
        tell(run, *made(run.config().trackers))
        step(store, 3)
        tell(run, *made(run.config().trackers))  # a resume
        (first,) = read(id, run)
        assert first.points("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
        assert first.config["model"] == "m" and first.config["trackers"] == trackers
        store.lineage.rollback(1)
        tell(run, *made(run.config().trackers))
        assert len(read(id, run)) == 1  # nothing is undone in its eyes, until a step comes again
        store.metrics.record("step", 2, {"loss": 20.0, "by_lag": {"2_3": {"ess": 0.5}}, "rate (odd):é": 1.0})
        (tracker,) = made(run.config().trackers)
        tell(run, tracker)
        store.metrics.record("step", 3, {"loss": 30.0})
        (tracker,) = made(run.config().trackers)
        tell(run, tracker)
    old, new = read(id, run)
    assert old.points("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert new.points("loss") == [(1, 1.0), (2, 20.0), (3, 30.0)]
    assert new.points("by_lag/2_3/ess") == [(2, 0.5)]
    assert new.points("rate _odd_:é" if id == "mlflow" else "rate (odd):é") == [(2, 1.0)]
    assert old.group == new.group != ""


@pytest.mark.medium
@TRACKERS
def test_the_summary_and_the_curves_are_there_after_the_end(id: str, tmp_path: Path) -> None:
    plot = tmp_path / "curves.png"
    Figure(figsize=(4, 3), dpi=10).savefig(plot)
    run = run_in(tmp_path, table(id, tmp_path))
    for steps in (1, 2):  # a run that is resumed for longer has the newest summary
        with RunStore.open(run.store_path) as store:
            serve(store, 0)
            step(store, steps)
        (tracker,) = made(run.config().trackers)
        tell(run, tracker)
        tracker.log_summary({"steps": steps, "success": 0.5}, plot, steps)
    (found,) = read(id, run)
    assert found.summary == {"steps": 2, "success": 0.5}
    assert found.points("loss") == [(1, 1.0), (2, 2.0)]
    assert found.plot == plot.read_bytes()


@TRACKERS
def test_what_a_full_disk_refused_is_sent_with_the_next_step(
    id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path, table(id, tmp_path))
    (tracker,) = made(run.config().trackers)
    assert isinstance(tracker, AppendingTracker)
    log, calls = tracker.log, list[int]()

    def full(values: Any, at: int, time_s: float) -> None:
        calls.append(at)
        if len(calls) in (2, 3):
            raise OSError(28, "No space left on device")
        log(values, at, time_s)

    monkeypatch.setattr(tracker, "log", full)
    with RunStore.open(run.store_path) as store:
        serve(store, 0)
        for number in (1, 2, 3):
            step(store, number)
        tell(run, tracker)
    assert calls == [1, 2, 2, 2, 3]
    (found,) = read(id, run)
    assert found.points("loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("agentrl: warning")]
    assert any("OSError: [Errno 28] No space left on device" in line for line in warnings)


@pytest.mark.adapters
def test_wandb_is_tried_again_after_a_start_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    begin, calls = wandb.init, list[str]()

    def late(**how: Any) -> Any:
        begun = begin(**how)  # W&B's process has the run, and the answer is lost
        calls.append(how["id"])
        if len(calls) == 1:
            raise TimeoutError("no answer")
        return begun

    run = run_in(tmp_path, {"wandb": SETTINGS["wandb"]})
    (tracker,) = made(run.config().trackers)
    monkeypatch.setattr(wandb, "init", late)
    with RunStore.open(run.store_path) as store:
        serve(store, 0)
        step(store, 1)
        tell(run, tracker)
    assert len(calls) == 2
    (found,) = read("wandb", run)
    assert found.points("loss") == [(1, 1.0)]


@pytest.mark.adapters
def test_wandb_without_a_key_and_settings_that_are_wrong_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setattr(wandb, "login", lambda **how: how != {"prompt": False, "verify": False})
    with pytest.raises(ConfigError, match=r"trackers.wandb.*wandb login, or give mode = 'offline'"):
        made({"wandb": {}})
    with pytest.raises(ConfigError, match=r"trackers.wandb.*mode = 'off'"):
        made({"wandb": {"mode": "off"}})
