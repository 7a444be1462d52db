"""Trackers of the run file over a real store: what TensorBoard's own reader finds in the files, after restarts and
full disks too; a tracker that hangs or raises; settings that name none."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import trio
from store.play import serve

from agentrl import Trainer, registry
from agentrl.config import parse
from agentrl.errors import ConfigError
from agentrl.run.callbacks.callback import EvalEnded, check_callbacks
from agentrl.run.callbacks.delivery import telling
from agentrl.run.callbacks.tracker import MetricTracker, hand_over, made, numbers
from agentrl.run.run_folder import RunDir
from agentrl.run.stop_request import StopRequest
from agentrl.store import RunStore

from .test_callbacks import step


class Notes(MetricTracker):
    """Keeps what it is sent; `fails` raises instead."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails, self.sent = fails, list[tuple[dict[str, float], int]]()

    def log(self, values: Any, step: int, time_s: float) -> None:
        if self.fails:
            raise ConnectionError("no network")
        self.sent.append((values, step))

    def log_summary(self, summary: Any, plot: Path, step: int) -> None:
        if self.fails:
            raise ConnectionError("no network")
        self.sent.append(({"summary": len(summary)}, step))


def run_in(folder: Path, trackers: dict[str, Any]) -> RunDir:
    return RunDir.create(folder / "run", parse({"model": "m", "env": {"id": "e"}, "trackers": trackers}))


def tell(run: RunDir, *trackers: MetricTracker) -> None:
    async def main() -> None:
        async with telling(check_callbacks(trackers), run, run.config(), StopRequest()):
            pass

    trio.run(main)


def test_names_of_numbers_are_those_of_the_metrics() -> None:
    values: Any = {"loss": 0.5, "updated": True, "by_lag": {"2_3": {"ess": 1}}, "alarms": ["kl"], "ess": None}
    assert dict(numbers(values)) == {"loss": 0.5, "updated": 1.0, "by_lag/2_3/ess": 1.0}


def test_a_tracker_of_a_package_is_made_with_its_arguments_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._registered, ("trackers", "notes"), Notes)
    run = run_in(tmp_path, {"notes": {"fails": False}})
    with RunStore.open(run.store_path) as store:
        serve(store, 0)
        step(store, 1)
        (notes,) = made(run.config().trackers)
        tell(run, notes)
        (again,) = made(run.config().trackers)
        tell(run, again)
    assert isinstance(notes, Notes) and isinstance(again, Notes)
    assert [(values["loss"], at) for values, at in notes.sent] == [(1.0, 1)] and again.sent == []
    figures: Any = {"success": 0.5, "outcome": None, "turns": 2.0, "tokens": 9.0, "n": 4, "failed": 0}
    notes.on_eval(EvalEnded(id="eval:1:4", name="held_out", when="after", step=7, time_s=0.0, **figures))
    sent = {"eval/held_out/success": 0.5, "eval/held_out/turns": 2, "eval/held_out/tokens": 9}
    assert notes.sent[-1] == ({**sent, "eval/held_out/n": 4, "eval/held_out/failed": 0}, 7)


@pytest.mark.parametrize(
    ("trackers", "said"),
    [
        ({"tensorbord": {}}, "trackers.tensorbord.*tensorboard"),
        ({"notes": {"fail": True}}, "trackers.notes.*fail"),
        ({"store": {}}, "trackers.store.*MetricTracker"),
    ],
)
def test_a_setting_that_makes_no_tracker_is_refused_by_name(
    trackers: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._registered, ("trackers", "notes"), Notes)
    monkeypatch.setitem(registry._registered, ("trackers", "store"), dict)
    with pytest.raises(ConfigError, match=said):
        made(trackers)


def test_one_that_fails_or_hangs_at_the_end_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release = threading.Event()

    class Hangs(Notes):
        deadline_s = 0.05

        def log_summary(self, summary: Any, plot: Path, step: int) -> None:
            release.wait(60)

    raises, hangs, good = Notes(fails=True), Hangs(), Notes()
    raises.name, hangs.name = "trackers.raises", "trackers.hangs"
    hand_over([raises, hangs, good], {"steps": 3}, tmp_path / "curves.png", 3)
    release.set()
    assert good.sent == [({"summary": 1}, 3)]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "trackers.raises: has no summary: ConnectionError: no network" in lines[0]
    assert "trackers.hangs: has not taken the summary" in lines[1]


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [(at.step, at.value) for at in EventAccumulator(str(folder)).Reload().Scalars(tag)]


@pytest.mark.adapters
def test_tensorboard_reads_each_step_once_also_after_a_rollback(tmp_path: Path) -> None:
    run = run_in(tmp_path, {"tensorboard": {}})
    folder = run.path / "tensorboard"
    with RunStore.open(run.store_path) as store:
        serve(store, 0)
        store.lineage.checkpoint(1, step(store, 1), run.checkpoints / "1")
        for number in (2, 3):
            step(store, number)
        tell(run, *made(run.config().trackers))
        assert points(folder, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
        store.lineage.rollback(1)
        store.metrics.record("step", 2, {"loss": 20.0})
        tell(run, *made(run.config().trackers))
        assert points(folder, "loss") == [(1, 1.0), (2, 20.0)]
        store.metrics.record("step", 3, {"loss": 30.0})
        tell(run, *made(run.config().trackers))
    assert points(folder, "loss") == [(1, 1.0), (2, 20.0), (3, 30.0)]


@pytest.mark.adapters
def test_tensorboard_has_config_summary_and_plot_and_outlives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    Figure(figsize=(4, 3), dpi=10).savefig(tmp_path / "curves.png")
    run = run_in(tmp_path, {"tensorboard": {"folder": str(tmp_path / "events")}})
    (tracker,) = made(run.config().trackers)
    with RunStore.open(run.store_path) as store:
        serve(store, 0)
        step(store, 1)
        tell(run, tracker)
    with monkeypatch.context() as full:
        full.setattr(Path, "open", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            tracker.log({"loss": 2.0}, 2, 2.0)
    tracker.log({"loss": 3.0}, 3, 3.0)
    tracker.log_summary({"steps": 3}, tmp_path / "curves.png", 3)
    assert points(tmp_path / "events", "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    found = EventAccumulator(str(tmp_path / "events")).Reload()
    (image,) = found.Images("curves")
    assert (image.width, image.height) == (40, 30)
    (config,), (summary,) = (found.Tensors(f"{name}/text_summary") for name in ("config", "summary"))
    assert b'"model": "m"' in config.tensor_proto.string_val[0]
    assert b'"steps": 3' in summary.tensor_proto.string_val[0] and summary.step == 3


@pytest.mark.long
@pytest.mark.adapters
def test_a_run_that_is_resumed_for_longer_is_one_curve_with_its_summary(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings: dict[str, Any] = {
        "model": "agentrl/tiny-coder",
        "env": {"id": "agentrl/Calculator-v0"},
        "rollout": {"group_size": 2, "max_running": 4, "max_tokens_per_turn": 6},
        "engine": {"max_batch": 8, "kv_cache_mb": 64},
        "buffer": {"groups_per_step": 1, "skip_without_signal": False},
        "train": {"steps": 1},
        "eval": {"sets": [{"name": "held", "n": 1}]},
        "trackers": {"tensorboard": {}},
    }
    Trainer(config=settings, out=tmp_path / "run").train(quiet=True)
    Trainer.resume(tmp_path / "run", settings=["train.steps=2"], quiet=True)
    folder = tmp_path / "run" / "tensorboard"
    assert [at for at, _ in points(folder, "group_count")] == [1, 2]
    found = EventAccumulator(str(folder)).Reload()
    assert [at.step for at in found.Tensors("summary/text_summary")] == [1, 2]
    assert [at.step for at in found.Images("curves")] == [1, 2]
    assert any(tag.startswith("eval/") for tag in found.Tags()["scalars"])
