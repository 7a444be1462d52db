"""The vision tower of the embedded engine: transformers' own, with replaceable weights. Float32.

Owns what an image's tokens are under the weights of the moment; each image is computed once for them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from agentrl.errors import ModelError
from agentrl.tokens.image_patches import ImagePatches
from agentrl.tokens.images import Image
from agentrl.tokens.vision import TOWER_PREFIX

_TOWERS: Final[Mapping[str, Any]] = {
    "qwen2_vl": Qwen2VisionTransformerPretrainedModel,
    "qwen2_5_vl": Qwen2_5_VisionTransformerPretrainedModel,
}
_KEPT = 256  # images whose tokens are kept


class VisionTower:
    """Images to the inputs of a decoder's first layer. Without weights until `load`."""

    def __init__(self, folder: Path) -> None:
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        # transformers would choose by what is installed, and another kernel rounds otherwise: the canary compares
        # these numbers with the learner's.
        config.vision_config._attn_implementation = "sdpa"
        self._module: Any = _TOWERS[config.model_type]._from_config(config.vision_config, dtype=torch.float32).eval()
        self._patches = ImagePatches(folder)
        self._known = dict[str, Tensor]()

    def check(self, weights: Mapping[str, Tensor]) -> None:
        """Raise ModelError unless these are the tower's weights, under their names without `TOWER_PREFIX`."""
        expected_weights = self._module.state_dict()
        if odd := sorted(expected_weights.keys() ^ weights.keys()):
            problem = "is missing" if odd[0] in expected_weights else "is unknown"
            raise ModelError(f"weight {TOWER_PREFIX + odd[0]!r} {problem} ({len(odd)} such) for this architecture")
        for weight_name, tensor in weights.items():
            if tensor.shape != expected_weights[weight_name].shape:
                shapes = f"{tuple(tensor.shape)}, expected {tuple(expected_weights[weight_name].shape)}"
                raise ModelError(f"weight {TOWER_PREFIX + weight_name!r} has shape {shapes}")
            if not bool(torch.isfinite(tensor).all()):
                raise ModelError(f"weight {TOWER_PREFIX + weight_name!r} holds values that are not finite")

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take weights that were checked."""
        self._module.load_state_dict(dict(weights))
        self._known.clear()

    @torch.inference_mode()
    def __call__(self, image: Image) -> Tensor:
        """An image's tokens [N, hidden] under the weights of now. Raises ValueError for bytes that cannot be
        decoded."""
        if image.digest not in self._known:
            while len(self._known) >= _KEPT:
                # The oldest goes (dictionaries keep their order). A screenshot of an early turn is in every later
                # prompt, but its keys and values are cached by then; what is lost is computed again.
                del self._known[next(iter(self._known))]
            patches, grid = self._patches(image)
            self._known[image.digest] = self._module(patches, grid_thw=grid).pooler_output
        return self._known[image.digest]

    def try_decoding(self, image: Image) -> None:
        """Raise ValueError for an image that cannot be decoded."""
        self._patches(image)
