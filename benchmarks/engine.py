"""Our path to vLLM beside a bare load generator, and the embedded engine beside vLLM and `generate`: one run.

    agentrl bench engine [--groups 8 --members 8 --turns 3 --prompt 256 --new 32 --observation 30 --rounds 5]

Same model (random weights, Qwen3 architecture, about 1M parameters) and same episodes everywhere; see
`embedded_engine`. Sides take turns, the first two twice a round, so that whatever else the machine does meets all:

- vLLM, our client and fleet: what a rollout worker does, versions, routing and control of concurrency included;
- vLLM, bare: the same requests to the same server over one plain socket an episode, with no more parsing than the next
  turn needs. The ratio of the first two is what our path costs;
- embedded, our client and fleet;
- generate: transformers, one padded batch a turn (see `embedded_engine`).

A side's CPU time is that of every process it needs. Servers have one thread each and all sides the same two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import trio
from embedded_engine import VOCAB, Shape, Side, embedded_round, generate_round, make_model, own_cpu_s, process_cpu_s
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from agentrl.config import EngineSettings
from agentrl.engine.client import EngineClient
from agentrl.engine.embedded_process import launch_embedded
from agentrl.engine.router.concurrency import Aimd
from agentrl.engine.router.router import Fleet
from agentrl.engine.vllm.launch import VLLMServer, find_build, running

START_S = 600.0


async def bare_round(port: int, shape: Shape, rng: random.Random) -> None:
    """As `embedded_round`, with nothing between it and the socket."""

    async def episode(context: list[int]) -> None:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            for _ in range(shape.turns):
                context += [*await bare_turn(stream, context, shape.new), *shape.observe(rng)]

    async with trio.open_nursery() as nursery:
        for context in shape.prompts(rng):
            nursery.start_soon(episode, context)


async def bare_turn(stream: trio.SocketStream, context: list[int], new: int) -> list[int]:
    """One request as our client sends it; the tokens of its streamed answer."""
    sampling = {"max_tokens": new, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "logprobs": 0}
    body = json.dumps({"token_ids": context, "sampling_params": sampling, "stream": True}).encode()
    head = f"POST /inference/v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
    await stream.send_all(head.encode() + b"content-type: application/json\r\n\r\n" + body)
    text, tokens = b"", list[int]()
    while not text.endswith(b"0\r\n\r\n"):  # the last chunk of a chunked answer
        text += await stream.receive_some()
    for line in text.split(b"\n"):
        if line.startswith(b"data: {"):
            tokens += json.loads(line[6:])["choices"][0]["token_ids"]
    return tokens


def group_cpu_s(group: int) -> float:
    """CPU seconds of all processes of a process group (Linux)."""
    total = 0.0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getpgid(int(entry.name)) == group:
                    total += process_cpu_s(int(entry.name))
            except (ProcessLookupError, FileNotFoundError):
                continue
    return total


def save_tokenizer(folder: Path) -> None:
    """vLLM wants one; no token of it ends a turn."""
    words = Tokenizer(models.WordLevel({f"t{id}": id for id in range(VOCAB)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


async def compare(shape: Shape, rounds: int) -> list[Side]:
    """The sides with their measured rounds; the first round warms up and is not counted."""
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as name:
        folder = Path(name)
        model, running_at_once = make_model(folder / "model"), shape.groups * shape.members
        save_tokenizer(folder / "model")
        settings = EngineSettings(max_batch=running_at_once, kv_cache_mb=512)
        server = VLLMServer(
            model=folder / "model",
            open=True,
            port=0,
            plugin_folder=folder / "plugin",
            build=find_build(),
            max_model_len=shape.context + 1,
            max_batch=running_at_once,
            dtype="float32",
            kv_cache_bytes=512 << 20,
        ).on_free_port()
        async with AsyncExitStack() as stack:
            vllm = await stack.enter_async_context(running(server, log=folder / "vllm.log", deadline_s=START_S))
            embedded = await stack.enter_async_context(
                launch_embedded(folder / "model", settings, max_context=shape.context + 1)
            )
            nursery = await stack.enter_async_context(trio.open_nursery())
            ours = Fleet([EngineClient(server.url)])
            nursery.start_soon(lambda: ours.control(start=Aimd(limit=running_at_once, ceiling=running_at_once)))
            own = Fleet([EngineClient(embedded.url)])
            with_vllm = lambda: own_cpu_s() + group_cpu_s(vllm.pid)  # noqa: E731
            with_embedded = lambda: own_cpu_s() + process_cpu_s(embedded.process.pid)  # noqa: E731
            sides = [
                Side("vLLM, our client and fleet", partial(embedded_round, ours, shape), with_vllm, [], []),
                Side("vLLM, bare load generator", partial(bare_round, server.port, shape), with_vllm, [], []),
                Side("embedded, our client and fleet", partial(embedded_round, own, shape), with_embedded, [], []),
                Side("transformers generate", partial(generate_round, model, shape), own_cpu_s, [], []),
            ]
            through, bare, *others = sides
            for number in range(rounds + 1):
                # The two that are compared to a few hundredths meet in every order, and more often than the rest.
                for turn, side in enumerate([through, bare, bare, through, *others[:: 1 if number % 2 else -1]]):
                    await side.run(random.Random(f"{number} {turn} {side.name}"))  # no prompt is in a cache already
                if number == 0:  # it warmed up
                    for side in sides:
                        side.wall.clear()
                        side.cpu.clear()
            for fleet in (ours, own):
                await fleet.aclose()
            nursery.cancel_scope.cancel()
    return sides


def table(shape: Shape, sides: list[Side]) -> str:
    """Markdown: medians, and the two ratios that are claimed."""
    lines = ["| side | sampled tokens/s | per CPU second | round, s |", "|---|---|---|---|"]
    for side in sides:
        wall, cpu = statistics.median(side.wall), statistics.median(side.cpu)
        lines.append(f"| {side.name} | {shape.sampled / wall:,.0f} | {shape.sampled / cpu:,.0f} | {wall:.2f} |")
    ours, bare, embedded, generate = sides
    ratios = [theirs / own for own, theirs in zip(ours.wall, bare.wall, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    spread = f"{len(ratios)} pairs, the middle half {low:.2f} to {high:.2f}"
    lines += ["", f"Our path to vLLM / bare, tokens/s: {statistics.median(ratios):.3f} ({spread})."]
    multiple = statistics.median(generate.wall) / statistics.median(embedded.wall)
    return "\n".join([*lines, f"Embedded / generate, tokens/s: {multiple:.2f}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("groups", 8), ("members", 8), ("turns", 3), ("prompt", 256), ("new", 32), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--observation", type=int, default=30)
    given: Any = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(given.groups, given.members, given.turns, given.prompt, given.new, given.observation)
    started = time.perf_counter()
    sides = trio.run(compare, shape, given.rounds)
    print(f"\n{shape}; {given.rounds} rounds after a warm-up, medians, {time.perf_counter() - started:.0f} s in all\n")
    print(table(shape, sides))


if __name__ == "__main__":
    main()
