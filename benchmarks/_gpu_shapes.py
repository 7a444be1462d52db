"""Models of known shapes with random weights, and groups of known shapes, for `benchmarks/gpu.py`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.algos.algorithm import Algorithm
from agentrl.config import EnvSource, Rollout, RunConfig, Train
from agentrl.records import Group, GroupState, Step, StopReason, Task, Trajectory, Turn, VersionSpan

transformers.utils.logging.disable_progress_bar()

TASK = Task(index=0, env="gpu/none", seed=0)

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "Qwen3-4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
VOCABULARY = 151_936


def save_random(folder: Path, shape: str, *, vocab: int = VOCABULARY, device: str = "cpu") -> Path:
    """A folder with a model of `shape` and random weights: float32 if tiny, else bfloat16. Made once."""
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    sizes = TINY if shape == "tiny" else {"num_key_value_heads": 8, "head_dim": 128, **SHAPES[shape]}
    config = Qwen3Config(
        vocab_size=vocab,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        tie_word_embeddings=True,
        initializer_range=0.2 if shape == "tiny" else 0.02,
        eos_token_id=None,
        bos_token_id=None,
        **sizes,
    )
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if shape == "tiny" else torch.bfloat16)
    try:
        with torch.device(device):
            model = Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(kept)
    model.save_pretrained(folder)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return folder


def save_mixture(folder: Path, *, vocab: int) -> Path:
    """A folder with a tiny mixture of random weights: two of four experts for a token. Made once."""
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    outer = {"vocab_size": vocab, "initializer_range": 0.2, "eos_token_id": None, "bos_token_id": None}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, **experts, **outer)).save_pretrained(folder)
    return folder


def config_of(model: Path, *, algo: Algorithm, train: Train, **rollout: Any) -> RunConfig:
    given = {"max_context": train.tokens_per_batch, **rollout}
    return RunConfig(model=str(model), env=EnvSource(id=TASK.env), algo=algo, train=train, rollout=Rollout(**given))


def shared_prompt(groups: int, *, members: int = 8, prompt: int = 1200, sampled: int = 800, vocab: int) -> list[Group]:
    """Episodes of one turn: with these lengths 60% of a row is the shared prompt."""
    rng = random.Random(0)
    made: list[Group] = []
    for g in range(groups):
        asked = _some(rng, prompt, vocab)
        turns = [[(asked, _some(rng, sampled, vocab))] for _ in range(members)]
        made.append(_group(g, turns, rng))
    return made


def forked(
    groups: int, *, members: int = 8, turns: int = 20, prompt: int = 200, said: int = 24, sampled: int = 24, vocab: int
) -> list[Group]:
    """Episodes of many turns; each but the first begins as one before it did, and leaves it at a turn of its own."""
    rng = random.Random(1)
    made: list[Group] = []
    for g in range(groups):
        asked = _some(rng, prompt, vocab)
        played: list[list[tuple[tuple[int, ...], tuple[int, ...]]]] = []
        for member in range(members):
            own = list(rng.choice(played)[: rng.randrange(turns)]) if member else []
            while len(own) < turns:
                own.append((asked if not own else _some(rng, said, vocab), _some(rng, sampled, vocab)))
            played.append(own)
        made.append(_group(g, played, rng))
    return made


def _some(rng: random.Random, n: int, vocab: int) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab) for _ in range(n))


def _group(
    number: int, episodes: Sequence[Sequence[tuple[tuple[int, ...], tuple[int, ...]]]], rng: random.Random
) -> Group:
    trajectories = tuple(
        Trajectory(
            episode_id=1000 * number + member,
            group_id=number,
            member=member,
            task=TASK,
            start=(),
            turns=tuple(
                Turn(
                    index=at,
                    parent=at - 1 if at else None,
                    prompt_ids=prompt,
                    token_ids=tokens,
                    logprobs=(-11.9,) * len(tokens),
                    spans=(VersionSpan(0, 0, len(tokens)),),
                    finish="stop",
                    text="",
                    step=Step(observation=()),
                )
                for at, (prompt, tokens) in enumerate(turns)
            ),
            stop_reason=StopReason.DONE,
            outcome=rng.random(),
        )
        for member, turns in enumerate(episodes)
    )
    return Group(id=number, task=TASK, state=GroupState.TAKEN, size=len(trajectories), trajectories=trajectories)
