"""Asks a running SGLang server whether it has what training needs, and names the flags that would add what it lacks.

Owns the questions. Together they cost the server a few tokens; none changes its weights or its adapters.
"""

from __future__ import annotations

import shlex
from http import HTTPStatus
from typing import Any, cast
from uuid import uuid4

from agentrl.engine.client import EngineClient
from agentrl.engine.vllm_api import parse_json
from agentrl.errors import EngineError, EngineTimeout, EngineUnavailable, UsageError, boundary
from agentrl.protocols import GenerateRequest
from agentrl.records import SamplingParams

_PROBE, _SAME = 8, 1e-4  # tokens whose log-probs are compared, and nats that they may be apart
_DEADLINE_S = 60.0  # a cold server takes seconds over its first log-probs


async def require(client: EngineClient, *, context: int, adapters: bool) -> None:
    """Raises UsageError for a server that is no SGLang, that wants another key, or that lacks contexts of `context`
    tokens, `adapters` if True, metrics, or log-probs of the distribution that it samples from: with the command that
    starts it so. Raises EngineUnavailable or EngineTimeout if it is not there."""
    passed_errors = (EngineUnavailable, EngineTimeout, UsageError)
    with boundary(UsageError, f"the server at {client.url} is no SGLang server:", passes=passed_errors):
        try:
            server_info = parse_json(await client.call("GET", "/server_info", deadline_s=_DEADLINE_S))
            models = parse_json(await client.call("GET", "/v1/models", deadline_s=_DEADLINE_S))["data"]
        except EngineError as error:
            if error.status != HTTPStatus.UNAUTHORIZED:
                raise
            hint = "export its key, and name the variable in engine.api_key_env"
            raise UsageError(f"the server at {client.url} asks for an API key: {hint}") from error
        context_length = int(cast("list[dict[str, Any]]", models)[0]["max_model_len"])
        missing_flags = dict[str, str]()
        if context_length < context:
            missing_flags[f"contexts of {context} tokens (it has {context_length})"] = f"--context-length {context}"
        if not server_info.get("enable_metrics"):
            missing_flags["metrics"] = "--enable-metrics"
        if adapters and not server_info.get("enable_lora"):
            lora_flags = "--enable-lora --max-lora-rank 64 --lora-target-modules all"
            missing_flags["loading LoRA adapters while it runs"] = lora_flags
        if not server_info.get("incremental_streaming_output"):
            missing_flags["streams that do not repeat their tokens"] = "--incremental-streaming-output"
        # Whether log-probs are those at temperature 1 is a variable of the server's environment, and no answer states
        # it. The ratio of every token would be wrong by the temperature (law 1), so it is measured and not taken on
        # trust.
        env = "" if await _follows_temperature(client, deadline_s=_DEADLINE_S) else "SGLANG_RETURN_ORIGINAL_LOGPROB=0 "
        if env:
            missing_flags["log-probs of the sampling distribution"] = ""
        if missing_flags:
            model_path = shlex.quote(str(server_info.get("model_path")))
            flags = " ".join(flag for flag in missing_flags.values() if flag)
            start_command = f"{env}python -m sglang.launch_server --model-path {model_path} {flags}".rstrip()
            raise UsageError(
                f"the SGLang server at {client.url} lacks {', '.join(missing_flags)}: start it, beside its other "
                f"flags, with: {start_command}"
            )


async def _follows_temperature(client: EngineClient, *, deadline_s: float) -> bool:
    """Whether a server's log-probs of tokens sampled at temperature 2 are not those at 1. It samples a few."""
    prompt_ids = (0, 1, 2, 3)
    request = GenerateRequest(
        request_id=f"probe-{uuid4().hex}",
        session="probe",
        token_ids=prompt_ids,
        sampling=SamplingParams(max_tokens=_PROBE, temperature=2.0),
        deadline_s=deadline_s,
    )
    sampled = await client.generate(request)
    plain_logprobs = await client.score((*prompt_ids, *sampled.token_ids), deadline_s=deadline_s)
    logprob_pairs = zip(sampled.logprobs, plain_logprobs[len(prompt_ids) - 1 :], strict=True)
    # Of eight tokens at twice the temperature at least one differs by far more than rounding, unless the model is
    # certain of every one of them.
    return any(abs(sampled_logprob - plain_logprob) > _SAME for sampled_logprob, plain_logprob in logprob_pairs)
