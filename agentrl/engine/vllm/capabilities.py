"""Asks a running vLLM server what it can do, and names the flags that would add what it lacks.

Owns the questions. Each costs the server at most one token; none changes its weights or its adapters.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, cast
from uuid import uuid4

from agentrl.config.weight_sync import Transport
from agentrl.engine.client import EngineClient
from agentrl.engine.vllm.launch import check_version, lora_room
from agentrl.engine.vllm.plugin import BACKEND, EXTENSION
from agentrl.engine.vllm_api import parse_json, results
from agentrl.errors import EngineError, EngineTimeout, EngineUnavailable, UsageError, boundary
from agentrl.records import Json

_PROMPT = 16  # tokens
_TOPS = 5  # candidates whose log-probs are compared: two may well be alike
_DEADLINE_S = 60.0  # a cold server takes seconds over its first log-probs
# The probe has to be refused for want of files, so that it never loads anything.
_NOWHERE = "/nonexistent/agentrl-probe"


class Need(StrEnum):
    """Something a server may lack. `flags` and `env` are what to start it with."""

    TOKENS = "token-in/token-out generation"
    ADMIN = "pause, resume and weight versions"
    LOGPROBS = "log-probs of the sampling distribution"
    WEIGHTS = "weight transfer from files"
    NCCL = "weight transfer over NCCL"
    IPC = "weight transfer over CUDA IPC"
    PLUGIN = "agentrl's plugin"
    LORA = "loading LoRA adapters while it runs"
    ROUTED_EXPERTS = "the experts chosen per token"
    KEPT_SETS = "the set that each token is drawn from (rollout.top_p, top_k and min_p need it)"

    @property
    def flags(self) -> str:
        return _FLAGS.get(self, "")

    @property
    def env(self) -> str:
        return _ENV.get(self, "")


_FLAGS = {
    Need.TOKENS: "--enable-scale-out",
    Need.LOGPROBS: "--logprobs-mode processed_logprobs",
    Need.WEIGHTS: f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\'',
    Need.NCCL: '--weight-transfer-config \'{"backend": "nccl"}\'',
    Need.IPC: '--weight-transfer-config \'{"backend": "ipc"}\'',
    Need.PLUGIN: f"--worker-extension-cls {EXTENSION}",
    Need.LORA: "--enable-lora",
    Need.ROUTED_EXPERTS: "--enable-return-routed-experts",
    Need.KEPT_SETS: "--return-sampling-mask",
}
_ENV = {
    # Safe: else a checkout of agentrl in the working folder would come first, whose imports vLLM's interpreter lacks.
    Need.PLUGIN: "PYTHONSAFEPATH=1 PYTHONPATH=$(agentrl vllm-plugin)",
    Need.ADMIN: "VLLM_SERVER_DEV_MODE=1",
    Need.IPC: "VLLM_ALLOW_INSECURE_SERIALIZATION=1",
    Need.LORA: "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1",
}

# The plugin, however weights travel: without it a prefix cache serves keys and values of older weights.
FOR_TRAINING = frozenset({Need.TOKENS, Need.ADMIN, Need.LOGPROBS, Need.WEIGHTS, Need.PLUGIN})

# By the names of vLLM's classes: no route states the backend, and an error message names its class (`_backend`).
_BACKENDS = {
    "FileTransferEngine": Need.WEIGHTS,
    "NCCLWeightTransferEngine": Need.NCCL,
    "IPCWeightTransferEngine": Need.IPC,
}


_OF_BACKEND = {"nccl": Need.NCCL, "ipc": Need.IPC}


def needed(transport: Transport) -> frozenset[Need]:
    """The needs of training at a server to which new weights travel by this transport."""
    needs_to_take = FOR_TRAINING - {Need.WEIGHTS} | {_OF_BACKEND.get(transport.backend, Need.WEIGHTS)}
    return needs_to_take | {Need.LORA} if transport.form == "adapter" else needs_to_take


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a server. `model` is the name it serves, `root` the folder or id it was started with;
    `max_model_len` the most tokens a context may hold; `backend` the class that takes new weights, None if there is
    none; `dtype` that of its computation, None if it cannot say."""

    url: str
    version: str
    model: str
    root: str
    max_model_len: int
    has: frozenset[Need]
    backend: str | None
    dtype: str | None

    def require(self, needs: Collection[Need], *, dtype: str = "auto", context: int = 0, lora_rank: int = 8) -> None:
        """Raises UsageError with everything it lacks of `needs`, of contexts of so many tokens and of computing in
        `dtype`, and with the command that starts it so."""
        missing_needs = [need for need in Need if need in needs and need not in self.has]
        shortfalls, flags = [str(need) for need in missing_needs], [need.flags for need in missing_needs if need.flags]
        if Need.LORA in missing_needs:
            flags.append(f"--max-lora-rank {lora_room(lora_rank)}")
        if self.max_model_len < context:
            shortfalls.append(f"contexts of {context} tokens (it has {self.max_model_len})")
            flags.append(f"--max-model-len {context}")
        if dtype not in ("auto", self.dtype):
            shortfalls += [f"{dtype} (engine.dtype; it computes in {self.dtype})"] if self.dtype else []
            flags.append(f"--dtype {dtype}")
        if shortfalls:
            variables = [need.env for need in missing_needs if need.env]
            # `vllm serve` does not start with the CPU build, which does not find its own version.
            start_command = " ".join(
                [*variables, "python -m vllm.entrypoints.openai.api_server --model", shlex.quote(self.root), *flags]
            )
            lacks = f"the vLLM server at {self.url} lacks {', '.join(shortfalls)}"
            raise UsageError(
                f"{lacks}: start it, by vLLM's own python and beside its other flags, with: {start_command}"
            )


async def probe(client: EngineClient, *, untested: bool = False) -> Facts:
    """Ask a server what it has. Raises UsageError for a server that is no vLLM, that wants another key, or that is of
    an untested version unless that is allowed; EngineUnavailable or EngineTimeout if it is not there."""
    passed_errors = (EngineUnavailable, EngineTimeout, UsageError)
    with boundary(UsageError, f"the server at {client.url} is no vLLM server:", passes=passed_errors):
        return await _probed(client, untested=untested)


async def _probed(client: EngineClient, *, untested: bool) -> Facts:
    try:
        version = str(parse_json(await client.call("GET", "/version", deadline_s=_DEADLINE_S)).get("version"))
        models = parse_json(await client.call("GET", "/v1/models", deadline_s=_DEADLINE_S))["data"]
    except EngineError as error:
        if error.status != HTTPStatus.UNAUTHORIZED:
            raise
        hint = "export its key, and name the variable in engine.api_key_env"
        raise UsageError(f"the server at {client.url} asks for an API key: {hint}") from error
    check_version(version, f"the server at {client.url}", untested=untested)
    first_model = cast("dict[str, Any]", models[0])
    answer, logprobs = await _sample(client, first_model["max_model_len"])
    worker_facts = await _rpc(client, "agentrl_facts")
    backend_name = await _backend(client)
    weights_need = _BACKENDS.get(backend_name or "")
    if weights_need is Need.IPC and worker_facts is not None and not worker_facts["pickles"]:
        weights_need = None
    met_needs = {
        Need.TOKENS: answer is not None,
        Need.ADMIN: await _answers(client, "GET", "/is_paused"),
        Need.LOGPROBS: logprobs,
        Need.WEIGHTS: weights_need is Need.WEIGHTS,
        Need.NCCL: weights_need is Need.NCCL,
        Need.IPC: weights_need is Need.IPC,
        Need.PLUGIN: worker_facts is not None and not worker_facts["missing"],
        Need.LORA: await _takes_adapters(client),
        Need.ROUTED_EXPERTS: bool(answer and answer["choices"][0].get("routed_experts")),
        Need.KEPT_SETS: bool(answer and answer["choices"][0].get("sampling_mask")),
    }
    return Facts(
        url=client.url,
        version=version,
        model=first_model["id"],
        root=first_model.get("root") or first_model["id"],
        max_model_len=first_model["max_model_len"],
        has=frozenset(need for need, is_met in met_needs.items() if is_met),
        backend=backend_name,
        dtype=None if worker_facts is None else worker_facts.get("dtype"),
    )


async def _sample(client: EngineClient, context: int) -> tuple[dict[str, Json] | None, bool]:
    """One answer, None if it generates nothing from tokens; and whether its log-probs follow the temperature: at 2 the
    best tokens are half as far apart as at 1."""
    prompt = list(range(min(_PROMPT, context - 1)))  # several: the row of one may be zero, and leads to no preference
    answers: list[dict[str, Json]] = []
    # `processed_logprobs` cannot be read off a single answer. Two temperatures show it: log-probs of the sampling
    # distribution move closer together, raw ones stay where they are.
    for temperature in (1.0, 2.0):  # the highest that vLLM takes
        params: dict[str, Json] = {"max_tokens": 1, "temperature": temperature, "logprobs": _TOPS, "top_k": _TOPS}
        payload: dict[str, Json] = {
            "request_id": f"probe-{uuid4().hex}",
            "token_ids": prompt,
            "sampling_params": params,
        }
        try:
            answer_body = await client.call("POST", "/inference/v1/generate", json=payload, deadline_s=_DEADLINE_S)
        except EngineUnavailable:
            raise
        except EngineError:
            return None, False
        answers.append(parse_json(answer_body))
    top_logprobs = [
        {
            entry["token_id"]: entry["logprob"]
            for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        }
        for answer in answers
    ]
    common_tokens = sorted(top_logprobs[0].keys() & top_logprobs[1].keys(), key=top_logprobs[0].__getitem__)
    cold, hot = (top[common_tokens[-1]] - top[common_tokens[0]] for top in top_logprobs)
    # Half as far apart in exact numbers; three quarters leave room for bfloat16, and are still far from 1.
    return answers[0], hot < 0.75 * cold


async def _takes_adapters(client: EngineClient) -> bool:
    """A server with LoRA looks for the adapter's files; one without refuses the call or the path."""
    payload: dict[str, Json] = {"lora_name": "agentrl-probe", "lora_path": _NOWHERE}
    try:
        await client.call("POST", "/v1/load_lora_adapter", json=payload, deadline_s=_DEADLINE_S)
    except EngineError as error:
        return bool(re.search("No adapter found|cannot load the adapter", error.reason))  # vLLM's words, our plugin's
    return True


async def _backend(client: EngineClient) -> str | None:
    """The class that takes new weights: refusing what no class knows, it says its name."""
    payload: dict[str, Json] = {"init_info": {"agentrl_probe": True}}
    try:
        await client.call("POST", "/init_weight_transfer_engine", json=payload, deadline_s=_DEADLINE_S)
    except EngineError as error:
        name_match = re.search(r"Invalid init_info for (\w+)", error.reason)
        return name_match[1] if name_match else None
    return None


async def _answers(client: EngineClient, method: str, path: str) -> bool:
    try:
        await client.call(method, path, deadline_s=_DEADLINE_S)
    except EngineError:
        return False
    return True


async def _rpc(client: EngineClient, method: str) -> dict[str, Any] | None:
    """Call a method of the first worker; None if it knows no such method, or answers otherwise than our plugin."""
    try:
        answer_body = await client.call("POST", "/collective_rpc", json={"method": method}, deadline_s=_DEADLINE_S)
        return results(answer_body, missing=list, pickles=bool)[0]
    except EngineError:
        return None
