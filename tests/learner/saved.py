"""What checkpoints hold, whoever wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from agentrl.learner.learner import Learner


def same(one: Learner, other: Learner, tmp: Path) -> bool:
    """Whether two learners have the same bits in all that a checkpoint keeps."""
    files = [learner.save(tmp / str(number)) for number, learner in enumerate((one, other))]
    for file in sorted(path.relative_to(files[0]) for path in files[0].rglob("*.safetensors")):
        mine, theirs = (load_file(folder / file) for folder in files)
        if mine.keys() != theirs.keys() or not all(torch.equal(mine[name], theirs[name]) for name in mine):
            return False
    mine, theirs = (moments(folder) for folder in files)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def moments(folder: Path) -> dict[str, torch.Tensor]:
    """What the optimizers of a checkpoint remember, put together from the files of all ranks."""
    states = torch.load(folder / "optimizer.pt")["optimizers"].items()
    each = ((name, at, own) for name, state in states for at, own in state["state"].items())
    found = {f"{name}.{at}.{key}": value for name, at, own in each for key, value in own.items()}
    pieces: dict[str, list[tuple[list[int], torch.Tensor]]] = {}
    for file in folder.glob("optimizer/*"):
        with safe_open(file, "pt") as opened:
            starts = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
            for name in starts:
                pieces.setdefault(name, []).append((starts[name]["saved_offsets"], opened.get_tensor(name)))
    for name, parts in pieces.items():
        ends = [[at + n for at, n in zip(start, part.shape, strict=True)] for start, part in parts]
        found[name] = torch.full([max(end) for end in zip(*ends, strict=True)], torch.nan)
        for (start, part), end in zip(parts, ends, strict=True):
            place = found[name][tuple(map(slice, start, end))]
            assert place.isnan().all(), "no two ranks have the same"
            place.copy_(part)
        assert not found[name].isnan().any()
    return found
