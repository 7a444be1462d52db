"""What a step does to each of its tokens, as lines of JSON: one for each turn of each pass.

Owns the layout of the lines. It looks at passes (`Learner.on_pass`) and changes nothing: the loss is computed a second
time, on copies of what the models said.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import groupby
from typing import IO, Any, cast

import torch
from torch import Tensor

from agentrl.algos.algorithm import Algorithm, Outputs
from agentrl.learner.data.prefix_trees import Pack


class TokenDump:
    """Writes the passes of a step. A line has `pass`, `episode` and `turn`, the turn's scored `token_ids`, and lists of
    one value for each of these:

    logprob     in nats under the weights of this pass
    ratio       of these to the policy at the start of the step
    loss        the token's part of the policy's loss: its share times what its share is multiplied by
    gradient    derivative of the loss by the token's log-prob: below 0 it is made likelier
    and all columns of the algorithm, such as advantage, behaviour, proximal, weight, lag"""

    def __init__(self, file: IO[str], step: int) -> None:
        self._file, self._step = file, step
        self._passes = 0

    def __call__(self, pack: Pack, tokens: Mapping[str, Tensor], outputs: Outputs) -> None:
        loss_K, gradient_K = self._parts(pack.algo, tokens, outputs)
        logprob_K = outputs.logprobs_K.detach()
        columns: dict[str, list[Any]] = {
            "token_ids": pack.target_K.tolist(),
            "logprob": logprob_K.tolist(),
            "ratio": (logprob_K - tokens["proximal"]).exp().tolist(),
            "loss": loss_K.tolist(),
            "gradient": gradient_K.tolist(),
            **{name: tokens[name].tolist() for name in tokens if name not in ("episode", "turn")},
        }
        turns = list(zip(tokens["episode"].tolist(), tokens["turn"].tolist(), strict=True))
        at = 0
        for (episode, turn), same in groupby(turns):
            to = at + len(list(same))
            line = {name: _finite(values[at:to]) for name, values in columns.items()}
            self._file.write(json.dumps({"pass": self._passes, "episode": episode, "turn": turn, **line}) + "\n")
            at = to
        self._passes += 1

    def _parts(self, algo: Algorithm, tokens: Mapping[str, Tensor], outputs: Outputs) -> tuple[Tensor, Tensor]:
        """Of each token [K]: its part of the loss, and the derivative of the loss by its log-prob."""
        weight_K = tokens["weight"].detach().clone().requires_grad_()
        logprobs_K = outputs.logprobs_K.detach().clone().requires_grad_()
        values_K = None if outputs.values_K is None else outputs.values_K.detach()
        again = Outputs(logprobs_K=logprobs_K, entropy_K=outputs.entropy_K.detach(), values_K=values_K)
        with torch.enable_grad():
            total = algo.loss({**tokens, "weight": weight_K}, again, self._step).total
        if not total.requires_grad:  # a step that trains no policy
            return torch.zeros_like(weight_K), torch.zeros_like(weight_K)
        by_weight, by_logprob = torch.autograd.grad(
            total, (weight_K, logprobs_K), allow_unused=True, materialize_grads=True
        )
        return weight_K.detach() * by_weight, by_logprob


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(inner) for inner in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value
