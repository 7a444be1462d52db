"""The point from which a run goes on: the newest intact checkpoint on disk, reconciled with the store.

A checkpoint exists once its folder is renamed; the store records it afterwards. A kill in between leaves a folder that
the store does not know: it is recorded first, then everything after its step is undone. A power loss, or a restored
copy of the store, may also lose the rows that say which episodes it trained: then the checkpoint's own list counts.
A checkpoint whose bytes changed is set aside, and the run goes back to the one before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from agentrl.config import RunConfig
from agentrl.errors import RunFailed
from agentrl.learner.checkpoints.folders import STATE, complete, newest, of_role, read_state, step_of
from agentrl.learner.checkpoints.intact import newest_intact
from agentrl.models.resolve import model_dir
from agentrl.records import WeightVersion
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore, Saved
from agentrl.store.metrics import Metric
from agentrl.store.run_values import WENT_BACK


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """`model` is the folder whose weights `version` stands for; `checkpoint` is None for the run's first start."""

    model: Path
    checkpoint: Path | None
    version: WeightVersion

    def model_of(self, role: str | None, config: RunConfig) -> Path:
        """The folder of the weights of a role with a model of its own, or of all others. Raises ModelError."""
        if role is None:
            return self.model
        return of_role(self.checkpoint, role) if self.checkpoint else model_dir(config.model_of(role))

    @property
    def adapter(self) -> Path | None:
        """The folder of the adapter, if an adapter was trained."""
        return self.checkpoint / "adapter" if self.checkpoint else None


def start_point(run: RunDir, store: RunStore, progress: Callable[[], None] = lambda: None) -> StartPoint:
    """Bring the store to the newest intact checkpoint (step 0 without one) and say where the run goes on. `progress` is
    called whenever some of its bytes were compared. Raises RunFailed if all checkpoints are damaged."""
    checkpoint, damage_text = newest_intact(run.checkpoints, progress)
    report_lines = [damage_text] if damage_text else []
    saved_step = 0 if checkpoint is None else step_of(checkpoint)
    saved_states = [
        saved_state
        for checkpoint_folder in complete(run.checkpoints)
        if (saved_state := _saved(checkpoint_folder)) is not None
    ]
    buffer_settings = run.config().buffer
    # The order of these calls is the repair. First the episodes that the folders list and the store lacks, or the next
    # call would mark a step as trained whose members are still waiting. Then the row of a folder that was renamed just
    # before a kill. Then everything beyond the checkpoint is undone. Each call does nothing if there is nothing to do,
    # so a start that is killed in between is repeated whole (law 2): `tests/store/test_power_loss.py`,
    # `tests/run/test_rundir.py`.
    store.recovery.reconcile(saved_states, max_lag=buffer_settings.max_lag)
    recorded = store.lineage.latest_checkpoint()
    if checkpoint is not None and (recorded is None or recorded.step < saved_step):
        store.lineage.checkpoint(saved_step, _version(store, saved_step), checkpoint)
    # Only if something stands beyond it: a rollback begins a new attempt, and a start that undid nothing would count as
    # one.
    if store.lineage.stands_beyond(saved_step):
        cost_text = _cost(saved_step, store.metrics.values("step", after=saved_step))
        attempt = store.lineage.rollback(saved_step, ahead=buffer_settings.groups_ahead)
        report_lines += [f"{cost_text} (attempt {attempt})"] if cost_text else []
    if report_lines:
        WENT_BACK.set(store, "; ".join(report_lines))
    start_version = _version(store, saved_step)
    return StartPoint(model=checkpoint or model_dir(run.config().model), checkpoint=checkpoint, version=start_version)


def where_it_stands(start: StartPoint, run: RunDir, store: RunStore) -> StartPoint:
    """`start`, or the newest checkpoint since then: a run keeps only a few, so the one it started from may be gone.
    Changes nothing."""
    checkpoint = newest(run.checkpoints)
    newest_version = None if checkpoint is None else store.versions.version_at(step_of(checkpoint))
    if checkpoint is None or newest_version is None:
        return start
    return StartPoint(model=checkpoint, checkpoint=checkpoint, version=newest_version)


def _cost(step: int, lost: Sequence[Metric]) -> str:
    """The cost of going back to `step`, in words: the steps in `lost` are trained again. Empty without any."""
    if not lost:
        return ""
    lost_seconds, token_count = (
        sum(
            float(cast("float", lost_row.values.get(metric_name) or 0))
            for lost_row in lost
            for metric_name in metric_names
        )
        for metric_names in (("busy_s", "idle_s"), ("tokens_scored",))
    )
    steps_text = f"{len(lost)} step{'s' * (len(lost) > 1)}"
    return f"went back to step {step}: {steps_text} ({lost_seconds:.0f} s, {token_count:.0f} tokens) are trained again"


def _saved(checkpoint: Path) -> Saved | None:
    """The checkpoint's own record of its training, None if it trained nothing of this run. Raises RunFailed if it
    cannot be read, FormatError."""
    try:
        saved_state = read_state(checkpoint)
    except (OSError, ValueError) as error:
        correction = f"move {checkpoint} away to go on from the checkpoint before it"
        raise RunFailed(
            f"{checkpoint / STATE} cannot be read: {correction} ({type(error).__name__}: {error})"
        ) from error
    if "episodes" not in saved_state:
        return None
    return Saved(previous_step=saved_state["previous_step"], episodes=tuple(map(tuple, saved_state["episodes"])))


def _version(store: RunStore, step: int) -> WeightVersion:
    """The version of the weights of `step`: the one that the run minted then, else a new one."""
    step_version = store.versions.version_at(step)
    if step_version is None:
        step_version = store.versions.mint_version(step)
    store.versions.confirm_version(step_version)
    return step_version
