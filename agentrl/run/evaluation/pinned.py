"""Evaluation during training on engines of its own (`[eval] engines`), each pinned to the version that it measures.

    learner ─► weights of every k-th step ─► RUN/evaluation/STEP-VERSION ─► engines of evaluation ─► episodes ─► removed

The learner sends these engines nothing, so a version stays there until its episodes have ended, while training goes on
with newer ones. One version is measured after the other, oldest first; the next waits on disk. That folder is on the
run's disk: a run that is killed and resumed finishes what it began. Owns the folder and the order; never an engine.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from agentrl.config import RunConfig
from agentrl.engine.weight_sync import canary
from agentrl.engine.weight_sync.canary import Canary
from agentrl.models.resolve import model_dir
from agentrl.records import WeightVersion
from agentrl.run.children.engine_process import ServedWeights
from agentrl.run.evaluation import held_out
from agentrl.run.run_folder import RunDir
from agentrl.store import RunStore
from agentrl.store.run_values import PINNED

_LOOK_S = 0.5  # between two looks at the folder and at the episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Weights that wait to be measured: a weight file, or the folder of an adapter, at `path`."""

    version: WeightVersion
    path: Path

    @property
    def folder(self) -> Path:
        return self.path.parent


def is_due(config: RunConfig, step: int) -> bool:
    """Whether the weights of an optimizer step are kept to be measured by engines of their own."""
    step_interval = config.eval.every
    return bool(config.eval.engines and step_interval and step % step_interval == 0 and 0 < step < config.train.steps)


def keep(run: RunDir, version: WeightVersion, weights: Path) -> None:
    """Copy a version's weight file or adapter, with its canary, whole or not at all. They are no link: the learner's
    may be in memory, and gone at a resume."""
    pins_folder = run.path / "evaluation"
    draft_folder = pins_folder / f".draft-{os.getpid()}"
    shutil.rmtree(draft_folder, ignore_errors=True)
    draft_folder.mkdir(parents=True)
    (shutil.copytree if weights.is_dir() else shutil.copyfile)(weights, draft_folder / weights.name)
    if (canary_path := canary.beside(weights)).exists():
        shutil.copyfile(canary_path, canary.beside(draft_folder / weights.name))
    # Written beside and renamed: the supervisor looks at the folder all the time and takes whatever has a name of this
    # form. A copy that was cut off by a crash has another name and is removed by the next one.
    draft_folder.rename(pins_folder / f"{version.step}-{version.version}")


def pins(run: RunDir) -> list[Pin]:
    """List the weights that wait to be measured, oldest first."""
    waiting_pins: list[Pin] = []
    for pin_folder in (run.path / "evaluation").glob("[0-9]*-[0-9]*"):
        pinned_step, pinned_version = map(int, pin_folder.name.split("-"))
        for weights_path in pin_folder.iterdir():
            if not weights_path.name.endswith(".canary"):
                waiting_pins.append(
                    Pin(version=WeightVersion(version=pinned_version, step=pinned_step), path=weights_path)
                )
    return sorted(waiting_pins, key=lambda pin: pin.version.version)


def weights_of(run: RunDir, config: RunConfig, pin: Pin | None = None) -> ServedWeights:
    """Return the weights that an engine of evaluation serves: those of `pin`, or of the oldest pin that waits. Without
    any, it serves the model that the run began with, and gets no requests."""
    waiting_pins = pins(run)
    pin = pin or (waiting_pins[0] if waiting_pins else None)
    model_folder, first_version = model_dir(config.model), WeightVersion(version=0, step=0)
    if pin is None:
        return ServedWeights(model=model_folder, base=first_version, current=first_version)
    pin_canary = Canary.read(proof_path) if (proof_path := canary.beside(pin.path)).exists() else None
    weights_file, adapter_folder = (None, pin.path) if config.sends_adapters else (pin.path, None)
    return ServedWeights(
        model=model_folder,
        base=first_version,
        current=pin.version,
        canary=pin_canary,
        file=weights_file,
        adapter=adapter_folder,
    )


@dataclass(slots=True)
class PinnedEvaluations:
    """Measures what waits, one version after the other. `serve` has all engines of evaluation serve the weights of a
    pin; `writes` makes calls of the store, on a full disk again and again."""

    run: RunDir
    config: Callable[[], RunConfig]
    writes: Callable[[Callable[[RunStore], bool]], Awaitable[bool]]
    serve: Callable[[Pin], Awaitable[None]]

    @property
    def pending(self) -> bool:
        """Whether something waits, or is being measured."""
        return bool(pins(self.run))

    async def keep_measuring(self) -> None:
        """Measure until cancelled."""
        while True:
            if waiting_pins := pins(self.run):
                await self._measure(waiting_pins[0])
            else:
                await trio.sleep(_LOOK_S)

    async def _measure(self, pin: Pin) -> None:
        if await self.writes(partial(_stands, pin)):
            await self.serve(pin)
            await self.writes(partial(_schedule, self.config(), pin))
            await self._until(partial(_measured, pin))
        # Removed last. A run that dies before this line measures the version again at its next start and finds its
        # episodes already there; one that removed it first might have no result and nothing to measure.
        shutil.rmtree(pin.folder, ignore_errors=True)

    async def _until(self, look: Callable[[RunStore], bool]) -> None:
        while True:
            if await self.writes(look):
                return
            await trio.sleep(_LOOK_S)


def _when(pin: Pin) -> str:
    return f"during@{pin.version.step}"


def _stands(pin: Pin, store: RunStore) -> bool:
    """Whether it is a version of the run's lineage: a rollback may have undone it."""
    pinned_version = pin.version.version
    return store.versions.knows_version(pinned_version) and not store.versions.is_undone(pinned_version)


def _schedule(config: RunConfig, pin: Pin, store: RunStore) -> bool:
    """The version first: no episode of these is claimed before workers can tell what the engines serve."""
    PINNED.set(store, pin.version.version)
    for eval_set in config.eval.sets_during:
        task_count = min(config.eval.n_during, eval_set.n)
        held_out.schedule(store, config, eval_set, _when(pin), task_count, step=pin.version.step)
    return True


def _measured(pin: Pin, store: RunStore) -> bool:
    """Whether all episodes have ended, of sets that may have been named otherwise when it began. A rollback may undo
    them amid that."""
    pin_labels = [purpose for purpose in store.groups.purposes() if purpose.endswith(f":{_when(pin)}")]
    return all(held_out.finished(store, purpose) for purpose in pin_labels if not purpose.startswith("undone-"))
