"""Trained weights that a pass holds in bfloat16, and the float32 numbers behind them.

Owns which parameter has a master, and that both are loaded together. A master is what an optimizer updates, a file
holds and a hash is of; the parameter is its master rounded. Never knows optimizers.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from agentrl.errors import ConfigError
from agentrl.learner.parallel.fsdp import load_state_dict


def give(parameter: nn.Parameter, whole: Tensor | None) -> None:
    """Make a trained parameter one of `whole`, its master, if there is one; its gradient is float32. Raises ConfigError
    if this torch cannot."""
    if not hasattr(parameter, "grad_dtype"):
        correction = f"torch {torch.__version__} has no gradients wider than weights: pip install --upgrade torch"
        raise ConfigError("train.weights", "bfloat16_alone" if whole is None else "bfloat16", correction)
    # Gradients of several passes are added up in it: in bfloat16 the later ones would vanish in the sum.
    setattr(parameter, "grad_dtype", torch.float32)  # noqa: B010  (torch leaves it untyped)
    # On the parameter itself: whoever has the parameter has its master, without a table that would have to be handed
    # through all that is between a pass and an update.
    setattr(parameter, "_master", whole)  # noqa: B010


def master(parameter: Tensor) -> Tensor:
    """The float32 numbers of a parameter: most are their own."""
    own_master = getattr(parameter, "_master", None)
    return parameter if own_master is None else own_master


def move(module: nn.Module) -> None:
    """Bring masters to where their parameters are."""
    for parameter in module.parameters():
        if (own_master := master(parameter)) is not parameter:
            give(parameter, own_master.to(parameter.device))


def masters(module: nn.Module) -> dict[str, Tensor]:
    """The masters of a module's parameters, by name."""
    return {
        parameter_name: master(parameter)
        for parameter_name, parameter in module.named_parameters()
        if master(parameter) is not parameter
    }


def state(module: nn.Module) -> dict[str, Any]:
    """The state of a module with masters in the place of what they are rounded to."""
    return module.state_dict() | masters(module)


@torch.no_grad()
def load(module: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Load what `state` returned, of a module with masters or without. Raises RuntimeError if it does not fit."""
    load_state_dict(module, whole)
    for parameter_name, own_master in masters(module).items():
        own_master.copy_(whole[parameter_name])
