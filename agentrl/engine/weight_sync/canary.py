"""The check after every sync: does an engine compute with the weights that the learner sent?

An engine may answer 200 to every call of an update and still sample from old or half-taken weights. Three
questions find that, and a wrong answer stops the run with the names of the layers that were not taken:

- Are its weights the ones sent? Fingerprints of its layers against the learner's, in its own dtype: exact, however
  small the step. A vLLM with our plugin can say; experts, adapters and split layers are left out.
- Does a fixed probe have the learner's log-probabilities there, up to the rounding of the dtype?
- Does it move as the learner does? If many small steps have moved the learner's numbers far beyond the noise between
  the two, the engine's must have moved along. Before that there is no verdict: the two are alike.

Owns the comparisons, and the canary's file beside its weights, for whoever gives them to an engine that was started
again. No torch: the expected numbers come from the learner.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import trio
import trio.to_thread

from agentrl.config import EngineSettings
from agentrl.engine.client import EngineClient
from agentrl.engine.vllm_api import results
from agentrl.engine.weight_sync import fingerprints as fingerprint
from agentrl.engine.weight_sync import weight_file
from agentrl.engine.weight_sync.adapter_names import adapter_name
from agentrl.errors import CanaryMismatch, EngineError, EngineTimeout, EngineUnavailable, WeightSyncError
from agentrl.records import Json

Dtype = Literal["float32", "float16", "bfloat16"]

TOLERANCE: dict[Dtype, float] = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 2e-1}
"""Largest |Δ| in nats of one token; in bfloat16 the quadratic mean over the probe, of which one token may be `_ALONE`
times as far off. Kernels of different shape round differently. Where all was well that was 1e-5 in float32; in bfloat16
the mean was up to 0.11 and one token up to 0.7 (plain passes of SmolLM2-135M, 30 layers). Where a layer of that model
was missing or stood in another's place, the mean was 0.35 and more."""

_ALONE = 5.0

QUANTIZED = 2.0
"""The same for weights, or keys and values, of 8 bits: rounding the weights of small models to float8_e4m3 moved the
probe by 0.6 to 1.4. So wide a tolerance finds gross errors alone."""

_SHOWN = 6  # layers named in a message
_FLOOR: dict[Dtype, float] = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 4e-3}
"""Nats of one token (rms) that two passes over the same weights may differ by, however alike they were before."""
_BEYOND = 12.0  # times the noise: so far the learner must have moved, for half the way to be six deviations off


def probe_tokens(vocab: int, length: int = 128, seed: int = 0) -> tuple[int, ...]:
    """The fixed probe of a model: `length` token ids, the same in every process."""
    # Random tokens, and no text: no tokenizer is needed, and random contexts use the whole embedding, of which a
    # sentence would touch a hundred rows.
    rng = random.Random(f"agentrl canary {vocab} {seed}")
    return tuple(rng.randrange(vocab) for _ in range(length))


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """`logprobs` [T - 1] in nats: those of `token_ids[1:]`, each conditioned on the tokens before it, under the weights
    of `version` as the learner has them; `rounded` says that these were rounded to `dtype` first, as the engine's are.
    `fingerprints` are those of the weights in `dtype` by name, empty where nothing of the kind can be compared.
    `by_role` are log-probs as well: under the adapters of roles that have their own."""

    version: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    dtype: Dtype = "float32"
    rounded: bool = True
    fingerprints: Mapping[str, str] = field(default_factory=dict[str, str])
    by_role: Mapping[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])

    def __post_init__(self) -> None:
        if len(self.logprobs) != len(self.token_ids) - 1:
            raise ValueError(f"{len(self.token_ids)} tokens need {len(self.token_ids) - 1} log-probs")

    def write(self, path: Path) -> None:
        """Keep it in a file, which is whole or not there."""
        # A supervisor may read it at any moment, to fit an engine that was started again.
        draft = path.with_name(f"{path.name}.draft")
        draft.write_text(json.dumps(asdict(self)))
        draft.rename(path)

    @classmethod
    def read(cls, path: Path) -> Canary:
        """Read what `write` wrote. Raises OSError."""
        document: dict[str, Any] = json.loads(path.read_text())
        document["token_ids"], document["logprobs"] = tuple(document["token_ids"]), tuple(document["logprobs"])
        document["by_role"] = {role: tuple(logprobs) for role, logprobs in document.get("by_role", {}).items()}
        return cls(**document)


# Why an engine's answers are followed over many steps, and not only compared with the learner's.
#
# The comparison finds a layer that is missing or in another's place. It does not find an engine that has stopped taking
# weights: a step at a learning rate of 1e-6 moves a log-probability of the probe by 0.0005 nats at most, and bfloat16
# rounds it by 0.008 (`tests/engine/test_canary.py`). A tolerance so narrow that it sees one step would stop healthy
# runs; `TOLERANCE` says what was measured where all was well. Fingerprints see any step, but not every engine can make
# them, and they leave out experts, adapters and split layers.
#
# So the question is another one: since an earlier answer, has the engine moved as the learner has? The learner's way is
# the difference of its log-probabilities of the probe, then and now, and the engine's way is projected on it. An engine
# that follows has gone 1 of it, a stuck one has gone 0. Of the noise only the part along that one direction counts, and
# the way grows with every step while the noise does not.
#
# Nothing is judged before the way is `_BEYOND` times as long as the noise of a token. Half of the way is then six
# deviations from both ends, so that neither a healthy engine nor a stuck one is mistaken for the other. Until then the
# earlier answer stays: if each step began anew from its own answer, no way would ever be long enough.
#
# An adapter of a role is asked the same way, and besides whether it is there at all: from the answer without it to the
# answer with it the engine must have gone the learner's way. An adapter that an engine loads and does not use would be
# within the tolerance for as long as training has moved it by less, and longer than any stuck engine.
#
# The price is time. A stuck engine shows some steps later, and tokens that it sampled meanwhile carry the version of
# weights that did not sample them (law 1). And the learner's numbers must be of weights in the engine's dtype, since an
# engine in bfloat16 rightly stays where it is while steps are smaller than its grid (`rounded`).
#
# `tests/engine/test_canary.py` has an engine that takes no step any more. It must fail while no token is off by a
# third of the tolerance, and an engine that follows must never be.
@dataclass(frozen=True, slots=True)
class CanaryResult:
    """An engine's answer to a canary."""

    canary: Canary
    logprobs: tuple[float, ...]

    def share(self, canary: Canary, logprobs: Sequence[float]) -> float | None:
        """How much of the learner's way from then to `canary` an engine that now answers `logprobs` has gone along: 1
        for all, 0 for none. None where the way is too short to stand out from noise, or the probes are not the same."""
        if canary.token_ids != self.canary.token_ids or not (canary.rounded and self.canary.rounded):
            return None
        before = zip(self.logprobs, self.canary.logprobs, strict=True)
        # Both answers are off by as much as the earlier one was, each in its own way: hence the 2.
        noise = math.sqrt(2 * sum((a - b) ** 2 for a, b in before) / len(logprobs))
        noise = max(noise, _FLOOR[canary.dtype])
        way = [new - old for new, old in zip(canary.logprobs, self.canary.logprobs, strict=True)]
        if not is_beyond_noise(way, noise):
            return None
        return share_of_way(way, [now - then for now, then in zip(logprobs, self.logprobs, strict=True)])


def is_beyond_noise(way: Sequence[float], noise: float) -> bool:
    """Whether a server whose tokens are off by `noise` nats (rms) shows at which end of `way` it is: half of the way
    is then six deviations from both."""
    # Written so that a NaN says "too short": it is the probe's own bound that reports a NaN.
    return math.hypot(*way) > _BEYOND * noise


def share_of_way(way: Sequence[float], gone: Sequence[float]) -> float:
    """How much of `way` a server has gone along: 1 for all, 0 for none."""
    # A projection, since a length alone would call a server that went somewhere else a follower.
    return sum(a * b for a, b in zip(way, gone, strict=True)) / sum(a * a for a in way)


def allowed(dtype: Dtype, settings: EngineSettings) -> float:
    """The difference that counts as rounding, in nats of one token: `engine.canary` as a number, else the one of the
    dtypes that the engine computes in and keeps keys and values in, and from the quantization of its weights."""
    if not isinstance(settings.canary, bool):
        return settings.canary
    options = settings.vllm
    cache = str(options.get("kv-cache-dtype", "auto"))
    rounds = "quantization" in options or cache not in ("auto", "bfloat16", "float16")
    return max(TOLERANCE[dtype], QUANTIZED if rounds else TOLERANCE[cast("Dtype", cache)] if cache != "auto" else 0.0)


def beside(weights: Path) -> Path:
    """The place of the canary of a weight file, or of an adapter's folder."""
    return weights.with_name(f"{weights.name}.canary")


async def _scored(
    engine: EngineClient, canary: Canary, deadline_s: float, model: str | None = None
) -> tuple[float, ...]:
    """The probe's log-probs on an engine: all NaN where one of them is, since vLLM then refuses to write any."""
    try:
        logprobs = await engine.score(canary.token_ids, deadline_s=deadline_s, model=model)
    except EngineError as error:
        if not refuses_nan(error):
            raise
        logprobs = (math.nan,)
    return (math.nan,) * len(canary.logprobs) if any(map(math.isnan, logprobs)) else logprobs


def refuses_nan(error: EngineError) -> bool:
    """Whether vLLM computed a NaN, which its answer cannot hold."""
    # Words, since vLLM's answer has no other field for it. Without them an engine full of NaN would count as one that
    # is merely away.
    return "not JSON compliant" in error.reason


async def check(
    engines: Sequence[EngineClient],
    canary: Canary,
    *,
    update_info: dict[str, Json] | None = None,
    seen: dict[str, CanaryResult] | None = None,
    tolerance: float | None = None,
    deadline_s: float = 30.0,
) -> float:
    """The largest |Δ| over all engines. `update_info` is that of the push, by which an engine names the layers it did
    not take; `seen` is what engines answered before, by URL and role, for whoever asks them again and again, and is
    kept here. Raises CanaryMismatch if an engine computes with other weights, WeightSyncError if it serves another
    version."""
    most = TOLERANCE[canary.dtype] if tolerance is None else tolerance
    worst = 0.0
    for engine in engines:
        served = await engine.served_version(deadline_s=deadline_s)
        if served != canary.version:
            raise WeightSyncError(f"canary: {engine.url} serves version {served}, not {canary.version}")
        says = f"canary: {engine.url} says it serves version {canary.version}, but"
        # First, since it is exact and names the layers; the probe alone says only that something is wrong.
        if wrong := await _wrong(engine, canary, deadline_s):
            raise CanaryMismatch(f"{says} its layers compute with other weights; not taken: {_few(wrong)}")
        scores = await _scored(engine, canary, deadline_s)
        apart, place = max(
            (abs(a - b), place) for place, (a, b) in enumerate(zip(scores, canary.logprobs, strict=True))
        )
        if not near(scores, canary.logprobs, most, canary.dtype):
            raise CanaryMismatch(
                f"{says} the log-prob of probe token {place + 1} is {apart:.3g} nats from the learner's "
                f"({scores[place]:.4f}, not {canary.logprobs[place]:.4f}; "
                f"rounding explains {most:g}, see engine.canary): "
                f"{await _layers(engine, canary, update_info, deadline_s)}"
            )
        if seen is not None:
            _follow(says, canary, scores, seen, engine.url)
        worst = max(worst, apart)
        for role, logprobs in canary.by_role.items():
            model = adapter_name(canary.version, role)
            of_role = replace(canary, logprobs=logprobs, fingerprints={}, by_role={})
            role_scores = await _scored(engine, canary, deadline_s, model)
            apart = max(abs(a - b) for a, b in zip(role_scores, logprobs, strict=True))
            if not near(role_scores, logprobs, most, canary.dtype):
                raise CanaryMismatch(f"{says} its adapter {model!r} is {apart:.3g} nats from the learner's")
            share = CanaryResult(canary, scores).share(of_role, role_scores)
            if share is not None and share < 0.5:
                raise CanaryMismatch(
                    f"{says} its adapter {model!r} computes as the policy without it: the learner's two log-probs of "
                    f"the probe differ far beyond the noise, and the engine's by {share:.0%} of that"
                )
            if seen is not None:
                _follow(f"{says} with the adapter {model!r}", of_role, role_scores, seen, f"{engine.url} {role}")
            worst = max(worst, apart)
    return worst


def near(logprobs: Sequence[float], expected: Sequence[float], most: float, dtype: Dtype) -> bool:
    """Whether they are as near as `most` allows: see `TOLERANCE`. A NaN is beyond every tolerance."""
    apart = [abs(a - b) for a, b in zip(logprobs, expected, strict=True)]
    if dtype != "bfloat16" or most >= QUANTIZED:
        return max(apart) <= most and not any(map(math.isnan, apart))
    # In bfloat16 a deep model rounds a few tokens far off: the quadratic mean has the tolerance, one token has more.
    return math.hypot(*apart) <= most * math.sqrt(len(apart)) and max(apart) <= _ALONE * most


def _follow(says: str, canary: Canary, logprobs: tuple[float, ...], seen: dict[str, CanaryResult], url: str) -> None:
    """Keep the engine's answer once its way was judged. Raises CanaryMismatch if it is nearer to where it was."""
    last = seen.get(url)
    share = None if last is None else last.share(canary, logprobs)
    if last is not None and share is not None and share < 0.5:
        raise CanaryMismatch(
            f"{says} it computes with the weights of version {last.canary.version}: since then the learner's log-probs "
            f"of the probe have moved far beyond the noise, and the engine's went {share:.0%} of the way"
        )
    # An answer that was not judged does not replace the earlier one, so that the learner's way from there adds up.
    if last is None or share is not None:
        seen[url] = CanaryResult(canary, logprobs)


async def _wrong(engine: EngineClient, canary: Canary, deadline_s: float) -> list[str]:
    """The layers whose weights are not the canary's, as far as the engine and the canary can say."""
    if not canary.fingerprints:
        return []
    body: dict[str, Json] = {"method": "agentrl_fingerprints"}
    try:
        answer = await engine.call("POST", "/collective_rpc", json=body, deadline_s=deadline_s)
    except (EngineUnavailable, EngineTimeout):
        raise
    except EngineError:  # it has no such call
        return []
    fingerprints: dict[str, str] = {}
    for worker in results(answer, dtype=str, fingerprints=dict):
        if worker["dtype"] == canary.dtype:
            fingerprints |= worker["fingerprints"]
    return fingerprint.differences(canary.fingerprints, fingerprints)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


async def _layers(engine: EngineClient, canary: Canary, update_info: dict[str, Json] | None, deadline_s: float) -> str:
    """The fault of the file that was sent, else the layers that the engine did not take, in words."""
    if update_info is None:
        return "which layers were not taken is not known"
    # The file first: a fault of the learner's export would otherwise be reported as that of every engine that took it
    # faithfully.
    if wrong := await trio.to_thread.run_sync(_wrong_in_file, canary, Path(str(update_info["path"]))):
        return f"the file that was sent is wrong: {_few(wrong)}"
    try:
        not_taken = await untaken(engine, update_info, deadline_s=deadline_s)
    except EngineError as error:
        return f"which layers were not taken is not known ({error})"
    if not not_taken:
        return "every layer computes what the file says, so learner and engine disagree about the model itself"
    return f"not taken: {_few(not_taken)}"


def _wrong_in_file(canary: Canary, path: Path) -> list[str]:
    """The tensors of a weight file that are not the learner's, and those that it lacks."""
    if not canary.fingerprints:
        return []
    try:
        fingerprints = fingerprint.of_file(weight_file.open_bytes(path), canary.dtype)
    except WeightSyncError:  # a delta, or gone
        return []
    names = {name for name in canary.fingerprints if not name.endswith(fingerprint.TRANSPOSED)}
    lacking = sorted(f"{name} (not in the file)" for name in names - fingerprints.keys())
    return lacking + fingerprint.differences(canary.fingerprints, fingerprints)


async def untaken(engine: EngineClient, update_info: dict[str, Json], *, deadline_s: float) -> list[str]:
    """The weights of a file, by name, that the engine's layers do not compute with. Raises EngineError if the engine
    cannot say (it lacks our plugin)."""
    body: dict[str, Json] = {"method": "agentrl_untaken", "args": [json.dumps(update_info)]}
    answer = await engine.call("POST", "/collective_rpc", json=body, deadline_s=deadline_s)
    return list(map(str, results(answer, untaken=list)[0]["untaken"]))
