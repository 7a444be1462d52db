"""How images lie among tokens, against transformers' own processor and positions."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agentrl.engine.rendering.renderer import Renderer
from agentrl.env.image_parts import png
from agentrl.errors import ModelError
from agentrl.records import Message
from agentrl.tokens import images
from agentrl.tokens.image_patches import ImagePatches
from agentrl.tokens.images import Image
from agentrl.tokens.vision import read_vision
from tests.parts.tiny_vision import make_tiny_vision

SIZES = [(8, 8), (1, 1), (24, 24), (16, 24), (7, 150), (150, 9), (500, 333), (12, 20), (4, 12), (3, 599)]


def picture(height: int, width: int, seed: int = 0) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return images.read(png(pixels))


def message(*parts: str | Image) -> Message:
    """A user's message of texts and images."""
    text, shown = "", []
    for part in parts:
        if isinstance(part, Image):
            shown.append({"at": len(text), "url": part.url})
        else:
            text += part
    return {"role": "user", "content": text, "images": shown}  # type: ignore[typeddict-item]


@pytest.mark.parametrize("settings", [{}, {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16}])
def test_an_image_has_as_many_tokens_as_transformers_gives_it(tmp_path: Path, settings: dict[str, int]) -> None:
    folder = make_tiny_vision(tmp_path / "model")
    if settings:
        given = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, **settings}
        (folder / "preprocessor_config.json").write_text(json.dumps(given))
    vision, patches = read_vision(folder), ImagePatches(folder)
    assert vision is not None
    for height, width in SIZES:
        rows, columns = vision.grid(one := picture(height, width))
        _, grid = patches(one)
        assert grid.tolist() == [[1, 2 * rows, 2 * columns]], (height, width)


def test_the_patches_are_those_of_transformers_and_lies_are_found(tmp_path: Path) -> None:
    folder = make_tiny_vision(tmp_path / "model")
    one = picture(20, 30)
    expected = Qwen2VLImageProcessorPil.from_pretrained(folder)(
        images=[Pillow.open(io.BytesIO(one.data))], return_tensors="pt"
    )
    patches, grid = ImagePatches(folder)(one)
    assert torch.equal(patches, torch.as_tensor(expected["pixel_values"]))
    assert grid.tolist() == torch.as_tensor(expected["image_grid_thw"]).tolist()
    with pytest.raises(ValueError, match="cannot be decoded"):
        ImagePatches(folder)(images.read(one.data[:60]))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_positions_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = make_tiny_vision(tmp_path / "model", family=family)
    vision, model = read_vision(folder), AutoModelForImageTextToText.from_pretrained(folder).model
    assert vision is not None
    one, other = picture(24, 16), picture(8, 40, seed=1)
    ids = [9, 9, *[one.token] * vision.tokens(one), 9, *[other.token] * vision.tokens(other), 9, 9, 9]
    ids += [*[one.token] * vision.tokens(one), 9]
    known = {image.token: image for image in (one, other)}
    grids = torch.tensor([[1, *(2 * n for n in vision.grid(image))] for image in (one, other, one)])
    placed = torch.tensor([images.placed(ids, vision.placeholder)])
    kinds = (placed == vision.placeholder).int()
    expected, _ = model.get_rope_index(placed, image_grid_thw=grids, mm_token_type_ids=kinds)
    assert torch.tensor(vision.positions(ids, known)).T.tolist() == expected[:, 0].tolist()
    with pytest.raises(ValueError, match="the image at token 2 has 5 tokens, not 3 x 2"):
        vision.positions(ids[:2] + ids[3:], known)
    with pytest.raises(ValueError, match="there is no image for token"):
        vision.positions(ids, {one.token: one})


def test_a_prompt_has_the_tokens_of_its_images_in_their_places(tmp_path: Path) -> None:
    folder = make_tiny_vision(tmp_path / "model")
    renderer, vision = Renderer(folder), read_vision(folder)
    assert vision is not None and renderer.no_images == ""
    one, other = picture(24, 16), picture(8, 40, seed=1)
    hostile = "<|image_pad|>"  # ordinary text where a message says it
    ids = renderer.start([message("a" + hostile, one, "b", other, one)])
    runs = [(token, stop - start) for token, start, stop in images.runs(ids)]
    assert runs == [(image.token, vision.tokens(image)) for image in (one, other, one)]
    text = renderer.start([message(f"a{hostile}#b##")])
    drawn = [id for id in ids if id < images.FIRST]
    frame = [renderer.start([message("x")])[0]]  # <|im_start|>, the first of all
    assert drawn[0] == frame[0] and vision.placeholder not in drawn
    marks = [id for id in drawn if id not in text]
    assert len(marks) == 6, "the start and the end of each"
    grown = renderer.extend(text[-1:], [message(other, "c")])
    assert [token for token, _, _ in images.runs(grown)] == [other.token]
    assert ids == renderer.start([message("a" + hostile, one, "b", other, one)])


def test_law_3_a_raw_prompt_with_the_placeholder_of_an_image_is_refused_before_an_engine_refuses_it(
    tmp_path: Path,
) -> None:
    """An engine's refusal is infrastructure, and an agent program that the policy wrote could ask for it."""
    renderer = Renderer(make_tiny_vision(tmp_path / "model"))
    raw: Any = [{"role": "user", "content": "a<|image_pad|>b", "raw": True}]
    for render in (renderer.start, lambda messages: renderer.extend((), messages)):
        with pytest.raises(ModelError, match="1 placeholders for 0 images"):
            render(raw)
    assert renderer.start([{**raw[0], "content": "a<|im_end|>b"}])


def test_what_cannot_be_shown_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = make_tiny_vision(tmp_path / "model")
    with pytest.raises(ModelError, match="no side may be 200 times the other: scale or crop it"):
        Renderer(folder).start([message(picture(1, 201))])
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content if m.content is string else 'x' }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    with pytest.raises(ModelError, match="writes 0 placeholders for 1 images"):
        Renderer(folder).start([message(picture(8, 8))])
    with pytest.raises(ModelError, match="demonstrations with images"):
        Renderer(folder).demonstrated([message(picture(8, 8)), {"role": "assistant", "content": "a"}])


@pytest.mark.medium
def test_a_folder_whose_images_are_not_known_reads_none_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_vision(tmp_path / "model")
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    for change in ({"model_type": "mllama"}, {"vision_config": None}):
        path.write_text(json.dumps({name: value for name, value in {**whole, **change}.items() if value is not None}))
        assert read_vision(folder) is None, "texts are trained all the same"
        with pytest.raises(ModelError, match=r"reads no images that are known here .*qwen2_vl, qwen2_5_vl"):
            Renderer(folder).start([message(picture(8, 8))])
        assert Renderer(folder).start([message("a")])
    path.write_text(json.dumps({**whole, "vision_config": {"patch_size": 7}}))
    with pytest.raises(ModelError, match=r"patch_size and merge_size 4, 2, and config.json 7, 2"):
        read_vision(folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ModelError, match=r"has no preprocessor_config.json: save its processor"):
        read_vision(folder)
