"""Where a run goes on: the newest checkpoint on disk, reconciled with the store.

A checkpoint becomes real by its folder's rename; the store learns of it afterwards. A kill in between leaves a folder
that the store does not know: it is recorded first, then everything after its step is undone.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from agentrl.records import WeightVersion
from agentrl.runtime.models import model_dir
from agentrl.runtime.rundir import RunDir
from agentrl.store import RunStore


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPoint:
    """`model` is the folder whose weights `version` stands for; `checkpoint` is None for the run's first start."""

    model: Path
    checkpoint: Path | None
    version: WeightVersion

    @property
    def adapter(self) -> Path | None:
        """The folder of the adapter, where an adapter was trained."""
        return self.checkpoint / "adapter" if self.checkpoint else None


def start_point(run: RunDir, store: RunStore) -> StartPoint:
    """Bring the store to the newest checkpoint (step 0 without one) and say where the run goes on."""
    checkpoint = newest(run.checkpoints)
    step = 0 if checkpoint is None else step_of(checkpoint)
    known = store.latest_checkpoint()
    if checkpoint is not None and (known is None or known.step < step):
        store.checkpoint(step, _version(store, step), checkpoint)
    if store.stands_beyond(step):
        store.rollback(step)
    version = _version(store, step)
    return StartPoint(model=checkpoint or model_dir(run.config().model), checkpoint=checkpoint, version=version)


def where_it_stands(start: StartPoint, run: RunDir, store: RunStore) -> StartPoint:
    """`start`, or the newest checkpoint since then: of a few that are kept, that which a run began with goes first.
    Changes nothing."""
    checkpoint = newest(run.checkpoints)
    version = None if checkpoint is None else store.version_at(step_of(checkpoint))
    if checkpoint is None or version is None:
        return start
    return StartPoint(model=checkpoint, checkpoint=checkpoint, version=version)


def newest(folder: Path) -> Path | None:
    """The newest complete checkpoint in `folder`."""
    found = sorted(path for path in folder.glob("step-*") if (path / "state.json").is_file())
    return found[-1] if found else None


def step_of(checkpoint: Path) -> int:
    """The optimizer step a checkpoint folder is named after."""
    return int(checkpoint.name.removeprefix("step-"))


def _version(store: RunStore, step: int) -> WeightVersion:
    """The version that stands for the weights of `step`: the one the run minted then, else a new one."""
    found = store.version_at(step)
    if found is None:
        found = store.mint_version(step)
    store.confirm_version(found)
    return found
