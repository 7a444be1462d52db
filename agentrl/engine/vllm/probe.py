"""What a running vLLM server can do, found by asking it, and what to start it with where it lacks something.

Owns the questions. Each costs the server at most one token; none changes its weights or its adapters.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast
from uuid import uuid4

from agentrl.engine.client import EngineClient
from agentrl.engine.vllm.launch import check_version
from agentrl.engine.vllm.plugin import BACKEND, EXTENSION
from agentrl.engine.wire import parse_json
from agentrl.errors import EngineError, EngineUnavailable, UsageError
from agentrl.records import Json

_DEADLINE_S = 60.0  # a cold server takes seconds over its first log-probs
_NOWHERE = "/nonexistent/agentrl-probe"


class Need(StrEnum):
    """Something a server may lack. `mend` is what to start it with."""

    TOKENS = "token-in/token-out generation"
    ADMIN = "pause, resume and weight versions"
    LOGPROBS = "log-probs of the sampling distribution"
    WEIGHTS = "weight transfer from files"
    NCCL = "weight transfer over NCCL"
    IPC = "weight transfer over CUDA IPC"
    PLUGIN = "agentrl's plugin"
    LORA = "loading LoRA adapters while it runs"
    ROUTED_EXPERTS = "the experts chosen per token"

    @property
    def mend(self) -> str:
        return _MENDS[self]


_MENDS = {
    Need.TOKENS: "--enable-scale-out",
    Need.ADMIN: "VLLM_SERVER_DEV_MODE=1 in its environment",
    Need.LOGPROBS: "--logprobs-mode processed_logprobs",
    Need.WEIGHTS: f'--weight-transfer-config \'{{"backend": "{BACKEND}"}}\'',
    Need.NCCL: '--weight-transfer-config \'{"backend": "nccl"}\'',
    Need.IPC: '--weight-transfer-config \'{"backend": "ipc"}\' and VLLM_ALLOW_INSECURE_SERIALIZATION=1 in its '
    "environment",
    Need.PLUGIN: f"agentrl installed beside it and --worker-extension-cls {EXTENSION}",
    Need.LORA: "--enable-lora --max-lora-rank RANK and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment",
    Need.ROUTED_EXPERTS: "--enable-return-routed-experts (GPU), or AGENTRL_VLLM_ROUTING=1 in its environment (CPU)",
}

FOR_TRAINING = frozenset({Need.TOKENS, Need.ADMIN, Need.LOGPROBS, Need.WEIGHTS})

_BACKENDS = {
    "FileTransferEngine": Need.WEIGHTS,
    "NCCLWeightTransferEngine": Need.NCCL,
    "IPCWeightTransferEngine": Need.IPC,
}


def needed(sync: str) -> frozenset[Need]:
    """What training needs of a server to which new weights travel as `RunConfig.sync` says."""
    match sync:
        case "nccl" | "ipc":
            return FOR_TRAINING - {Need.WEIGHTS} | {Need.NCCL if sync == "nccl" else Need.IPC}
        case "adapter":
            return FOR_TRAINING | {Need.LORA}
        case _:
            return FOR_TRAINING


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a server is and has. `max_model_len` is the most tokens a context may hold; `backend` the class that takes
    new weights, None if there is none."""

    url: str
    version: str
    model: str
    max_model_len: int
    has: frozenset[Need]
    backend: str | None

    def require(self, needs: Collection[Need]) -> None:
        """Raises UsageError with everything it lacks of `needs` and what to start it with."""
        if lacking := [need for need in Need if need in needs and need not in self.has]:
            what = ", ".join(lacking)
            how = "; ".join(need.mend for need in lacking)
            raise UsageError(f"the vLLM server at {self.url} lacks {what}: start it with {how}")


async def probe(client: EngineClient) -> Facts:
    """Ask a server what it has. Raises UsageError for a server that is no vLLM or of an untested version,
    EngineUnavailable if it is not there."""
    try:
        version = str(parse_json(await client.call("GET", "/version", deadline_s=_DEADLINE_S)).get("version"))
        models = parse_json(await client.call("GET", "/v1/models", deadline_s=_DEADLINE_S))["data"]
    except EngineUnavailable:
        raise
    except (EngineError, KeyError) as error:
        raise UsageError(f"the server at {client.url} is no vLLM server: {error}") from error
    check_version(version, f"the server at {client.url}")
    model = cast("dict[str, Any]", models[0])
    answer, logprobs = await _sample(client)
    facts = await _rpc(client, "agentrl_facts")
    backend = await _backend(client)
    takes = _BACKENDS.get(backend or "")
    if takes is Need.IPC and facts is not None and not facts["pickles"]:
        takes = None
    found = {
        Need.TOKENS: answer is not None,
        Need.ADMIN: await _answers(client, "GET", "/is_paused"),
        Need.LOGPROBS: logprobs,
        Need.WEIGHTS: takes is Need.WEIGHTS,
        Need.NCCL: takes is Need.NCCL,
        Need.IPC: takes is Need.IPC,
        Need.PLUGIN: facts is not None and not facts["missing"],
        Need.LORA: await _takes_adapters(client),
        Need.ROUTED_EXPERTS: bool(answer and answer["choices"][0].get("routed_experts")),
    }
    return Facts(
        url=client.url,
        version=version,
        model=model["id"],
        max_model_len=model["max_model_len"],
        has=frozenset(need for need, there in found.items() if there),
        backend=backend,
    )


async def _sample(client: EngineClient) -> tuple[dict[str, Json] | None, bool]:
    """One answer, None if it generates nothing from tokens; and whether its log-probs follow the temperature."""
    answers: list[dict[str, Json]] = []
    for temperature in (1.0, 2.0):  # the highest that vLLM takes
        params: dict[str, Json] = {"max_tokens": 1, "temperature": temperature, "logprobs": 2}
        asked: dict[str, Json] = {"request_id": f"probe-{uuid4().hex}", "token_ids": [0], "sampling_params": params}
        try:
            body = await client.call("POST", "/inference/v1/generate", json=asked, deadline_s=_DEADLINE_S)
        except EngineUnavailable:
            raise
        except EngineError:
            return None, False
        answers.append(parse_json(body))
    tops = [
        {
            entry["token_id"]: entry["logprob"]
            for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        }
        for answer in answers
    ]
    both = tops[0].keys() & tops[1].keys()
    return answers[0], any(abs(tops[0][id] - tops[1][id]) > 1e-6 for id in both)


async def _takes_adapters(client: EngineClient) -> bool:
    """A server with LoRA looks for the adapter's files; one without refuses the call or the path."""
    asked: dict[str, Json] = {"lora_name": "agentrl-probe", "lora_path": _NOWHERE}
    try:
        await client.call("POST", "/v1/load_lora_adapter", json=asked, deadline_s=_DEADLINE_S)
    except EngineError as error:
        return "No adapter found" in str(error)
    return True


async def _backend(client: EngineClient) -> str | None:
    """The class that takes new weights: refusing what no class knows, it says its name."""
    asked: dict[str, Json] = {"init_info": {"agentrl_probe": True}}
    try:
        await client.call("POST", "/init_weight_transfer_engine", json=asked, deadline_s=_DEADLINE_S)
    except EngineError as error:
        said = re.search(r"Invalid init_info for (\w+)", str(error))
        return said[1] if said else None
    return None


async def _answers(client: EngineClient, method: str, path: str) -> bool:
    try:
        await client.call(method, path, deadline_s=_DEADLINE_S)
    except EngineError:
        return False
    return True


async def _rpc(client: EngineClient, method: str) -> dict[str, Any] | None:
    """What the first worker says, None if it knows no such method."""
    try:
        body = await client.call("POST", "/collective_rpc", json={"method": method}, deadline_s=_DEADLINE_S)
    except EngineError:
        return None
    return parse_json(body)["results"][0]
