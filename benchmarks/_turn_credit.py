"""Turn credit beside credit by the outcome alone, on `agentrl/Combination-v0`: the real learner and the real sampler,
in one process and in turns, so that a run's steps do not depend on what else the machine does."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from agentrl import config
from agentrl.engine.embedded.architecture import read_architecture
from agentrl.engine.embedded.batching import Batcher, BatchRequest, Emission
from agentrl.engine.embedded.model import EmbeddedModel, KVStore, read_weights
from agentrl.learner.learner import Learner
from agentrl.models.resolve import model_dir
from agentrl.records import Group, GroupState, SamplingParams, Step, StopReason, Task, Trajectory, Turn
from agentrl_environments.combination import Pair, answer, opening, shown

GROUPS, GROUP_SIZE, DIALS = 2, 8, 8
MAX_TOKENS, LENGTH = 2, 160
RUN_FILE = Path(__file__).resolve().parent.parent / "examples" / "tiny_locksmith.toml"


@dataclass(slots=True)
class Sampler:
    """Plays episodes with the embedded engine's own batcher."""

    folder: Path
    seed: int
    batcher: Batcher = field(init=False)
    tokenizer: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        architecture = read_architecture(self.folder)
        slots = 2 * GROUPS * GROUP_SIZE
        model = EmbeddedModel(architecture, read_weights(self.folder), length=LENGTH)
        kv = KVStore(architecture, slots, LENGTH)
        self.batcher = Batcher(model, kv, max_batch=GROUPS * GROUP_SIZE, seed=self.seed)
        self.tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    def load(self, weights: dict[str, torch.Tensor], version: int) -> None:
        self.batcher.load(weights, version)

    def groups(self, step: int, rng: random.Random) -> list[Group]:
        """Groups for one step, all their turns sampled; an episode's reward of a turn is that of the environment."""
        locks = [[(rng.randrange(10), rng.randrange(10)) for _ in range(DIALS)] for _ in range(GROUPS)]
        sums = [lock for lock in locks for _ in range(GROUP_SIZE)]
        contexts: list[list[int]] = [[] for _ in sums]
        turns: list[list[Turn]] = [[] for _ in sums]
        for dial in range(DIALS):
            prompts = [self._prompt(lock, dial, own) for lock, own in zip(sums, turns, strict=True)]
            for context, prompt in zip(contexts, prompts, strict=True):
                context += prompt
            sampled = self._sample(contexts, f"{step}-{dial}")
            for lock, context, own, prompt, emission in zip(sums, contexts, turns, prompts, sampled, strict=True):
                own.append(self._turn(dial, lock[dial], prompt, emission))
                context += emission.token_ids
        return [
            group_of(step * GROUPS + at, turns[at * GROUP_SIZE : (at + 1) * GROUP_SIZE]) for at in range(len(locks))
        ]

    def _prompt(self, lock: list[Pair], dial: int, own: list[Turn]) -> list[int]:
        said = shown(lock[dial]) if dial else opening(lock)
        ended = not own or own[-1].finish == "stop"
        before = "" if not own else "\n" if ended else "<|im_end|>\n"
        return self.tokenizer.encode(
            f"{before}<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
        ).ids

    def _sample(self, contexts: list[list[int]], name: str) -> list[Emission]:
        found: dict[int, Emission] = {}
        (eos,) = self.tokenizer.encode("<|im_end|>", add_special_tokens=False).ids
        sampling = SamplingParams(max_tokens=MAX_TOKENS, stop_token_ids=(eos,))
        for at, context in enumerate(contexts):
            sink = partial(found.__setitem__, at)
            self.batcher.submit(BatchRequest(id=f"{name}-{at}", tokens=[*context], sampling=sampling, sink=sink))
        while self.batcher.busy:
            self.batcher.step()
        return [found[at] for at in range(len(contexts))]

    def _turn(self, dial: int, pair: Pair, prompt: list[int], sampled: Emission) -> Turn:
        text = self.tokenizer.decode(sampled.token_ids, skip_special_tokens=True)
        right = text.strip() == answer(pair)
        return Turn(
            index=dial,
            parent=dial - 1 if dial else None,
            prompt_ids=tuple(prompt),
            token_ids=tuple(sampled.token_ids),
            logprobs=tuple(sampled.logprobs),
            spans=tuple(sampled.spans),
            finish=sampled.finish or "stop",
            text=text,
            step=Step(observation=(), reward=float(right), terminated=dial == DIALS - 1),
        )


def group_of(id: int, members: list[list[Turn]]) -> Group:
    task = Task(index=id, env="agentrl/Combination-v0", seed=id)
    trajectories: list[Trajectory] = []
    for member, turns in enumerate(members):
        success = all(turn.step is not None and turn.step.reward > 0 for turn in turns)
        trajectories.append(
            Trajectory(
                episode_id=id * GROUP_SIZE + member,
                group_id=id,
                member=member,
                task=task,
                start=(),
                turns=tuple(turns),
                stop_reason=StopReason.DONE,
                outcome=float(success),
                success=success,
            )
        )
    return Group(id=id, task=task, state=GroupState.TAKEN, size=len(members), trajectories=tuple(trajectories))


def learn(seed: int, steps: int, settings: list[str]) -> list[float]:
    """Train with `settings` over those of the example's run file; the success rate of each step's episodes, which were
    sampled by the weights that the step before made."""
    chosen = config.load(RUN_FILE, [f"seed={seed}", "buffer.max_lag=0", f"train.steps={steps}", *settings])
    folder = model_dir(chosen.model)
    learner, sampler, rng = Learner(chosen.learner, folder), Sampler(folder, seed), random.Random(seed)
    names = set(read_architecture(folder).shapes())
    rates: list[float] = []
    for step in range(steps):
        groups = sampler.groups(step, rng)
        played = [bool(member.success) for group in groups for member in group.trajectories]
        rates.append(sum(played) / len(played))
        learner.step(groups, step_of=lambda version: version)
        state: dict[str, Any] = learner.model.module.state_dict()
        sampler.load({name: value.detach().clone() for name, value in state.items() if name in names}, step + 1)
    return rates


def smoothed(rates: list[float], window: int) -> list[float]:
    """The mean of the last `window` rates at each step (fewer at the start)."""
    return [sum(rates[max(0, at + 1 - window) : at + 1]) / min(window, at + 1) for at in range(len(rates))]


def steps_until(rates: list[float], level: float, window: int) -> int | None:
    """After how many steps the smoothed rate is at `level` for the first time; None if it never is."""
    found = smoothed(rates, window)
    return next((at + 1 for at in range(window - 1, len(found)) if found[at] >= level), None)
