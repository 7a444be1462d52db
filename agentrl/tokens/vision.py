"""How a vision-language model lays out images among its tokens: how many tokens each takes, and where they stand.

Read from a model folder's config.json and the settings of its image processor, without torch, so that renderer, engine
and learner agree to the token. Knows the layout of Qwen2-VL and Qwen2.5-VL: an image becomes patches of `patch` pixels
a side, of which `merge` by `merge` are a token; its size is first brought to whole tokens. Positions have three
coordinates: time, row, column (Wang et al. 2024, "Qwen2-VL", section 2.1): those of a text's tokens are equal, an image
is a plane in them, and what follows it goes on after its longer side.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agentrl.errors import ModelError
from agentrl.tokens import images
from agentrl.tokens.images import Image

FAMILIES: Final = ("qwen2_vl", "qwen2_5_vl")
"""The values of `model_type` in config.json whose images are known here."""

TOWER_PREFIX: Final = "visual."
"""What the names of the vision tower's weights begin with in a checkpoint."""

_LONGEST: Final = 200  # times its shorter side: beyond, their processor refuses an image


@dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """`placeholder` is the id that a template writes for an image. An image is scaled to at least `least` and at most
    `most` pixels."""

    placeholder: int
    patch: int
    merge: int
    least: int
    most: int

    def grid(self, image: Image) -> tuple[int, int]:
        """Rows and columns of an image's tokens. Raises ValueError for one that is too long and narrow."""
        pixel_height, pixel_width, side = image.height, image.width, self.patch * self.merge
        if max(pixel_height, pixel_width) > _LONGEST * min(pixel_height, pixel_width):
            raise ValueError(
                f"an image of {pixel_width} x {pixel_height} pixels: no side may be {_LONGEST} times the other"
            )
        # Qwen2-VL's own `smart_resize`, to the rounding: one token more or fewer than the processor makes, and the
        # prompt does not fit its image (`test_an_image_has_as_many_tokens_as_transformers_gives_it`).
        row_count, column_count = round(pixel_height / side), round(pixel_width / side)
        if row_count * column_count * side**2 > self.most:
            shrink_factor = math.sqrt(pixel_height * pixel_width / self.most)
            row_count = max(1, math.floor(pixel_height / shrink_factor / side))
            column_count = max(1, math.floor(pixel_width / shrink_factor / side))
        elif row_count * column_count * side**2 < self.least:
            stretch_factor = math.sqrt(self.least / (pixel_height * pixel_width))
            row_count = math.ceil(pixel_height * stretch_factor / side)
            column_count = math.ceil(pixel_width * stretch_factor / side)
        return row_count, column_count

    def tokens(self, image: Image) -> int:
        """How many tokens an image takes. Raises ValueError as `grid`."""
        row_count, column_count = self.grid(image)
        return row_count * column_count

    def positions(self, context: Sequence[int], known: Mapping[int, Image]) -> list[tuple[int, int, int]]:
        """Time, row and column of each token of a context. Raises ValueError if an image is not `known`, or is not
        there with all its tokens, once in a row."""
        positions, consumed_tokens, next_position = list[tuple[int, int, int]](), 0, 0
        for image_token, run_start, run_stop in (*images.runs(context), (0, len(context), 0)):
            positions += (
                (position, position, position)
                for position in range(next_position, next_position + run_start - consumed_tokens)
            )
            next_position, consumed_tokens = next_position + run_start - consumed_tokens, run_stop
            if not image_token:
                break
            if image_token not in known:
                raise ValueError(f"there is no image for token {image_token}")
            rows, columns = self.grid(known[image_token])
            if run_stop - run_start != rows * columns:
                raise ValueError(
                    f"the image at token {run_start} has {run_stop - run_start} tokens, not {rows} x {columns}"
                )
            positions += (
                (next_position, next_position + token_row, next_position + token_column)
                for token_row in range(rows)
                for token_column in range(columns)
            )
            # Text goes on behind the longer side, so that no position is used twice and none is far from the image.
            next_position += max(rows, columns)
        return positions


def read_vision(folder: Path) -> Vision | None:
    """How the model of a folder reads images; None if it reads none, or in a way that is not known here. Raises
    ModelError for settings that are missing or contradict each other."""
    model_config = _read(folder / "config.json")
    if "vision_config" not in model_config or model_config.get("model_type") not in FAMILIES:
        return None
    vision_config: dict[str, Any] = model_config["vision_config"]
    processor = _read(folder / "preprocessor_config.json") or _read(folder / "processor_config.json").get(
        "image_processor"
    )
    if not processor:
        correction = "save its processor there with save_pretrained"
        raise ModelError(f"model folder {str(folder)!r} has no preprocessor_config.json: {correction}")
    size_limits: dict[str, Any] = processor.get("size") or {}
    vision = Vision(
        placeholder=int(model_config["image_token_id"]),
        patch=int(processor.get("patch_size", 14)),
        merge=int(processor.get("merge_size", 2)),
        least=int(processor.get("min_pixels") or size_limits.get("shortest_edge") or 56 * 56),
        most=int(processor.get("max_pixels") or size_limits.get("longest_edge") or 28 * 28 * 1280),
    )
    configured_sizes = int(vision_config.get("patch_size", 14)), int(vision_config.get("spatial_merge_size", 2))
    if configured_sizes != (vision.patch, vision.merge):
        raise ModelError(
            f"{str(folder)!r}: the image processor has patch_size and merge_size {vision.patch}, {vision.merge}, and "
            f"config.json {configured_sizes[0]}, {configured_sizes[1]}: they must be the same"
        )
    return vision


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
