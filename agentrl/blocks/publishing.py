"""Weights from a learner to a fleet: minted, delivered to every engine, and proved there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import trio

from agentrl.blocks.buffer import Buffer
from agentrl.blocks.fleet import EngineFleet
from agentrl.engine.weight_sync.canary import Canary
from agentrl.engine.weight_sync.transport import Parcel
from agentrl.errors import ConfigError, RunFailed
from agentrl.records import WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weights that optimizer step `step` made, in a file, with what proves on an engine that it has them.
    `published` gets each version that they become, and the step."""

    step: int
    path: Path
    sha256: str
    proof: Canary
    published: Callable[[int, int], None]


async def publish(weights: Weights, fleet: EngineFleet, buffer: Buffer | None = None) -> WeightVersion:
    """Have all engines of a fleet sample from `weights`: running turns go on under them, and each token knows its
    version. Returns the version. Trajectories that go into a `buffer` need versions that it minted: name it.

    An engine that does not take them is left behind if another does. Raises RunFailed if none does within
    `engine.mending_deadline_s`, or one samples from other weights than the learner's; ConfigError if they have another
    dtype than the engines, or their file was removed."""
    if weights.proof.dtype != fleet.dtype:
        hint = f"the engines take {fleet.dtype}: give learner.weights(fleet.dtype)"
        raise ConfigError("weights.dtype", weights.proof.dtype, hint)
    if not weights.path.exists():
        raise ConfigError("weights.path", str(weights.path), "it was removed: publish what learner.weights() gives now")
    if buffer is None:
        weight_version = WeightVersion(version=fleet.version + 1, step=weights.step)
    else:
        weight_version = await trio.to_thread.run_sync(buffer.mint, weights.step)
        # Versions rise: a smaller number looks to a fleet like weights that it has had already, and the wait for it
        # would end without a reason.
        if weight_version.version <= fleet.version:
            hint = "the fleet serves a newer one that another loop published: start a fleet, or use that loop's buffer"
            raise RunFailed(f"the buffer minted version {weight_version.version}: {hint}")
    parcel = Parcel(
        version=weight_version.version,
        path=weights.path,
        sha256=weights.sha256,
        canary=replace(weights.proof, version=weight_version.version) if fleet.settings.canary else None,
    )
    await fleet.take(parcel)
    # After the delivery: a version that no engine took has sampled nothing, and the learner must not know it.
    weights.published(weight_version.version, weight_version.step)
    if buffer is not None:
        await trio.to_thread.run_sync(buffer.confirm, weight_version)
    return weight_version
