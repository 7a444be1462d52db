"""Groups and models made by hand for the learner's tests."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.algos.grpo import GRPO
from agentrl.config import BufferSettings, EnvSource, Rollout, RunConfig, Train
from agentrl.learner.rank_orders import HashWeights
from agentrl.learner.rank_worker import RankWorker
from agentrl.records import Group, GroupState, Step, StopReason, Task, Trajectory, Turn, VersionSpan

VOCAB = 23
TASK = Task(index=0, env="test/none", seed=0)


def tiny_qwen3(
    folder: Path, *, seed: int = 0, tie: bool = True, vocab: int = VOCAB, layers: int = 2, hidden: int = 32
) -> Path:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tie,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_llama(folder: Path, *, biases: bool = False) -> Path:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        initializer_range=0.3,
        attention_bias=biases,
        mlp_bias=biases,
    )
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):  # they begin at 0
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


def mixture(folder: Path, *, layers: int = 1, kv_heads: int = 1) -> Path:
    """A mixture of experts, which the model fuses and its checkpoint format keeps apart."""
    torch.manual_seed(2)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=kv_heads,
        head_dim=16,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.3,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def turn(
    index: int,
    prompt: Sequence[int],
    tokens: Sequence[int],
    *,
    parent: int | None = None,
    reward: float = 0.0,
    version: int = 1,
    logprobs: Sequence[float] | None = None,
    role: str = "policy",
    learns: bool = True,
    **said: Any,
) -> Turn:
    """A turn whose step says `said` beside its reward (fields of `Step`)."""
    return Turn(
        index=index,
        parent=parent,
        prompt_ids=tuple(prompt),
        token_ids=tuple(tokens),
        logprobs=tuple(logprobs) if logprobs is not None else (-1.0,) * len(tokens),
        spans=(VersionSpan(version, 0, len(tokens)),) if tokens else (),
        finish="stop",
        text="",
        step=Step(observation=(), reward=reward, **said),
        role=role,
        learns=learns,
    )


def episode(
    member: int,
    turns: Sequence[Turn],
    outcome: float | None,
    *,
    group: int = 1,
    stop: StopReason | None = StopReason.DONE,
) -> Trajectory:
    return Trajectory(
        episode_id=100 * group + member,
        group_id=group,
        member=member,
        task=TASK,
        start=(),
        turns=tuple(turns),
        stop_reason=stop,
        outcome=outcome,
        success=None if outcome is None else outcome > 0,
    )


def group_of(members: Sequence[Trajectory], *, id: int = 1) -> Group:
    return Group(id=id, task=TASK, state=GroupState.TAKEN, size=len(members), trajectories=tuple(members))


def random_group(id: int, seed: int, *, members: int = 4, vocab: int = VOCAB) -> Group:
    """Members of one to three turns over a shared prompt, some with equal beginnings, random rewards."""
    rng = random.Random(seed)

    def some(low: int, high: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(rng.randint(low, high))]

    prompt, common = some(4, 9), some(2, 4)
    made: list[Trajectory] = []
    for member in range(members):
        turns: list[Turn] = []
        for index in range(rng.randint(1, 3)):
            first = common if index == 0 and rng.random() < 0.7 else []
            tokens = [*first, *some(1, 4)]
            turns.append(
                turn(
                    index,
                    prompt if index == 0 else some(1, 3),
                    tokens,
                    parent=None if index == 0 else index - 1,
                    reward=rng.choice([0.0, 0.3, -0.2]),
                    version=rng.choice([1, 2]),
                    logprobs=[-rng.uniform(0.5, 4.0) for _ in tokens],
                )
            )
        made.append(episode(member, turns, rng.choice([0.0, 1.0, 0.5]), group=id))
    return group_of(made, id=id)


def run_config(
    *,
    algo: GRPO | None = None,
    train: Train | None = None,
    buffer: BufferSettings | None = None,
    rollout: Rollout | None = None,
    seed: int = 0,
) -> RunConfig:
    return RunConfig(
        model="unused",
        seed=seed,
        env=EnvSource(id="test/none"),
        algo=algo or GRPO(),
        train=train or Train(warmup_steps=0),
        buffer=buffer or BufferSettings(),
        rollout=rollout or Rollout(),
    )


class At:
    """An order to hash weights. Where it is unpickled, in the process of another rank, a fault happens."""

    def __init__(self, fault: Callable[[], object]) -> None:
        self._fault = fault

    def __reduce__(self) -> tuple[Callable[..., HashWeights], tuple[Callable[[], object]]]:
        return _after, (self._fault,)

    def run(self, worker: RankWorker) -> dict[str, str]:
        raise AssertionError("it is for other ranks")


def _after(fault: Callable[[], object]) -> HashWeights:
    fault()
    return HashWeights()


class Memory(ctypes.Structure):
    """What the C library says of a process's memory: see mallinfo2(3)."""

    _fields_: ClassVar = [("numbers", ctypes.c_size_t * 10)]


def in_use() -> int:
    """Bytes."""
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Memory
    numbers = ask().numbers
    return numbers[4] + numbers[7]  # mapped, and in the heap
