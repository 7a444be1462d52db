"""The learner's weights on their way out: one safetensors file, a copy for a sender, hashes that tell two apart.

Owns names, completeness and atomicity of the file. Never knows who reads it, nor which version it becomes.

`WeightSnapshot` stays the same while the learner goes on with its next step. `take` gathers a sharded model whole
before any engine is contacted, and leaves no collective of the learner open on any rank: if a sender waited for engines
in the middle of a gather, while another rank waits for it in the next one, both would wait for ever.

`hash_of`: equal bits, and only these, give equal hashes (but for one chance in 2^32 a tensor). It is computed where the
tensor lies, in one reading of it, with integers alone: the order of a sum does not matter, so that a GPU and any number
of threads find the same. It is no defence against somebody who wants two tensors to look alike.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from agentrl.config.train import Train
from agentrl.engine.weight_sync import fingerprints as fingerprint
from agentrl.errors import RunFailed
from agentrl.learner.model import lora
from agentrl.learner.optimizers.master_weights import masters
from agentrl.learner.parallel.collectives import named
from agentrl.learner.parallel.fsdp import gathered
from agentrl.learner.parallel.fsdp import whole as gather

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFile:
    """A written file: `sha256` of its bytes, `names` of its tensors as a Hugging Face folder has them, size, and
    fingerprints of its tensors as an engine of the file's dtype has them."""

    path: Path
    sha256: str
    names: tuple[str, ...]
    size_bytes: int
    fingerprints: dict[str, str]


def held(module: Any) -> dict[str, Tensor]:
    """The tensors of a transformers model under its own names, not copied; an adapter is merged into them, and
    masters stand for what is rounded from them. A tied one
    (`lm_head.weight` of a model with tied embeddings) is there once, under its source's name."""
    tied_names = set(module.all_tied_weights_keys)
    model_state = lora.merged(module) | masters(module)
    return {
        tensor_name: model_tensor.detach()
        for tensor_name, model_tensor in model_state.items()
        if tensor_name not in tied_names
    }


def checkpoint_names(module: Any, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """`state` as the model's checkpoint format names and divides it."""
    return {
        tensor_name: model_tensor.contiguous()
        for tensor_name, model_tensor in revert_weight_conversion(module, state).items()
    }


def checkpoint_tensors(module: Any, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The tensors of a transformers model as its checkpoint format has them, on the CPU, cast to `dtype`. Vectors stay
    as they are: they weigh nothing, and engines keep some (a router's biases) in float32 whatever their dtype.

    Every rank of a sharded model takes part, rank 0 gets them."""
    return {
        tensor_name: model_tensor.to(
            "cpu", dtype if model_tensor.is_floating_point() and model_tensor.dim() > 1 else None
        )
        for tensor_name, model_tensor in checkpoint_names(module, gathered(held(module))).items()
    }


def export_weights(
    module: Any, path: Path, *, dtype: torch.dtype | None = None, metadata: Mapping[str, str] | None = None
) -> WeightFile:
    """`write_weights` of a model that is not sharded."""
    return write_weights(checkpoint_tensors(module, dtype), path, dtype=dtype, metadata=metadata)


def write_weights(
    tensors: Mapping[str, Tensor],
    path: Path,
    *,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> WeightFile:
    """Write what `checkpoint_tensors` returned to `path`: the whole file or none, a reader never sees half of one.
    Raises RunFailed if its folder has no room for them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    check_room(path.parent, sum(weight_tensor.nbytes for weight_tensor in tensors.values()))
    # Beside its name, since a rename is atomic within one file system only: shared memory and the temporary folder
    # are two.
    draft_path = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(dict(tensors), draft_path, metadata={"format": "pt", **(metadata or {})})
        with draft_path.open("rb") as draft_file:
            file_digest = hashlib.file_digest(draft_file, "sha256").hexdigest()
        size_bytes = draft_path.stat().st_size
        draft_path.replace(path)
    finally:
        draft_path.unlink(missing_ok=True)
    # From the tensors in memory and not from the file: they are the learner's word, against which the file is judged
    # too (`canary._wrong_in_file`).
    fingerprints = fingerprint.of_tensors(
        {tensor_name: weight_tensor.to(dtype or weight_tensor.dtype) for tensor_name, weight_tensor in tensors.items()}
    )
    return WeightFile(
        path=path, sha256=file_digest, names=tuple(sorted(tensors)), size_bytes=size_bytes, fingerprints=fingerprints
    )


def check_room(folder: Path, size_bytes: int) -> None:
    """Raises RunFailed if so many bytes do not fit. Called before a write: shared memory that overflows kills a writer
    that maps it."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < size_bytes:
        raise RunFailed(
            f"{folder} has {free_bytes >> 20} MiB left, and the weights take {-(-size_bytes >> 20)}: free some, or "
            "name a folder with more room in scratch_dir"
        )


# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch leaves parts of its signatures untyped)


_ROW = 1 << 17  # values that are summed together: they fit a cache
_ROWS = {"cpu": 1}  # at once; elsewhere 128, which keep a GPU busy
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
_ODD = 0x9E3779B1  # about 2^32 over the golden ratio
_MASK = (1 << 32) - 1


@torch.no_grad()
def hash_of(tensor: Tensor) -> str:
    """Eight hexadecimal digits. Every value is multiplied by an odd number of its place, so that one changed bit always
    shows, and so do two values that changed places."""
    flat_tensor = tensor.detach().contiguous().view(-1)
    tensor_words = flat_tensor.view(_WORDS[flat_tensor.element_size()])
    odd_factors = _factors(flat_tensor.device)
    full_count = len(tensor_words) - len(tensor_words) % _ROW
    word_slabs = [
        *tensor_words[:full_count].view(-1, _ROW).split(_ROWS.get(flat_tensor.device.type, 128)),
        tensor_words[full_count:][None],
    ]
    # Integers: their sum is the same in any order, which no sum of floats is on a GPU. The product may overflow;
    # modulo 2^32 it is still a bijection, since the factor is odd.
    row_sums = [
        (word_slab.int() * odd_factors[: word_slab.shape[1]]).sum(1, dtype=torch.int64) for word_slab in word_slabs
    ]
    tensor_hash = len(tensor_words)
    for row_sum in torch.cat(row_sums).tolist():
        tensor_hash = (tensor_hash * _ODD + row_sum) & _MASK
    return f"{tensor_hash:08x}"


@cache
def _factors(device: torch.device) -> Tensor:
    places = torch.arange(_ROW, dtype=torch.int64, device=device)
    return ((places * _ODD) & 0x7FFFFFFF | 1).int()


def circumstances(train: Train) -> dict[str, str | int | bool]:
    """On what the bits of a step depend besides its data and settings: another order of a sum rounds differently."""
    device = torch.device("cuda", train.gpus[0]) if train.gpus else torch.device("cpu")
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "dtype": train.dtype,
        "threads": train.threads,
        "ranks": train.parallel.ranks,
        "compile": train.compile,
        "gradient_checkpointing": train.gradient_checkpointing,
        "logits_mb": train.logits_mb,
    }


# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The facts about a tensor that a receiver needs before it comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class WeightSnapshot:
    """Tensors under the names of the checkpoint format, in a fixed order; each pass over them gives (name, tensor) on
    `device`, wherever they are kept. It has the form of vLLM's WeightSource."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._tensors, self.device = dict(tensors), device

    def metadata(self) -> list[Described]:
        """The tensors of a pass, in its order."""
        return [
            Described(name=tensor_name, dtype=weight_tensor.dtype, shape=tuple(weight_tensor.shape))
            for tensor_name, weight_tensor in self._tensors.items()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for tensor_name, weight_tensor in self._tensors.items():
            yield tensor_name, weight_tensor.to(self.device)

    def fingerprints(self) -> dict[str, str]:
        """See `agentrl.engine.weight_sync.fingerprints`."""
        return fingerprint.of_tensors(self._tensors)

    @property
    def size_bytes(self) -> int:
        return sum(weight_tensor.nbytes for weight_tensor in self._tensors.values())

    @property
    def largest_bytes(self) -> int:
        """The size of its largest tensor."""
        return max((weight_tensor.nbytes for weight_tensor in self._tensors.values()), default=0)


@torch.no_grad()
def take(module: Any, dtype: torch.dtype) -> WeightSnapshot | None:
    """The weights of a transformers model, cast to `dtype`; later steps do not change them.

    If the model is sharded (FSDP2), every rank calls it between two steps, all leave it together, and only rank 0 gets
    the snapshot: all weights in host memory, since one GPU may be too small for them. A model that is not sharded is
    copied on its device: in bfloat16 that takes an eighth of the memory of weights, gradients and Adam."""
    model_state = held(module)
    is_sharded = any(isinstance(model_tensor, DTensor) for model_tensor in model_state.values())
    keeps_weights = not is_sharded or distributed.get_rank() == 0
    device = next(iter(model_state.values())).device
    weights: dict[str, Tensor] = {}
    for tensor_name, model_tensor in model_state.items():
        # Always a copy of what is not sharded: without one, a weight that has the dtype already would be the live
        # tensor, and the next step would change what is being sent.
        cast_tensor = model_tensor.to(
            dtype if model_tensor.is_floating_point() else model_tensor.dtype, copy=not is_sharded
        )
        whole_tensor = gather(cast_tensor, tensor_name)
        if keeps_weights:
            weights[tensor_name] = whole_tensor.to("cpu", copy=True) if is_sharded else whole_tensor
    _settle(device, is_sharded)
    return WeightSnapshot(checkpoint_names(module, weights), device) if keeps_weights else None


def _settle(device: torch.device, sharded: bool) -> None:
    """Wait until this rank has finished copying, and every rank has finished gathering."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if sharded:
        with named("a snapshot's end"):
            # Rank 0 goes on to wait for engines. A rank that is still gathering would wait for rank 0, in a
            # collective that rank 0 has left.
            distributed.barrier()
