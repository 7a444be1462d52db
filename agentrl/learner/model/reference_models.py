"""A model that follows the policy: its trained parameters as they were, or as they were on average.

Owns a copy of these parameters, and no second model: a pass under it runs through the policy, which has the copy in the
place of its own meanwhile. Of an adapter that is the adapter alone. Never knows what the model is for.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from agentrl.algos.algorithm import Follows
from agentrl.errors import ModelError
from agentrl.learner.optimizers.master_weights import master
from agentrl.learner.parallel.fsdp import fill, is_sharded, local


class Follower:
    """Begins as the policy is. The average of an adapter is that of its matrices A and B, each by itself."""

    file = "follower.safetensors"

    def __init__(self, policy: Any, follows: Follows) -> None:
        """`policy` is the module that learns."""
        self._follows = follows
        self._leaders: dict[str, nn.Parameter] = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self._tensors: dict[str, Tensor] = {
            name: master(p).detach().float().clone() for name, p in self._leaders.items()
        }

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Inside, the policy computes with this model's parameters. No gradient may be asked for across its ends."""
        narrow = {name: one.data for name, one in self._leaders.items() if one.dtype != torch.float32}
        self._exchange(narrow)
        for name in narrow:
            leader = self._leaders[name]
            leader.data = self._tensors[name].to(leader.device, leader.dtype)
        try:
            yield
        finally:
            self._exchange(narrow)
            for name, data in narrow.items():
                self._leaders[name].data = data

    @torch.no_grad()
    def _exchange(self, but: Collection[str]) -> None:
        """The policy gets this model's parameters, and this model the policy's, `but` for some. FSDP reads shards where
        they are."""
        for name, leader in self._leaders.items():
            own = self._tensors[name]
            if name in but:
                continue
            if is_sharded(leader):
                its, ours = local(leader), local(own)
                saved = its.clone()
                its.copy_(ours)
                ours.copy_(saved)
            else:
                self._tensors[name], leader.data = leader.data, own

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """After step number `step` (from 1)."""
        if step % self._follows.every:
            return
        for name, tensor in self._tensors.items():
            leader = master(self._leaders[name]).detach()
            if self._follows.decay:
                tensor.lerp_(leader.float(), 1 - self._follows.decay)
            else:
                tensor.copy_(leader)

    def tensors(self) -> dict[str, Tensor]:
        """Its parameters by name, not copied."""
        return dict(self._tensors)

    def load(self, folder: Path) -> None:
        """Read its `tensors` from the file in `folder`. Raises ModelError if it is not there or of another shape."""
        try:
            found = load_file(folder / self.file)
        except (OSError, SafetensorError) as error:
            hint = f"the run that wrote it had algo.{folder.name.partition('.')[0]}_every = 0"
            raise ModelError(f"no moving model in {str(folder)!r} ({error}): perhaps {hint}") from error
        own = self._tensors
        wrong = own.keys() ^ found.keys() or {name for name in own if own[name].shape != found[name].shape}
        if wrong:
            raise ModelError(f"the model in {str(folder)!r} is another one: {sorted(wrong)[0]} (train.lora_rank)")
        for name, tensor in own.items():
            fill(tensor, found[name])
