"""A learner whose environment has vLLM: sends two versions to servers and says what came of it, as JSON.

A module of its own process, with vLLM's interpreter: `tests.engine_vllm.trainer SYNC MODEL_FOLDER URL...`.
"""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import trio
from transformers import AutoModelForCausalLM

from agentrl.engine.client import EngineClient
from agentrl.engine.weight_sync import canary
from agentrl.engine.weight_sync.canary import Canary, probe_tokens
from agentrl.engine.weight_sync.gpu_transport import Transfer
from agentrl.learner import gpu_sender as sending
from agentrl.learner.gpu_sender import GpuChannel, GpuSender
from agentrl.learner.weight_export import take
from tests.engine_vllm import gloo, mapped

CHUNK = 40_000  # bytes: several pieces for the tiny model


class Counting(GpuSender):
    """Counts how often engines were joined, and sends in pieces of CHUNK bytes."""

    joined = 0

    def join(self, *args: Any, **kwargs: Any) -> GpuChannel:
        self.joined += 1
        self.channel = super().join(*args, **kwargs)
        return self.channel

    def shrink(self) -> None:
        sending._IPC_BUFFER = CHUNK
        if self._sync == "nccl":
            info = self._backend.NCCLTrainerInitInfo
            self._backend.NCCLTrainerInitInfo = functools.partial(info, packed_buffer_size_bytes=CHUNK)


async def main(sync: Any, folder: Path, *urls: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = probe_tokens(model.config.vocab_size, 24)
    sender, clients = Counting(sync, "cpu"), [EngineClient(url) for url in urls]
    sender.shrink()
    counter: Any = gloo.Communicator if sync == "nccl" else mapped.Stream
    transfer, told = Transfer(sender), []
    for version in (2, 3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)
            logits = model(torch.tensor([tokens])).logits[0, :-1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        snapshot = take(model, torch.float32)
        counter.pieces = 0
        report = await transfer.push(clients, snapshot, version, deadline_s=60.0)
        expected = Canary(version=version, token_ids=tokens, logprobs=tuple(logprobs.tolist()))
        error = await canary.check(clients, expected, deadline_s=60.0)
        served = [await client.served_version() for client in clients]
        told.append({"served": served, "error": error, "bytes": report.bytes, "pieces": counter.pieces})
    sender.channel.leave()
    for client in clients:
        await client.aclose()
    print(json.dumps({"told": told, "joined": sender.joined}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    (gloo if sys.argv[1] == "nccl" else mapped).register()
    trio.run(main, sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
