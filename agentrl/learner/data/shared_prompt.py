"""The stem of a group that is larger than a pass: computed once, and not in every pass of the group.

Owns what passes a layer's keys and values on, and how gradients come back. Never knows models or losses.

    P Q R  is the stem of  P Q R S A B   P Q R S C D   P Q R S E F      where S predicts A, C and E

    forward    P Q R  by itself: its graph is kept, and keys and values of each layer are lent to the passes
    passes     S A B  then  S C D  then  S E F: each sees what was lent before its own keys and values, and its backward
               pass leaves their gradients here, added up in float32
    backward   once through P Q R, from these sums

A stem ends before the first node that predicts, so losses depend on it through its keys and values; the balance loss of
a mixture also through the probabilities of its experts. In that loss, a sum over tokens, one counts once for each row
(see `agentrl.learner.moe.routers`): so the stem lends the sums of these probabilities too, and a pass counts them for
as many rows as it has.

Only what all passes of a group begin with is kept; what some of them share beyond it is computed in each. A pass has no
more nodes than the budget says with the stem counted, so as many as ever wait for gradients at any time. Beyond that a
stem needs room for these sums, and, if layers are computed again, for its keys and values.

Two kinds of rotary positions ("longrope", "dynamic") have frequencies that depend on the longest row that a pass, or an
earlier one, had (`stretched`): rows of such models are computed apart, each from the model's own frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from agentrl.learner.moe.routers import RouterRecord


# These kinds of rotary embeddings choose their frequencies by the longest row that the module has seen. Over trees,
# and with a stem computed apart, "the longest row" is another number than in the engine, and all log-probs would be
# off by a little.
def stretched(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The parts of a model that rotate so, and the kind of each."""
    for submodule in module.modules():
        rope_kind: Any = getattr(submodule, "rope_type", None)
        for kind_name in cast("dict[str, Any]", rope_kind).values() if isinstance(rope_kind, dict) else [rope_kind]:
            if isinstance(kind_name, str) and (kind_name == "longrope" or "dynamic" in kind_name):
                yield submodule, kind_name


def restart(module: nn.Module) -> None:
    """Forget the longest row so far."""
    for submodule, _ in stretched(module):
        for buffer_name, buffer in list(submodule.named_buffers(recurse=False)):
            if buffer_name.endswith("original_inv_freq"):
                submodule.register_buffer(
                    buffer_name.replace("original_inv_freq", "inv_freq"), buffer, persistent=False
                )
        for buffer_name in [
            buffer_name for buffer_name in vars(submodule) if buffer_name.endswith("max_seq_len_cached")
        ]:
            setattr(submodule, buffer_name, submodule.original_max_seq_len)


# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)


class Roots:
    """Keys and values of a stem by layer. `keep` and `before` are an `attention.Gather` each. `heard` records the
    routers' choices for its tokens, each counted once."""

    def __init__(self) -> None:
        self.heard = RouterRecord()
        self._lent: dict[str, tuple[_Lent, _Lent]] = {}
        self._masses: list[_Lent] = []
        self._end: Tensor | None = None

    def keep(self, key: Tensor, value: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Lend a layer's keys and values, in the stem's own pass. A backward pass may compute a layer again."""
        # With gradient checkpointing a layer runs again in the backward pass. Lent anew, the first loan's gradients
        # would go to a tensor that no graph knows.
        if name not in self._lent:
            self._lent[name] = _Lent(key), _Lent(value)
        return key, value

    def before(self, key: Tensor, value: Tensor, name: str) -> tuple[Tensor, Tensor]:
        """Put the stem's keys and values before a pass's own, in a pass after the stem's."""
        first_key, first_value = self._lent[name]
        return torch.cat([first_key.leaf, key], 2), torch.cat([first_value.leaf, value], 2)

    def hear(self, heard: RouterRecord) -> None:
        """Keep the routers' record of the stem's own pass."""
        lent_masses = {mixture: _Lent(mass_E) for mixture, mass_E in heard.mass.items()}
        self._masses = list(lent_masses.values())
        self.heard = replace(heard, mass={mixture: lent_mass.leaf for mixture, lent_mass in lent_masses.items()})

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors that are lent, and of the sums of their gradients."""
        lent_tensors = [*chain(*self._lent.values()), *self._masses]
        return sum(
            lent_tensor.made.nbytes + sum(gradient_sum.nbytes for gradient_sum in lent_tensor.sums)
            for lent_tensor in lent_tensors
        )

    def end(self, output: Tensor) -> None:
        """Keep the output of the stem's own pass. FSDP gathers a layer for its backward pass when a gradient comes to
        its output, in the last layer too: there it is one of zeros."""
        self._end = output

    def backward(self) -> None:
        """Add the gradients of all passes to those of the stem's parameters; once."""
        trained_loans = [
            trained_loan for trained_loan in (*chain(*self._lent.values()), *self._masses) if trained_loan.sums
        ]
        if not trained_loans:
            return  # nothing is trained
        graph_tensors = [trained_loan.made for trained_loan in trained_loans]
        gradient_sums = [trained_loan.sums[0].to(trained_loan.made.dtype) for trained_loan in trained_loans]
        if self._end is not None and self._end.requires_grad:
            graph_tensors.append(self._end)
            gradient_sums.append(torch.zeros_like(self._end))
        torch.autograd.backward(graph_tensors, gradient_sums)


class _Lent:
    """A tensor, and `leaf`: the same numbers, cut off from its graph. `sums` has the sum of the leaf's gradients, once
    there is one."""

    def __init__(self, made: Tensor) -> None:
        self.made, self.leaf, self.sums = made, made.detach(), list[Tensor]()
        if made.requires_grad:
            # Cut off from its graph: a backward pass of one pass would otherwise go through the whole stem each time,
            # and free its graph for the next.
            self.leaf.requires_grad_().register_post_accumulate_grad_hook(partial(_add, self.sums))


def _add(sums: list[Tensor], leaf: Tensor) -> None:
    assert leaf.grad is not None
    if sums:
        sums[0] += leaf.grad
    else:
        # In float32, whatever the pass computes in: sixteen passes in bfloat16 would lose the small gradients in the
        # sum of the large ones (`test_gradients_of_what_was_lent_add_up_in_float32`).
        sums.append(leaf.grad.float())
    leaf.grad = None


class Names:
    """A gather that changes nothing, and hears which layers ask."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def __call__(self, key: Tensor, value: Tensor, name: str) -> tuple[Tensor, Tensor]:
        self.heard.append(name)
        return key, value


def can_be_lent(module: nn.Module, layers: Sequence[str]) -> bool:
    """Whether a stem of this model may be computed by itself. `layers` are those of one pass by their names, which must
    tell them apart. Positions must not depend on the longest row."""
    return next(stretched(module), None) is None and len(set(layers)) == len(layers)
