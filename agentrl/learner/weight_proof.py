"""Proof that an engine has a learner's weights: the log-probs of a fixed probe, and fingerprints.

One way for the process of a run and for `agentrl.blocks.Learner`; `agentrl.engine.weight_sync.canary` compares. Sends
nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from agentrl.config import Train
from agentrl.engine.weight_sync.canary import Canary, Dtype, probe_tokens
from agentrl.learner.learner import Learner

PROBE = 128  # tokens


def proof_of(
    learner: Learner,
    fingerprints: Mapping[str, str],
    *,
    version: int,
    dtype: Dtype,
    train: Train,
    role: str | None = None,
    most_tokens: int = PROBE,
    as_adapter: bool = False,
    adapted: Collection[str] = (),
) -> Canary:
    """The proof of the weights that engines hold in `dtype`: those of a `role` with a model of its own, or of all
    others; with those of the `adapted` roles over them. `as_adapter`: the adapter is sent by itself, not merged."""
    # No longer than an engine's context: it would refuse the probe, and the refusal would look like a broken engine.
    probe_token_ids = probe_tokens(learner.models.of(role).vocab, min(PROBE, most_tokens))
    is_merged = train.lora_rank > 0 and not as_adapter
    rounds_weights = dtype == "float32" or not (is_merged or train.compile)  # else weights are no layer's own, or fused
    probe_dtype: torch.dtype = getattr(torch, dtype) if rounds_weights else torch.float32
    return Canary(
        version=version,
        token_ids=probe_token_ids,
        logprobs=learner.score(probe_token_ids, probe_dtype, role=role),
        dtype=dtype,
        rounded=rounds_weights,
        fingerprints=fingerprints,
        by_role={
            adapted_role: learner.score(probe_token_ids, probe_dtype, role=adapted_role) for adapted_role in adapted
        },
    )
