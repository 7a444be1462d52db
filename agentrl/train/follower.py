"""A model that follows the policy: its trained parameters as they were, or as they were on average.

Owns a copy of these parameters, and no second model: a pass under it runs through the policy, which has the copy in the
place of its own meanwhile. Of an adapter that is the adapter alone. Never knows what the model is for.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from agentrl.algos.algorithm import Follows
from agentrl.errors import ModelError

_FILE = "follower.safetensors"


class Follower:
    """Begins as the policy is. The average of an adapter is that of its matrices A and B, each by itself."""

    def __init__(self, policy: Any, follows: Follows) -> None:
        """`policy` is the module that learns."""
        self._follows = follows
        self._leaders: dict[str, nn.Parameter] = {name: p for name, p in policy.named_parameters() if p.requires_grad}
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._leaders.items()}

    @contextmanager
    def in_place(self) -> Generator[None]:
        """Inside, the policy computes with this model's parameters. No gradient may be asked for across its ends."""
        own = {name: leader.data for name, leader in self._leaders.items()}
        try:
            for name, leader in self._leaders.items():
                leader.data = self.tensors[name]
            yield
        finally:
            for name, leader in self._leaders.items():
                leader.data = own[name]

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """After step number `step` (from 1)."""
        if step % self._follows.every:
            return
        for name, tensor in self.tensors.items():
            leader = self._leaders[name].detach()
            if self._follows.decay:
                tensor.lerp_(leader, 1 - self._follows.decay)
            else:
                tensor.copy_(leader)

    def save(self, folder: Path) -> None:
        """Write its parameters into a new folder."""
        folder.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / _FILE)

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises ModelError if it is not there or of another shape."""
        try:
            found = load_file(folder / _FILE)
        except (OSError, SafetensorError) as error:
            hint = "the run that wrote it had algo.reference_every = 0"
            raise ModelError(f"no moving model in {str(folder)!r} ({error}): perhaps {hint}") from error
        own = self.tensors
        wrong = own.keys() ^ found.keys() or {name for name in own if own[name].shape != found[name].shape}
        if wrong:
            raise ModelError(f"the model in {str(folder)!r} is another one: {sorted(wrong)[0]} (train.lora_rank)")
        for name, tensor in own.items():
            tensor.copy_(found[name])
