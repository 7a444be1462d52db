"""LoRA (Hu et al., 2021): a small trained adapter over frozen weights, in the format of PEFT.

Owns how an adapter is put into a model, switched off, written, read back, and merged into the weights below. Never
knows what the adapter is trained for, nor which version it becomes. `peft` is imported only when there is an adapter.

Roles may have adapters of their own, of the same shape, beside the one of all others: `activate` says which one a pass
runs with. A folder holds the one of all others, and in a folder of its name that of each role, as PEFT writes several.

`train.lora_targets` chooses parts: linear layers, or parameters, since transformers keeps the experts of a layer as one
stack [E, out, in], often gate and up together; many model folders have one matrix per expert. A target may use either's
names. Each expert of a mixture has matrices A and B of its own, of the adapter's rank. PEFT keeps those of a layer side
by side; a file names them by expert if the model's folder does, as engines and PEFT read them. If the model keeps an
expert's gate and up as one matrix, they share one A.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.modules.conv import _ConvNd  # pyright: ignore[reportPrivateUsage]
from transformers.core_model_loading import revert_weight_conversion

from agentrl.config.train import Train
from agentrl.errors import ModelError
from agentrl.learner.parallel.fsdp import fill, is_sharded, like, whole

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)


_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of what chooses, or weighs, experts: left alone by default, for a moved choice undoes what experts learned."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The matrix that a model folder calls `name`: rows `start` to `stop` of expert `expert` of a stack."""

    name: str
    expert: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """A linear layer called `name`, or the parameter `parameter` of the module `name`."""

    name: str
    parameter: str = ""
    pieces: tuple[Piece, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """The names that a target may use for it, without expert numbers."""
        own_names = {self.name, f"{self.name}.{self.parameter}"} if self.parameter else {self.name}
        return frozenset(own_names | set(self.divided))

    @property
    def divided(self) -> tuple[str, ...]:
        """The names of its pieces, without expert numbers."""
        return tuple(dict.fromkeys(re.sub(r"\.\d+(?=\.[^.]+$)", "", piece.name) for piece in self.pieces))

    @property
    def routes(self) -> bool:
        return not _ROUTERS.isdisjoint(self.name.split("."))


def choose(module: Any, targets: Sequence[str]) -> list[LoraTarget]:
    """The parts whose names end with one of `targets`; without targets, all but routers. The embedding and the output
    layer are no parts. Raises ValueError for a target that names no part, or half of one."""
    model_parts = list(_parts(module))
    if not targets:
        return [model_part for model_part in model_parts if not model_part.routes]
    if unknown_targets := [
        target for target in targets if not any(_named(model_part.names, target) for model_part in model_parts)
    ]:
        raise ValueError(f"the model has no layer called {unknown_targets[0]!r}")
    chosen_parts = [
        model_part for model_part in model_parts if any(_named(model_part.names, target) for target in targets)
    ]
    for model_part in chosen_parts:
        whole_names = model_part.names - set(model_part.divided)
        is_targeted = [any(_named({piece_name}, target) for target in targets) for piece_name in model_part.divided]
        # Gate and up are one tensor with one A: an adapter for half of it could not be written as a file that PEFT
        # reads.
        if any(is_targeted) and not all(is_targeted) and not any(_named(whole_names, target) for target in targets):
            quoted_names = " and ".join(repr(piece_name.rpartition(".")[2]) for piece_name in model_part.divided)
            raise ValueError(f"{model_part.name}.{model_part.parameter} is one tensor: name {quoted_names}, or neither")
    return chosen_parts


def pieces(module: Any, stacks: Mapping[str, torch.Size]) -> dict[str, tuple[Piece, ...]]:
    """The pieces that the model's folder divides parameters of these names and shapes [E, out, in] into; empty if it
    keeps the stack. Transformers divides numbered rows to find them, so no architecture needs to be known here."""
    row_numbers: dict[str, torch.Tensor] = {}
    stack_of_row: list[str] = []
    pieces_by_stack: dict[str, list[Piece]] = {tensor_name: [] for tensor_name in stacks}
    with unset_fake_temporarily():  # numbers of rows, also for a model that has none
        for tensor_name, (expert_count, output_count, _) in stacks.items():
            # A stack whose numbers are their own row: transformers divides it as it would divide weights, and what
            # comes out says which row went where. A table for each architecture would be longer, and wrong for the
            # next one.
            row_numbers[tensor_name] = (
                (len(stack_of_row) + torch.arange(expert_count * output_count))
                .view(expert_count, output_count, 1)
                .expand(-1, -1, 2)
            )
            stack_of_row += [tensor_name] * (expert_count * output_count)
        for tensor_name, piece_numbers in revert_weight_conversion(module, row_numbers).items():
            if piece_numbers.ndim != 2:
                continue
            stack_name = stack_of_row[first_number := int(piece_numbers[0, 0])]
            expert_index, first_row = divmod(
                first_number - int(row_numbers[stack_name][0, 0, 0]), stacks[stack_name][1]
            )
            pieces_by_stack[stack_name].append(
                Piece(tensor_name.removesuffix(".weight"), expert_index, first_row, first_row + len(piece_numbers))
            )
    return {
        tensor_name: tuple(sorted(stack_pieces, key=lambda piece: (piece.expert, piece.start)))
        for tensor_name, stack_pieces in pieces_by_stack.items()
    }


def _parts(module: Any) -> Iterator[LoraTarget]:
    output_layer = module.get_output_embeddings()
    stack_shapes: dict[tuple[str, str], torch.Size] = {}
    for module_name, submodule in module.named_modules():
        if isinstance(submodule, nn.Linear):
            if submodule is not output_layer:
                yield LoraTarget(module_name)
            continue
        for parameter_name, own_tensor in submodule.named_parameters(recurse=False):
            if own_tensor.ndim == 3 and not isinstance(submodule, _ConvNd):
                stack_shapes[module_name, parameter_name] = own_tensor.shape
            elif own_tensor.ndim == 2 and LoraTarget(module_name).routes:
                yield LoraTarget(module_name, parameter_name)
    pieces_by_stack = pieces(
        module, {".".join(stack_key): stack_shape for stack_key, stack_shape in stack_shapes.items()}
    )
    for module_name, parameter_name in stack_shapes:
        yield LoraTarget(module_name, parameter_name, pieces_by_stack[f"{module_name}.{parameter_name}"])


def _named(names: frozenset[str] | set[str], target: str) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (peft and transformers leave parts of their signatures untyped)


WEIGHTS = "adapter_model.safetensors"
_NAME = "default"  # PEFT's name for an adapter without one
_PREFIX = "base_model.model."  # PEFT's names begin so, as it wraps the model


def inject(module: Any, train: Train, folder: Path) -> None:
    """Put a fresh adapter into a transformers model and freeze the rest. It changes nothing at first: B is 0.

    Raises ModelError if the model lacks a layer that `train.lora_targets` names."""
    try:
        chosen_parts = choose(module, train.lora_targets)
    except ValueError as target_error:
        raise ModelError(
            f"cannot put an adapter into {str(folder)!r} (train.lora_targets): {target_error}"
        ) from target_error
    add(module, _NAME, chosen_parts, rank=train.lora_rank, alpha=train.lora_alpha or 2 * train.lora_rank)


def add(module: Any, name: str, parts: Sequence[LoraTarget], *, rank: int, alpha: int) -> None:
    """Put a fresh adapter called `name` beside those that are there, which may be of other ranks and parts, and freeze
    the weights below. `parts` are some of those that `choose` returned for the model without adapters. Passes run with
    it from now on."""
    from peft import LoraConfig, inject_adapter_in_model

    lora_config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=[f"model.{adapted_part.name}" for adapted_part in parts if not adapted_part.parameter],
        target_parameters=[
            f"model.{adapted_part.name}.{adapted_part.parameter}" for adapted_part in parts if adapted_part.parameter
        ],
        bias="none",
    )
    # Hides the architecture: PEFT would put targets and ranks of its own in the place of ours.
    shell_module = nn.Module()
    shell_module.add_module("model", module)
    with _as_if_whole(module):
        inject_adapter_in_model(lora_config, shell_module, name)
    module.peft_config = getattr(module, "peft_config", {}) | {name: lora_config}
    for parameter_name, parameter in module.named_parameters():
        if ".lora_" in parameter_name:
            parameter.requires_grad_(True)  # PEFT leaves it to the one that is active
    _use(module, name)


def remove(module: Any, name: str) -> None:
    """Take an adapter out of the model."""
    for _, adapted_layer in _layers(module):
        adapted_layer.delete_adapter(name)
    del module.peft_config[name]


@contextmanager
def _as_if_whole(module: Any) -> Generator[None]:
    """Inside, linear layers that are sharded look as large as they are whole: PEFT would make an adapter for a part of
    one that ranks compute together. They are frozen afterwards."""
    sharded_layers = [
        (linear_layer, linear_layer.weight)
        for linear_layer in module.modules()
        if isinstance(linear_layer, nn.Linear) and is_sharded(linear_layer.weight)
    ]
    for linear_layer, sharded_weight in sharded_layers:
        linear_layer.weight = nn.Parameter(
            torch.empty((), dtype=sharded_weight.dtype, device=sharded_weight.device).expand(sharded_weight.shape)
        )
    try:
        yield
    finally:
        for linear_layer, sharded_weight in sharded_layers:
            linear_layer.weight = sharded_weight.requires_grad_(False)


def add_roles(module: Any, roles: Sequence[str]) -> None:
    """Put a fresh adapter for each role beside the one that `inject` put in. Raises ModelError where PEFT cannot."""
    if not roles:
        return
    from peft import inject_adapter_in_model

    for role_name in roles:
        shell_module, lora_config = nn.Module(), copy.copy(module.peft_config[_NAME])
        shell_module.add_module("model", module)
        try:
            inject_adapter_in_model(lora_config, shell_module, role_name)
        except ValueError as peft_error:
            raise ModelError(
                f"cannot put an adapter for {role_name!r} beside another (roles.adapter): {peft_error}"
            ) from peft_error
        module.peft_config |= {role_name: lora_config}
    for parameter_name, parameter in module.named_parameters():
        if ".lora_" in parameter_name:
            parameter.requires_grad_(True)  # PEFT leaves it to the one that is active
    activate(module, None)


def activate(module: Any, role: str | None) -> None:
    """Passes run with the adapter of a role from now on; None: the one of all roles that have none of their own."""
    _use(module, role or _NAME)


def _use(module: Any, name: str) -> None:
    for _, adapted_layer in _layers(module):
        adapted_layer._active_adapter = [name]  # `set_adapter` would freeze the others


def parameters(module: Any, role: str | None) -> list[nn.Parameter]:
    """The trained parameters of a role's adapter, or of the one of all others."""
    adapter_pattern = re.compile(rf"\.lora_\w+\.{re.escape(role or _NAME)}\.")
    return [
        parameter for parameter_name, parameter in module.named_parameters() if adapter_pattern.search(parameter_name)
    ]


def has_adapter(module: Any) -> bool:
    """Whether `inject` was called on the model."""
    return hasattr(module, "peft_config")


@contextmanager
def switched_off(module: Any) -> Generator[None]:
    """Inside, the model computes with the weights below its adapter alone."""
    adapted_layers = [adapted_layer for _, adapted_layer in _layers(module)] if has_adapter(module) else []
    for adapted_layer in adapted_layers:
        adapted_layer._disable_adapters = True  # `enable_adapters` would also change what is trained
    try:
        yield
    finally:
        for adapted_layer in adapted_layers:
            adapted_layer._disable_adapters = False


def merged(module: Any) -> dict[str, Tensor]:
    """The state of a model as if its adapter, if it has one, had been added to the weights below."""
    merged_state = {
        _below(state_name): state_tensor.detach()
        for state_name, state_tensor in module.state_dict().items()
        if ".lora_" not in state_name
    }
    if has_adapter(module):
        for state_name, adapted_layer in _layers(module):
            weight_name = f"{_below(state_name)}.{_parameter(adapted_layer)}"
            with _gathered(adapted_layer):
                weight_delta = _delta(adapted_layer)
            # A copy: merging in place, and subtracting afterwards, would leave rounding in the frozen weights at
            # every export.
            merged_state[weight_name] = merged_state[weight_name] + like(weight_delta, merged_state[weight_name])
    return merged_state


def tensors_of(module: Any) -> dict[str, Tensor]:
    """The tensors of all adapters by adapter and name in its file, on the CPU. Every rank of a sharded model takes
    part."""
    with _gathered(*(adapted_layer for _, adapted_layer in _layers(module))):
        return {
            _of(adapter_name) + tensor_name: adapter_view.to("cpu", copy=True).contiguous()
            for adapter_name in module.peft_config
            for tensor_name, adapter_view in _views(module, adapter_name).items()
        }


def _of(adapter: str) -> str:
    """How the names of an adapter's tensors begin among those of all."""
    return f"{adapter}/"


def _own(tensors: dict[str, Tensor], adapter: str) -> dict[str, Tensor]:
    return {
        full_name.removeprefix(_of(adapter)): adapter_tensor
        for full_name, adapter_tensor in tensors.items()
        if full_name.startswith(_of(adapter))
    }


def export(module: Any, adapter: str, folder: Path) -> Path:
    """Write one adapter of several to `folder`, whole or not at all, for PEFT or an engine to load."""
    draft_folder = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft_folder, ignore_errors=True)
    draft_folder.mkdir(parents=True)
    adapter_views = _views(module, adapter)
    file_tensors = {
        _PREFIX + tensor_name: adapter_view.cpu().contiguous() for tensor_name, adapter_view in adapter_views.items()
    }
    save_file(file_tensors, draft_folder / WEIGHTS, metadata={"format": "pt"})
    _description(module, adapter_views, adapter).save_pretrained(draft_folder)
    shutil.rmtree(folder, ignore_errors=True)
    return draft_folder.rename(folder)


def save(module: Any, folder: Path) -> Path:
    """Write the adapters of a model that is not sharded to `folder`, as `write` does."""
    return write(module, tensors_of(module), folder)


def write(module: Any, adapter_tensors: dict[str, Tensor], folder: Path, *, read_back: bool = True) -> Path:
    """Write what `tensors_of` returned to `folder`, whole or not at all, for PEFT or an engine to load. Raises
    ModelError, and leaves nothing, if PEFT reads another adapter; without `read_back` only the first time."""
    draft_folder = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft_folder, ignore_errors=True)
    for adapter_name, adapter_folder in _places(module, draft_folder):
        adapter_folder.mkdir(parents=True)
        own_tensors = _own(adapter_tensors, adapter_name)
        save_file(
            {_PREFIX + tensor_name: own_tensor for tensor_name, own_tensor in own_tensors.items()},
            adapter_folder / WEIGHTS,
            metadata={"format": "pt"},
        )
        _description(module, own_tensors).save_pretrained(adapter_folder)
    # Reading back takes as long as writing, so a run does it for each checkpoint and once for what travels at every
    # step: names depend on the model, not on the numbers.
    if read_back or module not in _read_once:
        try:
            for adapter_name, adapter_folder in _places(module, draft_folder):
                _check_read(module, _own(adapter_tensors, adapter_name), adapter_folder)
        except ModelError:
            shutil.rmtree(draft_folder, ignore_errors=True)
            raise
        _read_once.add(module)
    return draft_folder.rename(folder)


_read_once: WeakSet[Any] = WeakSet()
"""Models of which PEFT has read an adapter."""


@torch.no_grad()
def _check_read(module: Any, own: dict[str, Tensor], folder: Path) -> None:
    """Raises ModelError unless PEFT, on a model without numbers, reads an adapter as what it is."""
    from peft import LoraConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    def wrong(name: str) -> ModelError:
        correction = "name other parts in train.lora_targets"
        return ModelError(f"PEFT reads another adapter from {str(folder)!r} than was trained, see {name}: {correction}")

    try:
        with torch.device("meta"):
            empty_model = AutoModelForCausalLM.from_config(copy.deepcopy(module.config))
            peft_model: Any = get_peft_model(empty_model, LoraConfig.from_pretrained(str(folder)))
    except ValueError as peft_error:
        raise wrong(next(iter(str(peft_error).splitlines()))) from peft_error
    adapted_layers = list(_layers(peft_model))
    for _, adapted_layer in adapted_layers:
        for matrix_module in (adapted_layer.lora_A, adapted_layer.lora_B):
            matrix_module.to_empty(device="cpu")
    load_result = set_peft_model_state_dict(peft_model, load_peft_weights(str(folder), device="cpu"))
    if lost_names := [
        *load_result.unexpected_keys,
        *(layer_name for layer_name in load_result.missing_keys if ".lora_" in layer_name),
    ]:
        raise wrong(lost_names[0])
    lora_config = module.peft_config[_NAME]
    stack_by_name = {
        f"{_below(layer_name)}.{_parameter(adapted_layer)}": adapted_layer
        for layer_name, adapted_layer in adapted_layers
        if _is_stack(adapted_layer)
    }
    stack_by_name = {
        layer_name.removeprefix(_PREFIX): adapted_layer for layer_name, adapted_layer in stack_by_name.items()
    }
    pieces_by_stack = pieces(
        module, {layer_name: adapted_layer.get_param().shape for layer_name, adapted_layer in stack_by_name.items()}
    )
    unread_names = set(own)
    for layer_name, adapted_layer in adapted_layers:
        layer_name = layer_name.removeprefix(_PREFIX)
        layer_pieces = pieces_by_stack.get(f"{_below(layer_name)}.{_parameter(adapted_layer)}", ())
        owner_names = [stack_piece.name for stack_piece in layer_pieces] or [layer_name]
        matrix_names = [
            tuple(f"{owner_name}.lora_{side_name}.weight" for side_name in "AB") for owner_name in owner_names
        ]
        unread_names -= set(chain(*matrix_names))
        if missing_name := next((tensor_name for tensor_name in chain(*matrix_names) if tensor_name not in own), None):
            raise wrong(missing_name)
        if not layer_pieces:
            peft_matrices = (adapted_layer.lora_A[_NAME].weight, adapted_layer.lora_B[_NAME].weight)
            if not all(
                torch.equal(peft_matrix, own[side_name].to(peft_matrix.dtype))
                for peft_matrix, side_name in zip(peft_matrices, matrix_names[0], strict=True)
            ):
                raise wrong(layer_name)
            continue
        down_ERI = adapted_layer.lora_A[_NAME].weight.view(
            adapted_layer.num_experts, -1, adapted_layer.lora_A[_NAME].weight.shape[1]
        )
        up_ORE = adapted_layer.lora_B[_NAME].weight.view(
            adapted_layer.lora_B[_NAME].weight.shape[0], -1, adapted_layer.num_experts
        )
        for stack_piece, (down_name, up_name) in zip(layer_pieces, matrix_names, strict=True):
            peft_OI = up_ORE[stack_piece.start : stack_piece.stop, :, stack_piece.expert] @ down_ERI[stack_piece.expert]
            exact_OI = lora_config.lora_alpha / lora_config.r * own[up_name].float() @ own[down_name].float()
            if not torch.allclose(adapted_layer.scaling[_NAME] * peft_OI, exact_OI, rtol=1e-3, atol=1e-5):
                raise wrong(stack_piece.name)
    if unread_names:
        raise wrong(min(unread_names))


def _places(module: Any, folder: Path) -> list[tuple[str, Path]]:
    """Where each adapter lies in a folder; that of all others first."""
    return [
        (adapter_name, folder if adapter_name == _NAME else folder / adapter_name)
        for adapter_name in module.peft_config
    ]


@torch.no_grad()
def load(module: Any, folder: Path) -> None:
    """Load written adapters into a model that has the same ones. Raises ModelError otherwise."""
    for adapter_name, adapter_folder in _places(module, folder):
        _load(module, adapter_name, adapter_folder)


def _load(module: Any, adapter: str, folder: Path) -> None:
    try:
        file_tensors = {
            tensor_name.removeprefix(_PREFIX): file_tensor
            for tensor_name, file_tensor in load_file(folder / WEIGHTS).items()
        }
    except (OSError, SafetensorError) as read_error:
        reason = next(iter(str(read_error).splitlines()))
        raise ModelError(f"cannot load the adapter in {str(folder)!r}: {reason}") from read_error
    with _gathered(*(adapted_layer for _, adapted_layer in _layers(module)), changed=True):
        _fill(_views(module, adapter), file_tensors, folder)


def _fill(views: dict[str, Tensor], tensors: dict[str, Tensor], folder: Path) -> None:
    for tensor_name in sorted(views.keys() | tensors.keys()):
        if (
            tensor_name not in views
            or tensor_name not in tensors
            or views[tensor_name].shape != tensors[tensor_name].shape
        ):
            raise ModelError(
                f"the adapter in {str(folder)!r} is of another shape: {tensor_name} (train.lora_rank, lora_targets)"
            )
    for tensor_name, adapter_view in views.items():
        adapter_view.copy_(tensors[tensor_name])
    for tensor_name, adapter_view in views.items():
        # Two names in a file may be views of one shared A. If the file has two different ones, the later overwrote
        # the earlier.
        if not torch.equal(adapter_view.cpu(), tensors[tensor_name].to(adapter_view.dtype)):
            problem = "the model has one A for this and another part of an expert, the file two"
            raise ModelError(f"the adapter in {str(folder)!r} does not fit, {tensor_name}: {problem}")


def _layers(module: Any) -> Iterator[tuple[str, Any]]:
    """The adapted layers. If two parameters of a module are adapted, one layer wraps the other, its `base_layer`."""
    from peft.tuners.lora import LoraLayer

    return (
        (layer_name, submodule) for layer_name, submodule in module.named_modules() if isinstance(submodule, LoraLayer)
    )


def _below(name: str) -> str:
    """A name without the layers that PEFT put in between."""
    return ".".join(name_part for name_part in name.split(".") if name_part != "base_layer")


def _parameter(layer: Any) -> str:
    """The name of the parameter that a layer adapts."""
    return getattr(layer, "parameter_name", "weight")


@contextmanager
def _gathered(*layers: Any, changed: bool = False) -> Generator[None]:
    """Inside, the adapters of these layers are whole if they are sharded. If they are `changed`, the shards follow."""
    sharded_matrices = [
        adapter_matrix[_NAME]
        for adapted_layer in layers
        for adapter_matrix in (adapted_layer.lora_A, adapted_layer.lora_B)
        if is_sharded(adapter_matrix[_NAME].weight)
    ]
    sharded_weights = [adapter_matrix.weight for adapter_matrix in sharded_matrices]
    for matrix_index, adapter_matrix in enumerate(sharded_matrices):
        adapter_matrix.weight = nn.Parameter(
            whole(adapter_matrix.weight.detach(), f"matrix {matrix_index} of an adapter"), requires_grad=False
        )
    try:
        yield
        if changed:
            for adapter_matrix, weight_shards in zip(sharded_matrices, sharded_weights, strict=True):
                fill(weight_shards, adapter_matrix.weight)
    finally:
        for adapter_matrix, weight_shards in zip(sharded_matrices, sharded_weights, strict=True):
            adapter_matrix.weight = weight_shards


@torch.no_grad()
def _delta(layer: Any) -> Tensor:
    return layer.get_delta_weight(_NAME)


def _views(module: Any, adapter: str) -> dict[str, Tensor]:
    """An adapter's tensors by their names in a file, as views: a write to them changes what is trained."""
    stack_layers: dict[str, tuple[str, Any]] = {}
    view_by_name: dict[str, Tensor] = {}
    for layer_name, layer in _layers(module):
        if adapter not in layer.lora_A:
            continue
        down, up = layer.lora_A[adapter].weight.detach(), layer.lora_B[adapter].weight.detach()
        view_by_name |= {f"{layer_name}.lora_A.weight": down, f"{layer_name}.lora_B.weight": up}
        if _is_stack(layer):
            stack_layers[f"{_below(layer_name)}.{layer.parameter_name}"] = (layer_name, layer)
    pieces_by_stack = pieces(
        module, {stack_name: layer.get_param().shape for stack_name, (_, layer) in stack_layers.items()}
    )
    for stack_name, (layer_name, layer) in stack_layers.items():
        if pieces_by_stack[stack_name]:
            down = view_by_name.pop(f"{layer_name}.lora_A.weight")
            up = view_by_name.pop(f"{layer_name}.lora_B.weight")
            down_ERI = down.view(layer.num_experts, -1, down.shape[1])
            up_ORE = up.view(up.shape[0], -1, layer.num_experts)
            for piece in pieces_by_stack[stack_name]:
                view_by_name[f"{piece.name}.lora_A.weight"] = down_ERI[piece.expert]
                view_by_name[f"{piece.name}.lora_B.weight"] = up_ORE[piece.start : piece.stop, :, piece.expert]
    return view_by_name


def _is_stack(layer: Any) -> bool:
    return hasattr(layer, "parameter_name") and layer.get_param().ndim == 3


def _description(module: Any, views: dict[str, Tensor], adapter: str = _NAME) -> Any:
    """PEFT's configuration of the adapter, with the names of the file."""
    adapter_config = copy.copy(module.peft_config[adapter])
    stack_layers = {
        layer_name: adapted_layer
        for layer_name, adapted_layer in _layers(module)
        if f"{layer_name}.lora_A.weight" in views and _is_stack(adapted_layer)
    }
    owner_names = {layer_name.partition(".lora_")[0] for layer_name in views} - stack_layers.keys()
    adapter_config.target_modules = {owner_name.rpartition(".")[2] for owner_name in owner_names}
    stack_names = {
        f"{_below(layer_name).rpartition('.')[2]}.{adapted_layer.parameter_name}"
        for layer_name, adapted_layer in stack_layers.items()
    }
    adapter_config.target_parameters = sorted(stack_names | _divided(module, adapter_config, owner_names)) or None
    return adapter_config


def _divided(module: Any, adapter_config: Any, owners: set[str]) -> set[str]:
    """Divide the stacks of a configuration so that PEFT reads experts of a name each, and layers called as they are.
    Returns the names that it lists as parameters.

    Of some families PEFT takes these names for experts alone: the other layers are named as parameters, since modules
    cannot be. Of others it does not know the experts' names: then the stacks are named, and their ranks."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    module_names = {_below(layer_name) for layer_name, layer in _layers(module) if not _is_stack(layer)}
    if not owners - module_names:
        return set()
    converted_config = copy.deepcopy(adapter_config)
    convert_peft_config_for_transformers(converted_config, module, None)
    if converted_config.target_modules != adapter_config.target_modules:
        taken_names = adapter_config.target_modules - converted_config.target_modules
        return {
            f"{owner_name}.weight"
            for owner_name in owners & module_names
            if owner_name.rpartition(".")[2] in taken_names
        }
    stack_layers = {
        f"{_below(layer_name)}.{_parameter(layer)}": layer for layer_name, layer in _layers(module) if _is_stack(layer)
    }
    parameter_names: set[str] = set()
    for layer_name, stack_pieces in pieces(
        module, {layer_name: layer.get_param().shape for layer_name, layer in stack_layers.items()}
    ).items():
        if stack_pieces:
            # PEFT lays their A side by side.
            part_count = sum(piece.expert == stack_pieces[0].expert for piece in stack_pieces)
            name_pattern, parameter_path = rf".*\.{layer_name.rpartition('.')[2]}", ".".join(layer_name.split(".")[-2:])
            parameter_names.add(parameter_path)
            if part_count > 1:
                adapter_config.rank_pattern = {
                    **adapter_config.rank_pattern,
                    name_pattern: adapter_config.r * part_count,
                }
                adapter_config.alpha_pattern = {
                    **adapter_config.alpha_pattern,
                    name_pattern: adapter_config.lora_alpha * part_count,
                }
    adapter_config.target_modules = {owner_name.rpartition(".")[2] for owner_name in owners & module_names}
    return parameter_names
