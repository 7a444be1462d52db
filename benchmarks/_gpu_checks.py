"""Cases of `benchmarks/gpu.py`: the machine's ceilings, and the learner on a GPU beside the same learner on a CPU."""

from __future__ import annotations

import platform
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from _gpu_case import Bench, Row
from _gpu_shapes import config_of, save_mixture, save_random
from torch import Tensor

from agentrl.algos.gigpo import GiGPO
from agentrl.algos.grpo import GRPO
from agentrl.algos.grpo_variants import DAPO
from agentrl.algos.gspo import GSPO
from agentrl.algos.ppo import PPO
from agentrl.algos.reinforce import Reinforce
from agentrl.config import Train
from agentrl.learner.learner import Learner
from agentrl.records import Group, GroupState, RoutedExperts, Step, StopReason, Task, Trajectory, Turn, VersionSpan
from agentrl.tokens.sampling_mask import encode

FLOAT32_GRADIENT = 2e-4
"""Largest relative difference of the gradients of a step in float32: another order of the same sums."""


def seconds(work: Callable[[], object], device: str, rounds: int = 5) -> float:
    """The median time of one call, after one to warm up."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    work()
    taken: list[float] = []
    for _ in range(rounds):
        wait()
        began = time.perf_counter()
        work()
        wait()
        taken.append(time.perf_counter() - began)
    return sorted(taken)[rounds // 2]


def machine(bench: Bench) -> Iterator[Row]:
    yield {"what": "python", "value": platform.python_version()}
    yield {"what": "torch", "value": torch.__version__}
    yield {"what": "transformers", "value": transformers.__version__}
    if bench.device == "cuda":
        about = torch.cuda.get_device_properties(0)
        yield {"what": "device", "value": about.name}
        yield {"what": "CUDA", "value": torch.version.cuda}
        yield {"what": "memory GiB", "value": about.total_memory / 2**30}
        yield {"what": "capability", "value": f"{about.major}.{about.minor}"}
    n = 64 if bench.tiny else 8192
    for dtype in (torch.bfloat16, torch.float32):
        a, b = (torch.randn(n, n, device=bench.device, dtype=dtype) for _ in range(2))
        took = seconds(lambda a=a, b=b: a @ b, bench.device)
        yield {
            "what": f"matrix product {n}^3 {str(dtype).removeprefix('torch.')} TFLOP/s",
            "value": 2 * n**3 / took / 1e12,
        }
    whole = torch.empty(1 << (16 if bench.tiny else 31), dtype=torch.uint8, device=bench.device)
    took = seconds(whole.clone, bench.device)
    yield {"what": "copy on the device GB/s (read and written)", "value": 2 * len(whole) / took / 1e9}
    part = whole[: 1 << (16 if bench.tiny else 30)]
    yield {"what": "device to host GB/s (pageable)", "value": len(part) / seconds(part.cpu, bench.device, 3) / 1e9}
    if bench.device == "cuda":
        pinned = torch.empty(len(part), dtype=torch.uint8, pin_memory=True)
        took = seconds(lambda: pinned.copy_(part), bench.device, 3)
        yield {"what": "device to host GB/s (pinned)", "value": len(part) / took / 1e9}


# --- parity -----------------------------------------------------------------------------------------------------------

VOCAB = 64
TASK = Task(index=0, env="gpu/none", seed=0)


def random_groups(count: int, *, members: int, seed: int = 0, cut: bool = False) -> list[Group]:
    """Members of one to three turns over a shared prompt, some with equal beginnings; with `cut`, tokens were sampled
    from a kept set."""
    rng = random.Random(seed)

    def some(low: int, high: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCAB) for _ in range(rng.randint(low, high)))

    def turn(index: int, prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Turn:
        sets = [sorted({token, *some(4, 9)}) for token in tokens]
        return Turn(
            index=index,
            parent=index - 1 if index else None,
            prompt_ids=prompt,
            token_ids=tokens,
            logprobs=tuple(-rng.uniform(2.5, 5.5) for _ in tokens),
            spans=(VersionSpan(rng.choice([1, 2]), 0, len(tokens)),),
            finish="stop",
            text="",
            step=Step(observation=(), reward=rng.choice([0.0, 0.3, -0.2])),
            columns={"kept": encode(sets)} if cut else {},
        )

    groups: list[Group] = []
    for g in range(count):
        prompt, common = some(6, 12), some(3, 5)
        played: list[Trajectory] = []
        for member in range(members):
            beginning = common if rng.random() < 0.6 else ()
            turns = [turn(0, prompt, beginning + some(3, 9))]
            turns += [turn(at, some(2, 5), some(3, 9)) for at in range(1, rng.randint(1, 3))]
            played.append(
                Trajectory(
                    episode_id=100 * g + member,
                    group_id=g,
                    member=member,
                    task=TASK,
                    start=(),
                    turns=tuple(turns),
                    stop_reason=StopReason.DONE,
                    outcome=rng.choice([0.0, 1.0, 0.5]),
                    success=True,
                )
            )
        groups.append(Group(id=g, task=TASK, state=GroupState.TAKEN, size=members, trajectories=tuple(played)))
    return groups


def routed(groups: list[Group]) -> list[Group]:
    """The same groups, with experts that an engine might have chosen: any two of four, in each of two layers."""
    rng = random.Random(7)

    def of(member: Trajectory) -> Trajectory:
        turns: list[Turn] = []
        size = 0
        for turn in member.turns:
            start, size = max(0, size - 1), size + len(turn.prompt_ids) + len(turn.token_ids)
            data = bytes(expert for _ in range(2 * (size - 1 - start)) for expert in rng.sample(range(4), 2))
            experts = RoutedExperts(start=start, layers=2, per_token=2, width=1, data=data)
            turns.append(replace(turn, experts=experts))
        return replace(member, turns=tuple(turns))

    return [replace(group, trajectories=tuple(map(of, group.trajectories))) for group in groups]


KINDS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo, reference, entropy": {"algo": GRPO(kl_weight=0.1, entropy_weight=0.05)},
    "grpo, moving reference": {"algo": GRPO(kl_weight=0.1, reference=0.5), "steps": 2},
    "grpo, episode ratios, rejection": {
        "algo": GRPO(importance="sequence", reject="geometric", reject_bounds=(0.5, 9.0))
    },
    "grpo, kept sets": {"cut": True},
    "grpo, observations": {"algo": GRPO(observation_weight=0.1)},
    "grpo, 2 minibatches, 2 epochs": {"train": {"minibatches": 2, "epochs": 2}},
    "ppo, own critic": {"algo": PPO(critic_warmup_steps=0)},
    "ppo, shared critic by turn": {"algo": PPO(critic="shared", level="turn", critic_warmup_steps=0)},
    "gspo": {"algo": GSPO()},
    "dapo": {"algo": DAPO()},
    "gigpo": {"algo": GiGPO()},
    "reinforce++": {"algo": Reinforce()},
    "lora": {"train": {"lora_rank": 4}, "steps": 2},
    "lora, reference": {"algo": GRPO(kl_weight=0.1), "train": {"lora_rank": 4}, "steps": 2},
    "mixture, replayed and balanced": {"mixed": True, "train": {"balance_weight": 0.1}},
    "gradient checkpointing": {"train": {"gradient_checkpointing": True}},
    "activations on the host": {"train": {"gradient_checkpointing": "offload"}},
}
"""What is compared by name: the algorithm, settings of [train], and steps (an adapter's first step moves only B)."""


def stepped(
    model: Path, device: str, dtype: str, groups: list[Group], *, algo: Any = None, train: Any = None, steps: int = 1
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """A step's report, gradient and update, as vectors on the CPU."""
    chosen = Train(warmup_steps=0, lr=1e-3, grad_clip=1e9, device=device, dtype=dtype, **(train or {}))
    learner = Learner(config_of(model, algo=algo or GRPO(), train=chosen).learner, model, device)
    gradients: list[Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        own = [p for group in optimizer.param_groups for p in group["params"]]
        gradients.extend(p.grad.detach().float().cpu().flatten() for p in own if p.grad is not None)

    for optimizer in learner.models.optimizers.values():
        optimizer.register_step_pre_hook(keep)

    def weights() -> Tensor:
        return torch.cat([p.detach().float().cpu().flatten() for p in learner.models.tensors().values()])

    before = weights()
    for _ in range(steps):
        gradients.clear()
        report = learner.step(groups, step_of=lambda _: 0)
    learner.hashes()
    return {"loss": report.loss, "norm": report.grad_norm}, torch.cat(gradients), weights() - before


def apart(one: Tensor, other: Tensor) -> float:
    """The norm of the difference over the norm."""
    return float((one.double() - other.double()).norm() / one.double().norm())


def parity(bench: Bench) -> Iterator[Row]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    dense = save_random(bench.work / "parity", "tiny", vocab=VOCAB, device="cpu")
    for name, kind in KINDS.items():
        settings = {key: value for key, value in kind.items() if key not in ("cut", "mixed")}
        groups = random_groups(2 if bench.tiny else 6, members=4, cut=kind.get("cut", False))
        model = dense
        if kind.get("mixed"):
            model, groups = save_mixture(bench.work / "parity-mixture", vocab=VOCAB), routed(groups)
        loss, gradient, update = stepped(model, "cpu", "float32", groups, **settings)
        dtypes = ("float32",) if bench.tiny else ("float32", "bfloat16")
        for dtype in dtypes:
            theirs, their_gradient, their_update = stepped(model, bench.device, dtype, groups, **settings)
            found = apart(gradient, their_gradient)
            agree = found <= FLOAT32_GRADIENT and abs(loss["loss"] - theirs["loss"]) <= 1e-4 * max(1, abs(loss["loss"]))
            yield {
                "kind": name,
                "dtype": dtype,
                "loss": loss["loss"],
                "on the device": theirs["loss"],
                "gradient norm": loss["norm"],
                "gradients apart": found,
                "updates apart": apart(update, their_update),
                "agree": agree if dtype == "float32" else "",
            }
            if dtype == "float32" and not agree:
                raise AssertionError(
                    f"{name}: gradients are {found:.1e} apart, losses {loss['loss']}, {theirs['loss']}"
                )
