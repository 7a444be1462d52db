"""The learner: finished groups in, better weights and a report out.

Owns model, optimizer, schedule and the order of a step. Never knows the store, the engine or where groups come from.

A step:

    groups ─► rows with advantages (samples) ─► packs of prefix trees (packing)
           ─► per update: passes that add up gradients, clip, AdamW
           ─► StepReport

The proximal policy is the one at the start of the step. With one update per step (the default) it is the current one,
so its log-probs are those of the pass itself and the ratio is always 1; with several updates its log-probs are computed
before the first. Tokens whose advantage is 0 change nothing: rows that hold only such tokens are counted in the
normalisation but not computed, unless a KL or entropy term needs them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from agentrl.algos.corrections import importance_weights
from agentrl.algos.losses import clipped_surrogate, kl_penalty, policy_loss
from agentrl.checkpoint_folders import newest
from agentrl.config import RunConfig, Train
from agentrl.errors import RunFailed
from agentrl.records import Group
from agentrl.train import checkpoint, lora
from agentrl.train.checkpoint import CheckpointState
from agentrl.train.export import WeightFile, export_weights
from agentrl.train.model import PolicyModel
from agentrl.train.packing import Pack, packs
from agentrl.train.report import StepReport, Stopwatch, Tally, summarise
from agentrl.train.samples import GroupRows, StepOf, Undone, group_rows, weigh


class Learner:
    """Trains one policy. Invariants: `step_index` steps are in the weights; `trained` holds the ids of the episodes
    trained since the last checkpoint, step by step; between calls the model's gradients are empty."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        device: torch.device | str = "cpu",
        *,
        reference_dir: Path | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """`model_dir` holds the policy to start from, `reference_dir` the reference of a KL term (default: the same;
        after a restart from a checkpoint, name the initial policy's). If an adapter is trained over that same folder,
        the reference is the model with its adapter off, and no second one is loaded. `progress` is called
        whenever a part of long work is done: a pass, an update, a file. Raises ModelError."""
        self.config = config
        self._progress = progress
        torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.seed)
        self.model = self._load(model_dir, device, adapter=config.train if config.train.lora_rank else None)
        below = bool(config.train.lora_rank) and reference_dir in (None, model_dir)
        self.reference = None if below or not config.algo.kl_weight else self._load(reference_dir or model_dir, device)
        train = config.train
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=train.lr, betas=train.betas, weight_decay=train.weight_decay
        )
        self.step_index = 0
        self.checkpoint_step = 0
        self.trained: list[tuple[int, ...]] = []

    def _load(self, model_dir: Path, device: torch.device | str, adapter: Train | None = None) -> PolicyModel:
        train = self.config.train
        return PolicyModel(
            model_dir,
            device=device,
            dtype=torch.bfloat16 if train.dtype == "bfloat16" else torch.float32,
            checkpointing=train.gradient_checkpointing,
            compiled=train.compile,
            adapter=adapter,
        )

    # --- one step -----------------------------------------------------------------------------------------------

    def step(self, groups: Sequence[Group], *, step_of: StepOf, undone: Undone = lambda _: False) -> StepReport:
        """Train on `groups` once and count the step. `step_of` maps a weight version to its optimizer step, `undone`
        says whether a restart abandoned it.

        A step in which no token has an advantage leaves weights and optimizer as they are (`updated` is False).
        Raises RunFailed if a gradient is not finite; the weights are then those before that update."""
        watch = Stopwatch()
        algo, train = self.config.algo, self.config.train
        abandoned = cache(undone)
        ready = [
            group_rows(
                group,
                algo,
                step_of=step_of,
                step_now=self.step_index,
                max_lag=self.config.buffer.max_lag,
                undone=abandoned,
                keeps_kv=not self.config.engine.recompute_kv,
            )
            for group in groups
        ]
        updates = [self._lay(part) for part in self._minibatches([one for one in ready if not one.skipped])]
        watch.lap("pack")
        tally = Tally()
        several = len(updates) * train.epochs > 1
        proximal = [[self._proximal(pack) for pack in part] if several else None for part in updates]
        watch.lap("proximal")
        for _ in range(train.epochs):
            for part, proximal_of in zip(updates, proximal, strict=True):
                if part:
                    self._update(part, proximal_of, tally, watch)
        lr = self.optimizer.param_groups[0]["lr"]
        self.step_index += 1
        self.trained.append(tuple(one.episode_id for group in groups for one in group.trajectories if one.scored))
        return summarise(self.step_index, ready, tally, lr=lr, cap=algo.importance_cap, seconds=watch.seconds)

    def _minibatches(self, ready: Sequence[GroupRows]) -> list[list[GroupRows]]:
        """The step's groups divided into updates; shuffled if there are several, the same way under the same seed."""
        n = min(self.config.train.minibatches, max(len(ready), 1))
        order = list(ready)
        if n > 1:
            random.Random(f"{self.config.seed}/{self.step_index}").shuffle(order)
        return [order[index::n] for index in range(n)]

    def _lay(self, part: Sequence[GroupRows]) -> list[Pack]:
        """The passes of one update, without rows that cannot move the weights."""
        algo = self.config.algo
        all_needed = algo.kl_weight > 0 or algo.entropy_weight > 0
        rows = [[row for row in group if all_needed or row.has_signal] for group in weigh(part, algo.normalise)]
        return packs(rows, self.config.train.tokens_per_batch, self.model.device)

    @torch.no_grad()
    def _proximal(self, pack: Pack) -> Tensor:
        self._progress()
        return self.model.logprobs(pack, temperature=self.config.rollout.temperature)[0]

    @torch.no_grad()
    def _reference(self, pack: Pack) -> Tensor:
        """Log-probs of the reference policy of the KL term."""
        temperature = self.config.rollout.temperature
        if self.reference is not None:
            return self.reference.logprobs(pack, temperature=temperature)[0]
        with lora.switched_off(self.model.module):
            return self.model.logprobs(pack, temperature=temperature)[0]

    def _update(self, part: Sequence[Pack], proximal: Sequence[Tensor] | None, tally: Tally, watch: Stopwatch) -> None:
        """One optimizer update from the summed gradients of its passes."""
        train = self.config.train
        loss = 0.0
        for index, pack in enumerate(part):
            pack_loss = self._loss(pack, proximal[index] if proximal is not None else None, tally)
            watch.lap("forward")
            self._progress()
            pack_loss.backward()
            watch.lap("backward")
            self._progress()
            loss += float(pack_loss.detach())
        parameters = self.model.parameters()
        grad_norm = float(nn.utils.clip_grad_norm_(parameters, train.grad_clip))
        if not math.isfinite(grad_norm):
            self.optimizer.zero_grad()
            raise RunFailed(f"step {self.step_index + 1}: the gradient is not finite (loss {loss}); lower train.lr")
        for group in self.optimizer.param_groups:
            group["lr"] = train.lr * min(1.0, (self.step_index + 1) / (train.warmup_steps + 1))
        self.optimizer.step()
        self.optimizer.zero_grad()
        tally.updated(loss, grad_norm)
        watch.lap("optimizer")
        self._progress()

    def _loss(self, pack: Pack, proximal_K: Tensor | None, tally: Tally) -> Tensor:
        """A pass's part of the update's loss."""
        algo, temperature = self.config.algo, self.config.rollout.temperature
        logprobs_K, entropy_K = self.model.logprobs(pack, temperature=temperature, entropy_grad=algo.entropy_weight > 0)
        if proximal_K is None:
            proximal_K = logprobs_K.detach()
        surrogate_K, clipped_K = clipped_surrogate(
            logprobs_K, proximal_K, pack.columns["advantage"], clip_low=algo.clip_low, clip_high=algo.clip_high
        )
        importance_K = (
            importance_weights(proximal_K, pack.columns["behaviour"], algo.importance_cap)
            if algo.importance == "token"
            else torch.ones_like(proximal_K)
        )
        kl_K = None
        if algo.kl_weight > 0:
            kl_K = kl_penalty(logprobs_K, self._reference(pack), algo.kl_gradient)
        tally.passed(pack, proximal_K, clipped_K, entropy_K)
        return policy_loss(
            surrogate_K,
            pack.columns["weight"],
            importance_K,
            kl_T=kl_K,
            kl_weight=algo.kl_weight,
            entropy_T=entropy_K if algo.entropy_weight > 0 else None,
            entropy_weight=algo.entropy_weight,
        )

    # --- what outlives the process --------------------------------------------------------------------------------

    def export(self, path: Path, *, dtype: torch.dtype | None = None) -> WeightFile:
        """Write the weights for an engine: one safetensors file, whole or not at all. An adapter is merged into it."""
        return export_weights(self.model.module, path, dtype=dtype, metadata={"step": str(self.step_index)})

    def export_adapter(self, folder: Path) -> Path:
        """Write the adapter alone for an engine that has the weights below: a folder in PEFT's format."""
        return lora.save(self.model.module, folder)

    def score(self, token_ids: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[float, ...]:
        """Log-probs of `token_ids[1:]` under the current weights rounded to `dtype`, in nats at temperature 1, for the
        canary."""
        return self.model.score(token_ids, dtype)

    def save(self, root: Path) -> Path:
        """Write a checkpoint of this step under `root`; the episodes in `trained` are recorded in it, then forgotten.
        Where nothing was trained since the last one, that one is returned."""
        last = newest(root)
        if last is not None and self.checkpoint_step == self.step_index and not self.trained:
            return last
        state = CheckpointState(step=self.step_index, previous_step=self.checkpoint_step, episodes=tuple(self.trained))
        folder = checkpoint.save(
            root,
            state,
            module=self.model.module,
            model_folder=self.model.folder,
            optimizer=self.optimizer.state_dict(),
            keep=self.config.train.keep_checkpoints,
            progress=self._progress,
        )
        self.checkpoint_step, self.trained = self.step_index, []
        return folder

    def load(self, folder: Path) -> CheckpointState:
        """Go on from a checkpoint: weights, optimizer, random state and step. The reference stays what it was."""
        self.model.load_weights(folder)
        state = checkpoint.load(folder, self.optimizer)
        self.step_index = self.checkpoint_step = state.step
        self.trained = []
        return state
