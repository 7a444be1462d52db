"""Writes a run as event files of TensorBoard, with the package `tensorboard` and no TensorFlow.

Owns these files. A start of the run begins a file of its own, whose first record makes TensorBoard forget the points
from the next step on that an earlier attempt wrote: so a step that is trained again has one point.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from agentrl.errors import UsageError
from agentrl.host.installation import install_command
from agentrl.run.callbacks.callback import RunStarted, StepEnded
from agentrl.run.callbacks.tracker import MetricTracker

_MOST = 10_000  # records that wait for a disk


class TensorBoard(MetricTracker):
    """TensorBoard's event files, in `folder` (default: `tensorboard` in the run's folder). The run file, the summary
    and the plot of the curves are there as texts and an image. Raises UsageError if tensorboard is not installed."""

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        try:
            events: Any = import_module("tensorboard.compat.proto.event_pb2")
            summaries: Any = import_module("tensorboard.compat.proto.summary_pb2")
            writers: Any = import_module("tensorboard.summary.writer.record_writer")
        except ImportError as error:
            hint = install_command("tensorboard")
            raise UsageError(f"tensorboard is not installed ({error}): {hint}") from None
        self._event, self._session = events.Event, events.SessionLog
        self._summary, self._records = summaries.Summary, writers.RecordWriter
        self._requested_folder, self._folder = folder, Path()
        self._path: Path | None = None
        self._unwritten: deque[bytes] = deque(maxlen=_MOST)
        self._attempt = 0

    def on_start(self, run: RunStarted) -> None:
        """Begin a file; the first of a folder gets the run file."""
        self._folder = (
            run.path / "tensorboard" if self._requested_folder is None else Path(self._requested_folder).expanduser()
        )
        self._path = None
        if not any(self._folder.glob("events.out.tfevents.*")):
            self._add_text("config", json.dumps(run.config, indent=2), run.step)

    def on_step(self, step: StepEnded) -> None:
        """Send a step; the first after a start makes later ones void."""
        # TensorBoard knows this record: on a session start it drops all points of that step and later ones. So undone
        # steps vanish from the curves without a file being rewritten.
        if step.attempt != self._attempt:
            self._attempt = step.attempt
            void = self._session(status=self._session.START)
            self._write(self._event(wall_time=step.time_s, step=step.step, session_log=void))
        super().on_step(step)

    def log(self, values: Mapping[str, float], step: int, time_s: float) -> None:
        """One record with all numbers."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(self._event(wall_time=time_s, step=step, summary=self._summary(value=scalars)))

    def log_summary(self, summary: Mapping[str, Any], plot: Path, step: int) -> None:
        """The summary as a text, the plot as an image."""
        self._add_text("summary", json.dumps(summary, indent=2), step)
        png = plot.read_bytes()
        width, height = int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")
        image = self._summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        value = self._summary.Value(tag="curves", image=image)
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=[value])))

    def _add_text(self, tag: str, text: str, step: int) -> None:
        """A text that TensorBoard shows as it is: Markdown of a block of code."""
        value = self._summary.Value(tag=f"{tag}/text_summary")
        value.metadata.plugin_data.plugin_name = "text"
        value.tensor.dtype = 7  # DT_STRING
        value.tensor.tensor_shape.dim.add(size=1)
        value.tensor.string_val.append("".join(f"    {line}\n" for line in text.splitlines()).encode())
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=[value])))

    def _write(self, event: Any) -> None:
        """Append a record, after those that could not be written before. Raises OSError; then a new file is begun,
        for a part of the record may be in the old one."""
        self._unwritten.append(event.SerializeToString())
        path = self._path
        # Only set again at the end of a call that wrote everything. A record that was torn by a full disk makes
        # TensorBoard stop reading its file there, so whatever comes later goes into a new file.
        self._path = None
        if path is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
            path = self._folder / name
            head = self._event(wall_time=time.time(), file_version="brain.Event:2")
            with path.open("xb") as file:
                self._records(file).write(head.SerializeToString())
        while self._unwritten:
            with path.open("ab") as file:
                self._records(file).write(self._unwritten[0])
            self._unwritten.popleft()
        self._path = path
