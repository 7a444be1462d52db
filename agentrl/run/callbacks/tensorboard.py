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
            event_protos: Any = import_module("tensorboard.compat.proto.event_pb2")
            summaries: Any = import_module("tensorboard.compat.proto.summary_pb2")
            record_writers: Any = import_module("tensorboard.summary.writer.record_writer")
        except ImportError as error:
            install_hint = install_command("tensorboard")
            raise UsageError(f"tensorboard is not installed ({error}): {install_hint}") from None
        self._event, self._session = event_protos.Event, event_protos.SessionLog
        self._summary, self._records = summaries.Summary, record_writers.RecordWriter
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
            session_log = self._session(status=self._session.START)
            self._write(self._event(wall_time=step.time_s, step=step.step, session_log=session_log))
        super().on_step(step)

    def log(self, values: Mapping[str, float], step: int, time_s: float) -> None:
        """One record with all numbers."""
        scalar_values = [
            self._summary.Value(tag=metric_name, simple_value=metric_value)
            for metric_name, metric_value in values.items()
        ]
        self._write(self._event(wall_time=time_s, step=step, summary=self._summary(value=scalar_values)))

    def log_summary(self, summary: Mapping[str, Any], plot: Path, step: int) -> None:
        """The summary as a text, the plot as an image."""
        self._add_text("summary", json.dumps(summary, indent=2), step)
        png_bytes = plot.read_bytes()
        width_px, height_px = int.from_bytes(png_bytes[16:20], "big"), int.from_bytes(png_bytes[20:24], "big")
        plot_image = self._summary.Image(width=width_px, height=height_px, colorspace=4, encoded_image_string=png_bytes)
        image_value = self._summary.Value(tag="curves", image=plot_image)
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=[image_value])))

    def _add_text(self, tag: str, text: str, step: int) -> None:
        """A text that TensorBoard shows as it is: Markdown of a block of code."""
        text_value = self._summary.Value(tag=f"{tag}/text_summary")
        text_value.metadata.plugin_data.plugin_name = "text"
        text_value.tensor.dtype = 7  # DT_STRING
        text_value.tensor.tensor_shape.dim.add(size=1)
        text_value.tensor.string_val.append("".join(f"    {text_line}\n" for text_line in text.splitlines()).encode())
        self._write(self._event(wall_time=time.time(), step=step, summary=self._summary(value=[text_value])))

    def _write(self, event: Any) -> None:
        """Append a record, after those that could not be written before. Raises OSError; then a new file is begun,
        for a part of the record may be in the old one."""
        self._unwritten.append(event.SerializeToString())
        file_path = self._path
        # Only set again at the end of a call that wrote everything. A record that was torn by a full disk makes
        # TensorBoard stop reading its file there, so whatever comes later goes into a new file.
        self._path = None
        if file_path is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            file_name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
            file_path = self._folder / file_name
            version_event = self._event(wall_time=time.time(), file_version="brain.Event:2")
            with file_path.open("xb") as event_file:
                self._records(event_file).write(version_event.SerializeToString())
        while self._unwritten:
            with file_path.open("ab") as event_file:
                self._records(event_file).write(self._unwritten[0])
            self._unwritten.popleft()
        self._path = file_path
