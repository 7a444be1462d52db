"""The roles of a model's parameters: which are matrices of linear maps, which embeddings, which neither.

Weight decay and Muon are for matrices. The number of dimensions does not tell them apart: the biases of fused experts
have two dimensions, as have norms over heads, the decay rates of state-space layers, and tables of positions. A
parameter is therefore a matrix only if its module and name say that something is multiplied by it. A parameter of an
unknown kind is none: to leave it without decay, with AdamW, is safe.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from torch import nn

_LINEAR: Final = (nn.Linear, nn.modules.conv._ConvNd, nn.Bilinear)  # pyright: ignore[reportPrivateUsage]
_NORM, _EMBEDDING = re.compile("norm", re.IGNORECASE), re.compile("embedding", re.IGNORECASE)
_MATRIX: Final = re.compile(r"(.*_)?(weight|proj)|(hc_)?fn|lora_.*")
"""Names of matrices: of the weight of a layer or router, of fused experts, of hyper-connections, of adapters."""
_ATTENTION: Final = frozenset("qkvor")  # XLNet's matrices, which are its attention's own


@dataclass(frozen=True, slots=True)
class Roles:
    """Ids of parameters with two dimensions or more. `embeddings` are tables that tokens or positions are looked up in;
    `others` are neither these nor matrices."""

    embeddings: frozenset[int]
    others: frozenset[int]


def roles_of(modules: Iterable[nn.Module]) -> Roles:
    """The roles of all parameters of some models."""
    embedding_ids, other_ids = set[int](), set[int]()
    for submodule, parameter_name, parameter in _parameters(modules):
        if is_embedding(submodule, parameter_name):
            embedding_ids.add(id(parameter))
        elif not is_matrix(submodule, parameter_name):
            other_ids.add(id(parameter))
    return Roles(frozenset(embedding_ids), frozenset(other_ids - embedding_ids))


def is_embedding(module: nn.Module, name: str) -> bool:
    """Whether the parameter `name` of a module is a table whose rows are looked up."""
    if isinstance(module, nn.Embedding):
        return True
    is_linear = isinstance(module, _LINEAR)
    return name == "weight" and not is_linear and bool(_EMBEDDING.search(type(module).__name__))


def is_matrix(module: nn.Module, name: str) -> bool:
    """Whether the parameter `name` of a module is a matrix of a linear map."""
    if isinstance(module, _LINEAR):
        return name == "weight"
    class_name = type(module).__name__
    # By the class's name, since every family has a norm class of its own. A norm's weight is near 1 for a reason:
    # decay would pull it to 0.
    if _NORM.search(class_name):
        return False
    return bool(_MATRIX.fullmatch(name)) or (name in _ATTENTION and "Attention" in class_name)


def _parameters(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for root_module in modules:
        for module_path, submodule in root_module.named_modules():
            for own_name, parameter in submodule.named_parameters(recurse=False):
                if parameter.dim() > 1:
                    in_table = isinstance(submodule, nn.ParameterDict)  # PEFT's, by adapter: the name is one level up
                    yield submodule, module_path.rpartition(".")[2] if in_table else own_name, parameter
