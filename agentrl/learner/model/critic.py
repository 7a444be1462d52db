"""The critic: the value of the text before each scored token, by a linear head on a language model's last layer.

Owns the head, and the trunk if it is the critic's own. Never knows returns, losses or optimizers.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from agentrl.errors import ModelError
from agentrl.learner.data.prefix_trees import Pack
from agentrl.learner.data.shared_prompt import Roots
from agentrl.learner.model.policy import PolicyModel
from agentrl.learner.parallel.fsdp import fill


class Critic:
    """Values of a pack's tokens. A trunk of its own begins as the policy does; a shared one is the policy, and learns
    from both losses. The head begins at 0, so that a new critic says 0 of everything."""

    file = "critic.safetensors"

    def __init__(self, trunk: PolicyModel, *, own: bool) -> None:
        """If it is its `own`, `trunk` needs no output layer."""
        self._trunk, self.own = trunk, own
        self.head = nn.Linear(trunk.module.config.get_text_config().hidden_size, 1, device=trunk.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @property
    def trunk(self) -> PolicyModel:
        """The model below the head: the critic's own, or the policy."""
        return self._trunk

    def values(self, pack: Pack, hidden_PH: Tensor, roots: Roots | None = None) -> Tensor:
        """The value [K] of the text before each scored token. `hidden_PH` is the input of the policy's output layer, of
        those that this rank has; a trunk of its own runs a pass here, after the `roots` that it made."""
        hidden_PH = self._trunk.hidden(pack, roots) if self.own else hidden_PH
        values_P = self._trunk.joined(pack, self.head(hidden_PH.float())[:, 0], "values")
        return values_P[pack.predictor_K]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that only the critic trains."""
        return [*(self._trunk.parameters() if self.own else ()), *self.head.parameters()]

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Read its `tensors` from the file in `folder`. Raises ModelError if it is not there or of another shape."""
        try:
            tensors = load_file(folder / self.file)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"no critic in {str(folder)!r} ({error}): was another algo.kind trained?") from error
        own = self.tensors()
        wrong = own.keys() ^ tensors.keys() or {name for name in own if own[name].shape != tensors[name].shape}
        if wrong:
            raise ModelError(
                f"the critic in {str(folder)!r} is another one: {sorted(wrong)[0]} (algo.critic, train.lora_rank)"
            )
        for name, tensor in own.items():
            fill(tensor, tensors[name])

    def tensors(self) -> dict[str, Tensor]:
        """The parameters that only the critic trains by name, not copied."""
        trunk = self._trunk.module.named_parameters() if self.own else ()
        named = {f"trunk.{name}": p for name, p in trunk if p.requires_grad}
        return {**named, **{f"head.{name}": p for name, p in self.head.named_parameters()}}
