"""Checkpoints: one folder a step, written whole or not at all.

Owns the folder's layout and its atomicity. Never knows the store: it records which episodes a checkpoint trained, and
the reader decides what follows from it.

    checkpoints/step-00000020/
        config.json, tokenizer*, …   all but weights, copied from the model's folder: an engine can serve this one
        model.safetensors            weights, an adapter merged into them
        adapter/                     the adapter alone, in PEFT's format, if one is trained
        critic/                      the critic's own weights, if one is trained
        reference/                   those of a reference that follows the policy
        roles/ROLE/                  config.json, tokenizer*, model.safetensors of a role's own model, as above
        optimizer.pt                 optimizers and random state
        optimizer/                   if ranks wrote it: what their optimizers remember, a file of each rank
        state.json                   format, step, episodes trained since the previous checkpoint, step by step
        SHA256SUMS                   digests of all other files, compared before anything goes on from them
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast

import torch
from safetensors.torch import save_file
from torch import Tensor

from agentrl.errors import RunFailed
from agentrl.learner.checkpoints import digests, folders
from agentrl.learner.checkpoints.folders import complete, name_of, of_role
from agentrl.learner.checkpoints.model_files import copy_description
from agentrl.learner.model import lora
from agentrl.learner.optimizers import master_weights
from agentrl.learner.optimizers.optimizers import regrouped
from agentrl.learner.parallel import optimizer_state
from agentrl.learner.parallel.fsdp import gathered, is_sharded, load_state, local
from agentrl.learner.weight_export import checkpoint_tensors, write_weights

ADAPTER, CRITIC = "adapter", "critic"
"""The folders in a checkpoint that hold the adapter and the critic, where one is trained."""

WEIGHTS, OPTIMIZER = "model.safetensors", "optimizer.pt"
"""Its files of weights, an adapter merged into them, and of the optimizers with the random state."""

SHARDS = "optimizer"
"""Its folder of what optimizers over ranks remember: see `agentrl.learner.parallel.optimizer_state`."""


class CheckpointPart(Protocol):
    """A part of a checkpoint with a folder of its own: `tensors`, in the safetensors file `file`."""

    @property
    def file(self) -> str: ...
    def tensors(self) -> Mapping[str, Tensor]: ...
    def load(self, folder: Path) -> None: ...


class Model(Protocol):
    """A role's own model, which a checkpoint keeps as it keeps the policy."""

    @property
    def module(self) -> Any: ...
    @property
    def folder(self) -> Path: ...


_NO_PARTS: Final[Mapping[str, CheckpointPart]] = {}
_NO_MODELS: Final[Mapping[str, Model]] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """`step` optimizer steps are in the weights; `episodes` lists those trained by each step since the previous
    checkpoint of the lineage, `previous_step` (0: the initial weights)."""

    step: int
    previous_step: int
    episodes: tuple[tuple[int, ...], ...]


def begin(root: Path, step: int, *, shards: bool, may_appear: Callable[[], None] = lambda: None) -> Path:
    """Make the hidden folder of a checkpoint under `root`, where this process has no other one under way; `shards`:
    ranks are to write into it. Its name is that of no other one. Calls `may_appear` first: see `save`. Raises RunFailed
    if the step already has a checkpoint, which would be another lineage's."""
    may_appear()
    final_folder = root / name_of(step)
    if final_folder.exists():
        raise RunFailed(
            f"checkpoint {str(final_folder)!r} exists already: resume from the newest one, or use a new folder"
        )
    root.mkdir(parents=True, exist_ok=True)
    # What a kill left. This process has no other draft under way, as the caller promises; a learner that was replaced
    # may still write, and then fails at its next file, which is right.
    for draft_folder in root.glob(".draft-*"):
        shutil.rmtree(draft_folder, ignore_errors=True)  # a learner that was replaced may still write into its own
    draft_folder = root / f".draft-{step:08d}-{secrets.token_hex(4)}"  # another process may still write one
    (draft_folder / SHARDS if shards else draft_folder).mkdir(parents=True)
    return draft_folder


# Why a checkpoint appears by one rename, and why so much is synced before it.
#
# The simple way writes the files into the folder of the step. A kill in between leaves a folder that looks like a
# checkpoint and holds half of one. To rename each file by itself does not help: a file is whole then and the set is
# not, and weights of this step may lie beside the optimizer of the one before. So the set is made under a name that no
# reader takes for a checkpoint, and it gets its own name when it is complete.
#
# That is enough for a kill and not for a power loss, after which a disk may have the new name and lack the bytes. So
# each file is synced, then the folder of the draft, then the rename. Only then may the store record the step, and its
# episodes count as trained (law 2). `state.json` lists the same episodes, for a store that has lost its rows. Older
# checkpoints are removed last, so that one of them is whole at any instant.
#
# Two learners may write at once, if one was stopped for so long that another has begun. Each draft has a name of its
# own, and `may_appear` checks right before the rename that this one still leads. In the moment between the two calls
# the file system decides: a rename does not replace a folder that has files.
#
# The price is space for one checkpoint more than are kept, and the time of the digests and syncs. A run does not wait
# for these in most cases, since the write is beside its steps (`agentrl/run/learning/checkpoint_writer.py`).
#
# `tests/learner/test_kills.py` dies at each file operation in turn and goes on from what is there, bit for bit;
# `tests/learner/test_checkpoint.py` has the learner that was followed by another one.
def save(
    draft: Path,
    state: CheckpointState,
    *,
    module: Any,
    model_folder: Path,
    optimizers: Mapping[str, torch.optim.Optimizer],
    parts: Mapping[str, CheckpointPart] = _NO_PARTS,
    own: Mapping[str, Model] = _NO_MODELS,
    entries: Iterable[tuple[str, Any]] | None = None,
    keep: int,
    ranks: int = 1,
    settle: Callable[[], None] = lambda: None,
    progress: Callable[[], None] = lambda: None,
    may_appear: Callable[[], None] = lambda: None,
) -> Path:
    """Write the checkpoint that `begin` began, make it durable, drop all but the newest `keep`. Returns its folder.
    `own` are the models of roles with their own, by role. With the entries that `copied` returned, it may run on any
    thread while the models go on: of these it only reads their names. `settle` waits until the other `ranks` have made
    their files durable.

    It is built in a hidden folder and appears by one rename: a torn write is never read. `progress` is called after
    every file; `may_appear` before the first one and right before the rename, and raises if the folder is no longer
    this process's to write. Raises RunFailed if what another rank wrote is not there."""
    may_appear()
    checkpoints_root, final_folder = draft.parent, draft.parent / name_of(state.step)
    entries = contents(module, optimizers, parts, own) if entries is None else entries
    try:
        copy_description(model_folder, draft)
        for role_name, role_model in own.items():
            of_role(draft, role_name).mkdir(parents=True)
            copy_description(role_model.folder, of_role(draft, role_name))
        progress()
        for entry_name, entry_content in entries:
            if entry_name == SHARDS:
                optimizer_state.write(draft / SHARDS, 0, entry_content, progress)
            else:
                _write(draft / entry_name, entry_content, module, parts.get(entry_name))
            progress()
        # Before `state.json`: a folder with that file is a complete checkpoint to every reader.
        settle()
        _check_shared(draft / SHARDS, range(1, ranks))
        folders.write_state(draft, asdict(state))
        # The digests are of all other files, so they come last. What is synced next includes them, and the folders.
        digests.write(draft, progress)
        for draft_file in draft.rglob("*"):
            _sync(draft_file)
            progress()
        _sync(draft)
    except Exception:
        may_appear()  # if it must not, another process has removed the draft
        raise
    may_appear()
    draft.rename(final_folder)
    _sync(checkpoints_root)
    for old_checkpoint in complete(checkpoints_root)[:-keep]:
        _discard(old_checkpoint)
    return final_folder


def _write(path: Path, state: Any, module: Any, part: CheckpointPart | None) -> None:
    """Write what `contents` gave for a file or folder."""
    if path.name == WEIGHTS:
        write_weights(state, path)
    elif path.name == ADAPTER:
        lora.write(module, state, path)
    elif part is not None:
        path.mkdir()
        save_file(
            {tensor_name: part_tensor.contiguous() for tensor_name, part_tensor in state.items()}, path / part.file
        )
    else:
        torch.save(state, path)


def contents(
    module: Any,
    optimizers: Mapping[str, torch.optim.Optimizer],
    parts: Mapping[str, CheckpointPart],
    own: Mapping[str, Model] = _NO_MODELS,
) -> Iterator[tuple[str, Any]]:
    """The tensors and states of a checkpoint by their file or folder. If the models are sharded, each is gathered when
    the iterator reaches it: every rank goes through all of them, and rank 0 has them, but of SHARDS each rank its
    own."""
    yield WEIGHTS, checkpoint_tensors(module)
    for role_name, role_model in own.items():
        yield str(of_role(Path(), role_name) / WEIGHTS), checkpoint_tensors(role_model.module)
    if lora.has_adapter(module):
        yield ADAPTER, lora.tensors_of(module)
    for part_name, checkpoint_part in parts.items():
        part_tensors = {name: part_tensor.detach() for name, part_tensor in checkpoint_part.tensors().items()}
        yield part_name, gathered(part_tensors)
    # Saved although no pass draws, since what is random in training is switched off: a user's own loss may draw, and
    # a resumed run repeats what an uninterrupted one does.
    random_states = {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    whole_states, sharded_states = optimizer_state.divided(optimizers)
    yield (
        OPTIMIZER,
        {"optimizers": whole_states, "rng": random_states}
        | ({"shards": list(sharded_states)} if sharded_states else {}),
    )
    if sharded_states is not None:
        yield SHARDS, optimizer_state.shards(sharded_states)


def copied(
    module: Any,
    optimizers: Mapping[str, torch.optim.Optimizer],
    parts: Mapping[str, CheckpointPart],
    own: Mapping[str, Model] = _NO_MODELS,
) -> list[tuple[str, Any]]:
    """`contents` in host memory, where no later step changes them. Numbers that were gathered, or came from a GPU, are
    copies already."""
    model_modules = [module, *(role_model.module for role_model in own.values())]
    live_states: list[Any] = [
        *(master_weights.state(model_module) for model_module in model_modules),
        *(dict(checkpoint_part.tensors()) for checkpoint_part in parts.values()),
    ]
    live_states += [optimizer.state_dict()["state"] for optimizer in optimizers.values()]
    # By address and not by name: `contents` gathers, merges and casts, and only its tensors that still share memory
    # with live ones have to be copied. To copy all would take the memory twice.
    live_addresses = {local(live_tensor).untyped_storage().data_ptr() for live_tensor in _tensors(live_states)}
    return [
        (entry_name, _kept(entry_content, live_addresses))
        for entry_name, entry_content in contents(module, optimizers, parts, own)
    ]


def size_bytes(module: Any, optimizers: Mapping[str, torch.optim.Optimizer], own: Mapping[str, Model]) -> int:
    """About what `copied` takes, on all ranks of the machine: weights whole, and what optimizers remember."""
    master_states = [
        *(
            master_weights.state(model_module)
            for model_module in (module, *(role_model.module for role_model in own.values()))
        )
    ]
    return sum(
        state_tensor.nbytes
        for state_tensor in _tensors(
            [master_states, [optimizer.state_dict()["state"] for optimizer in optimizers.values()]]
        )
    )


def _tensors(nested: Any) -> Iterator[Tensor]:
    """All tensors in nested containers, and the parts of those that consist of several."""
    if isinstance(nested, Tensor):
        inner_names = _parts_of(nested)
        yield from (getattr(nested, inner_name) for inner_name in inner_names) if inner_names else [nested]
    elif isinstance(nested, Mapping):
        for nested_item in cast("Mapping[Any, Any]", nested).values():
            yield from _tensors(nested_item)
    elif isinstance(nested, list | tuple):
        for nested_item in cast("Sequence[Any]", nested):
            yield from _tensors(nested_item)


def _kept(entry: Any, places: Set[int]) -> Any:
    """Return an entry in host memory: a tensor is copied if its storage begins at one of the addresses `places`."""
    if isinstance(entry, Tensor):
        if inner_names := _parts_of(entry):  # of several, such as codes and scales
            inner_tensors = {inner_name: _kept(getattr(entry, inner_name), places) for inner_name in inner_names}
            wrapper_tensor = cast("Any", entry)
            return wrapper_tensor.__tensor_unflatten__(
                inner_tensors, wrapper_tensor.__tensor_flatten__()[1], entry.size(), entry.stride()
            )
        return entry.to("cpu", copy=entry.untyped_storage().data_ptr() in places)
    if isinstance(entry, dict):
        return {
            entry_key: _kept(inner_entry, places) for entry_key, inner_entry in cast("dict[Any, Any]", entry).items()
        }
    if isinstance(entry, list | tuple):
        kept_entries = [_kept(inner_entry, places) for inner_entry in cast("Sequence[Any]", entry)]
        return kept_entries if isinstance(entry, list) else tuple(kept_entries)
    return entry


def _parts_of(tensor: Tensor) -> list[str]:
    """The names of what a tensor consists of that has no storage of its own; a sharded one has its shard."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return [] if flatten is None or is_sharded(tensor) else flatten()[0]


def read_state(folder: Path) -> CheckpointState:
    """Read the record of its training from a checkpoint. Raises FormatError if another version wrote it."""
    state_record = folders.read_state(folder)
    return CheckpointState(
        step=state_record["step"],
        previous_step=state_record["previous_step"],
        episodes=tuple(map(tuple, state_record["episodes"])),
    )


def load(
    folder: Path, optimizers: Mapping[str, torch.optim.Optimizer], parts: Mapping[str, CheckpointPart] = _NO_PARTS
) -> CheckpointState:
    """Put a checkpoint's optimizers, `parts` by their folders and random state in place; the weights of policies are
    loaded as those of any model folder. Raises ModelError if it has no such part, FormatError. The caller has compared
    the digests of its files: see `digests.check`."""
    state = read_state(folder)
    # Mapped: a rank reads its own shards alone.
    blob = cast("dict[str, Any]", torch.load(folder / OPTIMIZER, map_location="cpu", weights_only=True, mmap=True))
    for name, part in parts.items():
        part.load(folder / name)
    names = blob.get("shards", ())  # none: one rank wrote it
    shards = optimizer_state.read(folder / SHARDS, names, optimizers) if names else {}
    for name, optimizer in optimizers.items():
        load_state(optimizer, regrouped(blob["optimizers"][name], optimizer), shards.get(name, {}))
    # Last, since loading itself may draw.
    torch.set_rng_state(blob["rng"]["cpu"])
    if blob["rng"]["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(blob["rng"]["cuda"])
    return state


def _check_shared(folder: Path, ranks: range) -> None:
    """Raises RunFailed if what one of these ranks wrote is not there."""
    for rank in ranks:
        if not optimizer_state.file_of(folder, rank).is_file():
            raise RunFailed(
                f"rank {rank} wrote its part of a checkpoint, and rank 0 does not see it in {folder.parent.parent}: "
                "the run's folder has to be on a file system that all ranks share"
            )


def _discard(folder: Path) -> None:
    """Remove a checkpoint; it loses its name before its first file is deleted."""
    # The name is that of a draft, so a kill in the middle leaves a folder that the next `begin` removes.
    doomed_folder = folder.with_name(f".draft-{folder.name}")
    folder.rename(doomed_folder)
    shutil.rmtree(doomed_folder)


def _sync(path: Path) -> None:
    """Make a file's content, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
