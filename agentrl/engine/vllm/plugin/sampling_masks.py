"""The set that each token was drawn from, on a CPU: what `--return-sampling-mask` does on a GPU (vLLM needs Triton and
its newer model runner for it).

With that flag the CPU's sampler keeps the log-probs after all cuts, and what is not minus infinity goes out with the
token, the way it goes on a GPU: in the field `sampling_mask` of each choice. Requests are refused as there: without
temperature or `top_k`, which may be larger than the vocabulary.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
from typing import Any

import numpy as np


def allow() -> None:
    """Have this process's vLLM take the flag on a CPU. Safe to call again."""
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    original_verify = VllmConfig._verify_sampling_replay_config
    if not current_platform.is_cpu() or hasattr(original_verify, "__wrapped__"):
        return

    @functools.wraps(original_verify)
    def verified(self):
        model_config = self.model_config
        if model_config is None or not model_config.return_sampling_mask:
            return
        if model_config.logprobs_mode != "processed_logprobs":
            raise ValueError("--return-sampling-mask needs --logprobs-mode processed_logprobs")

    VllmConfig._verify_sampling_replay_config = verified


def install() -> None:
    """Hook this process's sampler and model runner. Safe to call again."""
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    original_draw, original_sample = Sampler.sample, CPUModelRunner.sample_tokens
    if hasattr(original_draw, "__wrapped__"):
        return

    @functools.wraps(original_draw)
    def seen(self, *args, **kwargs):
        sampled, processed = original_draw(self, *args, **kwargs)
        # On the sampler, since it and the model runner share nothing else, and their signatures are vLLM's. The
        # runner clears it before each step, so that an old one can never be read as new.
        self.agentrl_processed = processed
        return sampled, processed

    @functools.wraps(original_sample)
    def sample_with_masks(self, *args, **kwargs):
        self.sampler.agentrl_processed = None
        output = original_sample(self, *args, **kwargs)
        processed = self.sampler.agentrl_processed
        if self.model_config.return_sampling_mask and processed is not None:
            output.sampling_masks = _sets(processed)
        return output

    Sampler.sample = seen
    CPUModelRunner.sample_tokens = sample_with_masks


def _sets(logprobs: Any) -> Any:
    """The sets of a step's tokens, from log-probs [tokens, vocabulary]."""
    from vllm.v1.outputs import SamplingMaskLists

    row_numbers, token_ids = np.nonzero(np.isfinite(logprobs.numpy()))
    # `nonzero` lists by row, so the rows are sorted already.
    offsets = np.searchsorted(row_numbers, np.arange(len(logprobs) + 1))
    return SamplingMaskLists(token_ids.astype(np.int32), offsets)
