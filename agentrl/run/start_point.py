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
    checkpoint, damage = newest_intact(run.checkpoints, progress)
    lines = [damage] if damage else []
    step = 0 if checkpoint is None else step_of(checkpoint)
    saved = [entry for folder in complete(run.checkpoints) if (entry := _saved(folder)) is not None]
    buffer = run.config().buffer
    # The order of these calls is the repair. First the episodes that the folders list and the store lacks, or the next
    # call would mark a step as trained whose members are still waiting. Then the row of a folder that was renamed just
    # before a kill. Then everything beyond the checkpoint is undone. Each call does nothing if there is nothing to do,
    # so a start that is killed in between is repeated whole (law 2): `tests/store/test_power_loss.py`,
    # `tests/run/test_rundir.py`.
    store.recovery.reconcile(saved, max_lag=buffer.max_lag)
    recorded = store.lineage.latest_checkpoint()
    if checkpoint is not None and (recorded is None or recorded.step < step):
        store.lineage.checkpoint(step, _version(store, step), checkpoint)
    # Only if something stands beyond it: a rollback begins a new attempt, and a start that undid nothing would count as
    # one.
    if store.lineage.stands_beyond(step):
        cost = _cost(step, store.metrics.values("step", after=step))
        attempt = store.lineage.rollback(step, ahead=buffer.groups_ahead)
        lines += [f"{cost} (attempt {attempt})"] if cost else []
    if lines:
        WENT_BACK.set(store, "; ".join(lines))
    version = _version(store, step)
    return StartPoint(model=checkpoint or model_dir(run.config().model), checkpoint=checkpoint, version=version)


def where_it_stands(start: StartPoint, run: RunDir, store: RunStore) -> StartPoint:
    """`start`, or the newest checkpoint since then: a run keeps only a few, so the one it started from may be gone.
    Changes nothing."""
    checkpoint = newest(run.checkpoints)
    version = None if checkpoint is None else store.versions.version_at(step_of(checkpoint))
    if checkpoint is None or version is None:
        return start
    return StartPoint(model=checkpoint, checkpoint=checkpoint, version=version)


def _cost(step: int, lost: Sequence[Metric]) -> str:
    """The cost of going back to `step`, in words: the steps in `lost` are trained again. Empty without any."""
    if not lost:
        return ""
    seconds, tokens = (
        sum(float(cast("float", row.values.get(key) or 0)) for row in lost for key in keys)
        for keys in (("busy_s", "idle_s"), ("tokens_scored",))
    )
    many = f"{len(lost)} step{'s' * (len(lost) > 1)}"
    return f"went back to step {step}: {many} ({seconds:.0f} s, {tokens:.0f} tokens) are trained again"


def _saved(checkpoint: Path) -> Saved | None:
    """The checkpoint's own record of its training, None if it trained nothing of this run. Raises RunFailed if it
    cannot be read, FormatError."""
    try:
        state = read_state(checkpoint)
    except (OSError, ValueError) as error:
        go_back = f"move {checkpoint} away to go on from the checkpoint before it"
        raise RunFailed(f"{checkpoint / STATE} cannot be read: {go_back} ({type(error).__name__}: {error})") from error
    if "episodes" not in state:
        return None
    return Saved(previous_step=state["previous_step"], episodes=tuple(map(tuple, state["episodes"])))


def _version(store: RunStore, step: int) -> WeightVersion:
    """The version of the weights of `step`: the one that the run minted then, else a new one."""
    version = store.versions.version_at(step)
    if version is None:
        version = store.versions.mint_version(step)
    store.versions.confirm_version(version)
    return version
