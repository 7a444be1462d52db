"""The check after every sync: a fixed probe's log-probs on the engine against the learner's for that version.

An engine may answer 200 to every call of an update and sample from old or half-taken weights all the same. The learner
computes what a few hundred fixed tokens cost under the weights it sent; the engine is asked for the same numbers; a
difference beyond what the dtype explains stops the run and names the layers that were not taken.

It sees what changes log-probs by more than the tolerance: a layer left behind by one tiny step may pass once, not for
long, because what it misses adds up. Owns the comparison, and the canary's file beside its weights, for whoever gives
them to an engine that was started again. No torch: the expected numbers come from the learner.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from agentrl.engine.client import EngineClient
from agentrl.engine.wire import parse_json
from agentrl.errors import CanaryMismatch, EngineError, WeightSyncError
from agentrl.records import Json

Dtype = Literal["float32", "float16", "bfloat16"]

TOLERANCE: dict[Dtype, float] = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 2e-1}
"""Largest |Δ| in nats of one token. Kernels of different shape round differently: measured 1e-5 in float32 and up to
2e-2 in bfloat16 where all was well, 1 and more where a layer was missing."""

_SHOWN = 6  # layers named in a message


def probe_tokens(vocab: int, length: int = 128, seed: int = 0) -> tuple[int, ...]:
    """The fixed probe of a model: `length` token ids, the same in every process."""
    rng = random.Random(f"agentrl canary {vocab} {seed}")
    return tuple(rng.randrange(vocab) for _ in range(length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """`logprobs` [T - 1] in nats: those of `token_ids[1:]`, each given what stands before it, under the weights of
    `version` as the learner has them."""

    version: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: Dtype = "float32"

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.token_ids) - 1:
            raise ValueError(f"{len(self.token_ids)} tokens need {len(self.token_ids) - 1} log-probs")

    def write(self, path: Path) -> None:
        """Keep it in a file, which is whole or not there."""
        draft = path.with_name(f"{path.name}.draft")
        draft.write_text(json.dumps(asdict(self)))
        draft.rename(path)

    @classmethod
    def read(cls, path: Path) -> Canary:
        """Read what `write` wrote. Raises OSError."""
        kept: dict[str, Any] = json.loads(path.read_text())
        tokens, logprobs = tuple(kept["token_ids"]), tuple(kept["logprobs"])
        return cls(version=kept["version"], token_ids=tokens, logprobs=logprobs, dtype=kept["dtype"])


def beside(weights: Path) -> Path:
    """Where the canary of a weight file, or of an adapter's folder, is kept."""
    return weights.with_name(f"{weights.name}.canary")


async def check(
    engines: Sequence[EngineClient],
    canary: Canary,
    *,
    update_info: dict[str, Json] | None = None,
    tolerance: float | None = None,
    deadline_s: float = 30.0,
) -> float:
    """The largest |Δ| over all engines. `update_info` is that of the push, by which an engine names the layers it did
    not take. Raises CanaryMismatch if it is beyond the tolerance, WeightSyncError if an engine serves another
    version."""
    allowed = TOLERANCE[canary.dtype] if tolerance is None else tolerance
    worst = 0.0
    for engine in engines:
        served = await engine.served_version(deadline_s=deadline_s)
        if served != canary.version:
            raise WeightSyncError(f"canary: {engine.url} serves version {served}, not {canary.version}")
        found = await engine.score(canary.token_ids, deadline_s=deadline_s)
        apart, at = max((abs(a - b), at) for at, (a, b) in enumerate(zip(found, canary.logprobs, strict=True)))
        if not apart <= allowed:  # a NaN is beyond every tolerance
            raise CanaryMismatch(
                f"canary: {engine.url} says it serves version {canary.version}, but the log-prob of probe token "
                f"{at + 1} is {apart:.3g} nats from the learner's ({found[at]:.4f}, not {canary.logprobs[at]:.4f}; "
                f"{canary.dtype} explains {allowed:g}): {await _layers(engine, update_info, deadline_s)}"
            )
        worst = max(worst, apart)
    return worst


async def _layers(engine: EngineClient, update_info: dict[str, Json] | None, deadline_s: float) -> str:
    """What the engine's own comparison of its layers with the file says."""
    if update_info is None:
        return "which layers were not taken is not known"
    try:
        not_taken = await untaken(engine, update_info, deadline_s=deadline_s)
    except EngineError as error:
        return f"which layers were not taken is not known ({error})"
    if not not_taken:
        return "every layer computes what the file says, so learner and engine disagree about the model itself"
    more = f" and {len(not_taken) - _SHOWN} more" if len(not_taken) > _SHOWN else ""
    return f"not taken: {', '.join(not_taken[:_SHOWN])}{more}"


async def untaken(engine: EngineClient, update_info: dict[str, Json], *, deadline_s: float) -> list[str]:
    """The weights of a file, by name, that the engine's layers do not compute with. Raises EngineError if the engine
    cannot say (it lacks our plugin)."""
    asked: dict[str, Json] = {"method": "agentrl_untaken", "args": [json.dumps(update_info)]}
    answer = parse_json(await engine.call("POST", "/collective_rpc", json=asked, deadline_s=deadline_s))
    return list(answer["results"][0]["untaken"])
