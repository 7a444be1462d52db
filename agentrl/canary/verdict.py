"""Names what is wrong with a server's log-probs and tokens, with one line of evidence each. Pure functions, no torch.

How far apart two computations of the same weights may be is measured, not assumed: `rounding` is the difference between
the folder's log-probs in float32 and in bfloat16, on the same tokens. The other dtypes follow from their mantissas.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, Literal

from agentrl.canary.sampling import rms
from agentrl.canary.server import ServedTokens
from agentrl.engine.weight_sync.canary import Dtype, is_beyond_noise, near, share_of_way

FIXES: Final[dict[str, str]] = {
    "not_numbers": "its log-probs are no numbers: look for broken weights or an overflow of float16, then serve again",
    "adapter_not_applied": "load the adapter (vLLM: --enable-lora --lora-modules NAME=FOLDER), and request it by NAME",
    "other_adapter": "load the adapter anew under a new name, and request that one",
    "other_checkpoint": "start the server with --model of this folder, or send it these weights",
    "other_weights": "name what it may serve instead with --candidates, or start it again from this folder",
    "partial_update": "send the whole update again, or start the server from this folder",
    "quantized": "start the server without --quantization, or give the quantized folder as --model",
    "dtype": "start the server with --dtype of this folder, or say here with --dtype which one is meant",
    "depth": "compare rope scaling, sliding window and the dtype of the KV cache with config.json",
    "special_tokens": "copy the embedding of the special tokens too: resize the model to its tokenizer, then export it",
    "temperature": "request temperature 1 and remove what overrides it: generation_config.json, a proxy",
    "top_k": "request no top_k and remove what overrides it: generation_config.json, a proxy",
    "top_p": "request top_p 1 and remove what overrides it: generation_config.json, a proxy",
    "penalty": "request no penalties and remove what overrides it: generation_config.json, a proxy",
    "processed": "request temperature 1 without cuts and penalties; look for logit processors and proxies",
    "logprobs_mode": "vLLM: --logprobs-mode raw_logprobs or processed_logprobs; SGLang: SGLANG_RETURN_ORIGINAL_LOGPROB",
    "stale_prefix_cache": "reset the prefix cache after each update (vLLM: POST /reset_prefix_cache), or salt it",
    "chat_template": "start the server with --chat-template of this folder",
    "bos_doubled": "take the BOS out of the chat template, or out of the tokenizer's own additions",
    "bos_lost": "let the chat template or the tokenizer write the BOS",
    "tokenizer": "start the server with the tokenizer of this folder",
}
"""Every fault by name, and what to do about it."""

_NOISE: Final[dict[Dtype, float]] = {"float32": 2**-16, "float16": 2**-3, "bfloat16": 1.0}
"""Rounding of each dtype beside that of bfloat16: bits of the mantissa."""
_BETWEEN: Final[dict[Dtype, float]] = {"float32": 2**-8, "float16": 2**-1.5}
"""Where a dtype ends and the next coarser one begins: in the middle of their bits."""
_APART: Final = 3.0  # times as far as bfloat16 is from float32 here may another bfloat16 be


@dataclass(frozen=True, slots=True)
class Fault:
    """`name` is one of `FIXES`; `evidence` the numbers that show it."""

    name: str
    evidence: str

    def document(self) -> dict[str, str]:
        return {**asdict(self), "fix": FIXES[self.name]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """A row of the table: |Δ| in nats between server and folder over the tokens from half of a depth to it, beside that
    between bfloat16 and float32 on the same tokens. `limit` is what counts as rounding: of one token, in bfloat16 of
    the quadratic mean."""

    depth: int
    mean: float
    max: float
    rounding_mean: float
    rounding_max: float
    limit: float
    is_near: bool


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Weights that the server may have instead: the name of their fault, what they are, and their log-probs."""

    fault: str
    name: str
    logprobs: Sequence[float]


def minus(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Differences, token by token."""
    return [x - y for x, y in zip(a, b, strict=True)]


def limit_of(dtype: Dtype, rounding: Sequence[float]) -> float:
    """How far apart two computations in `dtype` may be, as `near` takes it."""
    return _APART * rms(rounding) if dtype == "bfloat16" else _BETWEEN[dtype] * max(map(abs, rounding))


def is_near(a: Sequence[float], b: Sequence[float], dtype: Dtype, rounding: Sequence[float]) -> bool:
    """Whether only rounding is between them."""
    return near(a, b, limit_of(dtype, rounding), dtype)


def depth_row(
    depth: int, start: int, answer: Sequence[float], exact: Sequence[float], rounding: Sequence[float], dtype: Dtype
) -> Depth:
    """Compare the tokens from `start` on."""
    distances = [abs(difference) for difference in minus(answer[start:], exact[start:])]
    rounding_here = rounding[start:]
    return Depth(
        depth=depth,
        mean=math.fsum(distances) / len(distances),
        max=max(distances),
        rounding_mean=math.fsum(map(abs, rounding_here)) / len(rounding_here),
        rounding_max=max(map(abs, rounding_here)),
        limit=limit_of(dtype, rounding_here),
        is_near=is_near(answer[start:], exact[start:], dtype, rounding_here),
    )


# Why hypotheses are followed along a direction, and not only measured by their distance.
#
# Two sets of weights may differ by less than bfloat16 rounds: an adapter after its first steps, the checkpoint before
# the last one. No distance tells them apart. But the folder says for each token which way the one differs from the
# other, and rounding does not follow it: over a thousand tokens the server's way along that direction is 0 or 1,
# however noisy each token is. The run's own canary decides by the same projection.
def closest(
    answer: Sequence[float],
    exact: Sequence[float],
    hypotheses: Sequence[Hypothesis],
    rounding: Sequence[float],
    dtype: Dtype,
) -> Hypothesis | None:
    """The hypothesis that explains the answer, better than the folder itself does; None if there is none."""
    answer_shift = minus(answer, exact)
    # A server of a coarser dtype than expected is noisier than that dtype says.
    distances = [rms(minus(answer, hypothesis.logprobs)) for hypothesis in hypotheses]
    noise_level = max(_NOISE[dtype] * rms(rounding), min([rms(answer_shift), *distances]))
    fitting_pairs: list[tuple[float, Hypothesis]] = []
    for distance, hypothesis in zip(distances, hypotheses, strict=True):
        direction = minus(hypothesis.logprobs, exact)
        if not is_beyond_noise(direction, noise_level) or share_of_way(direction, answer_shift) < 0.5:
            continue
        # Servers quantize in many ways, each with errors of its own: nearer to the plainest one than to the exact
        # weights is enough.
        if is_near(answer, hypothesis.logprobs, "bfloat16", rounding) or (
            hypothesis.fault == "quantized" and distance < rms(direction)
        ):
            fitting_pairs.append((distance, hypothesis))
    return min(fitting_pairs, key=lambda pair: pair[0])[1] if fitting_pairs else None


def is_distinguishable(exact: Sequence[float], other: Sequence[float], rounding: Sequence[float], dtype: Dtype) -> bool:
    """Whether a healthy server of `dtype` shows which of two sets of weights it has."""
    return is_beyond_noise(minus(other, exact), _NOISE[dtype] * rms(rounding))


def dtype_fault(
    answer: Sequence[float], exact: Sequence[float], rounding: Sequence[float], dtype: Dtype
) -> Fault | None:
    """A server that computes these weights in a coarser dtype than expected."""
    if dtype == "bfloat16" or is_near(answer, exact, dtype, rounding):
        return None
    if not is_near(answer, exact, "bfloat16", rounding):
        return None
    noise_ratio = rms(minus(answer, exact)) / rms(rounding)
    dtype_words = "bfloat16" if noise_ratio > _BETWEEN["float16"] else "float16 or TF32"
    return Fault(
        "dtype",
        f"the server is {rms(minus(answer, exact)):.2g} nats (rms) from float32, {noise_ratio:.2g} times what bfloat16"
        f" is here ({rms(rounding):.2g}): it computes in {dtype_words}, not in {dtype}, or with slightly other weights",
    )


def explained(hypothesis: Hypothesis, answer: Sequence[float], exact: Sequence[float]) -> Fault:
    """The fault that a hypothesis names."""
    hypothesis_distance, folder_distance = rms(minus(answer, hypothesis.logprobs)), rms(minus(answer, exact))
    return Fault(
        hypothesis.fault,
        f"it answers as {hypothesis.name}: {hypothesis_distance:.2g} nats (rms) from it, {folder_distance:.2g} from "
        "the folder",
    )


def special_fault(
    tokens: Sequence[int], answer: Sequence[float], exact: Sequence[float], limit: float, texts: Mapping[int, str]
) -> Fault:
    """Special tokens whose rows differ, although ordinary ones agree."""
    distances = [abs(difference) for difference in minus(answer, exact)]
    first_position = next(
        (position for position, distance in enumerate(distances) if distance > limit), distances.index(max(distances))
    )
    special_token = next(
        (nearby_token for nearby_token in reversed(tokens[: first_position + 2]) if nearby_token in texts),
        tokens[first_position],
    )
    return Fault(
        "special_tokens",
        f"ordinary tokens agree, special ones are up to {max(distances):.2g} nats off, first at"
        f" {texts.get(special_token, '')!r} ({special_token})",
    )


# --- tokens -----------------------------------------------------------------------------------------------------------


def token_fault(
    pairs: Sequence[tuple[Sequence[int], ServedTokens]],
    special: Sequence[int],
    otherwise: Literal["chat_template", "tokenizer"],
) -> Fault | None:
    """The fault in what the server makes of conversations, or of texts, beside the folder's tokens of them."""
    wrong_pairs = [
        (folder_tokens, served_tokens)
        for folder_tokens, served_tokens in pairs
        if served_tokens.ids != tuple(folder_tokens) and _differs(folder_tokens, served_tokens)
    ]
    if not wrong_pairs:
        return None
    fault_names = {
        _boundary_fault(folder_tokens, served_tokens, special) for folder_tokens, served_tokens in wrong_pairs
    }
    fault_name = fault_names.pop() if len(fault_names) == 1 else None
    folder_tokens, served_tokens = wrong_pairs[0]
    if served_tokens.ids is None:
        count_texts = ", ".join(
            f"{served_tokens.count} for {len(folder_tokens)}" for folder_tokens, served_tokens in wrong_pairs
        )
        return Fault(fault_name or otherwise, f"it counts other numbers of tokens than the folder: {count_texts}")
    first_position = next(
        (
            position
            for position, (folder_token, served_token) in enumerate(zip(folder_tokens, served_tokens.ids, strict=False))
            if folder_token != served_token
        ),
        min(len(folder_tokens), served_tokens.count),
    )
    return Fault(
        fault_name or otherwise,
        f"{len(wrong_pairs)} of {len(pairs)} differ from the folder's; from token {first_position} the server has"
        f" {list(served_tokens.ids[first_position : first_position + 4])}, the folder "
        f"{list(folder_tokens[first_position : first_position + 4])}",
    )


def _differs(ours: Sequence[int], served: ServedTokens) -> bool:
    return served.ids is not None or served.count != len(ours)


def _boundary_fault(ours: Sequence[int], served: ServedTokens, special: Sequence[int]) -> str | None:
    """Whether one special token at the start is all that is more, or less."""
    starts_special = bool(ours) and ours[0] in special
    if served.ids is None:
        surplus = served.count - len(ours)
        return (
            "bos_doubled"
            if starts_special and surplus == 1
            else "bos_lost"
            if starts_special and surplus == -1
            else None
        )
    if served.ids[1:] == tuple(ours) and served.ids[0] in special:
        return "bos_doubled" if starts_special else None
    return "bos_lost" if starts_special and served.ids == tuple(ours[1:]) else None
