"""Sends a run to Weights & Biases, or keeps it in W&B's files for `wandb sync`, with the package `wandb`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import UsageError
from agentrl.host.installation import install_command
from agentrl.run.callbacks.appending_tracker import AppendingTracker, TrackedRun


class WandbTracker(AppendingTracker):
    """A run of the W&B project `project` (of `entity`; default: yours). `mode = "offline"` writes files to `folder`
    (default: the run's own) and sends nothing. The optimizer step is the axis `step` of all charts.

    Raises UsageError if wandb is not installed, for another mode, and online if the machine has no key of W&B."""

    def __init__(
        self,
        project: str = "agentrl",
        entity: str | None = None,
        mode: Literal["online", "offline"] = "online",
        folder: str | None = None,
    ) -> None:
        super().__init__()
        if mode not in ("online", "offline"):
            raise UsageError(f"mode = {mode!r}: give 'online' or 'offline'")
        try:
            self._wandb: Any = import_module("wandb")
        except ImportError as error:
            raise UsageError(f"wandb is not installed ({error}): {install_command('wandb')}") from None
        if mode == "online" and not self._wandb.login(prompt=False, verify=False):
            raise UsageError("W&B has no key on this machine: type wandb login, or give mode = 'offline'")
        self._project, self._entity, self._mode, self._folder = project, entity, mode, folder
        self._logged: Any = None

    def open(self, run: TrackedRun) -> None:
        """Begin W&B's run, or go on in it; offline each start writes a file of its own for the same run."""
        wandb_folder = run.folder if self._folder is None else Path(self._folder).expanduser()
        wandb_folder.mkdir(parents=True, exist_ok=True)
        # Nothing of this machine goes along.
        disabled_settings = ("disable_git", "x_disable_meta", "x_disable_stats", "silent")
        wandb_settings = {
            **dict.fromkeys(disabled_settings, True),
            "console": "off",
            "save_code": False,
            "x_save_requirements": False,
        }
        try:
            self._logged = self._wandb.init(
                project=self._project,
                entity=self._entity,
                mode=self._mode,
                dir=str(wandb_folder),
                id=run.id,
                name=run.name,
                group=run.group,
                config=dict(run.config),
                resume="allow",
                reinit="create_new",
                settings=self._wandb.Settings(
                    **wandb_settings, init_timeout=self.deadline_s, finish_timeout=self.deadline_s
                ),
            )
        except BaseException:
            self._wandb.teardown(exit_code=1)  # else W&B's process holds the id, and no later try gets it
            raise
        self._logged.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int, time_s: float) -> None:
        """A row of W&B's history; its own count of rows never goes back."""
        # W&B's own `step` must never decrease: it ignores rows for which it does. Evaluations come with the step that
        # they measured, which may be an earlier one, so the row count is W&B's step, and ours is a value and the axis.
        self._logged.log({**values, "step": step}, step=self.rows)

    def finish(self, summary: Mapping[str, Any], plot: Path, step: int) -> None:
        """The summary is in the run's summary, the curves are an image."""
        self._logged.summary["summary"] = dict(summary)
        self._logged.log({"curves": self._wandb.Image(str(plot)), "step": step}, step=self.rows)

    def close(self, *, finished: bool) -> None:
        """Wait until W&B has all rows."""
        self._logged.finish(exit_code=0 if finished else 1)
