"""Images as a vision tower reads them, through the processor of transformers: the same for engine and learner.

Never knows tokens or weights.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch and transformers leave parts of their signatures untyped)

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

import torch
from PIL import Image as Pillow
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agentrl.errors import ModelError, first_line
from agentrl.tokens.images import Image

_DECODERS: Final = ("PNG", "JPEG", "WEBP")  # Pillow has many more, and these bytes come from anywhere


class ImagePatches:
    """The image processor of a model folder, in Pillow's arithmetic wherever it runs. Raises ModelError for a folder
    without one."""

    def __init__(self, folder: Path) -> None:
        try:
            # The one in Pillow's arithmetic: torchvision's resizing rounds otherwise, and engine and learner would
            # see two images.
            self._processor: Any = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            error_line = first_line(error)
            raise ModelError(f"cannot read the image processor of {str(folder)!r}: {error_line}") from error

    def __call__(self, image: Image) -> tuple[Tensor, Tensor]:
        """Patches [N, numbers of one] and their grid [1, 3]: time, rows, columns. Raises ValueError for bytes that
        cannot be decoded."""
        try:
            opened_image = Pillow.open(io.BytesIO(image.data), formats=_DECODERS)
            # The header that was parsed for counting tokens and the decoder may disagree about a forged file; then
            # tokens and patches would not match.
            if opened_image.size != (image.width, image.height):
                raise ValueError(f"its sizes are {opened_image.size} and {(image.width, image.height)}")
            rgb_image = opened_image.convert("RGB")
        except Exception as error:  # decoders raise of many kinds
            raise ValueError(f"image {image.digest[:12]} cannot be decoded: {error}") from error
        processor_output = self._processor(images=[rgb_image], return_tensors="pt")
        return processor_output["pixel_values"].float(), torch.as_tensor(processor_output["image_grid_thw"])
