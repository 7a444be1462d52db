"""A pass whose nodes are tokens of images: what goes into the decoder in their places, and where every node stands.

Gradients go through the images' tokens into the vision tower. Never knows losses, nor what a row was trained for.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.learner.data.prefix_trees import Pack
from agentrl.tokens import images
from agentrl.tokens.image_patches import ImagePatches
from agentrl.tokens.vision import Vision


class ImageInputs:
    """The images of a vision-language model's passes, in the layout of its `vision`."""

    def __init__(self, folder: Path, vision: Vision) -> None:
        self._vision, self._patches = vision, ImagePatches(folder)

    def of(self, module: Any, pack: Pack) -> dict[str, Tensor]:
        """Make the model's inputs that take the place of `input_ids` and `position_ids`; empty for a pass without
        images. Raises ValueError for an image that cannot be decoded, or is not there with all its tokens."""
        ids_N = pack.token_ids_N
        if not len(pack.images):
            return {}
        image_spans = list(images.runs(ids_N.tolist()))
        shown_images = [pack.images[token] for token in dict.fromkeys(token for token, _, _ in image_spans)]
        read_images = [self._patches(shown_image) for shown_image in shown_images]
        patches, patch_grid = (
            torch.cat(image_parts).to(ids_N.device) for image_parts in zip(*read_images, strict=True)
        )
        # Each distinct image goes through the tower once, however many rows and turns show it: a screenshot in twenty
        # turns is one forward and one backward pass.
        image_tokens = module.model.get_image_features(patches, patch_grid).pooler_output
        states_by_token = {
            shown_image.token: tokens_NH for shown_image, tokens_NH in zip(shown_images, image_tokens, strict=True)
        }
        shown_NH = torch.cat([states_by_token[image_token] for image_token, _, _ in image_spans])
        places_N = torch.cat([torch.arange(start, stop) for _, start, stop in image_spans]).to(ids_N.device)
        # Numbers of images lie beyond the embedding: looked up as they are, they would be out of its range.
        text_N = ids_N.masked_fill(ids_N >= images.FIRST, self._vision.placeholder)
        embedded_NH = module.get_input_embeddings()(text_N)
        embedded_NH = embedded_NH.index_copy(0, places_N, shown_NH.to(embedded_NH.dtype))
        return {"inputs_embeds": embedded_NH[None], "position_ids": self._positions(pack)[:, None]}

    def _positions(self, pack: Pack) -> Tensor:
        """Time, row and column of each node [3, N]: those that it has in a row that goes through it."""
        positions_3N = torch.zeros(3, len(pack.token_ids_N), dtype=torch.long)
        for branch in pack.branches:
            positions = self._vision.positions(pack.token_ids_N[branch.path].tolist(), pack.images)
            positions_3N[:, branch.start : branch.stop] = torch.tensor(positions).T[:, branch.start - branch.stop :]
        return positions_3N.to(pack.token_ids_N.device)
