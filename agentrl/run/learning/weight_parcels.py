"""Contents of a push: the learner's weights as files or as a copy in memory, with the proof by which engines show that
they have them.

Everything here computes with torch, between two steps, on the thread of the learner. Never knows engines or versions'
rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from agentrl.config import EngineSettings, Train
from agentrl.engine.weight_sync import canary
from agentrl.engine.weight_sync.canary import Canary
from agentrl.engine.weight_sync.transport import MemoryParcel, Parcel
from agentrl.learner.learner import Learner
from agentrl.learner.weight_proof import proof_of
from agentrl.models.resolve import engine_dtype
from agentrl.records import WeightVersion
from agentrl.run.weights.role_policies import file_of


@dataclass(frozen=True, slots=True)
class WrittenWeights:
    """The weight files of a step at `path`, or its adapter; by role with a model of its own (None: all others) the
    digest of each file and the fingerprints of its tensors."""

    path: Path
    sha256: dict[str | None, str] = field(default_factory=dict[str | None, str])
    fingerprints: dict[str | None, Mapping[str, str]] = field(default_factory=dict[str | None, Mapping[str, str]])


class ParcelMaker:
    """Makes the parcels of a version. `folder` is where files for engines lie; `roles` have a model of their own,
    `adapted` ones an adapter. The adapter is sent alone if `sends_adapters`. A probe has at most `most_tokens`."""

    def __init__(
        self,
        learner: Learner,
        folder: Path,
        mark: Callable[[], None],
        *,
        engine: EngineSettings,
        train: Train,
        roles: tuple[str, ...],
        adapted: tuple[str, ...],
        sends_adapters: bool,
        most_tokens: int,
    ) -> None:
        self._learner, self._folder, self._mark, self._engine, self._train = learner, folder, mark, engine, train
        self._policies: tuple[str | None, ...] = (None, *roles)
        self._adapted, self._sends_adapters, self._most_tokens = adapted, sends_adapters, most_tokens

    @property
    def step(self) -> int:
        """The optimizer steps that are in the current weights."""
        return self._learner.step_index

    def write_files(self) -> WrittenWeights:
        """Write the current weights for the engines of each policy: a file each, or the adapters alone."""
        # A name that was never used: an engine may still be reading the file of the step before, and the version is
        # minted only once the file is complete, so its number cannot be the name yet.
        weights_path = self._folder / str(time.time_ns())
        if self._sends_adapters:
            self._learner.export_adapter(weights_path)
            return WrittenWeights(weights_path)
        written_weights = WrittenWeights(weights_path.with_suffix(".safetensors"))
        for policy_role in self._policies:
            torch_dtype = getattr(torch, self._dtype(policy_role))
            weight_file = self._learner.export(
                file_of(written_weights.path, policy_role), dtype=torch_dtype, role=policy_role
            )
            written_weights.sha256[policy_role], written_weights.fingerprints[policy_role] = (
                weight_file.sha256,
                weight_file.fingerprints,
            )
            self._mark()
        return written_weights

    def of_files(self, version: WeightVersion, written: WrittenWeights) -> dict[str | None, Parcel | MemoryParcel]:
        """The parcel of each policy, for weights that are written."""
        return {
            policy_role: Parcel(
                version=version.version,
                path=file_of(written.path, policy_role),
                sha256=written.sha256.get(policy_role, ""),
                canary=self._canary(version, written.fingerprints.get(policy_role, {}), policy_role),
            )
            for policy_role in self._policies
        }

    def of_memory(self, version: WeightVersion) -> dict[str | None, Parcel | MemoryParcel]:
        """A copy of the current weights in the engines' dtype; the next step changes the originals during the send."""
        snapshot = self._learner.snapshot(getattr(torch, self._dtype()))
        weight_canary = self._canary(version, snapshot.fingerprints())
        return {None: MemoryParcel(version=version.version, snapshot=snapshot, canary=weight_canary)}

    def _dtype(self, role: str | None = None) -> canary.Dtype:
        return engine_dtype(self._engine, self._learner.models.of(role).folder)

    def _canary(
        self, version: WeightVersion, fingerprints: Mapping[str, str], role: str | None = None
    ) -> Canary | None:
        """The log-probs of a fixed probe under the weights that are sent, and the fingerprints of these weights."""
        if not self._engine.canary:
            return None
        return proof_of(
            self._learner,
            fingerprints,
            version=version.version,
            dtype=self._dtype(role),
            train=self._train,
            role=role,
            most_tokens=self._most_tokens,
            as_adapter=self._sends_adapters,
            adapted=self._adapted,
        )
