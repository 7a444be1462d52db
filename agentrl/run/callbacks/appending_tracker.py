"""Trackers that keep every point they are sent: how a run is one run there, with each step once.

Owns the file `trackers/ID.json` in the run's folder: the id of the tracker's run, and the place up to which that run
has everything. Points come from the run's store, so one that could not be sent is sent later. If a restart undid steps
that were sent, a new run of the tracker begins, and has the steps before them too. Never knows whose program it is.
"""

from __future__ import annotations

import json
import re
import secrets
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.run.callbacks.callback import EvalEnded, Event, RunEnded, RunStarted, StepEnded
from agentrl.run.callbacks.event_feed import EventFeed, FeedPosition
from agentrl.run.callbacks.tracker import MetricTracker
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run in the tracker. `part` is 1 at first, and grows whenever a restart undid points that were sent; the parts
    of a run have the same `group`. `config` is the run file, defaults included; `folder` is the run's own."""

    id: str
    group: str
    name: str
    part: int
    folder: Path
    config: Mapping[str, Any]


@dataclass(slots=True)
class _Sent:
    """Contents of the tracker file: the newest run of the tracker, and the points that it got: `rows` rows of them, up
    to `place`."""

    group: str = field(default_factory=lambda: secrets.token_hex(6))
    part: int = 1
    rows: int = 0
    place: FeedPosition = field(default_factory=FeedPosition)

    @property
    def id(self) -> str:
        # A tracker cannot take points back. After a rollback a second run of the tracker begins in the same group, with
        # the steps before it repeated: each of the two is a clean curve. Sending the new values under the old steps
        # would show a zigzag, or be refused.
        return self.group if self.part == 1 else f"{self.group}-{self.part}"

    @classmethod
    def parse(cls, text: str) -> _Sent:
        sent_fields: dict[str, Any] = json.loads(text)
        feed_position = FeedPosition.parse(json.dumps(sent_fields.pop("place")))
        return cls(**sent_fields, place=feed_position)

    def to_json(self) -> str:
        sent_fields = {"group": self.group, "part": self.part, "rows": self.rows}
        return json.dumps({**sent_fields, "place": json.loads(self.place.to_json())})


class AppendingTracker(MetricTracker):
    """Write `open`, `log`, `finish` and `close`. `log` is called with an open run, and raises if it could not send."""

    def __init__(self) -> None:
        super().__init__()
        self._run, self._config = RunDir(Path()), dict[str, Any]()
        self._sent: _Sent | None = None
        self._opened = ""

    @abstractmethod
    def open(self, run: TrackedRun) -> None:
        """Begin a run of the tracker, or go on in the one of this id."""

    @abstractmethod
    def finish(self, summary: Mapping[str, Any], plot: Path, step: int) -> None:
        """Send what `summary.json` holds, and a PNG file of the curves."""

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """The run ends, or stops and may go on later."""

    @property
    def rows(self) -> int:
        """Number of rows that `log` has sent to the tracker's run."""
        return 0 if self._sent is None else self._sent.rows

    def on_start(self, run: RunStarted, /) -> None:
        """Open the tracker's run, and send what it lacks."""
        self._run, self._config = RunDir(run.path), dict(run.config)
        self._sent, self._opened = None, ""
        self._ready(self._known())
        self._send_all()

    def on_step(self, step: StepEnded, /) -> None:
        """Send what the store has and the tracker lacks, this step included."""
        self._send_all()

    def on_eval(self, evaluation: EvalEnded, /) -> None:
        """Send what the store has and the tracker lacks, this evaluation included."""
        self._send_all()

    def on_end(self, end: RunEnded, /) -> None:
        """Send the rest, and close the run: nobody promises that a summary follows."""
        try:
            self._send_all()
        finally:
            self._shut(finished=end.finished)

    def log_summary(self, summary: Mapping[str, Any], plot: Path, step: int) -> None:
        """Open the run again for the summary and the curves."""
        self._ready(self._known())
        try:
            self.finish(summary, plot, step)
        finally:
            self._shut(finished=True)

    def _send_all(self) -> None:
        # Read from the store, not taken from the event that was passed in: whatever an earlier call could not send is
        # still there, so a network that was down for an hour leaves no hole.
        with RunStore.read(self._run.store_path, away_s=0) as run_store:
            progress = self._known()
            event_feed = EventFeed(("on_step", "on_eval"), progress.place)
            new_events = event_feed.read(run_store)
            if any(
                isinstance(new_event, StepEnded) and new_event.step <= progress.place.step for new_event in new_events
            ):
                self._shut(finished=False)
                progress = self._sent = _Sent(progress.group, progress.part + 1)
                event_feed = EventFeed(("on_step", "on_eval"), progress.place)
                new_events = event_feed.read(run_store)
            for new_event in new_events:
                self._ready(progress)
                self._send(new_event)
                event_feed.mark(new_event)
                progress.rows += 1
                # After each row. A process that is killed between the send and this line sends that one row again,
                # which trackers take as the same step; saving less often would repeat more.
                self._save(progress)

    def _send(self, event: Event) -> None:
        if isinstance(event, StepEnded):
            super().on_step(event)
        elif isinstance(event, EvalEnded):
            super().on_eval(event)

    def _ready(self, sent: _Sent) -> None:
        if self._opened == sent.id:
            return
        run_name = self._run.path.resolve().name + (f" (part {sent.part})" if sent.part > 1 else "")
        self.open(TrackedRun(sent.id, sent.group, run_name, sent.part, self._run.path, self._config))
        self._opened = sent.id
        self._save(sent)

    def _shut(self, *, finished: bool) -> None:
        if self._opened:
            self._opened = ""
            self.close(finished=finished)

    @property
    def _path(self) -> Path:
        return self._run.path / "trackers" / (re.sub(r"\W", "_", self.name.removeprefix("trackers.")) + ".json")

    def _known(self) -> _Sent:
        if self._sent is None:
            self._sent = _Sent.parse(self._path.read_text(encoding="utf-8")) if self._path.exists() else _Sent()
        return self._sent

    def _save(self, sent: _Sent) -> None:
        """Write the file, whole at any instant. Raises OSError; then it is written with the next row."""
        self._path.parent.mkdir(exist_ok=True)
        part_path = self._path.with_suffix(".part")
        part_path.write_text(sent.to_json(), encoding="utf-8")
        part_path.replace(self._path)
