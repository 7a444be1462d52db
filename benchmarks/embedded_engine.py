"""The embedded engine beside transformers' `generate` in multi-turn episodes, both on one thread, in one run.

    python benchmarks/embedded_engine.py [--groups 16 --members 8 --turns 3 --prompt 362 --new 32 --observation 30]

Same model (random weights, Qwen3 architecture, about 1M parameters), same episodes: every group's members share a
prompt; each turn samples `--new` tokens and appends `--observation` others. The sides:

- embedded: the engine as a process, our client over HTTP, log-probs of every token; keys and values stay between turns;
- generate: one padded batch a turn, the whole context computed anew each turn, no log-probs (that flatters it);
- generate_batch (`--continuous`): transformers' continuous batching.

Rounds of the sides alternate; the table has medians. "per CPU second" counts the CPU time of every process of a side
(engine and client together), so that it means something on a machine that others use too.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import trio

from agentrl.config import EngineSettings
from agentrl.engine.client import EngineClient
from agentrl.engine.embedded_process import EmbeddedEngine, launch_embedded
from agentrl.protocols import GenerateRequest
from agentrl.records import SamplingParams

VOCAB = 768


@dataclass(frozen=True)
class Shape:
    """Episodes of one round."""

    groups: int
    members: int
    turns: int
    prompt: int
    new: int
    observation: int

    @property
    def sampled(self) -> int:
        return self.groups * self.members * self.turns * self.new

    @property
    def context(self) -> int:
        return self.prompt + self.turns * (self.new + self.observation)

    def prompts(self, rng: random.Random) -> list[list[int]]:
        """One context an episode; members of a group have the same."""
        shared = [[rng.randrange(VOCAB) for _ in range(self.prompt)] for _ in range(self.groups)]
        return [list(prompt) for prompt in shared for _ in range(self.members)]

    def observe(self, rng: random.Random) -> list[int]:
        return [rng.randrange(VOCAB) for _ in range(self.observation)]


def make_model(folder: Path) -> Any:
    """A random Qwen3 of about 1M parameters, saved into `folder`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=128,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


async def embedded_round(client: EngineClient, shape: Shape, rng: random.Random) -> None:
    """All episodes at once, each at its own pace."""
    salt = rng.random()

    async def episode(number: int, context: list[int]) -> None:
        for turn in range(shape.turns):
            request = GenerateRequest(
                request_id=f"{salt}-{number}-{turn}",
                session=str(number // shape.members),
                token_ids=tuple(context),
                sampling=SamplingParams(max_tokens=shape.new),
                deadline_s=600,
            )
            generation = await client.generate(request)
            context += [*generation.token_ids, *shape.observe(rng)]

    async with trio.open_nursery() as nursery:
        for number, context in enumerate(shape.prompts(rng)):
            nursery.start_soon(episode, number, context)


def generate_round(model: Any, shape: Shape, rng: random.Random) -> None:
    """Turn by turn, all episodes in one batch of equal lengths (so nothing is lost to padding either)."""
    contexts = shape.prompts(rng)
    for _ in range(shape.turns):
        ids = torch.tensor(contexts)
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=shape.new,
                min_new_tokens=shape.new,
                pad_token_id=0,
            )
        contexts = [[*row, *shape.observe(rng)] for row in out.tolist()]


def continuous_round(model: Any, shape: Shape, rng: random.Random) -> None:
    """transformers' continuous batching, turn by turn."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    contexts = shape.prompts(rng)
    page = 32
    blocks = len(contexts) * (-(-shape.context // page) + 1)
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=shape.new, eos_token_id=-1, pad_token_id=0)
    for _ in range(shape.turns):
        results = model.generate_batch(
            inputs=contexts,
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=blocks, page_size=page),
            progress_bar=False,
        )
        rows = [results[key].generated_tokens for key in sorted(results, key=lambda key: int(key.rpartition("_")[2]))]
        contexts = [[*context, *row, *shape.observe(rng)] for context, row in zip(contexts, rows, strict=True)]


def own_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def process_cpu_s(pid: int) -> float:
    """CPU seconds of another process (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@dataclass
class Side:
    """A name, what one round does, the CPU clock of all its processes, and what the rounds took."""

    name: str
    round: Callable[[random.Random], Any]
    cpu_s: Callable[[], float]
    wall: list[float]
    cpu: list[float]

    async def run(self, rng: random.Random) -> None:
        started, cpu = time.perf_counter(), self.cpu_s()
        result = self.round(rng)
        if result is not None:
            await result
        self.wall.append(time.perf_counter() - started)
        self.cpu.append(self.cpu_s() - cpu)


async def compare(shape: Shape, rounds: int, *, continuous: bool) -> list[Side]:
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        model = make_model(Path(folder))
        settings = EngineSettings(max_batch=shape.groups * shape.members, kv_cache_mb=1024)
        async with launch_embedded(Path(folder), settings, max_context=shape.context + 1) as engine:
            client = EngineClient(engine.url)
            sides = _sides(engine, client, model, shape, continuous=continuous)
            for number in range(rounds + 1):  # the first warms up and is not counted
                for side in sides:
                    await side.run(random.Random(number))
            await client.aclose()
    for side in sides:
        del side.wall[0], side.cpu[0]
    return sides


def _sides(engine: EmbeddedEngine, client: EngineClient, model: Any, shape: Shape, *, continuous: bool) -> list[Side]:
    both = lambda: own_cpu_s() + process_cpu_s(engine.process.pid)  # noqa: E731
    sides = [
        Side("embedded, over HTTP", lambda rng: embedded_round(client, shape, rng), both, [], []),
        Side("transformers generate", lambda rng: generate_round(model, shape, rng), own_cpu_s, [], []),
    ]
    if continuous:
        batch = Side("transformers generate_batch", lambda rng: continuous_round(model, shape, rng), own_cpu_s, [], [])
        sides.append(batch)
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("groups", 16), ("members", 8), ("turns", 3), ("prompt", 362), ("new", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--observation", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--continuous", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape = Shape(given.groups, given.members, given.turns, given.prompt, given.new, given.observation)
    sides = trio.run(lambda: compare(shape, given.rounds, continuous=given.continuous))
    print(f"\n{shape}; {given.rounds} rounds after a warm-up, one thread, medians\n")
    print("| engine | sampled tokens/s | per CPU second | round, s |\n|---|---|---|---|")
    for side in sides:
        wall, cpu = statistics.median(side.wall), statistics.median(side.cpu)
        print(f"| {side.name} | {shape.sampled / wall:,.0f} | {shape.sampled / cpu:,.0f} | {wall:.2f} |")
    ours, theirs = (statistics.median(side.cpu) for side in sides[:2])
    print(f"\nembedded / generate, per CPU second: {theirs / ours:.2f}")


if __name__ == "__main__":
    main()
