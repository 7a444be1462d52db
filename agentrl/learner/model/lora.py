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
        names = {self.name, f"{self.name}.{self.parameter}"} if self.parameter else {self.name}
        return frozenset(names | set(self.divided))

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
    parts = list(_parts(module))
    if not targets:
        return [part for part in parts if not part.routes]
    if unknown := [target for target in targets if not any(_named(part.names, target) for part in parts)]:
        raise ValueError(f"the model has no layer called {unknown[0]!r}")
    chosen = [part for part in parts if any(_named(part.names, target) for target in targets)]
    for part in chosen:
        whole_names = part.names - set(part.divided)
        targeted = [any(_named({name}, target) for target in targets) for name in part.divided]
        # Gate and up are one tensor with one A: an adapter for half of it could not be written as a file that PEFT
        # reads.
        if any(targeted) and not all(targeted) and not any(_named(whole_names, target) for target in targets):
            halves = " and ".join(repr(name.rpartition(".")[2]) for name in part.divided)
            raise ValueError(f"{part.name}.{part.parameter} is one tensor: name {halves}, or neither")
    return chosen


def pieces(module: Any, stacks: Mapping[str, torch.Size]) -> dict[str, tuple[Piece, ...]]:
    """The pieces that the model's folder divides parameters of these names and shapes [E, out, in] into; empty if it
    keeps the stack. Transformers divides numbered rows to find them, so no architecture needs to be known here."""
    rows: dict[str, torch.Tensor] = {}
    owner: list[str] = []
    by_stack: dict[str, list[Piece]] = {name: [] for name in stacks}
    with unset_fake_temporarily():  # numbers of rows, also for a model that has none
        for name, (experts, out, _) in stacks.items():
            # A stack whose numbers are their own row: transformers divides it as it would divide weights, and what
            # comes out says which row went where. A table for each architecture would be longer, and wrong for the
            # next one.
            rows[name] = (len(owner) + torch.arange(experts * out)).view(experts, out, 1).expand(-1, -1, 2)
            owner += [name] * (experts * out)
        for name, numbers in revert_weight_conversion(module, rows).items():
            if numbers.ndim != 2:
                continue
            stack = owner[first := int(numbers[0, 0])]
            expert, start = divmod(first - int(rows[stack][0, 0, 0]), stacks[stack][1])
            by_stack[stack].append(Piece(name.removesuffix(".weight"), expert, start, start + len(numbers)))
    return {name: tuple(sorted(of, key=lambda piece: (piece.expert, piece.start))) for name, of in by_stack.items()}


def _parts(module: Any) -> Iterator[LoraTarget]:
    output = module.get_output_embeddings()
    stacks: dict[tuple[str, str], torch.Size] = {}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            if layer is not output:
                yield LoraTarget(name)
            continue
        for parameter, tensor in layer.named_parameters(recurse=False):
            if tensor.ndim == 3 and not isinstance(layer, _ConvNd):
                stacks[name, parameter] = tensor.shape
            elif tensor.ndim == 2 and LoraTarget(name).routes:
                yield LoraTarget(name, parameter)
    divided = pieces(module, {".".join(key): shape for key, shape in stacks.items()})
    for name, parameter in stacks:
        yield LoraTarget(name, parameter, divided[f"{name}.{parameter}"])


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
        parts = choose(module, train.lora_targets)
    except ValueError as error:
        raise ModelError(f"cannot put an adapter into {str(folder)!r} (train.lora_targets): {error}") from error
    add(module, _NAME, parts, rank=train.lora_rank, alpha=train.lora_alpha or 2 * train.lora_rank)


def add(module: Any, name: str, parts: Sequence[LoraTarget], *, rank: int, alpha: int) -> None:
    """Put a fresh adapter called `name` beside those that are there, which may be of other ranks and parts, and freeze
    the weights below. `parts` are some of those that `choose` returned for the model without adapters. Passes run with
    it from now on."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=[f"model.{part.name}" for part in parts if not part.parameter],
        target_parameters=[f"model.{part.name}.{part.parameter}" for part in parts if part.parameter],
        bias="none",
    )
    shell = nn.Module()  # hides the architecture: PEFT would put targets and ranks of its own in the place of ours
    shell.add_module("model", module)
    with _as_if_whole(module):
        inject_adapter_in_model(config, shell, name)
    module.peft_config = getattr(module, "peft_config", {}) | {name: config}
    for parameter_name, parameter in module.named_parameters():
        if ".lora_" in parameter_name:
            parameter.requires_grad_(True)  # PEFT leaves it to the one that is active
    _use(module, name)


def remove(module: Any, name: str) -> None:
    """Take an adapter out of the model."""
    for _, layer in _layers(module):
        layer.delete_adapter(name)
    del module.peft_config[name]


@contextmanager
def _as_if_whole(module: Any) -> Generator[None]:
    """Inside, linear layers that are sharded look as large as they are whole: PEFT would make an adapter for a part of
    one that ranks compute together. They are frozen afterwards."""
    sharded = [
        (part, part.weight) for part in module.modules() if isinstance(part, nn.Linear) and is_sharded(part.weight)
    ]
    for part, weight in sharded:
        part.weight = nn.Parameter(torch.empty((), dtype=weight.dtype, device=weight.device).expand(weight.shape))
    try:
        yield
    finally:
        for part, weight in sharded:
            part.weight = weight.requires_grad_(False)


def add_roles(module: Any, roles: Sequence[str]) -> None:
    """Put a fresh adapter for each role beside the one that `inject` put in. Raises ModelError where PEFT cannot."""
    if not roles:
        return
    from peft import inject_adapter_in_model

    for role in roles:
        shell, config = nn.Module(), copy.copy(module.peft_config[_NAME])
        shell.add_module("model", module)
        try:
            inject_adapter_in_model(config, shell, role)
        except ValueError as error:
            raise ModelError(f"cannot put an adapter for {role!r} beside another (roles.adapter): {error}") from error
        module.peft_config |= {role: config}
    for name, parameter in module.named_parameters():
        if ".lora_" in name:
            parameter.requires_grad_(True)  # PEFT leaves it to the one that is active
    activate(module, None)


def activate(module: Any, role: str | None) -> None:
    """Passes run with the adapter of a role from now on; None: the one of all roles that have none of their own."""
    _use(module, role or _NAME)


def _use(module: Any, name: str) -> None:
    for _, layer in _layers(module):
        layer._active_adapter = [name]  # `set_adapter` would freeze the others


def parameters(module: Any, role: str | None) -> list[nn.Parameter]:
    """The trained parameters of a role's adapter, or of the one of all others."""
    ours = re.compile(rf"\.lora_\w+\.{re.escape(role or _NAME)}\.")
    return [parameter for name, parameter in module.named_parameters() if ours.search(name)]


def has_adapter(module: Any) -> bool:
    """Whether `inject` was called on the model."""
    return hasattr(module, "peft_config")


@contextmanager
def switched_off(module: Any) -> Generator[None]:
    """Inside, the model computes with the weights below its adapter alone."""
    layers = [layer for _, layer in _layers(module)] if has_adapter(module) else []
    for layer in layers:
        layer._disable_adapters = True  # `enable_adapters` would also change what is trained
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged(module: Any) -> dict[str, Tensor]:
    """The state of a model as if its adapter, if it has one, had been added to the weights below."""
    state = {_below(name): tensor.detach() for name, tensor in module.state_dict().items() if ".lora_" not in name}
    if has_adapter(module):
        for name, layer in _layers(module):
            key = f"{_below(name)}.{_parameter(layer)}"
            with _gathered(layer):
                delta = _delta(layer)
            # A copy: merging in place, and subtracting afterwards, would leave rounding in the frozen weights at
            # every export.
            state[key] = state[key] + like(delta, state[key])
    return state


def tensors_of(module: Any) -> dict[str, Tensor]:
    """The tensors of all adapters by adapter and name in its file, on the CPU. Every rank of a sharded model takes
    part."""
    with _gathered(*(layer for _, layer in _layers(module))):
        return {
            _of(adapter) + name: view.to("cpu", copy=True).contiguous()
            for adapter in module.peft_config
            for name, view in _views(module, adapter).items()
        }


def _of(adapter: str) -> str:
    """How the names of an adapter's tensors begin among those of all."""
    return f"{adapter}/"


def _own(tensors: dict[str, Tensor], adapter: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(_of(adapter)): tensor for name, tensor in tensors.items() if name.startswith(_of(adapter))
    }


def export(module: Any, adapter: str, folder: Path) -> Path:
    """Write one adapter of several to `folder`, whole or not at all, for PEFT or an engine to load."""
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    views = _views(module, adapter)
    tensors = {_PREFIX + name: view.cpu().contiguous() for name, view in views.items()}
    save_file(tensors, draft / WEIGHTS, metadata={"format": "pt"})
    _description(module, views, adapter).save_pretrained(draft)
    shutil.rmtree(folder, ignore_errors=True)
    return draft.rename(folder)


def save(module: Any, folder: Path) -> Path:
    """Write the adapters of a model that is not sharded to `folder`, as `write` does."""
    return write(module, tensors_of(module), folder)


def write(module: Any, adapter_tensors: dict[str, Tensor], folder: Path, *, read_back: bool = True) -> Path:
    """Write what `tensors_of` returned to `folder`, whole or not at all, for PEFT or an engine to load. Raises
    ModelError, and leaves nothing, if PEFT reads another adapter; without `read_back` only the first time."""
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    for adapter, place in _places(module, draft):
        place.mkdir(parents=True)
        tensors = _own(adapter_tensors, adapter)
        save_file(
            {_PREFIX + name: tensor for name, tensor in tensors.items()}, place / WEIGHTS, metadata={"format": "pt"}
        )
        _description(module, tensors).save_pretrained(place)
    # Reading back takes as long as writing, so a run does it for each checkpoint and once for what travels at every
    # step: names depend on the model, not on the numbers.
    if read_back or module not in _read_once:
        try:
            for adapter, place in _places(module, draft):
                _check_read(module, _own(adapter_tensors, adapter), place)
        except ModelError:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        _read_once.add(module)
    return draft.rename(folder)


_read_once: WeakSet[Any] = WeakSet()
"""Models of which PEFT has read an adapter."""


@torch.no_grad()
def _check_read(module: Any, own: dict[str, Tensor], folder: Path) -> None:
    """Raises ModelError unless PEFT, on a model without numbers, reads an adapter as what it is."""
    from peft import LoraConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    def wrong(name: str) -> ModelError:
        hint = "name other parts in train.lora_targets"
        return ModelError(f"PEFT reads another adapter from {str(folder)!r} than was trained, see {name}: {hint}")

    try:
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(copy.deepcopy(module.config))
            model: Any = get_peft_model(empty, LoraConfig.from_pretrained(str(folder)))
    except ValueError as error:
        raise wrong(next(iter(str(error).splitlines()))) from error
    layers = list(_layers(model))
    for _, layer in layers:
        for part in (layer.lora_A, layer.lora_B):
            part.to_empty(device="cpu")
    read = set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"))
    if lost := [*read.unexpected_keys, *(name for name in read.missing_keys if ".lora_" in name)]:
        raise wrong(lost[0])
    config = module.peft_config[_NAME]
    stacks = {f"{_below(name)}.{_parameter(layer)}": layer for name, layer in layers if _is_stack(layer)}
    stacks = {name.removeprefix(_PREFIX): layer for name, layer in stacks.items()}
    divided = pieces(module, {name: layer.get_param().shape for name, layer in stacks.items()})
    unread = set(own)
    for name, layer in layers:
        name = name.removeprefix(_PREFIX)
        parts = divided.get(f"{_below(name)}.{_parameter(layer)}", ())
        owners = [piece.name for piece in parts] or [name]
        pairs = [tuple(f"{owner}.lora_{side}.weight" for side in "AB") for owner in owners]
        unread -= set(chain(*pairs))
        if missing := next((key for key in chain(*pairs) if key not in own), None):
            raise wrong(missing)
        if not parts:
            matrices = (layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight)
            if not all(
                torch.equal(matrix, own[side].to(matrix.dtype)) for matrix, side in zip(matrices, pairs[0], strict=True)
            ):
                raise wrong(name)
            continue
        down_ERI = layer.lora_A[_NAME].weight.view(layer.num_experts, -1, layer.lora_A[_NAME].weight.shape[1])
        up_ORE = layer.lora_B[_NAME].weight.view(layer.lora_B[_NAME].weight.shape[0], -1, layer.num_experts)
        for piece, (down, up) in zip(parts, pairs, strict=True):
            peft_OI = up_ORE[piece.start : piece.stop, :, piece.expert] @ down_ERI[piece.expert]
            exact_OI = config.lora_alpha / config.r * own[up].float() @ own[down].float()
            if not torch.allclose(layer.scaling[_NAME] * peft_OI, exact_OI, rtol=1e-3, atol=1e-5):
                raise wrong(piece.name)
    if unread:
        raise wrong(min(unread))


def _places(module: Any, folder: Path) -> list[tuple[str, Path]]:
    """Where each adapter lies in a folder; that of all others first."""
    return [(name, folder if name == _NAME else folder / name) for name in module.peft_config]


@torch.no_grad()
def load(module: Any, folder: Path) -> None:
    """Load written adapters into a model that has the same ones. Raises ModelError otherwise."""
    for adapter, place in _places(module, folder):
        _load(module, adapter, place)


def _load(module: Any, adapter: str, folder: Path) -> None:
    try:
        tensors = {name.removeprefix(_PREFIX): t for name, t in load_file(folder / WEIGHTS).items()}
    except (OSError, SafetensorError) as error:
        reason = next(iter(str(error).splitlines()))
        raise ModelError(f"cannot load the adapter in {str(folder)!r}: {reason}") from error
    with _gathered(*(layer for _, layer in _layers(module)), changed=True):
        _fill(_views(module, adapter), tensors, folder)


def _fill(views: dict[str, Tensor], tensors: dict[str, Tensor], folder: Path) -> None:
    for name in sorted(views.keys() | tensors.keys()):
        if name not in views or name not in tensors or views[name].shape != tensors[name].shape:
            raise ModelError(
                f"the adapter in {str(folder)!r} is of another shape: {name} (train.lora_rank, lora_targets)"
            )
    for name, view in views.items():
        view.copy_(tensors[name])
    for name, view in views.items():
        # Two names in a file may be views of one shared A. If the file has two different ones, the later overwrote
        # the earlier.
        if not torch.equal(view.cpu(), tensors[name].to(view.dtype)):  # another tensor overwrote it
            shared = "the model has one A for this and another part of an expert, the file two"
            raise ModelError(f"the adapter in {str(folder)!r} does not fit, {name}: {shared}")


def _layers(module: Any) -> Iterator[tuple[str, Any]]:
    """The adapted layers. If two parameters of a module are adapted, one layer wraps the other, its `base_layer`."""
    from peft.tuners.lora import LoraLayer

    return ((name, layer) for name, layer in module.named_modules() if isinstance(layer, LoraLayer))


def _below(name: str) -> str:
    """A name without the layers that PEFT put in between."""
    return ".".join(word for word in name.split(".") if word != "base_layer")


def _parameter(layer: Any) -> str:
    """The name of the parameter that a layer adapts."""
    return getattr(layer, "parameter_name", "weight")


@contextmanager
def _gathered(*layers: Any, changed: bool = False) -> Generator[None]:
    """Inside, the adapters of these layers are whole if they are sharded. If they are `changed`, the shards follow."""
    parts = [part[_NAME] for layer in layers for part in (layer.lora_A, layer.lora_B) if is_sharded(part[_NAME].weight)]
    weights = [part.weight for part in parts]
    for number, part in enumerate(parts):
        part.weight = nn.Parameter(whole(part.weight.detach(), f"matrix {number} of an adapter"), requires_grad=False)
    try:
        yield
        if changed:
            for part, shards in zip(parts, weights, strict=True):
                fill(shards, part.weight)
    finally:
        for part, shards in zip(parts, weights, strict=True):
            part.weight = shards


@torch.no_grad()
def _delta(layer: Any) -> Tensor:
    return layer.get_delta_weight(_NAME)


def _views(module: Any, adapter: str) -> dict[str, Tensor]:
    """An adapter's tensors by their names in a file, as views: a write to them changes what is trained."""
    stacks: dict[str, tuple[str, Any]] = {}
    views: dict[str, Tensor] = {}
    for name, layer in _layers(module):
        if adapter not in layer.lora_A:
            continue
        down, up = layer.lora_A[adapter].weight.detach(), layer.lora_B[adapter].weight.detach()
        views |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        if _is_stack(layer):
            stacks[f"{_below(name)}.{layer.parameter_name}"] = (name, layer)
    divided = pieces(module, {key: layer.get_param().shape for key, (_, layer) in stacks.items()})
    for key, (name, layer) in stacks.items():
        if divided[key]:
            down, up = views.pop(f"{name}.lora_A.weight"), views.pop(f"{name}.lora_B.weight")
            down_ERI = down.view(layer.num_experts, -1, down.shape[1])
            up_ORE = up.view(up.shape[0], -1, layer.num_experts)
            for piece in divided[key]:
                views[f"{piece.name}.lora_A.weight"] = down_ERI[piece.expert]
                views[f"{piece.name}.lora_B.weight"] = up_ORE[piece.start : piece.stop, :, piece.expert]
    return views


def _is_stack(layer: Any) -> bool:
    return hasattr(layer, "parameter_name") and layer.get_param().ndim == 3


def _description(module: Any, views: dict[str, Tensor], adapter: str = _NAME) -> Any:
    """PEFT's configuration of the adapter, with the names of the file."""
    adapter_config = copy.copy(module.peft_config[adapter])
    stacks = {name: layer for name, layer in _layers(module) if f"{name}.lora_A.weight" in views and _is_stack(layer)}
    owners = {name.partition(".lora_")[0] for name in views} - stacks.keys()
    adapter_config.target_modules = {owner.rpartition(".")[2] for owner in owners}
    ends = {f"{_below(name).rpartition('.')[2]}.{layer.parameter_name}" for name, layer in stacks.items()}
    adapter_config.target_parameters = sorted(ends | _divided(module, adapter_config, owners)) or None
    return adapter_config


def _divided(module: Any, adapter_config: Any, owners: set[str]) -> set[str]:
    """Divide the stacks of a configuration so that PEFT reads experts of a name each, and layers called as they are.
    Returns the names that it lists as parameters.

    Of some families PEFT takes these names for experts alone: the other layers are named as parameters, since modules
    cannot be. Of others it does not know the experts' names: then the stacks are named, and their ranks."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    modules = {_below(name) for name, layer in _layers(module) if not _is_stack(layer)}
    if not owners - modules:
        return set()
    read = copy.deepcopy(adapter_config)
    convert_peft_config_for_transformers(read, module, None)
    if read.target_modules != adapter_config.target_modules:
        taken = adapter_config.target_modules - read.target_modules
        return {f"{owner}.weight" for owner in owners & modules if owner.rpartition(".")[2] in taken}
    stacks = {f"{_below(name)}.{_parameter(layer)}": layer for name, layer in _layers(module) if _is_stack(layer)}
    parameter_names: set[str] = set()
    for name, of in pieces(module, {name: layer.get_param().shape for name, layer in stacks.items()}).items():
        if of:
            parts = sum(piece.expert == of[0].expert for piece in of)  # PEFT lays their A side by side
            pattern, parameter = rf".*\.{name.rpartition('.')[2]}", ".".join(name.split(".")[-2:])
            parameter_names.add(parameter)
            if parts > 1:
                adapter_config.rank_pattern = {**adapter_config.rank_pattern, pattern: adapter_config.r * parts}
                adapter_config.alpha_pattern = {
                    **adapter_config.alpha_pattern,
                    pattern: adapter_config.lora_alpha * parts,
                }
    adapter_config.target_modules = {owner.rpartition(".")[2] for owner in owners & modules}
    return parameter_names
