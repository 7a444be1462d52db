"""What new weights cost a running vLLM: `agentrl bench weights [--size 131K|500M] [--rounds N]`.

The same server takes them by each path in turn, while requests generate: a whole file through shared memory, a whole
file on disk, a delta against the last file, and a LoRA adapter alone. `write` is from tensors in the trainer's memory
to a checked file, `pause` is how long the engine did not generate, `total` is all of it until the version is confirmed.
Each round moves every weight by about 1e-6 of its kind's own size, as a step of Adam at that learning rate does.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import trio
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentrl.engine.client import EngineClient
from agentrl.engine.vllm.launch import VLLMServer, find_build, running
from agentrl.engine.weight_sync import adapters, weight_file
from agentrl.engine.weight_sync.file_transport import push
from agentrl.engine.weight_sync.transport import PushReport
from agentrl.learner.weight_export import WeightFile, export_weights
from agentrl.protocols import GenerateRequest
from agentrl.records import SamplingParams

VOCAB = 4096
RANK = 16
STEP = 1e-6
ADMIN_S = 300.0
PATHS = {"loaded": "loaded", "shm": "shm_file", "files": "disk_file", "delta": "delta", "lora": "lora"}
SHAPES: dict[str, dict[str, int]] = {
    "131K": {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 192},
    "500M": {"vocab_size": VOCAB, "hidden_size": 1536, "num_hidden_layers": 18, "intermediate_size": 4608},
}


def make_model(folder: Path, size: str) -> Any:
    """A random Qwen3 in the dtype it is served in, saved with a tokenizer that vLLM can load."""
    shape = SHAPES[size]
    heads = max(2, shape["hidden_size"] // 128)
    dtype = torch.float32 if size == "131K" else torch.bfloat16
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=32 if size == "131K" else 128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=1,
        dtype=dtype,
    )
    model = Qwen3ForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"t{id}": id for id in range(shape["vocab_size"])}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t1").save_pretrained(folder)
    return model


class Trainer:
    """Float32 master weights, a step on them, and the files that a version needs."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._master = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
        self.version = 1

    def step(self) -> int:
        """Move every weight by STEP in a random direction and cast the model anew; the next version."""
        self.version += 1
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self._master[name].add_(torch.randn_like(self._master[name]), alpha=STEP)
                parameter.copy_(self._master[name])
        return self.version

    def adapter(self, folder: Path) -> Path:
        """A rank-16 adapter on every projection, written whole or not at all."""
        draft = folder.with_name(f".{folder.name}")
        draft.mkdir(parents=True)
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self.model.named_parameters():
            if name.endswith("_proj.weight"):
                module = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, parameter.shape[1], dtype=parameter.dtype) * 0.01
                tensors[f"{module}.lora_B.weight"] = torch.zeros(parameter.shape[0], RANK, dtype=parameter.dtype)
        save_file(tensors, draft / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": "all-linear", "bias": "none"}
        (draft / "adapter_config.json").write_text(json.dumps(settings))
        draft.rename(folder)
        return folder


@dataclass
class Silence:
    """The longest time between two tokens since `begin`, as the client of a stream sees it."""

    longest: float = 0.0
    last: float = 0.0
    came: trio.Event = field(default_factory=trio.Event)

    def begin(self) -> None:
        self.longest, self.last = 0.0, trio.current_time()

    def token(self) -> None:
        now = trio.current_time()
        self.longest, self.last = max(self.longest, now - self.last), now
        self.came.set()

    async def end(self) -> float:
        """After one more token."""
        self.came = trio.Event()
        await self.came.wait()
        return self.longest


class Bench:
    """One server, one trainer, and the paths between them. Every path returns (write s, push report)."""

    def __init__(self, client: EngineClient, trainer: Trainer, silence: Silence, shm: Path, disk: Path) -> None:
        self.client, self.trainer, self.silence, self.shm, self.disk = client, trainer, silence, shm, disk
        self._last: WeightFile | None = None

    async def loaded(self) -> tuple[float, PushReport]:
        return await self._whole(self.shm, second=False)

    async def shm_file(self) -> tuple[float, PushReport]:
        return await self._whole(self.shm)

    async def disk_file(self) -> tuple[float, PushReport]:
        return await self._whole(self.disk, durable=True)

    async def delta(self) -> tuple[float, PushReport]:
        """Against the last file that the engine took; the base's own push is not counted."""
        if self._last is None or not self._last.path.exists():
            await self._whole(self.shm)
        base = self._last
        assert base is not None
        version = self.trainer.step()
        started = time.perf_counter()
        new = export_weights(self.trainer.model, self.shm / f"{version}.safetensors")
        target = self.shm / f"{version}.delta"
        width = 2 if self.trainer.model.dtype == torch.bfloat16 else 4
        old, fresh = weight_file.open_bytes(base.path), weight_file.open_bytes(new.path)
        await trio.to_thread.run_sync(lambda: weight_file.write_delta(old, fresh, target, width=width))
        write_s = time.perf_counter() - started
        self.silence.begin()
        report = await push(
            [self.client],
            target,
            version,
            sha256=new.sha256,
            base_sha256=base.sha256,
            stage=True,
            deadline_s=ADMIN_S,
            clear_cache=True,
        )
        target.unlink()
        self._keep(new)
        return write_s, report

    async def lora(self) -> tuple[float, PushReport]:
        version = self.trainer.version = self.trainer.version + 1
        started = time.perf_counter()
        folder = self.trainer.adapter(self.shm / f"adapter-{version}")
        write_s = time.perf_counter() - started
        self.silence.begin()
        report = await adapters.load([self.client], folder, version, deadline_s=ADMIN_S)
        await adapters.retire([self.client], keep=[version], deadline_s=ADMIN_S)
        return write_s, report

    async def _whole(self, folder: Path, *, durable: bool = False, second: bool = True) -> tuple[float, PushReport]:
        version = self.trainer.step()
        started = time.perf_counter()
        file = export_weights(self.trainer.model, folder / f"{version}.safetensors")
        if durable:
            with file.path.open("rb") as written:
                os.fsync(written.fileno())
        write_s = time.perf_counter() - started
        self.silence.begin()
        report = await push(
            [self.client],
            file.path,
            version,
            sha256=file.sha256,
            keep_base=True,
            stage=True,
            second=second,
            deadline_s=ADMIN_S,
            clear_cache=True,
        )
        self._keep(file)
        return write_s, report

    def _keep(self, file: WeightFile) -> None:
        if self._last is not None:
            self._last.path.unlink(missing_ok=True)
        self._last = file


async def load(client: EngineClient, vocab: int, silence: Silence) -> None:
    """One request after another, for ever: somebody generates while the weights change."""
    rng = random.Random(0)
    while True:
        request = GenerateRequest(
            request_id=uuid4().hex,
            session="load",
            token_ids=tuple(rng.randrange(2, vocab) for _ in range(32)),
            sampling=SamplingParams(max_tokens=256),
            deadline_s=600.0,
        )
        async with aclosing(client.stream(request)) as chunks:
            async for _ in chunks:
                silence.token()


@contextmanager
def folders() -> Iterator[tuple[Path, Path]]:
    """A folder in shared memory and one on disk, gone afterwards."""
    shm = Path(tempfile.mkdtemp(prefix="agentrl-bench-", dir="/dev/shm"))
    disk = Path(tempfile.mkdtemp(prefix="agentrl-bench-"))
    try:
        yield shm, disk
    finally:
        shutil.rmtree(shm)
        shutil.rmtree(disk)


async def measure(size: str, chosen: Sequence[str], rounds: int, shm: Path, disk: Path) -> list[dict[str, Any]]:
    """One row for each of the `chosen` paths: medians over `rounds` pushes, after one that is not counted."""
    model = make_model(disk / "model", size)
    server = VLLMServer(
        model=disk / "model",
        open=True,
        port=0,
        plugin_folder=disk / "plugin",
        build=find_build(),
        max_model_len=1024,
        max_batch=8,
        dtype="float32" if size == "131K" else "bfloat16",
        kv_cache_bytes=(16 if size == "131K" else 512) << 20,
        stream_tokens=1,
        lora_rank=RANK,
        max_loras=2,
    ).on_free_port()
    rows: list[dict[str, Any]] = []
    async with running(server, log=disk / "vllm.log", version=1, deadline_s=600.0), trio.open_nursery() as nursery:
        client = EngineClient(server.url)
        silence = Silence()
        bench = Bench(client, Trainer(model), silence, shm, disk)
        nursery.start_soon(load, EngineClient(server.url), SHAPES[size]["vocab_size"], silence)
        for name in chosen:
            path = getattr(bench, PATHS[name])
            await path()
            taken: list[tuple[float, PushReport]] = []
            silences: list[float] = []
            for _ in range(rounds):
                taken.append(await path())
                silences.append(await silence.end())
            pauses = sorted(report.pause_s for _, report in taken)
            rows.append(
                {
                    "parameters": sum(parameter.numel() for parameter in model.parameters()),
                    "path": name,
                    "write_ms": 1e3 * statistics.median(write_s for write_s, _ in taken),
                    "pause_ms": 1e3 * statistics.median(pauses),
                    "longest_ms": 1e3 * pauses[-1],
                    "silence_ms": 1e3 * statistics.median(silences),
                    "total_ms": 1e3 * statistics.median(write_s + report.total_s for write_s, report in taken),
                    "bytes": int(statistics.median(report.bytes for _, report in taken)),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
        nursery.cancel_scope.cancel()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; ratios are against the first row of the same model."""
    lines = [
        "| parameters | path | write ms | pause ms | longest | silence ms | total ms | bytes | bytes ÷ | time ÷ |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        full = next(other for other in rows if other["parameters"] == row["parameters"])
        lines.append(
            f"| {row['parameters']:,} | {row['path']} | {row['write_ms']:.0f} | {row['pause_ms']:.1f} "
            f"| {row['longest_ms']:.1f} | {row['silence_ms']:.0f} | {row['total_ms']:.0f} | {row['bytes']:,} "
            f"| {full['bytes'] / row['bytes']:.1f} "
            f"| {full['total_ms'] / row['total_ms']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", choices=list(SHAPES), help="default: both")
    parser.add_argument("--path", action="append", choices=list(PATHS), help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for size in arguments.size or list(SHAPES):
        with folders() as (shm, disk):
            rows += trio.run(measure, size, arguments.path or list(PATHS), arguments.rounds, shm, disk)
    print(table(rows))


if __name__ == "__main__":
    main()
