"""The point from which a run goes on: the newest checkpoint on disk, reconciled with the store.

A checkpoint exists once its folder is renamed; the store records it afterwards. A kill in between leaves a folder that
the store does not know: it is recorded first, then everything after its step is undone. A power loss, or a restored
copy of the store, may also lose the rows that say which episodes it trained: then the checkpoint's own list counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from agentrl.config import RunConfig
from agentrl.errors import RunFailed
from agentrl.learner.checkpoints.folders import STATE, complete, newest, of_role, step_of
from agentrl.models.resolve import model_dir
from agentrl.records import WeightVersion
from agentrl.run.run_folder import RunDir
from agentrl.store import Saved
from agentrl.store.interfaces import StartStore, Versions
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


def start_point(run: RunDir, store: StartStore) -> StartPoint:
    """Bring the store to the newest checkpoint (step 0 without one) and say where the run goes on."""
    checkpoint = newest(run.checkpoints)
    step = 0 if checkpoint is None else step_of(checkpoint)
    saved = [found for folder in complete(run.checkpoints) if (found := _saved(folder)) is not None]
    buffer = run.config().buffer
    store.reconcile(saved, max_lag=buffer.max_lag)
    known = store.latest_checkpoint()
    if checkpoint is not None and (known is None or known.step < step):
        store.checkpoint(step, _version(store, step), checkpoint)
    if store.stands_beyond(step):
        cost = _cost(step, store.metrics("step", after=step))
        attempt = store.rollback(step, ahead=buffer.groups_ahead)
        if cost:
            WENT_BACK.set(store, f"{cost} (attempt {attempt})")
    version = _version(store, step)
    return StartPoint(model=checkpoint or model_dir(run.config().model), checkpoint=checkpoint, version=version)


def where_it_stands(start: StartPoint, run: RunDir, store: Versions) -> StartPoint:
    """`start`, or the newest checkpoint since then: a run keeps only a few, so the one it started from may be gone.
    Changes nothing."""
    checkpoint = newest(run.checkpoints)
    version = None if checkpoint is None else store.version_at(step_of(checkpoint))
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
    """The checkpoint's own record of its training, None if it has none. Raises RunFailed if it cannot be read."""
    file = checkpoint / STATE
    try:
        state = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        go_back = f"move {checkpoint} away to go on from the checkpoint before it"
        raise RunFailed(f"{file} cannot be read: {go_back} ({type(error).__name__}: {error})") from error
    if "episodes" not in state and "groups" not in state:
        return None
    return Saved(
        step=state["step"],
        previous_step=state["previous_step"],
        episodes=tuple(map(tuple, state.get("episodes", ()))),
        groups=tuple(state.get("groups", ())),
    )


def _version(store: StartStore, step: int) -> WeightVersion:
    """The version of the weights of `step`: the one that the run minted then, else a new one."""
    found = store.version_at(step)
    if found is None:
        found = store.mint_version(step)
    store.confirm_version(found)
    return found
