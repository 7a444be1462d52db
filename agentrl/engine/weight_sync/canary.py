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
    generator = random.Random(f"agentrl canary {vocab} {seed}")
    return tuple(generator.randrange(vocab) for _ in range(length))


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
        earlier_pairs = zip(self.logprobs, self.canary.logprobs, strict=True)
        # Both answers are off by as much as the earlier one was, each in its own way: hence the 2.
        noise = math.sqrt(2 * sum((engine - learner) ** 2 for engine, learner in earlier_pairs) / len(logprobs))
        noise = max(noise, _FLOOR[canary.dtype])
        learner_way = [new - old for new, old in zip(canary.logprobs, self.canary.logprobs, strict=True)]
        if not is_beyond_noise(learner_way, noise):
            return None
        return share_of_way(learner_way, [now - then for now, then in zip(logprobs, self.logprobs, strict=True)])


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
    vllm_options = settings.vllm
    cache_dtype = str(vllm_options.get("kv-cache-dtype", "auto"))
    is_quantized = "quantization" in vllm_options or cache_dtype not in ("auto", "bfloat16", "float16")
    return max(
        TOLERANCE[dtype],
        QUANTIZED if is_quantized else TOLERANCE[cast("Dtype", cache_dtype)] if cache_dtype != "auto" else 0.0,
    )


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
    allowed_difference = TOLERANCE[canary.dtype] if tolerance is None else tolerance
    worst_difference = 0.0
    for engine in engines:
        served_version = await engine.served_version(deadline_s=deadline_s)
        if served_version != canary.version:
            raise WeightSyncError(f"canary: {engine.url} serves version {served_version}, not {canary.version}")
        complaint = f"canary: {engine.url} says it serves version {canary.version}, but"
        # First, since it is exact and names the layers; the probe alone says only that something is wrong.
        if wrong_layers := await _wrong(engine, canary, deadline_s):
            raise CanaryMismatch(f"{complaint} its layers compute with other weights; not taken: {_few(wrong_layers)}")
        engine_logprobs = await _scored(engine, canary, deadline_s)
        difference, position = max(
            (abs(logprob - expected), position)
            for position, (logprob, expected) in enumerate(zip(engine_logprobs, canary.logprobs, strict=True))
        )
        if not near(engine_logprobs, canary.logprobs, allowed_difference, canary.dtype):
            raise CanaryMismatch(
                f"{complaint} the log-prob of probe token {position + 1} is {difference:.3g} nats from the learner's "
                f"({engine_logprobs[position]:.4f}, not {canary.logprobs[position]:.4f}; "
                f"rounding explains {allowed_difference:g}, see engine.canary): "
                f"{await _layers(engine, canary, update_info, deadline_s)}"
            )
        if seen is not None:
            _follow(complaint, canary, engine_logprobs, seen, engine.url)
        worst_difference = max(worst_difference, difference)
        for role, role_logprobs in canary.by_role.items():
            role_adapter = adapter_name(canary.version, role)
            role_canary = replace(canary, logprobs=role_logprobs, fingerprints={}, by_role={})
            role_scores = await _scored(engine, canary, deadline_s, role_adapter)
            difference = max(
                abs(logprob - expected) for logprob, expected in zip(role_scores, role_logprobs, strict=True)
            )
            if not near(role_scores, role_logprobs, allowed_difference, canary.dtype):
                raise CanaryMismatch(
                    f"{complaint} its adapter {role_adapter!r} is {difference:.3g} nats from the learner's"
                )
            followed_share = CanaryResult(canary, engine_logprobs).share(role_canary, role_scores)
            if followed_share is not None and followed_share < 0.5:
                raise CanaryMismatch(
                    f"{complaint} its adapter {role_adapter!r} computes as the policy without it: the learner's two "
                    f"log-probs of the probe differ far beyond the noise, and the engine's by {followed_share:.0%} of "
                    "that"
                )
            if seen is not None:
                role_complaint = f"{complaint} with the adapter {role_adapter!r}"
                _follow(role_complaint, role_canary, role_scores, seen, f"{engine.url} {role}")
            worst_difference = max(worst_difference, difference)
    return worst_difference


def near(logprobs: Sequence[float], expected: Sequence[float], most: float, dtype: Dtype) -> bool:
    """Whether they are as near as `most` allows: see `TOLERANCE`. A NaN is beyond every tolerance."""
    differences = [abs(a - b) for a, b in zip(logprobs, expected, strict=True)]
    if dtype != "bfloat16" or most >= QUANTIZED:
        return max(differences) <= most and not any(map(math.isnan, differences))
    # In bfloat16 a deep model rounds a few tokens far off: the quadratic mean has the tolerance, one token has more.
    return math.hypot(*differences) <= most * math.sqrt(len(differences)) and max(differences) <= _ALONE * most


def _follow(says: str, canary: Canary, logprobs: tuple[float, ...], seen: dict[str, CanaryResult], url: str) -> None:
    """Keep the engine's answer once its way was judged. Raises CanaryMismatch if it is nearer to where it was."""
    last_result = seen.get(url)
    followed_share = None if last_result is None else last_result.share(canary, logprobs)
    if last_result is not None and followed_share is not None and followed_share < 0.5:
        raise CanaryMismatch(
            f"{says} it computes with the weights of version {last_result.canary.version}: since then the learner's "
            f"log-probs of the probe have moved far beyond the noise, and the engine's went {followed_share:.0%} of "
            "the way"
        )
    # An answer that was not judged does not replace the earlier one, so that the learner's way from there adds up.
    if last_result is None or followed_share is not None:
        seen[url] = CanaryResult(canary, logprobs)


async def _wrong(engine: EngineClient, canary: Canary, deadline_s: float) -> list[str]:
    """The layers whose weights are not the canary's, as far as the engine and the canary can say."""
    if not canary.fingerprints:
        return []
    rpc_body: dict[str, Json] = {"method": "agentrl_fingerprints"}
    try:
        answer = await engine.call("POST", "/collective_rpc", json=rpc_body, deadline_s=deadline_s)
    except (EngineUnavailable, EngineTimeout):
        raise
    except EngineError:  # it has no such call
        return []
    fingerprints: dict[str, str] = {}
    for worker_result in results(answer, dtype=str, fingerprints=dict):
        if worker_result["dtype"] == canary.dtype:
            fingerprints |= worker_result["fingerprints"]
    return fingerprint.differences(canary.fingerprints, fingerprints)


def _few(names: Sequence[str]) -> str:
    remainder = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{remainder}"


async def _layers(engine: EngineClient, canary: Canary, update_info: dict[str, Json] | None, deadline_s: float) -> str:
    """The fault of the file that was sent, else the layers that the engine did not take, in words."""
    if update_info is None:
        return "which layers were not taken is not known"
    # The file first: a fault of the learner's export would otherwise be reported as that of every engine that took it
    # faithfully.
    if wrong_tensors := await trio.to_thread.run_sync(_wrong_in_file, canary, Path(str(update_info["path"]))):
        return f"the file that was sent is wrong: {_few(wrong_tensors)}"
    try:
        untaken_layers = await untaken(engine, update_info, deadline_s=deadline_s)
    except EngineError as error:
        return f"which layers were not taken is not known ({error})"
    if not untaken_layers:
        return "every layer computes what the file says, so learner and engine disagree about the model itself"
    return f"not taken: {_few(untaken_layers)}"


def _wrong_in_file(canary: Canary, path: Path) -> list[str]:
    """The tensors of a weight file that are not the learner's, and those that it lacks."""
    if not canary.fingerprints:
        return []
    try:
        fingerprints = fingerprint.of_file(weight_file.open_bytes(path), canary.dtype)
    except WeightSyncError:  # a delta, or gone
        return []
    expected_names = {name for name in canary.fingerprints if not name.endswith(fingerprint.TRANSPOSED)}
    missing_tensors = sorted(f"{name} (not in the file)" for name in expected_names - fingerprints.keys())
    return missing_tensors + fingerprint.differences(canary.fingerprints, fingerprints)


async def untaken(engine: EngineClient, update_info: dict[str, Json], *, deadline_s: float) -> list[str]:
    """The weights of a file, by name, that the engine's layers do not compute with. Raises EngineError if the engine
    cannot say (it lacks our plugin)."""
    rpc_body: dict[str, Json] = {"method": "agentrl_untaken", "args": [json.dumps(update_info)]}
    answer = await engine.call("POST", "/collective_rpc", json=rpc_body, deadline_s=deadline_s)
    return list(map(str, results(answer, untaken=list)[0]["untaken"]))
