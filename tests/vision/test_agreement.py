"""Engine, learner and transformers compute the same of contexts with images: log-probs and gradients."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from agentrl.algos.algorithm import Algorithm
from agentrl.algos.grpo import GRPO
from agentrl.engine.embedded.architecture import read_architecture
from agentrl.engine.embedded.batching import Batcher, BatchRequest, Emission, ShownImages
from agentrl.engine.embedded.model import EmbeddedModel, KVStore, read_weights
from agentrl.engine.embedded.vision_tower import VisionTower
from agentrl.learner.data.prefix_trees import packs
from agentrl.learner.data.rows import Row
from agentrl.learner.model.policy import PolicyModel
from agentrl.learner.weight_export import export_weights
from agentrl.records import SamplingParams
from agentrl.tokens import images
from agentrl.tokens.image_patches import ImagePatches
from agentrl.tokens.images import Image
from agentrl.tokens.vision import Vision, read_vision
from tests.parts.tiny_vision import make_tiny_vision

from .test_vision import picture

FAMILIES = ("qwen2_vl", "qwen2_5_vl")


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision(tmp_path_factory.mktemp("vision") / "model", family=request.param)


def vision_of(folder: Path) -> Vision:
    vision = read_vision(folder)
    assert vision is not None
    return vision


def context(vision: Vision, *parts: int | Image) -> list[int]:
    """Tokens, with those of images in their places."""
    return [id for part in parts for id in ([part.token] * vision.tokens(part) if isinstance(part, Image) else [part])]


def reference(folder: Path, model: Any, token_ids: list[int], known: dict[int, Image]) -> Tensor:
    """Log-probs [T, V] by one forward pass of transformers, which gets what its processor would give it."""
    vision, patches = vision_of(folder), ImagePatches(folder)
    placed = torch.tensor([images.placed(token_ids, vision.placeholder)])
    runs = [known[token] for token, _, _ in images.runs(token_ids)]
    values, grids = (torch.cat(parts) for parts in zip(*map(patches, runs), strict=True))
    kinds = torch.tensor([[int(token >= images.FIRST) for token in token_ids]])
    found = model(input_ids=placed, pixel_values=values, image_grid_thw=grids, mm_token_type_ids=kinds)
    return found.logits[0].float().log_softmax(-1)


class Engine:
    """The embedded engine's batcher, without its server."""

    def __init__(self, folder: Path, length: int = 256) -> None:
        self.architecture = read_architecture(folder)
        weights = read_weights(folder)
        model = EmbeddedModel(self.architecture, weights, length=length, tower=VisionTower(folder))
        self.batcher = Batcher(model, KVStore(self.architecture, 6, length), max_batch=4, seed=0, pass_tokens=16)

    def ask(self, id: str, token_ids: list[int], known: dict[int, Image], tokens: int = 12) -> list[Emission]:
        vision, found = self.architecture.vision, list[Emission]()
        assert vision is not None
        shown = ShownImages(token_ids, known, vision) if known else None
        request = BatchRequest(
            id=id,
            tokens=[token if token < images.FIRST else images.FIRST - 1 - token for token in token_ids],
            sampling=SamplingParams(max_tokens=tokens),
            sink=found.append,
            shown=shown,
        )
        self.batcher.submit(request)
        return found

    def run(self) -> None:
        while self.batcher.busy:
            self.batcher.step()


def joined(emissions: list[Emission]) -> tuple[list[int], list[float]]:
    return [id for one in emissions for id in one.token_ids], [value for one in emissions for value in one.logprobs]


def row(token_ids: list[int], known: dict[int, Image], first: int) -> Row:
    """A row whose tokens from `first` on are scored."""
    place_S = torch.arange(first, len(token_ids))
    columns = {"behaviour": torch.zeros(len(place_S)), "weight": torch.ones(len(place_S))}
    algo: Algorithm = GRPO()
    shown = {image.token: image for image in images.shown(token_ids, known)}
    return Row(
        group_id=0,
        episode_id=0,
        algo=algo,
        token_ids=tuple(token_ids),
        place_S=place_S,
        columns=columns,
        images=shown,
    )


def test_engine_learner_and_transformers_agree_over_turns_caches_and_siblings(folder: Path) -> None:
    """Two siblings share a prompt with an image, one is shown another later; a stranger has another image of the same
    size in the same place, which no cache may take for the first one; and a text runs beside them."""
    vision, model = vision_of(folder), AutoModelForImageTextToText.from_pretrained(folder).eval()
    one, other, same_size = picture(24, 16), picture(8, 40, seed=1), picture(24, 16, seed=2)
    known = {image.token: image for image in (one, other, same_size)}
    engine = Engine(folder)
    prompt = context(vision, 20, 21, one, *range(30, 50))
    strange = context(vision, 20, 21, same_size, *range(30, 50))
    asked = {"a": prompt, "b": prompt, "stranger": strange, "text": list(range(20, 60))}
    found = {id: engine.ask(id, ids, {} if id == "text" else known) for id, ids in asked.items()}
    engine.run()
    sampled = {id: joined(emissions) for id, emissions in found.items()}
    later = prompt + sampled["b"][0] + context(vision, 7, other, 6, one, 8)
    asked["later"] = later
    found["later"] = engine.ask("later", later, known)
    engine.run()
    sampled["later"] = joined(found["later"])
    assert engine.batcher.counters.prefix_hits > len(prompt), "siblings and turns share what they have in common"
    rows: list[Row] = []
    for id, (ids, logprobs) in sampled.items():
        whole = asked[id] + ids
        if id == "text":
            expected_TV = model(input_ids=torch.tensor([whole])).logits[0].float().log_softmax(-1)
        else:
            expected_TV = reference(folder, model, whole, known)
            rows.append(row(whole, known, len(asked[id])))
        expected = expected_TV[torch.arange(len(asked[id]) - 1, len(whole) - 1), torch.tensor(ids)]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
    policy = PolicyModel(folder)
    assert policy.obstacle is None
    (pack,) = packs([rows], 10_000)
    alone = sum(len(one.token_ids) for one in rows)
    assert len(pack.token_ids_N) < alone - len(prompt), "shared nodes are computed once"
    learned = policy.logprobs(pack, temperature=1.0)[0]
    of_engine = torch.cat([torch.tensor(sampled[id][1]) for id in sampled if id != "text"])
    torch.testing.assert_close(learned, of_engine, atol=1e-4, rtol=0)


@pytest.mark.parametrize("budget", [10_000, 60])
def test_the_gradient_is_that_of_transformers(folder: Path, budget: int) -> None:
    """Over a tree of three rows in one pass, and in several; through the images' tokens into the vision tower."""
    vision, model = vision_of(folder), AutoModelForImageTextToText.from_pretrained(folder).eval()
    one, other = picture(24, 16), picture(16, 16, seed=1)
    known = {image.token: image for image in (one, other)}
    prompt = context(vision, 20, one, 21, 22)
    rows = [
        row(prompt + list(tail), known, len(prompt))
        for tail in ((60, 61, 62), (60, 61, 90, 91), (vision.placeholder, 99))
    ]
    rows.append(row(context(vision, 20, other, 21, 22, 60, 61), known, len(prompt) - 2))
    total = torch.zeros(())
    for at in rows:
        places, ids = at.place_S, torch.tensor(at.token_ids)
        total = total + reference_with_text(folder, model, at, known)[places - 1, ids[places]].sum()
    total.backward()
    policy = PolicyModel(folder)
    for pack in packs([rows], budget):
        policy.logprobs(pack, temperature=1.0)[0].sum().backward()
    expected = {name: one.grad for name, one in model.named_parameters()}
    moved = 0
    for name, parameter in policy.module.named_parameters():
        assert (parameter.grad is None) == (expected[name] is None), name
        if parameter.grad is not None:
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(parameter.grad, expected[name], atol=1e-4 * max(1.0, scale), rtol=1e-4)
            moved += "visual" in name and scale > 1e-3
    assert moved > 10, "the vision tower learns"


def reference_with_text(folder: Path, model: Any, row: Row, known: dict[int, Image]) -> Tensor:
    """As `reference`, for rows in which the policy wrote a placeholder itself: to transformers that is an image without
    its features, so it gets what goes into the decoder."""
    vision, ids = vision_of(folder), list(row.token_ids)
    if vision.placeholder not in ids:
        return reference(folder, model, ids, known)
    patches = ImagePatches(folder)
    embedded = model.get_input_embeddings()(torch.tensor(images.placed(ids, vision.placeholder)))
    for token, start, stop in images.runs(ids):
        shown = model.model.get_image_features(*patches(known[token])).pooler_output[0]
        embedded = torch.cat([embedded[:start], shown, embedded[stop:]])
    positions = torch.tensor(vision.positions(ids, known)).T[:, None]
    return model(inputs_embeds=embedded[None], position_ids=positions).logits[0].float().log_softmax(-1)


def test_new_weights_reach_the_vision_tower_and_old_images_are_computed_anew(folder: Path, tmp_path: Path) -> None:
    other_folder = make_tiny_vision(tmp_path / "other", family=read_family(folder), seed=1)
    vision, one = vision_of(folder), picture(24, 16)
    known, prompt = {one.token: one}, context(vision_of(folder), 20, one, 21)
    engine = Engine(folder)
    engine.ask("before", prompt, known)
    engine.run()
    module = AutoModelForImageTextToText.from_pretrained(other_folder).eval()
    written = export_weights(module, tmp_path / "weights.safetensors")
    engine.batcher.load(read_weights(written.path), 1)
    found = engine.ask("after", prompt, known)
    engine.run()
    ids, logprobs = joined(found)
    expected = reference(folder, module, prompt + ids, known)[
        torch.arange(len(prompt) - 1, len(prompt) + len(ids) - 1), torch.tensor(ids)
    ]
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-4, rtol=0)
    assert vision.tokens(one) == 6


def read_family(folder: Path) -> str:
    import json

    return json.loads((folder / "config.json").read_text())["model_type"]
